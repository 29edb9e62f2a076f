"""The tasks of `.ci/run` are in CONTRIBUTING's first screen, and each kernel has tests to run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import kernel_tests
import pytest

ROOT = Path(__file__).resolve().parents[2]
RUNNER = (ROOT / ".ci" / "run").read_text()
FIRST_SCREEN = "\n".join((ROOT / "CONTRIBUTING.md").read_text().splitlines()[:40])


def test_the_first_screen_has_every_task():
    tasks = re.findall(r"^    (\w+)\) ", RUNNER, re.MULTILINE)
    assert len(tasks) > 5
    for text in (RUNNER.partition("set -euo")[0], FIRST_SCREEN):
        assert re.findall(r"^(?:#   )?\.ci/run (\w+)", text, re.MULTILINE) == tasks


def test_an_unknown_task_is_refused_with_those_that_there_are():
    done = subprocess.run([ROOT / ".ci" / "run", "test"], capture_output=True, text=True)
    assert done.returncode == 2
    assert ".ci/run tests" in done.stderr
    assert "got test; expected one of these tasks" in done.stderr


@pytest.mark.parametrize("kernel", kernel_tests.kernels())
def test_every_kernel_has_modules_that_run_it(kernel):
    modules = kernel_tests.modules_of(kernel)
    assert 1 <= len(modules) <= 3
    for module in modules:
        text = module.read_text()
        assert "Emulator" in text or "emulator" in text, module


def test_the_modules_of_a_kernel():
    found = {
        name: [path.name for path in kernel_tests.modules_of(name)]
        for name in ("forward_sm80", "backward_sm80_dkdv", "backward_sm90_bias", "decode_simt",
                     "forward_simt", "dequantize", "rope")
    }  # fmt: skip
    assert found == {
        "forward_sm80": ["test_forward_sm80.py"],
        "backward_sm80_dkdv": [
            "test_backward_sm80.py",
            "test_whole_dq.py",
            "test_wide_heads.py",
        ],
        "backward_sm90_bias": ["test_backward_bias.py"],
        "decode_simt": ["test_decode.py"],
        "forward_simt": ["test_emulator.py"],
        "dequantize": ["test_forward_sm90_fp8.py"],
        "rope": ["test_append.py", "test_cached_codes.py"],
    }
