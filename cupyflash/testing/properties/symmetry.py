"""Properties of options and axes: the same attention in two ways, and independent entries."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cupyflash import masks, scores

from ..cases import Problem
from ..judge import expect
from ..options import MASKS, Sizes
from ..subject import Subject
from .base import WIDE, a_property, cut_rows, some_mask


def _sizes(p: Problem) -> Sizes:
    return Sizes((2,), p.q.shape[1], p.q.shape[2], p.k.shape[2], None, p.rng)


@a_property("masks", dtypes=WIDE, weight=2)
def mask_is_its_array(s: Subject, p: Problem) -> None:
    """Any mask, blocks and windows among them, gives bitwise what its boolean array gives."""
    kinds, sizes = list(MASKS), _sizes(p)
    mask = MASKS[kinds[int(p.rng.integers(len(kinds)))]](sizes)
    if p.rng.random() < 0.5:
        other = MASKS[kinds[int(p.rng.integers(len(kinds)))]](sizes)
        mask = mask & ~other if p.rng.random() < 0.5 else mask | other
    array = mask.to_array(2, p.q.shape[1], p.q.shape[2], p.k.shape[2])
    one, other_way = s.attend(p.q, p.k, p.v, mask=mask), s.attend(p.q, p.k, p.v, mask=array)
    s.same_rows(one, other_way, lambda: s.bound(p.q, p.k, p.v, mask=array))
    if "backward" in s.knows:
        arrays = p.do, p.q, p.k, p.v
        a, b = s.gradients(*arrays, mask=mask), s.gradients(*arrays, mask=array)
        s.same_gradients(a, b, lambda: s.backward_bound(*arrays, mask=array))


@a_property("masks")
def causal_is_a_window(s: Subject, p: Problem) -> None:
    """causal() = window(None, 0) = causal(Lk - Lq), and window(None, None) = no mask, bitwise."""
    ours = s.attend(p.q, p.k, p.v, mask=masks.causal())
    offset = p.k.shape[2] - p.q.shape[2]
    for mask in (masks.window(None, 0), masks.causal(offset)):
        other = s.attend(p.q, p.k, p.v, mask=mask)
        s.same_rows(ours, other, lambda: s.bound(p.q, p.k, p.v, mask=masks.causal()))
    unbounded = s.attend(p.q, p.k, p.v, mask=masks.window(None, None))
    s.same_rows(s.attend(p.q, p.k, p.v), unbounded, lambda: s.bound(p.q, p.k, p.v))


@a_property("causal", weight=0.5)
def causal_is_aligned_at_the_end(s: Subject, p: Problem) -> None:
    """Query i sees key j exactly when j <= i + Lk - Lq: O_ij > 0 for Q = 0 and V = 1."""
    rows, keys = p.q.shape[2], p.k.shape[2]
    if "widths" not in s.features:
        keys = min(keys, 33)
        rows = min(rows, keys) if "lengths" in s.features else keys
    v = np.eye(keys, dtype=p.dtype)[None, None]
    width = 8 if "widths" in s.features else keys
    q, k = np.zeros((1, 1, rows, width), p.dtype), np.zeros((1, 1, keys, width), p.dtype)
    out = s.attend(q, k, v, mask=masks.causal()).out[0, 0]
    seen = np.tri(rows, keys, keys - rows, dtype=bool)
    share = 0.5 / keys  # of a key that is seen, at least
    expect((out > share) == seen, "a causal row sees other keys than j <= i + Lk - Lq")
    hidden = np.where(seen, 0, out)
    expect(hidden == 0, f"a hidden key has the weight {float(hidden.max()):.3g}; expected 0")


@a_property("causal", square=True)
def prefix_sees_nothing_behind(s: Subject, p: Problem) -> None:
    """Causal: O(Q, K, V)[:n] = O(Q[:n], K[:n], V[:n]) bitwise, under ALiBi too."""
    n = int(p.rng.integers(1, p.q.shape[2] + 1))
    options: dict[str, Any] = {"mask": masks.causal()}
    if "scores" in s.features:
        options["score_mod"] = scores.alibi(np.full(p.q.shape[1], 0.1))
    whole = s.attend(p.q, p.k, p.v, **options)
    arrays = p.q[:, :, :n], p.k[:, :, :n], p.v[:, :, :n]
    first = s.attend(*arrays, **options)
    cut = cut_rows(whole, slice(None), slice(None), slice(n))
    s.same_rows(cut, first, lambda: s.bound(*arrays, **options))


@a_property("gqa", group=3)
def shared_heads_are_repeated(s: Subject, p: Problem) -> None:
    """O(Q, K, V) = O(Q, repeat(K), repeat(V)) bitwise, query head h reading key head h // group."""
    repeated = [np.repeat(x, 3, axis=1) for x in (p.k, p.v)]
    options: dict[str, Any] = some_mask(s, p)
    if "scores" in s.features:
        options["score_mod"] = scores.alibi(np.linspace(0, 1, p.q.shape[1]))
    ours, others = s.attend(p.q, p.k, p.v, **options), s.attend(p.q, *repeated, **options)
    s.same_rows(ours, others, lambda: s.bound(p.q, p.k, p.v, **options))


@a_property("broadcast")
def broadcast_axes_are_repeated(s: Subject, p: Problem) -> None:
    """Leading axes broadcast as by numpy.matmul: the same bits as from repeated arrays."""
    shared = s.attend(p.q, p.k[0], p.v[:1])
    repeated = [np.stack([x[0], x[0]]) for x in (p.k, p.v)]
    s.same_rows(shared, s.attend(p.q, *repeated), lambda: s.bound(p.q, *repeated))


@a_property("masks bias scores nonfinite")
def batch_entries_apart(s: Subject, p: Problem) -> None:
    """O(Q, K, V)[0] = O(Q[0], K[0], V[0]) bitwise, whatever the other entries hold, NaN too."""
    shape = (2, p.q.shape[1], p.q.shape[2], p.k.shape[2])
    options: dict[str, Any] = {}
    if p.rng.random() < 0.5:
        options = {
            "bias": p.rng.standard_normal(shape).astype(np.float32),
            "mask": p.rng.random(shape) < 0.8,
            "score_mod": scores.softcap(2.0),
        }
    q, k, v = p.q.copy(), p.k.copy(), p.v.copy()
    if p.rng.random() < 0.5:
        for x in (q, k, v):
            x[1].flat[:: max(x[1].size // 3, 1)] = np.nan
    together = s.attend(q, k, v, **options)
    own = {name: x[:1] if isinstance(x, np.ndarray) else x for name, x in options.items()}
    alone = s.attend(q[:1], k[:1], v[:1], **own)
    s.same_rows(cut_rows(together, slice(1)), alone, lambda: s.bound(q[:1], k[:1], v[:1], **own))


@a_property(group=1)
def entries_and_heads_apart(s: Subject, p: Problem) -> None:
    """O(Q, K, V)[b, h] = O(Q[b, h], K[b, h], V[b, h]) bitwise, for any number of either."""
    options = some_mask(s, p)
    together = s.attend(p.q, p.k, p.v, **options)
    for h in range(p.q.shape[1]):
        arrays = [x[1:, h : h + 1] for x in (p.q, p.k, p.v)]
        cut = cut_rows(together, slice(1, None), slice(h, h + 1))
        alone = s.attend(*arrays, **options)
        s.same_rows(cut, alone, functools.partial(s.bound, *arrays, **options))


@a_property()
def idle_options(s: Subject, p: Problem) -> None:
    """No changes, dropout 0: not a bit changes. A bias of 0, slopes of 0, the score s: the same."""
    options = some_mask(s, p)
    ours, bound = s.attend(p.q, p.k, p.v, **options), s.bound(p.q, p.k, p.v, **options)
    idle: list[dict[str, Any]] = []
    if "scores" in s.features:
        idle.append({"score_mod": []})
    if "dropout" in s.features:
        idle.append({"dropout": 0.0, "seed": 4})
    for option in idle:
        s.same_rows(ours, s.attend(p.q, p.k, p.v, **option, **options), lambda: bound)
    # This is separate code, which may scale and subtract in another order.
    idle = []
    if "bias" in s.features:
        idle.append({"bias": np.zeros((), np.float16)})
    if "scores" in s.features:
        idle.append({"score_mod": scores.score(lambda s, b, h, i, j: s)})
        idle.append({"score_mod": scores.alibi(np.zeros(p.q.shape[1]))})
    for option in idle:
        theirs = s.attend(p.q, p.k, p.v, **option, **options)
        s.near("out", ours.out, theirs.out, bound.out.bound, bound.out.bound)
        if ours.lse is not None:
            s.near("lse", ours.lse, theirs.lse, bound.lse.bound, bound.lse.bound)


@a_property("scores", weight=0.5)
def softcap_far_away(s: Subject, p: Problem) -> None:
    """softcap(c) for c = 2**30 is no softcap within the bounds: |s|**3 / (3 c**2) < 1e-15."""
    far = scores.softcap(2.0**30)
    ours, plainly = s.attend(p.q, p.k, p.v, score_mod=far), s.attend(p.q, p.k, p.v)
    bounds = [s.bound(p.q, p.k, p.v, score_mod=far), s.bound(p.q, p.k, p.v)]
    slack = 1e-14
    s.near("out", ours.out, plainly.out, *(b.out.bound for b in bounds), slack)
    if ours.lse is not None:
        s.near("lse", ours.lse, plainly.lse, *(b.lse.bound for b in bounds), slack)


@a_property("scores bias")
def score_is_a_bias(s: Subject, p: Problem) -> None:
    """relative_bias(table) = the bias of the same numbers, bitwise."""
    rows, keys = p.q.shape[2], p.k.shape[2]
    table = p.rng.standard_normal((p.q.shape[1], 2 * keys + 1)).astype(np.float32)
    i, j = np.ogrid[:rows, :keys]
    bias = table[:, np.clip(j - i - (keys - rows), -keys, keys) + keys]
    by_score = s.attend(p.q, p.k, p.v, score_mod=scores.relative_bias(table))
    by_bias = s.attend(p.q, p.k, p.v, bias=bias)
    s.same_rows(by_score, by_bias, lambda: s.bound(p.q, p.k, p.v, bias=bias))


@a_property("masks", weight=0.5)
def rows_that_see_nothing(s: Subject, p: Problem) -> None:
    """A row without keys has O = 0 and L = -inf, or L = sink: by a mask or by a bias of -inf.

    Of a kernel whose `empty_rows` say something else, O is that.
    """
    n = p.q.shape[2]
    empty = p.rng.random(n) < 0.5
    allowed = np.broadcast_to(~empty[:, None], (n, p.k.shape[2]))
    sink = p.rng.standard_normal(p.q.shape[1]).astype(np.float32)
    ways: list[dict[str, Any]] = [{"mask": allowed}]
    if "bias" in s.features:
        ways.append({"bias": np.where(allowed, 0, -np.inf).astype(np.float32)})
    for hidden in ways:
        ours = s.attend_as_is(p.q, p.k, p.v, **hidden)
        _judge_empty(s, p, ours.out, np.broadcast_to(empty, ours.out.shape[:-1]))
        if ours.lse is not None:
            if s.empty_rows == "zero":
                expect(np.isneginf(ours.lse[:, :, empty]), "L is not -inf in a row without keys")
            expect(np.isfinite(ours.lse[:, :, ~empty]), "L is infinite in a row with keys")
        if "sink" not in s.features:
            continue
        ours = s.attend(p.q, p.k, p.v, sink=sink, **hidden)
        expect(ours.out[:, :, empty] == 0, "O is not 0 in a row with a sink alone")
        if ours.lse is not None:
            bound = s.bound(p.q, p.k, p.v, sink=sink, **hidden)
            rows, limit = ours.lse[:, :, empty], bound.lse.bound[:, :, empty]
            s.near("lse", rows, np.broadcast_to(sink[:, None], rows.shape), limit)


def _judge_empty(s: Subject, p: Problem, out: Any, empty: Any) -> None:
    """Expect in rows without keys what the kernel says that it gives there."""
    if s.empty_rows == "zero":
        expect((out == 0) | ~empty[..., None], "O is not 0 in a row without keys")
    elif s.empty_rows == "nan":
        expect(np.isnan(out) | ~empty[..., None], "O is not NaN in a row without keys")
    elif s.empty_rows == "mean":
        mean = s.bound(0 * p.q, p.k, p.v).out
        s.near("out", out[empty], mean.exact[empty], mean.bound[empty])


@a_property("empty lengths", weight=0.2)
def empty_axes(s: Subject, p: Problem) -> None:
    """No keys: O = 0 and L = -inf; no queries, heads or batch: results of no elements."""
    none = s.attend(p.q, p.k[:, :, :0], p.v[:, :, :0])
    expect(none.out == 0, "O is not 0 without keys")
    if none.lse is not None:
        expect(np.isneginf(none.lse), "L is not -inf without keys")
    s.attend(p.q[:, :, :0], p.k, p.v)
    s.attend(p.q[:0], p.k[:0], p.v[:0])
    s.attend(p.q[:, :0], p.k[:, :0], p.v[:, :0])
    if "backward" in s.knows:
        ours = s.gradients(p.do, p.q, p.k[:, :, :0], p.v[:, :, :0])
        expect(ours.dq == 0, "dQ is not 0 without keys")
        ours = s.gradients(p.do[:, :, :0], p.q[:, :, :0], p.k, p.v)
        expect((ours.dk == 0).all() and (ours.dv == 0).all(), "dK or dV is not 0 without queries")
