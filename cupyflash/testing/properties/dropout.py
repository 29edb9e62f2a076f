"""Properties of dropout: which pairs are dropped, and what that does to the results.

If Q = 0, all weights of a row are equal, and if V is the unit matrix, each output shows one pair.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupyflash.reference.cpu import philox

from ..cases import Problem
from ..judge import expect
from ..placement import same_bits
from ..subject import Subject
from .base import Array, a_property, some_mask, wide


def _inputs(s: Subject, p: Problem) -> tuple[Array, Array, Array, dict[str, Any], Array]:
    """Q = 0, any K, V = 1; the options, and which pairs Philox keeps."""
    heads, keys = p.q.shape[1], min(p.k.shape[2], 64)
    rows = min(p.q.shape[2], 64) if "lengths" in s.features else keys
    width = 8 if "widths" in s.features else keys
    shared = p.k.shape[1]
    q = np.zeros((2, heads, rows, width), p.dtype)
    k = p.rng.standard_normal((2, shared, keys, width)).astype(p.dtype)
    v = np.broadcast_to(np.eye(keys, dtype=p.dtype), (2, shared, keys, keys)).copy()
    rate = float(p.rng.choice([0.05, 0.3, 0.5, 0.9]))
    options: dict[str, Any] = {"dropout": rate, "seed": int(p.rng.integers(2**64, dtype=np.uint64))}
    b, h, i, j = np.ogrid[:2, :heads, :rows, :keys]
    return q, k, v, options, philox.keep(options["seed"], rate, b * heads + h, i, j)


@a_property("dropout", weight=0.5)
def dropped_pairs(s: Subject, p: Problem) -> None:
    """O_ij = z_ij / N for Q = 0, V = 1: z by Philox4x32-7 of (seed, b Hq + h, i, j) alone.

    And dV_ji = z_ij / N for dO = 1: the backward drops the same pairs.
    """
    q, k, v, options, kept = _inputs(s, p)
    out = s.attend(q, k, v, **options).out
    expect((out != 0) == kept, "the forward drops other pairs than Philox says")
    s.judge("out", out, *s.bound(q, k, v, **options).out)
    if "backward" in s.knows and p.q.shape[1] == p.k.shape[1]:
        rows = q.shape[2]
        if v.shape[3] != rows:  # dO is the unit matrix, so V has as many columns as there are rows
            if "widths" not in s.features:
                return
            v = np.zeros((*v.shape[:3], rows), p.dtype)
        do = np.broadcast_to(np.eye(rows, dtype=p.dtype), (*q.shape[:3], rows)).copy()
        dv = s.gradients(do, q, k, v, **options).dv
        expect((dv.swapaxes(-1, -2) != 0) == kept, "the backward drops other pairs than Philox")


@a_property("any_dropout", weight=0.5)
def dropped_pairs_are_scaled(s: Subject, p: Problem) -> None:
    """O_ij is 0 or 1 / (N (1 - rate)) for Q = 0, V = 1; a seed repeats it, and dV_ji is the same.

    dV is that of dO = 1: the backward drops the pairs of the forward.
    """
    q, k, v, options, _ = _inputs(s, p)
    out = s.attend(q, k, v, **options).out
    exact, bound = s.bound(q, k, v).out
    survives = 1 / (1 - options["dropout"])
    off = np.abs(wide(out) - survives * exact)
    right = (out == 0) | (off <= survives * (2 * bound + 2.0**-7 * exact))
    expect(right, "a weight is neither dropped nor divided by 1 - dropout")
    again = s.attend(q, k, v, **options).out
    expect(same_bits(out, again), "a seed gives other pairs the second time")
    rows, keys = q.shape[2], k.shape[2]
    if "backward" in s.knows and q.shape[1] == k.shape[1] and rows == keys:
        do = np.broadcast_to(np.eye(rows, dtype=p.dtype), (*q.shape[:3], rows)).copy()
        dv = s.gradients(do, q, k, v, **options).dv
        expect((dv.swapaxes(-1, -2) != 0) == (out != 0), "the backward drops other pairs")


@a_property("any_dropout", weight=0.5)
def dropout_rate(s: Subject, p: Problem) -> None:
    """The number of dropped pairs is binomial: |n - N p| <= 6 sqrt(N p (1 - p))."""
    q, k, v, options, kept = _inputs(s, p)
    dropped = (s.attend(q, k, v, **options).out == 0).sum()
    rate, number = options["dropout"], kept.size
    sigma = math.sqrt(number * rate * (1 - rate))
    expect(
        abs(dropped - number * rate) <= 6 * sigma + 1,
        f"{dropped} of {number} pairs are dropped at a rate of {rate}",
    )


@a_property("dropout masks", weight=0.5)
def dropout_sees_positions_alone(s: Subject, p: Problem) -> None:
    """Neither the mask nor the scores move the draw: O_ij != 0 exactly where kept and allowed."""
    q, k, v, options, kept = _inputs(s, p)
    q = (np.asarray(p.rng.standard_normal(q.shape)) / 4).astype(
        p.dtype
    )  # every weight well above 0
    allowed = p.rng.random(np.shape(kept)[2:]) < 0.7
    out = s.attend(q, (k / 4).astype(p.dtype), v, mask=allowed, **options).out
    expect((out != 0) == (kept & allowed), "the mask or the scores moved the dropped pairs")


@a_property("any_dropout lse")
def lse_is_before_dropout(s: Subject, p: Problem) -> None:
    """L with dropout = L without, bitwise."""
    options = some_mask(s, p)
    ours = s.attend(p.q, p.k, p.v, dropout=0.4, seed=int(p.rng.integers(1000)), **options)
    whole = s.attend(p.q, p.k, p.v, **options)
    s.same("lse", ours.lse, whole.lse, lambda: s.bound(p.q, p.k, p.v, **options).lse.bound)


@a_property("any_dropout", dtypes=("float32", "float64"), weight=0.1)
def mean_over_seeds(s: Subject, p: Problem) -> None:
    """The mean of O over n seeds is O without dropout, within 6 sigma / sqrt(n).

    sigma**2 = sum_j (P_ij V_jc)**2 r / (1 - r) for a rate of r.
    """
    q, k, v = (x[:1, :1, :12] for x in (p.q, p.k, p.v))
    number, rate = 150, 0.3
    whole = wide(s.attend(q, k, v).out)
    first = int(p.rng.integers(2**40))
    drawn = [s.attend(q, k, v, dropout=rate, seed=first + n).out for n in range(number)]
    scores = wide(q) @ wide(k).swapaxes(-1, -2) / np.sqrt(wide(q.shape[-1]))
    probs = np.exp(scores)
    probs /= probs.sum(axis=-1, keepdims=True)
    sigma = np.sqrt((probs**2 @ wide(v) ** 2) * rate / (1 - rate) / number)
    off = np.abs(np.mean([wide(x) for x in drawn], axis=0) - whole)
    limit = 6 * sigma + 2 * s.bound(q, k, v).out.bound
    # With few keys the distribution is far from normal: a single key is dropped or not.
    if k.shape[2] >= 4:
        expect(off <= limit, "the mean over seeds is not the row without dropout")
    expect(
        not same_bits(drawn[0], drawn[1]) or k.shape[2] * q.shape[2] < 64,
        "two seeds drop the same pairs",
    )


@a_property("dropout", weight=0.5)
def dropout_of_nearly_nothing(s: Subject, p: Problem) -> None:
    """A rate below the last bit drops nothing, bitwise; one of 1 - 2**-15 drops nearly all."""
    ours = s.attend(p.q, p.k, p.v)
    tiny = s.attend(p.q, p.k, p.v, dropout=2.0**-40, seed=0)
    s.same_rows(ours, tiny, lambda: s.bound(p.q, p.k, p.v))
    rate, heads, rows, keys = 1 - 2.0**-15, p.q.shape[1], p.q.shape[2], p.k.shape[2]
    b, h, i, j = np.ogrid[:2, :heads, :rows, :keys]
    kept = philox.keep(0, rate, b * heads + h, i, j).any(axis=-1)
    almost_all = s.attend(p.q, p.k, p.v, dropout=rate, seed=0).out
    expect((almost_all == 0).all(axis=-1) | kept, "pairs are kept at a rate of nearly 1")
