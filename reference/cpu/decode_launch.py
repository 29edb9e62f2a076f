"""One call over a cache on the CPU: its schedule, and the kernel."""

from __future__ import annotations

import numpy as np

from .arguments import KeyRanges
from .cache import Scales, cache_of, products_of
from .calls import Bound
from .decode import decode as decode_kernel
from .decode_scratch import decode_scratch, decode_sizes
from .decode_tasks import LEAF, MOST_ROWS, Schedule, schedule
from .decode_work import DecodeWork
from .float_modes import own_arithmetic
from .jit import pointer_of, prepare
from .kernels import called_kernels, pointers_to
from .launch import changes_of, sinks_of
from .layout import Array, Layout, Problem, Programs, Scratch, finish
from .merge import merge
from .microkernel import round_up
from .thread_limits import num_threads
from .threads import parallel

# How much a call of the kernel multiplies, so that it takes some hundredths of a second.
MOST_PRODUCTS = 2**28


def planned(problem: Problem, programs: Programs, shared: int) -> Schedule:
    """Return the schedule of a call, whose arguments are as in `decode`."""
    layout = Layout(problem, MOST_ROWS, LEAF)
    return _planned(layout, layout.key_ranges(programs.ranges), shared)


def _planned(layout: Layout, ranges: KeyRanges, shared: int) -> Schedule:
    columns = round_up(layout.shape.d_v, layout.lanes)
    heads_kv = layout.problem.heads_kv
    return schedule(layout.shape, heads_kv, ranges, columns, num_threads(), shared)


@own_arithmetic
def decode(
    problem: Problem,
    programs: Programs,
    q: Array,
    k: Array,
    v: Array,
    table: Array | None,
    page_size: int,
    sink: Array | None,
    out: Array,
    lse: Array,
    scales: tuple[Scales | None, Scales | None] | None = None,
    shared: int = 0,
) -> int:
    """Write out and lse; return how many leaves were visited (not EMPTY).

    The lengths of keys in `problem` are those that the cache holds, one for each batch entry, and
    `k` and `v` are the cache's arrays. `scales` say what those of them mean that are codes. The
    first `shared` positions of all entries are those of entry 0.
    """
    number = problem.accumulator
    called = called_kernels(problem, programs, False)
    layout, scratch = Layout(problem, MOST_ROWS, LEAF), Scratch()
    shape = layout.shape
    cache = cache_of(k, v, table, page_size, problem.lead, layout.lanes, scales, shared)
    own = [(kernel, number) for kernel in (merge, *products_of(cache), decode_kernel)]
    prepare([*called.values(), *own])
    pointers = pointers_to(called)
    if not shape.heads:
        return 0
    q_read = layout.operand(q, scratch, whole_vectors=False)
    out_made = layout.result(out, scratch)
    lse_made = layout.result(lse[..., None], scratch)
    q_rows, out_rows, lse_rows = (layout.rows(x) for x in (q_read, out_made, lse_made))
    changes = changes_of(layout, programs, pointers, careful=False)
    plan = _planned(layout, changes.ranges, shared)
    kept = np.empty(plan.kept, number)
    counters = np.zeros(1 + len(plan.tasks), np.int64)
    visited = np.zeros(len(plan.units), np.int64)
    sizes = decode_sizes(shape, changes, cache, plan.top)
    most_leaves = -(-MOST_PRODUCTS // (LEAF * MOST_ROWS * (shape.d + shape.d_v + 1)))
    parallel(
        Bound(
            decode_kernel,
            number,
            DecodeWork(
                most_leaves,
                counters,
                plan.tasks,
                plan.parts,
                plan.units,
                plan.members,
                plan.top,
                shape,
                changes,
                *(pointer_of(*each) for each in own[:-1]),
                cache,
                q_rows,
                sinks_of(layout, sink),
                kept,
                out_rows,
                lse_rows,
                visited,
            ),
            scratch=lambda: (decode_scratch(sizes, number),),
            sizes=sizes,
        ),
        max(-(-plan.leaves // most_leaves), min(num_threads(), len(plan.units))),
        (programs, q_read, k, v, table, scales, out_made, lse_made),
    )
    finish(out, out_made)
    finish(lse[..., None], lse_made)
    return int(visited.sum())
