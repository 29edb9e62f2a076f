"""The expressions of a call, bound to its shape: its mask, score changes and what they imply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..expr.bind import NO_NUMBERS, Alignment, Axis, aligned, bind
from ..expr.derivative import derivative
from ..expr.functions import POSITIONS, SCORE, where
from ..expr.interval import tile_class
from ..expr.nodes import Expr, convert, rebuild
from .call import Array, Call, Problem
from .pack_gqa import apart, of_rows
from .positions import of_piece, whole

_B, _H, _I, _J = POSITIONS


class Trees(NamedTuple):
    """Bound expressions; None for those that a call does not have.

    Attributes
    ----------
    changed : Expr
        The score after the score changes and the bias.
    slope : Expr
        The derivative of the score changes, without the bias, with respect to the score.
    allowed : Expr
        Whether a pair takes part.
    classes : Expr
        The class of a tile: EMPTY, PARTIAL or FULL.
    """

    changed: Expr | None
    slope: Expr | None
    allowed: Expr | None
    classes: Expr | None


def bound(root: Expr, problem: Problem, numbers: Mapping[str, int] = NO_NUMBERS) -> Expr:
    """Return a mask or a score change for the rows of a problem; `numbers` are as in `bind`."""
    sizes = apart(problem)
    return of_rows(of_piece(bind(root, whole(sizes), numbers), sizes), problem)


def added(score: Expr, array: Array, name: str, problem: Problem) -> Expr:
    """Return a score with an array (..., Hq, Lq, Lk) added; -inf there hides even a NaN score."""
    axes = (Axis(_H, "heads"), Axis(_I, "len_q"), Axis(_J, "len_k"))
    # A piece has its own part of the array.
    tree = bind(aligned(Alignment(array, name, axes)), apart(problem))
    bias, hidden = of_rows(tree, problem), float("-inf")
    return where(bias == hidden, hidden, score + bias)


def by_query(array: Array, name: str) -> Expr:
    """Return what reads an array (..., Hq, Lq)."""
    return aligned(Alignment(array, name, (Axis(_H, "heads"), Axis(_I, "len_q"))))


def of_logit(expr: Expr, call: Call) -> Expr:
    """Return an expression in which the score stands for the logit as a bound one of the score."""
    known, logit = bound(expr, call.problem), trees(call).changed
    if logit is None:
        return known
    return rebuild(known, lambda x: logit if x.op == "symbol" and x.value == "score" else None)


def slope_of(factor: Expr, call: Call) -> Expr:
    """Return the derivative by the score of a loss whose derivative by the logit is a factor.

    In the factor, the score stands for the logit.
    """
    made, slope = of_logit(factor, call), trees(call).slope
    return convert(made if slope is None else slope * made, "float")


def trees(call: Call) -> Trees:
    """Return the expressions of a call. They hold the arrays that they read."""
    changed, slope, allowed, classes = SCORE, None, None, None
    problem = call.problem
    if call.score_mod is not None:
        changed = bound(call.score_mod.expr, problem)
        slope = convert(derivative(changed), "float")
    if call.bias is not None:
        changed = added(changed, call.bias, "bias", problem)
    if call.mask is not None:
        allowed = bound(call.mask.expr, problem)
        classes = tile_class(allowed)
    return Trees(None if changed is SCORE else changed, slope, allowed, classes)
