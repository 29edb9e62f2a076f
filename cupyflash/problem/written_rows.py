"""Checks that a call of `append` writes no row of a page for two positions."""

from __future__ import annotations

import numpy as np

from ..arrays.device_arrays import is_device_array, read_back
from ..errors import ArgumentError
from . import cached
from .call import Array, Cache


class WrittenTwiceError(ArgumentError):
    """One row of a page is written for two positions; `what` says which."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"table: {what}{remedy}")
        self.what = what


def check(
    cache: Cache,
    counts: Array,
    after: Array,
    new: dict[str, Array],
    packed: bool,
    shared: int,
) -> None:
    """Refuse two writes to one row of a page, except of the same row to a shared position.

    Parameters
    ----------
    cache : Cache
        With page numbers that were checked. If its table cannot be read, nothing is checked.
    counts, after : array, shape (B,)
        New rows of each entry, and how many positions it holds after them.
    new : dict of array
        What entries that share a position must have in common there: new rows, and the positions by
        which they are rotated.
    packed : bool
        Whether new rows are packed.
    shared : int
        Entries may share positions below this one.
    """
    table = None if cache.table is None else cached.readable(cache.table)
    if table is None or not counts.any():
        return
    before, page_size = after - counts, cache.page_size
    first, last = before // page_size, (after - 1) // page_size
    if counts.all() and (first == last).all():
        pages = table[np.arange(len(table)), first]
    else:
        spans = np.where(counts > 0, last - first + 1, 0)
        pages = table[np.repeat(np.arange(len(table)), spans), _steps(spans, first)]
    pages.sort()
    if (pages[1:] != pages[:-1]).all():
        return  # this is all that most calls need
    entries, held = np.repeat(np.arange(len(table)), counts), _steps(counts, before)
    rows = table[entries, held // page_size] * np.int64(page_size) + held % page_size
    order = np.argsort(rows, kind="stable")
    again = np.flatnonzero(rows[order[1:]] == rows[order[:-1]])
    one, two = order[again], order[again + 1]
    wrong = (held[one] != held[two]) | (held[one] >= shared)
    if not wrong.any():
        steps = held - np.repeat(before, counts)
        places = [(n,) if packed else (entries[n], steps[n]) for n in (one, two)]
        for name, array in new.items() if len(again) else ():
            host = read_back(array) if is_device_array(array) else array
            by_row = host if name == "positions" else host.swapaxes(-3, -2)
            wrong |= _differ(*(by_row[place] for place in places))
    if not wrong.any():
        return
    own = entries[one] == entries[two]  # of these, the last position that is lost
    n = int(np.argmax(np.where(own, held[one], -1) if own.any() else wrong))
    a, b = (f"entry {entries[x[n]]} position {held[x[n]]}" for x in (one, two))
    page, row = divmod(int(rows[one[n]]), page_size)
    what = f"{a} and {b} are both row {row} of page {page}"
    position = max(int(held[x].max()) for x in (one, two))
    if own.any():
        kept = int(after[entries[one[n]]] - 1 - held[one[n]])
        remedy = (
            "; expected one position for each row that is written. In a ring of pages, append only "
            f"the last rows of the entry, {kept} or fewer, with the same lengths."
        )
    elif (held[one] == held[two]).all() and position >= shared:
        remedy = (
            "; expected one position for each row that is written. If the entries share new rows "
            f"that are the same, pass shared={position + 1}; otherwise give each of them its own "
            "page in table."
        )
    else:
        remedy = (
            ", with different new rows; expected one position for each row that is written, or "
            "the same rows at positions below shared. Give each entry its own page in table."
        )
    raise WrittenTwiceError(what, remedy)


def _steps(counts: Array, first: Array) -> Array:
    """Return so many successive integers from each of `first` on."""
    ends = np.cumsum(counts)
    steps: Array = np.arange(int(ends[-1])) + np.repeat(first - (ends - counts), counts)
    return steps


def _differ(one: Array, two: Array) -> Array:
    """Return which rows of two arrays differ in a bit."""
    a, b = (np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1) for x in (one, two))
    differ: Array = (a != b).any(axis=1)
    return differ
