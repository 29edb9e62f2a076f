"""Properties of tangents and of second derivatives, which every kernel of them must have.

A direction has small integers, so that sums and multiples of directions are exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..cases import Problem
from ..subject import Subject
from ..tangent_bound import Directions
from ..tangent_calls import Tangent, bound_of_second, bound_of_tangents, second, tangents
from .base import Array, a_property, some_mask, wide

NAMES = ("dq", "dk", "dv")


def direction_of(p: Problem) -> Directions:
    """Draw a direction of all arrays of a problem."""
    arrays = (p.q, p.k, p.v, p.options.get("bias"), p.options.get("sink"))
    return Directions(*(None if x is None else _integers(p, x) for x in arrays))


def _integers(p: Problem, like: Array) -> Array:
    made: Array = p.rng.integers(-4, 5, like.shape).astype(like.dtype)
    return made


class _Case(NamedTuple):
    options: dict[str, Any]
    along: Directions
    other: Directions


def _drawn(s: Subject, p: Problem) -> _Case:
    """Draw a mask, and two directions of q, k and v."""
    return _Case(some_mask(s, p), direction_of(p), direction_of(p))


def _sum(a: Array, b: Array) -> Array:
    return (wide(a) + wide(b)).astype(a.dtype)


@a_property("jvp varlen_jvp", draws="any", weight=4)
def tangents_within_bound(s: Subject, p: Problem) -> None:
    """|tO' - tO| <= B_tO and |tL' - tL| <= B_tL, whatever the options."""
    along = direction_of(p)
    made = tangents(s, p.q, p.k, p.v, along, offsets=p.offsets, **p.options)
    bound = bound_of_tangents(s, p.q, p.k, p.v, along, offsets=p.offsets, **p.options)
    for name in Tangent._fields:
        x = getattr(made, name)
        if x is not None:
            s.judge(name, x, *getattr(bound, name))


@a_property("jvp")
def tangents_are_linear(s: Subject, p: Problem) -> None:
    """tO(t + u) = tO(t) + tO(u), and tL likewise, within the bounds' sums."""
    options, t, u = _drawn(s, p)
    both = Directions(*(None if x is None else _sum(x, y) for x, y in zip(t, u, strict=True)))
    made = [tangents(s, p.q, p.k, p.v, along, **options) for along in (t, u, both)]
    limits = [bound_of_tangents(s, p.q, p.k, p.v, along, **options) for along in (t, u, both)]
    for name in ("tout", "tlse"):
        a, b, c = (getattr(x, name) for x in made)
        if a is not None:
            bounds = (getattr(x, name).bound for x in limits)
            s.near(name, wide(a) + wide(b), wide(c), *bounds)


@a_property("jvp bias")
def constant_tangent_of_a_bias(s: Subject, p: Problem) -> None:
    """If all scores of a row move by c, tL = c and tO = 0. Without a sink."""
    rows = p.rng.integers(-8, 9, (*p.q.shape[:3], 1)).astype(p.accumulator)
    shape = (*p.q.shape[:3], p.k.shape[2])
    options = some_mask(s, p) | {"bias": np.zeros(shape, p.accumulator)}
    along = Directions(None, None, None, np.broadcast_to(rows, shape).copy(), None)
    made = tangents(s, p.q, p.k, p.v, along, **options)
    bound = bound_of_tangents(s, p.q, p.k, p.v, along, **options)
    s.near("tout", wide(made.tout), 0 * wide(made.tout), bound.tout.bound)
    if made.tlse is not None:
        sees = np.isfinite(bound.lse.exact)
        s.near("tlse", wide(made.tlse), np.where(sees, rows[..., 0], 0), bound.tlse.bound)


@a_property("jvp lse combine", dtypes=("float32", "float64"))
def tangents_of_parts_are_joined(s: Subject, p: Problem) -> None:
    """sum_n w_n tL_n = tL and sum_n w_n (tO_n + (tL_n - tL) O_n) = tO, over parts of the keys."""
    along = direction_of(p)
    middle = p.k.shape[2] // 2
    made, limits = [], []
    for part in (slice(None, middle), slice(middle, None)):
        arrays = p.q, p.k[:, :, part], p.v[:, :, part]
        own = along._replace(tk=along.tk[:, :, part], tv=along.tv[:, :, part])
        made.append(tangents(s, *arrays, own))
        limits.append(bound_of_tangents(s, *arrays, own))
    whole = tangents(s, p.q, p.k, p.v, along)
    bound = bound_of_tangents(s, p.q, p.k, p.v, along)
    exact = [wide(x.lse.exact) for x in limits]
    total = np.logaddexp(*exact)
    weights = [np.exp(x - total) for x in exact]
    tlse = sum(w * wide(x.tlse) for w, x in zip(weights, made, strict=True))
    # Weights are exact, and what they are of is within its bound.
    limit = sum(w * x.tlse.bound for w, x in zip(weights, limits, strict=True))
    s.near("tlse", wide(whole.tlse), tlse, bound.tlse.bound, limit)
    tout: Any = 0
    limit_out: Any = 0
    for w, x, e in zip(weights, made, limits, strict=True):
        out, moved, weight = wide(x.out), (wide(x.tlse) - tlse)[..., None], w[..., None]
        tout = tout + weight * (wide(x.tout) + moved * out)
        size = (e.tlse.bound + limit)[..., None]
        more = size * np.abs(out) + (np.abs(moved) + size) * e.out.bound
        limit_out = limit_out + weight * (e.tout.bound + more)
    s.near("tout", wide(whole.tout), tout, bound.tout.bound, limit_out)


@a_property("jvp backward")
def tangents_are_adjoint_to_gradients(s: Subject, p: Problem) -> None:
    """<dO, tO> = <dQ, tQ> + <dK, tK> + <dV, tV>, within the bounds' inner products."""
    options, along, _ = _drawn(s, p)
    made = tangents(s, p.q, p.k, p.v, along, **options)
    ours = s.gradients(p.do, p.q, p.k, p.v, **options)
    limits = s.backward_bound(p.do, p.q, p.k, p.v, **options)
    bound = bound_of_tangents(s, p.q, p.k, p.v, along, **options).tout
    do = wide(p.do)
    sums, allowed = [], [(np.abs(do) * bound.bound).sum()]
    for name, t in zip(NAMES, along, strict=False):
        sums.append((wide(getattr(ours, name)) * wide(t)).sum())
        allowed.append((np.abs(wide(t)) * getattr(limits, name).bound).sum())
    s.near("tout", (do * wide(made.tout)).sum(), sum(sums), *allowed)


@a_property("backward_jvp backward", draws="any", weight=2)
def second_derivatives_within_bound(s: Subject, p: Problem) -> None:
    """Tangents of all gradients are within their bounds, whatever the options."""
    if p.offsets is not None:
        return
    rows = s.attend_problem(p)
    if not np.isfinite(rows.out.astype(np.float32)).all():
        return
    along = direction_of(p)
    arrays = p.do, p.q, p.k, p.v, along
    made = second(s, *arrays, rows=rows, dlse=p.dlse, **p.options)
    bound = bound_of_second(s, *arrays, dlse=p.dlse, **p.options)
    for name, x in made.items():
        s.judge(name, x, *getattr(bound, name))


@a_property("backward_jvp backward")
def second_derivatives_are_symmetric(s: Subject, p: Problem) -> None:
    """<u, H t> = <t, H u> with the Hessian H by q, k and v, within the bounds' inner products."""
    options, t, u = _drawn(s, p)
    sums, allowed = [], []
    for along, by in ((t, u), (u, t)):
        made = second(s, p.do, p.q, p.k, p.v, along, **options)
        bound = bound_of_second(s, p.do, p.q, p.k, p.v, along, **options)
        sums.append(sum((wide(made[n]) * wide(x)).sum() for n, x in zip(NAMES, by, strict=False)))
        allowed += [
            (np.abs(wide(x)) * getattr(bound, n).bound).sum()
            for n, x in zip(NAMES, by, strict=False)
        ]
    s.near("dq", sums[0], sums[1], *allowed)
