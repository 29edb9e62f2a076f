"""Arguments as users pass them: arrays, traced or not, and what stands for them in checks.

Checks are those of the functions for NumPy arrays. While a function is traced, arrays of the same
shapes and dtypes stand for those whose elements are not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import interop
from ..errors import ArgumentError, ArgumentTypeError
from ..problem import device_args


def is_traced(x: Any) -> bool:
    """Whether the elements of an argument are not known yet."""
    return isinstance(x, jax.core.Tracer)


def is_known(x: Any) -> bool:
    """Whether elements can be read at once: arrays are neither traced nor on a GPU."""
    if is_traced(x):
        return False
    return not isinstance(x, jax.Array) or all(at.platform == "cpu" for at in x.devices())


def array(name: str, x: Any) -> jax.Array:
    """Return an array of JAX or NumPy as one of JAX, which is where kernels are."""
    if isinstance(x, np.ndarray):
        x = interop.array(x, name)  # refuses subclasses that mean something else
    elif not isinstance(x, jax.Array):
        raise ArgumentTypeError(
            f"{name}: got {type(x).__name__}; expected a JAX array. Convert it by jnp.asarray."
        )
    return _checked(name, jnp.asarray(x))


def _checked(name: str, x: jax.Array) -> jax.Array:
    if not is_traced(x):
        places = {device.platform for device in x.devices()} - {"cpu", "gpu"}
        if places:
            raise ArgumentTypeError(
                f"{name}: got an array on a {places.pop().upper()}; expected one on the CPU or on "
                "an NVIDIA GPU. Put it there: jax.device_put(x, jax.devices('cpu')[0])."
            )
    if not all(isinstance(length, (int, np.integer)) for length in x.shape):
        raise ArgumentError(
            f"{name}: got shape {x.shape}, which has a symbolic length; expected numbers. "
            "jax.export cannot store a program with these kernels, because XLA calls them in this "
            "process: export one with jax.nn.dot_product_attention, which takes arrays of shape "
            "(B, L, H, D)."
        )
    return x


def optional(name: str, x: Any) -> jax.Array | None:
    """Return an array, or None."""
    return None if x is None else array(name, x)


def mask_array(mask: Any) -> jax.Array | None:
    """Return a mask that is an array, or None of other masks."""
    if not isinstance(mask, (jax.Array, np.ndarray)):
        return None
    made = array("mask", mask)
    if made.dtype != bool:
        raise ArgumentTypeError(
            f"mask: got an array of {made.dtype}; expected bool, True meaning attend. Additive "
            "masks go to bias=."
        )
    return made


def number(name: str, value: Any, instead: str = "") -> Any:
    """Return a number, which is a constant of a program, or whatever else came, to be checked."""
    if is_traced(value):
        raise ArgumentTypeError(
            f"{name}: got a traced value; expected a number, because it is a constant of the "
            f"program. Say jax.jit(function, static_argnames={name!r}){instead}."
        )
    return np.asarray(value)[()] if isinstance(value, jax.Array) and not value.ndim else value


def integers(name: str, value: Any) -> Any:
    """Return integers, a number or an array, as they came; a list with traced ones is an array."""
    if isinstance(value, (list, tuple)) and any(map(is_traced, value)):
        value = jnp.stack(value)
    return _checked(name, value) if isinstance(value, jax.Array) else value


def known(value: Any) -> Any:
    """Return integers for a check: NumPy's instead of JAX's."""
    return np.asarray(value) if isinstance(value, jax.Array) else value


def like(x: Any) -> Any:
    """Return zeros that stand for an array, or None; they take no memory."""
    return None if x is None else np.broadcast_to(np.zeros((), x.dtype), x.shape)


def offsets_like(offsets: Any, size: str, x: Any, aligned: Iterable[Any]) -> Any:
    """Return offsets that stand for ones that are not known, of the rows of `x`.

    `size` is "len_q" or "len_k". The longest sequences are as long as the aligned arrays, a bias
    or a mask, say; if there are more rows than that, the last sequence has them.
    """
    if offsets.ndim != 1 or not offsets.size:
        return like(offsets)  # which is refused
    total = x.shape[-2] if x.ndim > 1 else 0
    longest = device_args.longest(size, total, (x for x in aligned if x is not None), ())
    made: Any = np.minimum(np.arange(offsets.size) * longest, total)
    if offsets.size > 1:
        made[-1] = total
    return made.astype(offsets.dtype)
