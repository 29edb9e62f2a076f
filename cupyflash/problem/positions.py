"""Masks and scores of a piece of a larger problem, whose positions and lengths they see.

A piece has some of the queries, keys, heads or packed sequences. Its kernels count all of them from
0, so the expressions add where the piece begins. These numbers are parameters of a kernel at run
time, as all numbers of a tree are: one kernel serves all pieces.
"""

from __future__ import annotations

from collections.abc import Hashable

from ..expr.functions import POSITIONS
from ..expr.nodes import Expr, as_expr, rebuild, symbol
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
    if not problem.packed:
        symbols |= {name: as_expr(value) for name, value in _numbers(problem).items()}
    elif problem.lead[0]:  # whole sequences, which lie elsewhere among the packed rows
        for name, own in (("start_q", problem.start_q), ("start_k", problem.start_k)):
            there = getattr(problem.whole, name)[problem.origin_b]
            symbols[name] = symbol(name) + int(there - own[0])
    return rebuild(root, lambda node: symbols.get(node.value) if node.op == "symbol" else None)


def _numbers(problem: Problem) -> dict[str, int]:
    """Return the lengths and starts of the one entry that a piece without packed rows is of."""
    whole, names = problem.whole, ("len_q", "len_k", "start_q", "start_k")
    assert whole is not None
    if not whole.packed:
        return {name: int(getattr(whole, name)) for name in names}
    return {name: int(getattr(whole, name)[problem.origin_b]) for name in names}


def key_of(problem: Problem) -> Hashable:
    """Return what masks that read no arrays see of a problem that is not packed."""
    here = problem.lead, problem.heads, problem.len_q, problem.len_k, problem.heads_in_rows
    if problem.whole is None:
        return here
    origins = problem.origin_b, problem.origin_h, problem.origin_q, problem.origin_k
    sizes = problem.whole.lead, problem.whole.heads
    return here, origins, sizes, tuple(_numbers(problem).values())
