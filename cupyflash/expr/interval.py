"""Interval arithmetic on expressions: makes the trees of a tree's lower and upper bounds.

The bounds of an expression over a whole tile are themselves expressions, of the tile's corners
``i_low``, ``i_high``, ``j_low``, ``j_high``. Every reader of expressions therefore also reads
bounds: NumPy, the CPU's program, generated code. For a condition the two bounds are "holds
everywhere" and "may hold somewhere", so that one number says EMPTY, PARTIAL or FULL.

Why it is sound: integers are exact (`bind` proves that they do not overflow). A float operation
that rounds correctly is monotone, so evaluating it at the ends in the same arithmetic bounds it
without further rounding; functions that only come close (`nodes.APPROXIMATE`) are widened outward.
Where a float operation could make NaN inside the tile (an infinite end, a divisor that may be 0),
both ends become NaN, and NaN makes no comparison certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from ..arrays import device_arrays
from .nodes import APPROXIMATE, Expr, as_expr, operation, symbol, walk

EMPTY, PARTIAL, FULL = 0, 1, 2
TILE = ("i", "j")
EVERYTHING = ("b", "h", "i", "j", "len_q", "len_k", "start_q", "start_k")

Bounds = tuple[Expr, Expr]

# Relative and absolute widening of functions that are not correctly rounded: far more than the few
# units in the last place of float32 by which any library's exp, tanh or power is off.
_WIDEN = 2.0**-18
_TINY = 2.0**-100


def tile_class(mask: Expr) -> Expr:
    """Return the integer expression EMPTY, PARTIAL or FULL of a condition over a tile."""
    everywhere, somewhere = bounds(mask, TILE)[mask]
    return operation("where", everywhere, FULL, operation("where", somewhere, PARTIAL, EMPTY))


def bounds(root: Expr, varying: Collection[str]) -> dict[Expr, Bounds]:
    """Return the bounds of `root` and of every node below it.

    Parameters
    ----------
    root : Expr
        The tree.
    varying : collection of str
        Symbols that range from ``<name>_low`` to ``<name>_high``; the others are single values.
    """
    known: dict[Expr, Bounds] = {}
    for node in walk(root):
        known[node] = _rule(node, [known[arg] for arg in node.args], varying)
    return known


def _rule(node: Expr, ends: list[Bounds], varying: Collection[str]) -> Bounds:
    op = node.op
    if op == "constant":
        return node, node
    if op == "symbol":
        if node.type == "float":  # a score: any float, even NaN
            return as_expr(float("nan")), as_expr(float("nan"))
        if node.value in varying:
            return symbol(f"{node.value}_low"), symbol(f"{node.value}_high")
        return node, node
    if op == "lookup":
        return _lookup(node, ends, varying)
    if op == "contains":
        return _contains(node, ends)
    if all(low is high for low, high in ends):
        exact = Expr(op, tuple(low for low, _ in ends), node.type, node.value)
        return exact, exact
    if op in _MONOTONE:
        low, high = (
            Expr(op, tuple(pair[side] for pair in ends), node.type, node.value) for side in (0, 1)
        )
        result = low, high
    else:
        result = _RULES[op](*ends)
    if node.type == "float" and op in _MAY_MAKE_NAN:
        return _nan_unless_finite(result, ends)
    return result


_MONOTONE = frozenset(
    ["add", "minimum", "maximum", "to_float", "to_int", "logical_and", "logical_or", "sqrt"]
)


_MAY_MAKE_NAN = frozenset(
    ["add", "subtract", "multiply", "divide", "absolute", "sqrt", *APPROXIMATE]
)


def _nan_unless_finite(result: Bounds, ends: list[Bounds]) -> Bounds:
    # x - x is 0 for finite x and NaN otherwise.
    finite = [end for pair in (*ends, result) for end in dict.fromkeys(pair)]
    zero = finite[0] - finite[0]
    for end in finite[1:]:
        zero = zero + (end - end)
    return result[0] + zero, result[1] + zero


def _lookup(node: Expr, ends: list[Bounds], varying: Collection[str]) -> Bounds:
    array, proven = node.value[:2]
    # The classes of all tiles are bounded in host memory, where no element of the device is known.
    known = tuple(varying) == TILE or not device_arrays.is_device_array(array)
    if known and all(low is high for low, high in ends):
        exact = Expr("lookup", tuple(low for low, _ in ends), node.type, (array, proven))
        return exact, exact
    corners = tuple(low for low, _ in ends) + tuple(high for _, high in ends)
    return (
        Expr("range_minimum", corners, node.type, (array, proven)),
        Expr("range_maximum", corners, node.type, (array, proven)),
    )


def _contains(node: Expr, ends: list[Bounds]) -> Bounds:
    # Whether all rows between the first indices have all numbers between the last ones, and whether
    # a row has one of them. A row of an array of the device may have changed since it was written.
    corners = tuple(low for low, _ in ends) + tuple(high for _, high in ends)
    every, some = (Expr(f"contains_{name}", corners, "bool", node.value) for name in ("all", "any"))
    return every, some


def _smallest(*values: Expr) -> Expr:
    result = values[0]
    for value in values[1:]:
        result = operation("minimum", result, value)
    return result


def _largest(*values: Expr) -> Expr:
    result = values[0]
    for value in values[1:]:
        result = operation("maximum", result, value)
    return result


def _subtract(a: Bounds, b: Bounds) -> Bounds:
    return a[0] - b[1], a[1] - b[0]


def _negative(a: Bounds) -> Bounds:
    return -a[1], -a[0]


def _absolute(a: Bounds) -> Bounds:
    low = operation("where", a[0] > 0, a[0], operation("where", a[1] < 0, -a[1], 0))
    return low, _largest(-a[0], a[1])


def _corners(op: str, a: Bounds, b: Bounds) -> list[Expr]:
    distinct = [(x, y) for x in dict.fromkeys(a) for y in dict.fromkeys(b)]
    return [operation(op, x, y) for x, y in distinct]


def _multiply(a: Bounds, b: Bounds) -> Bounds:
    products = _corners("multiply", a, b)
    return _smallest(*products), _largest(*products)


def _divide(a: Bounds, b: Bounds) -> Bounds:
    quotients = _corners("divide", a, b)
    safe = (b[0] > 0) | (b[1] < 0)
    return (
        operation("where", safe, _smallest(*quotients), float("nan")),
        operation("where", safe, _largest(*quotients), float("nan")),
    )


def _floor_divide(a: Bounds, b: Bounds) -> Bounds:
    quotients = _corners("floor_divide", a, b)
    return _smallest(*quotients), _largest(*quotients)


def _remainder(a: Bounds, b: Bounds) -> Bounds:
    # Between 0 and the divisor; exact where one divisor leaves both ends in the same period.
    low, high = _smallest(b[0] + 1, as_expr(0)), _largest(b[1] - 1, as_expr(0))
    same = (b[0] == b[1]) & (a[0] // b[0] == a[1] // b[0])
    return operation("where", same, a[0] % b[0], low), operation("where", same, a[1] % b[0], high)


def _shift(op: str) -> Callable[[Bounds, Bounds], Bounds]:
    def rule(a: Bounds, bits: Bounds) -> Bounds:
        # A proven number is 0 or more, and from 64 on nothing changes.
        zero, most = as_expr(0), as_expr(64)
        low, high = (_smallest(_largest(end, zero), most) for end in bits)
        ends = _corners(op, a, bits if bits[0] is bits[1] else (low, high))
        return _smallest(*ends), _largest(*ends)

    return rule


def _floor(a: Bounds) -> Bounds:
    # The floor of NaN is the smallest integer.
    known = operation("equal", a[1], a[1])
    return operation("floor", a[0]), operation("where", known, operation("floor", a[1]), 2**63 - 1)


def _outward(low: Expr, high: Expr) -> Bounds:
    return low - abs(low) * _WIDEN - _TINY, high + abs(high) * _WIDEN + _TINY


def _widened(op: str) -> Callable[[Bounds], Bounds]:
    return lambda a: _outward(operation(op, a[0]), operation(op, a[1]))


def _power(a: Bounds, b: Bounds) -> Bounds:
    # Of a base of 0 or more it is monotone in both; of others nothing is known.
    powers = _corners("power", a, b)
    low, high = _outward(_smallest(*powers), _largest(*powers))
    known = a[0] >= 0
    nan = float("nan")
    return operation("where", known, low, nan), operation("where", known, high, nan)


def _wave(op: str, top: float) -> Callable[[Bounds], Bounds]:
    """Return the rule of a function with period 2 pi that is 1 at `top` and -1 half a period on."""

    def rule(a: Bounds) -> Bounds:
        at_ends = operation(op, a[0]), operation(op, a[1])
        low, high = _outward(_smallest(*at_ends), _largest(*at_ends))
        # Near an extreme the rounding of a turn does not matter, as the function is flat there.
        far = (a[0] < -_FLAT) | (a[1] > _FLAT)
        return (
            operation("where", far | _meets(a, top + math.pi), -1.0 - _WIDEN, low),
            operation("where", far | _meets(a, top), 1.0 + _WIDEN, high),
        )

    return rule


# Up to here, places are rounded by at most 2**-12, and a wave by the square of that.
_FLAT = 2.0**11


def _meets(a: Bounds, place: float) -> Expr:
    """Return whether an interval has a point that is whole turns from a place."""
    turns = [operation("floor", (end - place) * (0.5 / math.pi)) for end in a]
    return operation("not_equal", *turns)


def _less(a: Bounds, b: Bounds) -> Bounds:
    return a[1] < b[0], ~(b[1] <= a[0])


def _less_equal(a: Bounds, b: Bounds) -> Bounds:
    return a[1] <= b[0], ~(b[1] < a[0])


def _equal(a: Bounds, b: Bounds) -> Bounds:
    everywhere = (a[0] == b[1]) & (a[1] == b[0])
    return everywhere, ~((a[1] < b[0]) | (b[1] < a[0]))


def _not_equal(a: Bounds, b: Bounds) -> Bounds:
    return _logical_not(_equal(a, b))


def _logical_not(a: Bounds) -> Bounds:
    return ~a[1], ~a[0]


def _logical_xor(a: Bounds, b: Bounds) -> Bounds:
    everywhere = (a[0] & ~b[1]) | (b[0] & ~a[1])
    nowhere = (a[0] & b[0]) | ~(a[1] | b[1])
    return everywhere, ~nowhere


def _where(condition: Bounds, a: Bounds, b: Bounds) -> Bounds:
    everywhere, somewhere = condition
    if a[0].type == "bool":
        either = a[0] & b[0], a[1] | b[1]
    else:
        either = _smallest(a[0], b[0]), _largest(a[1], b[1])
    low, high = (
        operation("where", everywhere, x, operation("where", somewhere, mixed, y))
        for x, mixed, y in zip(a, either, b, strict=True)
    )
    return low, high


_RULES: dict[str, Callable[..., Bounds]] = {
    "subtract": _subtract,
    "negative": _negative,
    "absolute": _absolute,
    "multiply": _multiply,
    "divide": _divide,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "floor": _floor,
    "left_shift": _shift("left_shift"),
    "right_shift": _shift("right_shift"),
    "power": _power,
    "exp": _widened("exp"),
    "exp2": _widened("exp2"),
    "log": _widened("log"),
    "tanh": _widened("tanh"),
    "sigmoid": _widened("sigmoid"),
    "erf": _widened("erf"),
    "sin": _wave("sin", 0.5 * math.pi),
    "cos": _wave("cos", 0.0),
    "less": _less,
    "less_equal": _less_equal,
    "equal": _equal,
    "not_equal": _not_equal,
    "logical_not": _logical_not,
    "logical_xor": _logical_xor,
    "where": _where,
}
