"""ONNX Runtime and OpenVINO in the suite `models`: stand-ins, and they themselves if installed."""

from __future__ import annotations

import dataclasses
import importlib
import sys

import numpy as np
import pytest
from fake_runtimes import fake_onnx, fake_openvino

from cupyflash import bench
from cupyflash.bench import measure, model_rows, models, run, runtime_peers
from cupyflash.bench.model_rows import Model
from cupyflash.commands.main import main
from cupyflash.testing.options import float_type

RUNTIMES = {x.name: x for x in bench.CONTENDERS if isinstance(x, runtime_peers.Runtime)}
ROWS = (
    Model("a test", 2, 4, 9, 8),
    Model("lengths", 2, 2, 12, 8, lengths=True),
    Model("bias", 3, 2, 7, 16, bias=1),
    Model("bias of each", 2, 2, 7, 16, bias=2),
    Model("cross", 1, 2, 10, 8, len_k=5),
    Model("shared, causal", 2, 4, 8, 8, heads_kv=2, causal=True),
    Model("causal", 2, 2, 8, 8, causal=True),
    Model("one query", 1, 4, 1, 8, heads_kv=2, len_k=11),
)


@pytest.fixture(params=["stand-ins", "installed"])
def ways(request, monkeypatch):
    """Whoever takes part, by name."""
    runtime_peers._core.cache_clear()
    if request.param == "stand-ins":
        for name, module in (fake_onnx() | fake_openvino(float_type("bfloat16"))).items():
            monkeypatch.setitem(sys.modules, name, module)
    else:
        for runtime in RUNTIMES.values():
            if why := runtime.obstacle("cpu"):
                pytest.skip(why)
    yield request.param
    runtime_peers._core.cache_clear()


def arrays_of(model, dtype):
    """q, k, v and perhaps a bias, and lengths."""
    meter = measure.Cpu()
    shapes = [(model.batch, model.heads, model.len_q, model.d)]
    shapes += 2 * [(model.batch, model.key_heads, model.keys, model.d)]
    made = [models.by_tokens(meter, dtype, *shape, seed=n) for n, shape in enumerate(shapes)]
    if model.bias:
        made.append(models.normal(meter, dtype, *model.bias_shape, seed=4))
    lengths = np.arange(1, model.batch + 1, dtype=np.int32) + 3 if model.lengths else None
    return made, lengths


def by_cupyflash(model, arrays, lengths):
    from cupyflash import attention, masks

    mask = masks.causal() if model.causal else None
    if lengths is not None:
        mask = masks.lengths(lengths)
    q, k, v, *bias = arrays
    return attention(q, k, v, mask=mask, **({"bias": bias[0]} if bias else {}))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("model", ROWS, ids=lambda x: x.name)
def test_every_operator_computes_the_row(ways, model, dtype):
    arrays, lengths = arrays_of(model, dtype)
    wanted = by_cupyflash(model, arrays, lengths)
    operators = dict(runtime_peers.by_openvino(model, arrays, lengths))
    if dtype != "bfloat16":
        operators |= runtime_peers.by_onnx(model, arrays, lengths)
    causal = model.causal and model.len_q == model.keys
    assert ("GroupQueryAttention" in operators) == (causal and dtype != "bfloat16")
    for name, make in operators.items():
        found = np.array(make()())
        assert found.dtype == wanted.dtype, name
        assert run.difference([found], [wanted]) <= run.TOLERANCE[dtype], name


def test_what_they_lack_is_told(ways):
    arrays, _ = arrays_of(ROWS[0], "bfloat16")
    with pytest.raises(bench.RefusalError, match="no bfloat16"):
        runtime_peers.fastest(runtime_peers.by_onnx(ROWS[0], arrays, None))
    wide = [x.astype(np.float64) for x in arrays]
    with pytest.raises(bench.RefusalError, match="float64"):
        runtime_peers.by_openvino(ROWS[0], wide, None)


def test_the_fastest_operator_counts(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(runtime_peers.time, "perf_counter", lambda: float(next(clock)))
    slow = lambda: [next(clock) for _ in range(5)] and "slow"  # noqa: E731
    refused = {"no": lambda: 1 / 0}
    ways = {"slow": lambda: slow, "fast": lambda: lambda: "fast", **refused}
    assert runtime_peers.fastest(ways)() == "fast"
    with pytest.raises(bench.RefusalError, match="no: division by zero"):
        runtime_peers.fastest(refused)


def test_absent_ones_are_told_with_the_remedy(monkeypatch):
    for name in ("onnx", "openvino"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "onnxruntime", fake_onnx()["onnxruntime"])
    assert RUNTIMES["onnxruntime"].obstacle("cpu").endswith(": pip install onnxruntime onnx")
    assert RUNTIMES["openvino"].obstacle("cpu").endswith(": pip install openvino")
    assert "CPU only" in RUNTIMES["openvino"].obstacle("gpu")
    with pytest.raises(bench.RefusalError, match="--suite models"):
        RUNTIMES["openvino"].prepare(None, None, None)


def test_the_command(ways, monkeypatch, capsys, tmp_path):
    """`--task` chooses rows, and the file and the table name the libraries."""
    pytest.importorskip("rich", reason='pip install ".[bench]"')
    row = dataclasses.replace(ROWS[0], name="ViT-S")
    makers, dtypes = models._named({"float32": (row, ROWS[5])})
    few = dataclasses.replace(bench.TASKS["cpu"]["models"], makers=makers, dtypes=dtypes)
    monkeypatch.setitem(bench.TASKS["cpu"], "models", few)
    file = tmp_path / "models.json"
    only = [x for name in ("cupyflash", *RUNTIMES) for x in ("--only", name)]
    arguments = [
        "--device",
        "cpu",
        "--suite",
        "models",
        "--task",
        "iT-S*float32, ",
        "--runs",
        "1",
        *only,
    ]
    assert main(["bench", *arguments, "--json", str(file)]) == 0
    assert "OpenVINO" in capsys.readouterr().out
    report = bench.Report.from_json(file.read_text())
    assert report.contenders == ["cupyflash", *RUNTIMES]
    forward, backward = report.tasks
    assert forward.task.name.startswith("ViT-S")
    assert [x.status for x in forward.results] == ["measured"] * 3
    assert [x.contender for x in backward.results] == ["cupyflash"]
    assert {"ONNX Runtime", "OpenVINO"} <= report.versions.keys()


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--suite", "models", "--task", "no such row"], "--task: got 'no such row'"),
        (["--task", "ViT-S"], "got --task without a suite of tasks"),
    ],
)
def test_wrong_tasks(arguments, wanted, capsys):
    pytest.importorskip("rich", reason='pip install ".[bench]"')
    assert main(["bench", "--device", "cpu", *arguments]) == 2
    assert wanted in " ".join(capsys.readouterr().err.split())


def test_all_rows_of_a_cpu_have_a_form_for_them():
    """Every forward is tried by both; what they cannot do, they say."""
    for dtype, rows in model_rows.ON_CPU.items():
        for model in rows:
            made = models.dense(measure.Cpu(), dtype, dataclasses.replace(model, batch=1), False)
            assert RUNTIMES.keys() <= made.works.keys()
    assert importlib.import_module("cupyflash.bench.suites").TASKS["cpu"]["models"].contenders == (
        "cupyflash", "torch-sdpa", *RUNTIMES,
    )  # fmt: skip
