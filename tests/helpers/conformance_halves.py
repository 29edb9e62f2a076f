"""Cases of conversions to and from 16-bit types, and of arithmetic on pairs of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from conformance import TENSOR_CORES, Array, Case, equal_but_for_nan


def _every_half() -> Array:
    return np.arange(65536, dtype=np.uint16)[:, None]


def _around_halves(kind: Any) -> Array:
    """Every half, what lies halfway between two, the neighbours of both, and any bits."""
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float64)
    finite = np.unique(halves[np.isfinite(halves)])
    ends = [-65536.0, *finite, 65536.0]  # what comes next would be infinite
    edges = np.concatenate([finite, np.add(ends[1:], ends[:-1]) / 2]).astype(kind)
    below, above = (np.nextafter(edges, kind(end)) for end in (-np.inf, np.inf))
    rng = np.random.default_rng(0)
    any_bits = rng.integers(0, 256, (40_000, np.dtype(kind).itemsize), np.uint8).view(kind).ravel()
    tiny = np.finfo(kind).smallest_subnormal
    special = np.array([0, np.inf, np.nan, tiny, 3 * tiny, np.finfo(kind).max], kind)
    with np.errstate(invalid="ignore"):  # some of the bits are NaN that signal
        every_half = halves.astype(kind)
    return np.concatenate([special, -special, every_half, edges, below, above, any_bits])[:, None]


def _to_half(x: Array) -> Array:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return x.astype(np.float16).view(np.uint16)


def _pairs(x: Array) -> Array:
    return np.concatenate([x, np.roll(x, 1)], axis=1)


def around_bfloats() -> Array:
    """Every bfloat16, what lies halfway between two, the neighbours of both, and any bits."""
    upper = np.arange(65536, dtype=np.uint32)[:, None] << 16
    any_bits = np.random.default_rng(0).integers(0, 2**32, (40_000, 1), np.uint32)
    edges = [upper | low for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    return np.concatenate([*edges, any_bits]).view(np.float32)


def _narrowed(kind: Any) -> Callable[[Array], Array]:
    """Return what rounds pairs, the first in the low half."""

    def narrow(x: Array) -> Array:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return np.ascontiguousarray(x.astype(kind)).view(np.uint32)

    return narrow


def _narrow(name: str, kind: Any, given: Callable[[], Array]) -> Case:
    body = f"out[0] = ptx::{name}(in[0], in[1]);"
    agree = equal_but_for_nan(kind)

    def pairs_agree(given: Array, one: Array, other: Array) -> Array:
        halves = agree(given, *(np.ascontiguousarray(x).view(np.uint16) for x in (one, other)))
        return np.asarray(halves.all(axis=1, keepdims=True))

    return Case(name, body, lambda: _pairs(given()), _narrowed(kind), pairs_agree, TENSOR_CORES)


def _to_spoil() -> Array:
    """Pairs of every number; sums that are 0, -0, 1 of either type, infinite or NaN."""
    numbers = np.arange(65536, dtype=np.uint32)
    sums = np.array([0, 0x8000, 0x3C00, 0x3F80, 0x7C00, 0x7F80, 0xFFC1, 0xFFFF], np.uint32)
    below = np.resize(sums, 65536)
    return np.stack([numbers << 16 | numbers[::-1], np.roll(below, 3) << 16 | below], axis=1)


def _spoilt(infinite: int) -> Callable[[Array], Array]:
    def spoilt(given: Array) -> Array:
        x, before = np.ascontiguousarray(given).view(np.uint16).reshape(-1, 2, 2).swapaxes(0, 1)
        nan = ((x & infinite) == infinite) | ((before & 0x7FFF) > infinite)
        cancels = (before == 0x8000) & (x < 0x8000)
        halves = np.where(nan, 0x7FFF, np.where(cancels, 0, before)).astype(np.uint16)
        return np.ascontiguousarray(halves).view(np.uint32)

    return spoilt


def _spoilt_alike(infinite: int) -> Callable[[Array, Array, Array], Array]:
    def alike(given: Array, one: Array, other: Array) -> Array:
        a, b = (np.ascontiguousarray(x).view(np.uint16) for x in (one, other))
        same = (a == b) | (((a & 0x7FFF) > infinite) & ((b & 0x7FFF) > infinite))
        return np.asarray(same.all(axis=1, keepdims=True))

    return alike


def _to_convert(steps: list[int], dtype: Any) -> Array:
    """Pairs of integers, and of numbers from subnormal ones on; factors; what makes up for it."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 0x1000, (20_000, 2)).astype(np.uint16)
    parts = [
        np.stack([bits.view(dtype), np.full(bits.shape, 2.0**step, dtype), np.zeros(bits.shape)], 1)
        for step in steps
    ]
    whole = rng.integers(0, 128, (20_000, 2))
    ones = rng.choice([1.0, -1.0], (20_000, 2))
    parts.append(np.stack([128 + whole, ones, rng.integers(-128, 128, (20_000, 2))], 1))
    triples = np.concatenate(parts).astype(dtype)
    return np.ascontiguousarray(triples).view(np.uint32)[..., 0]


def _fma(given: Array, dtype: Any) -> Array:
    halves = np.ascontiguousarray(given).view(dtype).reshape(-1, 3, 2).astype(np.float64)
    result = halves[:, 0] * halves[:, 1] + halves[:, 2]
    return np.ascontiguousarray(result.astype(dtype)).view(np.uint32)


CASES = [
    Case(
        "half_to_float",
        "out[0] = ptx::half_to_float(in[0]);",
        _every_half,
        lambda x: x.view(np.float16).astype(np.float32),
        equal_but_for_nan(np.float32),
    ),
    Case(
        "float_to_half",
        "out[0] = ptx::float_to_half(in[0]);",
        lambda: _around_halves(np.float32),
        _to_half,
        equal_but_for_nan(np.float16),
    ),
    Case(
        "double_to_half",
        "out[0] = ptx::double_to_half(in[0]);",
        lambda: _around_halves(np.float64),
        _to_half,
        equal_but_for_nan(np.float16),
    ),
    _narrow("floats_to_halves", np.float16, lambda: _around_halves(np.float32)),
    _narrow("floats_to_bfloats", ml_dtypes.bfloat16, around_bfloats),
    *(
        Case(
            f"zero_times_{kind}",
            f"out[0] = ptx::zero_times_{kind}(in[0], in[1]);",
            _to_spoil,
            _spoilt(infinite),
            _spoilt_alike(infinite),
            TENSOR_CORES,
        )
        for kind, infinite in (("halves", 0x7C00), ("bfloats", 0x7F80))
    ),
    *(
        Case(
            f"fma_{kind}",
            f"out[0] = ptx::fma_{kind}(in[0], in[1], in[2]);",
            lambda steps=steps, dtype=dtype: _to_convert(steps, dtype),
            lambda x, dtype=dtype: _fma(x, dtype),
            since=TENSOR_CORES,
        )
        for kind, steps, dtype in (
            ("halves", [0, 8], np.float16),
            ("bfloats", [0, 112, 120], ml_dtypes.bfloat16),
        )
    ),
]
