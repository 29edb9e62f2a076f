"""Seeds of dropout: numbers, arrays and keys of jax.random, and the uint64 that each becomes."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ArgumentTypeError

_WORDS = (2,), (4,)  # shapes of keys of uint32: those of threefry, and those of rbg


def seed_of(seed: Any) -> Any:
    """Return a seed as a number, or as an array for `number_of`: a 0-d one, or a key's words."""
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


def number_of(seed: np.ndarray[Any, Any]) -> int:
    """Return the number, 0 to 2**64 - 1, that an array of `seed_of` stands for.

    Negative numbers count from 2**64 on. The two words of a threefry key are the upper and the
    lower half, so that ``jax.random.key(n)`` gives n. Four words are hashed, because their halves
    are equal in new keys.
    """
    if not seed.ndim:
        return int(seed) % 2**64
    words = seed.astype("<u4")
    if words.size == 2:
        return int(words[0]) << 32 | int(words[1])
    return int.from_bytes(hashlib.blake2b(words.tobytes(), digest_size=8).digest(), "little")
