"""A call of the forward with tangents: scratch, work items and the kernel, for like arrays."""

from __future__ import annotations

import numpy as np

from .arguments import registers_of, tile_sizes
from .calls import Bound
from .forward_tangent import Tangents, TangentScratch, forward_tangent, tangent_scratch
from .kernels import called_kernels, made_ready
from .layout import Array, Layout, Problem, Programs, Scratch
from .operands import Operand, Result
from .prepared import PreparedCall, changes_of, packed_shape, seconds, sinks_of
from .program import Program
from .thread_limits import num_threads
from .threads import parallel
from .widen import kind_of


class ForwardTangentCall(PreparedCall):
    """A forward with tangents, of one form: see `launch.forward_tangent` for its parameters.

    Parameters
    ----------
    problem : Problem
        Its sizes.
    programs : Programs
        What happens to its scores.
    tbias : Program
        What adds the tangent of the bias.
    q, k, v, tq, tk, tv, sink, out, tout, lse, tlse : array
        Arrays like those of the calls to come.
    block_q, block_kv : int
        Its tiles.
    """

    def __init__(
        self, problem: Problem, programs: Programs, tbias: Program, q: Array, k: Array, v: Array,
        tq: Array | None, tk: Array | None, tv: Array | None, sink: Array | None, out: Array,
        tout: Array, lse: Array, tlse: Array, block_q: int, block_kv: int,
    ) -> None:  # fmt: skip
        num_threads()  # a wrong number of threads is an error of the first call
        kind = kind_of(q.dtype)
        has = Tangents(int(tq is not None), int(tk is not None), int(tv is not None), tbias)
        called = called_kernels(problem, programs, False, kind, by_vectors=True, changes=(tbias,))
        self._pointers = pointers = made_ready(
            problem, programs, called, kind, forward_tangent, by_vectors=True
        )
        layout, scratch = Layout(problem, block_q, block_kv), Scratch()
        super().__init__(layout, programs)

        def read(array: Array, keys: bool = False) -> Operand:
            return Operand(layout, array, scratch, False, widened=True, keys=keys)

        self._operands = [read(q), read(k, keys=True), read(v, keys=True)]
        # In place of a tangent that there is not, kernels know of its array and do not read it.
        self._directions = [
            None if x is None else read(x, keys)
            for x, keys in ((tq, False), (tk, True), (tv, True))
        ]
        self._results = [
            Result(layout, x, scratch, narrow=pointers.narrow)
            for x in (out, tout, lse[..., None], tlse[..., None])
        ]
        self._sinks = sinks_of(layout, sink)
        self._tsinks = np.zeros(problem.heads, layout.number)
        self.shape = packed_shape(layout)
        changes = changes_of(layout, programs, pointers, self._ranges)
        sizes, registers = tile_sizes(layout.shape, changes), registers_of(tbias)
        work = layout.blocks(block_q, last_first=True)
        self._visited = np.zeros(len(work) * problem.heads, np.int64)
        self._seconds = seconds(layout.shape, 3 + has.q + has.k + has.v, layout.itemsize)
        flags = has._replace(bias=None)
        number = layout.number

        def scratch_of_thread() -> tuple[TangentScratch]:
            return (tangent_scratch(sizes, flags, registers, number),)

        self._kernel = Bound(
            forward_tangent,
            number,
            work,
            self.shape,
            changes,
            has,
            *(x.rows for x in self._operands),
            *(
                (x if own is None else own).rows
                for x, own in zip(self._operands, self._directions, strict=True)
            ),
            self._sinks,
            self._tsinks,
            *(x.rows for x in self._results),
            self._visited,
            scratch=scratch_of_thread,
            sizes=(sizes, flags, registers),
        )
        self.nbytes += scratch.nbytes

    @property
    def visited(self) -> int:
        """How many tiles the last call visited: those that are not EMPTY."""
        return int(self._visited.sum())

    def __call__(
        self, q: Array, k: Array, v: Array, tq: Array | None, tk: Array | None, tv: Array | None,
        sink: Array | None, tsink: Array | None, out: Array, tout: Array, lse: Array, tlse: Array,
    ) -> None:  # fmt: skip
        """Write all results."""
        for operand, array in zip(self._operands, (q, k, v), strict=True):
            operand.load(array)
        for direction, tangent in zip(self._directions, (tq, tk, tv), strict=True):
            if direction is not None and tangent is not None:
                direction.load(tangent)
        if sink is not None:
            self._sinks[...] = sink
        if tsink is not None:
            self._tsinks[...] = tsink
        results = out, tout, lse[..., None], tlse[..., None]
        for result, array in zip(self._results, results, strict=True):
            result.place(array)
        held = q, k, v, tq, tk, tv, *results, self
        parallel(self._kernel, self._visited.size, held, self._seconds)
        for result, array in zip(self._results, results, strict=True):
            result.finish(array)
