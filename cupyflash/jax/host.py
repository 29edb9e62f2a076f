"""Functions of NumPy arrays that XLA calls, and what becomes of them where nothing is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ArgumentError, ArgumentTypeError

T = TypeVar("T")
ON_A_GPU = (
    "got an array on a GPU; expected one on the CPU. On a GPU, call cupyflash.attention on "
    "cupy.from_dlpack(x), which copies nothing, outside jax.jit."
)


def call(run: Callable[..., T], results: Any, method: str, *args: Any) -> Any:
    """Return what a function of NumPy arrays returns, as JAX arrays.

    Where nothing is traced, it is called at once: XLA would compile a program for each call.

    Parameters
    ----------
    run : callable
        It takes trees of NumPy arrays, and returns a tree of them.
    results : tree of jax.ShapeDtypeStruct
        Shapes and dtypes of what it returns.
    method : str
        What vmap does: the vmap_method of `jax.pure_callback`.
    *args
        Trees of JAX arrays, one or more.
    """

    def on_arrays(*args: Any) -> T:
        return run(*jax.tree.map(np.asarray, args))

    arrays = jax.tree.leaves(args)
    if not any(isinstance(x, jax.core.Tracer) for x in arrays):
        made = on_arrays(*args)
        with jax.default_device(min(arrays[0].devices(), key=lambda device: device.id)):
            return jax.tree.map(jnp.asarray, made)

    def on_cpu(*args: Any) -> Any:
        return jax.pure_callback(on_arrays, results, *args, vmap_method=method)

    def elsewhere(*args: Any) -> Any:
        def refuse(*_: Any) -> NoReturn:
            raise ArgumentTypeError(f"got arrays of a program for a GPU: {ON_A_GPU}")

        return jax.pure_callback(refuse, results, *args, vmap_method=method)

    return jax.lax.platform_dependent(*args, cpu=on_cpu, default=elsewhere)


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
