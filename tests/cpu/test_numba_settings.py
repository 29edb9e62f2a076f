"""Numba's settings are for a user's own functions: kernels are compiled with any of them."""

from __future__ import annotations

import pytest
from halves import mostly_thorough
from test_cache import CALL, run

SETTINGS = {
    "NUMBA_DISABLE_JIT": "1",
    "NUMBA_BOUNDSCHECK": "1",
    "NUMBA_DEBUGINFO": "1",
    "NUMBA_OPT": "0",
    "NUMBA_CPU_NAME": "generic",
    "NUMBA_CAPTURED_ERRORS": "old_style",
    "NUMBA_ENABLE_PROFILING": "1",
    "NUMBA_EXTEND_VARIABLE_LIFETIMES": "1",
    "NUMBA_SLP_VECTORIZE": "1",
    "NUMBA_JIT_COVERAGE": "1",
}
EVERYTHING = """
import numpy as np
import cupyflash
from cupyflash import masks, scores, testing

q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 40, 20), np.float32)
options = {"mask": masks.mask(lambda b, h, i, j: (i + j) % 3 > 0), "score_mod": scores.softcap(3.0)}
options |= {"dropout": 0.2, "seed": 3}
out, lse, vjp = cupyflash.attention_vjp(q, k, v, return_lse=True, **options)
bound = testing.forward_bound(q, k, v, precision=testing.Precision.of("float32"), **options)
assert testing.rho(out, *bound.out).value <= 1
assert testing.rho(lse, *bound.lse).value <= 1
assert np.isfinite(vjp(out).dq).all()
assert np.isfinite(cupyflash.attention_cached(q[:, :, :1], k, v, 40)).all()
cupyflash.hadamard(cupyflash.combine([(out, lse)] * 2)[0], 1)
print(cupyflash.quantize(k, "int8")[0].shape[-1])
"""


@mostly_thorough(
    "name", SETTINGS, quick=["NUMBA_DISABLE_JIT"], why="others change less of what njit returns"
)
def test_a_kernel_is_compiled_and_kept(tmp_path, name):
    program = CALL + "call()\nimport numba\nprint(callable(numba.njit(abs_of)), Count.compiled)\n"
    program = "def abs_of(x):\n    return abs(x)\n" + program
    environment = {name: SETTINGS[name], "CUPYFLASH_CACHE_DIR": str(tmp_path / "cache")}
    assert run(program, tmp_path, **environment).compiled >= 1
    if name == "NUMBA_OPT":  # code as it is holds addresses of its process
        return
    again = run(program, tmp_path, **environment)
    assert (again.compiled, again.warned) == (0, "")


def test_a_users_own_functions_are_not_compiled(tmp_path):
    program = CALL + (
        "call()\nimport numba\nf = lambda x: x\nassert numba.njit(f) is f\nprint(Count.compiled)\n"
    )
    environment = {"NUMBA_DISABLE_JIT": "1", "CUPYFLASH_CACHE_DIR": str(tmp_path / "cache")}
    assert run(program, tmp_path, **environment).compiled >= 1


@pytest.mark.thorough("compiles all kernels with each setting")
@pytest.mark.parametrize("name", SETTINGS)
def test_results_are_right(tmp_path, name):
    environment = {name: SETTINGS[name], "CUPYFLASH_CACHE_DIR": str(tmp_path / "cache")}
    assert run(EVERYTHING, tmp_path, **environment).compiled == 20
