"""The command line: what `demo` and `--version` print is true, and wrong words are told."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from fake_cupy import H200, fake_cupy

import cupyflash
from cupyflash.bench import demo, measure
from cupyflash.commands.main import main
from cupyflash.commands.text import table
from cupyflash.reference.spec import naive

UNITS = {"ms": 1e-3, "MB": 1e6}


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cupyflash", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


def cells(line: str) -> list[str]:
    """Cells of a table's line: they are two spaces apart."""
    return re.split(r"  +", line.strip())


def measured(cell: str) -> float:
    number, unit = cell.split()
    return float(number) * UNITS[unit]


def section(text: str, start: str) -> list[str]:
    """Lines of the first table below the line that begins with `start`, without its header."""
    lines = text.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith(start))
    rule = next(n for n in range(first, len(lines)) if lines[n].startswith("--"))
    last = next(n for n in range(rule, len(lines)) if not lines[n].strip())
    return lines[rule + 1 : last]


def test_version(tmp_path):
    done = run(tmp_path, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"cupyflash {cupyflash.__version__}\n"


def test_the_help_is_what_comes_without_a_command(tmp_path):
    alone, asked = run(tmp_path), run(tmp_path, "--help")
    assert (alone.returncode, alone.stderr) == (0, "")
    assert alone.stdout == asked.stdout
    assert all(
        word in alone.stdout for word in ("demo", "verify", "explain", "bench", "warmup", "info")
    )


def test_the_script_is_installed():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="cupyflash")
    assert script.load() is main


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["demmo"], "there is no command 'demmo', only demo, verify, explain, bench, warmup, info; "
         "did you mean demo?"),
        (["xyzzy"], "there is no command 'xyzzy', only demo, verify, explain, bench, warmup, "
         "info\n"),
        (["--"], "COMMAND"),
        (["demo", "--dtype", "int8"], "'int8'"),
        (["demo", "--repeat", "0"], "got '0'; expected a whole number of 1 or more"),
        (["demo", "--device", "tpu"], "'tpu'"),
        (["demo", "--runs", "x"], "got 'x'; expected a whole number of 1 or more"),
        (["info", "--all"], "--all"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments, wanted, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    captured = capsys.readouterr()
    assert wanted in captured.err
    assert not captured.out


def test_a_wrong_number_of_threads_is_told(monkeypatch, capsys):
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "many")
    assert main(["info"]) == 0
    assert "'many'" in capsys.readouterr().out
    assert main(["demo", "--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert "'many'" in captured.err
    assert not captured.out


def test_demo(tmp_path):
    done = run(tmp_path, "demo", "--device", "cpu", "--repeat", "2", "--runs", "2")
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    assert "NumPy" in done.stdout
    assert "--device gpu" in done.stdout  # how to choose
    assert "1024 tokens" in done.stdout

    lines = [cells(line) for line in section(done.stdout, "Time")]
    assert [line[:2] for line in lines] == [
        [mask, work] for mask in ("full", "causal") for work in ("forward", "forward + backward")
    ]
    scores = 12 * 1024**2 * 4
    for line in lines:
        for standard, ours, verdict, better in (
            (*line[2:5], "faster"),
            (*line[5:8], "less"),
        ):
            factor = measured(standard) / measured(ours)
            number, word = verdict.split("x ")
            assert (word == better) == (factor >= 1) or 0.9 < factor < 1.1
            assert float(number) == pytest.approx(max(factor, 1 / factor), rel=0.1)
        matrices = 1 if line[1] == "forward" else 2
        assert measured(line[5]) >= 0.99 * matrices * scores  # standard attention holds them
        assert measured(line[6]) < 0.5 * scores  # and cupyflash does not

    lines = [cells(line) for line in section(done.stdout, "Error")]
    assert [line[0] for line in lines] == ["full", "causal"]
    for line in lines:
        shares = [float(cell) for cell in line[1:6]]
        assert len(shares) == 5  # O, LSE, dQ, dK, dV
        assert all(0 < share <= 1 for share in shares)
    assert "within the bound" in done.stdout.splitlines()[-1]


def test_bfloat16_without_its_package_is_told(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert main(["demo", "--device", "cpu", "--dtype", "bfloat16"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: --dtype is bfloat16, a type of the package ml_dtypes")
    assert "pip install ml_dtypes" in " ".join(captured.err.split())
    assert not captured.out


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.thorough("the demo again; in float32 it is quick")
def test_demo_in_other_types(dtype, capsys):
    arguments = ["--device", "cpu", "--dtype", dtype, "--repeat", "1", "--runs", "1"]
    assert main(["demo", *arguments]) == 0
    out = capsys.readouterr().out
    assert dtype in out
    assert "within the bound" in out.splitlines()[-1]


@pytest.mark.thorough("the demo of the CPU is quick")
def test_demo_for_a_gpu(monkeypatch, capsys):
    """What it says and chooses; the numbers are tested where there is a GPU."""
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy((H200,), free=2**28))
    assert main(["demo", "--runs", "1"]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= 100
    for words in ("GPU 0, NVIDIA H200", "--device cpu", "CuPy", "2 times over"):
        assert words in out
    lines = [cells(line) for line in section(out, "Time")]
    assert all(line[5:7] == ["1.0 MB", "1.0 MB"] for line in lines)  # as the pool's hook is told
    assert "within the bound" in out.splitlines()[-1]


@pytest.mark.thorough("widths of a line")
def test_a_long_summary_is_broken(monkeypatch, capsys):
    """Slower here, faster there: the longest that the last lines become."""
    line = demo.Comparison("full", "forward", 1.0, 1.1, 10**9, 10**6, 5)
    lines = [line, dataclasses.replace(line, ours_seconds=0.08, ours_bytes=800_000)]
    monkeypatch.setattr(demo, "compare", lambda *_: lines)
    assert main(["demo", "--device", "cpu", "--repeat", "1"]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= 100
    words = "cupyflash took from 1.1x more to 12x less time and 1000x to 1250x less memory."
    assert words in " ".join(out.split())


@pytest.mark.thorough("the demo that succeeds is quick")
def test_demo_says_when_it_fails(monkeypatch, capsys):
    """A wrong result is told and gives exit status 1."""
    right = demo.attention_vjp

    def wrong(q, k, v, **options):
        o, lse, vjp = right(q, k, v, **options)
        return o * 1.001, lse, vjp

    monkeypatch.setattr(
        demo,
        "attention_vjp",
        lambda *a, **o: wrong(*a, **o) if o.get("return_lse") else right(*a, **o),
    )
    assert main(["demo", "--device", "cpu", "--repeat", "1", "--runs", "1"]) == 1
    assert "BEYOND the bound" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("xp", [np, fake_cupy()], ids=["numpy", "as on a GPU"])
@pytest.mark.parametrize("causal", [False, True])
def test_standard_attention_is_right(causal, xp):
    """What cupyflash is compared with computes the same thing."""
    inputs = demo.Inputs(*(array[:2, :40] for array in demo.load("float64")))
    q, k, v, do = inputs
    mask = cupyflash.masks.causal() if causal else None
    exact = naive.attention(q, k, v, mask=mask, return_probs=True)
    o, p = demo.standard_forward(xp, q, k, v, causal)
    np.testing.assert_allclose(o, exact.out, atol=1e-13)
    np.testing.assert_allclose(p, np.reshape(exact.probs, p.shape), atol=1e-13)
    wanted = naive.attention_backward(do, q, k, v, mask=mask)
    for got, gradient in zip(demo.standard_backward(xp, inputs, o, p), wanted[:3], strict=True):
        np.testing.assert_allclose(got, gradient, atol=1e-12)


def test_data():
    with (files("cupyflash") / "data" / "demo.npz").open("rb") as file, np.load(file) as data:
        for name in "qkv":
            assert data[name].dtype == np.float16
            assert data[name].shape == (12, 512, 32)
            assert np.isfinite(data[name]).all()
            assert data[name].astype(np.float32).std() > 0.1
        assert "all-MiniLM-L6-v2" in str(data["provenance"])
    readme = (files("cupyflash") / "data" / "README.md").read_text(encoding="utf-8")
    assert "Apache License 2.0" in readme
    tiled = demo.load("float32", repeat=3)
    assert tiled.q.shape == (12, 1536, 32)
    np.testing.assert_array_equal(tiled.k[:, 512:1024], demo.load("float32").k)


def test_peak_memory():
    size = 40_000_000

    def work():
        np.zeros(size, dtype=np.uint8).fill(1)  # given back before the end
        return np.ones(1000)

    assert size <= measure.Cpu().peak_memory(work) < 1.2 * size


def test_the_gpus_text_leaves_room_for_standard_attention():
    whole = demo.score_bytes("float32", 16)
    assert whole == 12 * (16 * 512) ** 2 * 4
    assert demo.score_bytes("float16", 16) == whole  # its softmax is float32
    assert demo.gpu_repeat("float32", 80 * 2**30) == 16
    for free in (2**30, 4 * 2**30, 12 * 2**30):
        repeat = demo.gpu_repeat("float64", free)
        assert 1 <= repeat < 16
        assert demo.MATRICES * demo.score_bytes("float64", repeat) <= free
        assert demo.MATRICES * demo.score_bytes("float64", 2 * repeat) > free
    assert demo.gpu_repeat("float32", 0) == 1


def test_peak_memory_of_a_pool():
    """As CuPy's pool calls its hook."""
    hook = measure._peak_hook(object)
    for size in (100, 50):
        hook.malloc_postprocess(device_id=0, size=size, mem_size=size, mem_ptr=1, pmem_id=1)
    hook.free_postprocess(device_id=0, mem_size=100, mem_ptr=1, pmem_id=1)
    hook.malloc_postprocess(device_id=0, size=90, mem_size=90, mem_ptr=2, pmem_id=2)
    assert (hook.held, hook.peak) == (140, 150)


def test_medians_take_turns(monkeypatch):
    monkeypatch.setattr(measure, "WAKING", 0.0)  # one call before the one that is timed
    order = []
    work = [lambda: order.append("a"), lambda: order.append("b")]
    times, runs = measure.Cpu().medians(work, 3, 60.0)
    assert (runs, order) == (3, ["a", "a", "b", "b"] * 3)
    assert len(times) == 2
    assert measure.Cpu().medians(work, 3, 0.0)[1] == 1  # one round is always run


def test_table():
    text = table([["a", "b"], ["long", "1"], ["x", "22"]])
    assert text.splitlines() == ["a      b", "----  --", "long   1", "x     22"]


def test_the_command_line_starts_light(tmp_path):
    """`cupyflash --version` and `--help` need no compiler."""
    code = (
        "import sys; from cupyflash.commands import main; main.parser(); "
        "print('numba' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
