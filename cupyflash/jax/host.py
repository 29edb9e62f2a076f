"""Functions of NumPy arrays that XLA calls, and what becomes of them where nothing is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np

from ..errors import ArgumentError
from . import target

T = TypeVar("T")
NOT_ON_A_GPU = (
    "expected them on the CPU, where alone this function computes for JAX. "
    "Write rows to a cache by x.at[...].set, or put them on the CPU by jax.device_put."
)


def call(run: Callable[..., Any], results: Any, method: str, *args: Any, gpu: str = "") -> Any:
    """Return what a function of NumPy arrays returns, as JAX arrays.

    Parameters
    ----------
    run : callable
        It takes trees of arrays and then arrays for the leaves of what it returns, or none. It
        returns a tree of arrays: these, or others.
    results : tree of jax.ShapeDtypeStruct
        Shapes and dtypes of what it returns.
    method : "sequential" or "expand_dims"
        What vmap does: the vmap_method of `jax.pure_callback`.
    *args
        Trees of JAX arrays, one or more.
    gpu : str
        Why the function does not take arrays on a GPU, if it does not.
    """
    arrays, tree = jax.tree.flatten(args)

    def of_leaves(operands: Sequence[Any], into: tuple[Any, ...], _: Any) -> Sequence[Any]:
        made: list[Any] = jax.tree.leaves(run(*jax.tree.unflatten(tree, operands), into))
        return made

    function = target.Function(of_leaves, gpu)
    leaves, of_results = jax.tree.flatten(results)
    return jax.tree.unflatten(of_results, target.bind(function, leaves, method, arrays))


def without_gradient(message: str, run: Callable[[Any], T], operands: Any) -> T:
    """Return `run` of a tree of arrays; a gradient through it is an error while it is traced.

    JAX asks for one only where a derivative flows in.
    """

    def refuse(*_: Any) -> NoReturn:
        raise ArgumentError(message)

    guarded = jax.custom_jvp(run)
    guarded.defjvp(refuse)
    made: T = guarded(operands)
    return made


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
