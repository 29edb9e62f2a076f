"""Functions of the CPU kernels, against NumPy's in a longer type, and their ends."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from cupyflash.expr.rounding import FUNCTION_ULPS
from cupyflash.expr.special import erf as numpys_erf
from cupyflash.expr.special import sigmoid as numpys_sigmoid
from cupyflash.reference.cpu.elementary import exp, power_of_2, sigmoid, tanh
from cupyflash.reference.cpu.jit import FASTMATH
from cupyflash.reference.cpu.waves import FAR, cos, erf, sin

ENDS = {np.float32: (-104.5, 89.5), np.float64: (-746.0, 710.5)}


def compiled(function):
    @numba.njit(fastmath=FASTMATH, error_model="numpy")
    def every(x, out):
        for n in range(x.size):
            out[n] = function(x[n])

    return every


# What is exact, where it is tried, and units in the last place, as measured.
CASES = {
    "exp": (compiled(exp), np.exp, None, 1.1),
    "exp2": (compiled(power_of_2), np.exp2, {32: (-151, 129), 64: (-1076, 1025)}, 1.1),
    "tanh": (compiled(tanh), np.tanh, None, 2.6),
    "sigmoid": (compiled(sigmoid), numpys_sigmoid, {32: (-87, 87), 64: (-708, 708)}, 2.6),
    "erf": (compiled(erf), numpys_erf, {32: (-5, 5), 64: (-7, 7)}, 1.5),
    "sin": (compiled(sin), np.sin, {32: (-FAR, FAR), 64: (-FAR, FAR)}, 2.3),
    "cos": (compiled(cos), np.cos, {32: (-FAR, FAR), 64: (-FAR, FAR)}, 2.3),
}


@pytest.mark.parametrize("dtype", ENDS)
@pytest.mark.parametrize("name", CASES)
def test_units_in_the_last_place(name, dtype):
    compiled, exactly, ends, ulps = CASES[name]
    rng = np.random.default_rng(0)
    low, high = ENDS[dtype] if ends is None else ends[8 * np.dtype(dtype).itemsize]
    widths = (1e-30, 1e-3, 0.4, 1.0, 5.0, 25.0)
    parts = [rng.uniform(-width, width, 20_000) for width in widths]
    x = np.concatenate([*parts, rng.uniform(low, high, 100_000)])
    # Where sin or cos is nearly 0, and next to where erf changes its formula.
    quarters = np.arange(-20_000, 20_000) * (np.pi / 2)
    x = np.concatenate([x, quarters, np.linspace(0.999, 1.001, 5000)]).astype(dtype)
    x = x[(x >= low) & (x <= high)]
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
@pytest.mark.parametrize("name", CASES)
def test_ends_and_signs(name, dtype):
    compiled, exactly = CASES[name][:2]
    tiny = np.finfo(dtype).smallest_subnormal
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, tiny, -tiny, 1e30, -1e30], dtype)
    out = np.empty_like(x)
    compiled(x, out)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        exact = exactly(x)
    near = np.abs(x) <= FAR if name in ("sin", "cos") else x == x
    out, exact = np.where(near, out, 0), np.where(near, exact, 0)
    assert np.array_equal(out, exact, equal_nan=True)
    assert np.array_equal(np.signbit(out[:4]), np.signbit(exact[:4]))
