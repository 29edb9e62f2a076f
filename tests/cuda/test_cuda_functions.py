"""Functions of expressions compile by NVRTC for every kernel that computes scores."""

from __future__ import annotations

import cuda_specialisations
import numpy as np
from cuda_specialisations import Case
from cuda_table import compiled
from halves import mostly_thorough

from cupyflash import masks, scores
from cupyflash.expr import cos, erf, exp2, sigmoid, sin, sqrt
from cupyflash.gpu import source

OPTIONS = {
    "short": {
        "mask": masks.mask(lambda b, h, i, j: ((i >> 4) == (j >> 4)) | (sqrt(i) * 2.0 > j)),
        "score_mod": scores.score(
            lambda s, b, h, i, j: s * sigmoid(s) * exp2(-0.125 * abs(i - j)) + (i + 1) ** -0.5
        ),
    },
    "long": {
        "mask": masks.mask(
            lambda b, h, i, j: (((i - j) << (h % 20)) <= 9) ^ (sin(0.1 * j) > cos(0.2 * i))
        ),
        "score_mod": scores.score(
            lambda s, b, h, i, j: s + erf(s) - sqrt(1.0 + s * s) + sin(3.0 * s) * abs(s) ** 1.5
        ),
    },
}
HALF, SINGLE, DOUBLE = (np.dtype(kind) for kind in (np.float16, np.float32, np.float64))
CASES = [
    (Case(kernel, dtype, (64, 64), options, False), arch)
    for options in OPTIONS
    for kernel, dtype, arch in (
        ("forward_simt", SINGLE, "sm_75"),
        ("forward_simt", DOUBLE, "sm_80"),
        ("backward_simt_dkdv", DOUBLE, "sm_80"),
        ("backward_simt_dq", SINGLE, "sm_75"),
        ("forward_sm80", HALF, "sm_80"),
        ("backward_sm80_dkdv", HALF, "sm_80"),
        ("forward_sm90", HALF, "sm_90"),
        ("backward_sm90_dkdv", HALF, "sm_90"),
    )
]
QUICK = [CASES[0], CASES[2], CASES[6]]


@mostly_thorough(
    ("case", "arch"),
    CASES,
    quick=lambda case: any(case is x for x in QUICK),
    why="other kernels with the same generated text",
    ids=lambda x: x if isinstance(x, str) else f"{x.kernel}-{x.dtype}-{x.options}",
)
def test_they_compile(nvrtc, monkeypatch, case, arch):
    monkeypatch.setattr(cuda_specialisations, "OPTIONS", OPTIONS)
    special = cuda_specialisations.specialisation(case, arch)
    assert special.functions.has_score
    log = compiled(source.source(special), special.architecture or arch)
    assert f"'{special.name}'" in log
    assert "C75" not in log, "products that the assembler runs one by one"
