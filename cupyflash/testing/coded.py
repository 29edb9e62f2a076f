"""8- and 4-bit codes that properties draw, and what they mean exactly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyflash import quantization
from cupyflash.problem import coded, formats
from cupyflash.problem.formats import FORMATS, INT4_GROUP, Format

from .bound import ForwardBound
from .caches import Cache
from .cases import Problem
from .subject import Rows, Subject

Array = np.ndarray[Any, Any]


def encoded(x: Array, form: Format | None) -> tuple[Array, Array | None]:
    """Return bytes of codes, and scales: of each row, or of each 32 columns of int4.

    Without a format, return the numbers, which have no scales.
    """
    if form is None:
        return x, None
    columns = x.shape[-1]
    group = INT4_GROUP if form.packed > 1 and columns % INT4_GROUP == 0 else columns
    with np.errstate(invalid="ignore"):  # of NaN in unused positions
        codes, scale = quantization.quantize(x, form.name, group=group)
    return codes.view(np.uint8), scale


def meaning(codes: Array, scale: Array | None, form: Format | None) -> Array:
    """Return scale * code in float64, which is exact; or numbers, if they are none."""
    if form is None or scale is None:
        return codes.astype(np.float64)
    numbers = formats.numbers(np.ascontiguousarray(codes), form).astype(np.float64)
    each = numbers.shape[-1] // max(scale.shape[-1], 1)
    meant: Array = numbers * np.repeat(scale.astype(np.float64), each, axis=-1)
    return meant


def _packed(form: Format | None) -> int:
    """Return how many columns an element has."""
    return 1 if form is None else form.packed


def _repeated(x: Array, columns: int) -> Array:
    """Return rows whose columns are repeated until there are so many."""
    return np.ascontiguousarray(np.concatenate([x] * -(-columns // x.shape[-1]), -1)[..., :columns])


@dataclass(frozen=True)
class CodedCache:
    """A cache of codes, made of a cache of numbers.

    Attributes
    ----------
    cache : Cache
        The queries and lengths; its keys and values are bytes of codes, or one of them is numbers.
    k_form, v_form : Format or None
        What the bytes are; None of numbers.
    k_scale, v_scale : ndarray of float32, shape (B, Hkv, S, 1) or (B, Hkv, S, D / 32), or None
        The scales of codes.
    """

    cache: Cache
    k_form: Format | None
    v_form: Format | None
    k_scale: Array | None
    v_scale: Array | None

    @classmethod
    def drawn(cls, s: Subject, p: Problem, len_q: int | None = None, least: int = 0) -> CodedCache:
        """Draw a cache, and the types of its codes."""
        c = Cache.drawn(s, p, len_q, least)
        forms = list(FORMATS.values())
        k_form: Format | None = forms[int(p.rng.integers(len(forms)))]
        v_form = k_form
        if "mixed" in s.features and p.rng.random() < 0.5:
            others = [form for form in (*forms, None) if form != k_form]
            v_form = others[int(p.rng.integers(len(others)))]
            if p.rng.random() < 0.5:
                k_form, v_form = v_form, k_form
        q, k, v = c.q, c.k, c.v
        in_groups = p.rng.random() < 0.5
        # Two codes in a byte: an even number of columns, or two groups of 32.
        if _packed(k_form) > 1:
            q, k = (_repeated(x, 64 if in_groups else 2 * x.shape[-1]) for x in (q, k))
        if _packed(v_form) > 1:
            v = _repeated(v, 64 if in_groups else 2 * v.shape[-1])
        (k, k_scale), (v, v_scale) = encoded(k, k_form), encoded(v, v_form)
        return cls(replace(c, q=q, k=k, v=v), k_form, v_form, k_scale, v_scale)

    @property
    def scales(self) -> dict[str, Array]:
        """The scales that there are, by name."""
        named = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        return {name: scale for name, scale in named.items() if scale is not None}

    @property
    def forms(self) -> tuple[Format | None, Format | None]:
        """The formats of keys and of values."""
        return self.k_form, self.v_form

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments that a call has because of codes."""
        names = tuple(form and form.name for form in self.forms)
        return self.scales | {"kv_dtype": names[0] if names[0] == names[1] else names}

    def filled(self, code: int, scale: float) -> CodedCache:
        """Return a copy with other codes and scales in unused positions; numbers become `scale`."""
        c = self.cache
        unused = np.arange(c.k.shape[2])[:, None] >= c.lengths[:, None, None, None]
        k, v = (
            np.where(unused, np.asarray(scale if form is None else code, x.dtype), x)
            for x, form in zip((c.k, c.v), self.forms, strict=True)
        )
        k_scale, v_scale = (
            None if x is None else np.where(unused, np.float32(scale), x)
            for x in (self.k_scale, self.v_scale)
        )
        cache = replace(c, k=k, v=v, fill=scale)
        return replace(self, cache=cache, k_scale=k_scale, v_scale=v_scale)

    def read(self, s: Subject, **options: Any) -> Rows:
        """Attend to the contiguous cache."""
        return self.cache.read(s, **self.keywords, **options)

    def read_pages(self, s: Subject, **options: Any) -> Rows:
        """Attend to the cache in pages of any size and order."""
        pages = self.cache.paged(None, *self.scales.values())
        scales = dict(zip(self.scales, pages.beside, strict=True))
        return self.cache.read_pages(s, pages, **self.keywords | scales, **options)

    def bound(self, s: Subject, b: int, **options: Any) -> ForwardBound:
        """Return the exact results of an entry, and their error bounds."""
        q, k, v = self.cache.entry(b)
        n, one = k.shape[2], slice(b, b + 1)
        k, v = (
            meaning(x, None if scale is None else scale[one, :, :n], form)
            for x, scale, form in (
                (k, self.k_scale, self.k_form),
                (v, self.v_scale, self.v_form),
            )
        )
        return s.bound_of_codes((q, k, v), s.precision(q.dtype).with_codes(), **options)


@dataclass(frozen=True)
class Float8:
    """Queries, keys and values of float8.

    Attributes
    ----------
    form : Format
        Which float8.
    codes, scales : tuple of ndarray
        Bytes and scales of q, k and v.
    """

    form: Format
    codes: tuple[Array, ...]
    scales: tuple[Array, ...]

    @classmethod
    def of(cls, rng: np.random.Generator, *arrays: Array) -> Float8:
        """Quantise q, k and v, with a scale for each row, each head or each array."""
        form = FORMATS[coded.FORMS[int(rng.integers(len(coded.FORMS)))]]
        codes, scales = [], []
        for x in arrays:
            made, scale = encoded(x, form)
            assert scale is not None
            axes = [(), (-2,), (-3, -2)][int(rng.integers(3))]
            if axes and x.size:
                scale = scale.max(axis=axes, keepdims=True)  # other numbers, of the same codes
            codes.append(made)
            scales.append(scale)
        return cls(form, tuple(codes), tuple(scales))

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments that a call has because of codes."""
        scales = dict(zip(("q_scale", "k_scale", "v_scale"), self.scales, strict=True))
        return scales | {"qkv_dtype": self.form.name}

    @property
    def numbers(self) -> tuple[Array, ...]:
        """Return q, k and v in float64."""
        pairs = zip(self.codes, self.scales, strict=True)
        return tuple(
            meaning(x, np.broadcast_to(s, (*x.shape[:-1], 1)), self.form) for x, s in pairs
        )
