"""Which score changes end by adding an array whose elements lie at equal strides."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .nodes import Expr, rebuild, symbol, walk


class StridedBias(NamedTuple):
    """What a score change adds at its end.

    Attributes
    ----------
    score : Expr
        The score to which it is added.
    array : array
        The array that is looked up.
    indices : tuple of Expr
        The indices of a tile's first pair; no node depends on the query or the key.
    query_step, key_step : int
        The bytes from a query's element to that of the next query, and of the next key.
    """

    score: Expr
    array: Any
    indices: tuple[Expr, ...]
    query_step: int
    key_step: int


def strided_bias(root: Expr) -> StridedBias | None:
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
    if bias.op != "lookup" or bias.type != "float" or not bias.args:
        return None
    array = bias.value[0]
    query_step, key_step = (_step(bias.args, array.strides, name) for name in ("i", "j"))
    if query_step is None or key_step is None:
        return None
    indices = tuple(rebuild(index, _of_first_pair) for index in bias.args)
    return StridedBias(score, array, indices, query_step, key_step)


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
