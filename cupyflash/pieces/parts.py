"""The parts of a call's arrays that a piece reads, and the call of the piece."""

from __future__ import annotations

from ..problem.call import Array, Call, Problem, changed
from ..problem.positions import whole as entire
from ..problem.rows import part_of_pairs
from .schedule import Piece

__all__ = ["call_of", "part", "part_of_bias", "part_of_pairs", "part_of_statistic"]


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


def part_of_bias(whole: Call, array: Array, piece: Piece, rows: range, keys: range) -> Array:
    """Return the part for a piece of a bias, or of an array like it.

    `rows` and `keys` say where the piece's queries and keys are in an array of the bias. For packed
    sequences, every bias has all positions of the longest one.
    """
    places = (rows, keys), (piece.rows, piece.keys)
    return whole.rows.of_queries.part_of_bias(array, *places, piece.sequences)


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


def _plain(whole: Problem, q: Array, k: Array) -> Problem:
    """Return the problem of a piece whose positions are counted from 0."""
    sizes = q.shape[-2], k.shape[-2]
    outer = None if whole.whole is None else whole.whole.sized(*sizes)
    return changed(whole.sized(*sizes), whole=outer)


def _problem(whole: Problem, piece: Piece) -> Problem:
    """Return the problem of a piece."""
    made = whole.rows.of_queries.piece(piece.rows, piece.keys, piece.sequences)
    return changed(whole, whole=entire(whole), **made)
