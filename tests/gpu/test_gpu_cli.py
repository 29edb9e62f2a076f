"""`cupyflash info` and `cupyflash demo` on a real GPU: what they print is true."""

from __future__ import annotations

import numpy as np
import pytest
from test_cli import cells, measured, run, section
from test_info import parsed

from cupyflash.arrays.dtypes import FLOATS
from cupyflash.bench import demo, measure
from cupyflash.commands import info
from cupyflash.commands.demo import choose_device
from cupyflash.commands.main import main

pytestmark = pytest.mark.gpu


@pytest.fixture
def cupy(gpu):
    import cupy

    return cupy


def test_info_names_every_device(cupy, tmp_path):
    cache = tmp_path / "kernels"
    done = run(tmp_path, "info", CUPY_CACHE_DIR=str(cache))
    assert (done.returncode, done.stderr) == (0, "")
    lines = parsed(done.stdout)
    assert lines["CuPy"] == cupy.__version__
    assert lines["GPU cache"].startswith(f"{cache} writable")
    runtime = cupy.cuda.runtime
    for words in ("driver for CUDA up to", "runtime"):
        assert words in lines["CUDA"]
    assert "unknown" not in lines["CUDA"]
    assert lines["NVRTC"].split(",")[0] == ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    for number in range(runtime.getDeviceCount()):
        facts = runtime.getDeviceProperties(number)
        line = lines[f"GPU {number}"]
        assert facts["name"].decode() in line
        assert f"compute capability {facts['major']}.{facts['minor']}" in line
        supported = (facts["major"], facts["minor"]) >= (7, 5)
        assert ("served by" in line) == supported
        assert ("NOT supported" in line) != supported


def test_a_usable_gpu_is_the_default(cupy):
    assert info.gpu_obstacle() == ""
    assert choose_device(None)[0] == "gpu"


def test_peak_memory_is_what_the_pool_gives(cupy):
    size = 40 * 2**20
    kept = cupy.zeros(size, np.uint8)  # held before, so it does not count

    def work():
        one = cupy.zeros(size, np.uint8)
        two = cupy.zeros(size, np.uint8)
        del one, two
        return cupy.ones(size // 4, np.uint8) + kept[0]

    assert 2 * size <= measure.Gpu().peak_memory(work) <= 2.1 * size


def test_seconds_are_those_of_the_gpu(cupy):
    x = cupy.ones((4096, 4096), np.float32)
    meter = measure.Gpu()
    meter.seconds(lambda: x @ x)
    once = min(meter.seconds(lambda: x @ x) for _ in range(5))
    ten = min(meter.seconds(lambda: [x @ x for _ in range(10)]) for _ in range(3))
    assert 2 * 4096**3 / once < 1e15  # not the time to launch it
    assert 5 < ten / once < 20


@pytest.mark.parametrize("dtype", FLOATS)
def test_demo(dtype, cupy, capsys):
    assert main(["demo", "--repeat", "4", "--runs", "3", "--dtype", dtype]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= 100
    assert cupy.cuda.runtime.getDeviceProperties(0)["name"].decode() in out
    assert "2048 tokens" in out

    lines = [cells(line) for line in section(out, "Time")]
    assert [line[:2] for line in lines] == [
        [mask, work] for mask in ("full", "causal") for work in ("forward", "forward + backward")
    ]
    scores = demo.score_bytes(dtype, 4)
    for line in lines:
        matrices = 1 if line[1] == "forward" else 2
        # Standard attention holds them, and not more than the default length makes room for.
        assert 0.99 * matrices * scores <= measured(line[5]) <= demo.MATRICES * scores
        assert measured(line[6]) < 0.2 * scores  # and cupyflash does not

    lines = [cells(line) for line in section(out, "Error")]
    assert [line[0] for line in lines] == ["full", "causal"]
    assert all(0 < float(cell) <= 1 for line in lines for cell in line[1:6])
    assert "within the bound" in out.splitlines()[-1]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [False, True])
def test_standard_attention_is_right(dtype, causal, cupy):
    """What cupyflash is compared with on the GPU computes the same thing."""
    host = demo.Inputs(*(array[:2, :100] for array in demo.load(dtype)))
    inputs = demo.Inputs(*(cupy.asarray(array) for array in host))
    o, p = demo.standard_forward(cupy, *inputs[:3], causal)
    found = o, *demo.standard_backward(cupy, inputs, o, p)
    wide = demo.Inputs(*(array.astype(np.float64) for array in host))
    o, p = demo.standard_forward(np, *wide[:3], causal)
    wanted = o, *demo.standard_backward(np, wide, o, p)
    # Of the largest element, in 16-bit types that of a result's rounding and more.
    tolerance = {"float64": 1e-12, "float32": 1e-5, "float16": 0.01, "bfloat16": 0.05}[dtype]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype.name == dtype
        assert (
            np.abs(ours.get().astype(np.float64) - theirs).max() <= tolerance * np.abs(theirs).max()
        )


def test_an_error_beyond_the_bound_is_told(cupy, monkeypatch, capsys):
    right = demo.attention_vjp

    def wrong(*arrays, return_lse=False, **options):
        out, lse, vjp = right(*arrays, return_lse=True, **options)
        return (out * 1.001, lse, vjp) if return_lse else (out, vjp)

    monkeypatch.setattr(demo, "attention_vjp", wrong)
    assert main(["demo", "--repeat", "1", "--runs", "1"]) == 1
    assert "BEYOND the bound" in capsys.readouterr().out.splitlines()[-1]
