"""The keys that a query sees, as one range: a mask solved for the key's position.

Most masks let a query see neighbouring keys: causal ones, windows, prefixes, lengths. If a
condition consists of comparisons in which j can be isolated, conditions without j, and combinations
of these that leave one range, the two ends of the range are expressions without j. A kernel then
evaluates them once for a row of a tile instead of once for every pair.

Solving moves terms from one side of a comparison to the other, so the ends, like the mask itself,
must be proven to fit into 64 bits; if that fails, the mask has no range.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..errors import ArgumentError
from .bind import NO_NUMBERS, Sizes, prove
from .nodes import Expr, as_expr, operation, walk

_FIRST, _NONE, _LAST = 0, -1, 2**62  # the first key; before it; beyond every key


class KeyRange(NamedTuple):
    """The first and the last key that a query sees; None where nothing bounds them."""

    low: Expr | None
    high: Expr | None


def key_range(mask: Expr, sizes: Sizes, numbers: Mapping[str, int] = NO_NUMBERS) -> KeyRange | None:
    """Return the ends of a bound condition's range of keys, or None if it has none.

    Parameters
    ----------
    mask : Expr
        The condition.
    sizes : Sizes
        The problem to which it is bound.
    numbers : mapping of str to int, optional
        As in `bind`.
    """
    found = _Solver(mask).ranges[mask]
    if found is None:
        return None
    try:
        for end in found:
            if end is not None:
                prove(end, sizes, numbers)
    except ArgumentError:
        return None
    return found


def is_range(mask: Expr) -> bool:
    """Return whether a condition, judged by its form, lets each query see one range of keys."""
    solver = _Solver(mask)
    return mask not in solver.varies or solver.ranges[mask] is not None


def is_key(node: Expr) -> bool:
    """Whether an expression is the key's position."""
    return node.op == "symbol" and node.value == "j"


Line = tuple[int, Expr]  # a sign, or 0, and a rest: sign * j + rest


def line_of(node: Expr, varies: set[Expr], known: dict[Expr, Line | None]) -> Line | None:
    """Return an integer as a line, or None if it is none.

    `varies` are expressions that depend on the key, and `known` are the lines of smaller ones.
    """
    if node not in varies:
        return 0, node
    if is_key(node):
        return 1, as_expr(0)
    lines = [known.get(arg) for arg in node.args]
    if node.op not in ("add", "subtract", "negative") or None in lines:
        return None
    (sign, rest), *others = [line for line in lines if line is not None]
    if node.op == "negative":
        return -sign, -rest
    ((other_sign, other_rest),) = others
    if node.op == "add":
        return sign + other_sign, rest + other_rest
    return sign - other_sign, rest - other_rest


class _Solver:
    """The ranges of all conditions of a tree."""

    def __init__(self, root: Expr) -> None:
        self.varies: set[Expr] = set()  # with j
        self.lines: dict[Expr, Line | None] = {}  # of integers
        self.ranges: dict[Expr, KeyRange | None] = {}
        for node in walk(root):
            if is_key(node) or any(arg in self.varies for arg in node.args):
                self.varies.add(node)
            if node.type == "int":
                self.lines[node] = line_of(node, self.varies, self.lines)
            if node.type == "bool" and node in self.varies:
                self.ranges[node] = self._range(node)
        self.ranges.setdefault(root, None)

    def _range(self, node: Expr) -> KeyRange | None:
        if node.op in ("less", "less_equal", "equal"):
            return self._compared(node)
        if node.op == "logical_not":
            return _complement(self.ranges[node.args[0]])
        if node.op in ("logical_and", "logical_or"):
            return self._joined(node)
        return None

    def _compared(self, node: Expr) -> KeyRange | None:
        left, right = (self.lines.get(arg) for arg in node.args)
        if left is None or right is None:
            return None
        sign, rest = left[0] - right[0], right[1] - left[1]
        # sign * j < rest, <= rest or == rest
        if sign not in (1, -1):
            return None
        if node.op == "equal":
            rest = rest if sign > 0 else -rest
            return KeyRange(rest, rest)
        if node.op == "less":
            rest = rest - 1
        return KeyRange(None, rest) if sign > 0 else KeyRange(-rest, None)

    def _joined(self, node: Expr) -> KeyRange | None:
        one, other = (self._operand(arg, node) for arg in node.args)
        if one is None or other is None:
            return None
        if node.op == "logical_and":
            return KeyRange(
                _stricter("maximum", one.low, other.low), _stricter("minimum", one.high, other.high)
            )
        if one.low is None and other.low is None:
            return KeyRange(None, _laxer("maximum", one.high, other.high))
        if one.high is None and other.high is None:
            return KeyRange(_laxer("minimum", one.low, other.low), None)
        return None

    def _operand(self, arg: Expr, node: Expr) -> KeyRange | None:
        """Return the range of an operand of a joint; that of one without j is open at one side."""
        if arg in self.varies:
            return self.ranges[arg]
        partner = self.ranges.get(node.args[1] if arg is node.args[0] else node.args[0])
        if node.op == "logical_or" and partner is not None and partner.high is None:
            return KeyRange(operation("where", arg, _FIRST, _LAST), None)
        return KeyRange(None, operation("where", arg, _LAST, _NONE))


def _stricter(name: str, a: Expr | None, b: Expr | None) -> Expr | None:
    """Return the stricter of two ends."""
    if a is None or b is None:
        return b if a is None else a
    return operation(name, a, b)


def _laxer(name: str, a: Expr | None, b: Expr | None) -> Expr | None:
    """Return the laxer of two ends."""
    return None if a is None or b is None else operation(name, a, b)


def _complement(found: KeyRange | None) -> KeyRange | None:
    if found is None or (found.low is None) == (found.high is None):
        return None
    if found.low is None and found.high is not None:
        return KeyRange(found.high + 1, None)
    assert found.low is not None
    return KeyRange(None, found.low - 1)
