"""Seeds of dropout: numbers, arrays and keys of jax.random, and the uint64 that each becomes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32

from ..arrays.device_arrays import is_device_array
from ..errors import ArgumentTypeError

_WORDS = (2,), (4,)  # shapes of keys of uint32: those of threefry, and those of rbg


def seed_of(seed: Any) -> Any:
    """Return a seed as a number, or as an array for `words_of`: a 0-d one, or a key's words."""
    if seed is None or (isinstance(seed, (int, np.integer)) and not isinstance(seed, bool)):
        return seed
    came = type(seed).__name__
    remedy = "Convert it, as in seed=int(seed)"
    if isinstance(seed, (np.ndarray, jax.Array)):
        if isinstance(seed, np.ndarray):
            seed = jnp.asarray(seed)
        is_key = jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
        if is_key and not seed.ndim:
            return jax.random.key_data(seed)
        if seed.dtype == np.uint32 and seed.shape in _WORDS:
            return seed
        if not seed.ndim and jnp.issubdtype(seed.dtype, jnp.integer):
            return seed
        came = f"shape {seed.shape}, dtype {seed.dtype}"
        remedy = "Convert it, as in seed=seed.astype('uint32')"
        if seed.ndim:
            remedy = "Pass one of them, as in seed=seed[0], or map over them by jax.vmap"
    raise ArgumentTypeError(
        f"seed: got {came}; expected an integer, a 0-d array of integers, or one key, as "
        f"jax.random.key makes it. {remedy}."
    )


def words_of(seed: jax.Array) -> Any:
    """Return the number that an array of `seed_of` stands for: itself, or its words if traced.

    Negative numbers count from 2**64 on. The two words of a threefry key are the upper and the
    lower half, so that ``jax.random.key(n)`` gives n. Four words are hashed, because their halves
    are equal in new keys: the first two are a threefry key, and the others what it encrypts.

    Returns
    -------
    int, or jax.Array of uint32, shape (2,)
        The lower and the upper word.
    """
    if seed.shape == (4,):
        seed = threefry_2x32(seed[:2], seed[2:])
    if not isinstance(seed, jax.core.Tracer) and all(x.platform == "cpu" for x in seed.devices()):
        if not seed.ndim:
            return int(seed) % 2**64
        upper, lower = map(int, np.asarray(seed))
        return upper << 32 | lower
    if seed.ndim:
        return seed[::-1]
    if seed.dtype.itemsize == 8:
        return jnp.stack([seed, seed >> 32]).astype(np.uint32)
    upper = jnp.where(seed < 0, np.uint32(2**32 - 1), np.uint32(0))
    return jnp.stack([seed.astype(np.uint32), upper])


def number_of(words: Any) -> Any:
    """Return the number of two words, or on a GPU an array that shares their memory."""
    if is_device_array(words):
        return words.view(np.uint64).reshape(())
    lower, upper = map(int, words)
    return upper << 32 | lower
