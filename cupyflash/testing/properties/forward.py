"""Properties of the output: its bound, exact cases, its weights, and its linearity in v.

Unless a property says otherwise, it holds with every mask, score change, bias, scale and sink. It
draws plain arrays, so that a failure is about the property itself.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ..bound import forward_bound
from ..cases import Problem
from ..judge import PropertyError, expect
from ..precision import Rounding
from ..subject import Subject
from .base import (
    ROUNDED,
    WIDE,
    a_property,
    allowed_by,
    default_scale,
    per_head,
    some_mask,
    wide,
)


@a_property(draws="any", weight=8)
def forward_within_bound(s: Subject, p: Problem) -> None:
    """|O' - O| <= B_O and |L' - L| <= B_L, elementwise, whatever the options (tier T1)."""
    rows, bound = s.attend_problem(p), s.bound(p.q, p.k, p.v, offsets=p.offsets, **p.options)
    s.judge("out", rows.out, *bound.out)
    if rows.lse is not None:
        s.judge("lse", rows.lse, *bound.lse)


@a_property("finite", draws="any", families=("huge logits",))
def logits_of_any_size(s: Subject, p: Problem) -> None:
    """O is finite and min V - g <= O <= max V + g, even where no bound can be claimed.

    This holds without dropout, for scores and sums of values that do not overflow. g is the
    rounding of the row sums and of the result. With a sink or an empty row, 0 is one of the values.
    L is -inf in rows that see nothing, and only there.
    """
    options = {name: x for name, x in p.options.items() if name not in ("dropout", "seed")}
    rows, exact = s.attend(p.q, p.k, p.v, **options), s.bound(p.q, p.k, p.v, **options)
    out, v = rows.out.astype(np.float64), p.v.astype(np.float64)
    expect(np.isfinite(out), "O is not finite")
    if rows.lse is not None:
        expect(~np.isnan(rows.lse), "LSE is NaN")
        expect(np.isneginf(rows.lse) == np.isneginf(exact.lse.exact), "LSE is -inf elsewhere")
    low, high = min(v.min(initial=0), 0), max(v.max(initial=0), 0)
    precision = s.precision(p.dtype)
    roundings = 2 * precision.gamma(3 * p.k.shape[-2] + 4) + precision.output.unit
    slack = max(-low, high) * 1.01 * float(roundings + 2 * precision.product.unit)
    expect(out.min(initial=0) >= low - slack, "O lies below the values")
    expect(out.max(initial=0) <= high + slack, "O lies above the values")


@a_property(weight=0.5)
def exact_mean(s: Subject, p: Problem) -> None:
    """Q = 0 and N = 2**n keys of small whole values: O = mean(V) bitwise, L = ln N (tier T0).

    N is 65,536 at most: a sum in 16 bits stops growing before that.
    """
    long = "lengths" in s.features and p.rng.random() < 0.2
    number = 2 ** int(p.rng.integers(12, 17) if long else p.rng.integers(0, 9))
    rows = p.q.shape[2] if "lengths" in s.features else number
    q = np.zeros((2, p.q.shape[1], min(rows, 2) if long else rows, p.q.shape[3]), p.dtype)
    k = p.rng.standard_normal((2, p.k.shape[1], number, p.k.shape[3])).astype(p.dtype)
    v = p.rng.integers(-2, 3, (2, p.v.shape[1], number, p.v.shape[3])).astype(p.dtype)
    ours = s.attend(q, k, v)
    mean = per_head(p, v.astype(np.float64).mean(axis=2, keepdims=True))
    exact = np.broadcast_to(mean, ours.out.shape).astype(p.dtype)
    expect(ours.out == exact, f"O is not the mean of {number} whole values")
    if ours.lse is not None:
        s.near("lse", ours.lse, 0 * ours.lse + math.log(number), s.bound(q, k, v).lse.bound)


@a_property("finite", weight=0.5)
def exact_selection(s: Subject, p: Problem) -> None:
    """Keys coded by signs, 2048 apart: O_i = V_j bitwise for the key of i's code (tier T0)."""
    codes = np.where((np.arange(64)[:, None] >> np.arange(6)) & 1, 1.0, -1.0)
    codes = np.concatenate([codes, np.ones((64, 10))], axis=1)
    rows = 64 if "lengths" not in s.features else int(p.rng.integers(1, 100))
    chosen = p.rng.integers(0, 64, rows)
    width = p.v.shape[-1] if "widths" in s.features else 16
    q = (4096 * codes[chosen]).astype(p.dtype)[None, None]
    k = codes[p.rng.permutation(64)].astype(p.dtype)[None, None]
    v = p.rng.standard_normal((1, 1, 64, width)).astype(p.dtype)
    best = (wide(q) @ wide(k).swapaxes(-1, -2)).argmax(axis=-1)[0, 0]
    ours = s.attend(q, k, v)
    expect(ours.out[0, 0] == v[0, 0][best], "O is not the one value whose weight is 1")
    if ours.lse is not None:
        s.near("lse", ours.lse, 0 * ours.lse + 16384.0, s.bound(q, k, v).lse.bound)


@a_property(dtypes=ROUNDED, weight=0.5)
def unbiased_rounding(s: Subject, p: Problem) -> None:
    """|mean of sign(O) (O' - O) / (u_o |O|)| <= 6 / sqrt(n) + mean of B / (u_o |O|) (tier T2).

    B is the bound before the output is rounded: the most by which a truncating accumulator may
    shift O. The property is for float16 and bfloat16, because in wider types B is no smaller than
    u_o |O|.
    """
    shape = (2, p.q.shape[1], 48, 16)
    q, k, v = (p.rng.standard_normal(shape).astype(p.dtype) for _ in "qkv")
    v = v + p.dtype.type(3)  # away from 0, where the type's spacing is the accumulator's
    precision = s.precision(p.dtype)
    exactly = dataclasses.replace(precision, output=Rounding(0.0, 0.0, precision.largest))
    bound = forward_bound(q, k, v, precision=exactly, block_kv=s.tiles[1])
    exact, unit = bound.out.exact, precision.output.unit
    error = (s.attend(q, k, v).out.astype(np.float64) - exact) / (unit * exact)
    shift = float(abs(error.mean()))
    limit = 6 / math.sqrt(error.size) + float((bound.out.bound / (unit * np.abs(exact))).mean())
    if not shift <= limit:
        raise PropertyError(
            f"O is off by {shift:.3g} u |O| on average; expected at most {limit:.3g}"
        )


@a_property()
def queries_permuted(s: Subject, p: Problem) -> None:
    """O(Q[pi]) = O(Q)[pi] and L(Q[pi]) = L(Q)[pi], bitwise. Without causal masks."""
    order = p.rng.permutation(p.q.shape[2])
    ours, moved = s.attend(p.q, p.k, p.v), s.attend(p.q[:, :, order], p.k, p.v)
    turned = ours._replace(
        out=ours.out[:, :, order], lse=None if ours.lse is None else ours.lse[:, :, order]
    )
    s.same_rows(turned, moved, lambda: s.bound(p.q[:, :, order], p.k, p.v))


@a_property()
def convex_rows(s: Subject, p: Problem) -> None:
    """min_j V_jc - B <= O_ic <= max_j V_jc + B over the keys that i sees. Without dropout."""
    options = some_mask(s, p)
    ours, bound = s.attend(p.q, p.k, p.v, **options), s.bound(p.q, p.k, p.v, **options)
    values = per_head(p, p.v.astype(np.float64))[:, :, None]
    allowed = allowed_by(options, p)
    seen, sees = allowed[..., None], np.expand_dims(allowed.any(axis=-1), -1)
    low = np.where(sees, np.where(seen, values, np.inf).min(axis=3), 0)
    high = np.where(sees, np.where(seen, values, -np.inf).max(axis=3), 0)
    out = ours.out.astype(np.float64)
    expect(out >= low - bound.out.bound, "O lies below the values that its row sees")
    expect(out <= high + bound.out.bound, "O lies above the values that its row sees")


@a_property()
def constant_values(s: Subject, p: Problem) -> None:
    """V = c in every element: O = c within the bound. Without dropout and sink."""
    c = float(p.rng.choice([1.0, -3.0, 0.375]))
    v = np.full_like(p.v, c)
    ours, bound = s.attend(p.q, p.k, v), s.bound(p.q, p.k, v)
    s.near("out", ours.out, np.full(ours.out.shape, c), bound.out.bound)


@a_property(integers=True)
def vector_added_to_keys(s: Subject, p: Problem) -> None:
    """K + 1 c^T: the same O, and L_i + scale q_i c. Without score changes, bias and sink."""
    c = float(p.rng.choice([0.5, -2.0]))
    moved = (p.k.astype(np.float64) + c).astype(p.dtype)  # exact
    ours, others = s.attend(p.q, p.k, p.v), s.attend(p.q, moved, p.v)
    bounds = [s.bound(p.q, k, p.v) for k in (p.k, moved)]
    s.near("out", ours.out, others.out, *(b.out.bound for b in bounds))
    if ours.lse is not None:
        shift = wide(p.q).sum(axis=-1) * c * default_scale(p)
        s.near("lse", wide(ours.lse) + shift, others.lse, *(b.lse.bound for b in bounds))


@a_property("bias")
def bias_of_a_whole_row(s: Subject, p: Problem) -> None:
    """bias_ij = r_i: the same O, and L_i + r_i. Without a sink."""
    bias = p.rng.integers(-3, 4, (p.q.shape[2], 1)).astype(np.float32)
    ours, moved = s.attend(p.q, p.k, p.v), s.attend(p.q, p.k, p.v, bias=bias)
    bounds = [s.bound(p.q, p.k, p.v), s.bound(p.q, p.k, p.v, bias=bias)]
    s.near("out", ours.out, moved.out, *(b.out.bound for b in bounds))
    if ours.lse is not None:
        shifted = wide(ours.lse) + wide(bias[:, 0])
        s.near("lse", shifted, moved.lse, *(b.lse.bound for b in bounds))


@a_property(integers=True)
def linear_in_v(s: Subject, p: Problem) -> None:
    """O(V + 2 W) = O(V) + 2 O(W) within the bounds."""
    other = (p.rng.integers(-12, 13, p.v.shape) / 8).astype(p.dtype)
    together = (p.v.astype(np.float64) + 2 * other.astype(np.float64)).astype(p.dtype)  # exact
    values, options = (p.v, other, together), some_mask(s, p)
    outs = [wide(s.attend(p.q, p.k, v, **options).out) for v in values]
    bounds = [s.bound(p.q, p.k, v, **options).out.bound for v in values]
    s.near("out", outs[0] + 2 * outs[1], outs[2], bounds[0], 2 * bounds[1], bounds[2])


@a_property(dtypes=WIDE)
def power_of_two_on_v(s: Subject, p: Problem) -> None:
    """O(2**n V) = 2**n O(V) and L the same, bitwise. Not in float16, which underflows."""
    factor = p.dtype.type(2.0 ** int(p.rng.choice([-20, -1, 1, 30])))
    options = some_mask(s, p)
    ours = s.attend(p.q, p.k, p.v, **options)
    scaled = s.attend(p.q, p.k, p.v * factor, **options)
    s.same_rows(
        ours._replace(out=ours.out * factor), scaled,
        lambda: s.bound(p.q, p.k, p.v * factor, **options),
    )  # fmt: skip


@a_property("nonfinite widths")
def columns_of_v_apart(s: Subject, p: Problem) -> None:
    """O(V[:, C]) = O(V)[:, C] bitwise, and a NaN column of V makes that column of O NaN alone."""
    ours = s.attend(p.q, p.k, p.v)
    columns = int(p.rng.integers(1, p.v.shape[-1] + 1))
    fewer = s.attend(p.q, p.k, p.v[..., :columns])
    cut = ours._replace(out=ours.out[..., :columns])
    s.same_rows(cut, fewer, lambda: s.bound(p.q, p.k, p.v[..., :columns]))
    poisoned = p.v.copy()
    poisoned[..., -1] = np.nan
    after = s.attend(p.q, p.k, poisoned)
    whole = s.bound(p.q, p.k, p.v).out.bound
    s.same("out", ours.out[..., :-1], after.out[..., :-1], lambda: whole[..., :-1])
    expect(np.isnan(after.out[..., -1]), "a column of NaN values gave numbers")


@a_property("scale", dtypes=WIDE)
def power_of_two_between_q_and_scale(s: Subject, p: Problem) -> None:
    """O(2**n Q, scale / 2**n) = O(Q, scale) = O(Q / 2**n, 2**n K), bitwise, and L too."""
    scale, factor = 0.3, 2.0 ** int(p.rng.choice([-7, -1, 1, 9]))
    options, power = some_mask(s, p), p.dtype.type(factor)
    bound = s.bound(p.q, p.k, p.v, scale=scale, **options)
    ours = s.attend(p.q, p.k, p.v, scale=scale, **options)
    moved = s.attend(p.q * power, p.k, p.v, scale=scale / factor, **options)
    s.same_rows(ours, moved, lambda: bound)
    between = s.attend(p.q / power, p.k * power, p.v, scale=scale, **options)
    s.same_rows(ours, between, lambda: bound)


@a_property()
def both_signs_turned(s: Subject, p: Problem) -> None:
    """O(-Q, -K) = O(Q, K) bitwise, and O(-Q, K, -scale) = O(Q, K, scale) where there is a scale."""
    options = some_mask(s, p)
    bound = s.bound(p.q, p.k, p.v, **options)
    ours = s.attend(p.q, p.k, p.v, **options)
    s.same_rows(ours, s.attend(-p.q, -p.k, p.v, **options), lambda: bound)
    if "scale" in s.features:
        scale = 0.3
        ours = s.attend(p.q, p.k, p.v, scale=scale, **options)
        bound = s.bound(p.q, p.k, p.v, scale=scale, **options)
        s.same_rows(ours, s.attend(-p.q, p.k, p.v, scale=-scale, **options), lambda: bound)


@a_property()
def rotated(s: Subject, p: Problem) -> None:
    """O(Q R, K R) = O(Q, K) within the bounds, R a signed permutation of the head's axes."""
    d = p.q.shape[-1]
    order, signs = p.rng.permutation(d), p.rng.choice([-1, 1], d).astype(p.dtype)
    ours = s.attend(p.q, p.k, p.v)
    turned = s.attend(p.q[..., order] * signs, p.k[..., order] * signs, p.v)
    bound = s.bound(p.q, p.k, p.v)
    s.near_rows(ours, turned, bound, bound)
