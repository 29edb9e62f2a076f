"""The scratch memory of a backward, as shapes and types, before it is allocated."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..problem.call import Call

GROUP_ROWS, UNIT = 8, 16  # of sums of dq: rows and columns that are stored together
# About a tile of a kernel, for the number of parts; keys of a tile of heads beyond 128.
TILE_Q, TILE_K, TILE_K_WIDE = 64, 128, 64
# Blocks that fill a GPU, and where tiles of a bias are small, or numbers; tiles of scores that
# share such a tile, and numbers of queries and do, for which a part pays. Heads of fewer columns
# take as long.
ENOUGH_BLOCKS, ENOUGH_SMALL_BLOCKS, ENOUGH_NUMBERS = 256, 384, 512
FEWEST_TILES, FEWEST_OF_QUERIES, FEWEST_COLUMNS = 8, 1 << 20, 128
FEWEST_ENTRIES = 4  # with which a block of heads that are one tile has a part of dbias


class ArraySpec(NamedTuple):
    """An array in C order that is not there yet."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def reshape(self, shape: tuple[int, ...]) -> ArraySpec:
        """Return an array of the same elements with other axes."""
        return ArraySpec(shape, self.dtype)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes between neighbours along each axis."""
        return tuple(math.prod(self.shape[axis + 1 :]) * self.itemsize for axis in range(self.ndim))


class GradientScratch(NamedTuple):
    """The scratch memory of a backward.

    Attributes
    ----------
    arrays : dict of str to ArraySpec
        The arrays.
    atomic_dq : bool
        Whether dq is added to memory in any order.
    whole_dq : bool
        Whether blocks of keys store dq.
    key_parts : int
        Blocks that share the queries of a block of keys. If there are several, their parts are the
        first axis of the arrays with parts of dk and dv.
    bias_parts : int
        Blocks that share a tile of the bias, likewise.
    own_delta : bool
        Whether blocks of keys compute delta, too.
    own_dbias : bool
        Whether they compute the parts of the gradient of the bias, too.
    """

    arrays: dict[str, ArraySpec]
    atomic_dq: bool
    whole_dq: bool
    key_parts: int
    bias_parts: int
    own_delta: bool = False
    own_dbias: bool = False

    def part(self, gradient: str) -> ArraySpec | None:
        """Return what kernels write of a gradient instead of it: a part, if there are parts."""
        parts = self.arrays.get(parts_of(gradient))
        count = {"dk": self.key_parts, "dv": self.key_parts, "dbias": self.bias_parts}
        if parts is None or count.get(gradient, 1) == 1:
            return parts
        return ArraySpec(parts.shape[1:], parts.dtype)


def scratch_of(
    call: Call, atomic_dq: bool, whole_dq: bool = False, share_queries: bool = False
) -> GradientScratch:
    """Return the scratch memory of a backward: delta, one number for each query.

    It also has parts of gradients, which are summed at the end: of those of k and v if these are
    broadcast over different axes, or if blocks may `share_queries`, and of the bias's if blocks
    share its tiles; with `atomic_dq` also the sums of dq, unless dq has the accumulator's type.
    """
    problem = call.problem
    scratch = {
        "delta": ArraySpec(
            (*problem.array_lead, problem.heads, call.q.shape[-2]), problem.accumulator
        )
    }
    shared = _shared_lead(call)
    key_parts = _key_parts(call) if share_queries else 1
    bias_parts = 1 if call.bias is None else parts_of_bias(call, call.bias.shape)
    if shared is not None or key_parts > 1:
        for name, array in (("dk", call.k), ("dv", call.v)):
            lead = array.shape[:-3] if shared is None else shared
            shape = (*(key_parts,) * (key_parts > 1), *lead, *array.shape[-3:])
            scratch[parts_of(name)] = ArraySpec(shape, problem.accumulator)
    if bias_parts > 1:
        scratch[parts_of("dbias")] = _dbias_parts(call, bias_parts)
    if atomic_dq and problem.dtype != problem.accumulator:
        *lead_q, rows, columns = call.q.shape
        groups = problem.rows.row_groups(rows, GROUP_ROWS, problem.batch)
        sizes = groups * GROUP_ROWS, -(-columns // UNIT) * UNIT
        scratch["dq_accum"] = ArraySpec((*lead_q, *sizes), problem.accumulator)
    return GradientScratch(scratch, atomic_dq, whole_dq, key_parts, bias_parts)


def with_own_dbias(made: GradientScratch, call: Call) -> GradientScratch:
    """Return the scratch memory where blocks of keys compute parts of the gradient of the bias.

    The parts of a slice of the bias do not depend on how many slices there are. They have few
    entries each, as a block computes all gradients of these.
    """
    assert call.bias is not None
    *lead, heads, _, _ = (1,) * (3 - call.bias.ndim) + call.bias.shape
    problem = call.problem
    planes = problem.batch // max(math.prod(lead), 1) * (problem.heads if heads == 1 else 1)
    parts = max(1, min(planes // FEWEST_ENTRIES, ENOUGH_SMALL_BLOCKS // max(heads, 1)))
    arrays = {name: x for name, x in made.arrays.items() if name != parts_of("dbias")}
    if parts > 1:
        arrays[parts_of("dbias")] = _dbias_parts(call, parts)
    return made._replace(arrays=arrays, bias_parts=parts, own_dbias=True)


def _dbias_parts(call: Call, parts: int) -> ArraySpec:
    assert call.bias is not None
    shape = (parts, *(1,) * (3 - call.bias.ndim), *call.bias.shape)
    return ArraySpec(shape, call.problem.accumulator)


def parts_of(gradient: str) -> str:
    """Return the name of the scratch memory with the parts of a gradient."""
    return f"{gradient} parts"


def _key_parts(call: Call) -> int:
    """Return how many blocks share the heads of queries that share a block of keys.

    Few key heads make few blocks, which many heads of queries keep long. No result may depend on
    the batch, nor on the lengths of other sequences that are packed with it.
    """
    problem = call.problem
    if problem.rows.adjoin or not problem.heads_kv:
        return 1
    group: int = problem.heads // problem.heads_kv
    len_q, len_k = (int(np.max(n, initial=0)) for n in (problem.len_q, problem.len_k))
    tile_k = TILE_K if max(problem.d, problem.d_v) <= 128 else TILE_K_WIDE
    blocks = problem.heads_kv * -(-len_k // tile_k)
    numbers = group * len_q * max(problem.d + problem.d_v, FEWEST_COLUMNS)
    return max(1, min(group, -(-ENOUGH_BLOCKS // max(blocks, 1)), -(-numbers // FEWEST_OF_QUERIES)))


def parts_of_bias(call: Call, shape: tuple[int, ...]) -> int:
    """Return how many blocks share the scores that were given the same tile of a bias.

    These are blocks of queries of planes, which are heads of batch entries. Tiles that many share
    are few: without parts, each would be one block's, and most of a GPU idle. The parts of a slice
    of the bias depend neither on how many slices there are, nor on lengths of other sequences.
    """
    *lead, heads, len_q, len_k = (1,) * (3 - len(shape)) + shape
    problem, slices = call.problem, max(math.prod(lead), 1)
    if problem.rows.adjoin and slices > 1:
        return 1
    planes: int = problem.batch // slices * (problem.heads if heads == 1 else 1)
    longest = (int(np.max(n, initial=0)) for n in (problem.len_q, problem.len_k))
    blocks_q, blocks_k = (-(-n // TILE_Q) for n in longest)
    rows = planes * (blocks_q if len_q == 1 else 1)
    tiles: int = heads * -(-len_q // TILE_Q) * -(-len_k // TILE_K)
    enough = ENOUGH_SMALL_BLOCKS if len_q <= TILE_Q else ENOUGH_BLOCKS
    if len_q == len_k == 1:
        enough = ENOUGH_NUMBERS
    most = rows * (blocks_k if len_k == 1 else 1) // FEWEST_TILES
    return max(1, min(rows, most, enough // max(tiles, 1)))


def _shared_lead(call: Call) -> tuple[int, ...] | None:
    """Return the leading axes that k and v have together, if one of them was broadcast to them."""
    lead = np.broadcast_shapes(call.k.shape[:-3], call.v.shape[:-3])
    different = math.prod(call.k.shape[:-3]) != math.prod(call.v.shape[:-3])
    return lead if different or math.prod(lead) != math.prod(call.k.shape[:-3]) else None
