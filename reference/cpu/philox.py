"""Philox4x32, the counter-based generator behind dropout and the signs of `hadamard`.

Whether a pair (query i, key j) of head h in batch b is kept is a function of
``(seed, b * Hq + h, i, j)`` alone, so that the forward and the backward, the CPU and the GPU and
every tile size see equal bits without storing anything. One draw, of 7 rounds, has eight numbers of
15 bits, for eight pairs: those of two queries, 8 apart, and of four keys, which are two neighbours
and the two that are 8 apart from them. A thread has such pairs where tensor cores multiply::

    key     = (seed & 0xffffffff, seed >> 32)
    keys    = (j >> 4) << 2 | (j >> 1 & 3)
    queries = (i >> 4) << 3 | (i & 7)
    counter = (keys, queries, n & 0xffffffff, n >> 32)      with n = b * Hq + h
    word    = philox4x32_7(counter, key)[2 * (i >> 3 & 1) + (j >> 3 & 1)]
    keep    = (word >> 16 * (j & 1) & 0x7fff) >= round(p * 2**15)

Survivors are divided by ``1 - round(p * 2**15) / 2**15``, the exact probability of being kept, so
the expectation of a dropped-out row is the row itself. Seven rounds are the fewest that pass all
tests of the paper; `hadamard` has ten, its default.

References
----------
J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011, section 3.3 (the Philox round and its constants), table 2 (its rounds).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .jit import helper

ROUNDS = 10
DROPOUT_ROUNDS = 7
DRAWS = 2**15  # equally likely numbers of a pair
MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
# Each round adds the golden ratio and sqrt(3) - 1, as 32-bit fractions, to the key.
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
MASK_32 = 0xFFFFFFFF

Words = tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]


def threshold(dropout: float) -> int:
    """Return the number below which a pair is dropped.

    Parameters
    ----------
    dropout : float
        Probability p of being dropped, in [0, 1).

    Returns
    -------
    int
        ``round(p * 2**15)``, from 0 (nothing is dropped) to ``2**15`` (everything is, which needs
        p within ``2**-16`` of 1).
    """
    return round(float(dropout) * DRAWS)


def keep_probability(dropout: float) -> float:
    """Return the exact probability of being kept, by which survivors are divided.

    Parameters
    ----------
    dropout : float
        Probability p of being dropped, in [0, 1).

    Returns
    -------
    float
        ``1 - round(p * 2**15) / 2**15``, exact in float64.
    """
    return 1.0 - threshold(dropout) / DRAWS


def split_seed(seed: int) -> tuple[int, int]:
    """Return the two 32-bit key words of a seed.

    Parameters
    ----------
    seed : int
        A 64-bit unsigned number, or a 0-d integer array.

    Returns
    -------
    tuple[int, int]
        Low word, high word.
    """
    number = int(seed)
    return number & MASK_32, (number >> 32) & MASK_32


def philox4x32(
    counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], key: Any, rounds: int = ROUNDS
) -> Words:
    """Apply Philox rounds, elementwise over arrays.

    Parameters
    ----------
    counter : tuple of 4 array_like
        The counter words, least significant first; integers below ``2**32`` that broadcast.
    key : tuple of 2 int
        The key words, low word first.
    rounds : int
        How many.

    Returns
    -------
    tuple of 4 ndarray of uint32
        The random words, each of the broadcast shape of the counter.
    """
    # uint64 throughout, so that a product of two 32-bit words includes its high word.
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c).astype(np.uint64) for c in counter))
    low = np.uint64(MASK_32)
    shift = np.uint64(32)
    key_0, key_1 = int(key[0]), int(key[1])
    for _ in range(rounds):
        product_0 = np.uint64(MULTIPLIER_0) * c0
        product_1 = np.uint64(MULTIPLIER_1) * c2
        c0, c1, c2, c3 = (
            (product_1 >> shift) ^ c1 ^ np.uint64(key_0),
            product_1 & low,
            (product_0 >> shift) ^ c3 ^ np.uint64(key_1),
            product_0 & low,
        )
        key_0 = (key_0 + WEYL_0) & MASK_32
        key_1 = (key_1 + WEYL_1) & MASK_32
    return (
        c0.astype(np.uint32),
        c1.astype(np.uint32),
        c2.astype(np.uint32),
        c3.astype(np.uint32),
    )


def keep(
    seed: int, dropout: float, b_h: ArrayLike, i: ArrayLike, j: ArrayLike
) -> NDArray[np.bool_]:
    """Decide which pairs survive dropout.

    Parameters
    ----------
    seed : int
        64-bit unsigned seed.
    dropout : float
        Probability p of being dropped, in [0, 1).
    b_h : array_like of int
        ``b * Hq + h``: flat batch index times the number of query heads, plus the query head.
    i, j : array_like of int
        Query and key positions (local to the sequence in variable-length calls); they broadcast
        with `b_h`.

    Returns
    -------
    ndarray of bool
        True where the pair is kept, of the broadcast shape.
    """
    head, row, column = np.broadcast_arrays(*(np.asarray(x).astype(np.int64) for x in (b_h, i, j)))
    keys, queries = (column >> 4) << 2 | (column >> 1 & 3), (row >> 4) << 3 | (row & 7)
    counter = keys & MASK_32, queries & MASK_32, head & MASK_32, head >> 32
    words = philox4x32(counter, split_seed(seed), DROPOUT_ROUNDS)
    word = np.choose(2 * (row >> 3 & 1) + (column >> 3 & 1), words).astype(np.int64)
    kept: NDArray[np.bool_] = (word >> 16 * (column & 1) & (DRAWS - 1)) >= threshold(dropout)
    return kept


@helper
def words(seed, keys, i0, count, b_h, out):
    """Write two words of queries i0 ... i0 + count - 1 for a group of four keys.

    The first has the numbers of two neighbouring keys in its halves, and the second those of the
    keys 8 apart from them. `seed` is the 64-bit seed as int64, `keys` the number of the group, and
    `out` (2 or more, count or more) uint32.
    """
    low = np.uint64(MASK_32)
    shift = np.uint64(32)
    for i in range(count):
        row = i0 + i
        c0 = np.uint64(keys)
        c1 = np.uint64((row >> 4) << 3 | (row & 7))
        c2 = np.uint64(b_h) & low
        c3 = np.uint64(b_h) >> shift
        k0 = np.uint64(seed) & low
        k1 = np.uint64(seed) >> shift
        for _ in range(DROPOUT_ROUNDS):
            product_0 = np.uint64(MULTIPLIER_0) * c0
            product_1 = np.uint64(MULTIPLIER_1) * c2
            c0 = (product_1 >> shift) ^ c1 ^ k0
            c2 = (product_0 >> shift) ^ c3 ^ k1
            c1 = product_1 & low
            c3 = product_0 & low
            k0 = (k0 + np.uint64(WEYL_0)) & low
            k1 = (k1 + np.uint64(WEYL_1)) & low
        second = row >> 3 & 1
        out[0, i] = c2 if second else c0
        out[1, i] = c3 if second else c1
