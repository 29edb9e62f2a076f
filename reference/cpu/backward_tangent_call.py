"""A call of the backward's tangent: what comes before its kernels, scratch, and the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from .arguments import registers_of, tile_sizes
from .backward_tangent import backward_tangent_dkdv, backward_tangent_dq
from .backward_tangent_delta import backward_tangent_delta, backward_tangent_sink
from .backward_work import is_one_pass_faster, key_blocks
from .bias_gradient import no_bias_sums, sum_bias_parts
from .bias_totals import BiasTotals
from .calls import Bound
from .float_modes import own_arithmetic
from .forward_tangent_call import ForwardTangentCall
from .kernels import called_kernels, made_ready
from .layout import Array, Layout, Problem, Programs, Scratch
from .memory import ROWS, aligned
from .microkernel import round_up
from .operands import Operand, Result
from .packing import size_of_pairs
from .prepared import PreparedCall, changes_of, packed_shape, seconds
from .program import Program
from .structs import Packed
from .sums import summed_to
from .tangent_tile import Moving, tile_scratch
from .thread_limits import num_threads
from .threads import parallel
from .widen import kind_of


class BackwardTangentCall(PreparedCall):
    """Computes the tangents of all gradients once: see `launch.backward_tangent`."""

    def __init__(self, problem: Problem, programs: Programs, block_q: int, block_kv: int) -> None:
        num_threads()  # a wrong number of threads is an error of the first call
        super().__init__(Layout(problem, block_q, block_kv), programs)
        self.shape = packed_shape(self._layout)
        self.visited = 0

    def __call__(
        self, tbias_program: Program, curve: Program, do: Array, q: Array, k: Array, v: Array,
        out: Array, lse: Array, dlse: Array | None, sink: Array | None, tdo: Array | None,
        tdlse: Array | None, tq: Array | None, tk: Array | None, tv: Array | None,
        tsink: Array | None, gradients: tuple[Array | None, ...], results: tuple[Array, Array],
    ) -> None:  # fmt: skip
        """Write the tangents of dq, dk, dv, dbias and dsink, of out and of lse."""
        layout, programs = self._layout, self._programs
        problem, number = layout.problem, layout.number
        dq, dk, dv, dbias, dsink = gradients
        if not layout.batch or not problem.heads:
            for each in gradients:
                if each is not None:
                    each[...] = 0
            return
        # The tangents of out and lse, in the accumulator's type.
        tout, mu = np.empty(out.shape, number), np.empty(lse.shape, number)
        made = np.empty(out.shape, number), tout, np.empty(lse.shape, number), mu
        tiles = layout.block_q, layout.block_kv
        read = q, k, v, tq, tk, tv, sink
        forward = ForwardTangentCall(problem, programs, tbias_program, *read, *made, *tiles)
        forward(*read, tsink, *made)
        self.visited += forward.visited
        delta, tdelta = backward_tangent_delta(number, do, out, dlse, tdo, tdlse, tout)
        if dsink is not None:
            backward_tangent_sink(number, sink, tsink, lse, mu, delta, tdelta, dsink)
        directions = tq, tk, tv, tdo
        fields: list[Any] = [*(int(x is not None) for x in directions), tbias_program, curve]
        moving = Moving(*fields)
        given = do, q, k, v, directions, lse, mu, delta, tdelta
        self._tiles(moving, given, (dq, dk, dv), dbias)
        for array, to in zip((tout, mu), results, strict=True):
            to[...] = array

    def _tiles(
        self, moving: Moving, given: Any, targets: tuple[Any, Any, Any], dbias: Array | None
    ) -> None:
        do, q, k, v, (tq, tk, tv, tdo), lse, mu, delta, tdelta = given
        dq, dk, dv = targets
        layout, programs, scratch = self._layout, self._programs, Scratch()
        problem, number, lanes = layout.problem, layout.number, layout.lanes
        kind = kind_of(q.dtype)
        kernels = [backward_tangent_dkdv, backward_tangent_dq]
        if dbias is not None:
            kernels.append(sum_bias_parts)
        more = moving.bias, moving.curve
        called = called_kernels(problem, programs, True, kind, by_vectors=True, changes=more)
        pointers = made_ready(problem, programs, called, kind, *kernels, by_vectors=True)

        def read(array: Array, keys: bool = False) -> Operand:
            made = Operand(layout, array, scratch, False, widened=True, keys=keys)
            made.load(array)
            return made

        own = [read(q), read(k, keys=True), read(v, keys=True), read(do)]
        # In place of a tangent that there is not, kernels know of its array and do not read it.
        moved = [
            here if x is None else read(x, n in (1, 2))
            for n, (x, here) in enumerate(zip((tq, tk, tv, tdo), own, strict=True))
        ]
        rows = [read(x[..., None]) for x in (lse, mu, delta, tdelta)]
        operands = [x.rows for x in (*own, *moved, *rows)]

        # If k and v were broadcast over different axes, compute over their common ones, then sum.
        kv_lead = () if problem.packed else np.broadcast_shapes(k.shape[:-3], v.shape[:-3])
        apart = not problem.packed and any(x.shape[:-3] != kv_lead for x in (dk, dv))
        sums = [dk, dv]
        if apart:
            sums = [scratch.empty((*kv_lead, *x.shape[-3:]), number) for x in (dk, dv)]
        of_dk, of_dv = (Result(layout, x, scratch, False, pointers.narrow, keys=True) for x in sums)
        of_dq = Result(layout, dq, scratch, False, pointers.narrow)
        groups, members, starts = layout.groups(kv_lead)
        alone = layout.groups(() if problem.packed else q.shape[:-3])[0] == layout.batch
        parts = np.arange(groups * problem.heads_kv).reshape(groups, problem.heads_kv)
        totals, bias_sums = None, no_bias_sums(number)
        if dbias is not None:
            totals = BiasTotals(layout, kv_lead, (members, starts), dbias)
            totals.clear()
            parts, bias_sums = totals.parts, totals.sums

        # As in `backward_call`: where there are enough heads, one pass computes dq, too.
        one_pass = alone and is_one_pass_faster(int(parts.max(initial=-1)) + 1)
        kept, in_memory = layout.panels(problem.d * int(one_pass), scratch)
        dq_sums = Packed(ROWS, in_memory)
        changes = changes_of(layout, programs, pointers, self._ranges)
        sizes = tile_sizes(layout.shape, changes)
        registers = registers_of(moving.curve), registers_of(moving.bias)
        width, width_v = (round_up(d, lanes) for d in (problem.d, problem.d_v))
        block = [size_of_pairs(layout.block_kv, x, layout.itemsize) for x in (width, width_v)]
        panel = round_up(changes.panel, lanes) * problem.d

        def scratch_of(*counts: int) -> Any:
            return lambda: (tile_scratch(sizes, *registers, number), *aligned(counts, number))

        common = self.shape, changes, moving, *operands
        held = given, targets, kept, self
        work = seconds(layout.shape, 10 if one_pass else 8, layout.itemsize)
        counts = -(-layout.len_k[members[starts]] // layout.block_kv)
        lists = list(key_blocks(layout, starts, counts, parts, one_pass))
        for runs in lists:
            visited = np.zeros(len(runs.rows), np.int64)
            of_queries = int(one_pass), dq_sums, of_dq.rows
            results = of_dk.rows, of_dv.rows, *of_queries, bias_sums, visited
            bound = Bound(
                backward_tangent_dkdv, number, *runs, members, *common, *results,
                scratch=scratch_of(*block),
            )  # fmt: skip
            parallel(bound, len(runs.starts) - 1, held, work / len(lists))
            self.visited += int(visited.sum())
        if not one_pass:
            q_lead = () if problem.packed else q.shape[:-3]
            blocks, sharers = layout.shared_blocks(
                q_lead, layout.len_q, layout.block_q, last_first=True
            )
            bound = Bound(
                backward_tangent_dq, number, blocks, sharers, *common, of_dq.rows,
                scratch=scratch_of(panel),
            )  # fmt: skip
            parallel(bound, len(blocks) * problem.heads, held, 7 * work / 8)
        if totals is not None and dbias is not None:
            totals.finish(dbias)
        of_dq.finish(dq)
        if apart:
            _finish_apart(sums, (dk, dv))
        else:
            of_dk.finish(dk)
            of_dv.finish(dv)


@own_arithmetic
def _finish_apart(sums: list[Array], targets: tuple[Array, Array]) -> None:
    for computed, target in zip(sums, targets, strict=True):
        target[...] = summed_to(computed, target.shape).astype(target.dtype)
