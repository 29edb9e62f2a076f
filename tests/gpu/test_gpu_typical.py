"""Errors of the GPU's kernels over long rows are those of the stated arithmetic, all together."""

from __future__ import annotations

import numpy as np
import pytest

import cupyflash
from cupyflash.commands.verify import precision_of
from cupyflash.testing import Subject
from cupyflash.testing.options import float_type
from cupyflash.testing.typical import draw, typical_errors
from cupyflash.testing.verification import memory_of

pytestmark = pytest.mark.gpu
SIZES = {
    "512": {"rows": 128, "keys": 512, "width": 64},
    "2048": {"rows": 128, "keys": 2048, "width": 128},
    "1024 wide": {"rows": 128, "keys": 1024, "width": 256},
    "few keys": {"rows": 128, "keys": 32, "width": 128, "factor": 4.0},
}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("size", SIZES)
def test_errors_are_typical(dtype, size):
    judge("gpu", dtype, size)


def judge(device, dtype, size):
    more = {"rows": 16, "width": 32} if dtype == "float64" else {}  # long double has no BLAS
    given = draw(float_type(dtype), np.random.default_rng(1), sink=True, **(SIZES[size] | more))
    subject = Subject(
        cupyflash.attention, cupyflash.attention_backward, memory=memory_of(device),
        precision=precision_of(device),
    )  # fmt: skip
    q, k, v, do = (x[None] for x in given[:4])
    rows = subject.attend(q, k, v, sink=given.sink)
    made = subject.gradients(do, q, k, v, rows=rows, sink=given.sink)
    got = {"out": rows.out[0], "lse": rows.lse[0], "dq": made.dq[0], "dk": made.dk[0],
           "dv": made.dv[0], "dsink": made.dsink}  # fmt: skip
    found = typical_errors(given, got, subject.precision(given.q.dtype))
    assert [x.problem for x in found if x.problem] == []
