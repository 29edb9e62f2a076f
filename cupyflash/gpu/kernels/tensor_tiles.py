"""Tiles of the kernels for tensor cores: one table, and the shared memory that each row takes.

The formulas are those of kernels_cu/sm80/fragment_rows.cuh; every kernel asserts that it and
this module agree on the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...problem.call import Problem
from .tiles import Tiles

OLDEST_CAPABILITY = (8, 0)  # of matrix instructions for these types

# Bytes of an element -> largest head -> what fits, the best first: queries and keys of a tile,
# warps, places of the ring that keys and values pass through, and blocks that share a
# multiprocessor's registers.
FORWARD: dict[int, dict[int, tuple[tuple[int, int, int, int, int], ...]]] = {
    2: {
        64: ((128, 128, 4, 2, 2),),
        128: ((128, 64, 4, 2, 2),),
        256: ((64, 64, 4, 2, 2), (64, 32, 4, 2, 1)),
    },
    4: {
        64: ((128, 32, 4, 2, 2),),
        128: ((128, 64, 8, 2, 1), (128, 32, 8, 2, 1)),
        256: ((128, 32, 8, 2, 1), (128, 16, 8, 2, 1), (64, 16, 4, 2, 1)),
    },
    8: {
        64: ((128, 64, 8, 2, 1), (128, 32, 8, 2, 1)),
        128: ((128, 32, 8, 2, 1), (128, 16, 8, 2, 1), (64, 16, 4, 2, 1)),
    },
}


def largest_head(dtype: Any) -> int:
    """Return the largest head size that the forward for tensor cores has tiles for."""
    return max(FORWARD[np.dtype(dtype).itemsize])


def multiplies(dtype: Any, precision: str | None, capability: tuple[int, int]) -> bool:
    """Whether tensor cores of such a device are used for a type."""
    wanted = np.dtype(dtype).itemsize != 4 or precision is not None
    return wanted and capability >= OLDEST_CAPABILITY


def serves(problem: Problem, capability: tuple[int, int]) -> bool:
    """Whether the forward for tensor cores can compute a problem on such a device."""
    fits = max(problem.d, problem.d_v) <= largest_head(problem.dtype)
    return fits and multiplies(problem.dtype, problem.precision, capability)


def serves_backward(problem: Problem, capability: tuple[int, int]) -> bool:
    """The same of the backward."""
    return problem.dtype.itemsize == 2 and serves(problem, capability)


def row_bytes(width: int, itemsize: int = 2) -> int:
    """Bytes of a row in shared memory: whole lines."""
    return -(-width * itemsize // 128) * 128


def shared_memory(
    block_q: int, block_kv: int, warps: int, slots: int, d: int, d_v: int, itemsize: int
) -> int:
    """Bytes of forward_sm80.cu: queries or the output, the ring, and little."""
    rows = block_q + slots * block_kv
    return rows * row_bytes(max(d, d_v), itemsize) + ENTRY_BYTES + 8 * warps


def fit(d: int, d_v: int, limit: int, itemsize: int = 2) -> Tiles | None:
    """Return the best tiles of forward_sm80.cu that fit into `limit` bytes, or None.

    Parameters
    ----------
    d, d_v : int
        Head sizes, at most `largest_head`.
    limit : int
        Bytes of shared memory that a block may have.
    itemsize : int
        Bytes of an element.
    """
    table = FORWARD[itemsize]
    largest = next(most for most in table if max(d, d_v) <= most)
    for block_q, block_kv, warps, slots, resident in table[largest]:
        shared = shared_memory(block_q, block_kv, warps, slots, d, d_v, itemsize)
        if shared <= limit:
            return Tiles(block_q, block_kv, 32 * warps, shared, resident)
    return None


# What takes registers beside products, or how long rows are -> largest head -> queries and keys of
# a tile of forward_sm90.cu, for Hopper. Of masked pairs a word has the bits of a row.
HOPPER = (9, 0)
HOPPER_SHARED_MEMORY = 232448  # bytes, of a block
_MASKED: dict[int, tuple[int, int]] = {
    64: (192, 128),
    128: (128, 128),
    192: (128, 112),
    256: (128, 80),
}
FORWARD_HOPPER: dict[str, dict[int, tuple[int, int]]] = {
    "nothing": _MASKED | {128: (128, 176)},
    "nothing of few keys": _MASKED,  # less of a tile lies beyond the last, and results have room
    "masks": _MASKED,
    "masks of short rows": _MASKED | {64: (128, 128)},  # less of a tile lies beyond a diagonal
    "scores": _MASKED | {64: (192, 112)},
}
PASSING_STAGES = 2  # places that keys, and values, pass through
SMALL = 64  # columns of q, k and v, of which tiles leave room for more places
JOBS, LOOKING_WARPS = 3, 2  # that are known at a time; that look at values
TILE_GROUPS = 2048  # that have a class each
SHORT_ROWS = 1024  # queries and fewer
FEW_KEYS = 4096  # and fewer


def forward_sm90(block_q: int, block_kv: int, d: int, d_v: int, room: bool) -> Tiles:
    """Return tiles of forward_sm90.cu: a warpgroup for 64 queries each, and one that copies.

    With `room`, results have some in shared memory if it is large enough, and small tiles have more
    places to pass through.
    """
    least = _forward_sm90_bytes(block_q, block_kv, d, d_v, room)
    whole = least + block_q * row_bytes(d_v)
    shared = whole if room and whole <= HOPPER_SHARED_MEMORY else least
    return Tiles(block_q, block_kv, 2 * block_q + 128, shared)


def forward_sm90_places(d: int, d_v: int, room: bool) -> tuple[int, int]:
    """Return the places of keys, and of values, and those of queries in forward_sm90.cu."""
    return (2 * PASSING_STAGES, 2) if room and max(d, d_v) <= SMALL else (PASSING_STAGES, 1)


def _forward_sm90_bytes(block_q: int, block_kv: int, d: int, d_v: int, room: bool) -> int:
    q, v = row_bytes(d), row_bytes(d_v)
    stages, queries = forward_sm90_places(d, d_v, room)
    held = queries * block_q * q + stages * block_kv * (q + v)
    return held + KNOWN_BYTES + PLACE_BYTES * (stages + queries)


def results_have_room(tiles: Tiles, d: int, d_v: int) -> bool:
    """Whether tiles of forward_sm90.cu have room for results."""
    return tiles.shared_memory > _forward_sm90_bytes(tiles.block_q, tiles.block_kv, d, d_v, True)


def fit_hopper(d: int, d_v: int, besides: str = "nothing") -> Tiles:
    """Return the tiles of forward_sm90.cu; `besides` is a key of `FORWARD_HOPPER`."""
    table = FORWARD_HOPPER[besides]
    largest = next(most for most in table if max(d, d_v) <= most)
    # What a bias reads lies in the cache that shared memory takes its room from.
    return forward_sm90(*table[largest], d, d_v, room=besides != "scores")


# Largest head -> queries and keys of a tile of forward_sm90_tf32.cu. Its bound counts on sums over
# heads up to 128 and tiles of 64 keys.
SPLIT_HOPPER: dict[int, tuple[int, int]] = {128: (128, 64)}


def forward_sm90_tf32(block_q: int, block_kv: int, d: int, d_v: int) -> Tiles:
    """Return tiles of forward_sm90_tf32.cu: a warpgroup for 64 queries each."""
    q, v, columns_v = row_bytes(d, 4), row_bytes(d_v, 4), -(-d_v // 64) * 64
    shared = block_q * max(q, v) + 2 * block_kv * (q + 4 * columns_v)
    return Tiles(block_q, block_kv, 2 * block_q, shared + ENTRY_BYTES + 32 + 12 * (block_q // 16))


def fit_split(d: int, d_v: int) -> Tiles | None:
    """Return the tiles of forward_sm90_tf32.cu, or None for larger heads."""
    found = (own for most, own in SPLIT_HOPPER.items() if max(d, d_v) <= most)
    own = next(found, None)
    return None if own is None else forward_sm90_tf32(*own, d, d_v)


# Largest head -> queries and keys of a tile of backward_sm90_dkdv.cu.
BACKWARD_HOPPER: dict[int, tuple[int, int]] = {128: (64, 128), 256: (64, 64)}


def backward_sm90_dkdv(block_q: int, block_kv: int, d: int, d_v: int) -> Tiles:
    """Return tiles of backward_sm90_dkdv.cu: two warpgroups that compute, and one that copies."""
    columns = row_bytes(d) + row_bytes(d_v)
    shares = block_kv == 64  # keys, between warpgroups: then P goes through shared memory like dS
    passing = block_q * columns + (2 if shares else 1) * block_kv * row_bytes(block_q)
    copied = row_bytes(d) if not shares and d > 64 else 0  # of keys, made finite
    keys = block_kv * (columns + copied)
    shared = keys + PASSING_STAGES * passing + 16 * block_q + TOLD_BYTES
    return Tiles(block_q, block_kv, 384, shared)


def fit_backward_hopper(d: int, d_v: int) -> Tiles:
    """Return the tiles of backward_sm90_dkdv.cu."""
    largest = next(most for most in BACKWARD_HOPPER if max(d, d_v) <= most)
    return backward_sm90_dkdv(*BACKWARD_HOPPER[largest], d, d_v)


# Largest head -> queries and keys of a tile of backward_sm90_bias.cu, and blocks that share a
# multiprocessor: one multiplies while another one makes weights.
BIAS_HOPPER: dict[int, tuple[int, int, int]] = {
    128: (64, 128, 2),
    192: (64, 64, 2),
    256: (128, 64, 1),
}


def backward_sm90_bias(block_q: int, block_kv: int, resident: int, d: int, d_v: int) -> Tiles:
    """Return tiles of backward_sm90_bias.cu: a warpgroup for 64 queries each."""
    operands = (block_q + block_kv) * (row_bytes(d) + row_bytes(d_v))
    sums = block_q * (block_kv + 8) * 4
    shared = max(operands, sums) + _known_of_bias(block_q, block_q // 16)
    return Tiles(block_q, block_kv, 2 * block_q, shared, resident)


def fit_bias_hopper(d: int, d_v: int) -> Tiles:
    """Return the tiles of backward_sm90_bias.cu."""
    largest = next(most for most in BIAS_HOPPER if max(d, d_v) <= most)
    return backward_sm90_bias(*BIAS_HOPPER[largest], d, d_v)


# Of parts of the backward that have a kernel for Hopper.
FIT_BACKWARD_HOPPER = {"dkdv": fit_backward_hopper, "bias": fit_bias_hopper}

# The same of the backward, with stages that the operand that passes by is copied to.
BACKWARD: dict[str, dict[int, tuple[tuple[int, int, int, int, int], ...]]] = {
    "backward_sm80_dkdv": {
        64: (
            (64, 128, 4, 2, 2),
            (128, 128, 8, 2, 1),
            (64, 128, 8, 2, 1),
            (64, 64, 4, 2, 1),
        ),
        128: ((64, 128, 8, 2, 1), (32, 64, 4, 2, 1)),
        256: ((64, 64, 8, 2, 1), (64, 64, 8, 1, 1), (32, 32, 4, 1, 1)),
    },
    "backward_sm80_dq": {
        64: ((128, 64, 4, 2, 2),),
        128: ((128, 32, 4, 2, 2), (64, 32, 4, 2, 2)),
        256: ((128, 32, 8, 2, 1), (64, 32, 4, 2, 1), (64, 16, 4, 1, 1)),
    },
    "backward_sm80_bias": {
        128: ((128, 64, 4, 1, 2),),
        256: ((64, 64, 4, 1, 1), (64, 32, 4, 1, 1)),
    },
}


def backward_sm80_dkdv(
    block_q: int, block_kv: int, warps: int, stages: int, d: int, d_v: int
) -> int:
    """Bytes of backward_sm80_dkdv.cu: keys, values, P, dS, stages, lse and delta, and little."""
    columns = row_bytes(d) + row_bytes(d_v)
    held = block_kv * (columns + 2 * row_bytes(block_q)) + 8 * block_q + 12 * warps + HEAD_BYTES
    return held + stages * block_q * columns


def backward_sm80_dq(block_q: int, block_kv: int, warps: int, stages: int, d: int, d_v: int) -> int:
    """Bytes of backward_sm80_dq.cu: queries, do, lse and delta, stages."""
    columns = row_bytes(d) + row_bytes(d_v)
    held = block_q * (columns + 8) + 8 * warps + PASSING_BYTES
    return held + stages * block_kv * columns


def backward_sm80_bias(
    block_q: int, block_kv: int, warps: int, stages: int, d: int, d_v: int
) -> int:
    """Bytes of backward_sm80_bias.cu: operands of one tile, lse and delta of two, and little."""
    columns = row_bytes(d) + row_bytes(d_v)
    return stages * (block_q + block_kv) * columns + _known_of_bias(block_q, warps)


def _known_of_bias(block_q: int, warps: int) -> int:
    return 16 * block_q + 8 * warps + BIAS_BYTES


RESERVED = 1024  # bytes that every block takes of a multiprocessor besides
# What a block knows of the head, and of the entry, that passes by; with barriers.
ENTRY_BYTES, HEAD_BYTES, PASSING_BYTES, BIAS_BYTES = 72, 192, 136, 648
_JOB_BYTES = ENTRY_BYTES + 104 + 2 * TILE_GROUPS // 8
KNOWN_BYTES = (_JOB_BYTES + 16) * JOBS + 24
PLACE_BYTES = 40 + 4 * LOOKING_WARPS  # of a place of keys and values; as many of one of queries
TOLD_BYTES = 816  # the same of backward_sm90_dkdv.cu, but for lse and delta
_BYTES: dict[str, Callable[[int, int, int, int, int, int], int]] = {
    "backward_sm80_dkdv": backward_sm80_dkdv,
    "backward_sm80_dq": backward_sm80_dq,
    "backward_sm80_bias": backward_sm80_bias,
}


def fit_backward(kernel: str, d: int, d_v: int, limit: int) -> Tiles | None:
    """Return the best tiles of a kernel of the backward, as `fit` does.

    Those whose blocks find room beside each other come first.
    """
    table = BACKWARD[kernel]
    largest = next(most for most in table if max(d, d_v) <= most)
    fitting = []
    for block_q, block_kv, warps, stages, resident in table[largest]:
        shared = _BYTES[kernel](block_q, block_kv, warps, stages, d, d_v)
        if (shared + RESERVED) * resident <= limit + RESERVED:
            return Tiles(block_q, block_kv, 32 * warps, shared, resident)
        if shared <= limit:
            fitting.append(Tiles(block_q, block_kv, 32 * warps, shared, resident))
    return fitting[0] if fitting else None
