"""Suites of tasks: small calls and whole programs, what each contender does, and the command."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_specialisations import target_of
from fake_cupy import fake_cupy

import cupyflash
from cupyflash import bench
from cupyflash.arrays.unallocated import unallocated
from cupyflash.backends.cpu import Cpu
from cupyflash.bench import blocks, host, measure, programs, short, torch_peers
from cupyflash.bench.tasks import NAMES, TaskSuite, Works
from cupyflash.commands import bench_table, info
from cupyflash.commands.main import main
from cupyflash.gpu import route
from cupyflash.problem import validate
from cupyflash.problem.call import Plan
from cupyflash.problem.options import Options

KNOWN = {contender.name: contender for contender in bench.CONTENDERS}
ROOT = Path(__file__).parents[2]


class Quick(measure.Cpu):
    """Takes no pauses."""

    def settle(self):
        pass

    release = settle


def run(suite, task, names, meter=None, **options):
    contenders = [KNOWN[name] for name in names]
    meter = meter or Quick()
    return bench.run_task(meter, suite, task, contenders, runs=1, seconds=1.0, **options)


def statuses(row):
    return {x.contender: x.status for x in row.results}


@pytest.fixture(autouse=True)
def _few_calls(monkeypatch):
    monkeypatch.setattr(host, "REPEATS", 2)


# --- small calls ---


@pytest.mark.parametrize("task", list(bench.TASKS["cpu"]["host"].tasks()), ids=lambda x: x.name)
def test_all_contenders_do_the_same_small_calls(task):
    pytest.importorskip("torch", reason="pip install torch")
    row = run(bench.TASKS["cpu"]["host"], task, NAMES)
    assert set(statuses(row).values()) == {"measured"}, row
    lacks = {"cupyflash.torch": "standard", "attention_varlen": "torch-sdpa"}
    missing = {name for start, name in lacks.items() if task.name.startswith(start)}
    assert set(statuses(row)) == set(NAMES) - missing


@pytest.mark.parametrize(
    "task",
    [x for x in bench.TASKS["gpu"]["host"].tasks() if "torch" not in x.name],
    ids=lambda x: x.name,
)
def test_small_calls_of_a_gpu_on_a_cupy_in_host_memory(task, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(free=2**24))
    monkeypatch.setitem(host.SMALL, "gpu", (1, 2, 16, 16))
    row = run(bench.TASKS["gpu"]["host"], task, ("cupyflash", "standard"), measure.Gpu())
    assert statuses(row) == {"cupyflash": "measured", "standard": "measured"}, row
    assert all(x.difference < 3e-3 for x in row.results)


def test_calls_see_lengths_that_grow():
    seen = []
    suite = bench.TASKS["cpu"]["host"]
    task = next(x for x in suite.tasks() if "50 keys" in x.name and "cached" in x.name)

    def attention_cached(q, k, v, lengths):
        seen.append(lengths)
        return host.standard(np, q, k[:, :, :lengths], v[:, :, :lengths])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host.cached, "attention_cached", attention_cached)
        patch.setattr(host, "REPEATS", 9)
        row = run(suite, task, ("cupyflash", "standard"))
    assert statuses(row) == {"cupyflash": "measured", "standard": "measured"}
    assert seen[:9] == [*range(50, 58), 50]


def test_a_time_is_that_of_one_call():
    def maker(meter, dtype):
        del meter, dtype
        return Works({"cupyflash": lambda: lambda: np.ones(1)}, lambda x: [x], count=50)

    class Clock(Quick):
        def seconds(self, work):
            work()
            return 0.5

    suite = TaskSuite("a test", "test", {"it": maker}, "float32", {"it": "token"})
    (task,) = suite.tasks()
    assert task.each == "token"
    row = run(suite, task, ("cupyflash", "standard"), Clock())
    (result,) = row.results  # nobody else has something for it
    assert result.seconds == result.low == result.high == pytest.approx(0.01)
    assert result.peak_bytes is None
    assert row.ratio("cupyflash") == 1
    assert row.ratio("standard") is None


def test_the_host_does_not_wait_for_the_device(monkeypatch):
    did = []
    cupy = SimpleNamespace(
        cuda=SimpleNamespace(
            Device=lambda: SimpleNamespace(synchronize=lambda: did.append("synchronize"))
        )
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(
        measure.time, "perf_counter", lambda: did.append("clock") or float(len(did))
    )
    assert measure.Gpu().host_seconds(lambda: did.append("work")) == 2
    assert did == ["synchronize", "clock", "work", "clock", "synchronize"]


# --- short rows ---


@pytest.mark.parametrize("backward", [False, True])
def test_short_rows_are_the_same_by_numpys_lines(backward):
    suite = bench.TASKS["cpu"]["short"]
    made = functools.partial(short.short, heads=3, tokens=8, backward=backward)
    few = dataclasses.replace(suite, makers={"it": made})
    (task,) = few.tasks()
    row = run(few, task, suite.contenders)
    assert statuses(row) == {"cupyflash": "measured", "standard": "measured"}, row
    assert all(x.difference < 1e-5 for x in row.results)


def test_short_rows_have_few_heads_and_tokens():
    names = list(bench.TASKS["cpu"]["short"].makers)
    assert names[0] == "3 heads, 8 tokens, forward"
    assert names[-1] == "96 heads, 256 tokens, backward"
    assert len(names) == len(set(names)) == 36


# --- tiles of other sizes ---


@pytest.mark.parametrize("tiles", [(16, 64), (64, 16)])
def test_tiles_of_other_sizes_compute_the_same(tiles, monkeypatch):
    seen, forward = [], Cpu.forward

    def recorded(self, call, out, lse, plan=None):
        seen.append((plan.block_q, plan.block_kv))
        return forward(self, call, out, lse, plan)

    monkeypatch.setattr(Cpu, "forward", recorded)
    made = functools.partial(blocks.of_tiles, shape=(1, 2, 80, 16), tiles=tiles)
    suite = dataclasses.replace(bench.TASKS["cpu"]["blocks"], makers={"it": made})
    row = run(suite, next(suite.tasks()), suite.contenders)
    assert statuses(row) == {"cupyflash": "measured", "standard": "measured"}, row
    assert all(x.difference < 1e-5 for x in row.results)
    assert set(seen) == {tiles}


def test_tiles_of_a_gpu_are_those_of_the_simt_kernel():
    q = unallocated(blocks.SHAPES["gpu"], np.dtype(np.float32))
    call = validate.call(q, q, q, Options())

    def plan(tiles, arch):
        return route.forward(call, target_of(arch), q, None, Plan("", *tiles, "")).plan

    for tiles in blocks.TILES.values():
        if tiles == (512, 64):
            with pytest.raises(cupyflash.ArgumentError, match="232448 bytes of shared memory"):
                plan(tiles, "sm_90")
        else:
            made = plan(tiles, "sm_90")
            assert (made.kernel, made.block_q, made.block_kv) == ("forward_simt", *tiles)


def test_counted_bytes_of_tiles():
    """Keys and values are read once for each block of queries, whatever the keys of a tile."""
    tasks = {x.name: x.moved for x in bench.TASKS["cpu"]["blocks"].tasks()}
    assert len(tasks) == 10
    assert {n for name, n in tasks.items() if name.startswith("64 queries")} == {
        4 * 4 * (2048 * (64 + 64 + 1) + 32 * 2 * 2048 * 64)
    }
    by_queries = [tasks[f"{n} queries x 64 keys"] for n in blocks.QUERIES]
    assert by_queries == sorted(by_queries, reverse=True)


# --- programs ---


SMALL = {
    "numpy_generation": {"width": 24, "layers": 1, "heads": 2, "hidden": 32},
    "numpy_training": {"width": 24, "layers": 1, "heads": 2, "row": 16, "batch": 2},
    "numpy_whisper": {"width": 24, "layers": 1, "heads": 2, "vocabulary": 40},
    "numpy_gpt2": {"width": 24, "layers": 1, "heads": 2, "vocabulary": 40},
    "numpy_triangle": {"width": 16, "layers": 2, "heads": 2, "head": 8},
    "torch_swin": {
        "width": 8, "depths": (2,), "head": 8, "window": 3, "patch": 2, "image": 12, "classes": 5,
    },
}  # fmt: skip


@pytest.fixture
def small_programs(monkeypatch):
    """The programs of the examples, at small sizes; PyTorch has one thread."""
    monkeypatch.setattr(programs, "FOLDER", ROOT / "examples")
    programs.program.cache_clear()
    torch, _ = torch_peers.find()
    for name, sizes in SMALL.items():
        if torch is not None or name != "torch_swin":
            module = programs.program(name)
            monkeypatch.setattr(module, "Setting", functools.partial(module.Setting, **sizes))
    monkeypatch.setattr(programs, "STEPS", 2)
    threads = torch.get_num_threads() if torch is not None else 0
    if threads:
        torch.set_num_threads(1)
    yield
    if threads:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("task", list(bench.TASKS["cpu"]["programs"].tasks()), ids=lambda x: x.name)
def test_programs_give_the_same_whoever_attends(task, small_programs):
    suite, names = bench.TASKS["cpu"]["programs"], ["cupyflash", "standard"]
    if "Swin" in task.name:
        pytest.importorskip("torch", reason="pip install torch")
        names.append("torch-sdpa")
    if "2000" in task.name:
        suite = dataclasses.replace(
            suite, makers={task.name: functools.partial(programs.generation, tokens=40)}
        )
    if task.name.startswith("triangle"):
        suite = dataclasses.replace(
            suite, makers={task.name: functools.partial(programs.triangle, positions=12)}
        )
    row = run(suite, task, suite.contenders)
    assert statuses(row) == dict.fromkeys(names, "measured"), row
    assert all(x.difference < 1e-5 for x in row.results)


def test_programs_are_those_of_the_examples():
    tasks = {x.name: x.each for x in bench.TASKS["cpu"]["programs"].tasks()}
    assert tasks == {
        **{f"generation, {n} tokens": "token" for n in (50, 250, 2000)},
        "training, rows of 64": "step",
        "Whisper's decoder, 50 tokens": "token",
        **{f"GPT-2, a prompt of {n} tokens": "prompt" for n in (10, 50)},
        **{f"triangle attention, {n} positions": "layer" for n in (32, 64, 128)},
        "Swin-T, 2 images": "batch",
        "Swin-T, 2 images, training": "step",
    }
    sizes = {
        "numpy_generation": {"width": 288, "layers": 6, "heads": 6},
        "numpy_training": {"row": 64, "batch": 12},
        "numpy_whisper": {"width": 384, "layers": 4, "heads": 6, "recording": 1500},
        "numpy_gpt2": {"width": 768, "layers": 12, "heads": 12, "vocabulary": 50257},
        "numpy_triangle": {"width": 128, "heads": 4, "head": 32},
    }
    for name, wanted in sizes.items():
        setting = programs.program(name).Setting()
        assert {key: getattr(setting, key) for key in wanted} == wanted


def test_each_training_begins_with_the_same_weights(small_programs):
    made = programs.training(Quick(), "float32", steps=2)
    ours, theirs = (made.works[name]() for name in ("cupyflash", "standard"))
    assert np.array_equal(ours(), ours())
    np.testing.assert_allclose(ours(), theirs(), rtol=1e-4)
    assert made.count == 2
    assert not np.array_equal(theirs()[:1], theirs()[1:])


def test_a_wrong_program_is_told(small_programs, monkeypatch):
    """Gradients are compared, too: here one of the biases is lost."""
    pytest.importorskip("torch", reason="pip install torch")
    swin = programs.program("torch_swin")

    def constant(q, k, v, near, hides):
        return swin.attention_in_lines(q, k, v, near.detach() + 0 * near, hides)

    monkeypatch.setitem(swin.ATTENTION, "lines", constant)
    suite = bench.TASKS["cpu"]["programs"]
    (task,) = (x for x in suite.tasks() if x.name.endswith("images, training"))
    row = run(suite, task, suite.contenders)
    assert statuses(row) == {"cupyflash": "measured", "standard": "WRONG", "torch-sdpa": "measured"}


def test_without_a_clone_the_remedy_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(programs, "FOLDER", tmp_path)
    programs.program.cache_clear()
    suite = bench.TASKS["cpu"]["programs"]
    (task, *_) = suite.tasks()
    row = run(suite, task, suite.contenders)
    assert set(statuses(row).values()) == {"refused"}
    assert "numpy_generation.py" in row.results[0].reason
    assert "pip install -e ." in row.results[0].reason


# --- the command ---

SOME = ("attention", "attention_backward, causal", "cupyflash.torch")


def only_some(patch):
    """Leave few tasks in the suite."""
    suite = bench.TASKS["cpu"]["host"]
    few = dataclasses.replace(suite, makers={name: suite.makers[name] for name in SOME})
    patch.setitem(bench.TASKS["cpu"], "host", few)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """What a run of the command wrote, measured once."""
    pytest.importorskip("rich", reason='pip install ".[bench]"')
    file = tmp_path_factory.mktemp("bench") / "found.json"
    only = ["--only", "cupyflash", "--only", "standard"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "REPEATS", 2)
        only_some(patch)
        arguments = ["--device", "cpu", "--suite", "host", "--runs", "2", *only]
        assert main(["bench", *arguments, "--json", str(file)]) == 0
    return file


def test_the_table_and_the_file(stored, capsys):
    report = bench.Report.from_json(stored.read_text())
    assert tuple(row.task.name for row in report.tasks) == SOME
    assert bench.Report.from_json(report.to_json()) == report
    assert report.contenders == ["cupyflash", "standard"]
    assert main(["bench", "--load", str(stored)]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= 100
    for row in report.tasks:
        for result in row.results:
            assert bench_table.duration(result.seconds) in out
        if (ratio := row.ratio("standard")) is not None:
            assert ratio == pytest.approx(row.results[0].seconds / row.results[1].seconds)
            assert bench_table.three_digits(ratio) in out
    if info.commit():
        assert report.versions["commit"] == info.commit()


@pytest.mark.parametrize("name", ["host.svg", "host.png"])
def test_the_picture(stored, name, tmp_path):
    pytest.importorskip("matplotlib", reason='pip install ".[bench]"')
    file = tmp_path / name
    assert main(["bench", "--load", str(stored), "--plot", str(file)]) == 0
    if file.suffix == ".svg":
        text = file.read_text()
        assert all(f"<!-- {x} -->" in text for x in ("attention", "cupyflash", "standard"))
        assert "(ratio " in text
    else:
        assert file.read_bytes().startswith(b"\x89PNG")


def test_a_wrong_task_gives_exit_status_1(monkeypatch, capsys):
    pytest.importorskip("rich", reason='pip install ".[bench]"')
    only_some(monkeypatch)
    monkeypatch.setattr(host, "standard", lambda xp, q, *_: 0.9 * q)
    only = ["--only", "cupyflash", "--only", "standard"]
    arguments = ["--device", "cpu", "--suite", "host", "--runs", "1", "--seconds", "0.001", *only]
    assert main(["bench", *arguments]) == 1
    assert "WRONG (1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--suite", "host", "--dtype", "float64"], "got --dtype with --suite host"),
        (["--suite", "programs", "--shape", "1,1,8,8"], "got --shape with --suite programs"),
        (["--suite", "host", "--graphs"], "got --graphs with --suite host"),
    ],
)
def test_what_tasks_do_not_have(arguments, wanted, capsys):
    pytest.importorskip("rich", reason='pip install ".[bench]"')
    assert main(["bench", "--device", "cpu", *arguments]) == 2
    assert wanted in " ".join(capsys.readouterr().err.split())


def test_programs_are_for_the_cpu(monkeypatch, capsys):
    pytest.importorskip("rich", reason='pip install ".[bench]"')
    from cupyflash.commands import bench as command

    monkeypatch.setattr(command, "choose_device", lambda _: ("gpu", "as a test says"))
    assert main(["bench", "--suite", "programs"]) == 2
    assert "Add --device cpu" in " ".join(capsys.readouterr().err.split())


def test_the_commit_is_that_of_the_clone(monkeypatch):
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False)
    except OSError:
        done = SimpleNamespace(returncode=1)
    found = info.commit()
    if done.returncode or Path(info.__file__).parents[2] != ROOT:
        assert found == ""
    else:
        assert done.stdout.startswith(found.removesuffix("-dirty").rpartition("-g")[2])
        monkeypatch.setenv("PATH", "")
        assert info.commit() == ""
