"""Running rounding-error analysis: how far a computed expression can be from its exact value.

In addition to its exact value, every node carries a bound on the error of the computed value, given
the error of the score and the unit roundoff of the arithmetic. An operation propagates its
operands' errors and then rounds: ``|fl(z) - z| <= unit |z| + tiny``. A condition carries the set of
possible outcomes. If both are possible, `where` may take either branch, so its error is the larger
of the taken branch's error and the distance to the other branch; `minimum`, `maximum` and
`absolute` never move further apart than their operands do, so their kinks need no special
treatment. An error that cannot be bounded is infinite.

Operations that happen to be exact (times 1.0) get no smaller bound: a chain's derivative, computed
at once, rounds where the product of its members' derivatives multiplies by 1.

References
----------
Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 3.3 (running error analysis).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .evaluate import node_value
from .nodes import APPROXIMATE, Expr, walk

Floats = NDArray[np.float64]

# Units in the last place by which a kernel's functions may be off; one is at most 2 units. CUDA's
# own say 2 at most, but for powf, of which the guides of some releases say 4 and of others 9.
FUNCTION_ULPS = 4
POWER_ULPS = 9
# The outcome of a comparison is judged by differences of float64 numbers, which are rounded, too.
_SLACK = 1 + 2.0**-50
_SMALLEST = 2.0**-1074


class Outcomes(NamedTuple):
    """Which outcomes a computed condition may have."""

    true: Any
    false: Any


class _Operation(NamedTuple):
    value: Any
    x: list[Any]  # operands
    e: list[Any]  # their errors


@dataclass(frozen=True)
class Arithmetic:
    """The accumulator's arithmetic."""

    unit: float
    tiny: float  # subnormal results may become 0
    largest: float
    stored: Any  # type of the accumulator

    @classmethod
    def of(cls, unit: float) -> Arithmetic:
        """Return the arithmetic with a unit roundoff of `unit`: float32, float64, or twice."""
        stored = np.float64 if unit < 2.0**-40 else np.float32
        limits = np.finfo(stored)
        return cls(unit, float(limits.smallest_normal), float(limits.max), stored)

    def rounded(self, value: Any, error: Floats, unit: float | None = None) -> Floats:
        """Return the error after one more rounding; infinite where the result may overflow."""
        size = _size(value) + error
        unit = self.unit if unit is None else unit
        exact_zero = (error == 0) & (np.asarray(value) == 0)
        error = np.where(exact_zero, 0, error + unit * size + self.tiny)
        return np.where(size < self.largest, error, np.inf)

    def conversion(self, value: Any) -> Floats:
        """Return the error of converting numbers to the accumulator's type."""
        exact = np.asarray(value)
        error = _size(np.asarray(exact.astype(self.stored), exact.dtype) - exact)
        # Subnormal numbers may be read as 0; infinities are exact.
        error = np.where(_size(exact) < self.tiny, _size(exact), error)
        return np.where(np.isinf(exact), 0.0, error)


def _size(value: Any) -> Floats:
    return np.abs(np.asarray(value, np.float64))


def evaluate_with_error(
    roots: tuple[Expr, ...],
    symbols: Mapping[str, Any],
    score_error: Any,
    unit: float,
    others: Mapping[str, Any] | None = None,
) -> list[tuple[Any, Floats]]:
    """Return the values of expressions and bounds on the errors of their computed values.

    Parameters
    ----------
    roots : tuple of Expr
        Bound trees of type float; parts that they share are evaluated once.
    symbols : mapping of str to array
        Values of the symbols; the type of ``score`` is the type of the exact values.
    score_error : array_like
        Bound on the error of the computed score.
    unit : float
        Unit roundoff of the arithmetic.
    others : mapping of str to array_like, optional
        The same of other symbols of type float.

    Returns
    -------
    list of tuple of 2 ndarray
        Value and bound of each root; they broadcast against the symbols.
    """
    arithmetic = Arithmetic.of(unit)
    float_type = np.asarray(symbols["score"]).dtype.type
    values: dict[Expr, Any] = {}
    errors: dict[Expr, Any] = {}
    given = {"score": score_error, **(others or {})}
    of_symbols = {name: np.asarray(error, np.float64) for name, error in given.items()}
    with np.errstate(all="ignore"):
        for root in roots:
            for node in walk(root, known=values):
                operands = [values[arg] for arg in node.args]
                value = node_value(node, operands, symbols, float_type)
                known = [errors[arg] for arg in node.args]
                values[node] = value
                errors[node] = _error(node, value, operands, known, of_symbols, arithmetic)
        return [(values[root], errors[root]) for root in roots]


def _error(
    node: Expr,
    value: Any,
    x: list[Any],
    e: list[Any],
    of_symbols: Mapping[str, Floats],
    arithmetic: Arithmetic,
) -> Any:
    """Return a number's error bound, or a condition's possible outcomes."""
    if node.op == "lookup":
        return _lookup(node, value, e, arithmetic)
    if node.op == "contains":  # of positions, which are exact
        return Outcomes(value, ~value)
    if node.op == "symbol" and node.type == "float":
        return _known(of_symbols[node.value])
    if node.type == "bool":
        return _condition(node, value, x, e)
    if node.op == "symbol":
        return np.zeros(())
    if node.op == "constant":
        return arithmetic.conversion(value) if node.type == "float" else np.zeros(())
    if node.op == "to_int":  # a condition as 0 or 1
        return np.where(e[0].true & e[0].false, 1.0, 0.0)
    if node.op == "to_float":
        safe = _size(x[0]) + e[0] <= 1 / arithmetic.unit
        return _known(np.where(safe, e[0], arithmetic.rounded(value, e[0])))
    if node.op == "where":
        return _where(x, e)
    error = _PROPAGATION[node.op](_Operation(value, x, e))
    if node.op == "multiply":  # a product of errors may underflow
        error = np.maximum(error, np.where((e[0] > 0) | (e[1] > 0), _SMALLEST, 0))
    if node.op in APPROXIMATE:
        ulps = POWER_ULPS if node.op == "power" else FUNCTION_ULPS
        error = arithmetic.rounded(value, error, 2 * ulps * arithmetic.unit)
    elif node.type == "float" and node.op in _ROUNDING:
        error = arithmetic.rounded(value, error)
        if len(x) == 2:
            error = np.where(_surely_infinite(node.op, value, x, e), 0.0, error)
    return _known(error)


_ROUNDING = ("add", "subtract", "multiply", "divide", "sqrt")


def _known(error: Any) -> Floats:
    return np.where(np.isnan(error), np.inf, error)


def _surely_infinite(op: str, value: Any, x: list[Any], e: list[Any]) -> Any:
    """Where an infinite operand, which is exact, makes the result infinite."""
    sure = np.isinf(value) & np.isfinite(e[0]) & np.isfinite(e[1])
    if op == "divide":
        return sure & np.isinf(x[0]) & (_size(x[1]) > e[1])
    if op == "multiply":
        return (
            sure & (np.isinf(x[0]) | np.isinf(x[1])) & (_size(x[0]) > e[0]) & (_size(x[1]) > e[1])
        )
    return sure & (np.isinf(x[0]) | np.isinf(x[1]))


def _distance(a: Any, b: Any) -> Floats:
    """Return |a - b|: 0 for equal infinities, infinite where it is unknown."""
    if np.asarray(a).dtype.kind == "i":  # a difference of integers may leave 64 bits
        return np.where(np.equal(a, b), 0.0, np.abs(np.subtract(a, b, dtype=np.float64)) * _SLACK)
    return np.where(np.equal(a, b), 0.0, _known(_size(np.subtract(a, b)) * _SLACK))


def _condition(node: Expr, value: Any, x: list[Any], e: list[Any]) -> Outcomes:
    if node.op in ("constant", "symbol"):
        return Outcomes(value, ~value)
    if node.op == "logical_and":
        return Outcomes(e[0].true & e[1].true, e[0].false | e[1].false)
    if node.op == "logical_or":
        return Outcomes(e[0].true | e[1].true, e[0].false & e[1].false)
    if node.op == "logical_not":
        return Outcomes(e[0].false, e[0].true)
    if node.op == "logical_xor":
        return Outcomes(
            (e[0].true & e[1].false) | (e[0].false & e[1].true),
            (e[0].true & e[1].true) | (e[0].false & e[1].false),
        )
    if node.op == "where":
        return Outcomes(
            (e[0].true & e[1].true) | (e[0].false & e[2].true),
            (e[0].true & e[1].false) | (e[0].false & e[2].false),
        )
    error = e[0] + e[1]
    distance = _known(_size(np.subtract(x[0], x[1], dtype=np.result_type(x[0], np.float64))))
    either = (error > 0) & (distance <= error * _SLACK)
    return Outcomes(value | either, ~value | either)


def _where(x: list[Any], e: list[Any]) -> Floats:
    condition, a, b = e
    taken = np.where(x[0], a, b)
    other = _distance(x[1], x[2]) + np.where(x[0], b, a)
    return _known(np.where(condition.true & condition.false, np.maximum(taken, other), taken))


def _lookup(node: Expr, value: Any, e: list[Any], arithmetic: Arithmetic) -> Any:
    array = np.asarray(node.value[0])
    uncertain: Any = np.zeros((), bool)
    for error in e:
        uncertain = uncertain | (error > 0)
    if node.type == "bool":
        either = uncertain & bool(array.any() and not array.all())
        return Outcomes(value | either, ~value | either)
    error = arithmetic.conversion(value) if node.type == "float" else np.zeros(())
    if np.any(uncertain):  # any other element may be read
        low, high = array.min(), array.max()
        if node.type == "float":
            low, high = low.astype(np.float64), high.astype(np.float64)
            reach = np.maximum(_distance(value, low), _distance(high, value))
            reach = arithmetic.rounded(value, reach)
        else:
            reach = np.maximum(_distance(value, low), _distance(high, value))
        error = np.where(uncertain, _known(reach), error)
    return _known(error)


def _multiply(o: _Operation) -> Any:
    return _size(o.x[0]) * o.e[1] + _size(o.x[1]) * o.e[0] + o.e[0] * o.e[1]


def _divide(o: _Operation) -> Any:
    # |x'/y' - x/y| = |(x' - x) - (x/y) (y' - y)| / |y'|
    room = _size(o.x[1]) - o.e[1]
    return np.where(room > 0, (o.e[0] + _size(o.value) * o.e[1]) / room, np.inf)


def _either(o: _Operation) -> Any:
    return np.maximum(o.e[0], o.e[1])


def _floor(o: _Operation) -> Any:
    x0 = np.asarray(o.x[0], np.float64)
    low = np.floor(np.nextafter(x0 - o.e[0], -np.inf))
    high = np.floor(np.nextafter(x0 + o.e[0], np.inf))
    return np.where(o.e[0] > 0, np.maximum(o.value - low, high - o.value), 0.0)


def _remainder(o: _Operation) -> Any:
    # Exact operands give an exact result; otherwise it is anything between 0 and the divisor.
    return np.where((o.e[0] > 0) | (o.e[1] > 0), _size(o.x[1]) + o.e[1], 0.0)


def _floor_divide(o: _Operation) -> Any:
    room = np.maximum(_size(o.x[1]) - o.e[1], 1.0)  # integers that are never 0
    quotient = _size(o.x[0]) / _size(o.x[1])
    signs = np.where(_size(o.x[1]) > o.e[1], 0, np.inf)  # else the divisor's sign is unknown
    error = (o.e[0] + quotient * o.e[1]) / room * _SLACK + 1 + signs
    return np.where((o.e[0] > 0) | (o.e[1] > 0), error, 0.0)


def _left_shift(o: _Operation) -> Any:
    # For an unknown number of bits, the results may be as far apart as they are from 0.
    most = np.exp2(np.clip(_size(o.x[1]) + o.e[1], 0, 64))
    apart = np.where(o.e[1] > 0, 2 * _size(o.x[0]), 0.0) + o.e[0]
    return np.where(apart > 0, apart * most * _SLACK, 0.0)


def _right_shift(o: _Operation) -> Any:
    # A quotient that is rounded down is off by less than 1 more than the quotient itself; for an
    # unknown number of bits it is anything between 0, or -1, and the number.
    known = o.e[0] / np.exp2(np.clip(np.asarray(o.x[1], np.float64), 0, 64)) + 1
    error = np.where(o.e[1] > 0, _size(o.x[0]) + o.e[0] + 1, known)
    return np.where((o.e[0] > 0) | (o.e[1] > 0), error * _SLACK, 0.0)


def _exp(o: _Operation) -> Any:
    return np.where(o.e[0] > 0, _size(o.value) * np.expm1(o.e[0]), 0.0)


def _log(o: _Operation) -> Any:
    return np.where(o.e[0] < o.x[0], -np.log1p(-o.e[0] / _size(o.x[0])), np.inf)


def _tanh(o: _Operation) -> Any:
    nearest = np.maximum(_size(o.x[0]) - o.e[0], 0)  # to 0, where the slope is largest
    error = np.minimum(o.e[0] / np.cosh(nearest) ** 2 * _SLACK, 2.0)
    return np.where(np.isinf(o.e[0]), np.inf, error)  # the computed value may be NaN


def _exp2(o: _Operation) -> Any:
    return np.where(o.e[0] > 0, _size(o.value) * np.expm1(o.e[0] * _LOG_2), 0.0)


def _sigmoid(o: _Operation) -> Any:
    nearest = np.maximum(_size(o.x[0]) - o.e[0], 0)
    error = np.minimum(o.e[0] / (2 * np.cosh(nearest / 2)) ** 2 * _SLACK, 1.0)
    return np.where(np.isinf(o.e[0]), np.inf, error)


def _erf(o: _Operation) -> Any:
    nearest = np.maximum(_size(o.x[0]) - o.e[0], 0)
    # Where the square is rounded, so is the slope; beyond 8 it no longer matters.
    slope = 2 / np.sqrt(np.pi) * np.exp(-np.minimum(nearest * nearest, 64)) * _SLACK**64
    return np.where(np.isinf(o.e[0]), np.inf, np.minimum(o.e[0] * slope, 2.0))


def _sqrt(o: _Operation) -> Any:
    # Below 0 it would be NaN, and the slope is largest at the smallest number.
    least = np.asarray(o.x[0], np.float64) - o.e[0]
    error = o.e[0] / (_size(o.value) + np.sqrt(np.maximum(least, 0))) * _SLACK
    return np.where(o.e[0] > 0, np.where(least >= 0, error, np.inf), 0.0)


def _wave(slope: Callable[[Any], Any]) -> Callable[[_Operation], Any]:
    def rule(o: _Operation) -> Any:
        # sin(x + e) - sin x = cos x sin e - sin x (1 - cos e)
        error = np.minimum(_size(slope(o.x[0])) * o.e[0] + o.e[0] ** 2 / 2, o.e[0])
        return np.where(np.isinf(o.e[0]), np.inf, np.minimum(error * _SLACK, 2.0))

    return rule


def _power(o: _Operation) -> Any:
    # |(x + d)**(y + f) - x**y| = x**y |exp((y + f) log(1 + d / x) + f log x) - 1|, of x above 0;
    # of whole y also below.
    x, (dx, dy) = _size(o.x[0]), o.e
    moves = np.where(dx > 0, -np.log1p(-np.minimum(dx / x, 1)), 0.0)
    logs = np.where(dy > 0, dy * _size(np.log(x)), 0.0)
    total = np.where(moves > 0, (_size(o.x[1]) + dy) * moves, 0.0) + logs
    error = np.where(total > 0, _size(o.value) * np.expm1(total * _SLACK), 0.0)
    sure = (dx < x) & ((np.asarray(o.x[0]) > 0) | (dy == 0))
    return np.where(sure | ((dx == 0) & (dy == 0)), error, np.inf)


_LOG_2 = float(np.log(2.0)) * _SLACK


# How an operation propagates its operands' errors before it rounds.
_PROPAGATION: dict[str, Callable[[_Operation], Any]] = {
    "add": lambda o: o.e[0] + o.e[1],
    "subtract": lambda o: o.e[0] + o.e[1],
    "multiply": _multiply,
    "divide": _divide,
    "negative": lambda o: o.e[0],
    "absolute": lambda o: o.e[0],
    "minimum": _either,
    "maximum": _either,
    "floor": _floor,
    "remainder": _remainder,
    "floor_divide": _floor_divide,
    "left_shift": _left_shift,
    "right_shift": _right_shift,
    "power": _power,
    "exp": _exp,
    "exp2": _exp2,
    "log": _log,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "erf": _erf,
    "sqrt": _sqrt,
    "sin": _wave(np.cos),
    "cos": _wave(np.sin),
}
