"""All that needs a GPU: tests, repeated calls, sanitizers; in parallel, with a table of results.

    python tests/tools/gpu_check.py                      everything, in some minutes
    python tests/tools/gpu_check.py --only sanitizers    or tests, or repeats
    python tests/tools/gpu_check.py --minutes 3          a process that takes longer has failed

It exits with 0 where everything passed. What cannot be run has failed, with the remedy.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"

SHARES = 40  # of the tests, each for a process: neighbours are alike, and go to different ones

# What the sanitizers watch: every kernel with every type on a few drawn problems, and calls whose
# arrays are particular. A name that is no longer there is an error of pytest's.
WATCHED = {
    "forward": ("test_gpu_attention.py::test_forward_is_within_the_bound",),
    "backward of dense arrays": (
        "test_gpu_attention.py::test_gradients_are_within_the_bound",
        "-k",
        "dense",
    ),
    "backward of packed arrays": (
        "test_gpu_attention.py::test_gradients_are_within_the_bound",
        "-k",
        "packed",
    ),
    "second derivatives": ("test_gpu_second.py::test_second_derivatives_are_within_the_bound",),
    "particular calls": (
        "test_gpu_contract.py::test_results_are_like_their_inputs",
        "test_gpu_contract.py::test_matrices_and_empty_axes",
        "test_gpu_contract.py::test_dropped_pairs_are_those_of_the_cpu",
        "test_gpu_contract.py::test_offsets_on_the_gpu",
        "test_gpu_contract.py::test_offsets_that_are_wrong",
        "test_gpu_contract.py::test_look_ups_are_read_at_every_call",
        "test_gpu_contract.py::test_causal_visits_528_of_1024_tiles",
    ),
    "a cache": (
        "test_gpu_cached.py::test_every_entry_is_within_the_bound",
        "test_gpu_cached.py::test_pages_drafts_and_batches_change_no_bit",
        "-k",
        "plain or window or 16-float",
    ),
    "Hopper": (
        "test_gpu_hopper.py::test_its_results_are_within_the_bound",
        "test_gpu_hopper.py::test_gradients_of_packed_sequences_are_within_the_bound",
        "test_gpu_hopper.py::test_the_gradient_of_a_bias_is_within_the_bound",
        "-k",
        "bfloat16 and not causal",
    ),
    "Hopper, masks and gradients": (
        "test_gpu_hopper.py::test_masks",
        "test_gpu_hopper.py::test_its_gradients_are_within_the_bound",
        "-k",
        "bfloat16 and (documents or plain)",
    ),
    "Hopper, head after head": (
        "test_gpu_hopper.py::test_a_head_has_the_same_bits_in_any_company",
        "-k",
        "causal and 64-bfloat16",
    ),
}
# Few examples, always the same, and every array in an allocation of its own.
WATCHED_ENVIRONMENT = {"HYPOTHESIS_PROFILE": "sanitizer", "CUPYFLASH_TEST_NO_POOL": "1"}
SANITIZER = "compute-sanitizer"
# And their options. A call that fails raises an exception; what memcheck would tell of calls are
# functions that cuda-bindings asks the driver for and that it does not have.
TOOLS: dict[str, tuple[str, ...]] = {
    "memcheck": ("--report-api-errors", "no"),
    "initcheck": (),
    "synccheck": (),
    "racecheck": (),
}
# racecheck does not follow the order between lanes that meet and the one of them that arrives at a
# barrier for all: each arrives itself. The emulator follows it, in the kernels as they are.
# initcheck does not see what boxes write to memory: results leave otherwise. That all of them are
# written is what tests with poisoned memory see.
SEEN_BY = {
    "racecheck": {"CUPYFLASH_EACH_LANE_ARRIVES": "1"},
    "initcheck": {"CUPYFLASH_NO_TMA_STORE": "1"},
}


@dataclass(frozen=True)
class Task:
    """A process, and what its log must hold beside an exit status of 0."""

    what: str
    command: tuple[str, ...]
    log_says: str
    environment: dict[str, str] = field(default_factory=dict)
    cannot: str = ""  # why it cannot be run, and the remedy

    def __str__(self) -> str:
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.command)])


@dataclass(frozen=True)
class Result:
    """What came of a task."""

    task: Task
    passed: bool
    seconds: float
    said: str
    log: Path | None = None


def pytest(*arguments: str) -> tuple[str, ...]:
    return ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *arguments)


def tests(minutes: float) -> list[list[Task]]:
    """Every test with the marker, each in one of the processes."""
    files = [
        path.relative_to(ROOT).as_posix()
        for path in sorted(TESTS.rglob("test_*.py"))
        if "pytest.mark.gpu" in path.read_text()
    ]
    # A process must have passed tests: without g++ all of these are skipped, and it fails.
    tasks = [Task("tests: conformance", pytest("-k", "test_conformance", *files), r"\d+ passed")]
    for number in range(1, SHARES + 1):
        share = {"CUPYFLASH_TEST_SHARE": f"{number}/{SHARES}"}
        command = pytest("-k", "not test_conformance", *files)
        tasks.append(Task(f"tests: share {number}", command, r"\d+ passed", share))
    return [tasks]


def repeats(minutes: float) -> list[list[Task]]:
    """One call, 1,000 times, in as long as a process may take."""
    time_given = ("--minutes", f"{0.9 * minutes:g}")
    return [
        [
            Task(
                f"repeats: {case}",
                ("python", "tests/tools/gpu_repeats.py", case, *time_given),
                r"equal in every bit",
            )
            for case in ("plain", "masked")
        ]
    ]


def sanitizers(minutes: float) -> list[list[Task]]:
    """The watched tests alone, which also compiles their kernels, then under each tool."""
    cannot = (
        ""
        if shutil.which(SANITIZER)
        else f"{SANITIZER} is not on PATH: it comes with the CUDA toolkit, in its folder bin"
    )
    alone, watched = [], []
    for what, (first, *others) in WATCHED.items():
        arguments = [f"tests/gpu/{x}" if x.startswith("test_") else x for x in (first, *others)]
        command = pytest(*arguments)
        # On other GPUs, those for Hopper are skipped.
        done = r"\d+ (passed|skipped)" if what.startswith("Hopper") else r"\d+ passed"
        alone.append(Task(f"no tool: {what}", command, done, WATCHED_ENVIRONMENT))
        for tool, own in TOOLS.items():
            options = ("--tool", tool, *own, "--error-exitcode", "99", "--target-processes", "all")
            watched.append(
                Task(
                    f"{tool}: {what}",
                    (SANITIZER, *options, *command),
                    rf"(?s){done}.*SUMMARY: 0 ",
                    WATCHED_ENVIRONMENT | SEEN_BY.get(tool, {}),
                    cannot,
                )
            )
    return [alone, watched]


SETS: dict[str, Callable[[float], list[list[Task]]]] = {
    "tests": tests,
    "repeats": repeats,
    "sanitizers": sanitizers,
}


def run(task: Task, seconds: float, logs: Path) -> Result:
    """Run a task in a process group of its own, which ends with it."""
    began = time.monotonic()
    if task.cannot:
        return Result(task, False, 0.0, task.cannot)
    log = logs / (re.sub(r"\W+", "-", task.what) + ".log")
    command = [sys.executable if word == "python" else word for word in task.command]
    environment = os.environ | task.environment | {"PYTHONUNBUFFERED": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    took = time.monotonic() - began
    text = log.read_text(errors="replace")
    said = summary(text)
    if status is None:
        return Result(task, False, took, f"not done after {seconds:.0f} s; {said}", log)
    passed = status == 0 and re.search(task.log_says, text) is not None
    return Result(task, passed, took, said if passed else f"exit status {status}; {said}", log)


def summary(text: str) -> str:
    """What pytest, a sanitizer and the repeats say at the end."""
    lines = re.findall(r"\d+ (?:passed|failed|error|skipped|deselected)[^\n]*? in [\d.]+s", text)
    lines += re.findall(r"(?:ERROR|RACECHECK) SUMMARY: [^\n]*", text)
    lines += re.findall(r"\w+: \d+ of \d+ runs[^\n]*", text)
    last = text.strip().rpartition("\n")[2]
    return "; ".join(lines) or f"the last line: {last[:200]!r}"


def show(results: list[Result]) -> None:
    for result in results:
        if not result.passed and result.log is not None:
            print(f"\n--- {result.task.what}: the end of {result.log}")
            print("\n".join(result.log.read_text(errors="replace").splitlines()[-40:]))
    print("\n| what | result | seconds | said | command |\n|---|---|---|---|---|")
    for result in results:
        word = "passed" if result.passed else "FAILED"
        command = textwrap.shorten(str(result.task), 200, placeholder=" ...")
        cells = (result.task.what, word, f"{result.seconds:.0f}", result.said, f"`{command}`")
        print("| " + " | ".join(cells) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=SETS, help="one part instead of all")
    parser.add_argument("--minutes", type=float, default=10.0, help="a process's time (10)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--logs", type=Path, help="a folder for their output")
    given = parser.parse_args()
    logs = given.logs or Path(tempfile.mkdtemp(prefix="gpu_check_"))
    logs.mkdir(parents=True, exist_ok=True)
    results = []
    for name in [given.only] if given.only else SETS:
        for stage in SETS[name](given.minutes):
            with ThreadPoolExecutor(given.jobs) as pool:
                running = [pool.submit(run, task, 60 * given.minutes, logs) for task in stage]
                for future in running:
                    results.append(future.result())
                    last = results[-1]
                    word = "passed" if last.passed else "FAILED"
                    print(f"{last.task.what}: {word} in {last.seconds:.0f} s", flush=True)
    show(results)
    return int(not all(result.passed for result in results))


if __name__ == "__main__":
    sys.exit(main())
