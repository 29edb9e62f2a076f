"""The forward by warpgroups, on the CPU: score changes, bias and dropout."""

from __future__ import annotations

import numpy as np
import pytest
from emulator.machine import FORWARD, randomly
from halves import mostly_thorough
from placement import same_bits
from warpgroup_calls import EACH_TYPE, TYPES, draw, emulated, run, within_the_bound

from cupyflash import lookup, masks, scores
from cupyflash.expr import tanh
from cupyflash.reference.cpu import philox

SLOPES = np.array([0.5, 0.03], np.float32)
(BIAS,) = draw(np.dtype(np.float32), (2, 1, 300), seed=3)
BIAS[1, 0, 100:140] = -np.inf
OPTIONS = {
    "softcap": {"score_mod": scores.softcap(2.0)},
    "alibi": {"score_mod": scores.alibi(SLOPES), "mask": masks.causal()},
    "bias": {"bias": BIAS},
    "its own": {
        "score_mod": scores.score(
            lambda s, b, h, i, j: 2.0 * tanh(s) - lookup(SLOPES)[h] * abs(i - j)
        ),
        "mask": masks.mask(lambda b, h, i, j: (i + j) % 3 > 0),
    },
}


@emulated
@mostly_thorough(
    ("name", "d"),
    [
        ("softcap", 64),
        ("softcap", 256),
        ("alibi", 40),
        ("alibi", 192),
        ("bias", 64),
        ("bias", 256),
        ("its own", 104),
    ],
    quick=[("softcap", 64), ("bias", 64)],
    why="the same changes in other tiles",
)
def test_changed_scores(name, d):
    dtype = TYPES[d // 8 % 2]
    q, k, v = draw(dtype, (2, 140, d), *[(1, 300, d)] * 2)
    options = OPTIONS[name] | {"sink": np.array([0.5, -np.inf], np.float32)}
    out, lse, _ = run(q, k, v, randomly(1), **options)
    within_the_bound(q, k, v, out, lse, **options)


@pytest.mark.thorough("values behind a mask are quick, and a bias with -inf")
@emulated
@EACH_TYPE
def test_values_of_keys_that_a_score_leaves_out(dtype):
    q, k, v = draw(dtype, (2, 70, 64), *[(2, 300, 64)] * 2)
    plain, lse, _ = run(q, k, v, bias=BIAS)
    v[1, 120, 5], v[0, 120, 6], k[1, 130, 7] = np.nan, -np.inf, np.nan
    other, other_lse, _ = run(q, k, v, FORWARD, bias=BIAS)
    assert same_bits(lse, other_lse)
    assert same_bits(plain[1], other[1])
    elsewhere = np.arange(64) != 6
    assert same_bits(plain[0][:, elsewhere], other[0][:, elsewhere])
    assert (other[0, :, 6].astype(np.float32) == -np.inf).all()


@emulated
@EACH_TYPE
@mostly_thorough(
    "options",
    [{}, {"mask": masks.causal(300)}],
    quick=lambda options: bool(options),
    why="with a mask, tiles without one are dropped from, too",
    ids=["plain", "masked"],
)
def test_dropped_pairs_are_those_of_the_twin(dtype, options):
    size, seed, p = 256, 2**63 + 12345, 0.37
    q = np.zeros((2, 1, size, 8), dtype)
    v = np.broadcast_to(np.eye(size, dtype=dtype), (2, 1, size, size))
    kept = philox.keep(
        seed, p, np.arange(2).reshape(2, 1, 1, 1), np.arange(size)[:, None], np.arange(size)
    )
    out, *_ = run(q, q, v, randomly(1), dropout=p, seed=seed, **options)
    np.testing.assert_array_equal(out != 0, kept)


@pytest.mark.thorough("each of them is quick alone")
@emulated
@pytest.mark.parametrize("d", [64, 128])
def test_everything_together(d):
    q, k, v = draw(TYPES[0], (2, 2, 250, d), *[(2, 1, 300, d)] * 2)
    options = OPTIONS["its own"] | {"bias": BIAS, "dropout": 0.3, "seed": 7, "scale": -0.2}
    out, lse, _ = run(q, k, v, **options)
    within_the_bound(q, k, v, out, lse, **options)
