"""Properties of the gradients.

The sums that vanish (rows of dS, columns of dK, dQ and dK with a constant V) do so without dLSE and
without a sink. All other properties hold with every option.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash import masks, scores
from cupyflash.problem.call import Gradients

from ..bound import BackwardBound
from ..cases import Problem
from ..judge import expect
from ..subject import Subject
from .base import (
    Array,
    a_property,
    allowed_by,
    default_scale,
    per_head,
    some_mask,
    wide,
)

NAMES = ("dq", "dk", "dv")


def _gradients(s: Subject, p: Problem, **options: Any) -> tuple[Gradients, BackwardBound]:
    arrays = p.do, p.q, p.k, p.v
    return s.gradients(*arrays, **options), s.backward_bound(*arrays, **options)


@a_property("backward", draws="any", weight=8)
def gradients_within_bound(s: Subject, p: Problem) -> None:
    """|dX' - dX| <= B_dX for dQ, dK, dV, dbias and dsink, whatever the options (tier T1).

    If O overflowed in float16, nothing can be claimed, because the backward reads the stored O.
    """
    rows = s.attend_problem(p)
    if not np.isfinite(rows.out.astype(np.float32)).all():
        return
    ours = s.gradients_problem(p, rows)
    arrays = p.do, p.q, p.k, p.v
    bound = s.backward_bound(*arrays, dlse=p.dlse, offsets=p.offsets, **p.options)
    for name in (*NAMES, "dbias", "dsink"):
        made, exact = getattr(ours, name), getattr(bound, name)
        if made is not None:
            s.judge(name, made, *exact)


@a_property("backward finite", draws="any", families=("huge logits",))
def gradients_at_any_size(s: Subject, p: Problem) -> None:
    """No gradient is NaN, and none is infinite but by overflow of a 16-bit type."""
    for name, gradient in zip(NAMES, s.gradients_problem(p), strict=False):
        expect(~np.isnan(gradient), f"{name} is NaN")
        if p.dtype.itemsize > 2:
            expect(np.isfinite(gradient), f"{name} is infinite")


@a_property("backward")
def queries_permuted_backward(s: Subject, p: Problem) -> None:
    """dQ(Q[pi], dO[pi]) = dQ[pi] bitwise. Without causal masks."""
    order = p.rng.permutation(p.q.shape[2])
    ours = s.gradients(p.do, p.q, p.k, p.v)
    arrays = p.do[:, :, order], p.q[:, :, order], p.k, p.v
    moved = s.gradients(*arrays)
    s.same("dq", ours.dq[:, :, order], moved.dq, lambda: s.backward_bound(*arrays).dq.bound)


@a_property("backward")
def columns_of_dk_sum_to_zero(s: Subject, p: Problem) -> None:
    """sum_j dS_ij = 0 (through dbias) and sum_j dK_j = 0, within the bounds' sums."""
    options = some_mask(s, p)
    if "bias" in s.features:
        shape = (2, p.q.shape[1], p.q.shape[2], p.k.shape[2])
        options["bias"] = np.zeros(shape, p.accumulator)
    ours, bound = _gradients(s, p, **options)
    columns = wide(ours.dk).sum(axis=-2)
    s.near("dk", columns, 0 * columns, bound.dk.bound.sum(axis=-2))
    if bound.dbias is not None:
        rows = wide(ours.dbias).sum(axis=-1)
        s.near("dbias", rows, 0 * rows, bound.dbias.bound.sum(axis=-1))


@a_property("backward")
def dv_sums_to_do(s: Subject, p: Problem) -> None:
    """sum_j dV_j = sum of dO_i over the rows that see something. Without dropout and sink."""
    options = some_mask(s, p)
    ours, bound = _gradients(s, p, **options)
    sees = np.expand_dims(allowed_by(options, p).any(axis=-1), -1)
    do = np.where(sees, wide(p.do), 0).sum(axis=-2)
    do = do.reshape(2, p.k.shape[1], -1, do.shape[-1]).sum(axis=2)
    s.near("dv", wide(ours.dv).sum(axis=-2), do, bound.dv.bound.sum(axis=-2))


@a_property("backward")
def inner_products(s: Subject, p: Problem) -> None:
    """<dQ, Q> = <dK, K> and <dV, V> = <dO, O>, within the bounds' inner products."""
    options = some_mask(s, p)
    more = dict(options)
    if "dlse" in s.features and p.rng.random() < 0.5:
        more["dlse"] = p.rng.standard_normal(p.q.shape[:3]).astype(p.accumulator)
    ours, bound = _gradients(s, p, **more)
    q, k, v, do = (wide(x) for x in (p.q, p.k, p.v, p.do))
    pairs = ((bound.dq, q), (bound.dk, k), (bound.dv, v))
    limits = [(b.bound * np.abs(x)).sum() for b, x in pairs]
    s.near("dq", (wide(ours.dq) * q).sum(), (wide(ours.dk) * k).sum(), *limits[:2])
    out, out_bound = s.attend(p.q, p.k, p.v, **options).out, s.bound(p.q, p.k, p.v, **options).out
    limit = (out_bound.bound * np.abs(do)).sum()
    s.near("dv", (wide(ours.dv) * v).sum(), (do * wide(out)).sum(), limits[2], limit)


@a_property("backward", dtypes=("bfloat16", "float32", "float64"))
def twice_do(s: Subject, p: Problem) -> None:
    """dX(2 dO) = 2 dX(dO), bitwise. Not in float16, whose gradients may underflow."""
    options = some_mask(s, p)
    if "dropout" in s.features and p.rng.random() < 0.5:
        options |= {"dropout": 0.3, "seed": 9}
    arrays = p.q, p.k, p.v
    once = s.gradients(p.do, *arrays, **options)
    do = p.do * p.dtype.type(2)  # with a plain 2, NumPy 2.1 makes float32 of bfloat16
    twice = s.gradients(do, p.q, p.k, p.v, **options)
    # + 0: the sign of a 0 is left open
    doubled, twice = (
        Gradients(*(factor * x + x.dtype.type(0) for x in each[:3]))
        for factor, each in ((p.dtype.type(2), once), (p.dtype.type(1), twice))
    )
    s.same_gradients(doubled, twice, lambda: s.backward_bound(do, *arrays, **options))


@a_property("backward", integers=True)
def linear_in_do(s: Subject, p: Problem) -> None:
    """dX(dO + dO') = dX(dO) + dX(dO') within the bounds."""
    other = (p.rng.integers(-12, 13, p.do.shape) / 8).astype(p.dtype)
    given = (p.do, other, p.do + other)  # exact
    parts = [s.gradients(do, p.q, p.k, p.v) for do in given]
    bounds = [s.backward_bound(do, p.q, p.k, p.v) for do in given]
    for name in NAMES:
        a, b, both = (wide(getattr(x, name)) for x in parts)
        s.near(name, a + b, both, *(getattr(x, name).bound for x in bounds))


@a_property("backward")
def constant_values_backward(s: Subject, p: Problem) -> None:
    """V = c in every element: dQ = dK = 0 within the bounds. Without dropout, dLSE and sink."""
    v = np.full_like(p.v, 1.5)
    ours, bound = s.gradients(p.do, p.q, p.k, v), s.backward_bound(p.do, p.q, p.k, v)
    s.near("dq", ours.dq, 0 * ours.dq, bound.dq.bound)
    s.near("dk", ours.dk, 0 * ours.dk, bound.dk.bound)


@a_property("backward dlse")
def dlse_alone(s: Subject, p: Problem) -> None:
    """dO = 0: dQ = scale (P o dL) K, dK = scale (P o dL)^T Q, dV = 0 exactly."""
    dlse, do = p.rng.standard_normal(p.q.shape[:3]).astype(p.accumulator), np.zeros_like(p.do)
    ours = s.gradients(do, p.q, p.k, p.v, dlse=dlse)
    bound = s.backward_bound(do, p.q, p.k, p.v, dlse=dlse)
    expect(ours.dv == 0, "dV is not 0 where dO is")
    q, k, scale = wide(p.q), wide(per_head(p, p.k)), default_scale(p)
    probs = np.exp(scale * q @ k.swapaxes(-1, -2))
    probs /= probs.sum(axis=-1, keepdims=True)
    gradient = probs * wide(dlse)[..., None]
    dk = (scale * gradient.swapaxes(-1, -2) @ q).reshape(2, p.k.shape[1], -1, *p.k.shape[2:])
    slack = 1e-17 * float(np.abs(gradient).sum())
    s.near("dq", ours.dq, scale * gradient @ k, bound.dq.bound, slack)
    s.near("dk", ours.dk, dk.sum(axis=2), bound.dk.bound, slack)


@a_property("backward gqa", group=3)
def shared_heads_sum(s: Subject, p: Problem) -> None:
    """dQ is bitwise that of repeated heads; dK and dV are sums over a group, within the bounds."""
    options = some_mask(s, p)
    ours, bound = _gradients(s, p, **options)
    arrays = p.do, p.q, per_head(p, p.k), per_head(p, p.v)
    apart, limits = s.gradients(*arrays, **options), s.backward_bound(*arrays, **options)
    s.same("dq", ours.dq, apart.dq, lambda: bound.dq.bound)
    for name, x in (("dk", p.k), ("dv", p.v)):
        shape = (2, x.shape[1], 3, *x.shape[2:])
        summed = wide(getattr(apart, name)).reshape(shape).sum(axis=2)
        limit = getattr(limits, name).bound.reshape(shape).sum(axis=2)
        s.near(name, getattr(ours, name), summed, getattr(bound, name).bound, limit)


@a_property("backward masks")
def masked_keys_get_zeros(s: Subject, p: Problem) -> None:
    """A key that nobody sees, by a mask or a bias of -inf: dK_j = dV_j = 0 exactly."""
    hidden = p.rng.random(p.k.shape[2]) < 0.4
    ways: list[dict[str, Any]] = [{"mask": ~hidden[None]}]
    if "bias" in s.features:
        ways.append({"bias": np.where(hidden, -np.inf, 0).astype(np.float32)[None]})
    for options in ways:
        ours = s.gradients(p.do, p.q, p.k, p.v, **options)
        expect(ours.dk[:, :, hidden] == 0, "dK is not 0 at a hidden key")
        expect(ours.dv[:, :, hidden] == 0, "dV is not 0 at a hidden key")
        if "bias" in options:
            expect(ours.dbias[:, hidden] == 0, "dbias is not 0 at a hidden key")
        if hidden.all():
            expect(ours.dq == 0, "dQ is not 0 where no key is seen")


@a_property("backward causal", square=True)
def later_keys_get_nothing(s: Subject, p: Problem) -> None:
    """Causal, dO_i' = 0 for i' != i: dK_j = dV_j = 0 for j > i and dQ_i' = 0, exactly."""
    i = int(p.rng.integers(p.q.shape[2]))
    others = np.arange(p.q.shape[2]) != i
    do = p.do.copy()
    do[:, :, others] = 0
    ours = s.gradients(do, p.q, p.k, p.v, mask=masks.causal())
    expect(ours.dk[:, :, i + 1 :] == 0, "dK is not 0 at a later key")
    expect(ours.dv[:, :, i + 1 :] == 0, "dV is not 0 at a later key")
    expect(ours.dq[:, :, others] == 0, "dQ is not 0 in a row without dO")


@a_property("backward masks bias nonfinite", weight=0.5)
def empty_rows_give_no_gradient(s: Subject, p: Problem) -> None:
    """A row without keys adds nothing to any gradient, whatever its dO, Q and dLSE hold.

    With a sink, its LSE is the sink, so dLSE counts there.
    """
    n = p.q.shape[2]
    empty = p.rng.random(n) < 0.5
    shape = (2, p.q.shape[1], n, p.k.shape[2])
    options: dict[str, Any] = {
        "mask": np.broadcast_to(~empty[:, None], shape[2:]), "bias": np.zeros(shape, p.accumulator)
    }  # fmt: skip
    with_sink = "sink" in s.features and bool(p.rng.random() < 0.5)
    if with_sink:
        options["sink"] = np.ones(p.q.shape[1], np.float32)
    row_gradients = {}
    if "dlse" in s.features:
        row_gradients["dlse"] = p.rng.standard_normal(p.q.shape[:3]).astype(p.accumulator)
        row_gradients["dlse"][:, :, empty] = 0
    do, q = p.do.copy(), p.q.copy()
    do[:, :, empty] = 0
    clean = s.gradients(do, q, p.k, p.v, **row_gradients, **options)
    do[:, :, empty], q[:, :, empty] = np.nan, np.inf
    if row_gradients and not with_sink:
        row_gradients["dlse"][:, :, empty] = np.nan
    ours = s.gradients(do, q, p.k, p.v, **row_gradients, **options)
    expect(ours.dq[:, :, empty] == 0, "dQ is not 0 in a row without keys")
    expect(ours.dbias[:, :, empty] == 0, "dbias is not 0 in a row without keys")
    for name in (*NAMES, "dbias", "dsink"):
        a, b = getattr(ours, name), getattr(clean, name)
        if a is not None:
            expect(a == b, f"a row without keys changed {name}")


def _loss(s: Subject, inputs: dict[str, Array], p: Problem, dlse: Any, options: Any) -> Any:
    """Return <dO, O> + <dL, L>, and a bound of its rounding."""
    rows, bound = s.attend(**inputs, **options), s.bound(**inputs, **options)
    value, limit = (wide(p.do) * wide(rows.out)).sum(), (np.abs(p.do) * bound.out.bound).sum()
    if dlse is None:
        return value, limit
    seen = np.isfinite(bound.lse.exact)
    value += (wide(dlse) * np.where(seen, wide(rows.lse), 0)).sum()
    return value, limit + np.where(seen, np.abs(dlse) * bound.lse.bound, 0).sum()


def _differentiable(s: Subject, p: Problem) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw q, k, v and other inputs that have gradients, and options that have none."""
    heads, rows, keys = p.q.shape[1], p.q.shape[2], p.k.shape[2]
    inputs, options = {"q": p.q, "k": p.k, "v": p.v}, some_mask(s, p)
    if "bias" in s.features:
        shape = [(rows, 1), (heads, 1, keys), (2, 1, rows, keys)][int(p.rng.integers(3))]
        inputs["bias"] = p.rng.standard_normal(shape)
    if "sink" in s.features and p.rng.random() < 0.5:
        inputs["sink"] = p.rng.standard_normal(heads)
    if "scores" in s.features and p.rng.random() < 0.5:
        slopes = scores.alibi(np.linspace(0.1, 0.5, heads))
        options["score_mod"] = [scores.softcap(2.0), slopes]
    if "dropout" in s.features and p.rng.random() < 0.5:
        options |= {"dropout": 0.3, "seed": int(p.rng.integers(2**40))}
    return inputs, options


@a_property("backward", dtypes=("float64",), weight=0.5)
def adjoint(s: Subject, p: Problem) -> None:
    """<(dO, dL), JVP(d)> = <VJP(dO, dL), d>, JVP by central differences in float64.

    The results for h and h / 2 differ by 3/4 of the coarser one's error, whose term is h**2; so
    their difference is three times the finer one's error. Roundings are bounded by B_O / h. This
    holds with every option except scores and masks that jump.
    """
    inputs, options = _differentiable(s, p)
    dlse = None
    if {"lse", "dlse"} <= s.features:
        dlse = p.rng.standard_normal(p.q.shape[:3])
    directions = {name: p.rng.standard_normal(x.shape) for name, x in inputs.items()}
    ours = s.gradients(p.do, **inputs, dlse=dlse, **options)._asdict()
    bound = s.backward_bound(p.do, **inputs, dlse=dlse, **options)
    inner, limit, size = np.longdouble(0), 0.0, 0.0
    for name, direction in directions.items():
        expected = getattr(bound, f"d{name}")
        inner += (wide(ours[f"d{name}"]) * direction).sum()
        limit += float((expected.bound * np.abs(direction)).sum())
        moved = np.abs(inputs[name]) + np.abs(direction)
        size += float((np.abs(expected.exact) * moved).sum())
    slopes, rounding = [], 0.0
    for step in (2.0**-12, 2.0**-13):
        ends = []
        for sign in (1, -1):
            moved_inputs = {name: x + sign * step * directions[name] for name, x in inputs.items()}
            ends.append(_loss(s, moved_inputs, p, dlse, options))
        slopes.append((ends[0][0] - ends[1][0]) / (2 * step))
        # the losses' roundings, and those of the moved inputs
        rounding = float(ends[0][1] + ends[1][1] + 2.0**-52 * size) / (2 * step)
    s.near("dq", inner, slopes[1], limit, abs(slopes[1] - slopes[0]), 2 * rounding)


@a_property("backward sink")
def sink_of_minus_infinity_backward(s: Subject, p: Problem) -> None:
    """sink = -inf: dsink = 0 exactly, and every other gradient bitwise as without a sink."""
    options = some_mask(s, p)
    sink = np.full(p.q.shape[1], -np.inf, np.float32)
    ours = s.gradients(p.do, p.q, p.k, p.v, sink=sink, **options)
    without, bound = _gradients(s, p, **options)
    s.same_gradients(ours, without, lambda: bound)
    expect(ours.dsink == 0, "dsink is not 0 for a sink of -inf")


@a_property("backward lengths", weight=0.2)
def exact_sum_over_queries(s: Subject, p: Problem) -> None:
    """One key and up to 2**17 queries of whole dO: dV = sum dO bitwise, and dQ = dK = 0."""
    rows = 2 ** int(p.rng.integers(10, 18)) + int(p.rng.integers(2))
    q = p.rng.standard_normal((1, 1, rows, 8)).astype(p.dtype)
    k, v = (p.rng.standard_normal((1, 1, 1, 8)).astype(p.dtype) for _ in "kv")
    do = np.ones((1, 1, rows, 8), p.dtype)
    do[:, :, :: int(p.rng.integers(2, 9))] = 0
    ours = s.gradients(do, q, k, v)
    with np.errstate(over="ignore"):  # long sums of float16 are infinite
        exact = do.astype(np.float64).sum(axis=2, keepdims=True).astype(p.dtype)
    expect(ours.dv == exact, f"dV is not the sum of {rows} rows of dO")


@a_property("backward broadcast empty bias sink", weight=0.2)
def broadcast_to_nothing(s: Subject, p: Problem) -> None:
    """Inputs that are broadcast to a batch of nothing have gradients of 0."""
    q, do = (np.zeros((0, *x.shape), p.dtype) for x in (p.q, p.do))
    bias, sink = np.ones((1, p.q.shape[2], 1), np.float32), np.ones(p.q.shape[1], np.float32)
    ours = s.gradients(do, q, p.k, p.v, bias=bias, sink=sink)
    for name, gradient in zip((*NAMES, "dbias", "dsink"), ours, strict=True):
        expect(gradient == 0, f"{name} is not 0 where nothing was computed")
