"""Caches of codes of 8 and 4 bits for tests, in pages, and with NaN where nothing is held."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import codes
import numpy as np
from caches import in_pages

from cupyflash import quantize

FORMATS = tuple(codes.LARGEST)
SIDES = (*FORMATS, None)  # None: numbers of the queries' type
MIXED = tuple((k, v) for k in SIDES for v in SIDES if k != v)  # formats of keys and of values
NAN_CODE = {"int8": 0x80, "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7E, "int4": 0x88}
NAMES = "k", "v", "k_scale", "v_scale"


def forms_of(form):
    """Return the formats of keys and of values, of one for both or of a pair."""
    return form if isinstance(form, tuple) else (form, form)


def words(form):
    """Return the formats in words, for names of tests."""
    return form if isinstance(form, str) else "-".join(each or "numbers" for each in form)


def meaning(bytes_, scale, form):
    """Return scale * code in float64, exactly."""
    if form is None:
        return bytes_.astype(np.float64)
    numbers = codes.meaning(np.ascontiguousarray(bytes_), form)
    scale = np.broadcast_to(scale, (*numbers.shape[:-1], np.shape(scale)[-1])).astype(np.float64)
    return numbers * np.repeat(scale, numbers.shape[-1] // scale.shape[-1], axis=-1)


@dataclass(frozen=True)
class Coded:
    """A cache of codes; `form` is a format, or one of keys and one of values."""

    form: Any
    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    table: Any = None

    @classmethod
    def of(cls, form, k, v, whole_rows=False, dtype=np.float32):
        """Quantise keys and values; `k` and `v` are bytes. Rows of int4 have groups if they can.

        What has no format becomes numbers of `dtype`.
        """
        made = []
        for x, each in zip((k, v), forms_of(form), strict=True):
            columns = x.shape[-1]
            in_groups = each == "int4" and columns % 32 == 0 and not whole_rows
            if each is None:
                made.append((x.astype(dtype), None))
            else:
                held, scale = quantize(x, each, group=32 if in_groups else columns)
                made.append((held.view(np.uint8), scale))
        return cls(form, *(x for x, _ in made), *(s for _, s in made))

    @property
    def names(self):
        """The names of its arrays."""
        return [name for name in NAMES if getattr(self, name) is not None]

    @property
    def options(self):
        """The keywords of a call."""
        named = {name: getattr(self, name) for name in self.names if name.endswith("scale")}
        named["kv_dtype"] = self.form
        return named if self.table is None else named | {"table": self.table}

    @property
    def numbers(self):
        """Keys and values in float64."""
        pairs = (self.k, self.k_scale), (self.v, self.v_scale)
        forms = forms_of(self.form)
        return [meaning(*pair, form) for pair, form in zip(pairs, forms, strict=True)]

    def _nothing(self, name):
        """Return what arrays have where nothing is held."""
        form = forms_of(self.form)[name.startswith("v")]
        return np.nan if name.endswith("scale") or form is None else NAN_CODE[form]

    def poisoned(self, lengths):
        """Return a copy whose unused positions are codes and scales that are NaN."""
        made = {name: getattr(self, name).copy() for name in self.names}
        for name, x in made.items():
            for b, length in enumerate(lengths):
                x[b, :, length:] = self._nothing(name)
        return replace(self, **made)

    def paged(self, page, seed=0):
        """Return the same cache in pages that lie anywhere; other pages and rows are NaN."""
        made = {}
        for name in self.names:
            x, fill = getattr(self, name), self._nothing(name)
            made[name], table = in_pages(x, page, np.random.default_rng(seed), fill=fill)
        return replace(self, **made, table=table)
