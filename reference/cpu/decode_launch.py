"""One call over a cache on the CPU: its schedule, and the kernel."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from . import team
from .arguments import Changes, KeyRanges, Shape
from .cache import PackedCache, Scales, cache_of, products_of
from .calls import Bound
from .decode import decode as decode_kernel
from .decode_scratch import decode_scratch, decode_sizes
from .decode_tasks import LEAF, LOG_LEAF, MOST_ROWS, Schedule, schedule, visible_leaves
from .decode_work import DecodeWork, PackedWork
from .float_modes import own_arithmetic
from .jit import pointer_of, prepare
from .kernels import called_kernels, conversions, pointers_to
from .layout import Array, Layout, Problem, Programs, Scratch
from .memory import ROWS, Rows
from .merge import merge
from .microkernel import round_up
from .operands import Operand, Result
from .prepared import Ends, PreparedCall, changes_of, sinks_of
from .repeat import IS_POSSIBLE, NEVER, OTHERS, Repeat, repeat
from .structs import Packed
from .thread_limits import num_threads
from .threads import AT_ONCE, may_share, parallel, workers_for
from .widen import kind_of

# How much a call of the kernel multiplies, so that it takes some hundredths of a second.
MOST_PRODUCTS = 2**28
# What a thread does in a second: bytes of numbers that it multiplies, and that it reads; and the
# seconds that a leaf takes besides, and those of each of its rows whose scores a program changes.
MULTIPLIED, READ, OF_LEAF, OF_PROGRAM = 3e11, 8e10, 1e-7, 3e-6
REPEATED = 2  # calls with the same schedule, of which the last is one that may be made again


def planned(problem: Problem, programs: Programs, shared: int) -> Schedule:
    """Return the schedule of a call, whose arguments are as in `decode`."""
    layout = Layout(problem, MOST_ROWS, LEAF)
    return _planned(layout, layout.key_ranges(programs.ranges), shared)


def _planned(layout: Layout, ranges: KeyRanges, shared: int) -> Schedule:
    columns = round_up(layout.shape.d_v, layout.lanes)
    heads_kv = layout.problem.heads_kv
    return schedule(layout.shape, heads_kv, ranges, columns, num_threads(), shared)


class _Planned(NamedTuple):
    """What the calls of a schedule have in common: the kernel with its arguments."""

    counters: Array
    visited: Array
    work: PackedWork
    kernel: Bound


class DecodeCall(PreparedCall):
    """A call of few queries over many keys, of one form: see `decode` for its parameters.

    Lengths of keys, and the ranges of keys that a mask gives, may differ from call to call.

    Parameters
    ----------
    problem : Problem
        Its sizes.
    programs : Programs
        What happens to its scores.
    q, k, v, table, sink, out, lse : array
        Arrays like those of the calls to come.
    page_size, scales, shared
        As in `decode`.
    """

    def __init__(
        self, problem: Problem, programs: Programs, q: Array, k: Array, v: Array,
        table: Array | None, page_size: int, sink: Array | None, out: Array, lse: Array,
        scales: tuple[Scales | None, Scales | None] | None, shared: int,
    ) -> None:  # fmt: skip
        num_threads()  # a wrong number of threads is an error of the first call
        number = problem.accumulator
        kind = kind_of(q.dtype)
        called = called_kernels(problem, programs, False) | conversions(number, kind)
        layout, scratch, self._shared = Layout(problem, MOST_ROWS, LEAF), Scratch(), shared
        super().__init__(layout, programs)
        cache = cache_of(k, v, table, page_size, problem.lead, layout.lanes, scales, shared)
        own = [(kernel, number) for kernel in (merge, *products_of(cache), decode_kernel)]
        prepare([*called.values(), *own])
        self._pointers = [pointer_of(*each) for each in own[:-1]]
        pointers = pointers_to(called)
        self._q = Operand(layout, q, scratch, whole_vectors=False, widened=True)
        self._out = Result(layout, out, scratch, narrow=pointers.narrow)
        self._lse = Result(layout, lse[..., None], scratch)
        self._sinks = sinks_of(layout, sink)
        changes = changes_of(layout, programs, pointers, self._ranges)
        self._described, self._cache = cache, PackedCache(cache)
        self._changes = changes
        self._sizes = lambda top: decode_sizes(layout.shape, changes, cache, top)
        shape = layout.shape
        products = LEAF * MOST_ROWS * (shape.d + shape.d_v + 1)
        self._most_leaves = -(-MOST_PRODUCTS // products)
        self._most_queries = int(layout.len_q.max(initial=0))
        self._plan: Schedule | None = None
        self._planned: _Planned | None = None
        self._served = 0  # calls that had the same schedule
        self._repeated = -1  # the last leaf of those that can be repeated already
        self._least = math.inf  # seconds of the fastest call that one thread has computed
        self._timed = 0  # such calls; the first one may have waited for memory and for code
        in_place = self._q.is_in_place and self._out.is_in_place
        changes_scores = len(programs.score.code) or len(programs.mask.code)
        is_plain = in_place and not (changes_scores or scales) and sink is table is None
        self.repeats = is_plain and IS_POSSIBLE
        self._nbytes = self.nbytes = self.nbytes + scratch.nbytes

    def grown(
        self, q: Array, k: Array, v: Array, sink: Array | None, out: Array, lse: Array
    ) -> None:
        """Write out and lse of a call on dense arrays, which may have any number of keys."""
        self._cache.reach(self._layout.problem.lead, k, v)
        self(q, k, v, sink, out, lse)

    @property
    def visited(self) -> int:
        """How many leaves the last call visited: those that are not EMPTY."""
        return 0 if self._planned is None else int(self._planned.visited.sum())

    def __call__(
        self, q: Array, k: Array, v: Array, sink: Array | None, out: Array, lse: Array,
        table: Array | None = None, scales: Sequence[Array | None] | None = None,
    ) -> None:  # fmt: skip
        """Write out and lse; `scales` are those of keys and of values."""
        layout = self._layout
        if not layout.shape.heads:
            return
        self._q.load(q)
        self._out.place(out)
        self._lse.place(lse)
        self._cache.move_to(k, v, table, scales)
        if sink is not None:
            self._sinks[...] = sink
        plan = _planned(layout, self._ranges, self._shared)
        if plan is not self._plan or self._planned is None:
            of_lse = self._lse.rows.values
            self._planned = self._prepared(plan, layout.shape, of_lse, self._changes)
            self._plan, self._served, self._repeated = plan, 0, -1
            self._least, self._timed = math.inf, 0
        self._served += 1
        planned = self._planned
        planned.work.move_to(self._q.rows, self._cache.packed, self._out.rows, self._lse.rows)
        planned.counters[...] = 0
        planned.visited[...] = 0
        work = self._seconds(plan)
        arrays, items = (q, k, v, table, scales, out, lse, self), self._items(plan, work)
        begin = time.perf_counter()
        parallel(planned.kernel, items, arrays, work)
        if items == 1:
            self._least = min(self._least, time.perf_counter() - begin)
            self._timed += 1
        self._out.finish(out)
        self._lse.finish(lse[..., None])

    def _seconds(self, plan: Schedule) -> float:
        """Return about how long one thread takes: as estimated, or longer, as it once did."""
        shape = self._layout.shape
        rows = min(MOST_ROWS, shape.group * self._most_queries)
        size = LEAF * (shape.d + shape.d_v) * shape.itemsize
        each = OF_LEAF + size * rows / MULTIPLIED + size / READ
        if len(self._changes.score.code):
            each += OF_PROGRAM * rows
        estimated = plan.leaves * each
        return estimated if self._timed < REPEATED else max(estimated, self._least)

    def _items(self, plan: Schedule, work: float) -> int:
        """Return how many calls of the kernel do so many seconds of work."""
        return max(-(-plan.leaves // self._most_leaves), workers_for(len(plan.units), work))

    def _prepared(self, plan: Schedule, shape: Shape, lse: Rows, changes: Changes) -> _Planned:
        """Return the kernel with its arguments, for a schedule."""
        number = self._layout.number
        counters = np.zeros(1 + len(plan.tasks), np.int64)
        visited = np.zeros(len(plan.units), np.int64)
        sizes, kept = self._sizes(plan.top), np.empty(plan.kept, number)
        self.nbytes = self._nbytes + kept.nbytes
        merge_pointer, keys_pointer, values_pointer = self._pointers
        work = DecodeWork(
            self._most_leaves,
            counters,
            plan.tasks,
            plan.parts,
            plan.units,
            plan.members,
            plan.top,
            shape,
            changes,
            merge_pointer,
            keys_pointer,
            values_pointer,
            self._described,
            self._q.rows.values,
            self._sinks,
            kept,
            self._out.rows.values,
            lse,
            visited,
        )
        packed = PackedWork(work, number)
        kernel = Bound(
            decode_kernel,
            number,
            packed.packed,
            scratch=lambda: (decode_scratch(sizes, number),),
            sizes=sizes,
        )
        return _Planned(counters, visited, packed, kernel)

    def repeat(
        self,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        capacity: int,
        grows: bool,
        ends: Callable[[Array], Ends] | None = None,
    ) -> Repeat | None:
        """Return what makes the last call again for arrays like these, which were its own.

        All entries have had the same length, and had room for `capacity` positions; with `grows`,
        keys and values have as many rows as there are positions. `ends` returns the first and the
        last key of one query for some lengths, if a mask hides others. There is none for a call
        that changes scores, or whose schedule is a new one: those that have come once may not come
        again. None is made twice.
        """
        plan = self._plan
        if plan is None or self._served < REPEATED or not self.repeats:
            return None
        last = int(self._layout.len_k[0]) - 1 >> LOG_LEAF
        if last == self._repeated or not out.flags.c_contiguous:
            return None
        self._repeated = last
        work = self._seconds(plan)
        items = self._items(plan, work)
        layout, changes, of_lengths = self._layout, self._changes, None
        if self._programs.ranges is not None:
            ranges = self._ranges
            if ends is None or ranges.low.size != 1:
                return None
            ranges = ranges._replace(low=ranges.low.copy(), high=ranges.high.copy())
            changes = changes._replace(ranges=ranges)
            lengths = (last << LOG_LEAF) + 1 + np.arange(LEAF)
            of_lengths = _ends_of_lengths(plan, ends, lengths), ranges.low, ranges.high
        lengths, lse = layout.len_k.copy(), np.empty((*out.shape[:-1], 1), layout.number)
        shape, of_lse = layout.shape._replace(len_k=lengths), layout.rows(lse)
        planned = self._prepared(plan, shape, of_lse, changes)
        planned.work.move_to(self._q.rows, self._cache.packed, self._out.rows, Packed(ROWS, of_lse))
        kernel = planned.kernel
        words, held = kernel.words_of(0, 1)
        zeros, places = (planned.counters, planned.visited), planned.work.places
        held = held, planned, lse, self._cache.packed.held
        share, shared = None, OTHERS
        if items > 1:
            share = partial(_share, kernel, items, work)
            if work <= AT_ONCE and items == workers_for(items, work):
                shared, kept = team.shared(kernel, items, items, 1) or (OTHERS, None)
                held = held, kept
        return repeat(
            (q, k, v), out, lengths, capacity, zeros, places, words, held, grows, of_lengths,
            share, shared, items > 1 or may_share(work),
        )  # fmt: skip


def _share(kernel: Bound, items: int, work: float, arrays: object) -> None:
    """Run a kernel by several threads; `arrays` hold what it reads and writes."""
    parallel(kernel, items, arrays, work)


def _ends_of_lengths(plan: Schedule, ends: Callable[[Array], Ends], lengths: Array) -> Array:
    """Return the ends of one query's keys, with `NEVER` for lengths that have other schedules."""
    made = np.stack(ends(lengths), axis=1)
    low, high = visible_leaves(made[:, 0], made[:, 1], lengths)
    is_served = (low == plan.units[:, 2].min()) & (high == plan.units[:, 3].max())
    made[~is_served, 0] = NEVER
    return made


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
) -> DecodeCall:
    """Write out and lse; return the call, which can be made again.

    The lengths of keys in `problem` are those that the cache holds, one for each batch entry, and
    `k` and `v` are the cache's arrays. `scales` say what those of them mean that are codes. The
    first `shared` positions of all entries are those of entry 0.
    """
    of_cache = page_size, sink, out, lse, scales, shared
    call = DecodeCall(problem, programs, q, k, v, table, *of_cache)
    arrays = None if scales is None else [None if x is None else x.array for x in scales]
    call(q, k, v, sink, out, lse, table, arrays)
    return call
