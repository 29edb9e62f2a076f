"""The derivative of a score change with respect to the score, as an expression (forward mode)."""

from __future__ import annotations

import math
from collections.abc import Collection

from .nodes import Expr, as_expr, operation, walk


def derivative(root: Expr, by: Collection[Expr] = ()) -> Expr:
    """Return d `root` / d score, or the derivative by the value of some nodes if `by` has any.

    If the change has a kink (`absolute`, `minimum`, `maximum`, `where`), it is the derivative of
    the branch that is taken; at a tie, that of the first operand, and 1 for `absolute` at 0.
    The derivative of `sqrt`, and of a power between 0 and 1, is infinite at 0.
    Conditions, `floor` and look-ups are locally constant.
    """
    known: dict[Expr, Expr | None] = {}  # None stands for a derivative that is zero everywhere
    for node in walk(root):
        if by and (node in by or node.op == "symbol"):
            known[node] = as_expr(1.0) if node in by else None
        else:
            known[node] = _rule(node, [known[arg] for arg in node.args])
    result = known[root]
    return as_expr(0.0) if result is None else result


def second_derivative(root: Expr) -> Expr:
    """Return the derivative of `derivative`: at a kink, that of the branch that is taken."""
    return derivative(derivative(root))


def _rule(node: Expr, d: list[Expr | None]) -> Expr | None:
    if node.op == "symbol":
        return as_expr(1.0) if node.value == "score" else None
    if node.op in ("floor", "lookup", "constant") or node.type != "float" or not any_nonzero(d):
        return None
    x = node.args
    if node.op == "add":
        return _sum(d[0], d[1])
    if node.op == "subtract":
        return _sum(d[0], None if d[1] is None else -d[1])
    if node.op == "multiply":
        return _sum(None if d[0] is None else d[0] * x[1], None if d[1] is None else x[0] * d[1])
    if node.op == "divide":
        return _sum(
            None if d[0] is None else d[0] / x[1], None if d[1] is None else -(node / x[1]) * d[1]
        )
    if node.op == "negative":
        return None if d[0] is None else -d[0]
    if node.op == "absolute":
        return None if d[0] is None else operation("where", x[0] < 0.0, -d[0], d[0])
    if node.op in ("minimum", "maximum"):
        first = x[0] <= x[1] if node.op == "minimum" else x[1] <= x[0]
        return operation("where", first, _or_zero(d[0]), _or_zero(d[1]))
    if node.op == "where":
        return operation("where", x[0], _or_zero(d[1]), _or_zero(d[2]))
    if node.op == "power":
        return _of_power(node, d)
    if d[0] is None:
        return None
    if node.op == "exp":
        return d[0] * node
    if node.op == "exp2":
        return d[0] * (node * math.log(2.0))
    if node.op == "log":
        return d[0] / x[0]
    if node.op == "tanh":
        return d[0] * (1.0 - node * node)
    if node.op == "sigmoid":  # 1 - node would lose all digits far out
        return d[0] * (node * operation("sigmoid", -x[0]))
    if node.op == "erf":
        return d[0] * (operation("exp", -(x[0] * x[0])) * (2.0 / math.sqrt(math.pi)))
    if node.op == "sqrt":
        return d[0] / (node + node)
    if node.op == "sin":
        return d[0] * operation("cos", x[0])
    if node.op == "cos":
        return -d[0] * operation("sin", x[0])
    raise AssertionError(f"no derivative is written for {node.op}")


def _of_power(node: Expr, d: list[Expr | None]) -> Expr | None:
    """Return the derivative of a power; it is 0 where the exponent or the power itself is."""
    base, exponent = node.args
    of_base = of_exponent = None
    if d[0] is not None:
        slope = exponent * operation("power", base, exponent - 1.0)
        if exponent.op != "constant" or exponent.value == 0:
            slope = operation("where", exponent == 0.0, 0.0, slope)  # 0 times infinity at 0
        of_base = d[0] * slope
    if d[1] is not None:
        slope = node * operation("log", base)
        of_exponent = d[1] * operation("where", node == 0.0, 0.0, slope)
    return _sum(of_base, of_exponent)


def any_nonzero(d: list[Expr | None]) -> bool:
    """Whether any derivative in `d` can differ from zero."""
    return any(term is not None for term in d)


def _or_zero(d: Expr | None) -> Expr:
    return as_expr(0.0) if d is None else d


def _sum(a: Expr | None, b: Expr | None) -> Expr | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
