"""The value of an expression: on NumPy arrays, or exactly, on Python numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..arrays import device_arrays
from .nodes import Expr, walk
from .special import erf, sigmoid

# The range that a proof assumes for an int64 array in device memory, which is not read.
DEVICE_INT = 2**53


def _to_int64(x: Any) -> Any:
    return np.asarray(x).astype(np.int64)


def _floor(x: Any) -> Any:
    x = np.floor(x)
    inside = (x >= -(2.0**63)) & (x < 2.0**63)
    beyond = np.where(x > 0, np.int64(2**63 - 1), np.int64(-(2**63)))  # also for NaN
    return np.where(inside, _to_int64(np.where(inside, x, 0)), beyond)


NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "negative": np.negative,
    "absolute": np.absolute,
    "floor_divide": np.floor_divide,
    "remainder": np.remainder,
    "divide": np.divide,
    "left_shift": np.left_shift,
    "right_shift": np.right_shift,
    "power": np.power,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "erf": erf,
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "floor": _floor,
    "to_int": _to_int64,
    "less": np.less,
    "less_equal": np.less_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
    "logical_not": np.logical_not,
    "where": np.where,
}

# Integers and conditions, exact and unbounded, so that an overflow of 64 bits is visible.
EXACT: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
    "negative": operator.neg,
    "absolute": abs,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    # What is shifted by 64 or more leaves 64 bits, or has none left: no longer number is needed.
    "left_shift": lambda x, n: x << min(max(n, 0), 64),
    "right_shift": lambda x, n: x >> min(max(n, 0), 64),
    "to_int": int,
    "less": operator.lt,
    "less_equal": operator.le,
    "equal": operator.eq,
    "not_equal": operator.ne,
    "logical_and": operator.and_,
    "logical_or": operator.or_,
    "logical_xor": operator.xor,
    "logical_not": operator.not_,
    "where": lambda condition, a, b: a if condition else b,
}


def evaluate(root: Expr, symbols: Mapping[str, Any], float_type: Any = np.float32) -> Any:
    """Return the value of `root` on NumPy arrays.

    Parameters
    ----------
    root : Expr
        A tree whose arrays lie in host memory.
    symbols : mapping of str to array of int64 (float for ``score``)
        Values of the symbols, broadcastable against each other.
    float_type : dtype
        The type in which every float is computed: float32 for masks, the accumulator's type for
        scores.

    Returns
    -------
    numpy.ndarray
        An array of bool, int64 or `float_type`; it broadcasts against the symbols, and may be
        smaller.
    """
    values: dict[Expr, Any] = {}
    with np.errstate(all="ignore"):
        for node in walk(root):
            args = [values[arg] for arg in node.args]
            values[node] = node_value(node, args, symbols, float_type)
    return values[root]


def node_value(node: Expr, args: list[Any], symbols: Mapping[str, Any], float_type: Any) -> Any:
    """Return the value of one node, given its operands' values."""
    dtypes = {"bool": np.bool_, "int": np.int64, "float": float_type}
    if node.op == "constant":
        return np.asarray(node.value).astype(dtypes[node.type])
    if node.op == "symbol":
        return np.asarray(symbols[node.value])
    if node.op == "lookup":
        return host(node.value[0])[tuple(args)].astype(dtypes[node.type])
    if node.op == "contains":
        *indices, number = args
        return contained(host(node.value[0])[tuple(indices)], number)
    if node.op == "to_float":
        return np.asarray(args[0]).astype(float_type)
    return NUMPY[node.op](*args)


def contained(rows: Any, number: Any) -> Any:
    """Return whether the last axis of `rows` has a number, which broadcasts with the others."""
    shape = np.broadcast_shapes(rows.shape[:-1], np.shape(number))
    found = np.zeros(shape, np.bool_)
    for n in range(rows.shape[-1]):  # one after the other, so that no array has them all
        found |= rows[..., n] == number
    return found


def evaluate_exactly(
    root: Expr,
    symbols: Mapping[str, int | float],
    values: dict[Expr, Any],
    float_type: Any = np.float32,
) -> Any:
    """Return the value of `root` for single values of the symbols, with unbounded integers.

    ``range_minimum`` and ``range_maximum`` nodes read their array between two index bounds. Floats
    are computed as `evaluate` computes them, so that the bounds of an expression hold for it.
    `values` keeps known values from call to call.
    """
    with np.errstate(all="ignore"):
        for node in walk(root, known=values):
            values[node] = _exact(node, [values[arg] for arg in node.args], symbols, float_type)
    return values[root]


def _exact(node: Expr, args: list[Any], symbols: Mapping[str, Any], float_type: Any) -> Any:
    if node.op == "symbol":
        return symbols[node.value]
    if node.op == "constant":
        return float_type(node.value) if node.type == "float" else node.value
    if node.op == "to_float":
        return np.int64(args[0]).astype(float_type)  # one rounding, unlike that of a Python integer
    if node.op in ("lookup", "range_minimum", "range_maximum"):
        if device_arrays.is_device_array(node.value[0]):
            return _end_of_type(node, float_type)
        array = np.asarray(node.value[0])
        if node.op == "lookup":
            found = array[tuple(args)]
        else:
            low, high = args[: array.ndim], args[array.ndim :]
            part = array[tuple(slice(a, b + 1) for a, b in zip(low, high, strict=True))]
            found = part.min() if node.op == "range_minimum" else part.max()
        return float_type(found) if node.type == "float" else found.item()
    if node.op.startswith("contains"):
        return _exactly_contained(node, args)
    if node.op in EXACT and all(isinstance(arg, int) for arg in args):
        return EXACT[node.op](*args)
    chosen = NUMPY[node.op](*args)
    return float_type(chosen) if node.type == "float" else chosen.item()


def _exactly_contained(node: Expr, args: list[Any]) -> bool:
    """Return whether rows have a number, or all or any of a range of numbers."""
    if device_arrays.is_device_array(node.value[0]):
        return node.op != "contains_all"
    array = np.asarray(node.value[0])
    low = args[: array.ndim]
    high = args[array.ndim :] or low
    rows = array[tuple(slice(a, b + 1) for a, b in zip(low[:-1], high[:-1], strict=True))]
    inside = rows[(rows >= low[-1]) & (rows <= high[-1])]
    if node.op != "contains_all":
        return bool(inside.size)
    return all(
        len(np.unique(row[(row >= low[-1]) & (row <= high[-1])])) == high[-1] - low[-1] + 1
        for row in rows.reshape(math.prod(rows.shape[:-1]), array.shape[-1])
    )


def host(array: Any) -> np.ndarray[Any, Any]:
    """Return an array in host memory: itself, or a copy."""
    return (
        device_arrays.read_back(array)
        if device_arrays.is_device_array(array)
        else np.asarray(array)
    )


def _end_of_type(node: Expr, float_type: Any) -> Any:
    """Return the least or greatest element that an array's type allows; NaN for floats."""
    if node.type == "float":
        return float_type(np.nan)
    if node.type == "bool":
        return node.op == "range_maximum"
    limits = np.iinfo(node.value[0].dtype)
    if node.op == "range_minimum":
        return max(int(limits.min), -DEVICE_INT)
    return min(int(limits.max), DEVICE_INT)
