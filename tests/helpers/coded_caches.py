"""Caches of codes of 8 and 4 bits for tests, in pages, and with NaN where nothing is held."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import codes
import numpy as np
from caches import in_pages

from cupyflash import quantize

FORMATS = tuple(codes.LARGEST)
NAN_CODE = {"int8": 0x80, "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7E, "int4": 0x88}


def meaning(bytes_, scale, form):
    """Return scale * code in float64, exactly."""
    numbers = codes.meaning(np.ascontiguousarray(bytes_), form)
    scale = np.broadcast_to(scale, (*numbers.shape[:-1], np.shape(scale)[-1])).astype(np.float64)
    return numbers * np.repeat(scale, numbers.shape[-1] // scale.shape[-1], axis=-1)


@dataclass(frozen=True)
class Coded:
    """A cache of codes."""

    form: str
    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    table: Any = None

    @classmethod
    def of(cls, form, k, v, whole_rows=False):
        """Quantise keys and values; `k` and `v` are bytes. Rows of int4 have groups if they can."""
        made = []
        for x in (k, v):
            columns = x.shape[-1]
            in_groups = form == "int4" and columns % 32 == 0 and not whole_rows
            made.append(quantize(x, form, group=32 if in_groups else columns))
        return cls(form, *(x.view(np.uint8) for x, _ in made), *(s for _, s in made))

    @property
    def options(self):
        """The keywords of a call."""
        named = {"k_scale": self.k_scale, "v_scale": self.v_scale, "kv_dtype": self.form}
        return named if self.table is None else named | {"table": self.table}

    @property
    def numbers(self):
        """Keys and values in float64."""
        pairs = (self.k, self.k_scale), (self.v, self.v_scale)
        return [meaning(*pair, self.form) for pair in pairs]

    def poisoned(self, lengths):
        """Return a copy whose unused positions are codes and scales that are NaN."""
        made = {name: getattr(self, name).copy() for name in ("k", "v", "k_scale", "v_scale")}
        for name, x in made.items():
            fill = np.nan if name.endswith("scale") else NAN_CODE[self.form]
            for b, length in enumerate(lengths):
                x[b, :, length:] = fill
        return replace(self, **made)

    def paged(self, page, seed=0):
        """Return the same cache in pages that lie anywhere; other pages and rows are NaN."""
        made = {}
        for name in ("k", "v", "k_scale", "v_scale"):
            x = getattr(self, name)
            fill = np.nan if name.endswith("scale") else NAN_CODE[self.form]
            made[name], table = in_pages(x, page, np.random.default_rng(seed), fill=fill)
        return replace(self, **made, table=table)
