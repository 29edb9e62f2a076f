"""A call that takes statistics of weights: scratch, work items and one of two kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .arguments import registers_of, tile_sizes
from .calls import Bound
from .kernels import called_kernels, made_ready
from .layout import Array, Layout, Problem, Programs, Scratch
from .operands import Operand
from .prepared import PreparedCall, changes_of, packed_shape, seconds
from .program import NO_PROGRAM, Program
from .reduce import (
    BLOCKS,
    DISTANCE,
    ENTROPY,
    LOGIT,
    MAX,
    PROGRAM_OF_LOGIT,
    SUM,
    TOP,
    WEIGHT,
    ReduceScratch,
    Values,
    reduce_keys,
    reduce_queries,
    reduce_scratch,
)
from .thread_limits import num_threads
from .threads import parallel
from .widen import kind_of

MOST_PARTS = 16  # of keys, each with diagonals of its own, so that threads can share a head
_BY = {"sum": SUM, "max": MAX, "top": TOP}
_OF = {"logit": LOGIT, "weight": WEIGHT, "entropy": ENTROPY, "program": PROGRAM_OF_LOGIT}


class Form(NamedTuple):
    """What is taken of values, and over which pairs.

    Attributes
    ----------
    of : {"logit", "weight", "entropy", "program"}
        What values are: of the latter, whatever a program makes of logits.
    along : {"keys", "blocks", "distance"}
        All keys of a query, all pairs of a block, or all of one distance.
    by : {"sum", "max", "top"}
        What is taken.
    raw : bool
        Whether values are made of scores before they are changed.
    most : int
        How many of the largest values, along keys.
    rows : tuple of 2 int
        The first query that takes part, and the one after the last.
    block : tuple of 2 int
        Queries and keys of a block; blocks of queries begin at query 0.
    """

    of: str
    along: str
    by: str
    raw: bool = False
    most: int = 1
    rows: tuple[int, int] = (0, 0)
    block: tuple[int, int] = (1, 1)


class ReduceCall(PreparedCall):
    """A reduction of one form: see `launch.reduce` for its parameters."""

    def __init__(
        self, problem: Problem, programs: Programs, value: Program | None, form: Form, q: Array,
        k: Array, lse: Array | None, block_q: int, block_kv: int,
    ) -> None:  # fmt: skip
        value = NO_PROGRAM if value is None else value
        num_threads()  # a wrong number of threads is an error of the first call
        kind = kind_of(q.dtype)
        self._form, by_keys = form, form.along == "keys"
        kernel = reduce_keys if by_keys else reduce_queries
        called = called_kernels(problem, programs, False, kind, by_vectors=True, changes=(value,))
        pointers = made_ready(problem, programs, called, kind, kernel, by_vectors=True)
        layout, scratch = Layout(problem, block_q, block_kv), Scratch()
        super().__init__(layout, programs)
        self._q = Operand(layout, q, scratch, False, widened=True)
        self._k = Operand(layout, k, scratch, False, widened=True, keys=True)
        self.shape = packed_shape(layout)
        changes = changes_of(layout, programs, pointers, self._ranges)
        sizes, registers = tile_sizes(layout.shape, changes), registers_of(value)
        values = Values(_OF[form.of], value, int(form.raw), _BY[form.by], form.most)
        # A copy: a read-only array would be another type.
        rows = np.array([] if lse is None else lse, layout.number).reshape(-1)
        self._keys_of_part = block_kv * -(-int(problem.len_k) // (block_kv * MOST_PARTS))
        self._parts = -(-int(problem.len_k) // max(self._keys_of_part, 1))
        number, shape = layout.number, self._shape_of_result()
        start = 0 if form.by == "sum" else -np.inf
        self._found = np.full((layout.batch, problem.heads, *shape), start, number)
        indices = np.empty(self._found.size if form.by == "top" else 0, np.int64)
        self._indices = indices
        flat = self._found.reshape(-1)
        if by_keys:
            work = layout.blocks(block_q, last_first=True)
            items = len(work) * problem.heads
            arguments: tuple[Any, ...] = work, self.shape, changes, values
            results: tuple[Array, ...] = (rows, flat, indices)
        else:
            work = self._work(block_kv, changes.panel)
            items = len(work) * layout.batch * problem.heads
            along = DISTANCE if form.along == "distance" else BLOCKS
            of_head = int(np.prod(shape))
            arguments = (
                work,
                along,
                form.block[1],
                shape[-1],
                of_head,
                self.shape,
                changes,
                values,
            )
            results = (rows, flat)

        def scratch_of_thread() -> tuple[ReduceScratch]:
            return (reduce_scratch(sizes, registers, number),)

        self._items = items
        self._seconds = seconds(layout.shape, 1, layout.itemsize)
        self._kernel = Bound(
            kernel,
            number,
            *arguments,
            self._q.rows,
            self._k.rows,
            *results,
            scratch=scratch_of_thread,
            sizes=(sizes, registers),
        )

    def _shape_of_result(self) -> tuple[int, ...]:
        """Return the axes of the result after those of entries and heads."""
        problem, form = self._layout.problem, self._form
        len_q, len_k = int(problem.len_q), int(problem.len_k)
        if form.along == "keys":
            return (len_q, form.most)
        if form.along == "distance":
            return self._parts, max(len_q + len_k - 1, 0)
        return -(-len_q // form.block[0]), -(-len_k // form.block[1])

    def _work(self, block_kv: int, panel: int) -> Array:
        """Return the rows of work of `reduce_queries`."""
        problem, form = self._layout.problem, self._form
        len_k, (first, last) = int(problem.len_k), form.rows
        if form.along == "distance":
            step, (parts, size) = self._keys_of_part, self._shape_of_result()
            every = [
                (first, last, n * step, min((n + 1) * step, len_k), n * size, panel)
                for n in range(parts)
            ]
            return np.array(every, np.int64).reshape(-1, 6)
        of_queries, of_keys = form.block
        columns = -(-len_k // of_keys)
        keys = of_keys * -(-block_kv // of_keys)  # of an item: no block is of two
        # A panel may have several rows of blocks; then it has all queries of an item.
        together = max(1, panel // of_queries)
        queries = of_queries * together
        rows = np.arange(first // queries, -(-last // queries)) if last > first else np.arange(0)
        n, j = (x.reshape(-1) for x in np.meshgrid(rows, np.arange(0, len_k, keys), indexing="ij"))
        work = [
            np.maximum(n * queries, first), np.minimum((n + 1) * queries, last), j,
            np.minimum(j + keys, len_k), n * together * columns,
            np.full(n.size, of_queries if together > 1 else panel),
        ]  # fmt: skip
        return np.stack(work, axis=1).astype(np.int64)

    def __call__(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Return what was taken, (B, H, ...), and with "top" the positions of keys."""
        self._q.load(q)
        self._k.load(k)
        parallel(self._kernel, self._items, (q, k, self), self._seconds)
        if self._form.along == "distance":
            take: Any = np.add if self._form.by == "sum" else np.maximum
            start = 0 if self._form.by == "sum" else -np.inf
            return take.reduce(self._found, axis=2, initial=start), self._indices
        indices = self._indices
        return self._found, indices.reshape(self._found.shape) if indices.size else indices
