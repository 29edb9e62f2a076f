"""Files without a problem of `tests/mutation` have tests that judge their mutants."""

from __future__ import annotations

import subprocess
import sys

import mutants
import pytest
from emulator import build
from mutation.changed_file import has_words
from mutation.judges import JUDGES, ROOT, judge

# Mutants that are killed, by their keys.
KILLED = {
    "common/cache.cuh": "01746a781d48",
    "common/rotary.cuh": "08e06f60b7bf",
    "rowwise/append.cu": "018d40aaab31",
    "reference/cpu/rope.py": "0178620be3ee",
    "reference/cpu/decode.py": "19afa40dd78b",
    "decode/tasks.cuh": "00c4cac12c0e",
    "decode/cursor.cuh": "00751e3d674d",
    "simt/decode_simt.cu": "0117d7dd73fe",
    "decode/results.cuh": "00afb6d60bb7",
}


@pytest.fixture(scope="module")
def collected():
    """Return the names of all tests in the files of judges."""
    files = sorted({str(ROOT / "tests" / tests) for x in JUDGES.values() for tests, _, _ in x})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-m", ""]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *files],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_every_judge_is_a_test(collected):
    """Words select some: without any, a mutant would not be tried."""
    for file, judges in JUDGES.items():
        text = mutants.text_of(file)
        assert text, file
        for each in judges:
            assert any(has_words(item, [each]) for item in collected), (file, each)


def with_compiler(file):
    if not file.endswith(".py") and build.missing() is not None:
        pytest.skip(str(build.missing()))


@pytest.mark.thorough("mutants of every kernel; that they have judges is quick")
@pytest.mark.parametrize("file", KILLED)
def test_mutants_are_killed(file, tmp_path):
    with_compiler(file)
    keys = mutants.keys_of(x for x in mutants.every_mutant() if x.file == file)
    mutant = next(x for x, key in keys.items() if key == KILLED[file])
    status, why = judge(file, mutant.apply(mutants.text_of(file)), tmp_path)
    assert (status, bool(why)) == ("killed", True)


@pytest.mark.thorough("the same program without a fault")
@pytest.mark.parametrize("file", ["common/rotary.cuh", "reference/cpu/rope.py"])
def test_without_a_mutant_the_tests_pass(file, tmp_path):
    with_compiler(file)
    assert judge(file, mutants.text_of(file), tmp_path) == ("survived", "")
