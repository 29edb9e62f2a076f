"""Runs the tests that need a GPU, or the fuzz, and writes down what came of it, as JSON.

    python tests/tools/gpu_evidence.py tests                     every file with such tests
    python tests/tools/gpu_evidence.py --minutes 9 tests         it ends after nine minutes
    python tests/tools/gpu_evidence.py fuzz --problems 4000 --seed 2611

Each process sees all GPUs, and another one of them as the first. Records go to tests/data/gpu;
`--folder` names another place. The exit status is 1 if a test failed or did not end, or if a result
was beyond its bound.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import gpu_machine
from gpu_machine import RECORDS, ROOT

TESTS = ROOT / "tests"
OUTCOMES = "passed failed error skipped xfailed xpassed".split()
_WORDS = {"XFAIL": "xfailed", "XPASS": "xpassed"}
_TEST = re.compile(
    r"^(\S+?\.py)(::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)(?: \((.*)\))?(?: +\[ *\d+%\])?$"
)
_BEGUN = re.compile(r"^(\S+?\.py)(::.*?)$")
_END = re.compile(
    r"=+ (FAILURES|ERRORS) =+|!+ KeyboardInterrupt !+"
)  # of what pytest -v says of tests
_LAST = re.compile(r"(\d+) problems of seed \d+, (\d+) wrong")
_PROGRESS = re.compile(r"(\d+) of \d+ problems, (\d+) wrong")


SHOWN = 60  # lines of what each process says
PATIENCE = 8.0  # seconds for a process that is interrupted


def gpu_files() -> list[str]:
    """Return the files with tests that need a GPU."""
    return [
        path.relative_to(ROOT).as_posix()
        for path in sorted(TESTS.rglob("test_*.py"))
        if "pytest.mark.gpu" in path.read_text()
    ]


def ended(commands: Sequence[Sequence[str]], settings: Sequence[dict[str, str]], end: float,
          folder: Path) -> list[tuple[int | None, str]]:  # fmt: skip
    """Run processes at the same time; return each one's exit status and output.

    Those that run at the time `end` are interrupted, so that pytest says what has failed, and
    killed if they go on. Their status is None.
    """
    running = []
    for n, (command, environment) in enumerate(zip(commands, settings, strict=True)):
        log = (folder / f"{n}.log").open("wb+")
        begun = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment | {"PYTHONUNBUFFERED": "1", "COLUMNS": "200"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        running.append((begun, log))
    statuses, stopping = [], []
    for process, _ in running:
        status: int | None = None
        try:
            status = process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            stopping.append(process)
        statuses.append(status)
    patience = time.monotonic() + PATIENCE
    for process in stopping:
        try:
            process.wait(max(0.0, patience - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    done: list[tuple[int | None, str]] = []
    for status, (_, log) in zip(statuses, running, strict=True):
        log.seek(0)
        done.append((status, log.read().decode(errors="replace")))
        log.close()
    return done


def outcomes(logs: Iterable[str]) -> dict[str, Any]:
    """Return what came of tests, by file, from what ``pytest -v`` says.

    A test that has not ended is the last line before what is said of failures.
    """
    files: dict[str, Counter[str]] = {}
    failed, reasons, cut = set(), Counter[str](), set()
    for lines in map(str.splitlines, logs):
        for found in filter(None, map(_TEST.match, lines)):
            file, name, word, reason = found.groups()
            outcome = _WORDS.get(word, word.lower())
            files.setdefault(file, Counter())[outcome] += 1
            if outcome in ("failed", "error", "xpassed"):
                failed.add(file + name)
            if outcome == "skipped":
                reasons[reason or ""] += 1
        end = next((n for n, line in enumerate(lines) if _END.match(line)), len(lines))
        told = [line for line in lines[:end] if line.strip()]
        last = told[-1].rstrip() if told else ""
        if not _TEST.match(last) and (begun := _BEGUN.match(last)):
            file, name = begun.groups()
            files.setdefault(file, Counter())["not ended"] += 1
            cut.add(file + name)
    return {
        "files": {file: dict(sorted(files[file].items())) for file in sorted(files)},
        "failed": sorted(failed),
        "not_ended": sorted(cut),
        "skips": dict(sorted(reasons.items())),
    }


def environments(jobs: int, gpus: int) -> list[dict[str, str]]:
    """Return for each process its share of the tests, and the GPUs as it counts them."""
    made: list[dict[str, str]] = [{} for _ in range(jobs)]
    for n, each in enumerate(made):
        if jobs > 1:
            each["CUPYFLASH_TEST_SHARE"] = f"{n + 1}/{jobs}"
        if gpus > 1:
            each["CUDA_VISIBLE_DEVICES"] = ",".join(str((n + i) % gpus) for i in range(gpus))
    return made


def run_tests(asked: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """Run the tests in parallel processes; return what the record says of them."""
    begin = time.monotonic()
    files = asked.files or gpu_files()
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--color=no"]
    command += ["-m", asked.marker, "--tb=short", *files]
    shares = environments(asked.jobs, gpus)
    end = begin + 60 * asked.minutes
    with tempfile.TemporaryDirectory() as folder:
        done = ended([command] * asked.jobs, shares, end, Path(folder))
    for _, log in done:
        print("\n".join(log.splitlines()[-SHOWN:]), flush=True)
    found = outcomes(log for _, log in done)
    selected = [re.search(r"collected (\d+) items?(?:.* (\d+) selected)?", log) for _, log in done]
    wanted = sum(int(x[2] or x[1]) for x in selected if x)
    ran = sum(n for each in found["files"].values() for x, n in each.items() if x in OUTCOMES)
    return found | {
        "statuses": [status for status, _ in done],
        "selected": wanted,
        "left": wanted - ran,
        "seconds": round(time.monotonic() - begin),
    }


def run_fuzz(asked: argparse.Namespace) -> dict[str, Any]:
    """Run the fuzz; return what the record says of it."""
    begin = time.monotonic()
    words = ["--device", asked.device, "--problems", asked.problems, "--seed", asked.seed]
    words += ["--jobs", asked.jobs, "--variants", asked.variants]
    command = [sys.executable, str(TESTS / "tools" / "fuzz.py"), *map(str, words)]
    with tempfile.TemporaryDirectory() as folder:
        ((status, log),) = ended([command], [{}], begin + 60 * asked.minutes, Path(folder))
    print(log, flush=True)
    return fuzzed(log) | {
        "seed": asked.seed,
        "variants": asked.variants,
        "asked": asked.problems,
        "status": status,
        "seconds": round(time.monotonic() - begin),
    }


def fuzzed(log: str) -> dict[str, Any]:
    """Return how many problems the fuzz has tried, and which results were wrong."""
    counts = _LAST.findall(log) or _PROGRESS.findall(log) or [("0", "0")]
    wrong = re.findall(r"^(python tests/tools/fuzz\.py .*)\n    (.*)$", log, re.MULTILINE)
    return {
        "problems": int(counts[-1][0]),
        "wrong": [{"command": command, "found": found} for command, found in wrong],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--commit", default="", help="where there is no git")
    parser.add_argument("--folder", type=Path, default=RECORDS, help="where the record goes")
    parser.add_argument("--minutes", type=float, default=60.0, help="the time that it may take")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parts = parser.add_subparsers(dest="part", required=True)
    tests = parts.add_parser("tests")
    tests.add_argument("files", nargs="*", help="other files than all")
    tests.add_argument("--marker", default="gpu", help="pytest's -m (gpu)")
    fuzz = parts.add_parser("fuzz")
    fuzz.add_argument("--problems", type=int, default=20_000)
    fuzz.add_argument("--seed", type=int, default=0)
    fuzz.add_argument("--variants", type=int, default=16)
    fuzz.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    asked = parser.parse_args(arguments)
    facts = gpu_machine.facts(asked.commit)
    found = run_tests(asked, facts["cards"]) if asked.part == "tests" else run_fuzz(asked)
    gpu_machine.write(facts | found, asked.part, asked.folder)
    if asked.part == "tests":
        bad = found["failed"] or found["left"] or any(x not in (0, 5) for x in found["statuses"])
    else:
        bad = found["wrong"] or found["status"] != 0
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
