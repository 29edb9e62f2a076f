"""Query heads that share a key head become rows of one head, so that few queries fill a tile.

One tile of scores serves a whole group, and its keys and values are read once. It is the same call
with fewer heads and more queries: the arrays are views of the same memory, and the mask and the
score changes compute the head and the query of a row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..expr.functions import POSITIONS
from ..expr.nodes import Expr, as_expr, rebuild
from .call import Call, Problem

MOST_QUERIES = 64  # queries of a head: with more, its own tiles are at least half full

_, _H, _I, _ = POSITIONS


def obstacle(call: Call) -> str | None:
    """Return in words why heads of a call cannot be rows of one, or None."""
    problem = call.problem
    if problem.heads == problem.heads_kv:
        return "no heads share keys"
    if problem.rows.keeps_heads is not None:
        return problem.rows.keeps_heads
    if not 0 < problem.rows.known_q <= MOST_QUERIES:
        return f"there are {problem.len_q} queries"
    if call.sink is not None or problem.dropout > 0:
        return "sinks and dropout are those of a head"
    # Score changes are computed for every pair, and dividing by a length is slow.
    if problem.rows.known_q > 1 and (call.score_mod is not None or call.bias is not None):
        return "scores change"
    return None if _joins(call.q, 3) else "rows of heads do not follow each other"


def _joins(array: Any, axes: int) -> bool:
    """Whether the rows of all heads of an array (..., H, L) or (..., H, L, D) are equally far."""
    heads, rows = array.shape[-axes:][:2]
    apart, step = array.strides[-axes:][:2]
    return bool(rows == 1 or heads == 1 or apart == rows * step)


def joined(call: Call, *written: tuple[Any, int]) -> tuple[Call, tuple[Any, ...]]:
    """Return a call with the heads of a group as rows of one head, and the arrays that it writes.

    Parameters
    ----------
    call : Call
        A call.
    written : tuple of (array, int)
        The arrays that it writes, and how many axes follow the leading ones: 3 (H, L, D), or 2
        without D.

    Returns
    -------
    Call, tuple of array
        The arguments, unchanged, if this is not possible.
    """
    arrays = tuple(array for array, _ in written)
    if obstacle(call) is not None or not all(_joins(*each) for each in written):
        return call, arrays
    problem = call.problem
    group = problem.heads // problem.heads_kv

    def view(array: Any, axes: int) -> Any:
        own = len(array.shape) - axes
        heads, rows = array.shape[own : own + 2]
        shape = (*array.shape[:own], heads // group, group * rows, *array.shape[own + 2 :])
        return array.reshape(shape)

    rows = replace(
        problem,
        heads=problem.heads_kv,
        rows=problem.rows.sized(len_q=group * problem.len_q),
        heads_in_rows=group,
    )
    return (
        replace(call, problem=rows, q=view(call.q, 3)),
        tuple(view(*each) for each in written),
    )


def apart(problem: Problem) -> Problem:
    """Return the problem whose heads are rows of this one, as its mask and scores know it."""
    group = problem.heads_in_rows
    if group == 1:
        return problem
    rows = problem.rows.sized(len_q=problem.len_q // group)
    return replace(problem, heads=group * problem.heads, rows=rows, heads_in_rows=1)


def of_rows(root: Expr, problem: Problem) -> Expr:
    """Return an expression of heads and queries for rows that are queries of several heads."""
    group = problem.heads_in_rows
    if group == 1:
        return root
    queries = problem.rows.known_q
    length = as_expr(queries // group)
    single = queries == group
    symbols = {
        "h": _H * group + (_I if single else _I // length),
        "i": as_expr(0) if single else _I % length,
        "len_q": length,
    }
    return rebuild(root, lambda node: symbols.get(node.value) if node.op == "symbol" else None)
