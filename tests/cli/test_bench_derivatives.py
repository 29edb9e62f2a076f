"""The suite `derivatives`: every pass by this package and by PyTorch, with the memory of both."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from cupyflash import bench
from cupyflash.bench import derivatives, measure
from cupyflash.commands import bench_table

# PyTorch's own, of its compiler, which forward mode imports.
pytestmark = [
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default:.*torch.jit.script:FutureWarning"),
]
KNOWN = {contender.name: contender for contender in bench.CONTENDERS}
SUITE = bench.TASKS["cpu"]["derivatives"]


class Quick(measure.Cpu):
    """Takes no pauses."""

    def settle(self):
        pass

    release = settle


def row_of(name, causal=True):
    made = functools.partial(derivatives.of_pass, shape=(1, 2, 40, 8), name=name, causal=causal)
    few = dataclasses.replace(SUITE, makers={name: made}, dtypes={})
    (task,) = few.tasks()
    contenders = [KNOWN[x] for x in SUITE.contenders]
    return bench.run_task(Quick(), few, task, contenders, runs=1, seconds=1.0)


@pytest.mark.parametrize("name", derivatives.PASSES)
def test_passes_are_those_of_pytorch(name):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    row = row_of(name, causal=name != "backward")
    assert [x.status for x in row.results] == ["measured"] * 2, row
    assert row.results[1].difference < 1e-5
    assert all(x.peak_bytes for x in row.results)


def test_rows_show_memory(capsys):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    row = row_of("forward mode")
    report = bench.Report("derivatives", "cpu", "a CPU", {}, "", (), {}, (row,))
    again = bench.Report.from_json(report.to_json())
    assert again == report
    bench_table.show(again)
    assert "cupyflash holds" in capsys.readouterr().out


def test_a_wrong_tangent_is_no_time(monkeypatch):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    right = derivatives.forward_mode.attention_jvp

    def wrong(*args, **options):
        out, tout = right(*args, **options)
        return out, 1.01 * tout

    monkeypatch.setattr(derivatives.forward_mode, "attention_jvp", wrong)
    assert row_of("forward mode").results[1].status == "WRONG"


def test_tasks_name_their_types():
    tasks = list(bench.TASKS["gpu"]["derivatives"].tasks())
    assert {x.dtype for x in tasks} == {"bfloat16", "float32"}
    assert tasks[0].name == "bfloat16, full, 1024 tokens, forward"
    assert len(tasks) == 32
