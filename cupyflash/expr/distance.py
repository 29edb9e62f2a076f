"""Distances as floats: integers linear in a pair's position, arranged to share most of the work.

A kernel's thread has many pairs, whose positions differ by numbers that its compiler knows. So for
``i + (len_k - len_q) - j`` as a float, all pairs share one conversion, and each adds a constant.
Integers up to 2**24 are exact floats, and so are sums below that.
"""

from __future__ import annotations

from typing import NamedTuple

from .nodes import Expr, as_expr, rebuild, walk
from .width import spans

_EXACT = 2**24 - 2**10  # the shared part may be beyond the limit by at most this
_NOTHING = as_expr(0)  # what is left of a position alone; a user's 0 is a number as any other


class Line(NamedTuple):
    """The integer ``rest + i * (times of i) + j * (times of j)``; `rest` depends on neither."""

    i: int
    j: int
    rest: Expr


def with_distances(root: Expr) -> Expr:
    """Return `root` with the op "distance" for integers that are linear in i and j, as floats.

    The operand of this op is the rest, and its value has the multiples of i and j, each -1, 0 or 1.
    """
    known, lines = spans(root), _lines(root)

    def replaced(node: Expr) -> Expr | None:
        if node.op != "to_float":
            return None
        (arg,) = node.args
        inner = arg.args[0] if arg.op == "absolute" else arg
        line, span = lines.get(inner), known.get(inner)
        if line is None or span is None or max(map(abs, span)) > _EXACT:
            return None
        if max(abs(line.i), abs(line.j)) != 1:
            return None
        distance = Expr("distance", (line.rest,), "float", (line.i, line.j))
        return Expr("absolute", (distance,), "float") if arg is not inner else distance

    return rebuild(root, replaced)


def _lines(root: Expr) -> dict[Expr, Line]:
    """Return the integers below `root` that are linear in i and j."""
    lines: dict[Expr, Line] = {}
    varies: set[Expr] = set()
    for node in walk(root):
        place = node.op == "symbol" and node.value in ("i", "j")
        if place or any(arg in varies for arg in node.args):
            varies.add(node)
        if node.type != "int":
            continue
        if node not in varies:
            lines[node] = Line(0, 0, node)
        elif place:
            lines[node] = Line(int(node.value == "i"), int(node.value == "j"), _NOTHING)
        elif node.op in ("add", "subtract", "negative"):
            parts = [lines[arg] for arg in node.args if arg in lines]
            if len(parts) == len(node.args):
                lines[node] = _joined(node.op, parts)
    return lines


def _joined(op: str, parts: list[Line]) -> Line:
    if op == "negative":
        parts = [Line(0, 0, _NOTHING), *parts]
    a, b = parts
    if op == "add":
        return Line(a.i + b.i, a.j + b.j, _plus(a.rest, b.rest))
    return Line(a.i - b.i, a.j - b.j, a.rest if b.rest is _NOTHING else a.rest - b.rest)


def _plus(a: Expr, b: Expr) -> Expr:
    if a is _NOTHING or b is _NOTHING:
        return b if a is _NOTHING else a
    return a + b
