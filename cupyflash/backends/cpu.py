"""Calls on NumPy arrays, by the kernels of `reference.cpu`; the first call imports Numba."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..expr.nodes import Expr
from ..problem.call import Array, Call, Gradients, Plan, Results
from ..problem.encoding import NUMBERS
from ..problem.formats import values
from ..problem.reduction_form import Form
from ..problem.route import CallResult
from ..problem.tangents import SecondTangents, TangentResults, Tangents
from ..rowwise import Arrays, Operation, scales_on_cpu
from . import cpu_lookups, cpu_programs, cpu_reductions, cpu_tiles
from .backend import output_shape
from .cpu_ranges import OtherNumbers
from .host_calls import Replayed, ReplayedCache, ReplayedGrowing

if TYPE_CHECKING:
    from cupyflash.reference.cpu.checksum import Checksums


@functools.cache
def threads_of(folder: Path) -> AbstractContextManager[None]:
    """Return a context in which this thread's calls are computed by OpenMP's threads of a library.

    The library is GNU's, lies in the folder, and another package has loaded it; if there is none,
    nothing changes.
    """
    from cupyflash.reference.cpu import openmp

    library = openmp.loaded(folder)
    return nullcontext() if library is None else openmp.ThreadsOf(library)


def _forward(call: Call, out: Array, lse: Array, plan: Plan, resumes: bool) -> CallResult:
    from cupyflash.reference.cpu import launch

    programs, grows = cpu_programs.of_dense(call)
    made = launch.forward(
        call.problem,
        programs,
        call.q,
        call.k,
        call.v,
        call.sink,
        out,
        lse,
        plan.block_q,
        plan.block_kv,
        resumes,
    )
    return _replayed(call, made, programs, grows)


def _decode(call: Call, out: Array, lse: Array) -> CallResult:
    """Compute a call of few queries on dense arrays, as if they were a cache that is full."""
    from cupyflash.reference.cpu import decode_launch

    rows = call.k.shape[-2]
    programs, grows = cpu_programs.of_dense(call)
    made = decode_launch.decode(
        call.problem, programs, call.q, call.k, call.v, None, rows, call.sink, out, lse
    )
    return _replayed(call, made, programs, grows)


def _replayed(call: Call, made: Any, programs: Any, grows: bool) -> CallResult:
    """Return what remains of a call on dense or packed arrays."""
    if grows:
        growing = ReplayedGrowing(made, call, *cpu_programs.seen(programs))
        return CallResult(made.visited, growing)
    read = {"q": call.q, "k": call.k, "v": call.v}
    of_mask = OtherNumbers.of(call.problem, *cpu_programs.seen(programs))
    again = Replayed(made, made, cpu_programs.looked_up(programs), read, of_mask)
    return CallResult(made.visited, again)


def units_of(call: Call) -> tuple[int, int]:
    """Return the units of work of the kernel for few queries, and the bytes that it keeps."""
    from cupyflash.reference.cpu import decode_launch

    lengths = call.rows.known_lengths(call.problem.batch)
    problem = call.problem.sized(len_k=lengths)
    plan = decode_launch.planned(problem, cpu_programs.programs(call, lengths), call.rows.shared)
    return len(plan.units), plan.kept * problem.accumulator.itemsize


def _widened(call: Call) -> Call:
    """Return a call on ``scale * code`` in float32 instead of a call on codes."""
    from cupyflash.reference.cpu.sums import looked_up

    table = values(call.encoding.form)
    made: dict[str, Any] = {}
    for name, scale in call.encoding.scales.items():
        made[name[0]] = looked_up(table, getattr(call, name[0]).view(np.uint8), scale)
    problem = replace(call.problem, dtype=cpu_tiles.NUMBERS)
    return replace(call, problem=problem, encoding=NUMBERS, **made)


class Cpu:
    """The back end of NumPy arrays."""

    def forward(
        self, call: Call, out: Array, lse: Array | None, plan: Plan | None = None
    ) -> CallResult:
        """Compute `out` and `lse`."""
        assert lse is not None
        choice = cpu_tiles.forward(call)
        if choice.widens:
            return self._forward_of_codes(call, out, lse, plan)
        if plan is None:
            if choice.for_few:
                return _decode(call, out, lse)
            plan = choice.plan
        return _forward(call, out, lse, plan, resumes=False)

    def _forward_of_codes(
        self, call: Call, out: Array, lse: Array, plan: Plan | None
    ) -> CallResult:
        """Compute `out` and `lse` of codes in float32, and round `out` at the end."""
        from cupyflash.reference.cpu.sums import store

        made = _widened(call)
        if out.dtype == np.float32:
            return CallResult(self.forward(made, out, lse, plan).visited)
        wide = np.empty_like(out, np.float32)
        result = self.forward(made, wide, lse, plan)
        store(wide, out)
        return CallResult(result.visited)

    def forward_piece(
        self, call: Call, partial: Results, first: bool, results: Results | None = None
    ) -> None:
        """Compute a piece's out and lse, or join its keys to them."""
        _forward(call, *partial, cpu_tiles.tiled(call.problem, call.mask), resumes=not first)
        from cupyflash.reference.cpu.sums import store

        if results is not None and not first:
            for computed, to in zip(partial, results, strict=True):
                store(computed, to)

    def backward_piece(
        self,
        call: Call,
        do: Array,
        out: Array,
        lse: Array,
        dlse: Array | None,
        gradients: Gradients,
        deterministic: bool,
    ) -> None:
        """Compute the gradients of a piece."""
        self.backward(call, do, out, lse, dlse, gradients, None, deterministic=deterministic)

    def backward(
        self,
        call: Call,
        do: Array,
        out: Array,
        lse: Array,
        dlse: Array | None,
        gradients: Gradients,
        workspace: Array | None,
        plan: Plan | None = None,
        deterministic: bool = False,  # noqa: ARG002, it always is
    ) -> CallResult:
        """Compute `gradients`, always in the same order."""
        from cupyflash.reference.cpu import launch

        plan = plan or cpu_tiles.tiled(call.problem, call.mask)
        programs = cpu_programs.programs(call)
        learned = tuple(gradients.dlookups)
        reads, tables = cpu_lookups.read(call, learned)
        made = launch.backward(
            call.problem,
            programs,
            do,
            call.q,
            call.k,
            call.v,
            out,
            lse,
            dlse,
            call.sink,
            *gradients,
            plan.block_q,
            plan.block_kv,
            workspace,
            reads,
            tuple(gradients.dlookups.values()),
        )
        read = {"q": call.q, "k": call.k, "v": call.v, "d_out": do, "out": out, "lse": lse}
        of_mask = OtherNumbers.of(call.problem, *cpu_programs.seen(programs))
        looked_up = [*cpu_programs.looked_up(programs), *tables]
        again = Replayed(made, made, looked_up, {**read, "dlse": dlse}, of_mask, learned)
        return CallResult(made.visited, None if workspace is not None else again)

    def check_lookups(self, call: Call) -> None:
        """Refuse learned look-ups whose gradients are not computed."""
        cpu_lookups.check(call)

    def reduce(
        self, call: Call, form: Form, lse: Array | None, value: Expr | None = None
    ) -> tuple[Array, Array | None]:
        """Return what is taken of pairs, always in the same order."""
        return cpu_reductions.reduce(call, form, lse, value)

    def reduction_gradients(
        self, call: Call, factor: Expr, lse: Array, dq: Array, dk: Array, dbias: Array | None
    ) -> None:
        """Write the gradients of a loss of weights, always in the same order."""
        cpu_reductions.backward(call, factor, lse, dq, dk, dbias)

    def forward_tangent(
        self, call: Call, tangents: Tangents, results: TangentResults, plan: Plan | None = None
    ) -> CallResult:
        """Compute out, lse and their tangents."""
        from cupyflash.reference.cpu import launch

        plan = plan or cpu_tiles.with_tangents(call.problem, call.mask)
        programs = cpu_programs.programs(call)
        tbias, tables = cpu_programs.of_tangent(call, tangents.tbias)
        tq, tk, tv, _, tsink = tangents
        made = launch.forward_tangent(
            call.problem,
            programs,
            tbias,
            call.q,
            call.k,
            call.v,
            tq,
            tk,
            tv,
            call.sink,
            tsink,
            *results,
            plan.block_q,
            plan.block_kv,
        )
        read = {"q": call.q, "k": call.k, "v": call.v, "tq": tq, "tk": tk, "tv": tv}
        of_mask = OtherNumbers.of(call.problem, *cpu_programs.seen(programs))
        looked_up = [*cpu_programs.looked_up(programs), *tables]
        return CallResult(made.visited, Replayed(made, made, looked_up, read, of_mask))

    def backward_tangent(
        self,
        call: Call,
        rows: Mapping[str, Array],
        tangents: SecondTangents,
        gradients: Gradients,
        results: Results,
        workspace: Array | None = None,  # noqa: ARG002, only a GPU's is of use
        deterministic: bool = False,  # noqa: ARG002, it always is
    ) -> CallResult:
        """Compute the tangents of gradients, of out and of lse, always in the same order."""
        from cupyflash.reference.cpu import launch

        plan = cpu_tiles.tiled(call.problem, call.mask)
        programs = cpu_programs.programs(call)
        tq, tk, tv, tbias, tsink = tangents.arrays
        of_bias, curve = cpu_programs.of_tangent(call, tbias)[0], cpu_programs.curve(call)
        made = launch.backward_tangent(
            call.problem,
            programs,
            of_bias,
            curve[0],
            rows["do"],
            call.q,
            call.k,
            call.v,
            rows["out"],
            rows["lse"],
            rows.get("dlse"),
            call.sink,
            tangents.tdo,
            tangents.tdlse,
            tq,
            tk,
            tv,
            tsink,
            tuple(gradients),
            results,
            plan.block_q,
            plan.block_kv,
        )
        return CallResult(made.visited)

    def workspace_size(self, call: Call, second: bool = False) -> int:
        """Return the bytes of scratch that the call's backward needs, or its second derivatives."""
        if second:
            return 0
        from cupyflash.reference.cpu.backward_call import backward_scratch_size

        return backward_scratch_size(call.problem, cpu_tiles.tiled(call.problem, call.mask).block_q)

    def cached(
        self,
        call: Call,
        out: Array,
        lse: Array | None,
        workspace: Array | None,  # noqa: ARG002, only a GPU's is of use
    ) -> CallResult:
        """Compute `out` and `lse` of a call over a cache."""
        from cupyflash.reference.cpu import decode_launch

        cache = call.cache
        assert lse is not None
        lengths = call.rows.known_lengths(call.problem.batch)
        programs = cpu_programs.programs(call, lengths)
        made = decode_launch.decode(
            call.problem.sized(len_k=lengths),
            programs,
            call.q,
            call.k,
            call.v,
            cache.table,
            cache.page_size,
            call.sink,
            out,
            lse,
            scales_on_cpu(cache.encoding),
            cache.shared,
        )
        again = ReplayedCache(
            made, call, cpu_programs.looked_up(programs), *cpu_programs.seen(programs)
        )
        return CallResult(made.visited, again)

    def workspace_size_cached(self, call: Call) -> int:  # noqa: ARG002, as above
        """Return 0: a call over a cache makes its own scratch."""
        return 0

    def rowwise(self, operation: Operation[Any], checked: Any, arrays: Arrays) -> CallResult:
        """Compute a checked call of a rowwise operation on its arrays and results, by name."""
        operation.on_cpu(checked, arrays)
        return CallResult()

    def empty_like(
        self,
        array: Array,
        shape: tuple[int, ...] | None = None,
        dtype: Any = None,
        in_c_order: bool = False,
    ) -> Array:
        """Return an uninitialised array of the same shape, dtype and memory order, or of these."""
        order: Literal["C", "K"] = "C" if in_c_order else "K"
        return np.empty_like(array, dtype, order, subok=False, shape=shape)

    def empty_output(
        self,
        call: Call,
        out: Array | None = None,
        lse: Array | None = None,
        want_lse: bool = True,  # noqa: ARG002, the kernels always write it
    ) -> tuple[Array, Array | None]:
        """Return out and lse as they are, or uninitialised."""
        shape = output_shape(call)
        if out is None:
            q = np.broadcast_to(call.q, (*call.problem.array_lead, *call.q.shape[-3:]))
            out = np.empty_like(q, call.problem.dtype, shape=shape, subok=False)
        if lse is None:
            lse = np.empty(shape[:-1], call.problem.accumulator)
        return out, lse


def checksums(arrays: Sequence[Array]) -> Checksums:
    """Return what tells whether the bits of arrays in host memory have changed."""
    from cupyflash.reference.cpu.checksum import Checksums

    return Checksums(arrays)
