"""tools/gpu_check.py, without a GPU: what it would run exists, and what is not run has failed."""

from __future__ import annotations

import os
import re
import sys
from unittest import mock

import conftest
import gpu_check
import pytest
from gpu_check import SETS, Task, run


def tasks(name):
    return [task for stage in SETS[name](1.0) for task in stage]


def test_what_the_sanitizers_watch_exists():
    named = [word for words in gpu_check.WATCHED.values() for word in words if "::" in word]
    assert named
    for word in named:
        file, _, function = word.partition("::")
        assert f"def {function}(" in (gpu_check.TESTS / "gpu" / file).read_text()


def test_the_processes_share_out_every_test():
    # Of every test with the marker exactly one process has it.
    every, shared = [], []
    for task in tasks("tests"):
        files = [word for word in task.command if word.endswith(".py")]
        assert {"tests/cuda/test_conformance.py", "tests/gpu/test_gpu_contract.py"} <= set(files)
        k = task.command[task.command.index("-k") + 1]
        # With a -m of its own: so thorough tests are not left out.
        assert task.command[task.command.index("-m", 3) + 1] == "gpu"
        assert ("CUPYFLASH_TEST_SHARE" in task.environment) == k.startswith("not ")
        assert k.removeprefix("not ") == "test_conformance"
        (every if k == "test_conformance" else shared).append(task)
    assert len(every) == 1
    names = [task.environment["CUPYFLASH_TEST_SHARE"] for task in shared]
    assert names == [f"{n}/{len(names)}" for n in range(1, len(names) + 1)]


def test_a_share_is_every_so_manieth_test(monkeypatch):
    found = []
    for share in ("1/3", "2/3", "3/3"):
        monkeypatch.setenv("CUPYFLASH_TEST_SHARE", share)
        items = list(range(8))
        conftest.keep_share(mock.Mock(), items)
        assert "CUPYFLASH_TEST_SHARE" not in os.environ
        found.append(items)
    assert found == [[0, 3, 6], [1, 4, 7], [2, 5]]


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
