"""The suite `models`: its rows at small sizes, beside PyTorch's kernels and stand-ins for them."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import sys
from types import ModuleType

import numpy as np
import pytest
from fake_cupy import Stream, fake_cupy
from fake_torch import fake_torch

from cupyflash import bench
from cupyflash.bench import measure, model_rows, models, plot, run, tasks, torch_peers
from cupyflash.bench.model_rows import Cached, Model, Packed
from cupyflash.commands import bench as command
from cupyflash.commands.main import main

KNOWN = {contender.name: contender for contender in bench.CONTENDERS}
BOTH = ("cupyflash", "torch-sdpa")
CPU, GPU = (bench.TASKS[kind]["models"] for kind in ("cpu", "gpu"))


class Quick(measure.Cpu):
    """Takes no pauses."""

    def settle(self):
        pass

    release = settle


def small(model):
    """The same, of few and short rows."""
    heads_kv = min(model.key_heads, 2)
    return dataclasses.replace(
        model, batch=2, heads=heads_kv * min(model.heads // model.key_heads, 2), heads_kv=heads_kv,
        len_q=min(model.len_q, 20), len_k=min(model.keys, 20 if model.causal else 28),
        d=min(model.d, 24), d_v=16 * (model.d_v > 0), bias=min(model.bias, 2),
    )  # fmt: skip


def done(maker, dtype, names, meter=None):
    """Run one task by some contenders; return results by their names."""
    suite = dataclasses.replace(CPU, makers={"it": maker}, dtypes={"it": dtype})
    (task,) = suite.tasks()
    assert task.dtype == dtype
    contenders = [KNOWN[name] for name in names]
    row = run.run_task(meter or Quick(), suite, task, contenders, runs=1, seconds=1.0)
    return {x.contender: x for x in row.results}


def all_measured(results, names):
    assert {name: x.status for name, x in results.items()} == dict.fromkeys(names, "measured"), (
        results
    )


@pytest.fixture(autouse=True)
def _few_calls(monkeypatch):
    monkeypatch.setattr(tasks, "CALLS", 2)


@pytest.fixture(scope="module", autouse=True)
def _kept_contenders():
    """PyTorch that is found here is not that of other tests."""
    torch_peers.find.cache_clear()
    yield
    torch_peers.find.cache_clear()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", model_rows.ON_CPU)
def test_rows_of_a_cpu(dtype, backward):
    pytest.importorskip("torch", reason="pip install torch")
    for model in {small(x) for x in model_rows.ON_CPU[dtype] if x.backward or not backward}:
        maker = functools.partial(models.dense, model=model, backward=backward)
        all_measured(done(maker, dtype, BOTH), BOTH)


def packed_attention(torch):
    """PyTorch's varlen_attn, sequence by sequence."""

    def varlen_attn(q, k, v, starts_q, starts_k, max_q, max_k, *, window_size):
        parts = []
        for (a, b), (c, d) in zip(
            *(zip(x.tolist(), x.tolist()[1:], strict=False) for x in (starts_q, starts_k)),
            strict=True,
        ):
            assert b - a <= max_q
            assert d - c <= max_k
            bias = importlib.import_module("torch.nn.attention.bias")
            mask = None if window_size == (-1, -1) else bias.causal_lower_right(b - a, d - c)
            turned = [x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])]
            o = torch.nn.functional.scaled_dot_product_attention(*turned, attn_mask=mask)
            parts.append(o[0].transpose(0, 1))
        return torch.cat(parts)

    return varlen_attn


@pytest.fixture
def torch(monkeypatch):
    """A real PyTorch on the CPU, with what it has for GPUs alone."""
    torch = pytest.importorskip("torch", reason="pip install torch")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    module = ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = packed_attention(torch)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    return torch


def test_dense_rows_of_a_gpu_on_the_cpu(torch):
    """Every row is one that all do: SDPA's kernels, or Flex where there is a special mask."""
    for dtype, rows in model_rows.ON_GPU.items():
        for model in {small(x) for x in rows}:
            if model.special:
                continue
            for backward in (False, True):
                maker = functools.partial(models.dense, model=model, backward=backward)
                names = ("cupyflash", "torch-sdpa")
                results = done(maker, dtype, names)
                all_measured(results, names)
                far = results["torch-sdpa"].difference
                assert (far > 0.05) == (model.dropout > 0), model


SPECIAL = (
    model_rows.window(5), model_rows.window(5, sink=True), model_rows.image(6, 1),
    model_rows.documents(7), model_rows.prefix(9), model_rows.ALIBI, model_rows.SOFTCAP,
)  # fmt: skip


@pytest.mark.parametrize("special", SPECIAL, ids=lambda x: x.words)
def test_special_masks_and_scores_are_those_of_flex(torch, special):
    model = Model("a test", 2, 4, 36, 16, heads_kv=2, special=special)
    maker = functools.partial(models.dense, model=model, backward=False)
    names = ("cupyflash", "torch-flex")
    all_measured(done(maker, "float32", names), names)


def test_special_rows_are_all_tested():
    kinds = {re.sub(r"\d+", "n", x.words) for x in SPECIAL}
    used = {x.special for rows in model_rows.ON_GPU.values() for x in rows if x.special}
    assert len(used) == len(SPECIAL)
    assert {re.sub(r"\d+", "n", x.words) for x in used} == kinds


@pytest.mark.parametrize("page", [0, 4])
@pytest.mark.parametrize("len_q", [1, 5])
def test_caches_of_a_gpu_on_the_cpu(torch, len_q, page):
    model = Cached("a test", 2, 4, 2, len_q, 24, 16, page)
    maker = functools.partial(models.over_cache, model=model)
    names = ("cupyflash", "torch-sdpa", "torch-varlen")
    all_measured(done(maker, "bfloat16", names), names)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_rows_of_a_gpu_on_the_cpu(torch, causal, backward):
    model = Packed("a test", 3, 4, 12, 4, 2, 16, causal)
    maker = functools.partial(models.packed, model=model, backward=backward)
    names = ("cupyflash", "torch-varlen")
    all_measured(done(maker, "bfloat16", names), names)


@pytest.mark.parametrize("backward", [False, True])
def test_kernels_of_a_gpu_are_asked_on_cupys_stream(monkeypatch, backward):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(free=2**24))
    for name, module in fake_torch().items():
        monkeypatch.setitem(sys.modules, name, module)
    torch_peers.find.cache_clear()
    maker = functools.partial(
        models.dense, model=Model("a test", 1, 2, 24, 8, causal=True), backward=backward
    )
    names = ("cupyflash", "torch-cudnn", "torch-flash", "torch-efficient", "torch-flex")
    with Stream(7):
        results = done(maker, "float32", names, measure.Gpu())
    torch_peers.find.cache_clear()
    all_measured(results, names[:-1])  # nothing of Flex where SDPA does it
    calls = [x for x in sys.modules["torch"].seen if isinstance(x, tuple)]
    assert {x[1:] for x in calls} == {(7, True, False)}
    assert len({x[0] for x in calls}) == 3


def test_packed_attention_is_refused_for_cases_and_old_releases(monkeypatch):
    pytest.importorskip("torch", reason="pip install torch")
    peer = KNOWN["torch-varlen"]
    with pytest.raises(bench.RefusalError, match="--suite models"):
        peer.function(None, None, None)
    monkeypatch.setattr(torch_peers.TorchPeer, "obstacle", lambda self, kind: "")
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    assert "no varlen_attn" in peer.obstacle("gpu")


def test_names_say_what_a_row_is():
    names = [x.name for x in CPU.tasks()]
    assert "Swin (256, 4, 49, 32), bias (1, 4, 49, 49), bfloat16, backward" in names
    assert "one query (1, 32/8, 1/512, 128), float16, forward" in names
    assert len(names) == len(set(names)) > 60
    names = [x.name for x in GPU.tasks()]
    assert "DeepSeek, prompt (1, 32, 4096, 192/128), causal, bfloat16, backward" in names
    assert "one query (64, 32/8, 1/1024, 128), pages of 16, bfloat16, forward" in names
    assert "packed BERT (256 of 20 to 500, 12, 64), bfloat16, backward" in names
    assert len(names) == len(set(names)) > 90
    for suite in (CPU, GPU):
        assert all(f", {x.dtype}, " in x.name for x in suite.tasks())


def test_short_calls_are_several_in_a_run(monkeypatch):
    monkeypatch.setattr(tasks, "CALLS", 20)
    model = Model("a test", 1, 1, 16, 16)
    assert models.dense(Quick(), "float32", model, backward=False).count == 20
    one = Model("a test", 1, 1, 1024, 128)
    assert models.dense(Quick(), "float32", one, backward=False).count == 1


def test_the_command(monkeypatch, capsys, tmp_path):
    pytest.importorskip("rich", reason='pip install ".[bench]"')
    pytest.importorskip("matplotlib", reason='pip install ".[bench]"')
    pytest.importorskip("torch", reason="pip install torch")
    model = small(model_rows.ON_CPU["float32"][0])
    makers, dtypes = models._named({"bfloat16": (model,)})
    few = dataclasses.replace(CPU, makers=makers, dtypes=dtypes, contenders=BOTH)
    monkeypatch.setitem(bench.TASKS["cpu"], "models", few)
    file, picture = tmp_path / "models.json", tmp_path / "models.svg"
    arguments = ["--device", "cpu", "--suite", "models", "--runs", "1", "--json", str(file)]
    monkeypatch.setitem(plot.STYLE, "svg.fonttype", "none")
    assert main(["bench", *arguments, "--plot", str(picture)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "torch-sdpa" in out
    assert "calls each, where these are short" in out
    report = bench.Report.from_json(file.read_text())
    assert [row.task.name for row in report.tasks] == list(makers)
    assert [row.fastest for row in report.tasks] == ["torch-sdpa"] * 2
    assert command.baseline(report, None) == ""
    assert picture.read_text().count("(ratio ") == 2
    assert np.isfinite([row.ratio("torch-sdpa") for row in report.tasks]).all()
