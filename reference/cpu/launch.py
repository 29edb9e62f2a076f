"""One call on the CPU: scratch, work items, and the kernels in their order.

Memory grows with L, never with L squared. Programs are already lowered; they contain addresses, so
the caller must keep their arrays alive.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .amx_memory import PANEL as TILE_PANEL
from .arguments import Changes, FunctionPointers, tile_sizes
from .backward import backward_dkdv, backward_dq
from .backward_delta import backward_delta
from .backward_panels import backward_panels
from .backward_work import BiasParts, bias_parts, is_one_pass_faster, key_blocks
from .bias_gradient import no_bias_sums, sum_bias_parts
from .calls import Bound
from .float_modes import own_arithmetic
from .forward import forward as forward_kernel
from .forward import forward_scratch
from .gradient_tile import gradient_scratch
from .jit import prepare
from .kernels import called_kernels, made_ready
from .layout import Array, Layout, Problem, Programs, Scratch, finish
from .memory import aligned
from .microkernel import PANEL, round_up
from .packing import lanes_of_pair, size_of_pairs
from .threads import parallel
from .widen import kind_of


def sinks_of(layout: Layout, sink: Array | None) -> Array:
    """Return a logit for each head, -inf without a sink."""
    heads = layout.problem.heads
    if sink is None:
        return np.full(heads, -np.inf, layout.number)
    return np.ascontiguousarray(sink.astype(layout.number))


def changes_of(layout: Layout, programs: Programs, pointers: FunctionPointers) -> Changes:
    """Return what happens to scores, for kernels at these addresses."""
    ranges = layout.key_ranges(programs.ranges)
    uses_tiles = pointers.product != pointers.fallback
    # What works on whole rows of a tile costs least for long ones.
    whole_rows = layout.problem.dropout or any(
        len(program.code) > program.once_per_tile
        for program in (programs.score, programs.slope, programs.mask)
    )
    block = round_up(layout.block_q, layout.lanes)
    return Changes(
        programs.score,
        programs.slope,
        programs.mask,
        programs.tile,
        ranges,
        pointers,
        int(programs.may_mask),
        block if whole_rows else min(block, TILE_PANEL if uses_tiles else PANEL),
    )


@own_arithmetic
def forward(
    problem: Problem,
    programs: Programs,
    q: Array,
    k: Array,
    v: Array,
    sink: Array | None,
    out: Array,
    lse: Array,
    block_q: int,
    block_kv: int,
    resumes: bool = False,
) -> int:
    """Write out and lse; return how many tiles were visited (not EMPTY).

    With `resumes`, out and lse have the result over other keys, and these keys join it. Kernels
    must be able to use both arrays in place, and there must be no sink.
    """
    kind = kind_of(q.dtype)
    called = called_kernels(problem, programs, False, kind)
    pointers = made_ready(problem, programs, called, kind, forward_kernel)
    layout, scratch = Layout(problem, block_q, block_kv), Scratch()
    q_read = layout.input(q, scratch, whole_vectors=False)
    k_read = layout.input(k, scratch, whole_vectors=False)
    v_read = layout.input(v, scratch, whole_vectors=True)
    out_made = layout.result(out, scratch, narrow=pointers.narrow)
    lse_made = layout.result(lse[..., None], scratch)
    assert not resumes or layout.readable(out, whole_vectors=False)
    q_rows, out_rows, lse_rows = (layout.rows(x) for x in (q_read, out_made, lse_made))
    k_rows, v_rows = layout.rows(k_read, keys=True), layout.rows(v_read, keys=True)
    changes = changes_of(layout, programs, pointers)
    sinks, sizes = sinks_of(layout, sink), tile_sizes(layout.shape, changes)
    work = layout.blocks(block_q, last_first=True)
    visited = np.zeros(len(work) * problem.heads, np.int64)
    parallel(
        Bound(
            forward_kernel,
            layout.number,
            work,
            layout.shape,
            changes,
            q_rows,
            k_rows,
            v_rows,
            sinks,
            int(resumes),
            out_rows,
            lse_rows,
            visited,
            scratch=lambda: (forward_scratch(sizes, layout.number),),
            sizes=sizes,
        ),
        visited.size,
        (programs, q_read, k_read, v_read, out_made, lse_made),
    )
    finish(out, out_made)
    finish(lse[..., None], lse_made)
    return int(visited.sum())


@own_arithmetic
def backward(
    problem: Problem,
    programs: Programs,
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    sink: Array | None,
    dq: Array,
    dk: Array,
    dv: Array,
    dbias: Array | None,
    dsink: Array | None,
    block_q: int,
    block_kv: int,
    workspace: Array | None,
) -> int:
    """Write every gradient; return how many tiles `backward_dkdv` visited."""
    layout, scratch = Layout(problem, block_q, block_kv), Scratch(workspace)
    # An array that was broadcast to no batch entry, or to no head, still has a gradient.
    if not layout.batch or not problem.heads:
        for gradient in (dq, dk, dv, dbias, dsink):
            if gradient is not None:
                gradient[...] = 0
        return 0
    kernels = [backward_delta, backward_panels, backward_dkdv]
    if dbias is not None:
        kernels.append(sum_bias_parts)
    kind = kind_of(q.dtype)
    called = called_kernels(problem, programs, True, kind)
    pointers = made_ready(problem, programs, called, kind, *kernels)
    accumulator, heads = layout.number, problem.heads
    shape, itemsize = layout.shape, layout.itemsize
    columns, columns_v = (round_up(count, layout.lanes) for count in (problem.d, problem.d_v))
    q_read, do_read, k_read = (layout.input(x, scratch, whole_vectors=True) for x in (q, do, k))
    v_read, out_read = (layout.input(x, scratch, whole_vectors=False) for x in (v, out))
    lse_read = layout.operand(lse[..., None], scratch, whole_vectors=False)
    if dlse is None:
        dlse = np.broadcast_to(np.zeros((), accumulator), lse.shape)
    dlse_read = layout.operand(dlse[..., None], scratch, whole_vectors=False)
    delta = scratch.empty((*lse.shape, 1), accumulator)
    read = (programs, q_read, do_read, k_read, v_read, out_read, lse_read, dlse_read, delta)
    q_rows, do_rows, out_rows, lse_rows, dlse_rows, delta_rows = (
        layout.rows(x) for x in (q_read, do_read, out_read, lse_read, dlse_read, delta)
    )
    k_rows, v_rows = layout.rows(k_read, keys=True), layout.rows(v_read, keys=True)

    sinks = sinks_of(layout, sink)
    dsinks = np.zeros(layout.batch * heads, accumulator)
    parallel(
        Bound(
            backward_delta,
            accumulator,
            shape,
            pointers.widen,
            do_rows,
            out_rows,
            dlse_rows,
            lse_rows,
            sinks,
            delta_rows,
            dsinks,
            scratch=lambda: tuple(np.empty((2, problem.d_v), accumulator)),
        ),
        dsinks.size,
        read,
    )
    if dsink is not None:
        dsink[...] = dsinks.reshape(layout.batch, heads).sum(axis=0, dtype=accumulator)

    changes = changes_of(layout, programs, pointers)
    qt_memory, qt = layout.panels(problem.d, scratch)
    dot_memory, dot = layout.panels(problem.d_v, scratch)
    wide_rows = lanes_of_pair(itemsize) if pointers.widen else 0
    parallel(
        Bound(
            backward_panels,
            accumulator,
            shape,
            pointers.widen,
            q_rows,
            qt,
            do_rows,
            dot,
            scratch=lambda: tuple(np.empty((2, wide_rows * max(columns, columns_v)), accumulator)),
        ),
        layout.batch * heads,
        (read, qt_memory, dot_memory),
    )

    kv_lead = np.broadcast_shapes(k.shape[:-3], v.shape[:-3]) if not problem.packed else ()
    if not problem.packed and (dk.shape[:-3] != kv_lead or dv.shape[:-3] != kv_lead):
        # k and v were broadcast over different axes: compute over their common ones, then sum.
        dk_made = scratch.empty((*kv_lead, *dk.shape[-3:]), accumulator)
        dv_made = scratch.empty((*kv_lead, *dv.shape[-3:]), accumulator)
    else:
        dk_made, dv_made = (layout.result(x, scratch, narrow=pointers.narrow) for x in (dk, dv))
    heads_kv = problem.heads_kv
    kv_groups, members, starts = layout.groups(kv_lead)
    bias, parts = None, np.arange(kv_groups * heads_kv).reshape(kv_groups, heads_kv)
    if dbias is not None:
        axes = (1,) * (3 - dbias.ndim) + dbias.shape
        bias = bias_parts(layout, kv_lead, (members, starts), axes)
        parts = bias.parts
    one_pass = layout.groups(q.shape[:-3])[0] == layout.batch and is_one_pass_faster(
        int(parts.max(initial=-1)) + 1
    )
    dq_made = layout.result(dq, scratch, whole_vectors=one_pass)
    dq_rows = layout.rows(dq_made)
    dk_rows, dv_rows = layout.rows(dk_made, keys=True), layout.rows(dv_made, keys=True)
    counts = -(-layout.len_k[members[starts]] // block_kv)
    of_keys, of_queries = (
        [size_of_pairs(rows, wide, itemsize) for wide in (columns, columns_v)]
        for rows in (block_kv, changes.panel)
    )

    sizes = tile_sizes(shape, changes)

    def tiles(*counts: int) -> tuple[Any, ...]:
        scratch = gradient_scratch(sizes, accumulator)
        return scratch, *aligned((of_keys[0], *counts), accumulator)

    visited = 0
    bias_sums = no_bias_sums(accumulator) if bias is None else bias.sums
    for runs in key_blocks(layout, starts, counts, parts, one_pass):
        visited_here = np.zeros(len(runs.rows), np.int64)
        parallel(
            Bound(
                backward_dkdv,
                accumulator,
                *runs,
                members,
                shape,
                changes,
                q_rows,
                k_rows,
                v_rows,
                do_rows,
                lse_rows,
                delta_rows,
                qt,
                dot,
                int(one_pass),
                dq_rows,
                dk_rows,
                dv_rows,
                bias_sums,
                visited_here,
                scratch=lambda: tiles(*of_keys, *of_queries),
                sizes=sizes,
            ),
            len(runs.starts) - 1,
            (read, qt_memory, dot_memory, dk_made, dv_made, dq_made, bias_sums),
        )
        visited += int(visited_here.sum())
    if not one_pass:
        prepare([(backward_dq, accumulator)])
        q_work, q_members = layout.shared_blocks(
            q.shape[:-3] if not problem.packed else (), layout.len_q, block_q, last_first=True
        )
        queries = [size_of_pairs(d, block_q, itemsize) for d in (problem.d, problem.d_v)]
        parallel(
            Bound(
                backward_dq,
                accumulator,
                q_work,
                q_members,
                shape,
                changes,
                q_rows,
                k_rows,
                v_rows,
                do_rows,
                lse_rows,
                delta_rows,
                dq_rows,
                scratch=lambda: tiles(*queries, block_q * columns),
                sizes=sizes,
            ),
            len(q_work) * heads,
            (read, dq_made),
        )
    if dbias is not None:
        assert bias is not None
        _bias_gradient(layout, bias, dbias)
    finish(dq, dq_made if dq_made is dq else dq_made[..., : problem.d])
    finish(dk, _summed_to(dk_made, dk.shape))
    finish(dv, _summed_to(dv_made, dv.shape))
    return visited


def _summed_to(array: Array, shape: tuple[int, ...]) -> Array:
    """Sum an array over the axes along which `shape` was broadcast to it."""
    if array.shape == shape:
        return array
    extra = array.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(
        axis + extra
        for axis, (own, want) in enumerate(zip(array.shape[extra:], shape, strict=True))
        if own != want
    )
    total: Array = array.sum(axis=axes, dtype=array.dtype, keepdims=True).reshape(shape)
    return total


def _bias_gradient(layout: Layout, made: BiasParts, dbias: Array) -> None:
    """Write the sums of a bias's gradient to `dbias`, rounded to its type."""
    shape = (1,) * (3 - dbias.ndim) + dbias.shape
    entries, axes = math.prod(shape[:-3]), shape[-3:]
    in_place = dbias.dtype == layout.number and dbias.flags.carray
    target = dbias if in_place else np.empty(dbias.shape, layout.number)
    parallel(
        Bound(
            sum_bias_parts,
            layout.number,
            made.columns,
            made.starts,
            made.slots,
            layout.block_q,
            made.sums,
            target.reshape(entries, *axes),
        ),
        entries * axes[0] * made.columns,
        (made, target),
    )
    finish(dbias, target)


def backward_scratch_size(problem: Problem, block_q: int) -> int:
    """Return the bytes of workspace that any `backward` of this problem needs at most."""
    layout = Layout(problem, block_q, block_q)
    itemsize, lanes, heads = layout.itemsize, layout.lanes, problem.heads

    def whole(columns: int) -> int:
        return -(-columns // lanes) * lanes

    rows_q = heads * int(layout.len_q.sum())
    rows_k = problem.heads_kv * int(layout.len_k.sum())
    panels = heads * int(layout.panel_lanes().sum())
    wide, wide_v = whole(problem.d), whole(problem.d_v)
    elements = [
        *(rows_q * wide,) * 2,  # q, dq
        *(rows_q * wide_v,) * 2,  # do, out
        *(rows_k * wide, rows_k * wide_v) * 2,  # k, v, dk, dv
        *(rows_q * lanes,) * 3,  # lse, dlse, delta
        panels * problem.d,
        panels * problem.d_v,
    ]
    return sum(size * itemsize + 2 * Scratch.ALIGNMENT for size in elements)
