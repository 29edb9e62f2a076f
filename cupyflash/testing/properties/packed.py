"""Properties of packed sequences: each sequence gives what it gives alone."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cupyflash import masks, scores
from cupyflash.problem.call import Gradients

from ..cases import Problem, problem
from ..judge import expect
from ..subject import Rows, Subject
from .base import a_property, cut_rows
from .forward import forward_within_bound
from .gradients import gradients_within_bound


@a_property("varlen", draws="packed", weight=4)
def packed_within_bound(s: Subject, p: Problem) -> None:
    """|O' - O| <= B_O and |L' - L| <= B_L of packed sequences, whatever the options (tier T1)."""
    forward_within_bound.check(s, p)


@a_property("varlen_backward varlen", draws="packed", weight=4)
def packed_gradients_within_bound(s: Subject, p: Problem) -> None:
    """|dX' - dX| <= B_dX of packed sequences, whatever the options (tier T1)."""
    gradients_within_bound.check(s, p)


@a_property("varlen", draws="packed", families=("normal", "one-hot keys"))
def sequences_apart(s: Subject, p: Problem) -> None:
    """A packed sequence is bitwise what it is alone, with causal, ALiBi, a sink and its bias."""
    assert p.offsets is not None, "packed problems have offsets"
    number, heads = len(p.offsets[0]) - 1, p.q.shape[0]
    rows, keys = (int(np.diff(x).max(initial=0)) for x in p.offsets)
    options: dict[str, Any] = {}
    if "causal" in s.features and p.rng.random() < 0.7:
        options["mask"] = masks.causal()
    if "scores" in s.features and p.rng.random() < 0.7:
        options["score_mod"] = scores.alibi(np.linspace(0.1, 0.5, heads))
    if "sink" in s.features and p.rng.random() < 0.5:
        options["sink"] = np.linspace(-1, 1, heads)
    bias = None
    if "bias" in s.features and p.rng.random() < 0.5:
        bias = p.rng.standard_normal((number, 1, rows, keys)).astype(np.float32)
    whole = options if bias is None else options | {"bias": bias}
    together = s.attend(p.q, p.k, p.v, offsets=p.offsets, **whole)
    gradients = None
    if {"backward", "varlen_backward"} <= s.knows:
        gradients = s.gradients(p.do, p.q, p.k, p.v, offsets=p.offsets, rows=together, **whole)
    for n in range(number):
        at, of = (slice(x[n], x[n + 1]) for x in p.offsets)
        len_q, len_k = at.stop - at.start, of.stop - of.start
        own = options if bias is None else options | {"bias": bias[n, :, :len_q, :len_k]}
        arrays = p.q[:, at], p.k[:, of], p.v[:, of]
        alone = s.attend(*arrays, **own)
        cut = cut_rows(together, slice(None), at)
        s.same_rows(cut, alone, functools.partial(s.bound, *arrays, **own))
        if gradients is None:
            continue
        ours = s.gradients(p.do[:, at], *arrays, rows=alone, **own)
        part = Gradients(gradients.dq[:, at], gradients.dk[:, of], gradients.dv[:, of])
        if bias is not None:
            part = part._replace(dbias=gradients.dbias[n, :, :len_q, :len_k])
            expect(gradients.dbias[n, :, len_q:] == 0, "dbias is not 0 beyond a sequence")
            expect(gradients.dbias[n, :, :, len_k:] == 0, "dbias is not 0 beyond a sequence")
        bound = functools.partial(s.backward_bound, p.do[:, at], *arrays, **own)
        s.same_gradients(part, ours, bound)


@a_property("varlen nonfinite", weight=0.5)
def neighbours_change_nothing(s: Subject, p: Problem) -> None:
    """NaN and infinities in one packed sequence change no bit of the others."""
    lengths = p.rng.integers(1, 20, (2, 3))
    offsets = ([0, *np.cumsum(lengths[0]).tolist()], [0, *np.cumsum(lengths[1]).tolist()])
    heads, shared = p.q.shape[1], p.k.shape[1]
    shapes = [(h, x[-1], p.q.shape[-1]) for h, x in ((heads, offsets[0]), (shared, offsets[1]))]
    own = problem(p.dtype, shapes[0], shapes[1], offsets=offsets, seed=p.seed)
    options: dict[str, Any] = {}
    if "masks" in s.features:
        options["mask"] = masks.window(3, 2)
    value = float(p.rng.choice([np.nan, np.inf, -np.inf]))
    arrays = own.do, own.q, own.k, own.v
    poisoned = [x.copy() for x in arrays]
    for x, n in zip(poisoned, (0, 0, 1, 1), strict=True):
        x[:, offsets[n][1] : offsets[n][2]] = value
    with np.errstate(all="ignore"):
        results = [
            s.attend(*each[1:], offsets=offsets, **options)._asdict() for each in (arrays, poisoned)
        ]
        if "varlen_backward" in s.knows:
            for result, each in zip(results, (arrays, poisoned), strict=True):
                rows = Rows(result["out"], result["lse"])
                made = s.gradients(*each, offsets=offsets, rows=rows, **options)
                result |= {"dq": made.dq, "dk": made.dk, "dv": made.dv}
    for name, x in results[0].items():
        if x is None:
            continue
        place = offsets[1 if name in ("dk", "dv") else 0]
        for part in (slice(0, place[1]), slice(place[2], place[3])):
            a, b = (np.array(result[name][:, part]) for result in results)
            expect(np.array_equal(a, b) and a.size, f"{name} changed with a neighbour's values")
