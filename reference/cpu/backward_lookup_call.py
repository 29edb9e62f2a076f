"""A call of the gradient of an array that a score change looks up: scratch, parts, and the kernel.

Memory grows with L and with the array, never with L squared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .arguments import registers_of, tile_sizes
from .backward_lookup import backward_lookup
from .backward_tangent_delta import row_sums
from .calls import Bound
from .float_modes import own_arithmetic
from .gradient_tile import gradient_scratch
from .kernels import called_kernels, made_ready
from .layout import Array, Layout, Problem, Programs, Scratch
from .memory import aligned
from .microkernel import round_up
from .operands import Operand
from .packing import size_of_pairs
from .prepared import PreparedCall, changes_of, packed_shape, seconds
from .program import Program
from .thread_limits import num_threads
from .threads import parallel
from .tile import make_registers
from .widen import kind_of

# More parts keep more threads busy, and take more memory. Between turns, Ctrl-C is heard.
_MOST_PARTS, _MOST_BYTES, _SECONDS_OF_TURN = 64, 2**26, 0.2


class BackwardLookupCall(PreparedCall):
    """Adds to the gradients of arrays once: see `launch.backward_lookups`."""

    def __init__(self, problem: Problem, programs: Programs, block_q: int, block_kv: int) -> None:
        num_threads()  # a wrong number of threads is an error of the first call
        super().__init__(Layout(problem, block_q, block_kv), programs)
        self.shape = packed_shape(self._layout)

    def __call__(
        self, reads: Sequence[tuple[Program, Program, Array]], do: Array, q: Array, k: Array,
        v: Array, out: Array, lse: Array, dlse: Array | None,
    ) -> None:  # fmt: skip
        """Add to totals, of float64: of each the program of places, that of slopes, and it."""
        layout, scratch = self._layout, Scratch()
        heads = layout.problem.heads
        blocks = layout.blocks(layout.block_q, last_first=False)
        if not len(blocks) or not heads:
            return
        delta = self._delta(do, out, dlse)

        def read(array: Array, keys: bool = False) -> Operand:
            made = Operand(layout, array, scratch, False, widened=True, keys=keys)
            made.load(array)
            return made

        operands = [read(q), read(k, keys=True), read(v, keys=True), read(do)]
        operands += [read(x[..., None]) for x in (lse, delta)]
        rows = [each.rows for each in operands]
        work = np.empty((len(blocks), heads, 3), np.int64)
        work[..., 0], work[..., 2] = blocks[:, :1], blocks[:, 1:]
        work[..., 1] = np.arange(heads)
        held = rows, operands, delta, do, q, k, v, lse, self
        for place, slope, total in reads:
            self._add(place, slope, total, work.reshape(-1, 3), rows, kind_of(q.dtype), held)

    @own_arithmetic
    def _delta(self, do: Array, out: Array, dlse: Array | None) -> Array:
        delta = row_sums(out, do, self._layout.number)
        return delta if dlse is None else delta - dlse

    def _add(
        self, place: Program, slope: Program, total: Array, work: Array, rows: list[Any],
        kind: int, held: object,
    ) -> None:  # fmt: skip
        layout, programs = self._layout, replace(self._programs, slope=slope)
        problem, number, itemsize = layout.problem, layout.number, layout.itemsize
        called = called_kernels(problem, programs, True, kind, by_vectors=True, changes=(place,))
        pointers = made_ready(problem, programs, called, kind, backward_lookup, by_vectors=True)
        changes = changes_of(layout, programs, pointers, self._ranges)
        sizes, registers = tile_sizes(layout.shape, changes), registers_of(place)
        lanes = min(round_up(sizes.block_q, sizes.lanes_per_vector), sizes.panel)
        counts = [size_of_pairs(d, layout.block_q, itemsize) for d in (problem.d, problem.d_v)]

        def scratch_of() -> tuple[Any, ...]:
            return (
                gradient_scratch(sizes, number),
                *make_registers(registers, lanes, number),
                np.empty(lanes),
                *aligned(counts, number),
            )

        parts = max(1, min(_MOST_PARTS, _MOST_BYTES // max(total.nbytes, 1), len(work)))
        sums = np.zeros((parts, total.size))
        duration = seconds(layout.shape, 3, itemsize)
        turns = max(1, min(int(duration / _SECONDS_OF_TURN / parts), len(work) // parts))
        step = -(-len(work) // turns)
        for begin in range(0, len(work), step):
            end = min(begin + step, len(work))
            bound = Bound(
                backward_lookup, number, begin, end, parts, work, self.shape, changes, place,
                *rows, sums, scratch=scratch_of,
            )  # fmt: skip
            parallel(bound, parts, (held, sums, work), duration / turns)
        _add_up(sums, total)


@own_arithmetic
def _add_up(sums: Array, total: Array) -> None:
    for part in sums:
        total += part.reshape(total.shape)
