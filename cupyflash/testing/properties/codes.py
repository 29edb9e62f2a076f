"""Properties of 8- and 4-bit codes: in caches, appended to them, and of whole calls."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cupyflash.problem import codes

from ..cases import Problem
from ..coded import CodedCache, Float8, encoded
from ..judge import expect
from ..placement import same_bits
from ..subject import Subject
from .base import a_property, cut_rows, some_mask

# Queries and keys, and a divisor of columns, for which GPUs multiply codes as they are.
LEAST, COLUMNS = 512, 16


@a_property("cached codes", dtypes=codes.QUERIES)
def codes_of_a_cache_within_bound(s: Subject, p: Problem) -> None:
    """|O' - O| <= B_O and |L' - L| <= B_L over scale * code, for each entry of a cache of codes."""
    c, options = CodedCache.drawn(s, p), some_mask(s, p)
    rows = c.read(s, **options)
    for b in range(len(c.cache.lengths)):
        bound, one = c.bound(s, b, **options), slice(b, b + 1)
        s.judge("out", rows.out[one], *bound.out)
        if rows.lse is not None:
            s.judge("lse", rows.lse[one], *bound.lse)


@a_property("cached codes nonfinite", dtypes=codes.QUERIES)
def unused_codes_change_nothing(s: Subject, p: Problem) -> None:
    """Codes and scales in unused positions, and pages of any order, change no bit."""
    c, options = CodedCache.drawn(s, p), some_mask(s, p)
    expected = c.filled(0, 1.0).read(s, **options)
    scale = float(p.rng.choice([np.nan, np.inf, -np.inf]))
    c = c.filled(int(p.rng.integers(256)), scale)
    for rows in (c.read(s, **options), c.read_pages(s, **options)):
        for b in range(len(c.cache.lengths)):
            ours, right = (cut_rows(x, slice(b, b + 1)) for x in (rows, expected))
            s.same_rows(ours, right, functools.partial(c.bound, s, b, **options))


@a_property("append codes", dtypes=codes.QUERIES)
def appended_codes_are_those_of_quantize(s: Subject, p: Problem) -> None:
    """New rows become the codes and scales that quantize returns, and no other bit changes."""
    n = int(p.rng.choice([1, 2, 9]))
    c = CodedCache.drawn(s, p, 1, least=n)
    held = c.cache
    shapes = [
        (*x.shape[:2], n, x.shape[-1] * (1 if form is None else form.packed))
        for x, form in zip((held.k, held.v), c.forms, strict=True)
    ]
    new = k_new, v_new = [p.rng.standard_normal(shape).astype(p.dtype) for shape in shapes]
    after = s.append(k_new, v_new, held.k, held.v, held.lengths, **c.keywords)
    got: list[Any] = [(after.k, after.k_scale), (after.v, after.v_scale)]
    before = (held.k, c.k_scale), (held.v, c.v_scale)
    for name, rows, form, ours, old in zip("kv", new, c.forms, got, before, strict=True):
        for what, written, a, b in zip(
            ("codes", "scales"), encoded(rows, form), ours, old, strict=True
        ):
            if written is None or b is None:
                continue
            right = b.copy()
            for entry, length in enumerate(held.lengths):
                right[entry, :, length - n : length] = written[entry]
            expect(same_bits(a, right), f"the {what} of {name} are not those of quantize")


@a_property("float8", dtypes=codes.QUERIES)
def float8_within_bound(s: Subject, p: Problem) -> None:
    """|O' - O| <= B_O and |L' - L| <= B_L over scale * code, for q, k and v of float8."""
    shapes = [x.shape for x in (p.q, p.k, p.v)]
    if s.float8 == "codes":
        shapes = [
            (*lead, LEAST + length, -(-columns // COLUMNS) * COLUMNS)
            for *lead, length, columns in shapes
        ]
    arrays = [p.rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    made, options = Float8.of(p.rng, *arrays), some_mask(s, p)
    q, k, v = made.codes
    rows = s.attend(q, k, v, out_dtype=p.dtype, **made.keywords, **options)
    bound = s.bound_of_codes(made.numbers, s.float8_precision(p.dtype), **options)
    s.judge("out", rows.out, *bound.out)
    if rows.lse is not None:
        s.judge("lse", rows.lse, *bound.lse)
