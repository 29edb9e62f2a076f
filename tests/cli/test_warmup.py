"""The command `cupyflash warmup`: what it compiles, and what nobody has to compile afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cupyflash.commands.main import main
from cupyflash.reference.cpu import jit

# Prints how many functions of the package a process compiles for calls of every kind.
CALLS = """
import numpy as np
from numba.core import event
import cupyflash
from cupyflash import masks, scores

class Count(event.Listener):
    compiled = 0

    def on_start(self, what):
        Count.compiled += what.data["dispatcher"].__module__.startswith("cupyflash")

    def on_end(self, what):
        pass

event.register("numba:compile", Count())
x = np.ones((2, 5, 8), np.float32)
segments = masks.segments(np.arange(5) // 2)
for options in (
    {}, {"mask": masks.causal()}, {"mask": segments}, {"score_mod": scores.softcap(2.0)},
    {"dropout": 0.5, "seed": 1}, {"bias": np.zeros((5, 5), np.float32)}, {"sink": np.ones(2)},
):
    out, lse = cupyflash.attention(x, x, x, return_lse=True, **options)
    _, vjp = cupyflash.attention_vjp(x, x, x, **options)
    vjp(out)
cupyflash.combine([(out, lse), (out, lse)])
print(Count.compiled)
"""


def run(folder, *words):
    """Run Python elsewhere than in the checkout, whose `cupyflash/` is not the whole package."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_afterwards_nothing_is_compiled(tmp_path):
    warmed = run(tmp_path, "-m", "cupyflash", "warmup", "--dtype", "bfloat16")
    assert warmed.returncode == 0, warmed.stderr
    assert "The kernels for bfloat16 on the CPU are ready" in warmed.stdout
    called = run(tmp_path, "-c", CALLS)
    assert (called.returncode, called.stdout.strip(), called.stderr) == (0, "0", "")


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert main(["warmup"]) == 1
    said = capsys.readouterr().err
    assert str(tmp_path / "file" / "cache") in said.replace("\n", "")
    assert "CUPYFLASH_CACHE_DIR" in said


@pytest.mark.parametrize("words", [["--dtype", "int8"], ["--dim", "0"], ["--device", "tpu"]])
def test_what_is_no_choice(words, capsys):
    with pytest.raises(SystemExit) as left:
        main(["warmup", *words])
    assert left.value.code == 2
    assert words[1] in capsys.readouterr().err


def test_every_kernel_is_prepared():
    """What a call can ask for is among what `warmup` compiles."""
    from cupyflash.reference.cpu import kernels

    declared = {each for each in jit.declared() if each.__module__.startswith("cupyflash.")}
    assert declared == set(kernels.KERNELS)


@pytest.mark.gpu
def test_on_a_gpu(gpu, capsys):
    assert main(["warmup", "--device", "gpu", "--dtype", "float16", "--dim", "64"]) == 0
    assert "on the GPU are ready" in capsys.readouterr().out
