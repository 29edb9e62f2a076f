"""The keys of an aligned block that a query sees, as one range: masks of pixels of an image.

A mask that divides keys' positions by constants has no single range of keys, but within a block of
keys that begins at a multiple of all divisors, and is no longer than any, each quotient is the same
for all keys, and each remainder grows by one from key to key. So what such a mask leaves of a block
may be one range: the neighbours of a pixel are a range of each row of the image. A kernel computes
its ends once for a query and a block of keys, with integers of 32 bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .key_range import Line, is_key, line_of
from .nodes import READS, Expr, as_expr, operation, rebuild, remade, walk
from .width import narrow

WHOLE = 2**20  # keys of a block of a mask that divides no position of a key; larger than any tile
_START = "start of block"


class BlockRange(NamedTuple):
    """What a query sees of a block of keys.

    Attributes
    ----------
    size : int
        Keys of a block, which begins at a multiple of it. What divides it is a size, too.
    some : Expr
        Whether the query sees any of them; of the position of the block's first key, as `j`.
    low, high : Expr or None
        The first and the last key that it sees, which may lie beyond the block; None where nothing
        bounds them.
    """

    size: int
    some: Expr
    low: Expr | None
    high: Expr | None


def block_range(mask: Expr) -> BlockRange | None:
    """Return what a bound mask leaves of blocks of keys, or None if that is not one range.

    Positions, lengths and numbers are at most `width.LIMIT`; all integers then have 32 bits.
    """
    if any(node.op in READS for node in walk(mask)):
        return None
    divisors: list[int] = []
    start = Expr("symbol", (), "int", _START)

    def within(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op not in ("floor_divide", "remainder", "right_shift") or not is_key(node.args[0]):
            return None
        by = node.args[1]
        if by.op != "constant" or not 0 < by.value < WHOLE:
            return None
        if node.op == "right_shift" and by.value >= WHOLE.bit_length():
            return None
        divisors.append(1 << by.value if node.op == "right_shift" else by.value)
        of_start = operation(node.op, start, by)  # of all keys, or of the first one
        return args[0] - (start - of_start) if node.op == "remainder" else of_start

    solver = _Solver(remade(mask, within))
    if not solver.solved:
        return None
    key = Expr("symbol", (), "int", "j")
    some, low, high = (
        None if end is None else rebuild(end, lambda node: key if node is start else None)
        for end in (solver.some, solver.low, solver.high)
    )
    assert some is not None
    roots = [root for root in (some, low, high) if root is not None]
    words = narrow(*roots)
    if any(
        node.type == "float" or (node.type == "int" and node not in words) for node in walk(*roots)
    ):
        return None
    return BlockRange(math.gcd(*divisors) if divisors else WHOLE, some, low, high)


class _Solver:
    """The ends of a conjunction, solved for the key.

    Attributes
    ----------
    some : Expr
        The conditions that do not depend on the key.
    low, high : Expr or None
        The ends of the keys for which the others hold.
    solved : bool
        Whether a condition depends on the key, and all that do are comparisons of lines.
    """

    def __init__(self, root: Expr) -> None:
        self.varies: set[Expr] = set()  # with j
        self.lines: dict[Expr, Line | None] = {}  # of integers
        for node in walk(root):
            if is_key(node) or any(arg in self.varies for arg in node.args):
                self.varies.add(node)
            if node.type == "int":
                self.lines[node] = line_of(node, self.varies, self.lines)
        self.some: Expr = as_expr(True)
        self.low: Expr | None = None
        self.high: Expr | None = None
        self.solved = root in self.varies and self._holds(root)

    def _holds(self, node: Expr) -> bool:
        """Add a condition to those that must hold; return whether that is possible."""
        if node not in self.varies:
            self.some = operation("logical_and", self.some, node)
            return True
        if node.op == "logical_and":
            return all(self._holds(arg) for arg in node.args)
        if node.op not in ("less", "less_equal", "equal"):
            return False
        left, right = node.args
        if node.op != "equal" and left.op == "absolute" and left in self.varies:  # both signs
            line, bound = self.lines.get(left.args[0]), self.lines.get(right)
            opposite = None if line is None else (-line[0], -line[1])
            return self._compared(node.op, line, bound) and self._compared(node.op, opposite, bound)
        return self._compared(node.op, self.lines.get(left), self.lines.get(right))

    def _compared(self, op: str, left: Line | None, right: Line | None) -> bool:
        """Add left < right, <= or ==; return whether that is possible."""
        if left is None or right is None:
            return False
        sign, rest = left[0] - right[0], right[1] - left[1]
        if sign not in (1, -1):
            return False
        if op == "less":
            rest = rest - 1
        if sign < 0:
            rest = -rest
        if op == "equal" or sign > 0:
            self.high = rest if self.high is None else operation("minimum", self.high, rest)
        if op == "equal" or sign < 0:
            self.low = rest if self.low is None else operation("maximum", self.low, rest)
        return True
