"""exp and tanh of the CPU kernels, against NumPy's in a longer type, and their ends."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from cupyflash.expr.rounding import FUNCTION_ULPS
from cupyflash.reference.cpu.elementary import exp, tanh
from cupyflash.reference.cpu.jit import FASTMATH

ENDS = {np.float32: (-104.5, 89.5), np.float64: (-746.0, 710.5)}


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def exps(x, out):
    for n in range(x.size):
        out[n] = exp(x[n])


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def tanhs(x, out):
    for n in range(x.size):
        out[n] = tanh(x[n])


CASES = [(exps, np.exp, 1.1), (tanhs, np.tanh, 2.6)]  # units in the last place, as measured


@pytest.mark.parametrize("dtype", ENDS)
@pytest.mark.parametrize(("compiled", "exactly", "ulps"), CASES)
def test_units_in_the_last_place(compiled, exactly, ulps, dtype):
    rng = np.random.default_rng(0)
    low, high = ENDS[dtype]
    widths = (1e-30, 1e-3, 0.4, 1.0, 5.0, 25.0)
    parts = [rng.uniform(-width, width, 20_000) for width in widths]
    x = np.concatenate([*parts, rng.uniform(low, high, 100_000)]).astype(dtype)
    out = np.empty_like(x)
    compiled(x, out)
    with np.errstate(over="ignore", under="ignore"):
        exact = exactly(x.astype(np.longdouble))
        unit = np.spacing(np.abs(exact).astype(dtype)).astype(np.longdouble)
        finite = np.isfinite(unit)
        error = np.abs(out.astype(np.longdouble) - exact)[finite] / unit[finite]
    assert np.array_equal(np.isinf(out), ~finite)
    if np.finfo(np.longdouble).nmant > np.finfo(dtype).nmant:
        assert error.max() <= ulps < FUNCTION_ULPS
    assert error.max() <= FUNCTION_ULPS


@pytest.mark.parametrize("dtype", ENDS)
@pytest.mark.parametrize(("compiled", "exactly", "ulps"), CASES)
def test_ends_and_signs(compiled, exactly, ulps, dtype):
    tiny = np.finfo(dtype).smallest_subnormal
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, tiny, -tiny, 1e30, -1e30], dtype)
    out = np.empty_like(x)
    compiled(x, out)
    with np.errstate(over="ignore", under="ignore"):
        exact = exactly(x)
    assert np.array_equal(out, exact, equal_nan=True)
    assert np.array_equal(np.signbit(out[:4]), np.signbit(exact[:4]))
