"""Functions of NumPy arrays that XLA calls, and what becomes of them where nothing is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from ..arrays import device_arrays
from ..errors import ArgumentError
from . import target


def call(
    run: Callable[..., Any],
    results: Any,
    *args: Any,
    no_gradient: str = "",
    like: Sequence[Any] = (),
) -> Any:
    """Return what a function of NumPy arrays returns, as JAX arrays; vmap calls it one by one.

    Parameters
    ----------
    run : callable
        It takes trees of arrays and then arrays for the leaves of what it returns, or none. It
        returns a tree of arrays: these, or others.
    results : tree of jax.ShapeDtypeStruct
        Shapes and dtypes of what it returns.
    *args
        Trees of JAX arrays, one or more.
    no_gradient : str
        What is raised if a derivative is asked for, or "" if its arrays have none.
    like : sequence of JAX array or None
        For each array that it returns, which of `args` has its memory order; without one, it is in
        C order.
    """
    arrays, tree = jax.tree.flatten(args)
    orders = tuple(next((n for n, x in enumerate(arrays) if x is each), None) for each in like)

    def of_leaves(operands: Sequence[Any], into: tuple[Any, ...], _: Any) -> Sequence[Any]:
        made: list[Any] = jax.tree.leaves(run(*jax.tree.unflatten(tree, operands), into))
        return made

    rules = _NoGradient(no_gradient) if no_gradient else None
    function = target.Function(of_leaves, rules, like=orders)
    leaves, of_results = jax.tree.flatten(results)
    return jax.tree.unflatten(of_results, target.bind(function, leaves, "sequential", arrays))


class _NoGradient(NamedTuple):
    """The rules of a function without derivatives; JAX asks for one where one flows in."""

    message: str

    def jvp(self, *_: Any) -> NoReturn:
        raise ArgumentError(self.message)

    def transpose(self, *_: Any) -> NoReturn:
        raise ArgumentError(self.message)


def empty_beside(array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return a new array in the memory of another one; on a GPU, codes are bytes."""
    if not device_arrays.is_device_array(array):
        return np.empty(shape, dtype)
    return device_arrays.empty(shape, np.uint8 if dtype.name in target.DEVICE_BYTES else dtype)


def mapped_axes(arrays: dict[str, Any], extra: int) -> tuple[int, ...]:
    """Return the lengths of the axes that vmap put first; those of unmapped arrays are 1."""
    return np.broadcast_shapes(*(x.shape[:extra] for x in arrays.values()))


def with_axes(x: Any, axes: tuple[int, ...]) -> Any:
    """Return a view of an array whose first axes have these lengths."""
    return np.broadcast_to(x, (*axes, *x.shape[len(axes) :]))


def summed(x: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return an array, summed over the axes that have the length 1 in `shape`."""
    if x.shape == shape:
        return x
    axes = tuple(n for n, (ours, m) in enumerate(zip(x.shape, shape, strict=True)) if ours != m)
    return x.sum(axes, dtype=dtype, keepdims=True).astype(x.dtype)
