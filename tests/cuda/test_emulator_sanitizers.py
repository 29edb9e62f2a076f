"""Every kernel with AddressSanitizer and UndefinedBehaviorSanitizer, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulator import build, sanitized

WHY = build.missing()
if WHY is None and not Path(sanitized.library("libasan.so")).is_absolute():
    WHY = "g++ has no AddressSanitizer"
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))


@pytest.mark.thorough("compiles each kernel again; guard bands are quick")
def test_every_kernel_stays_within_its_arrays():
    done = sanitized.run()
    assert (done.returncode, done.stdout) == (0, "no fault\n"), done.stderr[:4000]


@pytest.mark.thorough("a build of its own with sanitizers")
@pytest.mark.parametrize("fault", sanitized.FAULTS)
def test_faults_are_found(fault):
    done = sanitized.run(fault)
    assert done.returncode != 0, done.stdout
    assert sanitized.FAULTS[fault][1] in done.stderr
    assert "probe.cu:" in done.stderr


@pytest.mark.thorough("compiles each kernel again")
def test_a_row_too_many_is_found():
    done = sanitized.run("beyond the last row")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert "warp/fragment_tile.cuh:" in done.stderr
