"""What a mask or score function may use: symbols of a problem, and functions of expressions."""

from __future__ import annotations

from .nodes import Expr, Operand, operation, symbol

# Lengths of the current sequence, so that a function can say `i + len_k - len_q`.
len_q = symbol("len_q")
len_k = symbol("len_k")

# The positions of a batch entry, in the order in which masks and scores receive them.
POSITIONS: tuple[Expr, ...] = tuple(symbol(name) for name in "bhij")
SCORE = symbol("score")


def where(condition: Operand, a: Operand, b: Operand) -> Expr:
    """Return `a` where `condition` holds, else `b`; the other branch is never propagated."""
    return operation("where", condition, a, b)


def exp(x: Operand) -> Expr:
    """Return e to the power `x`."""
    return operation("exp", x)


def exp2(x: Operand) -> Expr:
    """Return 2 to the power `x`."""
    return operation("exp2", x)


def log(x: Operand) -> Expr:
    """Return the natural logarithm of `x`."""
    return operation("log", x)


def tanh(x: Operand) -> Expr:
    """Return the hyperbolic tangent of `x`."""
    return operation("tanh", x)


def sigmoid(x: Operand) -> Expr:
    """Return ``1 / (1 + exp(-x))``; 0 and 1 at minus and plus infinity.

    Its derivative is made of two sigmoids, so that it is 0 far out and NaN only where `x` is NaN.
    """
    return operation("sigmoid", x)


def erf(x: Operand) -> Expr:
    """Return the error function of `x`."""
    return operation("erf", x)


def sqrt(x: Operand) -> Expr:
    """Return the square root of `x`; NaN below 0.

    Its derivative is infinite at 0. If a score is exactly 0 there, limit it first:
    ``sqrt(maximum(x, 1e-12))``.
    """
    return operation("sqrt", x)


def sin(x: Operand) -> Expr:
    """Return the sine of `x`, in radians."""
    return operation("sin", x)


def cos(x: Operand) -> Expr:
    """Return the cosine of `x`, in radians."""
    return operation("cos", x)


def floor(x: Operand) -> Expr:
    """Return the largest integer that is at most `x`, as an integer.

    Beyond 64 bits, it is the nearest integer of 64 bits; for NaN, it is the smallest.
    """
    return operation("floor", x)


def minimum(a: Operand, b: Operand) -> Expr:
    """Return the smaller of `a` and `b`; NaN if either is."""
    return operation("minimum", a, b)


def maximum(a: Operand, b: Operand) -> Expr:
    """Return the larger of `a` and `b`; NaN if either is."""
    return operation("maximum", a, b)


def clip(x: Operand, low: Operand, high: Operand) -> Expr:
    """Return `x` held between `low` and `high`."""
    return minimum(maximum(x, low), high)


def absolute(x: Operand) -> Expr:
    """Return the magnitude of `x`."""
    return operation("absolute", x)
