"""`cupyflash bench` for a GPU, on a CuPy and a PyTorch without one: who is asked for what."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fake_cupy import H200, Stream, fake_cupy
from fake_torch import BACKENDS, fake_torch

from cupyflash import bench
from cupyflash.bench import measure, torch_peers
from cupyflash.commands.main import main

SDPA = [peer for peer in torch_peers.PEERS if getattr(peer, "backend", None)]
SHAPE = (1, 2, 2, 24, 24, 8)


@pytest.fixture
def torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(free=2**24))
    monkeypatch.setattr(measure, "SMALLEST_FLUSH", 2**10)
    monkeypatch.setattr(torch_peers.gc, "collect", lambda: 0)
    for name, module in fake_torch().items():
        monkeypatch.setitem(sys.modules, name, module)
    torch_peers.find.cache_clear()
    yield sys.modules["torch"]
    torch_peers.find.cache_clear()


def of_a_gpu():
    return [bench.Cupyflash(), bench.Standard(), *(x for x in SDPA if not x.obstacle("gpu"))]


class Quick(measure.Gpu):
    """Searches for no garbage, which takes the most of these tests' time."""

    def release(self):
        pass


def run(variant, direction, shape=SHAPE, **options):
    case = bench.made(shape, "float32", variant, None, direction)
    row = bench.run_case(Quick(), case, of_a_gpu(), runs=2, seconds=60.0, **options)
    return {result.contender: result for result in row.results}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("stream", [0, 7])
def test_each_kernel_is_asked_for_by_name_on_cupys_stream(torch, direction, stream):
    with Stream(stream):
        results = run("causal", direction)
    assert list(results) == ["cupyflash", "standard", "torch-cudnn", "torch-flash",
                             "torch-efficient", "torch-math"]  # fmt: skip
    assert {x.status for x in results.values()} == {"measured"}, results
    assert all(result.difference < 1e-5 for result in results.values())
    assert results["torch-flash"].peak_bytes == 4000  # of PyTorch's pool
    assert results["standard"].peak_bytes == 10**6  # of CuPy's
    calls = [x for x in torch.seen if x != "emptied"]
    assert {x[0] for x in calls} == set(BACKENDS)
    assert {x[1:] for x in calls} == {(stream, True, False)}
    assert torch.seen.count("emptied") >= 4  # between cases


def test_a_kernel_that_refuses_says_why(torch):
    results = run("window", "forward")
    assert results["torch-flash"].status == "refused"
    assert results["torch-flash"].reason == (
        "PyTorch: Flash Attention takes no mask No available kernel. Aborting execution."
    )
    assert results["torch-efficient"].status == "measured"
    assert run("softcap", "forward")["torch-cudnn"].reason.endswith("has no soft cap")


def test_fewer_queries_than_keys_are_masked_by_an_array(torch):
    """PyTorch's own causal mask is aligned at the first key, ours at the last."""
    results = run("causal", "forward", (1, 2, 2, 10, 24, 8))
    assert results["torch-cudnn"].status == "measured"
    assert {x[2:] for x in torch.seen if x != "emptied"} == {(False, True)}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_replays_are_compared_too(torch, direction, monkeypatch):
    monkeypatch.setattr(measure.Gpu, "captured", lambda _, work: work)
    with Stream(7):
        results = run("full", direction, graphs=True)
    captured = {"cupyflash"} | ({x.name for x in SDPA} if direction == "forward" else set())
    for name, result in results.items():
        wanted = "measured" if name in captured else "refused"
        assert result.status == wanted, result
        assert ("without --graphs" in result.reason) == (wanted == "refused")
    # A replay that writes nothing is found.
    monkeypatch.setattr(measure.Gpu, "captured", lambda *_: lambda: None)
    assert run("full", direction, graphs=True)["cupyflash"].status == "WRONG"


def test_a_capture_comes_after_a_run_and_is_replayed_where_the_events_are(torch):
    made = []

    class Kept(Stream):
        def __init__(self, **options):
            super().__init__(**options)
            made.append(self)

    meter = measure.Gpu()
    meter.xp.cuda.Stream = Kept
    replay = meter.captured(lambda: made[0].did.append("work"))
    assert made[0].non_blocking
    assert made[0].did == ["work", "synchronize", "begin", "work", "end"]
    with Stream(5) as stream:
        replay()
    assert stream.did == ["launch"]


def test_a_buffer_larger_than_the_cache_is_written_before_each_run(monkeypatch):
    cupy = fake_cupy((H200 | {"l2CacheSize": 50 * 2**20},), free=2**34)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    made = []

    def empty(size, dtype):
        made.append(SimpleNamespace(size=size, dtype=dtype, filled=0))
        made[-1].fill = lambda _: setattr(made[-1], "filled", made[-1].filled + 1)
        return made[-1]

    cupy.empty = empty
    meter = measure.Gpu()
    meter.settle()
    meter.settle()
    (buffer,) = made
    assert (buffer.size, buffer.dtype, buffer.filled) == (2**30, np.uint8, 2)
    cupy.cuda.runtime.memGetInfo = lambda: (2**28, 2**34)
    measure.Gpu().settle()
    assert made[1].size == 4 * 50 * 2**20  # little is free


def test_the_command_for_a_gpu(torch, capsys, tmp_path):
    pytest.importorskip("rich", reason='pip install ".[bench]"')
    file = tmp_path / "found.json"
    torch.backends = SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 91900))
    arguments = ["--shape", "1,2,24,8", "--dtype", "float32", "--against", "torch-flex"]
    assert main(["bench", "--device", "gpu", "--runs", "1", "--json", str(file), *arguments]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in ("NVIDIA H200", "CuPy 14.2.0", "PyTorch 2.11.0+fake", "cuDNN 91900", "CUDA events",
                  "L2 cache overwritten", "TFLOP/s", "torch-cudnn", "refused (1)"):  # fmt: skip
        assert words in out, words
    report = bench.Report.from_json(file.read_text())
    assert report.kind == "gpu"
    assert report.rows[0].of("torch-efficient")


def test_no_gpu_is_told(monkeypatch, capsys):
    pytest.importorskip("rich", reason='pip install ".[bench]"')
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main(["bench", "--device", "gpu"]) == 2
    assert "--device gpu: no GPU can be used, because CuPy is not installed" in " ".join(
        capsys.readouterr().err.split()
    )
