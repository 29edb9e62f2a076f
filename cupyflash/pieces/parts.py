"""The parts of a call's arrays that a piece reads, and the call of the piece."""

from __future__ import annotations

from typing import Any

from ..problem.call import Array, Call, changed
from .schedule import Piece


def part(array: Array, positions: range) -> Array:
    """Return the rows at some positions of an array (..., L, D)."""
    rows: Array = array[..., positions.start : positions.stop, :]
    return rows


def part_of_statistic(array: Array, positions: range) -> Array:
    """Return the numbers at some positions of an array (..., L)."""
    rows: Array = array[..., positions.start : positions.stop]
    return rows


def part_of_pairs(array: Array, rows: range, keys: range) -> Array:
    """Return the part of an array that broadcasts to (..., Lq, Lk) for some queries and keys."""
    index: tuple[Any, ...] = (...,)
    for axis, positions in ((-2, rows), (-1, keys)):
        if array.ndim >= -axis:
            repeated = array.shape[axis] == 1
            index += (slice(None) if repeated else slice(positions.start, positions.stop),)
    view: Array = array[index]
    return view


def call_of(whole: Call, piece: Piece, q: Array, k: Array, v: Array, bias: Array | None) -> Call:
    """Return the call of a piece, given its parts of the arrays of the whole call.

    Its positions and lengths, as masks, scores and dropout see them, are those of the whole call.
    Without keys there is nothing but the sink.
    """
    problem = changed(
        whole.problem,
        len_q=len(piece.rows),
        len_k=len(piece.keys),
        origin_q=piece.rows.start,
        origin_k=piece.keys.start,
        whole=(whole.problem.len_q, whole.problem.len_k),
    )
    return changed(
        whole,
        problem=problem,
        q=q,
        k=k,
        v=v,
        bias=bias if piece.keys else None,
        score_mod=whole.score_mod if piece.keys else None,
        mask=whole.mask if piece.masked else None,
        sink=whole.sink if piece.first else None,
    )
