"""Where the rows of a call's entries lie: in axes of their own, one after the other, or in a cache.

Layers call these methods instead of asking which kind of call they have. A new kind of rows is a
class here with the same members.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ..arrays.typed import Array
from ..errors import ArgumentError
from ..expr.nodes import Expr, as_expr, symbol
from .cache import TellsCache

# The length of entries by which no kernel and no tile is chosen: it counts as more than any other.
UNKNOWN = 2**62
_SIZES = "len_q", "len_k", "start_q", "start_k"


def part_of_pairs(array: Array, rows: range, keys: range) -> Array:
    """Return the part of an array that broadcasts to (..., Lq, Lk) for some queries and keys."""
    index: tuple[Any, ...] = (...,)
    for axis, positions in ((-2, rows), (-1, keys)):
        if array.ndim >= -axis:
            repeated = array.shape[axis] == 1
            index += (slice(None) if repeated else slice(positions.start, positions.stop),)
    view: Array = array[index]
    return view


@dataclass(frozen=True, eq=False)
class DenseRows:
    """Entries have equal lengths, and their rows lie in axes of their own.

    Attributes
    ----------
    len_q, len_k : int
        Queries and keys of each entry.
    """

    len_q: int
    len_k: int
    start_q: ClassVar[int] = 0
    start_k: ClassVar[int] = 0
    packed: ClassVar[bool] = False
    cache: ClassVar[None] = None
    # Why heads that share keys cannot be rows of one head; None if they can.
    keeps_heads: ClassVar[str | None] = None
    # Whether the rows after those of an entry are another's, so that whole tiles reach into them.
    adjoin: ClassVar[bool] = False
    # Whether some rows and keys of an entry make a call whose lengths are numbers.
    divisible: ClassVar[bool] = True
    # Positions at which all entries have the keys of entry 0.
    shared: ClassVar[int] = 0
    # Whether only the device knows how many keys each entry has.
    differ: ClassVar[bool] = False
    # Whether users may pass a workspace for a forward.
    takes_workspace: ClassVar[bool] = False
    # Names of arrays whose leading axes are not those of entries.
    apart: ClassVar[tuple[str, ...]] = ()
    # Of `Specialisation`, that differ from its defaults.
    flags: ClassVar[Mapping[str, bool]] = {}
    # Arrays of integers, by name: offsets, and others.
    offsets: ClassVar[Mapping[str, Array]] = {}
    arrays: ClassVar[Mapping[str, Array]] = {}
    # Whether there are offsets in device memory that nobody has looked at; whether kernels check
    # them, and report wrong ones; and whether the caller says how long sequences are at most.
    unread: ClassVar[bool] = False
    reports: ClassVar[bool] = False
    bounded: ClassVar[bool] = False
    # What kernels are told at each launch besides addresses, by name.
    numbers: ClassVar[Mapping[str, int]] = {}

    def known(self) -> DenseRows:
        """Return the same where somebody knows the lengths: these rows."""
        return self

    @property
    def of_queries(self) -> DenseRows:
        """Where queries lie: these rows."""
        return self

    @property
    def known_q(self) -> int:
        """Queries of an entry as far as kernels may be chosen by them, or `UNKNOWN`."""
        return self.len_q

    @property
    def known_k(self) -> int:
        """Keys of an entry as far as kernels may be chosen by them, or `UNKNOWN`."""
        return self.len_k

    @property
    def key(self) -> Hashable | None:
        """What tells these rows from others; None if that depends on arrays."""
        return self.len_q, self.len_k

    @property
    def layout(self) -> bytes:
        """What tells these rows from others of as many positions."""
        return b""

    def sized(self, len_q: Any = None, len_k: Any = None) -> DenseRows:
        """Return rows with other lengths."""
        return DenseRows(
            self.len_q if len_q is None else len_q, self.len_k if len_k is None else len_k
        )

    def array_lead(self, lead: tuple[int, ...]) -> tuple[int, ...]:
        """Return the leading axes that arrays of rows have, where entries have the axes `lead`."""
        return lead

    def entries(self, batch: int) -> tuple[int, int]:
        """Return by how much a launch multiplies lengths, and how many sequences these have."""
        return batch, 0

    def extent(self, longest: tuple[int, int], total: tuple[int, int]) -> tuple[int, int]:
        """Return the queries and keys of a launch, from the longest entry's and those of arrays."""
        del total
        return longest

    def row_groups(self, rows: int, size: int, batch: int) -> int:
        """Return how many groups of so many rows there are, each of rows of one entry."""
        del batch
        return -(-rows // size)

    def total_q(self, held: int, batch: int) -> int:
        """Return the queries of all entries, of which an array has `held` rows."""
        del held
        return batch * self.len_q

    def rows_in_use(self, x: Array, lengths: Sequence[int]) -> int:
        """Return how many rows of keys or values are read, over all heads."""
        del lengths
        return math.prod(x.shape[:-1])

    def known_lengths(self, batch: int) -> Array | None:
        """Return the keys of each entry where the problem does not have them."""
        del batch
        return None

    def table_bytes(self, lengths: Sequence[int]) -> int:
        """Return the bytes of a table of pages that are read."""
        del lengths
        return 0

    def room(self, rows: int) -> int:
        """Return an upper bound of the keys of an entry, from the rows of an array of keys."""
        return rows

    def start(self, keys: bool) -> Array:
        """Return the first row of each sequence among those of an array."""
        del keys
        return np.zeros(1, np.int64)

    def axis_words(
        self, name: str, lead: tuple[int, ...], rows: int, batch: int
    ) -> tuple[str, str]:
        """Return which axes of q, k or v are the leading ones and the rows, in words."""
        del batch
        before = f"batch {' x '.join(map(str, lead))}" if lead else ""
        return before, f"{'queries' if name == 'q' else 'keys'} {rows}"

    def queries(self, batch: int) -> tuple[Array, Array]:
        """Return the entry and the position in it of every query, (B, 1, L), or (total,)."""
        b, _, i = np.ix_(np.arange(batch), np.arange(1), np.arange(self.len_q))
        return b, i

    def by_row(self, values: tuple[Array, Array], batch: int) -> tuple[Array, ...]:
        """Return what `queries` gave numbers to, by the row of an array."""
        del batch
        return values

    def of_entry(self, entry: int) -> dict[str, int]:
        """Return the lengths and starts of an entry, as masks and scores know them."""
        del entry
        return {"len_q": int(self.len_q), "len_k": int(self.len_k), "start_q": 0, "start_k": 0}

    def symbols_within(self, whole: DenseRows | PackedRows, entry: int) -> dict[str, Expr]:
        """Return what lengths and starts of a piece's rows are for masks of the whole problem."""
        return {name: as_expr(value) for name, value in whole.of_entry(entry).items()}

    def piece(self, rows: range, keys: range, sequences: range) -> dict[str, Any]:
        """Return the fields of a problem of some queries and keys, of these packed sequences."""
        del sequences
        return {
            "rows": DenseRows(len(rows), len(keys)),
            "origin_q": rows.start,
            "origin_k": keys.start,
        }

    def part_of_bias(
        self, array: Array, here: tuple[range, range], piece: tuple[range, range], sequences: range
    ) -> Array:
        """Return the part for a piece of a bias, or of an array like it.

        `here` are its queries and keys in an array of the bias, and `piece` those in the call.
        """
        del piece, sequences
        return part_of_pairs(array, *here)

    def shares_pairs(self, bias: Array) -> bool:
        """Return whether several pieces may have the same part of a bias."""
        return bias.ndim < 2 or 1 in bias.shape[-2:]

    def refuse_sharded_lookup(self, index: Expr) -> None:
        """Refuse look-ups, at an index, in an array of which each rank has its positions."""

    def tell(self, writer: TellsCache) -> None:
        """Let what writes parameters of kernels know where keys lie, if not in their arrays."""


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Sequences of different lengths lie one after the other, and offsets say where.

    Attributes
    ----------
    len_q, len_k, start_q, start_k : array
        Lengths and first rows of every sequence; or of two of them, the most extreme ones that
        there may be, if offsets in device memory are not read.
    offsets : mapping of str to array
        The offsets, by name.
    unread : bool
        Whether some are in device memory, and nobody has looked at them.
    reports : bool
        Whether kernels check these, and report wrong ones.
    bounded : bool
        Whether the caller says how long sequences are at most: longer ones are always reported.
    """

    len_q: Array
    len_k: Array
    start_q: Array
    start_k: Array
    offsets: Mapping[str, Array]
    unread: bool = False
    reports: bool = False
    bounded: bool = False
    packed: ClassVar[bool] = True
    cache: ClassVar[None] = None
    keeps_heads: ClassVar[str | None] = "sequences are packed"
    adjoin: ClassVar[bool] = True
    divisible: ClassVar[bool] = False
    shared: ClassVar[int] = 0
    differ: ClassVar[bool] = False
    takes_workspace: ClassVar[bool] = False
    apart: ClassVar[tuple[str, ...]] = ()
    flags: ClassVar[Mapping[str, bool]] = {"packed": True}
    arrays: ClassVar[Mapping[str, Array]] = {}
    numbers: ClassVar[Mapping[str, int]] = {}
    # No sequence's result may depend on the lengths of others that are packed with it.
    known_q: ClassVar[int] = UNKNOWN
    known_k: ClassVar[int] = UNKNOWN
    key: ClassVar[None] = None

    @property
    def of_queries(self) -> PackedRows:
        """Where queries lie: these rows."""
        return self

    @property
    def layout(self) -> bytes:
        """What tells these rows from others of as many positions."""
        return np.stack([self.len_q, self.len_k]).tobytes()

    def sized(self, len_q: Any = None, len_k: Any = None) -> PackedRows:
        """Return rows with other lengths."""
        return PackedRows(
            self.len_q if len_q is None else len_q,
            self.len_k if len_k is None else len_k,
            self.start_q,
            self.start_k,
            self.offsets,
            self.unread,
            self.reports,
            self.bounded,
        )

    def known(self) -> PackedRows:
        """Return the same where somebody knows the lengths."""
        return replace(self, unread=False)

    def array_lead(self, lead: tuple[int, ...]) -> tuple[int, ...]:
        """Return no axes."""
        del lead
        return ()

    def entries(self, batch: int) -> tuple[int, int]:
        """Return by how much a launch multiplies lengths, and how many sequences these have."""
        return 1, batch

    def extent(self, longest: tuple[int, int], total: tuple[int, int]) -> tuple[int, int]:
        """Return the queries and keys of a launch: all that arrays have."""
        del longest
        return total

    def row_groups(self, rows: int, size: int, batch: int) -> int:
        """Return how many groups of so many rows there may be: each sequence begins a new one."""
        return rows // size + batch

    def total_q(self, held: int, batch: int) -> int:
        """Return the queries of all entries: those that an array has."""
        del batch
        return held

    def rows_in_use(self, x: Array, lengths: Sequence[int]) -> int:
        """Return how many rows of keys or values are read, over all heads."""
        del lengths
        return math.prod(x.shape[:-1])

    def known_lengths(self, batch: int) -> Array | None:
        """Return the keys of each entry where the problem does not have them."""
        del batch
        return None

    def table_bytes(self, lengths: Sequence[int]) -> int:
        """Return the bytes of a table of pages that are read."""
        del lengths
        return 0

    def room(self, rows: int) -> int:
        """Return an upper bound of the keys of an entry: those of all."""
        return rows

    def start(self, keys: bool) -> Array:
        """Return the first row of each sequence among those of an array."""
        return np.asarray(self.start_k if keys else self.start_q, np.int64)

    def axis_words(
        self, name: str, lead: tuple[int, ...], rows: int, batch: int
    ) -> tuple[str, str]:
        """Return which axes of q, k or v are the leading ones and the rows, in words."""
        before = f"batch {' x '.join(map(str, lead))}" if lead else ""
        words = f"{'queries' if name == 'q' else 'keys'} {rows} in {batch} sequences"
        return before, words

    def queries(self, batch: int) -> tuple[Array, Array]:
        """Return the sequence and the position in it of every query, (total,)."""
        b = np.repeat(np.arange(batch, dtype=np.int64), self.len_q)
        return b, np.arange(b.size, dtype=np.int64) - (np.cumsum(self.len_q) - self.len_q)[b]

    def by_row(self, values: tuple[Array, Array], batch: int) -> tuple[Array, ...]:
        """Return numbers (H, total) of queries by packed row; rows between sequences have 0."""
        b, i = self.queries(batch)
        rows = self.start_q[b] + i
        spread = np.zeros((2, len(values[0]), int(rows.max(initial=-1)) + 1), np.int64)
        spread[:, :, rows] = values
        return tuple(spread)

    def of_entry(self, entry: int) -> dict[str, int]:
        """Return the lengths and starts of a sequence, as masks and scores know them."""
        return {name: int(getattr(self, name)[entry]) for name in _SIZES}

    def symbols_within(self, whole: DenseRows | PackedRows, entry: int) -> dict[str, Expr]:
        """Return what starts of a piece's rows are for masks of the whole problem.

        The piece has whole sequences, from `entry` on, which lie elsewhere among the packed rows.
        """
        if not self.len_q.size:
            return {}
        there = whole.of_entry(entry)
        starts = {"start_q": self.start_q, "start_k": self.start_k}
        return {name: symbol(name) + int(there[name] - own[0]) for name, own in starts.items()}

    def piece(self, rows: range, keys: range, sequences: range) -> dict[str, Any]:
        """Return the fields of a problem of some queries and keys, of these packed sequences.

        Its rows are packed only if it has several sequences, and then all of each.
        """
        first, last = sequences.start, sequences.stop
        if last - first > 1:
            start_q = self.start_q[first:last] - rows.start
            start_k = self.start_k[first:last] - keys.start
            offsets = {
                "offsets_q": np.append(start_q, len(rows)).astype(np.int64),
                "offsets_k": np.append(start_k, len(keys)).astype(np.int64),
            }
            lengths = self.len_q[first:last], self.len_k[first:last]
            part = PackedRows(*lengths, start_q, start_k, offsets)
            return {"lead": (last - first,), "rows": part, "origin_b": first}
        starts = (0, 0) if last == first else (int(self.start_q[first]), int(self.start_k[first]))
        return {
            "lead": (),
            "rows": DenseRows(len(rows), len(keys)),
            "origin_q": rows.start - starts[0],
            "origin_k": keys.start - starts[1],
            "origin_b": first,
        }

    def part_of_bias(
        self, array: Array, here: tuple[range, range], piece: tuple[range, range], sequences: range
    ) -> Array:
        """Return the part for a piece of a bias, of the longest sequence."""
        del here
        several = array.ndim > 3 and array.shape[0] > 1
        first, last = sequences.start, sequences.stop
        if last - first > 1:
            lengths = (int(x[first:last].max()) for x in (self.len_q, self.len_k))
            some = array[first:last] if several else array
            return part_of_pairs(some, *map(range, lengths))
        one = array[first if several else 0] if array.ndim > 3 else array
        local = (
            range(positions.start - int(starts[first]), positions.stop - int(starts[first]))
            for positions, starts in zip(piece, (self.start_q, self.start_k), strict=True)
        )
        return part_of_pairs(one, *local)

    def shares_pairs(self, bias: Array) -> bool:
        """Return True: sequences may have the same part of a bias."""
        del bias
        return True

    def refuse_sharded_lookup(self, index: Expr) -> None:
        """Refuse look-ups, at an index, in an array of which each rank has its positions."""
        raise ArgumentError(
            f"lookup: a sharded look-up is read at {index} of packed sequences, "
            "which counts from the start of each; expected cupyflash.masks.segments, which "
            "counts packed rows, or the whole array."
        )

    def tell(self, writer: TellsCache) -> None:
        """Do nothing: keys lie in their arrays."""
