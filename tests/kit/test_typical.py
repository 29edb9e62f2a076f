"""The second tier finds faults that stay within the bound, and none in honest kernels."""

import ml_dtypes
import numpy as np
import pytest
from halves import mostly_thorough

import cupyflash
from cupyflash.testing import Precision, Rounding, forward_bound, rho
from cupyflash.testing.simulated import rounded, stored
from cupyflash.testing.typical import draw, typical_errors

SMALL = {"keys": 32, "factor": 4.0}


def kernel(given, weights=lambda x: x, operands=lambda x: x, epsilon=0.0, factor=1.0):
    """Attention and its gradients in float32, one head after another, as one writes it in NumPy."""
    dtype, f32 = given.q.dtype, np.float32
    q, k, v, do = (operands(x.astype(f32)) for x in (given.q, given.k, given.v, given.do))
    scale = f32(given.scale)
    s = q @ k.swapaxes(-1, -2) * scale
    m = s.max(axis=-1, keepdims=True)
    p = np.exp(s - m)
    row = p.sum(axis=-1, keepdims=True) + f32(epsilon)
    out = (weights(p) @ v / row * f32(factor)).astype(dtype)
    lse = (m + np.log(row))[..., 0]
    p = weights(np.exp(s - lse[..., None]))
    delta = (do * out.astype(f32)).sum(axis=-1, keepdims=True)
    ds = p * (do @ v.swapaxes(-1, -2) - delta)
    dq = weights(ds) @ k * scale * f32(factor)
    dk = weights(ds).swapaxes(-1, -2) @ q * scale * f32(factor)
    dv = p.swapaxes(-1, -2) @ do * f32(factor)
    return {"out": out, "lse": lse, "dq": dq.astype(dtype), "dk": dk.astype(dtype),
            "dv": dv.astype(dtype)}  # fmt: skip


def problems(given, got, precision=None):
    found = typical_errors(given, got, precision or Precision.of(given.q.dtype))
    return {each.output for each in found if each.problem}


def within_the_bound(given, got):
    precision = Precision.of(given.q.dtype, tensor_cores=given.q.dtype.itemsize == 2)
    right = forward_bound(*given[:3], precision=precision)
    return rho(got["out"], *right.out).value <= 1


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32"])
@pytest.mark.parametrize("size", [{}, SMALL], ids=["many keys", "few keys"])
def test_nothing_is_found_in_an_honest_kernel(dtype, size):
    given = draw(dtype, np.random.default_rng(3), **size)
    found = typical_errors(given, kernel(given), Precision.of(given.q.dtype))
    assert [x.output for x in found] == ["out", "lse", "dq", "dk", "dv"]
    assert all(not x.problem for x in found)
    assert all(abs(x.shift) < 0.7 * x.most_shift for x in found)


FAULTS = {
    "TF32": ("float32", {"keys": 2048, "width": 64, "rows": 4, "heads": 16},
             {"operands": lambda x: rounded(x.astype(float), 2.0**-11).astype(np.float32)}),
    "times 1.0001": ("float32", {}, {"factor": 1.0001}),
    "times 1.0001, float16": ("float16", {}, {"factor": 1.0001}),
    "times 1.0001, bfloat16": (ml_dtypes.bfloat16, {}, {"factor": 1.0001}),
    "bfloat16 weights": ("float16", {"keys": 2048, "width": 64, "rows": 4, "heads": 16},
                         {"weights": lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32)}),
    "epsilon": ("float32", SMALL, {"epsilon": 1e-6}),
}  # fmt: skip


@mostly_thorough(
    "fault", list(FAULTS), quick=["TF32", "times 1.0001", "epsilon"],
    why="faults that are found by each of the two tests",
)  # fmt: skip
def test_a_fault_within_the_bound_is_found(fault):
    dtype, size, wrong = FAULTS[fault]
    given = draw(dtype, np.random.default_rng(4), **size)
    got = kernel(given, **wrong)
    assert within_the_bound(given, got)
    precision = Precision.of(given.q.dtype, tensor_cores=fault == "bfloat16 weights")
    assert "out" in problems(given, got, precision)
    assert problems(given, kernel(given), precision) == set()


def test_every_output_is_judged_by_itself():
    given = draw("float32", np.random.default_rng(5), rows=16, bias=True, sink=True)
    right = _by_the_package(given)
    assert problems(given, right) == set()
    for name, x in right.items():
        assert problems(given, right | {name: x * np.float32(1.001)}) == {name}


def _by_the_package(given):
    options = {"bias": given.bias[None], "sink": given.sink}
    q, k, v, do = (x[None] for x in given[:4])
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    made = cupyflash.attention_backward(do, q, k, v, out, lse, **options)
    return {"out": out[0], "lse": lse[0], "dq": made.dq[0], "dk": made.dk[0], "dv": made.dv[0],
            "dbias": made.dbias[0], "dsink": made.dsink}  # fmt: skip


def test_rounding_is_that_of_the_types():
    x = np.random.default_rng(6).standard_normal(1000) * 2.0 ** np.arange(-500, 500)
    x = np.where(np.abs(x) < 2.0**120, x, 1.0)
    normal = np.where(np.abs(x) > 2.0**-120, x, 1.0)
    assert (rounded(normal, 2.0**-24) == normal.astype(np.float32)).all()
    assert (np.abs(rounded(normal, 2.0**-24, truncates=True)) <= np.abs(normal)).all()
    halves = np.clip(x, -60000, 60000)
    assert (stored(halves, Rounding.to("float16")) == halves.astype(np.float16)).all()
