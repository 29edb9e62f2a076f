"""Masks, score changes and dropout of the independent model, from their descriptions.

A description is a tuple of a word and its parameters. The package's words have their documented
meaning; the others say theirs beside them. Salmon et al. 2011 is Philox.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass
class Sequence:
    """Positions of a block of pairs, which broadcast to (B, Hq, Lq, Lk)."""

    lead: tuple[int, ...]  # leading axes of the call
    b: Array
    h: Array
    i: Array
    j: Array
    len_q: int
    len_k: int
    heads: int
    start_q: int = 0
    start_k: int = 0
    packed: bool = False
    longest: tuple[int, int] | None = None  # of all sequences

    def whole(self, array: Any, *axes: int) -> Array:
        """Broadcast an array to (B, *axes) over the flat batch index."""
        count = int(np.prod(self.lead, dtype=np.int64))
        return np.broadcast_to(array, (*self.lead, *axes)).reshape(count, *axes)

    def per_batch(self, value: Any) -> Any:
        return value if np.ndim(value) == 0 else self.whole(value)[self.b]

    def pairs(self, array: Any) -> Array:
        lengths = self.longest or (self.len_q, self.len_k)
        return self.whole(array, self.heads, *lengths)[self.b, self.h, self.i, self.j]


def allowed(mask: tuple[Any, ...], at: Sequence) -> Any:
    """Return where a described mask lets query i see key j."""
    word, *p = mask
    i, j = at.i, at.j
    if word in ("and", "or", "xor"):
        a, b = allowed(p[0], at), allowed(p[1], at)
        return a & b if word == "and" else a | b if word == "or" else a ^ b
    if word == "not":
        return ~allowed(p[0], at)
    last = at.len_k - at.len_q
    if word == "causal":
        return j <= i + (last if p[0] is None else at.per_batch(p[0]))
    if word == "window":
        here = i + (last if p[2] is None else at.per_batch(p[2]))
        left = True if p[0] is None else j >= here - p[0]
        return np.logical_and(left, True if p[1] is None else j <= here + p[1])
    if word == "lengths":
        return (j < at.per_batch(p[0])) & (True if p[1] is None else i < at.per_batch(p[1]))
    if word == "prefix":
        return j < at.per_batch(p[0])
    if word == "dilated":
        return (i + last - j) % p[0] == 0
    if word == "segments":
        if at.packed:
            return p[0][at.start_q + i] == p[1][at.start_k + j]
        return at.whole(p[0], at.len_q)[at.b, i] == at.whole(p[1], at.len_k)[at.b, j]
    if word == "blocks":
        lengths = at.longest or (at.len_q, at.len_k)
        counts = (-(-lengths[0] // p[1]), -(-lengths[1] // p[2]))
        return at.whole(p[0], at.heads, *counts)[at.b, at.h, i // p[1], j // p[2]]
    if word == "dense":
        return at.pairs(p[0])
    if word == "strided":  # (a i + c j + h + b) % m < r
        return (p[0] * i + p[1] * j + at.h + at.b) % p[2] < p[3]
    if word == "table":  # table[h, i] > j // 2
        return p[0][at.h, i] > j // 2
    if word == "slanted":  # p i < j, in halves, hence exact
        return p[0] * i < j
    if word == "shifted":  # (i >> p) + h == j >> p
        size = 2 ** min(p[0], 62)
        return i // size + at.h == j // size
    if word == "doubled":  # j << min(p, 40) <= i << 1
        return j * 2.0 ** min(p[0], 40) <= 2.0 * i
    if word == "root":  # sqrt(i + 1) p / 2 > j; the product is exact
        return np.sqrt(np.float32(i + 1)) * np.float32(0.5) * np.float32(p[0]) > j
    raise ValueError(f"mask {word}")


class Changed(NamedTuple):
    """Scores and slopes, and bounds of the errors of what is computed instead."""

    value: Array
    slope: Any
    error: Array
    slope_error: Any


def changed(score: tuple[Any, ...], s: Array, e: Array, at: Sequence, u: float) -> Changed:
    """Apply a described score change to scores whose error is at most e."""
    word, *p = score
    size = np.abs(s).astype(np.float64) + e
    work = s.dtype.type
    if word == "softcap":
        x = s / work(p[0])
        slope = 1 - np.tanh(x) ** 2
        return Changed(work(p[0]) * np.tanh(x), slope, e + 12 * u * size, e / p[0] + 16 * u)
    if word == "alibi":
        slopes = at.whole(p[0], at.heads)[at.b, at.h].astype(s.dtype)
        penalty = slopes * np.abs(at.i + at.len_k - at.len_q - at.j)
        return Changed(s - penalty, 1, e + 3 * u * (size + np.abs(penalty)), 0)
    if word == "relative":
        reach = p[0].shape[-1] // 2
        place = reach + np.clip(at.j - at.i - (at.len_k - at.len_q), -reach, reach)
        added = np.broadcast_to(p[0], (at.heads, 2 * reach + 1))[at.h, place].astype(s.dtype)
        return Changed(s + added, 1, e + 2 * u * (size + np.abs(added)), 0)
    if word == "linear":  # a s + c (i - j)
        moved = p[1] * (at.i - at.j)
        value = work(p[0]) * s + work(1) * moved
        error = abs(p[0]) * e + 4 * u * (abs(p[0]) * size + np.abs(moved))
        return Changed(value, work(p[0]), error, u * abs(p[0]))
    if word == "some":  # where((i + 2 j + h) % m == 0, s, a s)
        slope = np.where((at.i + 2 * at.j + at.h) % p[0] == 0, work(1), work(p[1]))
        return Changed(slope * s, slope, np.abs(slope) * (e + 3 * u * size), u * np.abs(slope))
    if word == "hidden":  # where((i + j + b) % m == 0, -inf, s)
        here = (at.i + at.j + at.b) % p[0] == 0
        return Changed(np.where(here, -np.inf, s), np.where(here, 0, 1), np.where(here, 0, e), 0)
    if word == "square":  # a s s
        a = work(p[0])
        error = abs(p[0]) * (2 * size * e + 4 * u * size**2)
        return Changed(a * s * s, 2 * a * s, error, abs(p[0]) * (2 * e + 8 * u * size))
    if word == "table":  # s t[h, i]
        t = p[0][at.h, at.i].astype(s.dtype)
        return Changed(s * t, t, np.abs(t) * (e + 3 * u * size), u * np.abs(t))
    if word == "absolute":
        flips = np.where(np.abs(s) <= e, 2, 0)
        return Changed(np.abs(s), np.where(s == 0, 0, np.sign(s)), e, flips)
    if word == "least":  # minimum(s, c)
        flips = np.where(np.abs(s - p[0]) <= e + 2 * u * abs(p[0]), 1, 0)
        return Changed(
            np.minimum(s, work(p[0])), np.where(s < p[0], 1, 0), e + u * abs(p[0]), flips
        )
    if word == "exponential":  # exp(clip(s, -c, c)) / 2
        value = np.exp(np.clip(s, -p[0], p[0])) / 2
        inside = np.abs(s) < p[0]
        error = np.where(
            np.isnan(value), np.inf, value * np.expm1(np.minimum(e, 50)) + 16 * u * value
        )
        flips = np.where(np.abs(np.abs(s) - p[0]) <= e + 2 * u * p[0], value, 0)
        return Changed(value, np.where(np.isnan(s), s, inside * value), error, error + flips)
    if word in ("gate", "erf"):  # s + p / (1 + exp(-s)); s + p erf(s)
        with np.errstate(all="ignore"):
            half = np.exp(-np.abs(s)) / (1 + np.exp(-np.abs(s)))
            gate = np.where(s < 0, half, 1 - half), half * (1 - half), 0.25
            bell = _erf(s), 2 / np.sqrt(np.pi) * np.exp(-s * s), 1.13
        f, slope, steepest = gate if word == "gate" else bell
        error = e + p[0] * steepest * e + 12 * u * (size + 1)
        return Changed(s + work(p[0]) * f, 1 + work(p[0]) * slope, error, p[0] * e + 20 * u)
    if word == "power":  # s below 0, else (1 + s)**(1 + p) - 1
        above = (1 + np.maximum(s, 0)) ** work(p[0])
        with np.errstate(invalid="ignore"):
            value = np.where(s < 0, s, (1 + s) * above - 1)
        slope = np.where(s < 0, 1, work(1 + p[0]) * above)
        grown = (1 + size) ** (1 + p[0])
        flips = np.where(np.abs(s) <= e, p[0], 0)
        error = (1 + p[0]) * (1 + size) ** p[0] * e + 40 * u * grown
        return Changed(value, slope, error, flips + e + 40 * u * (1 + size) ** p[0])
    if word in ("wave", "distance", "decay"):
        apart = np.abs(at.i - at.j).astype(s.dtype)
        if word == "distance":  # s - p sqrt(|i - j|)
            away = work(p[0]) * np.sqrt(apart)
            return Changed(s - away, 1, e + 4 * u * (size + np.abs(away)), 0)
        # s (1 + p cos((i - j) / 4)); s 2**(-p |i - j| / 8)
        wave = 1 + work(p[0]) * np.cos(apart / 4)
        factor = wave if word == "wave" else 2 ** (-work(p[0]) * apart / 8)
        return Changed(s * factor, factor, factor * e + 24 * u * size, 20 * u)
    raise ValueError(f"score {word}")


def _erf(x: Array) -> Array:
    """Return the error function by the continued fraction of its complement, or its series.

    Abramowitz & Stegun 7.1.6 and 7.1.14.
    """
    size = np.minimum(np.abs(x), 9).astype(x.dtype)
    near = np.minimum(size, 2)
    total, term = near.copy(), near.copy()
    for n in range(1, 90):
        term = term * (2 * near * near / (2 * n + 1))
        total = total + term
    series = 2 / np.sqrt(x.dtype.type(np.pi)) * np.exp(-near * near) * total
    far = np.maximum(size, 2)
    fraction = far
    for n in range(200, 0, -1):
        fraction = far + x.dtype.type(n) / 2 / fraction
    beyond = 1 - np.exp(-far * far) / (np.sqrt(x.dtype.type(np.pi)) * fraction)
    return np.where(np.isnan(x), x, np.sign(x) * np.where(size < 2, series, beyond))


def kept(seed: int, p: float, at: Sequence) -> Array:
    """Return which pairs dropout keeps: Philox4x32-7 of (seed, b Hq + h, i, j), 15 bits each."""
    low = np.uint64(0xFFFFFFFF)
    head = (at.b * at.heads + at.h).astype(np.uint64)
    shape = np.broadcast_shapes(at.b.shape, at.h.shape, at.i.shape, at.j.shape)
    i, j = at.i.astype(np.int64), at.j.astype(np.int64)
    keys, queries = j // 16 * 4 + j % 8 // 2, i // 16 * 8 + i % 8
    words = [keys.astype(np.uint64), queries.astype(np.uint64), head & low, head >> np.uint64(32)]
    c = [np.broadcast_to(x, shape) for x in words]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(7):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        high = np.uint64(32)
        c = [
            (b >> high) ^ c[1] ^ np.uint64(k0),
            b & low,
            (a >> high) ^ c[3] ^ np.uint64(k1),
            a & low,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    word = np.choose(np.broadcast_to(i % 16 // 8 * 2 + j % 16 // 8, shape), c)
    number = np.where(j % 2 == 1, word >> np.uint64(16), word) % np.uint64(2**15)
    return number >= np.uint64(round(p * 2**15))
