"""Classes of many tiles at a time, by NumPy: the same answers as the kernels' own code gives.

The kernels examine few elements of an array for a tile, and compute bounds of integers in 64 bits,
which wrap (CPU) or saturate (GPU). Both are repeated here, so that a tile counts as PARTIAL
whenever a kernel treats it as PARTIAL. Only the last bits of `nodes.APPROXIMATE` may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .evaluate import host, node_value
from .nodes import Expr, walk

# Elements that are examined for a tile: reference/cpu/tables.py, kernels_cu/common/lookup.cuh.
RANGE_LIMIT = {"cpu": 16384, "gpu": 1024, "exact": 2**63}
# Elements of rows that are searched for a tile, and numbers for which all rows are searched.
CONTAINS_LIMIT, MOST_CONTAINED = 16384, 64
_LOW, _HIGH = -(2**63), 2**63 - 1
_SURE = 2.0**62  # below this, a product of floats shows that integers do not overflow


def tile_classes(root: Expr, symbols: Mapping[str, Any], machine: str) -> Any:
    """Return the classes (EMPTY, PARTIAL or FULL) of many tiles.

    Parameters
    ----------
    root : Expr
        A result of `interval.tile_class`.
    symbols : mapping of str to array of int64
        Corners of the tiles and the other symbols, broadcastable against each other.
    machine : {"cpu", "gpu", "exact"}
        The kernels to follow; "exact" examines every element of a range.

    Returns
    -------
    numpy.ndarray
        An array of int64; it broadcasts against the symbols, and may be smaller.
    """
    values: dict[Expr, Any] = {}
    with np.errstate(all="ignore"):
        for node in walk(root):
            args = [values[arg] for arg in node.args]
            if node.op in ("range_minimum", "range_maximum"):
                values[node] = _extremes(node, args, machine)
            elif node.op in ("contains_all", "contains_any"):
                values[node] = _contained(node, args, machine)
            elif machine == "gpu" and node.type == "int" and node.op in _SATURATING:
                values[node] = _SATURATING[node.op](*args)
            else:
                values[node] = node_value(node, args, symbols, np.float32)
    return values[root]


def _extremes(node: Expr, args: list[Any], machine: str) -> Any:
    """Return the smallest or the largest element of many ranges of an array."""
    array = host(node.value[0])
    dtype = {"bool": np.bool_, "int": np.int64, "float": np.float32}[node.type]
    shape = np.broadcast_shapes(*(np.shape(arg) for arg in args))
    ends = [np.broadcast_to(arg, shape).reshape(-1) for arg in args]
    first = [np.clip(end, 0, n) for end, n in zip(ends, array.shape, strict=False)]
    last = [np.clip(end, -1, n - 1) for end, n in zip(ends[array.ndim :], array.shape, strict=True)]
    place, at = np.zeros(math.prod(shape), np.int64), np.zeros(1, np.int64)
    for column, n in zip((*first, *last), 2 * array.shape, strict=True):  # numbers from -1 to n
        _, at, place = np.unique(
            place * (n + 2) + column + 1, return_index=True, return_inverse=True
        )
    ranges = np.stack([*first, *last], axis=-1)[at]
    smallest = node.op == "range_minimum"
    if machine == "exact" and array.ndim == 1 and array.size:
        low, high = ranges.T
        return _of_runs(array, low, high, dtype, smallest)[place].reshape(shape)
    found: np.ndarray[Any, Any] = np.empty(len(ranges), dtype)
    for n, corners in enumerate(ranges):
        low, high = corners[: array.ndim], corners[array.ndim :]
        found[n] = _extreme(array, low, high, dtype, smallest, machine)
    return found[place].reshape(shape)


def _contained(node: Expr, args: list[Any], machine: str) -> Any:
    """Return whether many ranges of rows have all of a range of numbers, or any of it."""
    array, is_all = host(node.value[0]), node.op == "contains_all"
    axes = array.ndim - 1
    shape = np.broadcast_shapes(*(np.shape(arg) for arg in args))
    ends = [np.broadcast_to(arg, shape).reshape(-1) for arg in args]
    least, most = ends[axes], ends[-1]
    rows = np.stack([*ends[:axes], *ends[axes + 1 : -1], np.zeros_like(least)], axis=-1)
    corners, place = np.unique(rows, axis=0, return_inverse=True)
    found = np.zeros(len(least), np.bool_)
    for n, corner in enumerate(corners):
        here = np.flatnonzero(place.reshape(-1) == n)
        low, high = corner[:axes], corner[axes:-1]
        part = array[tuple(slice(a, b + 1) for a, b in zip(low, high, strict=True))]
        found[here] = _rows_contain(part, least[here], most[here], is_all, machine)
    return found.reshape(shape)


def _rows_contain(rows: Any, least: Any, most: Any, is_all: bool, machine: str) -> Any:
    """Return whether all rows have all, or any has any, of the numbers of some ranges."""
    if machine != "exact" and rows.size > CONTAINS_LIMIT:
        return not is_all
    wanted = most - least + 1
    enough = np.full(len(least), is_all)
    for row in rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1]):
        numbers = np.unique(row.astype(np.int64))
        count = np.searchsorted(numbers, most, "right") - np.searchsorted(numbers, least)
        enough = enough & (count == wanted) if is_all else enough | (count > 0)
    return enough if machine == "exact" or not is_all else enough & (wanted <= MOST_CONTAINED)


def _of_runs(array: Any, low: Any, high: Any, dtype: type, smallest: bool) -> Any:
    """Return the smallest or the largest elements of runs of an array of one axis."""
    extreme = np.minimum if smallest else np.maximum
    array, size = array.astype(dtype, copy=False), array.size
    some, to_end = (low <= high) & (high < size - 1), (low <= high) & (high == size - 1)
    found: np.ndarray[Any, Any] = np.full(len(low), _without_elements(dtype, smallest), dtype)
    if some.any():
        ends = np.stack([low[some], high[some] + 1], axis=-1).reshape(-1)
        found[some] = extreme.reduceat(array, ends)[::2]
    if to_end.any():  # each ends where the array does, so none is more than the one before it
        order = np.argsort(low[to_end])
        parts = extreme.reduceat(array, low[to_end][order])
        made: np.ndarray[Any, Any] = np.empty(len(order), dtype)
        made[order] = extreme.accumulate(parts[::-1])[::-1]
        found[to_end] = made
    return found


def _without_elements(dtype: type, smallest: bool) -> Any:
    """Return the end that every element would replace."""
    least, most = (-np.inf, np.inf) if dtype is np.float32 else (_LOW, _HIGH)
    return most if smallest else least


def _extreme(array: Any, low: Any, high: Any, dtype: type, smallest: bool, machine: str) -> Any:
    count = int(np.prod(np.maximum(high - low + 1, 0)))
    if count > RANGE_LIMIT[machine]:
        if dtype is np.float32:
            return float("nan")
        if machine == "cpu":
            return int(array.min() if smallest else array.max())
        if dtype is np.bool_:
            return not smallest
        return _LOW if smallest else _HIGH
    if not count:
        return _without_elements(dtype, smallest)
    part = array[tuple(slice(a, b + 1) for a, b in zip(low, high, strict=True))].astype(dtype)
    return part.min() if smallest else part.max()


def _add(a: Any, b: Any) -> Any:
    total = np.add(a, b)
    over = ((a ^ total) & (b ^ total)) < 0
    return np.where(over, np.where(a < 0, _LOW, _HIGH), total)


def _subtract(a: Any, b: Any) -> Any:
    rest = np.subtract(a, b)
    over = ((a ^ b) & (a ^ rest)) < 0
    return np.where(over, np.where(a < 0, _LOW, _HIGH), rest)


def _multiply(a: Any, b: Any) -> Any:
    if np.all(np.abs(np.asarray(a, np.float64) * b) < _SURE):
        return np.multiply(a, b)
    exact = np.asarray(a, object) * np.asarray(b, object)
    return np.clip(exact, _LOW, _HIGH).astype(np.int64)


def _left_shift(a: Any, n: Any) -> Any:
    moved = np.left_shift(a, n)  # 0 for other numbers than 0 to 63
    beyond = (np.right_shift(moved, n) != a) & (np.asarray(n) >= 0)
    return np.where(beyond, np.where(np.less(a, 0), _LOW, _HIGH), moved)


def _negative(a: Any) -> Any:
    return _subtract(np.int64(0), a)


_SATURATING: dict[str, Callable[..., Any]] = {
    "add": _add,
    "subtract": _subtract,
    "multiply": _multiply,
    "left_shift": _left_shift,
    "negative": _negative,
    "absolute": lambda a: np.where(a < 0, _negative(a), a),
}
