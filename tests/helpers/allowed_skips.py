"""Which tests may be skipped in CI, and why. Any other skip fails the run (see conftest.py).

A library that a step of `.ci/run` leaves out is named by the variable `CUPYFLASH_TEST_WITHOUT`,
such as "jax"; another step has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

WITHOUT = "CUPYFLASH_TEST_WITHOUT"
# What the reason of a skip says -> why that is fine where no GPU is.
ALLOWED = {
    r"CuPy is not installed|CuPy finds no usable NVIDIA GPU": "CI has no GPU",
    r"needs PyTorch, compiled for CUDA|PyTorch finds no GPU": "CI has no GPU",
    r"needs JAX, compiled for CUDA|JAX finds no GPU": "CI has no GPU",
    r"\bone GPU\b|needs (two|\d+) GPUs": "CI has no GPU",
    r"needs \d+ GB of memory": "CI has no such machine; it is tried on GPUs",
    r"this CPU has no AMX": "the emulated unit is tried everywhere",
    r"(gguf|onnx|onnxruntime|openvino|torchao|hqq|optimum\.quanto) is not installed": (
        "stand-ins are tried everywhere"
    ),
    r"the formulas give inf - inf": "there is no right value to compare with",
}
OF_LIBRARIES = {
    "jax": r"\bjax\b",
    "torch": r"\b(torch|pytorch|transformers)\b",
}


def forbidden(reasons: Iterable[str], without: str = "") -> list[str]:
    """Return the reasons that are not allowed, each once.

    Parameters
    ----------
    reasons : iterable of str
        Why tests were skipped.
    without : str
        Names of libraries that may be missing, with spaces between.
    """
    patterns = [*ALLOWED, *(OF_LIBRARIES[name] for name in without.split())]
    return [
        reason
        for reason in dict.fromkeys(reasons)
        if not any(re.search(pattern, reason, re.IGNORECASE) for pattern in patterns)
    ]
