"""Faults of kernels of caches, codes and pieces are found, each by the test that is for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulator import build
from mutation import (
    cache_mutants,
    cached_code_mutants,
    cached_cpu_mutants,
    code_mutants,
    fp8_mutants,
    piece_mutants,
    schedule_mutants,
    shared_mutants,
)
from mutation.changed_file import GIVEN, changed

ROOT = Path(__file__).resolve().parents[2]
FAULTS = cache_mutants.FAULTS | code_mutants.FAULTS | cached_code_mutants.FAULTS
FAULTS |= shared_mutants.FAULTS | fp8_mutants.FAULTS | schedule_mutants.FAULTS
FAULTS |= piece_mutants.FAULTS | cached_cpu_mutants.FAULTS
# All of them take half an hour; a few show that the tests find what they are there for.
TRIED = list(FAULTS)
if os.environ.get("CUPYFLASH_EVERY_FAULT") != "1":
    TRIED = [name for name in FAULTS if name.startswith("gpu")][::8]
    TRIED += [name for name in FAULTS if name.startswith("cpu")][::11]
    TRIED += [name for name in FAULTS if name.startswith("fp8")][::7]
FAILED = 1  # what pytest returns


def run(fault, folder):
    """Run a fault's test with the changed file, and return the process."""
    environment = os.environ | {
        GIVEN: json.dumps([fault.file, fault.before, fault.after]),
        "CUPYFLASH_CACHE_DIR": str(folder),  # compiled kernels are known by the files on disk
        "HYPOTHESIS_PROFILE": "ci",
        "PYTHONPATH": str(ROOT / "tests"),
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-m", ""]
    command += ["-p", "mutation.changed_file", "-p", "no:cacheprovider", "-k", fault.only]
    command += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    return subprocess.run(
        [*command, str(ROOT / "tests" / fault.test)],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_changes_one_place(name):
    fault = FAULTS[name]
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert changed(text, fault.before, fault.after) != text
    file, function = fault.test.split("::")
    assert f"def {function}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def collected():
    """Return the names of all tests in the files of the tests that find faults."""
    files = sorted(
        {str(ROOT / "tests" / fault.test.partition("::")[0]) for fault in FAULTS.values()}
    )
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-m", ""]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *files],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_a_test(name, collected):
    """`only` selects some: without any, a fault would not be tried."""
    fault = FAULTS[name]
    words = fault.only.lower().split(" and ") if fault.only else []
    own = [x for x in collected if fault.test in x]
    assert any(all(word in x.lower() for word in words) for x in own)


@pytest.mark.thorough("mutants of every kernel; that they exist is quick")
@pytest.mark.parametrize("name", TRIED)
def test_a_fault_is_found(name, tmp_path):
    fault = FAULTS[name]
    if fault.file.startswith("kernels_cu/") and build.missing() is not None:
        pytest.skip(str(build.missing()))
    done = run(fault, tmp_path)
    # A signal is an access to what is not there.
    assert done.returncode == FAILED or done.returncode < 0, done.stdout + done.stderr
    assert "FAILED" in done.stdout or done.returncode < 0, done.stdout + done.stderr


@pytest.mark.thorough("the same program without a fault")
def test_without_a_fault_the_tests_pass(tmp_path):
    for name in ("gpu: rotation by the other sign", "cpu: rotation by the other sign"):
        fault = FAULTS[name]
        if fault.file.startswith("kernels_cu/") and build.missing() is not None:
            continue
        done = run(fault._replace(after=fault.before), tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
