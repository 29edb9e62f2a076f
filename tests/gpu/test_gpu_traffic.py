"""tests/tools/gpu_traffic.py, without a GPU: each kernel is compared with its own prediction."""

from __future__ import annotations

import gpu_traffic
import pytest

import cupyflash


def kernels():
    """What a profiler would tell, if each kernel read 1 byte and wrote 2, and CuPy had one, too."""
    ran = []
    for _, shape, causal, backward in gpu_traffic.calls():
        found = cupyflash.explain(
            shape,
            mask=cupyflash.masks.causal() if causal else None,
            dtype="bfloat16",
            device="H200",
            backward=backward,
            compile=False,
        )
        ran.append(("cupy_fill", 100, 100))
        ran += [(f"{use.name}__bf16", 1, 2) for use in found.kernels]
    return ran


def test_kernels_stand_beside_their_predictions():
    own = kernels()
    standard = [("gemm", 10, 20), ("softmax", 1, 2)] * len(gpu_traffic.STANDARD)
    rows = gpu_traffic.compared(own + standard, "H200")
    assert [(row.read, row.written) for row in rows[:-2]] == [(1, 2)] * (len(rows) - 2)
    assert [(row.read, row.written) for row in rows[-2:]] == [(11, 22)] * 2
    (forward,) = (row for row in rows if row.problem == "(2, 16, 4096, 128), full, forward")
    array = 2 * 2 * 16 * 4096 * 128
    assert forward.predicted_read == 3 * array
    assert forward.predicted_written == array + 4 * 2 * 16 * 4096
    assert str(forward).startswith("| (2, 16, 4096, 128), full, forward | forward_sm90 | 100.7 |")
    # Sums of dq are read and written once each; another kernel makes them 0.
    (main,) = (
        row
        for row in rows
        if row.problem == "(2, 8, 8192, 64), causal, backward" and row.kernel.endswith("dkdv")
    )
    array, sums, numbers = (n * 2 * 8 * 8192 for n in (128, 256, 4))
    assert main.predicted_read == 4 * array + sums + 2 * numbers
    assert main.predicted_written == 2 * array + sums


def test_a_kernel_that_did_not_run_is_an_error():
    with pytest.raises(SystemExit, match="forward_sm90 did not run"):
        gpu_traffic.compared([("gemm", 1, 1)], "H200")


def test_it_says_that_the_profiler_is_missing(monkeypatch):
    monkeypatch.setattr(gpu_traffic.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="ncu is not on PATH"):
        gpu_traffic.counted()
