"""Masks and scores of a piece of a larger problem, whose positions and lengths they see.

A piece has some of the queries and some of the keys. Its kernels count both from 0, so the
expressions add where the piece begins. These numbers are parameters of a kernel at run time, as all
numbers of a tree are: one kernel serves all pieces.
"""

from __future__ import annotations

from dataclasses import replace

from ..expr.functions import POSITIONS
from ..expr.nodes import Expr, as_expr, rebuild
from .call import Problem

_, _, _I, _J = POSITIONS


def whole(problem: Problem) -> Problem:
    """Return the problem of which this one is a piece, as masks and scores know it."""
    if problem.whole is None:
        return problem
    len_q, len_k = problem.whole
    return replace(problem, len_q=len_q, len_k=len_k, origin_q=0, origin_k=0, whole=None)


def of_piece(root: Expr, problem: Problem) -> Expr:
    """Return an expression that is bound to the whole problem for the positions of a piece."""
    if problem.whole is None:
        return root
    len_q, len_k = problem.whole
    symbols = {
        "i": _I + problem.origin_q,
        "j": _J + problem.origin_k,
        "len_q": as_expr(len_q),
        "len_k": as_expr(len_k),
    }
    return rebuild(root, lambda node: symbols.get(node.value) if node.op == "symbol" else None)
