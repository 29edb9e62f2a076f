"""Which score changes end by adding an array whose elements lie at equal strides.

And which masks are such an array of Booleans, or all of whose pairs must be true in one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .nodes import Expr, rebuild, symbol, walk


class Strided(NamedTuple):
    """The elements that a score change adds at its end, or by which a mask hides pairs.

    Attributes
    ----------
    other : Expr or None
        The score to which they are added; of a mask, the other condition, if there is one.
    read : Expr
        The look-up.
    indices : tuple of Expr
        The indices of a tile's first pair; no node depends on the query or the key.
    query_step, key_step : int
        The bytes from a query's element to that of the next query, and of the next key.
    """

    other: Expr | None
    read: Expr
    indices: tuple[Expr, ...]
    query_step: int
    key_step: int


def strided_bias(root: Expr) -> Strided | None:
    """Return what is added by ``where(bias == -inf, -inf, score + bias)``.

    None if `root` is another expression, or if an index of the bias is not the query's position,
    or the key's, times a number, plus what is the same for all pairs of a tile.
    """
    if root.op != "where" or root.type != "float":
        return None
    is_hidden, hidden, total = root.args
    if is_hidden.op != "equal" or total.op != "add" or not _is_minus_infinity(hidden):
        return None
    (bias, other), score = is_hidden.args, total.args[0]
    if bias is not total.args[1] or not _is_minus_infinity(other):
        return None
    return _strided(score, bias) if bias.type == "float" else None


def strided_condition(root: Expr) -> Strided | None:
    """Return the Booleans, one for each pair, that must all be true for a mask; None if none are.

    Their indices are as those of `strided_bias`.
    """
    if root.type != "bool":
        return None
    found: Strided | None = None
    other: Expr | None = None
    for condition in conditions(root):
        read = None if found is not None else _strided(None, condition)
        if read is not None:
            found = read
        else:
            other = condition if other is None else other & condition
    return None if found is None else found._replace(other=other)


def conditions(root: Expr) -> list[Expr]:
    """Return the conditions that must all hold for a mask, each once."""
    found: dict[Expr, None] = {}
    left, known = [root], {root}
    while left:
        node = left.pop()
        if node.op != "logical_and":
            found[node] = None
            continue
        left += [arg for arg in node.args[::-1] if arg not in known]
        known.update(node.args)
    return list(found)


def _strided(other: Expr | None, read: Expr) -> Strided | None:
    """Return the elements that a look-up reads, if they lie at equal strides."""
    if read.op != "lookup" or not read.args:
        return None
    array = read.value[0]
    query_step, key_step = (_step(read.args, array.strides, name) for name in ("i", "j"))
    if query_step is None or key_step is None:
        return None
    indices = tuple(rebuild(index, _of_first_pair) for index in read.args)
    return Strided(other, read, indices, query_step, key_step)


def _is_minus_infinity(node: Expr) -> bool:
    return node.op == "constant" and node.value == -math.inf


def _of_first_pair(node: Expr) -> Expr | None:
    if node.op == "symbol" and node.value in ("i", "j"):
        return symbol(f"{node.value}_low")
    return None


def _step(indices: tuple[Expr, ...], strides: tuple[int, ...], name: str) -> int | None:
    """Return the bytes by which an element's place grows with a position; None if they vary."""
    factors: dict[Expr, int | None] = {}
    for node in walk(*indices):
        factors[node] = _factor(node, name, [factors[arg] for arg in node.args])
    step = 0
    for index, stride in zip(indices, strides, strict=True):
        factor = factors[index]
        if factor is None:
            return None
        step += factor * stride
    return step


def _factor(node: Expr, name: str, of_args: list[int | None]) -> int | None:
    """Return by how much a node grows with a position, given its operands' growth."""
    if node.op == "symbol":
        return int(node.value == name)
    if all(factor == 0 for factor in of_args):
        return 0
    first, second, *_ = (*of_args, None)
    if first is None or second is None:
        return None
    if node.op == "add":
        return first + second
    if node.op == "subtract":
        return first - second
    if node.op == "multiply":
        for factor, other in ((first, node.args[1]), (second, node.args[0])):
            if other.op == "constant":
                return factor * int(other.value)
    return None
