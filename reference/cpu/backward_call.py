"""A call of the backward: scratch, work items and the kernels in their order, for any arrays.

Memory grows with L, never with L squared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from .amx_gradient import tile_gradient_scratch
from .amx_memory import SIDE
from .arguments import tile_sizes
from .backward import backward_dkdv, backward_dq
from .backward_delta import BLOCK, backward_delta
from .backward_lookup_call import LookupSums, Read
from .backward_work import Runs, is_one_pass_faster, key_blocks, whole_heads
from .bias_gradient import no_bias_sums, sum_bias_parts
from .bias_totals import BiasTotals
from .calls import Bound
from .chain import Chain
from .checksum import head_checksums, is_whole
from .float_modes import own_arithmetic
from .gradient_tile import gradient_scratch
from .jit import prepare
from .kernels import by_tiles, called_kernels, made_ready
from .layout import Array, Layout, Problem, Programs, Scratch
from .memory import ROWS, aligned
from .microkernel import round_up
from .operands import Operand, Result
from .packing import size_of_pairs
from .placed import Placed, Step, Value
from .prepared import (
    PreparedCall,
    changes_of,
    packed_shape,
    seconds,
    sinks_of,
)
from .structs import Packed
from .sums import summed_to
from .thread_limits import num_threads
from .threads import parallel
from .widen import kind_of

CACHED = 1 << 20  # bytes that a core's cache keeps between two kernels of a chain


class BackwardCall(PreparedCall):
    """A backward of one form: see `launch.backward` for its parameters.

    Parameters
    ----------
    problem : Problem
        Its sizes.
    programs : Programs
        What happens to its scores.
    do, q, k, v, out, lse, dlse, sink : array
        Arrays like those of the calls to come.
    dq, dk, dv, dbias : array
        Likewise.
    block_q, block_kv : int
        Its tiles.
    workspace : array or None
        Memory for scratch.
    reads : sequence of Read
        What the score changes read of arrays that have gradients.
    dlookups : sequence of array
        Arrays like these gradients.
    """

    sums_inputs = False  # whether a call can sum the words of q, k, v and out

    def __init__(
        self, problem: Problem, programs: Programs, do: Array, q: Array, k: Array, v: Array,
        out: Array, lse: Array, dlse: Array | None, sink: Array | None, dq: Array, dk: Array,
        dv: Array, dbias: Array | None, block_q: int, block_kv: int, workspace: Array | None,
        reads: Sequence[Read] = (), dlookups: Sequence[Array] = (),
    ) -> None:  # fmt: skip
        num_threads()  # a wrong number of threads is an error of the first call
        scratch = Scratch(workspace)
        layout = Layout(problem, block_q, block_kv)
        super().__init__(layout, programs)
        self._has_sink = sink is not None
        self._no_dlse: Array | None = None
        self.shape = packed_shape(layout)
        self._visited: list[Array] = []
        # An array that was broadcast to no batch entry, or to no head, still has a gradient.
        self._is_empty = not layout.batch or not problem.heads
        if self._is_empty:
            return
        kind = kind_of(q.dtype)
        self._tiles = by_tiles(problem.accumulator, kind)
        dkdv = self._tiles.dkdv if self._tiles else backward_dkdv
        kernels = [backward_delta, dkdv, head_checksums]
        if dbias is not None:
            kernels.append(sum_bias_parts)
        called = called_kernels(problem, programs, True, kind)
        self._pointers = pointers = made_ready(problem, programs, called, kind, *kernels)
        self._seconds = seconds(layout.shape, 5, layout.itemsize)

        def read(array: Array, widened: bool = True, keys: bool = False) -> Operand:
            return Operand(layout, array, scratch, False, widened, keys)

        self._q, self._do, self._k = read(q), read(do), read(k, keys=True)
        self._v, self._out = read(v, keys=True), read(out)
        self._lse = read(lse[..., None], False)
        if dlse is None:
            dlse = np.broadcast_to(np.zeros((), layout.number), lse.shape)
            self._no_dlse = dlse
        self._dlse = read(dlse[..., None], False)
        delta = scratch.empty((*lse.shape, 1), layout.number)
        self._delta = Packed(ROWS, layout.rows(delta))

        self._sinks = sinks_of(layout, sink)
        self._dsinks = np.zeros(layout.batch * problem.heads, layout.number)
        self._held: list[object] = [delta]

        # If k and v were broadcast over different axes, compute over their common ones, then sum.
        self._kv_lead = () if problem.packed else np.broadcast_shapes(k.shape[:-3], v.shape[:-3])
        self._apart = not problem.packed and (
            dk.shape[:-3] != self._kv_lead or dv.shape[:-3] != self._kv_lead
        )
        self._sums: list[Array] = []
        if self._apart:
            self._sums = [
                scratch.empty((*self._kv_lead, *x.shape[-3:]), layout.number) for x in (dk, dv)
            ]
        self._dk, self._dv = (
            Result(layout, x, scratch, False, pointers.narrow, keys=True)
            for x in (self._sums or (dk, dv))
        )
        self._q_lead = () if problem.packed else q.shape[:-3]
        self._groups = layout.groups(self._kv_lead)
        kv_groups, members, starts = self._groups
        self._dbias: BiasTotals | None = None
        self._parts = np.arange(kv_groups * problem.heads_kv).reshape(kv_groups, problem.heads_kv)
        if dbias is not None:
            self._dbias = BiasTotals(layout, self._kv_lead, (members, starts), dbias)
            self._parts = self._dbias.parts
        self._one_pass = layout.groups(q.shape[:-3])[0] == layout.batch and is_one_pass_faster(
            int(self._parts.max(initial=-1)) + 1
        )
        self._dq = Result(layout, dq, scratch, False, pointers.narrow)
        # In one pass, what blocks of keys add to dq waits in memory for the last one.
        in_blocks = (layout.len_k > block_kv) | (layout.len_k == 0)
        depth = problem.d + (-problem.d % SIDE if self._tiles else 0)
        memory, sums = layout.panels(depth * int(self._one_pass and in_blocks.any()), scratch)
        self._dq_sums = Packed(ROWS, sums)
        self._held.append(memory)
        self.nbytes += scratch.nbytes
        if self._dbias is not None:
            self.nbytes += self._dbias.nbytes
        self.sums_inputs = self._one_pass and not problem.packed and all(
            operand.is_in_place and is_whole(x, layout.batch * count, x.shape[-2], x.shape[-1])
            for operand, x, count in (
                (self._q, q, problem.heads), (self._k, k, problem.heads_kv),
                (self._v, v, problem.heads_kv), (self._out, out, problem.heads),
            )
        )  # fmt: skip
        self._in_one_pass: list[tuple[int, Runs, tuple[Bound, Bound]]] = []
        self._steps = self._made_steps()
        self._summing_steps: list[Step] = []
        self._found: list[Array] = []
        self._dlookups: LookupSums | None = None
        if reads:
            rows = [x.rows for x in (self._q, self._k, self._v, self._do, self._lse)]
            self._dlookups = LookupSums(
                layout, programs, self._ranges, self.shape, kind, [*rows, self._delta], reads,
                dlookups,
            )  # fmt: skip
            self._steps += self._dlookups.steps
            self.nbytes += self._dlookups.nbytes

    @property
    def visited(self) -> int:
        """How many tiles `backward_dkdv` visited in the last call."""
        return sum(int(each.sum()) for each in self._visited)

    def __call__(
        self, do: Array, q: Array, k: Array, v: Array, out: Array, lse: Array,
        dlse: Array | None, sink: Array | None, dq: Array, dk: Array, dv: Array,
        dbias: Array | None, dsink: Array | None, dlookups: Sequence[Array] = (),
        sums_inputs: bool = False,
    ) -> None:  # fmt: skip
        """Write every gradient; with `sums_inputs`, sum the words of what was read, too."""
        if self._is_empty:
            for gradient in (dq, dk, dv, dbias, dsink, *dlookups):
                if gradient is not None:
                    gradient[...] = 0
            return
        if dlse is None:
            dlse = self._no_dlse
            assert dlse is not None, "the call was made for none"
        for operand, array in (
            (self._q, q), (self._do, do), (self._k, k), (self._v, v), (self._out, out),
            (self._lse, lse[..., None]), (self._dlse, dlse[..., None]),
        ):  # fmt: skip
            operand.load(array)
        self._dq.place(dq)
        self._classes.fill(0)
        if not self._apart:
            self._dk.place(dk)
            self._dv.place(dv)
        if sink is not None:
            self._sinks[...] = sink
        arrays = do, q, k, v, out, lse, dlse, dq, dk, dv, self
        if self._dbias is not None:
            self._dbias.clear()
        if self._dlookups is not None:
            self._dlookups.clear()
        for step in self._summing() if sums_inputs else self._steps:
            parallel(step.kernel, step.items, arrays, step.work)
        if dsink is not None:
            self._finish_sink(dsink)
        if dbias is not None and self._dbias is not None:
            self._dbias.finish(dbias)
        if self._dlookups is not None:
            self._dlookups.finish(dlookups)
        self._dq.finish(dq)
        if self._apart:
            self._finish_apart(dk, dv)
        else:
            self._dk.finish(dk)
            self._dv.finish(dv)

    @property
    def found(self) -> dict[str, int]:
        """The sums of the arrays that the last call has read, as `checksum.checksums` has them."""
        totals = sum(x.sum(axis=0) for x in self._found)
        return dict(zip(("q", "k", "v", "out"), map(int, totals), strict=True))

    def placed(
        self,
        tables: Sequence[Value],
        wants_lse: bool,  # noqa: ARG002, gradients have none
        by_team: bool,
    ) -> Placed | None:
        """Return what makes the call again at addresses, if there is no sink.

        They are those of do, q, k, v, out and lse, of the gradients, and of tables; the gradient of
        a bias is contiguous, and in the accumulator's type.
        """
        if self._is_empty or self._apart or self._has_sink or self._no_dlse is None:
            return None
        if self._classes.size or self._dlookups is not None:  # which are found anew in each call
            return None
        arrays: dict[str, Operand | Result] = {
            "d_out": self._do, "q": self._q, "k": self._k, "v": self._v, "out": self._out,
            "lse": self._lse, "dq": self._dq, "dk": self._dk, "dv": self._dv,
        }  # fmt: skip
        if self._dbias is None:
            return self._placed(self._steps, arrays, tables, by_team=by_team)
        sums = self._dbias
        steps = [*self._steps, sums.last_step]
        return self._placed(steps, arrays, tables, [sums.sums.sums], by_team=by_team)

    def _chain(self, runs: Runs, *kernels: Bound) -> Chain:
        """Return kernels that take turns after as many items as the caches hold."""
        shape, problem = self._layout.shape, self._layout.problem
        columns = self._layout.itemsize * 2 * (problem.d + problem.d_v)
        numbers = shape.heads * int(shape.len_q.sum()) + problem.heads_kv * int(shape.len_k.sum())
        of_item = max(1, columns * numbers // max(1, len(runs.starts) - 1))
        return Chain(*kernels, every=max(1, CACHED // of_item))

    def _summing(self) -> list[Step]:
        """Return the steps of a call that sums the words of q, k, v and out, too."""
        if not self._summing_steps:
            number, (_, members, _) = self._layout.number, self._groups
            steps = list(self._steps)
            for n, runs, kernels in self._in_one_pass:
                found = np.zeros((len(runs.starts) - 1, 4), np.int64)
                arrays = [x.rows for x in (self._q, self._k, self._v, self._out)]
                sums = Bound(head_checksums, number, *runs, members, self.shape, *arrays, found)
                steps[n] = steps[n]._replace(kernel=self._chain(runs, *kernels, sums))
                self._found.append(found)
            self._summing_steps = steps
        return self._summing_steps

    @own_arithmetic
    def _finish_sink(self, dsink: Array) -> None:
        sums = self._dsinks.reshape(self._layout.batch, self._layout.problem.heads)
        dsink[...] = sums.sum(axis=0, dtype=self._layout.number)

    @own_arithmetic
    def _finish_apart(self, *targets: Array) -> None:
        for computed, target in zip(self._sums, targets, strict=True):
            target[...] = summed_to(computed, target.shape).astype(target.dtype)

    def _made_steps(self) -> list[Step]:
        """Return what computes the gradients, in its order."""
        problem, layout, pointers = self._layout.problem, self._layout, self._pointers
        number, itemsize, heads = layout.number, layout.itemsize, problem.heads
        shape, lanes = layout.shape, layout.lanes
        columns, columns_v = (round_up(count, lanes) for count in (problem.d, problem.d_v))
        steps: list[Step] = []
        work = self._seconds

        def add(bound: Bound | Chain, items: int, share: float) -> None:
            """Add what takes this share of the five products' time."""
            steps.append(Step(bound, items, work * share))

        _, members, starts = self._groups

        def delta(runs: Runs) -> Bound:
            return Bound(
                backward_delta,
                number,
                *runs,
                members,
                self.shape,
                pointers.widen,
                pointers.prefetch,
                self._do.rows,
                self._out.rows,
                self._dlse.rows,
                self._lse.rows,
                self._sinks,
                self._delta,
                self._dsinks,
                scratch=lambda: tuple(
                    aligned((BLOCK * problem.d_v, BLOCK * problem.d_v, BLOCK), number)
                ),
                sizes=problem.d_v,
            )

        if not self._one_pass:
            runs = whole_heads(layout, starts)
            add(delta(runs), len(runs.rows), 0.02)
        tiles = self._tiles
        changes = changes_of(
            layout, self._programs, pointers, self._ranges, tiles is not None, keeps_classes=True
        )
        self._classes = changes.lists.classes
        self.nbytes += self._classes.nbytes
        block_q, block_kv = layout.block_q, layout.block_kv
        counts = -(-layout.len_k[members[starts]] // block_kv)
        sizes = tile_sizes(shape, changes)

        def pairs(rows: int, *widths: int) -> list[int]:
            return [size_of_pairs(rows, wide, itemsize) for wide in widths]

        def scratch_of(*counts: int) -> tuple[Any, ...]:
            if tiles is not None:
                return (tile_gradient_scratch(sizes, number, tiles.parts, not self._one_pass),)
            return gradient_scratch(sizes, number), *aligned(counts, number)

        # Panels, the same rows as pairs, dq of a panel, dk and dv of a block of keys.
        panel = changes.panel
        in_columns = [size_of_pairs(d, panel, itemsize) for d in (problem.d, problem.d_v)]
        of_panel = (*in_columns, *pairs(panel, columns, columns_v), in_columns[0])
        counts_dkdv = (*of_panel, *pairs(block_kv, columns, columns_v))
        self._visited = []
        # In one pass, who computes a head's gradients computes its delta before.
        lists = list(key_blocks(layout, starts, counts, self._parts, self._one_pass))
        bias_sums = no_bias_sums(number) if self._dbias is None else self._dbias.sums
        for runs in lists:
            visited = np.zeros(len(runs.rows), np.int64)
            self._visited.append(visited)
            dkdv = Bound(
                tiles.dkdv if tiles else backward_dkdv,
                number,
                *runs,
                members,
                self.shape,
                changes,
                self._q.rows,
                self._k.rows,
                self._v.rows,
                self._do.rows,
                self._lse.rows,
                self._delta,
                int(self._one_pass),
                self._dq_sums,
                self._dq.rows,
                self._dk.rows,
                self._dv.rows,
                bias_sums,
                visited,
                scratch=lambda: scratch_of(*counts_dkdv),
                sizes=sizes,
            )
            kernel: Bound | Chain = dkdv
            if self._one_pass:
                both = delta(runs), dkdv
                kernel = self._chain(runs, *both)
                self._in_one_pass.append((len(steps), runs, both))
            add(kernel, len(runs.starts) - 1, 1 / len(lists))
        if not self._one_pass:
            dq_kernel = tiles.dq if tiles else backward_dq
            prepare([(dq_kernel, number)])
            q_work, q_members = layout.shared_blocks(
                self._q_lead, layout.len_q, block_q, last_first=True
            )
            queries = [size_of_pairs(d, block_q, itemsize) for d in (problem.d, problem.d_v)]
            add(
                Bound(
                    dq_kernel,
                    number,
                    q_work,
                    q_members,
                    self.shape,
                    changes,
                    self._q.rows,
                    self._k.rows,
                    self._v.rows,
                    self._do.rows,
                    self._lse.rows,
                    self._delta,
                    self._dq.rows,
                    scratch=lambda: scratch_of(*queries, queries[0]),
                    sizes=sizes,
                ),
                len(q_work) * heads,
                0.6,
            )
        return steps


class _Typed(Problem, Protocol):
    @property
    def dtype(self) -> np.dtype[Any]: ...


def backward_scratch_size(problem: _Typed, block_q: int) -> int:
    """Return the bytes of workspace that any `backward` of this problem needs at most."""
    layout = Layout(problem, block_q, block_q)
    itemsize, lanes, heads = layout.itemsize, layout.lanes, problem.heads

    def whole(columns: int) -> int:
        return -(-columns // lanes) * lanes

    rows_q = heads * int(layout.len_q.sum())
    rows_k = problem.heads_kv * int(layout.len_k.sum())
    panels = heads * int(layout.panel_lanes().sum())
    wide, wide_v = whole(problem.d), whole(problem.d_v)
    may_be_tiles = problem.dtype.itemsize < itemsize
    depth = problem.d + (-problem.d % SIDE if may_be_tiles else 0)
    elements = [
        *(rows_q * wide,) * 2,  # q, dq
        *(rows_q * wide_v,) * 2,  # do, out
        *(rows_k * wide, rows_k * wide_v) * 2,  # k, v, dk, dv
        *(rows_q * lanes,) * 3,  # lse, dlse, delta
        panels * depth,  # sums of dq
    ]
    return sum(size * itemsize + 2 * Scratch.ALIGNMENT for size in elements)
