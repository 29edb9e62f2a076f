"""Properties of NaN and infinities: where they may not reach, not a bit changes.

A mask, a bias of -inf or a score of -inf hides a pair. In kernels that multiply whole tiles (tensor
cores), a value that one row of a tile sees may reach other rows of the tile as 0 * NaN; such
kernels lack the feature "nonfinite".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash import masks, scores
from cupyflash.expr import where
from cupyflash.expr.functions import SCORE

from ..cases import Problem
from ..judge import expect
from ..placement import same_bits
from ..subject import Subject
from .base import Array, a_property

NAMES = ("dq", "dk", "dv")


def _value(p: Problem) -> float:
    return float(p.rng.choice([np.nan, np.inf, -np.inf, 6e4]))


def hidden_by(s: Subject, p: Problem, allowed: Array) -> dict[str, Any]:
    """Draw options that hide the pairs that are not allowed, (..., Lq, Lk)."""
    bias = np.where(allowed, p.rng.standard_normal(allowed.shape), -np.inf).astype(np.float32)
    ways: list[dict[str, Any]] = [{"mask": allowed}]
    if "bias" in s.features:
        ways.append({"bias": bias})
        both = {"mask": allowed, "bias": np.where(allowed, bias, np.nan).astype(np.float32)}
        ways.append(both | ({"dropout": 0.3, "seed": 1} if "dropout" in s.features else {}))
    if "scores" in s.features:
        hide = scores.Score(where(masks.dense(allowed).expr, SCORE, -np.inf))
        ways.append({"score_mod": [scores.softcap(3.0), hide]})
        if "bias" in s.features:
            ways.append({"bias": bias, "score_mod": scores.softcap(3.0)})
    return ways[int(p.rng.integers(len(ways)))]


def _unchanged(name: str, a: Any, b: Any, where_: str) -> None:
    if a is not None:
        expect(same_bits(np.array(a), np.array(b)), f"{name} changed {where_}")


def _results(s: Subject, *arrays: Array, **options: Any) -> dict[str, Any]:
    """Compute everything the kernel knows from (do, q, k, v)."""
    with np.errstate(all="ignore"):
        rows = s.attend(*arrays[1:], **options)
        results: dict[str, Any] = rows._asdict()
        if "backward" in s.knows:
            results |= s.gradients(*arrays, rows=rows, **options)._asdict()
    return {name: x for name, x in results.items() if x is not None}


@a_property("nonfinite masks", weight=2)
def unseen_keys_reach_no_row(s: Subject, p: Problem) -> None:
    """K_j, V_j not finite change no bit of rows that may not see j (pairwise), nor out of reach.

    A key's gradients are out of reach if no row that sees this key also sees a non-finite one.
    """
    heads, keys = p.q.shape[1], p.k.shape[2]
    allowed = p.rng.random((2, heads, p.q.shape[2], keys)) < p.rng.choice([0.2, 0.6])
    bad, value = p.rng.random(keys) < 0.3, _value(p)
    clean = ~(allowed & bad).any(axis=-1)
    options = hidden_by(s, p, allowed)
    before = _results(s, p.do, p.q, p.k, p.v, **options)
    k, v, which = p.k.copy(), p.v.copy(), p.rng.integers(3)
    for n, x in enumerate((k, v)):
        if which in (n, 2):
            x[:, :, bad] = value
    after = _results(s, p.do, p.q, k, v, **options)
    for name in ("out", "lse", "dq"):
        if name in before:
            _unchanged(name, before[name][clean], after[name][clean], "in a row that may not see")
    # Keys that no row sees together with a poisoned key, for any of their query heads.
    seen = (allowed & ~clean[..., None]).any(axis=2)
    unseen = ~seen.reshape(2, p.k.shape[1], -1, keys).any(axis=2)
    for name in ("dk", "dv"):
        if name in before:
            _unchanged(name, before[name][unseen], after[name][unseen], "at a key beyond reach")


@a_property("nonfinite masks")
def keys_that_nobody_sees(s: Subject, p: Problem) -> None:
    """K_j, V_j of a key that no query sees, whatever they hold, change no bit of anything."""
    rows, keys = p.q.shape[2], p.k.shape[2]
    hidden, value = p.rng.random(keys) < 0.4, _value(p)
    options = hidden_by(s, p, np.broadcast_to(~hidden, (rows, keys)))
    before = _results(s, p.do, p.q, p.k, p.v, **options)
    k, v = p.k.copy(), p.v.copy()
    k[:, :, hidden], v[:, :, hidden] = value, value
    after = _results(s, p.do, p.q, k, v, **options)
    for name, x in before.items():
        _unchanged(name, x, after[name], "with a key that nobody sees")


@a_property("nonfinite masks lengths")
def padding_of_either_side(s: Subject, p: Problem) -> None:
    """Padded batches: what lies beyond masks.lengths changes no bit and gets gradients of 0."""
    true_q, true_k = (p.rng.integers(0, n + 1, 2) for n in (p.q.shape[2], p.k.shape[2]))
    mask, value = masks.lengths(true_k, true_q) & masks.causal(offset=true_k - true_q), _value(p)
    before = _results(s, p.do, p.q, p.k, p.v, mask=mask)
    do, q, k, v = (x.copy() for x in (p.do, p.q, p.k, p.v))
    for b in range(2):
        for x, n in ((q, true_q[b]), (do, true_q[b]), (k, true_k[b]), (v, true_k[b])):
            x[b, :, n:] = value
    after = _results(s, do, q, k, v, mask=mask)
    for name, x in before.items():
        _unchanged(name, x, after[name], "with the padding")
    for b in range(2):
        for name, n in (("out", true_q), ("dq", true_q), ("dk", true_k), ("dv", true_k)):
            if name in after:
                expect(after[name][b, :, n[b] :] == 0, f"{name} is not 0 in the padding")


@a_property("nonfinite")
def query_poisons_its_row(s: Subject, p: Problem) -> None:
    """Q_i not finite: other rows' O, L, dQ and the dK, dV of keys unseen by i keep their bits.

    And NaN in Q_i makes O_i, L_i, dQ_i and the dK of the keys that it sees NaN.
    """
    i = int(p.rng.integers(p.q.shape[2]))
    value = float(p.rng.choice([np.nan, np.inf, -np.inf]))
    others = np.arange(p.q.shape[2]) != i
    options: dict[str, Any] = {}
    seen = np.ones(p.k.shape[2], bool)
    if "masks" in s.features and p.rng.random() < 0.5:
        options["mask"] = masks.window(5, 5)
        seen = options["mask"].to_array(1, 1, p.q.shape[2], p.k.shape[2])[0, 0, i]
    before = _results(s, p.do, p.q, p.k, p.v, **options)
    q = p.q.copy()
    q[:, :, i] = value
    after = _results(s, p.do, q, p.k, p.v, **options)
    for name in ("out", "lse", "dq"):
        if name in before:
            _unchanged(name, before[name][:, :, others], after[name][:, :, others], "elsewhere")
            if np.isnan(value) and seen.any():
                expect(np.isnan(after[name][:, :, i]), f"{name} hides a NaN of its query")
    for name in ("dk", "dv"):
        if name in before:
            _unchanged(name, before[name][:, :, ~seen], after[name][:, :, ~seen], "unseen by it")
    if np.isnan(value) and "dk" in after:
        expect(np.isnan(after["dk"][:, :, seen]), "dk hides a NaN of a query")


@a_property("nonfinite backward masks")
def do_poisons_its_row(s: Subject, p: Problem) -> None:
    """dO_i not finite: other rows' dQ and the dK, dV of keys unseen by i keep their bits.

    And NaN in dO_i makes dQ_i and the dV of the keys that it sees NaN.
    """
    i, value = int(p.rng.integers(p.q.shape[2])), float(p.rng.choice([np.nan, np.inf]))
    others, mask = np.arange(p.q.shape[2]) != i, masks.window(4, 4)
    seen = mask.to_array(1, 1, p.q.shape[2], p.k.shape[2])[0, 0, i]
    before = _results(s, p.do, p.q, p.k, p.v, mask=mask)
    do = p.do.copy()
    do[:, :, i] = value
    after = _results(s, do, p.q, p.k, p.v, mask=mask)
    _unchanged("dq", before["dq"][:, :, others], after["dq"][:, :, others], "elsewhere")
    for name in ("dk", "dv"):
        _unchanged(name, before[name][:, :, ~seen], after[name][:, :, ~seen], "unseen by it")
    if seen.any() and np.isnan(value):
        expect(np.isnan(after["dq"][:, :, i]), "dq hides a NaN of dO")
        expect(np.isnan(after["dv"][:, :, seen]), "dv hides a NaN of dO")
