"""Properties of attention over a cache: layouts, unused positions and other entries."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np

from cupyflash import masks

from ..caches import Cache
from ..cases import Problem
from ..subject import Subject
from .base import a_property, cut_rows, some_mask


def _some_options(s: Subject, p: Problem) -> dict[str, Any]:
    """Draw a mask and a sink, if the kernel supports them."""
    options = some_mask(s, p)
    if "sink" in s.features and p.rng.random() < 0.5:
        options["sink"] = p.rng.standard_normal(p.q.shape[1]).astype(np.float32)
    return options


@a_property("cached", weight=2)
def cached_within_bound(s: Subject, p: Problem) -> None:
    """|O' - O| <= B_O and |L' - L| <= B_L over the keys that each entry of a cache holds."""
    c, options = Cache.drawn(s, p), _some_options(s, p)
    rows = c.read(s, **options)
    for b in range(len(c.lengths)):
        bound, one = c.bound(s, b, **options), slice(b, b + 1)
        s.judge("out", rows.out[one], *bound.out)
        if rows.lse is not None:
            s.judge("lse", rows.lse[one], *bound.lse)


@a_property("cached", weight=2)
def pages_are_contiguous(s: Subject, p: Problem) -> None:
    """A cache in pages of any size, order and layout gives the bits of a contiguous cache."""
    c, options = Cache.drawn(s, p), _some_options(s, p)
    c.same(s, c.read_pages(s, c.paged(), **options), c.read(s, **options), **options)


@a_property("cached nonfinite")
def unused_parts_of_a_cache_change_nothing(s: Subject, p: Problem) -> None:
    """NaN and infinities in unused positions, and unused page numbers, change no bit."""
    c, options = Cache.drawn(s, p), _some_options(s, p)
    expected = c.filled(0.0).read(s, **options)
    c = c.filled(float(p.rng.choice([np.nan, np.inf, -np.inf])))
    c.same(s, c.read(s, **options), expected, **options)
    c.same(s, c.read_pages(s, c.paged(), **options), expected, **options)


@a_property("cached")
def entries_of_a_cache_apart(s: Subject, p: Problem) -> None:
    """An entry has the bits that it has alone, with an integer length and without spare room."""
    c, options = Cache.drawn(s, p), _some_options(s, p)
    together = c.read(s, **options)
    for b, n in enumerate(c.lengths):
        alone = s.attend_cached(*c.entry(b), int(n), **options)
        part = cut_rows(together, slice(b, b + 1))
        s.same_rows(part, alone, functools.partial(c.bound, s, b, **options))


@a_property("cached causal")
def drafts_are_steps(s: Subject, p: Problem) -> None:
    """n queries in one call have the bits of n calls with one query each, as the cache grows."""
    len_q = int(p.rng.choice([2, 3, 9]))
    c = Cache.drawn(s, p, len_q, least=len_q)
    windows = [masks.window(5, 0), masks.window(70, 0)] if "masks" in s.features else []
    some: list[Any] = [masks.causal(), *windows]
    options = {"mask": some[int(p.rng.integers(len(some)))]}
    together = c.read(s, **options)
    for i in range(len_q):
        row = slice(i, i + 1)
        step = replace(c, q=c.q[:, :, row], lengths=c.lengths - (len_q - 1 - i))
        ours = cut_rows(together, slice(None), slice(None), row)
        step.same(s, ours, step.read(s, **options), **options)


@a_property("cached")
def packed_queries_of_a_cache(s: Subject, p: Problem) -> None:
    """Packed queries, any number for each entry, have the bits of calls on single entries."""
    c, options = Cache.drawn(s, p, 9), _some_options(s, p)
    counts = p.rng.integers(0, 10, len(c.lengths))
    offsets = [0, *np.cumsum(counts).tolist()]
    q = np.concatenate([c.q[b, :, :n] for b, n in enumerate(counts)], axis=1)
    rows = s.attend_cached(q, c.k, c.v, c.lengths, offsets=offsets, **options)
    for b, n in enumerate(counts):
        _, k, v = c.entry(b)
        own = c.q[b : b + 1, :, :n]
        alone = s.attend_cached(own, k, v, int(c.lengths[b]), **options)
        part = cut_rows(rows, None, slice(None), slice(offsets[b], offsets[b + 1]))
        s.same_rows(part, alone, functools.partial(s.bound, own, k, v, **options))


@a_property("cached masks nonfinite")
def windows_drop_pages(s: Subject, p: Problem) -> None:
    """Neither the rows nor the numbers of pages before a window change a bit."""
    c = Cache.drawn(s, p, least=1)
    left = int(p.rng.choice([0, 3, 70]))
    options = {"mask": masks.window(left, 0)}
    expected, page = c.read(s, **options), int(p.rng.choice([1, 3, 16, 64]))
    pages = c.paged(page)
    table = pages.table.copy()
    for b, n in enumerate(c.lengths):
        seen_from = max(int(n) - c.q.shape[2] - left, 0)
        dropped = table[b, : seen_from // page].copy()
        pages.k[dropped] = pages.v[dropped] = float(p.rng.choice([np.nan, np.inf]))
        table[b, : len(dropped)] = p.rng.integers(len(pages.k), size=len(dropped))
    c.same(s, c.read_pages(s, pages._replace(table=table), **options), expected, **options)


@a_property("cached masks")
def trees_are_dense_masks(s: Subject, p: Problem) -> None:
    """Drafts under masks.tree get the attention of each entry under the same dense mask."""
    len_q = int(p.rng.choice([1, 3, 7]))
    c = Cache.drawn(s, p, len_q, least=len_q)
    ancestors = p.rng.random((len(c.lengths), len_q, len_q)) < 0.5
    rows = c.read(s, mask=masks.tree(ancestors))
    for b, n in enumerate(c.lengths):
        dense = np.ones((len_q, int(n)), bool)
        dense[:, int(n) - len_q :] = ancestors[b]
        options = {"mask": dense}
        bound = c.bound(s, b, **options)
        s.near_rows(cut_rows(rows, slice(b, b + 1)), s.attend(*c.entry(b), **options), bound, bound)


@a_property("cached widths gqa")
def values_in_keys_are_copies(s: Subject, p: Problem) -> None:
    """Values that are the first columns of the keys give the bits of separate values."""
    c = Cache.drawn(s, p)
    width, options = int(p.rng.integers(1, c.k.shape[-1] + 1)), _some_options(s, p)
    c = replace(c, v=c.k[..., :width].copy())
    shared = s.attend_cached(c.q, c.k, width, c.lengths, **options)
    c.same(s, shared, c.read(s, **options), **options)
