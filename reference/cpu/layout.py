"""The memory layout of a call's arrays: addresses, strides, copies where needed, work lists.

Arrays arrive validated, as ``(*lead, H, L, D)`` whose leading axes broadcast, or packed as
``(H, total, D)``. Arrays that a kernel cannot read in place (unaligned or strided rows, rows that
do not fill whole vectors) are copied once, in the accumulator's type. Rows of 16-bit floats stay
as they are, and kernels widen those of a tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from . import philox
from .addresses import address
from .arguments import NO_RANGES, KeyRanges, Shape
from .memory import LINE, Rows
from .microkernel import vector_lanes
from .packing import lanes_of_pair
from .program import Program
from .widen import NATIVE, kind_of

Array = np.ndarray[Any, Any]


class Problem(Protocol):
    """What a launch needs to know of a problem (see `cupyflash.problem.Problem`)."""

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes; their product is the number of batch entries."""

    @property
    def heads(self) -> int:
        """Query heads."""

    @property
    def heads_kv(self) -> int:
        """Key-value heads."""

    @property
    def len_q(self) -> Any:
        """Queries, a number or an array over b."""

    @property
    def len_k(self) -> Any:
        """Keys, a number or an array over b."""

    @property
    def start_q(self) -> Any:
        """First packed row of the queries."""

    @property
    def start_k(self) -> Any:
        """First packed row of the keys."""

    @property
    def packed(self) -> bool:
        """Whether sequences lie one after the other."""

    @property
    def d(self) -> int:
        """Head size of queries and keys."""

    @property
    def d_v(self) -> int:
        """Head size of values."""

    @property
    def accumulator(self) -> np.dtype[Any]:
        """The dtype of scores, sums and LSE."""

    @property
    def scale(self) -> float:
        """Factor of the scores."""

    @property
    def dropout(self) -> float:
        """Probability of dropping a pair."""

    @property
    def seed(self) -> int:
        """Key of the generator."""

    @property
    def origin_q(self) -> int:
        """Position of the first query, as dropout counts it."""

    @property
    def origin_k(self) -> int:
        """Position of the first key."""

    @property
    def origin_b_h(self) -> int:
        """Number of the first head of the first entry, as dropout counts the heads of all."""

    @property
    def heads_of_entry(self) -> int:
        """Heads that dropout counts for an entry."""


@dataclass(frozen=True)
class Programs:
    """The lowered mask and score changes of a problem."""

    score: Program
    slope: Program
    mask: Program
    tile: Program
    tables: object = None  # keeps alive the arrays that programs read by their addresses
    ranges: tuple[Array, Array] | None = None  # hide pairs, too: see `KeyRanges`

    @property
    def may_mask(self) -> bool:
        """Whether any pair can be left out."""
        return bool(len(self.score.code) or len(self.mask.code) or self.ranges)


class Scratch:
    """Memory for copies and intermediate results: the caller's workspace, or fresh arrays."""

    ALIGNMENT = 64

    def __init__(self, workspace: Array | None = None) -> None:
        self.nbytes = 0  # of fresh arrays
        self._workspace = workspace
        self._used = -address(workspace) % self.ALIGNMENT if workspace is not None else 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an uninitialised contiguous array."""
        if self._workspace is None:
            made = np.empty(shape, dtype)
            self.nbytes += made.nbytes
            return made
        size = math.prod(shape) * np.dtype(dtype).itemsize
        part: Array = self._workspace[self._used : self._used + size]
        self._used += -(-size // self.ALIGNMENT) * self.ALIGNMENT
        viewed: Array = part.view(dtype)
        return viewed.reshape(shape)


def _contiguous(lead: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of axes that lie one in the other."""
    return tuple(math.prod(lead[axis + 1 :]) for axis in range(len(lead)))


@lru_cache(maxsize=64)
def places_of(lead: tuple[int, ...], own: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """Return, for every batch entry, its place in an array of `own` leading axes and `strides`.

    The array's axes broadcast to `lead`. Nobody writes to the result.
    """
    places = np.zeros(lead, np.int64)
    missing = len(lead) - len(own)
    for axis, (size, stride) in enumerate(zip(own, strides, strict=True)):
        if size > 1:
            steps = np.arange(size, dtype=np.int64) * stride
            places += steps.reshape((-1,) + (1,) * (len(lead) - missing - axis - 1))
    return places.reshape(-1)


class Layout:
    """The batch entries of a problem, and how arrays of each kind are laid out over them."""

    def __init__(self, problem: Problem, block_q: int, block_kv: int) -> None:
        self.problem = problem
        self.batch = math.prod(problem.lead)
        self.len_q = self._per_entry(problem.len_q)
        self.len_k = self._per_entry(problem.len_k)
        self.start_q = self._per_entry(problem.start_q)
        self.start_k = self._per_entry(problem.start_k)
        self.number = problem.accumulator
        self.itemsize = self.number.itemsize
        self.lanes = vector_lanes(self.itemsize)
        self.block_q, self.block_kv = block_q, block_kv
        number = self.number.type
        kept = philox.keep_probability(problem.dropout)
        self.shape = Shape(
            heads=problem.heads,
            group=problem.heads // problem.heads_kv if problem.heads_kv else 1,
            len_q=self.len_q,
            len_k=self.len_k,
            start_q=self.start_q,
            start_k=self.start_k,
            d=problem.d,
            d_v=problem.d_v,
            block_q=block_q,
            block_kv=block_kv,
            itemsize=self.itemsize,
            lanes_per_vector=self.lanes,
            scale=number(problem.scale),
            log2_e=number(math.log2(math.e)),
            drop_below=philox.threshold(problem.dropout),
            keep_scale=number(1.0 / kept),
            seed=int(np.uint64(problem.seed).astype(np.int64)),
            origin_q=problem.origin_q,
            origin_k=problem.origin_k,
            origin_b_h=problem.origin_b_h,
            heads_of_entry=problem.heads_of_entry,
        )

    def _per_entry(self, value: Any) -> Array:
        if isinstance(value, int):
            return np.full(self.batch, value, np.int64)
        # Always a copy: a read-only array would be another type, and compile every kernel again.
        return np.array(np.broadcast_to(np.asarray(value, np.int64), (self.batch,)))

    def entries(self, lead: tuple[int, ...]) -> Array:
        """Return, for every batch entry, the flat index of its place in an operand."""
        return places_of(self.problem.lead, lead, _contiguous(lead))

    def rows(self, array: Array, keys: bool = False) -> Rows:
        """Return where the rows of an array of the accumulator's type lie."""
        strides = [stride // array.itemsize for stride in array.strides]
        row, head = strides[-2], strides[-3]
        if self.problem.packed:
            batch = (self.start_k if keys else self.start_q) * row
        else:
            batch = places_of(self.problem.lead, array.shape[:-3], tuple(strides[:-3]))
        return Rows(address(array), batch, head, row, array.itemsize, kind_of(array.dtype))

    def readable(self, array: Array, whole_vectors: bool) -> bool:
        """Whether kernels can use an array's rows in place."""
        return (
            array.dtype == self.number
            and self.has_whole_rows(array)
            and (not whole_vectors or array.shape[-1] % self.lanes == 0)
        )

    def has_whole_rows(self, array: Array) -> bool:
        """Return whether the elements of each row lie side by side, at multiples of their size."""
        size = array.itemsize
        return (
            array.flags.aligned
            and (array.shape[-1] <= 1 or array.strides[-1] == size)
            and all(stride % size == 0 for stride in array.strides)
        )

    def blocks(self, block: int, last_first: bool) -> Array:
        """Return (batch entry, block) of every block of queries; a causal mask's longest first."""
        if not self.problem.packed:  # all lengths are equal
            count = -(-self.problem.len_q // block)
            work = np.empty((count, self.batch, 2), np.int64)
            work[..., 0] = np.arange(self.batch)
            work[..., 1] = np.arange(count)[:: -1 if last_first else 1, None]
            return work.reshape(-1, 2)
        counts = -(-self.len_q // block)
        entry = np.repeat(np.arange(self.batch, dtype=np.int64), counts)
        first = np.cumsum(counts) - counts
        number = np.arange(entry.size, dtype=np.int64) - np.repeat(first, counts)
        order = np.argsort(-number if last_first else number, kind="stable")
        return np.stack([entry, number], axis=1)[order]

    def shared_blocks(
        self, lead: tuple[int, ...], lengths: Array, block: int, last_first: bool
    ) -> tuple[Array, Array]:
        """Return work items (first member, last member, block), and the members.

        Batch entries to which an operand was broadcast are members of one group.
        """
        groups, members, starts = self.groups(lead)
        ends = np.append(starts[1:], self.batch)
        counts = -(-lengths[members[starts]] // block)
        group = np.repeat(np.arange(groups, dtype=np.int64), counts)
        first = np.cumsum(counts) - counts
        number = np.arange(group.size, dtype=np.int64) - np.repeat(first, counts)
        order = np.argsort(-number if last_first else number, kind="stable")
        return np.stack([starts[group], ends[group], number], axis=1)[order], members

    def groups(self, lead: tuple[int, ...]) -> tuple[int, Array, Array]:
        """Return the number of groups, the batch entries by group, and each group's first place."""
        if self.problem.packed or lead == self.problem.lead:
            every = np.arange(self.batch, dtype=np.int64)
            return self.batch, every, every
        entries = self.entries(lead)
        members = np.argsort(entries, kind="stable").astype(np.int64)
        starts = np.flatnonzero(np.diff(entries[members], prepend=-1)).astype(np.int64)
        return len(starts), members, starts

    def panels(self, depth: int, scratch: Scratch) -> tuple[Array, Rows]:
        """Return memory for (depth, queries) of every block of queries, and where blocks lie."""
        lanes = self.panel_lanes()
        head, first = depth * int(lanes.sum()), depth * (np.cumsum(lanes) - lanes)
        spare = LINE // self.itemsize  # blocks begin at cache lines
        memory = scratch.empty((self.problem.heads * head + spare,), self.number)
        place = address(memory) + -address(memory) % LINE
        block = depth * self._in_pairs(self.block_q)
        return memory, Rows(place, first, head, block, self.itemsize, NATIVE)

    def panel_lanes(self) -> Array:
        """Return the columns of all blocks of every batch entry."""
        blocks, rest = np.divmod(self.len_q, self.block_q)
        result: Array = blocks * self._in_pairs(self.block_q) + self._in_pairs(rest)
        return result

    def _in_pairs(self, count: Any) -> Any:
        pair = lanes_of_pair(self.itemsize)
        return -(-count // pair) * pair

    def key_ranges(self, ends: tuple[Array, Array] | None) -> KeyRanges:
        """Return the ranges of keys, with the place of each query's first and last key.

        The ends have axes (B, H, L), or (H, total) of packed sequences, of which all but the last
        may have length 1.
        """
        if ends is None:
            return NO_RANGES
        # Copies: a read-only array would be another type.
        low, high = (np.array(end, np.int64).reshape(-1) for end in ends)
        queries = ends[0].shape[-1]
        if self.problem.packed:
            batch, several = self.start_q, ends[0].shape[0] > 1
            return KeyRanges(low, high, batch, queries if several else 0)
        entries, heads = ends[0].shape[:2]
        batch = np.arange(self.batch, dtype=np.int64) * (heads * queries if entries > 1 else 0)
        return KeyRanges(low, high, batch, queries if heads > 1 else 0)
