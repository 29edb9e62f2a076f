"""Masks and scores of a piece of a larger problem, whose positions and lengths they see.

A piece has some of the queries, keys, heads or packed sequences. Its kernels count all of them from
0, so the expressions add where the piece begins. These numbers are parameters of a kernel at run
time, as all numbers of a tree are: one kernel serves all pieces.
"""

from __future__ import annotations

from collections.abc import Hashable

from ..expr.functions import POSITIONS
from ..expr.nodes import Expr, rebuild
from .call import Problem

_B, _H, _I, _J = POSITIONS


def whole(problem: Problem) -> Problem:
    """Return the problem of which this one is a piece, as masks and scores know it."""
    return problem if problem.whole is None else problem.whole


def of_piece(root: Expr, problem: Problem) -> Expr:
    """Return an expression that is bound to the whole problem for the positions of a piece."""
    if problem.whole is None:
        return root
    symbols = {"i": _I + problem.origin_q, "j": _J + problem.origin_k}
    if problem.origin_b:
        symbols["b"] = _B + problem.origin_b
    if problem.origin_h:
        symbols["h"] = _H + problem.origin_h
    entries = problem.rows.of_queries, problem.whole.rows.of_queries
    symbols |= entries[0].symbols_within(entries[1], problem.origin_b)
    return rebuild(root, lambda node: symbols.get(node.value) if node.op == "symbol" else None)


def key_of(problem: Problem) -> Hashable | None:
    """Return what masks that read no arrays see of a problem; None if it depends on arrays."""
    rows = problem.rows.key
    if rows is None:
        return None
    here = problem.lead, problem.heads, rows, problem.heads_in_rows
    if problem.whole is None:
        return here
    origins = problem.origin_b, problem.origin_h, problem.origin_q, problem.origin_k
    sizes = problem.whole.lead, problem.whole.heads
    entry = problem.whole.rows.of_queries.of_entry(problem.origin_b)
    return here, origins, sizes, tuple(entry.values())
