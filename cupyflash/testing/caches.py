"""Caches of keys and values that properties draw: contiguous or in pages, partly unused."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .bound import ForwardBound
from .cases import Problem
from .subject import Rows, Subject

Array = np.ndarray[Any, Any]

# The edges of the sums: a leaf has 64 keys, and a node has 512.
LENGTHS = (0, 1, 2, 63, 64, 65, 130, 512, 513)
PAGES = (1, 3, 16, 64, 100)
NO_PAGE = (-1, 2**31 - 1, -(2**31))
NO_CODE = 0x7F  # of unused positions: NaN in both types of float8


class Pages(NamedTuple):
    """A cache in pages.

    Attributes
    ----------
    k, v : ndarray, shape (P, Hkv, page, D)
        The pages.
    table : ndarray, shape (B, N)
        The page numbers of each entry.
    owned : ndarray of bool, shape (B, N)
        True for the elements of the table that are needed.
    beside : tuple of ndarray, shapes (P, Hkv, page, ...)
        Pages of other arrays of the cache, such as scales.
    """

    k: Array
    v: Array
    table: Array
    owned: Array
    beside: tuple[Array, ...] = ()


@dataclass(frozen=True)
class Cache:
    """A contiguous cache, and queries for the last positions of each entry.

    Attributes
    ----------
    q : ndarray, shape (B, Hq, Lq, D)
        Queries.
    k, v : ndarray, shape (B, Hkv, S, D)
        Keys and values. Positions behind the length of an entry contain `fill`.
    lengths : ndarray of int64, shape (B,)
        How many positions of each entry are used.
    fill : float
        The value of the unused positions.
    rng : numpy.random.Generator
        The generator for everything else that is drawn.
    """

    q: Array
    k: Array
    v: Array
    lengths: Array
    fill: float
    rng: np.random.Generator

    @classmethod
    def drawn(cls, s: Subject, p: Problem, len_q: int | None = None, least: int = 0) -> Cache:
        """Draw a cache with the dtype, heads and head sizes of a problem.

        Parameters
        ----------
        s : Subject
            The kernel that will read it. Unused positions are NaN if its features include that.
        p : Problem
            The problem, whose generator draws.
        len_q : int, optional
            The number of queries of an entry. By default, 1 to 9 are drawn.
        least : int
            The least length that is drawn.

        Returns
        -------
        Cache
            A cache of 1 to 3 entries.
        """
        rng = p.rng
        batch = int(rng.integers(1, 4))
        lengths = np.maximum(rng.choice([*LENGTHS, p.k.shape[-2]], batch), least)
        room = int(lengths.max() + rng.choice([0, 1, 70]))
        len_q = int(rng.choice([1, 2, 5, 9])) if len_q is None else len_q
        (heads, d), (heads_kv, d_v) = ((x.shape[1], x.shape[-1]) for x in (p.q, p.v))

        def normal(*shape: int) -> Array:
            return rng.standard_normal(shape).astype(p.dtype)

        made = cls(
            normal(batch, heads, len_q, d),
            normal(batch, heads_kv, room, d),
            normal(batch, heads_kv, room, d_v),
            lengths.astype(np.int64),
            np.nan if "nonfinite" in s.features else 7.0,
            rng,
        )
        return made.filled(made.fill)

    def filled(self, value: float) -> Cache:
        """Return a copy whose unused positions have another value."""
        unused = np.arange(self.k.shape[2])[:, None] >= self.lengths[:, None, None, None]
        fill = np.array(value, self.k.dtype)
        k, v = (np.where(unused, fill, x) for x in (self.k, self.v))
        return replace(self, k=k, v=v, fill=value)

    def entry(self, b: int) -> tuple[Array, Array, Array]:
        """Return the queries of an entry, and the keys and values that are used."""
        n, one = self.lengths[b], slice(b, b + 1)
        return self.q[one], self.k[one, :, :n], self.v[one, :, :n]

    def paged(self, page: int | None = None, *beside: Array) -> Pages:
        """Return the same cache in pages of any order; unused pages and rows contain `fill`.

        Parameters
        ----------
        page : int, optional
            The number of positions of a page. By default, it is drawn.
        *beside : ndarray, shapes (B, Hkv, S, ...)
            Other arrays of the cache.

        Returns
        -------
        Pages
            Pages in one of the usual layouts, and a table whose unneeded elements name no page.
        """
        rng = self.rng
        page = int(rng.choice(PAGES)) if page is None else page
        batch, heads, room, _ = self.k.shape
        most = -(-room // page) + int(rng.integers(2))
        owned = np.arange(most) < -(-self.lengths[:, None] // page)
        number = int(owned.sum())
        pages = number + int(rng.integers(4)) + 1
        where = rng.permutation(pages)[:number]
        table = np.full((batch, most), int(rng.choice(NO_PAGE)), np.dtype(rng.choice(["i4", "i8"])))
        table[owned] = where
        made, heads_inside = [], rng.random() < 0.5
        for x in (self.k, self.v, *beside):
            fill = NO_CODE if x.dtype == np.uint8 else self.fill
            padded = np.full((batch, heads, most * page, x.shape[-1]), fill, x.dtype)
            padded[:, :, :room] = x
            split = padded.reshape(batch, heads, most, page, x.shape[-1]).swapaxes(1, 2)
            shape = (pages, heads, page, x.shape[-1])
            if heads_inside:  # (P, page, Hkv, D) in memory
                shape = (pages, page, heads, x.shape[-1])
            held = np.full(shape, fill, x.dtype)
            held = held.swapaxes(1, 2) if heads_inside else held
            held[where] = split[owned]
            made.append(held)
        return Pages(made[0], made[1], table, owned, tuple(made[2:]))

    def read(self, s: Subject, **options: Any) -> Rows:
        """Attend to the contiguous cache."""
        return s.attend_cached(self.q, self.k, self.v, self.lengths, **options)

    def read_pages(self, s: Subject, pages: Pages, **options: Any) -> Rows:
        """Attend to the cache in pages."""
        lengths = self.lengths.astype(self.rng.choice(["i4", "i8"]))
        return s.attend_cached(self.q, pages.k, pages.v, lengths, table=pages.table, **options)

    def bound(self, s: Subject, b: int, **options: Any) -> ForwardBound:
        """Return the exact results of an entry, and their error bounds."""
        return s.bound(*self.entry(b), **options)

    def same(self, s: Subject, ours: Rows, expected: Rows, **options: Any) -> None:
        """Expect equal bits or, without that feature, agreement within the bounds of both."""
        for b in range(len(self.lengths)):
            one = slice(b, b + 1)
            parts = [
                Rows(x.out[one], None if x.lse is None else x.lse[one]) for x in (ours, expected)
            ]
            s.same_rows(parts[0], parts[1], functools.partial(self.bound, s, b, **options))
