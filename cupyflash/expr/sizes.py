"""A problem's sizes and positions as the values of symbols."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .bind import Sizes


@dataclass(frozen=True)
class _Flat:
    lead: tuple[int, ...]
    heads: int
    len_q: Any
    len_k: Any
    start_q: Any
    start_k: Any
    packed: bool


def flat_sizes(sizes: Any) -> Sizes:
    """Return sizes whose lengths are numbers or one-dimensional arrays over b."""
    varying = {name: getattr(sizes, name, 0) for name in ("len_q", "len_k", "start_q", "start_k")}
    flat = {
        name: int(value) if np.ndim(value) == 0 else np.asarray(value).reshape(-1)
        for name, value in varying.items()
    }
    default = any(np.ndim(value) for value in varying.values())
    packed = bool(getattr(sizes, "packed", default))
    return _Flat(tuple(sizes.lead), sizes.heads, packed=packed, **flat)


def position_symbols(b: Any, h: Any, i: Any, j: Any, sizes: Any) -> dict[str, Any]:
    """Return the values of every symbol but the score."""
    names = ("len_q", "len_k", "start_q", "start_k")
    symbols = {name: np.asarray(getattr(sizes, name, 0), np.int64) for name in names}
    positions = zip("bhij", (b, h, i, j), strict=True)
    return symbols | {name: np.asarray(value, np.int64) for name, value in positions}
