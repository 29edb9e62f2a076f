"""One call over a cache on the CPU: its schedule, and the kernel."""

from __future__ import annotations

import numpy as np

from .accumulate import padded
from .cache import cache_of
from .decode import decode as decode_kernel
from .decode_tasks import LEAF, MOST_ROWS, schedule
from .jit import pointer_of, prepare
from .launch import called_kernels, changes_of, pointers_to, sinks_of
from .layout import Array, Layout, Problem, Programs, Scratch, finish
from .merge import merge
from .threads import num_threads, parallel


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
) -> int:
    """Write out and lse; return how many leaves were visited (not EMPTY).

    `problem` has the lengths that the cache holds as lengths of keys, one of each batch entry, and
    `k` and `v` are the cache's arrays.
    """
    number = problem.accumulator
    called = called_kernels(problem, programs, False)
    prepare([*called.values(), (merge, number), (decode_kernel, number)])
    pointers = pointers_to(called)
    layout, scratch = Layout(problem, MOST_ROWS, LEAF), Scratch()
    shape = layout.shape
    if not shape.heads:
        return 0
    q_read = layout.operand(q, scratch, whole_vectors=False)
    out_made = layout.result(out, scratch)
    lse_made = layout.result(lse[..., None], scratch)
    q_rows, out_rows, lse_rows = (layout.rows(x) for x in (q_read, out_made, lse_made))
    changes = changes_of(layout, programs, pointers, careful=False)
    cache = cache_of(k, v, table, page_size, layout.itemsize, layout.lanes)
    columns = padded.py_func(shape.d_v, layout.lanes)
    plan = schedule(shape, problem.heads_kv, changes.ranges, columns, num_threads())
    kept = np.empty(plan.kept, number)
    counters = np.zeros(len(plan.tasks), np.int64)
    visited = np.zeros(len(plan.units), np.int64)
    sinks, pointer = sinks_of(layout, sink), pointer_of(merge, number)
    parallel(
        lambda first, last: decode_kernel(
            first,
            last,
            plan.tasks,
            plan.units,
            plan.level,
            plan.top,
            shape,
            changes,
            pointer,
            cache,
            q_rows,
            sinks,
            kept,
            counters,
            out_rows,
            lse_rows,
            visited,
        ),
        visited.size,
        (programs, q_read, k, v, table, out_made, lse_made),
    )
    finish(out, out_made)
    finish(lse[..., None], lse_made)
    return int(visited.sum())
