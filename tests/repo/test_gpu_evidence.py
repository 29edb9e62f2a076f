"""tests/tools/gpu_evidence.py: its records say what passed, failed, was skipped, or did not end."""

from __future__ import annotations

import importlib
import json

import gpu_evidence
import gpu_machine
import host_cupy
import pytest
from cuda_specialisations import SHARED_MEMORY

FILE = """
import time
import pytest
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("word", ["a b", "[c]", "PASSED"])
def test_good(word):
    pass

def test_bad():
    print("tests/x.py::nothing")
    assert 1 == 2

def test_left_out():
    pytest.skip("no such GPU")

@pytest.mark.xfail(strict=True, reason="it is known")
def test_known():
    assert 1 == 2
"""
SLOW = """
def test_slow():
    time.sleep(600)

def test_behind():
    pass
"""


def short(name):
    """Return the name of a test without its folder."""
    return name.rpartition("/")[2]


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Run the tool, and return its exit status and its record."""

    def record(*words):
        words = [str(x) for x in ("--commit", "0123abc", "--folder", tmp_path / "made", *words)]
        status = gpu_evidence.main(words)
        (path,) = (tmp_path / "made").iterdir()
        assert path.name.endswith("_0123abc.json")
        return status, json.loads(path.read_text())

    with host_cupy.for_records(monkeypatch):
        yield record


def test_the_record_of_tests_names_what_failed(tmp_path, record):
    (tmp_path / "test_few.py").write_text(FILE)
    status, made = record("--jobs", 1, "tests", tmp_path / "test_few.py")
    assert status == 1
    counts = {"failed": 1, "passed": 3, "skipped": 1, "xfailed": 1}
    assert {short(file): x for file, x in made["files"].items()} == {"test_few.py": counts}
    assert [short(x) for x in made["failed"]] == ["test_few.py::test_bad"]
    assert list(made["skips"]) == ["no such GPU"]
    assert (made["selected"], made["left"], made["not_ended"]) == (6, 0, [])
    assert made["commit"] == "0123abc"
    assert gpu_machine._words(["--folder", "/a", "tests", "--folder=/b"]) == ["tests"]
    assert "H200" in made["card"]
    assert made["cards"] == 1
    assert made["versions"].keys() >= {"python", "numpy", "numba"}


def test_processes_take_turns_of_gpus():
    assert gpu_evidence.environments(1, 1) == [{}]
    assert gpu_evidence.environments(3, 2) == [
        {"CUPYFLASH_TEST_SHARE": "1/3", "CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUPYFLASH_TEST_SHARE": "2/3", "CUDA_VISIBLE_DEVICES": "1,0"},
        {"CUPYFLASH_TEST_SHARE": "3/3", "CUDA_VISIBLE_DEVICES": "0,1"},
    ]


@pytest.mark.thorough("it waits for the clock; what is recorded is tested without it")
def test_what_did_not_end_in_time_is_named_and_counted(tmp_path, record):
    (tmp_path / "test_slow.py").write_text(FILE.replace("1 == 2", "True") + SLOW)
    status, made = record("--jobs", 1, "--minutes", 0.15, "tests", tmp_path / "test_slow.py")
    assert status == 1
    assert made["statuses"] == [None]
    assert [short(x) for x in made["not_ended"]] == ["test_slow.py::test_slow"]
    assert (made["selected"], made["left"]) == (8, 2)


def test_the_record_of_the_fuzz_has_seed_and_problems(record):
    status, made = record("--jobs", 1, "fuzz", "--device", "cpu", "--problems", 2, "--seed", 5)
    assert status == 0
    assert (made["seed"], made["problems"], made["asked"], made["wrong"]) == (5, 2, 2, [])


def test_the_record_of_the_fuzz_has_what_was_wrong():
    command = "python tests/tools/fuzz.py --seed 7 --only 41 --device gpu"
    log = f"{command}\n    dq is off\n500 of 1000 problems, 1 wrong, 9 s\n"
    wrong = [{"command": command, "found": "dq is off"}]
    assert gpu_evidence.fuzzed(log) == {"problems": 500, "wrong": wrong}
    log += "1000 problems of seed 7, 1 wrong\n"
    assert gpu_evidence.fuzzed(log)["problems"] == 1000


def test_every_file_with_gpu_tests_is_run():
    files = gpu_evidence.gpu_files()
    assert "tests/gpu/test_gpu_changes.py" in files
    assert len([x for x in files if x.startswith("tests/gpu/")]) > 15


def test_a_commit_is_that_of_the_checkout():
    made = gpu_machine.commit_of()
    assert bool(made.rstrip("+")) == (gpu_machine.ROOT / ".git").exists()  # an sdist has none


def test_the_page_of_what_was_verified_has_every_record(monkeypatch):
    """Also what failed or did not end; and a card that was not run is not said to be."""
    pytest.importorskip("docutils", reason='the site is built by what pip install ".[docs]" brings')
    monkeypatch.syspath_prepend(str(gpu_machine.ROOT / "docs"))
    records = importlib.import_module("records")
    paths = list(gpu_machine.RECORDS.glob("*.json"))
    kinds = "tests", "fuzz", "compiled", "changes", "ranks", "transformers"
    assert sum(len(records.records(kind)) for kind in kinds) == len(paths)
    _, rows = records.cards()
    assert {row[0] for row in rows} == {records.capability(arch) for arch in SHARED_MEMORY}
    run = {x["capability"] for kind in ("tests", "fuzz") for x in records.records(kind)}
    for number, _, state, compiled in rows:
        assert state.startswith("run: ") == (number in run), number
        assert compiled != "not compiled", number
        assert number in run or state == "compiled, not run"
    for record in records.records("tests"):
        head, rows = records.of_tests(record)
        assert len(rows) == len(record["files"]) + 1
        assert rows[-1][head.index("failed")] == str(len(record["failed"]))
        assert rows[-1][head.index("not ended")] == str(len(record["not_ended"]))
    _, rows = records.of_fuzz()
    assert [int(row[-1]) for row in rows] == [len(x["wrong"]) for x in records.records("fuzz")]
    head, rows = records.of_ranks()
    assert len(rows) == sum(len(x["milliseconds"]) for x in records.records("ranks"))
    assert all(len(row) == len(head) for row in rows)
    assert ":::{rank-runs}" in (gpu_machine.ROOT / "docs" / "howto" / "distributed.md").read_text()
    for record in records.records("transformers"):
        tables = [records.of_steps(record), records.of_generation(record)]
        assert sum(len(rows) for _, rows in tables) == len(record["rows"])
        assert all(len(row) == len(head) for head, rows in tables for row in rows)
    page = (gpu_machine.ROOT / "docs" / "howto" / "pytorch.md").read_text()
    assert all(f":::{{transformers-{x}}}" in page for x in ("steps", "generation"))
    page = (gpu_machine.ROOT / "docs" / "verified.md").read_text()
    _, rows = records.of_cpus()
    assert len(rows) == len(list(records.OF_CPUS.glob("*.json"))) > 0
    for name in ("cards", "test-runs", "fuzz-runs", "cpu-runs", "benchmark-runs"):
        assert f":::{{{name}}}" in page
