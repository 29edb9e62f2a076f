"""tests/gpu_check.py, without a GPU: what it would run exists, and what is not run has failed."""

from __future__ import annotations

import re
import sys

import gpu_check
import pytest
from gpu_check import SETS, Task, run

from cupyflash.testing import PROPERTIES


def tasks(name):
    return [task for stage in SETS[name](1.0) for task in stage]


def test_what_the_sanitizers_watch_exists():
    named = [word for words in gpu_check.WATCHED.values() for word in words if "::" in word]
    assert named
    for word in named:
        file, _, function = word.partition("::")
        assert f"def {function}(" in (gpu_check.TESTS / file).read_text()


def test_the_processes_share_out_every_test():
    # Of every test with the marker exactly one process has it, whatever its dtype.
    by_name = [task for task in tasks("tests") if "-k" in task.command]
    chosen = [task.command[task.command.index("-k") + 1] for task in by_name]
    names = set()
    files = [word for word in tasks("tests")[0].command if word.endswith(".py")]
    assert {"tests/test_conformance.py", "tests/test_gpu_contract.py"} <= set(files)
    for file in set(files) - {"tests/test_gpu_verify.py"}:
        text = (gpu_check.ROOT / file).read_text()
        names |= set(re.findall(r"^def (test_\w+)\(", text, re.MULTILINE))
    for name in names:
        for dtype in gpu_check.DTYPES:
            words = {"name": f"{name}[{dtype}]"}
            found = [
                k
                for k in chosen
                if eval(re.sub(r"\b(?!and\b|or\b|not\b)(\w+)", r"('\1' in name)", k), words)
            ]
            assert len(found) == 1, (name, dtype, found)


def test_the_processes_share_out_every_property():
    words = [word for task in tasks("tests") for word in task.command]
    shared = [word for word in words if word.startswith("tests/test_gpu_verify.py::")]
    wanted = [f"tests/test_gpu_verify.py::test_property[{name}]" for name in PROPERTIES]
    assert sorted(shared) == sorted(wanted)


def test_without_the_tool_the_sanitizers_have_failed(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: None)
    watched = [task for task in tasks("sanitizers") if task.command[0] == gpu_check.SANITIZER]
    assert len(watched) == 4 * len(gpu_check.WATCHED)
    for task in watched:
        result = run(task, 1.0, tmp_path)
        assert not result.passed
        assert "not on PATH" in result.said


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("print('3 passed, 1 skipped in 0.5s')", True),
        ("print('3 skipped in 0.5s')", False),
        ("print('3 passed in 0.5s'); raise SystemExit(99)", False),
        ("print('3 passed in 0.5s', flush=True); import time; time.sleep(60)", False),
    ],
    ids=["good", "nothing ran", "bad status", "too slow"],
)
def test_results(tmp_path, program, passed):
    task = Task("a task", (sys.executable, "-c", program), r"\d+ passed")
    result = run(task, 3.0, tmp_path)
    assert result.passed == passed
    assert result.seconds < 30
    assert re.search(r"3 (passed|skipped)", result.said)


def test_a_sanitizer_must_have_reported():
    (task, *_) = (task for task in tasks("sanitizers") if task.what.startswith("racecheck"))
    good = "4 passed in 1.0s\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors)\n"
    assert re.search(task.log_says, good)
    for bad in ("4 passed in 1.0s\n", good.replace(": 0", ": 2"), good.replace("4 passed", "")):
        assert not re.search(task.log_says, bad)
