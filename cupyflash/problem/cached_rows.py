"""Rows of a call over a cache; and every kind of rows that there is."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

from ..arrays.typed import Array
from .cache import Cache, Length, TellsCache
from .rows import UNKNOWN, DenseRows, PackedRows


@dataclass(frozen=True, eq=False)
class CachedRows:
    """Keys lie in a cache, whose entries may have any lengths up to a capacity.

    Attributes
    ----------
    of_queries : DenseRows or PackedRows
        Where queries lie; its keys are those that entries have room for.
    cache : Cache
        Where keys lie.
    len_k : int or array
        Keys of entries: as far as they are known, and otherwise the least and the most.
    """

    of_queries: DenseRows | PackedRows
    cache: Cache
    len_k: Length
    start_k: ClassVar[int] = 0
    # Nor may a result depend on how much a cache has room for.
    known_k: ClassVar[int] = UNKNOWN
    keeps_heads: ClassVar[str | None] = "keys lie in a cache"
    divisible: ClassVar[bool] = False
    takes_workspace: ClassVar[bool] = True
    unread: ClassVar[bool] = False
    reports: ClassVar[bool] = False
    bounded: ClassVar[bool] = False

    @classmethod
    def of(cls, of_queries: DenseRows | PackedRows, cache: Cache) -> CachedRows:
        """Return rows whose keys are not known in advance."""
        return cls(of_queries, cache, np.array([0, cache.capacity]))

    @property
    def key(self) -> Hashable | None:
        """What tells these rows from others; None if keys are known, or if it depends on arrays."""
        queries = self.of_queries.key
        if queries is None or not np.array_equal(self.len_k, (0, self.cache.capacity)):
            return None
        return "cached", queries, self.cache.capacity

    @property
    def len_q(self) -> Length:
        """Queries of entries."""
        return self.of_queries.len_q

    @property
    def start_q(self) -> Length:
        """The first row of the queries of each entry."""
        return self.of_queries.start_q

    @property
    def packed(self) -> bool:
        """Whether queries are packed."""
        return self.of_queries.packed

    @property
    def adjoin(self) -> bool:
        """Whether the rows after those of an entry are another's."""
        return self.of_queries.adjoin

    @property
    def known_q(self) -> int:
        """Queries of an entry as far as kernels may be chosen by them, or `UNKNOWN`."""
        return self.of_queries.known_q

    @property
    def apart(self) -> tuple[str, ...]:
        """Names of arrays whose leading axes are not those of entries: k and v in pages."""
        return ("k", "v") if self.cache.is_paged else ()

    @property
    def flags(self) -> Mapping[str, bool]:
        """What of `Specialisation` differs from its defaults."""
        return {**self.of_queries.flags, "cached": True, "paged": self.cache.is_paged}

    @property
    def offsets(self) -> Mapping[str, Array]:
        """The offsets of packed queries, by name."""
        return self.of_queries.offsets

    @property
    def arrays(self) -> Mapping[str, Array]:
        """The arrays of integers of the cache, by name."""
        return self.cache.arrays

    @property
    def numbers(self) -> Mapping[str, int]:
        """The keys of all entries, if that is one number."""
        lengths = self.cache.lengths
        return {"len_k": lengths} if isinstance(lengths, int) else {}

    def known(self) -> CachedRows:
        """Return the same where somebody knows the lengths: these rows."""
        return self

    def sized(self, len_q: Any = None, len_k: Any = None) -> CachedRows:
        """Return rows with other lengths."""
        queries = self.of_queries if len_q is None else self.of_queries.sized(len_q)
        return CachedRows(queries, self.cache, self.len_k if len_k is None else len_k)

    def array_lead(self, lead: tuple[int, ...]) -> tuple[int, ...]:
        """Return the leading axes that arrays of queries have."""
        return self.of_queries.array_lead(lead)

    def entries(self, batch: int) -> tuple[int, int]:
        """Return by how much a launch multiplies lengths, and how many sequences these have."""
        return self.of_queries.entries(batch)

    def extent(self, longest: tuple[int, int], total: tuple[int, int]) -> tuple[int, int]:
        """Return the queries and keys of a launch."""
        return self.of_queries.extent(longest, total)

    @property
    def shared(self) -> int:
        """Positions at which all entries have the keys of entry 0."""
        return self.cache.shared

    @property
    def differ(self) -> bool:
        """Whether only the device knows how many keys each entry has."""
        return not isinstance(self.cache.lengths, int)

    def total_q(self, held: int, batch: int) -> int:
        """Return the queries of all entries, of which an array has `held` rows."""
        return self.of_queries.total_q(held, batch)

    def rows_in_use(self, x: Array, lengths: Sequence[int]) -> int:
        """Return how many rows of keys or values are read, over all heads; shared ones once."""
        own = sum(max(length - self.shared, 0) for length in lengths)
        return int(x.shape[1] * (min(self.shared, max(lengths)) + own))

    def known_lengths(self, batch: int) -> Array | None:
        """Return the keys of each entry, as a copy: they may change while a call runs."""
        return np.array(np.broadcast_to(np.asarray(self.cache.lengths, np.int64), (batch,)))

    def table_bytes(self, lengths: Sequence[int]) -> int:
        """Return the bytes of the table of pages that are read."""
        table, size = self.cache.table, self.cache.page_size
        return (
            0 if table is None else sum(-(-length // size) for length in lengths) * table.itemsize
        )

    def room(self, rows: int) -> int:
        """Return the most keys of an entry."""
        del rows
        return self.cache.capacity

    def axis_words(
        self, name: str, lead: tuple[int, ...], rows: int, batch: int
    ) -> tuple[str, str]:
        """Return which axes of q, k or v are the leading ones and the rows, in words."""
        before, words = self.of_queries.axis_words(name, lead, rows, batch)
        if name == "q":
            return before, words
        if self.cache.is_paged:
            return f"pages {lead[0]}", f"keys of a page {rows}"
        return before, f"room for {rows} keys"

    def queries(self, batch: int) -> tuple[Array, Array]:
        """Return the entry and the position in it of every query, (B, 1, L), or (total,)."""
        return self.of_queries.queries(batch)

    def by_row(self, values: tuple[Array, Array], batch: int) -> tuple[Array, ...]:
        """Return what `queries` gave numbers to, by the row of an array."""
        return self.of_queries.by_row(values, batch)

    def row_groups(self, rows: int, size: int, batch: int) -> int:
        """Return how many groups of so many rows there may be, each of rows of one entry."""
        return self.of_queries.row_groups(rows, size, batch)

    def tell(self, writer: TellsCache) -> None:
        """Let what writes parameters of kernels know where keys lie."""
        writer.tell_cache(self.cache)


Rows: TypeAlias = DenseRows | PackedRows | CachedRows
