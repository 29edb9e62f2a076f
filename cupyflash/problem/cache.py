"""Where the keys and values of a call over a cache are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ..arrays.typed import Array
from .encoding import NUMBERS, Encoding

Length: TypeAlias = int | Array  # a number for all entries, or one for each, (B,)


class TellsCache(Protocol):
    """What writes the parameters of kernels."""

    def tell_cache(self, cache: Cache) -> None:
        """Write where the keys of a cache lie."""


@dataclass(frozen=True, eq=False)
class Cache:
    """Where the keys and values of a call over a cache are, and how many it holds.

    Attributes
    ----------
    capacity : int
        The most positions of an entry.
    lengths : int or array
        How many positions every entry holds, or (B,) integers, how many each entry holds.
    table : array or None
        (B, N) integers, the pages of each entry's positions; None if k and v have a row for each
        position.
    page_size : int
        Positions of a page; without a table, the capacity.
    encoding : Encoding
        What the elements of keys and values mean.
    shared : int
        Positions, from the first one on, at which all entries have the rows of entry 0.
    """

    capacity: int
    lengths: Length
    table: Array | None
    page_size: int
    encoding: Encoding = NUMBERS
    shared: int = 0

    @property
    def is_paged(self) -> bool:
        """Whether a table says where positions are."""
        return self.table is not None

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays of integers, by name."""
        named = {"lengths": self.lengths, "table": self.table}
        return {name: x for name, x in named.items() if x is not None and not isinstance(x, int)}
