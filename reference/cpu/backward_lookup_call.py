"""The gradients of arrays that score changes look up, as a part of a call of the backward.

Memory grows with L and with the array, never with L squared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .arguments import KeyRanges, registers_of, tile_sizes
from .backward_lookup import backward_lookup
from .calls import Bound
from .float_modes import own_arithmetic
from .gradient_tile import gradient_scratch
from .kernels import called_kernels, made_ready
from .layout import Array, Layout, Programs
from .memory import aligned
from .microkernel import round_up
from .packing import size_of_pairs
from .placed import Step
from .prepared import changes_of, seconds
from .program import Program
from .structs import Packed
from .sums import store
from .tile import make_registers

# More parts keep more threads busy, and take more memory. Between turns, Ctrl-C is heard.
_MOST_PARTS, _MOST_BYTES, _SECONDS_OF_TURN = 64, 2**26, 0.2


class Read(NamedTuple):
    """What score changes read of an array.

    Attributes
    ----------
    place : Program
        The element's number in C order.
    slope : Program
        The derivative of the changed scores by the element; an empty program is 1.
    number : int
        The array, among those of a call that have gradients.
    """

    place: Program
    slope: Program
    number: int


class LookupSums:
    """Sums of parts of the work, which are added up in their order.

    Parameters
    ----------
    layout, programs, ranges, shape
        Those of the call.
    kind : int
        How the elements of its operands are stored.
    rows : sequence of Packed
        Where the rows of q, k, v, do, lse and delta lie.
    reads : sequence of Read
        What the score changes read.
    like : sequence of array
        Arrays like the gradients.

    Attributes
    ----------
    steps : list of Step
        What computes the sums, once delta is known.
    nbytes : int
        Memory of the sums.
    """

    def __init__(
        self, layout: Layout, programs: Programs, ranges: KeyRanges, shape: Packed, kind: int,
        rows: Sequence[Packed], reads: Sequence[Read], like: Sequence[Array],
    ) -> None:  # fmt: skip
        self._layout, self._programs, self._ranges = layout, programs, ranges
        self._shape, self._kind, self._rows = shape, kind, rows
        heads, blocks = layout.problem.heads, layout.blocks(layout.block_q, last_first=False)
        work = np.empty((len(blocks), heads, 3), np.int64)
        work[..., 0], work[..., 2] = blocks[:, :1], blocks[:, 1:]
        work[..., 1] = np.arange(heads)
        self._work = work.reshape(-1, 3)
        self.steps: list[Step] = []
        self._sums: list[tuple[int, Array]] = []
        for read in reads:
            size = like[read.number].size
            parts = max(1, min(_MOST_PARTS, _MOST_BYTES // max(8 * size, 1), len(self._work)))
            sums = np.zeros((parts, size))
            self._sums.append((read.number, sums))
            self._add_steps(read, sums)
        self.nbytes = sum(sums.nbytes for _, sums in self._sums)

    def _add_steps(self, read: Read, sums: Array) -> None:
        layout, programs = self._layout, replace(self._programs, slope=read.slope)
        problem, number, itemsize = layout.problem, layout.number, layout.itemsize
        called = called_kernels(
            problem, programs, True, self._kind, by_vectors=True, changes=(read.place,)
        )
        pointers = made_ready(
            problem, programs, called, self._kind, backward_lookup, by_vectors=True
        )
        changes = changes_of(layout, programs, pointers, self._ranges)
        sizes, registers = tile_sizes(layout.shape, changes), registers_of(read.place)
        lanes = min(round_up(sizes.block_q, sizes.lanes_per_vector), sizes.panel)
        counts = [size_of_pairs(d, layout.block_q, itemsize) for d in (problem.d, problem.d_v)]

        def scratch_of() -> tuple[Any, ...]:
            return (
                gradient_scratch(sizes, number),
                *make_registers(registers, lanes, number),
                np.empty(lanes),
                *aligned(counts, number),
            )

        parts, items = len(sums), len(self._work)
        duration = seconds(layout.shape, 3, itemsize)
        turns = max(1, min(int(duration / _SECONDS_OF_TURN / parts), items // parts))
        step = max(1, -(-items // turns))
        for begin in range(0, items, step):
            end = min(begin + step, items)
            bound = Bound(
                backward_lookup, number, begin, end, parts, self._work, self._shape, changes,
                read.place, *self._rows, sums, scratch=scratch_of, sizes=(sizes, registers),
            )  # fmt: skip
            self.steps.append(Step(bound, parts, duration / turns))

    def clear(self) -> None:
        """Begin with 0."""
        for _, sums in self._sums:
            sums[...] = 0

    @own_arithmetic
    def finish(self, gradients: Sequence[Array]) -> None:
        """Write the gradients, rounded to their types."""
        totals: dict[int, Array] = {}
        for number, sums in self._sums:
            total = np.add.reduce(sums, axis=0)
            totals[number] = totals[number] + total if number in totals else total
        for number, total in totals.items():
            store(total.reshape(gradients[number].shape), gradients[number])
