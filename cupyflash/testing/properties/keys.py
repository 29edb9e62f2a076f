"""Properties of sets of keys: their order, their number, and attention over parts of them.

They hold without dropout, which depends on a key's position; those that move keys hold only without
position-dependent scores and masks.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from cupyflash import masks

from ..bound import ForwardBound
from ..cases import Problem
from ..judge import expect
from ..subject import Rows, Subject
from .base import (
    a_property,
    cut_rows,
    default_scale,
    per_head,
    some_mask,
    wide,
)

Array = np.ndarray[Any, Any]


@a_property()
def keys_permuted(s: Subject, p: Problem) -> None:
    """O(K[pi], V[pi]) = O(K, V) and L too, within the bounds of any order."""
    order = p.rng.permutation(p.k.shape[2])
    ours, moved = s.attend(p.q, p.k, p.v), s.attend(p.q, p.k[:, :, order], p.v[:, :, order])
    bound = s.bound(p.q, p.k, p.v)
    s.near_rows(ours, moved, bound, bound)


@a_property("lengths")
def every_key_twice(s: Subject, p: Problem) -> None:
    """O([K; K], [V; V]) = O(K, V), and L + ln 2. Without a sink."""
    twice = [np.concatenate([x, x], axis=2) for x in (p.k, p.v)]
    ours, doubled = s.attend(p.q, p.k, p.v), s.attend(p.q, *twice)
    bounds = [s.bound(p.q, p.k, p.v), s.bound(p.q, *twice)]
    s.near("out", ours.out, doubled.out, *(b.out.bound for b in bounds))
    if ours.lse is not None:
        shifted = wide(ours.lse) + np.log(np.longdouble(2))
        s.near("lse", shifted, doubled.lse, *(b.lse.bound for b in bounds))


@a_property("lengths masks")
def masked_keys_inserted(s: Subject, p: Problem) -> None:
    """Keys that nobody sees change O and L within the bounds; behind the others, no bit."""
    number, keys = int(p.rng.integers(1, 21)), p.k.shape[2]
    places = np.sort(p.rng.integers(0, keys + 1, number))
    junk = [
        p.rng.standard_normal((*x.shape[:2], number, x.shape[3])).astype(p.dtype)
        for x in (p.k, p.v)
    ]
    k, v = (np.insert(x, places, y, axis=2) for x, y in zip((p.k, p.v), junk, strict=True))
    seen = np.insert(np.ones(keys, bool), places, False)
    ours, bound = s.attend(p.q, p.k, p.v), s.bound(p.q, p.k, p.v)
    wider = s.bound(p.q, k, v, mask=seen)
    ways: list[dict[str, Any]] = [{"mask": seen}]
    if "bias" in s.features:
        ways.append({"bias": np.where(seen, 0, -np.inf)})
    for options in ways:
        s.near_rows(ours, s.attend(p.q, k, v, **options), bound, wider)
    k, v = (np.concatenate(x, axis=2) for x in zip((p.k, p.v), junk, strict=True))
    s.same_rows(ours, s.attend(p.q, k, v, mask=masks.lengths(keys)), lambda: bound)


@a_property("lse")
def lse_between_its_limits(s: Subject, p: Problem) -> None:
    """max_j s_ij <= L_i <= max_j s_ij + ln N within the bound. Without a sink."""
    ours, bound = s.attend(p.q, p.k, p.v), s.bound(p.q, p.k, p.v)
    scores = wide(p.q) @ wide(per_head(p, p.k)).swapaxes(-1, -2) * default_scale(p)
    slack = bound.lse.bound + 1e-17 * (1 + np.abs(bound.lse.bound))
    expect(ours.lse >= scores.max(axis=-1) - slack, "L lies below the largest score")
    highest = scores.max(axis=-1) + math.log(p.k.shape[2])
    expect(ours.lse <= highest + slack, "L lies above the largest score + ln N")


@a_property("lse lengths empty")
def one_more_key_raises_lse(s: Subject, p: Problem) -> None:
    """L(K, V) >= L(K[:-1], V[:-1]) within the bounds."""
    k, v = p.k[:, :, :-1], p.v[:, :, :-1]
    ours, fewer = s.attend(p.q, p.k, p.v), s.attend(p.q, k, v)
    slack = s.bound(p.q, p.k, p.v).lse.bound + s.bound(p.q, k, v).lse.bound
    expect(ours.lse >= fewer.lse - slack, "one key more lowered L")


def parts_of(s: Subject, p: Problem, number: int) -> list[tuple[int, int]]:
    """Split the keys at random places; parts may be empty where the kernel knows empty axes."""
    keys = p.k.shape[2]
    cuts = np.sort(p.rng.integers(0, keys + 1, number - 1)).tolist()
    parts = list(itertools.pairwise([0, *cuts, keys]))
    return parts if "empty_keys" in s.features else [(a, b) for a, b in parts if a < b]


def attend_parts(
    s: Subject, p: Problem, parts: list[tuple[int, int]], **options: Any
) -> tuple[list[Rows], list[ForwardBound]]:
    """Attend to parts of the keys; the first one gets the options."""
    rows, bounds = [], []
    for n, (first, last) in enumerate(parts):
        arrays = p.q, p.k[:, :, first:last], p.v[:, :, first:last]
        own = options if n == 0 else {}
        rows.append(s.attend(*arrays, **own))
        bounds.append(s.bound(*arrays, **own))
    return rows, bounds


@np.errstate(all="ignore")
def joined(rows: list[Rows], bounds: list[ForwardBound]) -> tuple[Array, Array, Array, Array]:
    """Join parts by L = logaddexp in long double: O, L, and the bounds of both."""
    lses = np.stack([wide(x.lse) for x in rows])
    lse = np.logaddexp.reduce(lses)
    weights = np.where(np.isneginf(lses), 0, np.exp(lses - np.where(np.isinf(lse), 0, lse)))
    errors = np.stack([x.lse.bound for x in bounds])
    relative = np.expm1(2 * errors.max(axis=0))[..., None]
    outs = np.stack([wide(x.out) for x in rows])
    out = (weights[..., None] * outs).sum(axis=0)
    own = (weights[..., None] * np.stack([x.out.bound for x in bounds])).sum(axis=0)
    size = (weights[..., None] * np.abs(outs)).sum(axis=0)
    limit = (1 + relative) * own + relative * size + 1e-17 * (1 + size)
    return out, lse, limit.astype(float), errors.max(axis=0) + 1e-17 * (1 + np.abs(lse))


@a_property("lse lengths")
def keys_in_parts(s: Subject, p: Problem) -> None:
    """L = logaddexp of the parts' L_p, O = sum exp(L_p - L) O_p, for any split of the keys."""
    options: dict[str, Any] = {}
    if "sink" in s.features and p.rng.random() < 0.5:  # one of the parts gets the sink
        options["sink"] = p.rng.standard_normal(p.q.shape[1]).astype(np.float32)
    parts = parts_of(s, p, int(p.rng.integers(1, 6)))
    out, lse, out_limit, lse_limit = joined(*attend_parts(s, p, parts, **options))
    whole, bound = s.attend(p.q, p.k, p.v, **options), s.bound(p.q, p.k, p.v, **options)
    s.near("out", whole.out, out, bound.out.bound, out_limit)
    s.near("lse", whole.lse, lse, bound.lse.bound, lse_limit)


@a_property("lse lengths combine")
def combined_parts(s: Subject, p: Problem) -> None:
    """combine() of parts is the whole; associative, commutative; (0, -inf) is its unit."""
    rows, bounds = attend_parts(s, p, parts_of(s, p, 4))
    out, lse, out_limit, lse_limit = joined(rows, bounds)
    precision = s.precision(p.dtype)
    size = np.abs(p.v.astype(np.float64)).max() * 1.01
    high = 1 + np.abs(np.where(np.isinf(lse), 0, lse)).max(axis=-1).max()
    once = precision.output.unit * size + precision.output.underflow
    once += (12 + len(rows)) * precision.unit * float(high) * size
    drift = (6 * precision.unit * float(high) + 2 * precision.exp2_error) * len(rows)
    unit = Rows(np.zeros_like(rows[0].out), np.full_like(rows[0].lse, -np.inf))
    order = p.rng.permutation(len(rows))
    groups = [rows, [rows[n] for n in order], [*rows, unit], [unit, *rows]]
    if len(rows) > 2:
        groups.append([s.combine(rows[:2]), s.combine(rows[2:])])
    for group in groups:
        ours = s.combine(group)
        s.near("out", ours.out, out, out_limit + 2 * once)
        s.near("lse", ours.lse, lse, lse_limit + 2 * drift)
    same = s.combine([unit, rows[0]])
    s.same("out", same.out, rows[0].out, lambda: once)
    s.same("lse", same.lse, rows[0].lse, lambda: drift)


@a_property("lse combine")
def combined_parts_of_any_size(s: Subject, p: Problem) -> None:
    """combine() of parts up to the type's largest number lies between them, whatever they weigh."""
    largest = s.precision(p.dtype).output.largest
    number = int(p.rng.integers(2, 6))
    shape = (2, p.q.shape[1], p.q.shape[2], p.v.shape[3])
    near = float(p.rng.choice([0.0, 0.5, 1.0]))  # 1: all parts are the largest number
    sign = p.rng.choice([-1.0, 1.0], shape)
    rows = []
    for _ in range(number):
        out = sign * largest * (near + (1 - near) * p.rng.random(shape))
        lse = p.rng.standard_normal(shape[:-1]) * float(p.rng.choice([0.0, 1.0]))
        rows.append(Rows(out.astype(p.dtype), lse.astype(p.accumulator)))
    outs = np.stack([wide(x.out) for x in rows])
    precision = s.precision(p.dtype)
    slack = float((16 + 4 * number) * precision.unit + precision.output.unit) * largest
    ours = wide(s.combine(rows).out)
    expect(np.isfinite(ours), "O is not finite")
    expect(ours >= outs.min(axis=0) - slack, "O lies below its parts")
    expect(ours <= outs.max(axis=0) + slack, "O lies above its parts")


@a_property("sink gqa lengths scale")
def sink_is_a_key_of_value_0(s: Subject, p: Problem) -> None:
    """A sink of logit x is one more key whose score is x and whose value is 0."""
    sink = (p.rng.integers(-16, 17, p.q.shape[1]) / 8).astype(p.dtype)
    k, v = per_head(p, p.k), per_head(p, p.v)
    q = np.concatenate([p.q, np.ones((*p.q.shape[:3], 1), p.dtype)], axis=-1)
    key = np.zeros((2, p.q.shape[1], 1, q.shape[-1]), p.dtype)
    key[..., -1] = sink[:, None]
    k = np.concatenate([np.concatenate([k, np.zeros_like(k[..., :1])], axis=-1), key], axis=2)
    v = np.concatenate([v, np.zeros_like(v[:, :, :1])], axis=2)
    ours, as_key = s.attend(p.q, p.k, p.v, scale=1.0, sink=sink), s.attend(q, k, v, scale=1.0)
    bounds = s.bound(p.q, p.k, p.v, scale=1.0, sink=sink), s.bound(q, k, v, scale=1.0)
    s.near_rows(ours, as_key, *bounds)


@a_property("sink")
def sink_of_minus_infinity(s: Subject, p: Problem) -> None:
    """sink = -inf is no sink, bitwise."""
    options = some_mask(s, p)
    sink = np.full(p.q.shape[1], -np.inf, np.float32)
    ours = s.attend(p.q, p.k, p.v, sink=sink, **options)
    s.same_rows(ours, s.attend(p.q, p.k, p.v, **options), lambda: s.bound(p.q, p.k, p.v, **options))


@a_property("lengths")
def decoding_is_prefill(s: Subject, p: Problem) -> None:
    """Causal: queries in chunks with the keys so far, down to one query, give the rows of one shot.

    This holds with causal masks and windows that are aligned at the last query.
    """
    length = min(p.q.shape[2], p.k.shape[2])
    q, k, v = p.q[:, :, :length], p.k[:, :, :length], p.v[:, :, :length]
    options: dict[str, Any] = {"mask": masks.causal()} if "causal" in s.features else {}
    whole = s.attend(q, k, v, **options)
    cut = int(p.rng.integers(0, length))
    for first, last in ((0, cut), (cut, length), (length - 1, length)):
        if first == last:
            continue
        keys = last if options else length
        arrays = q[:, :, first:last], k[:, :, :keys], v[:, :, :keys]
        chunk, bound = s.attend(*arrays, **options), s.bound(*arrays, **options)
        rows = cut_rows(whole, slice(None), slice(None), slice(first, last))
        s.near_rows(rows, chunk, bound, bound)
