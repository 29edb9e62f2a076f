"""examples/train_transformers.py runs as a user would run it, and its models learn."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_transformers.py"


@pytest.mark.thorough("trains two models; a step of each is quick in tests/frontend")
def test_it_trains_and_generates(tmp_path):
    for name in ("torch", "transformers"):
        pytest.importorskip(name, reason=f"the example needs {name}")
    command = [sys.executable, str(SCRIPT), "--steps", "25", "--length", "64", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(
        r"^(\w+) +(\w+) +loss ([\d.]+) to ([\d.]+),.*then (.*)$", done.stdout, re.MULTILINE
    )
    assert [line[:2] for line in lines] == [
        (model, name) for model in ("llama", "gpt2") for name in ("sdpa", "cupy_attention")
    ]
    for _, _, first, last, _ in lines:
        assert float(last) < 0.8 * float(first)
    for theirs, ours in (lines[:2], lines[2:]):
        assert theirs[2] == ours[2] or abs(float(theirs[2]) - float(ours[2])) < 1e-3
