"""The scratch memory of a backward, as shapes and types, before it is allocated."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..problem.call import Call

GROUP_ROWS, UNIT = 8, 16  # of sums of dq: rows and columns that are stored together


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

    If k and v are broadcast over different axes, it also has their gradients before they are
    summed; with `atomic_dq` also the sums of dq, unless dq has the accumulator's type.
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
            scratch[name] = ArraySpec((*shared, *array.shape[-3:]), problem.accumulator)
    if atomic_dq and problem.dtype != problem.accumulator:
        *lead_q, rows, columns = call.q.shape
        groups = problem.rows.row_groups(rows, GROUP_ROWS, problem.batch)
        sizes = groups * GROUP_ROWS, -(-columns // UNIT) * UNIT
        scratch["dq_accum"] = ArraySpec((*lead_q, *sizes), problem.accumulator)
    return scratch


def _shared_lead(call: Call) -> tuple[int, ...] | None:
    """Return the leading axes that k and v have together, if one of them was broadcast to them."""
    lead = np.broadcast_shapes(call.k.shape[:-3], call.v.shape[:-3])
    different = math.prod(call.k.shape[:-3]) != math.prod(call.v.shape[:-3])
    return lead if different or math.prod(lead) != math.prod(call.k.shape[:-3]) else None
