"""Derivatives in float64 are complex steps of formulas that share no code with the package.

The imaginary part of f(x + i h t) / h is the derivative of f along t, without a difference that
would lose digits. So tangents and second derivatives, and the exact values of their bounds, are
compared with formulas of results and of gradients, of which they are the derivatives.
"""

from __future__ import annotations

import numpy as np
import pytest

import cupyflash
from cupyflash import masks, scores
from cupyflash.testing import Directions, Precision, jvp_bound, second_bound

STEP, CAP = 1e-30, 2.0
SHAPES = {"q": (2, 4, 5, 3), "k": (2, 2, 6, 3), "v": (1, 2, 6, 4), "bias": (4, 1, 6), "sink": (4,)}
NAMES = tuple(SHAPES)
MASK = masks.causal(offset=-1)  # the first query sees nothing
OPTIONS = {"mask": MASK, "score_mod": scores.softcap(CAP)}


def drawn(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}


def parts(x):
    """Return P, that of the sink, O, LSE and the slope of the cap, for complex numbers, too."""
    q, k, v = x["q"], *(np.repeat(x[name], 2, axis=1) for name in "kv")
    capped = np.tanh(q @ k.swapaxes(-1, -2) / np.sqrt(3) / CAP)
    t = CAP * capped + x["bias"]
    seen = np.tri(5, 6, -1, dtype=bool)
    sink = x["sink"][:, None, None]
    most = np.maximum(np.where(seen, t.real, -np.inf).max(-1, keepdims=True), sink.real)
    e = np.where(seen, np.exp(np.where(seen, t, most) - most), 0)
    of_sink = np.exp(sink - most)
    total = e.sum(-1, keepdims=True) + of_sink
    return e / total, of_sink / total, e @ v / total, (most + np.log(total))[..., 0], 1 - capped**2


def results(x):
    return parts(x)[2:4]


def summed(x, shape):
    """Return an array, summed over heads that share and over axes that were broadcast."""
    if len(shape) == 4 and x.shape[1] != shape[1]:
        x = x.reshape(x.shape[0], shape[1], -1, *x.shape[2:]).sum(2)
    x = x.sum(tuple(range(x.ndim - len(shape))))
    axes = tuple(n for n, (a, b) in enumerate(zip(x.shape, shape, strict=True)) if a != b)
    return x.sum(axes, keepdims=True)


def gradients(x, do, dlse):
    p, p_sink, out, _, slope = parts(x)
    k, v = (np.repeat(x[name], 2, axis=1) for name in "kv")
    delta = (do * out).sum(-1, keepdims=True) - dlse[..., None]
    dt = p * (do @ v.swapaxes(-1, -2) - delta)
    ds = slope * dt / np.sqrt(3)
    made = ds @ k, ds.swapaxes(-1, -2) @ x["q"], p.swapaxes(-1, -2) @ do, dt
    made = [summed(a, SHAPES[name]) for a, name in zip(made, NAMES, strict=False)]
    return [*made, (-p_sink * delta).sum((0, 2, 3))]


def along(function, x, t, names=NAMES):
    moved = {n: x[n] + 1j * STEP * t[n] if n in names else x[n].astype(complex) for n in x}
    return [np.imag(made) / STEP for made in function(moved)]


def close(ours, wanted):
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-13 * max(1, np.abs(wanted).max()))


@pytest.mark.parametrize("names", [NAMES, ("k",), ("v", "sink")])
def test_tangents(names):
    x, t = drawn(0), drawn(1)
    wanted = along(results, x, t, names)
    moves = {"t" + name: t[name] for name in names}
    more = {"bias": x["bias"], "sink": x["sink"], **OPTIONS}
    out, tout, lse, tlse = cupyflash.attention_jvp(
        x["q"], x["k"], x["v"], **moves, **more, return_lse=True
    )
    for ours, right in zip((out, lse, tout, tlse), (*results(x), *wanted), strict=True):
        close(ours, right)
    direction = Directions(*(t[name] if name in names else None for name in NAMES))
    bound = jvp_bound(x["q"], x["k"], x["v"], direction, precision=Precision.of("float64"), **more)
    close(bound.tout.exact.astype(float), wanted[0])
    close(bound.tlse.exact.astype(float), wanted[1])


@pytest.mark.parametrize("names", [NAMES, ("q",), ("bias", "sink")])
def test_second_derivatives(names):
    x, t, rows = drawn(0), drawn(1), np.random.default_rng(2)
    do, dlse = rows.standard_normal((2, 4, 5, 4)), rows.standard_normal((2, 4, 5))
    tdo, tdlse = rows.standard_normal(do.shape), rows.standard_normal(dlse.shape)

    def of(moved):
        of_rows = do + 1j * STEP * tdo, dlse + 1j * STEP * tdlse
        return gradients(moved, *of_rows)

    wanted = along(of, x, t, names)
    more = {"bias": x["bias"], "sink": x["sink"], **OPTIONS}
    arrays = x["q"], x["k"], x["v"]
    out, lse = cupyflash.attention(*arrays, return_lse=True, **more)
    moves = {"t" + name: t[name] for name in names}
    how = {"dlse": dlse, "tdo": tdo, "tdlse": tdlse, **more}
    second = cupyflash.attention_backward_jvp(do, *arrays, out, lse, **moves, **how)
    for ours, right in zip(second.gradients, wanted, strict=True):
        close(ours, right)
    for ours, right in zip(second[1:], along(results, x, t, names), strict=True):
        close(ours, right)
    direction = Directions(*(t[name] if name in names else None for name in NAMES))
    bound = second_bound(do, *arrays, direction, precision=Precision.of("float64"), **how)
    for name, right in zip(("dq", "dk", "dv", "dbias", "dsink"), wanted, strict=True):
        close(getattr(bound, name).exact.astype(float), right)
