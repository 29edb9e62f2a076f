"""The parts of a call's arrays that a piece reads, and the call of the piece."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..problem.call import Array, Call, Problem, changed
from ..problem.positions import whole as entire
from .schedule import Piece


def part(array: Array, positions: range) -> Array:
    """Return the rows at some positions of an array (..., L, D)."""
    rows: Array = array[..., positions.start : positions.stop, :]
    return rows


def part_of_statistic(array: Array, positions: range) -> Array:
    """Return the numbers at some positions of an array (..., L)."""
    rows: Array = array[..., positions.start : positions.stop]
    return rows


def some_heads(array: Array, heads: range) -> Array:
    """Return some heads of an array (..., H, L, D)."""
    made: Array = array[..., heads.start : heads.stop, :, :]
    return made


def some_heads_of_statistic(array: Array, heads: range) -> Array:
    """Return the numbers of some heads of an array (..., H, L)."""
    made: Array = array[..., heads.start : heads.stop, :]
    return made


def part_of_pairs(array: Array, rows: range, keys: range) -> Array:
    """Return the part of an array that broadcasts to (..., Lq, Lk) for some queries and keys."""
    index: tuple[Any, ...] = (...,)
    for axis, positions in ((-2, rows), (-1, keys)):
        if array.ndim >= -axis:
            repeated = array.shape[axis] == 1
            index += (slice(None) if repeated else slice(positions.start, positions.stop),)
    view: Array = array[index]
    return view


def part_of_bias(whole: Call, array: Array, piece: Piece, rows: range, keys: range) -> Array:
    """Return the part for a piece of a bias, or of an array like it.

    `rows` and `keys` say where the piece's queries and keys are in an array of the bias. For packed
    sequences, every bias has all positions of the longest one.
    """
    problem = whole.problem
    if not problem.packed:
        return part_of_pairs(array, rows, keys)
    several = array.ndim > 3 and array.shape[0] > 1
    first, last = piece.sequences.start, piece.sequences.stop
    if last - first > 1:
        lengths = (x[first:last].max() for x in (problem.len_q, problem.len_k))
        some = array[first:last] if several else array
        return part_of_pairs(some, *(range(int(n)) for n in lengths))
    one = array[first if several else 0] if array.ndim > 3 else array
    local = (
        range(positions.start - int(starts[first]), positions.stop - int(starts[first]))
        for positions, starts in ((piece.rows, problem.start_q), (piece.keys, problem.start_k))
    )
    return part_of_pairs(one, *local)


def call_of(
    whole: Call,
    piece: Piece,
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    plain: bool = False,
    beside: bool = False,
) -> Call:
    """Return the call of a piece, given its parts of the arrays of the whole call.

    Its positions and lengths, as masks, scores and dropout see them, are those of the whole call;
    or, if it is `plain`, those of its own arrays. Without keys there is nothing but the sink.
    `beside` says whether messages travel while it is computed.
    """
    problem = _plain(whole.problem, q, k) if plain else _problem(whole.problem, piece)
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
        offsets=_offsets(problem, q, k) if problem.packed else None,
        beside=beside,
    )


def problem_of_heads(whole: Problem, kv: range) -> Problem:
    """Return the problem of some key-value heads, and of the queries that share them."""
    group = whole.heads // whole.heads_kv
    return changed(
        whole,
        heads=group * len(kv),
        heads_kv=len(kv),
        origin_h=whole.origin_h + group * kv.start,
        whole=entire(whole),
    )


def _offsets(problem: Problem, q: Array, k: Array) -> tuple[Array, Array]:
    """Return the offsets of packed sequences, in host memory."""
    first, second = (
        np.append(starts, x.shape[-2]).astype(np.int64)
        for starts, x in ((problem.start_q, q), (problem.start_k, k))
    )
    return first, second


def _plain(whole: Problem, q: Array, k: Array) -> Problem:
    """Return the problem of a piece whose positions are counted from 0."""
    sizes = {"len_q": q.shape[-2], "len_k": k.shape[-2]}
    outer = None if whole.whole is None else changed(whole.whole, **sizes)
    return changed(whole, **sizes, whole=outer)


def _problem(whole: Problem, piece: Piece) -> Problem:
    """Return the problem of a piece: that of packed sequences only if it has several of them."""
    if not whole.packed:
        return changed(
            whole,
            len_q=len(piece.rows),
            len_k=len(piece.keys),
            origin_q=piece.rows.start,
            origin_k=piece.keys.start,
            whole=entire(whole),
        )
    first, last = piece.sequences.start, piece.sequences.stop
    if last - first > 1:
        return changed(
            whole,
            lead=(last - first,),
            len_q=whole.len_q[first:last],
            len_k=whole.len_k[first:last],
            start_q=whole.start_q[first:last] - piece.rows.start,
            start_k=whole.start_k[first:last] - piece.keys.start,
            origin_b=first,
            whole=entire(whole),
        )
    starts = (0, 0) if last == first else (int(whole.start_q[first]), int(whole.start_k[first]))
    return changed(
        whole,
        lead=(),
        packed=False,
        len_q=len(piece.rows),
        len_k=len(piece.keys),
        start_q=0,
        start_k=0,
        origin_q=piece.rows.start - starts[0],
        origin_k=piece.keys.start - starts[1],
        origin_b=first,
        whole=entire(whole),
    )
