"""Properties of append: new rows are written to a cache, and nothing else is."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..caches import Cache, Pages
from ..cases import Problem
from ..judge import expect
from ..placement import same_bits
from ..subject import Subject
from .base import a_property
from .rotary import drawn_angles

Array = np.ndarray[Any, Any]
ROOM_FOR = 9  # new rows


def _rows(p: Problem, c: Cache, counts: Array) -> tuple[list[Array], list[Array]]:
    """Draw new keys and values of each entry, (Hkv, n, D) and (Hkv, n, Dv)."""
    made = []
    for x in (c.k, c.v):
        shapes = [(x.shape[1], int(n), x.shape[3]) for n in counts]
        made.append([p.rng.standard_normal(shape).astype(p.dtype) for shape in shapes])
    return made[0], made[1]


def _written(x: Array, new: list[Array], c: Cache) -> Array:
    """Return a contiguous cache after its last rows are written."""
    after = x.copy()
    for b, rows in enumerate(new):
        n = int(c.lengths[b])
        after[b, :, n - rows.shape[1] : n] = rows
    return after


def _written_pages(x: Array, new: list[Array], c: Cache, table: Array) -> Array:
    """Return pages after the last rows of each entry are written."""
    after, page = x.copy(), x.shape[2]
    for b, rows in enumerate(new):
        number = rows.shape[1]
        at = int(c.lengths[b]) - number + np.arange(number)
        after[table[b, at // page], :, at % page] = rows.swapaxes(0, 1)
    return after


def _expect_cache(ours: tuple[Array, Array], expected: tuple[Array, Array]) -> None:
    for name, a, b in zip("kv", ours, expected, strict=True):
        expect(same_bits(a, b), f"{name} holds other bits than the rows written to their places")


@a_property("append")
def appended_rows_are_written(s: Subject, p: Problem) -> None:
    """New rows become the last ones of each entry, and no other bit of the cache changes."""
    n = int(p.rng.choice([1, 1, 2, ROOM_FOR]))
    c = Cache.drawn(s, p, 1, least=n)
    new = _rows(p, c, np.full(len(c.lengths), n))
    k_new, v_new = (np.stack(x) for x in new)
    after = s.append(k_new, v_new, c.k, c.v, c.lengths)
    _expect_cache(after[:2], (_written(c.k, new[0], c), _written(c.v, new[1], c)))
    pages = c.paged()
    lengths = c.lengths.astype(p.rng.choice(["i4", "i8"]))
    after = s.append(k_new, v_new, pages.k, pages.v, lengths, table=pages.table)
    _expect_cache(after[:2], _pages_after(c, pages, new))


def _pages_after(
    c: Cache, pages: Pages, new: tuple[list[Array], list[Array]]
) -> tuple[Array, Array]:
    k, v = (
        _written_pages(x, rows, c, pages.table)
        for x, rows in zip((pages.k, pages.v), new, strict=True)
    )
    return k, v


@a_property("append")
def packed_rows_are_written(s: Subject, p: Problem) -> None:
    """Packed rows, any number for each entry, become its last ones, and no other bit changes."""
    c = Cache.drawn(s, p, 1, least=ROOM_FOR)
    counts = p.rng.integers(0, ROOM_FOR + 1, len(c.lengths))
    new = _rows(p, c, counts)
    k_new, v_new = (np.concatenate(x, axis=1) for x in new)
    pages, offsets = c.paged(), [0, *np.cumsum(counts).tolist()]
    after = s.append(k_new, v_new, pages.k, pages.v, c.lengths, table=pages.table, offsets=offsets)
    _expect_cache(after[:2], _pages_after(c, pages, new))


@a_property("append")
def appended_in_chunks(s: Subject, p: Problem) -> None:
    """Appending rows in several calls leaves the same cache as appending them in one."""
    n = int(p.rng.integers(2, ROOM_FOR + 1))
    c = Cache.drawn(s, p, 1, least=n)
    k_new, v_new = (np.stack(x) for x in _rows(p, c, np.full(len(c.lengths), n)))
    once, pages = s.append(k_new, v_new, c.k, c.v, c.lengths), (c.k, c.v)
    cut = int(p.rng.integers(1, n))
    for rows in (slice(0, cut), slice(cut, n)):
        lengths = c.lengths - (n - rows.stop)
        pages = s.append(k_new[:, :, rows], v_new[:, :, rows], *pages, lengths)[:2]
    _expect_cache(pages, once[:2])


@a_property("append rope widths")
def appended_rows_are_rotated(s: Subject, p: Problem) -> None:
    """With rotary, keys and queries have the bits that rope gives, and values are unchanged."""
    n = int(p.rng.choice([1, 3, ROOM_FOR]))
    c = Cache.drawn(s, p, n, least=n)
    if c.k.shape[-1] < 2:  # nothing to rotate
        return
    new = _rows(p, c, np.full(len(c.lengths), n))
    k_new, v_new = (np.stack(x) for x in new)
    angles = drawn_angles(p, c.k.shape[-1], int(c.lengths.max()))
    at, options = c.lengths[:, None] - n + np.arange(n), {}
    if p.rng.random() < 0.5:  # depths in a tree of drafts
        at = p.rng.integers(0, len(angles.cos), at.shape)
        options["positions"] = at
    pages = c.paged()
    after = s.append(
        k_new, v_new, pages.k, pages.v, c.lengths,
        table=pages.table, q=c.q, rotary=angles, **options,
    )  # fmt: skip
    rotated = list(s.rope(k_new, at, angles))
    _expect_cache(after[:2], _pages_after(c, pages, (rotated, new[1])))
    assert after.q is not None, "it was asked for"
    expect(same_bits(after.q, s.rope(c.q, at, angles)), "q is not what rope gives")
