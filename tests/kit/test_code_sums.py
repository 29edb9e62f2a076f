"""The bound of sums of codes on tensor cores, against sums that keep as few bits as it assumes."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash.gpu.kernels import sm90_fp8
from cupyflash.testing import Precision, forward_bound, rho
from cupyflash.testing.code_sums import CODE_DEPTH, code_errors
from cupyflash.testing.precision import CODE_STEPS, CODE_UNIT


def cut(x, unit):
    """Cut off numbers at a unit, a power of two."""
    return np.trunc(x / unit) * unit


def truncated_products(q, k, lost):
    """Multiply q by k, adding 32 products at a time to sums of few bits."""
    sums = np.zeros((len(q), len(k)))
    for begin in range(0, q.shape[1], CODE_DEPTH):
        here = slice(begin, begin + CODE_DEPTH)
        terms = q[:, None, here] * k[None, :, here]
        terms = np.concatenate([terms, sums[..., None]], -1)
        largest = np.abs(terms).max(-1, keepdims=True)
        unit = np.exp2(np.floor(np.log2(np.where(largest > 0, largest, 1)))) * lost
        sums = cut(terms, unit).sum(-1)
        size = np.abs(sums)
        sums = cut(sums, np.exp2(np.floor(np.log2(np.where(size > 0, size, 1)))) * lost)
    return sums


def worst(seed, lost, depth=160):
    """Return the largest ratio of an error to its bound, of drawn rows or of unlucky ones."""
    rng = np.random.default_rng(seed)
    q, k = (
        rng.standard_normal((20, depth)) * 2.0 ** rng.integers(-3, 4, (20, depth)) for _ in "qk"
    )
    if seed % 2:  # large numbers, and many that are just cut off
        q, k = (np.full((20, depth), np.sqrt(2.0**-5.001)) for _ in "qk")
        q[:, 0], k[:, 0] = 16, 2.0 ** rng.integers(-2, 3, 20)
        k[:, 1:] *= rng.random((20, depth - 1))
    error = np.abs(truncated_products(q, k, lost) - q @ k.T)
    return (error / code_errors(q, k, CODE_UNIT)).max()


@pytest.mark.parametrize("seed", range(6))
def test_sums_that_keep_these_bits_are_within_the_bound(seed):
    assert worst(seed, CODE_UNIT) <= 1


def test_sums_that_keep_fewer_bits_are_not():
    assert max(worst(seed, 4 * CODE_UNIT) for seed in range(6)) > 1


def test_tiles_have_no_more_steps_than_the_bound_assumes():
    assert max(keys for _, keys in sm90_fp8.TILES.values()) == CODE_STEPS * CODE_DEPTH


def test_the_bound_does_not_grow_with_the_number_of_keys():
    """A tile's sums are taken up in float32."""
    precision = Precision.of_codes("float32", "codes")
    bounds = []
    for keys in (256, 4096):
        v = np.ones((keys, 1))
        out = forward_bound(np.zeros((1, 4)), np.zeros((keys, 4)), v, precision=precision).out
        bounds.append(float(out.bound[0, 0]))
        assert rho(out.exact, *out).value == 0
    assert bounds[1] < 1.1 * bounds[0] < 0.12
