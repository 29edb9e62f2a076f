"""The scratch memory of a backward, as shapes and types, before it is allocated."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..problem.call import Call

GROUP_ROWS, UNIT = 8, 16  # of sums of dq: rows and columns that are stored together
# Of the bias: pairs of a tile, tiles that fill a GPU, and the fewest planes for which a block pays.
TILE_PAIRS, ENOUGH_TILES, FEWEST_PLANES = 64 * 128, 256, 8


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


def scratch_of(call: Call, atomic_dq: bool) -> dict[str, ArraySpec]:
    """Return the scratch memory of a backward: delta, one number for each query.

    If k and v are broadcast over different axes, it also has parts of their gradients, which are
    summed at the end, and parts of the bias's gradient if blocks share its tiles; with `atomic_dq`
    also the sums of dq, unless dq has the accumulator's type.
    """
    problem = call.problem
    scratch = {
        "delta": ArraySpec(
            (*problem.array_lead, problem.heads, call.q.shape[-2]), problem.accumulator
        )
    }
    shared = _shared_lead(call)
    if shared is not None:
        for name, array in (("dk", call.k), ("dv", call.v)):
            scratch[parts_of(name)] = ArraySpec((*shared, *array.shape[-3:]), problem.accumulator)
    parts = _bias_parts(call)
    if parts > 1:
        assert call.bias is not None
        shape = (1,) * (3 - call.bias.ndim) + call.bias.shape
        scratch[parts_of("dbias")] = ArraySpec((parts, *shape), problem.accumulator)
    if atomic_dq and problem.dtype != problem.accumulator:
        *lead_q, rows, columns = call.q.shape
        groups = problem.rows.row_groups(rows, GROUP_ROWS, problem.batch)
        sizes = groups * GROUP_ROWS, -(-columns // UNIT) * UNIT
        scratch["dq_accum"] = ArraySpec((*lead_q, *sizes), problem.accumulator)
    return scratch


def parts_of(gradient: str) -> str:
    """Return the name of the scratch memory with the parts of a gradient."""
    return f"{gradient} parts"


def _bias_parts(call: Call) -> int:
    """Return how many blocks share the planes whose scores were given the same tile of the bias.

    A plane is a head of a batch entry. Tiles that many planes share are few: without parts, each
    would be one block's, and most of a GPU idle. The parts of a slice of the bias do not depend on
    how many slices there are.
    """
    if call.bias is None:
        return 1
    *lead, heads, len_q, len_k = (1,) * (3 - call.bias.ndim) + call.bias.shape
    tiles = heads * -(-len_q * len_k // TILE_PAIRS)
    planes = call.problem.batch // max(math.prod(lead), 1)
    if heads == 1:
        planes *= call.problem.heads
    return max(1, min(planes // FEWEST_PLANES, ENOUGH_TILES // max(tiles, 1)))


def _shared_lead(call: Call) -> tuple[int, ...] | None:
    """Return the leading axes that k and v have together, if one of them was broadcast to them."""
    lead = np.broadcast_shapes(call.k.shape[:-3], call.v.shape[:-3])
    different = math.prod(call.k.shape[:-3]) != math.prod(call.v.shape[:-3])
    return lead if different or math.prod(lead) != math.prod(call.k.shape[:-3]) else None
