"""The command `cupyflash bench`: time and memory against sequence length, compared with others."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arrays.dtypes import FLOATS
from ..errors import ArgumentError
from ..files import check_ending, check_writable, replacing, write_text
from ..hints.install import extra
from . import info
from .bench_table import show
from .demo import choose_device, number_of_threads
from .text import complain, whole_number

if TYPE_CHECKING:
    from ..bench import Case, Contender, Report, Suite, Task, TaskSuite

SUITE_NAMES = ("quick", "article", "peers", "variants", "decode", "fp8")
TASK_NAMES = ("host", "short", "programs", "models", "blocks", "derivatives")
PASS_NAMES = ("forward", "backward")
VARIANT_NAMES = ("full", "causal", "window", "documents", "prefix", "alibi", "softcap")
PICTURE_NAMES = ("rate", "speed-up", "memory")
EXTRA = extra("bench")
RUNS = {"cpu": 7, "gpu": 30}
SHORT_RUNS = {
    "host": 50,
    "short": 30,
    "models": 30,
    "programs": 30,
    "blocks": 30,
    "derivatives": 30,
}  # of suites whose runs are short
SECONDS = {"cpu": 5.0, "gpu": 2.0}


def require(*libraries: str) -> None:
    """Raise an ImportError that names the extra, if a library is missing."""
    for name in libraries:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ImportError(f"cupyflash bench needs {name} ({error}): {EXTRA}") from error


def conditions(kind: str, contenders: list[Contender]) -> tuple[str, dict[str, str], str]:
    """Return the device, the versions and the method, in words."""
    from ..bench.measure import Gpu
    from ..bench.runtime_peers import Runtime
    from ..bench.torch_peers import FlashAttention4, TorchPeer, find

    torch = find()[0] if any(isinstance(x, TorchPeer) for x in contenders) else None
    runtimes = [x for x in contenders if isinstance(x, Runtime)]
    versions = {"cupyflash": str(importlib.import_module("cupyflash").__version__)}
    if kind == "cpu":
        names = ["numpy", "numba"]
        load = ""
        if hasattr(os, "getloadavg"):
            average = os.getloadavg()[0]
            load = f", load average {average:.1f} at the start"
            if average > 0.5 * info.usable_cores():
                load += " (others are working: times are longer than they need be)"
        device = (
            f"{info.processor()}, cores to run on: {info.usable_cores()}{load}; threads: "
            f"{number_of_threads()} of cupyflash"
        )
        if torch is not None:
            device += f", {torch.get_num_threads()} of PyTorch"
        device += "".join(f", {number_of_threads()} of {x.title}" for x in runtimes)
        method = "by the wall clock"
    else:
        names, meter = ["numpy"], Gpu()
        device = meter.name()
        cuda, nvrtc = info.cuda(meter.xp), info.nvrtc(meter.xp)[0]
        versions |= {"CuPy": str(meter.xp.__version__), "NVRTC": nvrtc}
        method = "by CUDA events, the L2 cache overwritten before each run"
        device += f" ({cuda})"
    versions |= {name: info.installed(name) or "unknown" for name in names}
    versions |= {"commit": commit} if (commit := info.commit()) else {}
    versions |= {x.title: info.installed(x.name) or "unknown" for x in runtimes}
    if torch is not None:
        versions["PyTorch"] = str(torch.__version__)
        if kind == "gpu":
            versions["cuDNN"] = str(torch.backends.cudnn.version())
    for peer in contenders:
        if isinstance(peer, FlashAttention4):
            versions[peer.name] = info.installed(peer.name) or "unknown"
    return device, versions, method


def chosen_suite(options: argparse.Namespace, kind: str) -> tuple[str, Suite | TaskSuite]:
    """Return the name and the suite that the options ask for."""
    from .. import bench

    if options.suite in TASK_NAMES:
        return options.suite, task_suite(options, kind)
    if options.task:
        raise ArgumentError(
            f"got --task without a suite of tasks; add --suite {', '.join(TASK_NAMES[:-1])} or "
            f"{TASK_NAMES[-1]}"
        )
    if options.shape:
        if options.suite:
            raise ArgumentError("got --suite and --shape; expected only one of them")
        shapes = [bench.shape_of(text) for text in options.shape]
        return "own shapes", bench.own_shapes(kind, shapes)
    name = options.suite or "quick"
    return name, bench.SUITES[kind][name]


def task_suite(options: argparse.Namespace, kind: str) -> TaskSuite:
    """Return a suite of tasks, or refuse what has no meaning for it."""
    from .. import bench

    of_cases = [name for name in ("shape", "variant", "pass", "dtype", "graphs", "picture")
                if getattr(options, name)]  # fmt: skip
    if of_cases:
        names = ", ".join(f"--{name}" for name in of_cases)
        raise ArgumentError(
            f"got {names} with --suite {options.suite}, whose tasks are fixed; leave {names} out"
        )
    if options.suite not in bench.TASKS[kind]:
        raise ArgumentError(
            f"got --suite {options.suite} on the {kind.upper()}; its programs are for NumPy. Add "
            "--device cpu"
        )
    suite = bench.TASKS[kind][options.suite]
    if not options.task:
        return suite
    chosen: set[str] = set()
    for text in options.task:
        named = {name for name in suite.makers if fnmatch.fnmatchcase(name, f"*{text}*")}
        chosen |= named
        if not named:
            raise ArgumentError(
                f"--task: got {text!r}; expected a part of a name of --suite {options.suite}, such "
                f"as {next(iter(suite.makers))!r}"
            )
    return replace(
        suite, makers={name: maker for name, maker in suite.makers.items() if name in chosen}
    )


def chosen_contenders(
    options: argparse.Namespace, suite: Suite | TaskSuite, kind: str
) -> tuple[list[Contender], dict[str, str]]:
    """Return which contenders take part, and why the others that were asked for do not."""
    from .. import bench

    known = {contender.name: contender for contender in bench.CONTENDERS}
    names = list(dict.fromkeys(options.only or suite.contenders))
    if options.against is not None and options.against not in names:
        names.append(options.against)
    for name in names:
        if name not in known:
            raise ArgumentError(f"contender: got {name!r}; expected one of {', '.join(known)}")
    absent = {name: known[name].obstacle(kind) for name in names}
    there = [known[name] for name in names if not absent[name]]
    if not there:
        raise ArgumentError("; ".join(f"{name}: {why}" for name, why in absent.items()))
    return there, {name: why for name, why in absent.items() if why}


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[Case | Task, str], None]]:
    """Show on a terminal's standard error what is being done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    # It is drawn at each report, not by a thread, which would work while calls are timed.
    hidden = not console.is_terminal
    columns = (
        BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
    )  # fmt: skip
    with Progress(
        *columns, console=console, transient=True, disable=hidden, auto_refresh=False
    ) as bar:
        task = bar.add_task("", total=total)
        seen: list[str] = []

        def tell(case: Case | Task, doing: str) -> None:
            words = f"{' '.join(case.words)} {case.dtype}: {doing}"
            bar.update(task, description=words, completed=len(seen), refresh=True)
            seen.append(words)

        yield tell


def measured(options: argparse.Namespace) -> tuple[Report, str]:
    """Run what the options ask for; return what was found, and in words what ended it early."""
    from .. import bench
    from ..bench import host, measure
    from ..bench import tasks as tasks_module

    kind, choice = choose_device(options.device)
    if options.device is None:
        print(f"On the {kind.upper()} ({choice}).", file=sys.stderr)
    name, suite = chosen_suite(options, kind)
    contenders, absent = chosen_contenders(options, suite, kind)
    if options.graphs and kind == "cpu":
        raise ArgumentError(
            "got --graphs on the CPU; CUDA graphs are replayed on a GPU only. Leave it out"
        )
    meter: measure.Meter = measure.Cpu() if kind == "cpu" else measure.Gpu()
    device, versions, clock = conditions(kind, contenders)
    turns = "in turn" if kind == "gpu" else "in turn, each after calls that wake its threads"
    runs, seconds = options.runs or RUNS[kind], options.seconds or SECONDS[kind]
    limits: dict[str, Any] = {"runs": runs, "seconds": seconds}
    tasks: list[bench.TaskRow] = []
    rows: list[bench.Row] = []
    if isinstance(suite, bench.TaskSuite):
        problems: list[Any] = list(suite.tasks())
        limits["runs"] = runs = options.runs or SHORT_RUNS.get(name, runs)
        if name == "host":
            clock = f"of the host's time for {host.REPEATS} calls"
        elif name == "short" or (name == "models" and kind == "cpu"):
            clock += f" (of at most {tasks_module.CALLS} calls each, where these are short)"
        method = f"Medians of at most {runs} runs {clock}, the contenders {turns}."

        def one(problem: Any) -> None:
            tasks.append(bench.run_task(meter, suite, problem, contenders, **limits))
    else:
        variants = [bench.variant_of(text) for text in options.variant or ()]
        problems = list(suite.cases(options.dtype or (), variants, getattr(options, "pass") or ()))
        replayed = " Calls are replayed as CUDA graphs." if options.graphs else ""
        method = (
            f"Medians of at most {runs} runs {clock}, the contenders {turns}; random normal data. "
            "FLOPs: 4 D for each pair that attends (of a square causal mask half of all pairs), "
            f"the backward 2.5 times that.{replayed}"
        )
        limits["graphs"] = options.graphs

        def one(problem: Any) -> None:
            rows.append(bench.run_case(meter, problem, contenders, **limits))

    ended = ""
    with progress_bar(len(problems) * (len(contenders) + 1)) as limits["progress"]:
        try:
            for problem in problems:
                one(problem)
        except KeyboardInterrupt:
            ended = "it was interrupted"
        except Exception as error:
            if not rows and not tasks:
                raise
            ended = f"{type(error).__name__}: {error}"
    if ended:
        done = len(rows) + len(tasks)
        ended = f"Ended after {done} of {len(problems)} problems: {ended}"
        method += f" {ended}."
    report = bench.Report(name, kind, device, versions, method, tuple(rows), absent, tuple(tasks))
    return report, ended


def baseline(report: Report, wanted: str | None) -> str:
    """Return whom the speed-up is over: who was asked for, standard attention, or who is there.

    Of tasks without standard attention it is the fastest of the others, and this returns "".
    """
    if wanted:
        return wanted
    others = [name for name in report.contenders if name != "cupyflash"]
    if report.tasks and "standard" not in others:
        return ""
    return "standard" if "standard" in others or not others else others[0]


def check_files(options: argparse.Namespace) -> None:
    """Refuse, before anything is measured, unwritable files and options that clash."""
    from ..bench import plot

    for name, file in (("--json", options.json), ("--plot", options.plot)):
        if file is not None:
            check_writable(file, name)
    if options.json is not None:
        check_ending(options.json, "--json", (".json",))
    if options.plot is not None:
        plot.check_suffix(options.plot)
    if options.picture and options.plot is None:
        raise ArgumentError(
            "got --picture without --plot FILE, which names the file to draw; expected both"
        )
    if options.load is not None:
        other = [name for name in MEASURING if getattr(options, name)]
        if other:
            names = ", ".join(f"--{name}" for name in other)
            raise ArgumentError(
                f"got {names} with --load, which measures nothing; expected only one of the two"
            )


MEASURING = (
    "suite", "task", "shape", "variant", "pass", "dtype", "device", "only", "runs", "seconds",
    "graphs", "json",
)  # fmt: skip


def bench(options: argparse.Namespace) -> int:
    """Measure or load, print the table, write the files."""
    try:
        require("rich", *(["matplotlib"] if options.plot else []))
        check_files(options)
        report, ended = (loaded(options.load), "") if options.load else measured(options)
        if not report.rows and not report.tasks:
            raise ArgumentError(ended or "the file holds no results")
        show(report)
        if options.json is not None:
            write_text(options.json, report.to_json() + "\n")
        if options.plot is not None:
            from ..bench import plot

            over = baseline(report, options.against)
            with replacing(options.plot) as file:
                plot.draw(report, file, over, options.picture or ())
    except (ImportError, ValueError, OSError) as error:
        complain(error)
        return 2
    if ended:
        print(file=sys.stderr)
        complain(ended)
        return 2
    if report.wrong:
        print("\nA result is WRONG, so it was not timed: see the notes above.")
        return 1
    return 0


def loaded(file: Path) -> Report:
    """Read what --json wrote."""
    from ..bench import Report

    try:
        return Report.from_json(file.read_text(encoding="utf-8"))
    except ArgumentError as error:
        raise ArgumentError(f"--load {file}: {error}") from error


def positive(text: str) -> float:
    """Read a positive number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a positive number")
    return value


def add_command(subparsers: Any) -> None:
    """Add `bench` to the command line."""
    text = "time and memory against sequence length, beside standard attention and PyTorch"
    command = subparsers.add_parser(
        "bench",
        help=text,
        description=f"Measure {text}. Every result is compared with the first contender's before "
        "it is timed. Needs rich, and matplotlib for --plot. --shape, --pass, --variant, "
        "--dtype, --task, --only and --picture may be repeated.",
        epilog="Suites: quick, article (the table of a well-known article: (2, 8, L, 64) against "
        "standard attention), peers (against PyTorch's kernels; on a GPU 16,384 tokens in all), "
        "variants (masks and score changes), decode (one query; also over caches of 8 and 4 "
        "bits), fp8 (queries, keys and values of 8 bits), host (the host's time of small calls), "
        "short (few heads and few tokens, beside NumPy's lines), "
        "programs (whole programs, on the CPU, in a clone), models (shapes that models run, "
        "by their names, beside PyTorch's kernels), derivatives (forward mode and double backward, "
        "beside PyTorch's math back end). The exit status is 1 if a result was wrong, 2 "
        "if nothing could be measured.",
    )
    many: dict[str, Any] = {"action": "append", "metavar": "NAME"}
    command.add_argument(
        "--device", choices=("cpu", "gpu"), help="default: the GPU where one can be used"
    )
    command.add_argument(
        "--suite", choices=SUITE_NAMES + TASK_NAMES, help="which problems (default: quick)"
    )
    command.add_argument(
        "--shape", action="append", metavar="B,H,L,D",
        help="a problem of your own, instead of a suite; H may be Hq/Hkv, L may be Lq/Lk",
    )  # fmt: skip
    command.add_argument(
        "--task", action="append", metavar="TEXT",
        help=f"only tasks of {', '.join(TASK_NAMES)} whose name contains this text; * is any text",
    )  # fmt: skip
    command.add_argument("--pass", choices=PASS_NAMES, action="append", help="which passes")
    command.add_argument(
        "--variant", **many,
        help=f"{', '.join(VARIANT_NAMES)}; of the sized ones with a number, as in window=512, else "
        "an eighth of the keys or so",
    )  # fmt: skip
    command.add_argument("--dtype", choices=FLOATS, action="append", help="of q, k and v")
    command.add_argument(
        "--only", **many,
        help="time these alone: cupyflash, cupyflash-pages (of 16), cupyflash-pages-of-1, "
        "cupyflash-int8, cupyflash-e4m3, cupyflash-int4, cupyflash-int8-int4 (caches of codes), "
        "cupyflash-fp8, standard, torch-cudnn, torch-flash, torch-efficient, torch-flex, "
        "torch-varlen, flash-attn-4, torch-math, torch-sdpa on a GPU; torch-cpu, torch-math, "
        "torch-sdpa and this package's own on a CPU",
    )  # fmt: skip
    command.add_argument(
        "--against", metavar="NAME",
        help="time this one too, and draw the speed-up over it (default: standard, if it is timed)",
    )  # fmt: skip
    command.add_argument(
        "--runs", type=whole_number(1), metavar="N",
        help=f"runs per median, at most (default: {RUNS['cpu']}; on a GPU {RUNS['gpu']}; of the "
        f"suites {' and '.join(SHORT_RUNS)} {' and '.join(map(str, SHORT_RUNS.values()))})",
    )  # fmt: skip
    command.add_argument(
        "--seconds", type=positive, metavar="S",
        help="for the runs of one problem; fewer runs where they do not fit (default: "
        f"{SECONDS['cpu']:g}; on a GPU {SECONDS['gpu']:g})",
    )  # fmt: skip
    command.add_argument(
        "--graphs", action="store_true",
        help="replay calls as CUDA graphs, so that short ones show the GPU's time alone",
    )  # fmt: skip
    command.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    command.add_argument(
        "--load", type=Path, metavar="FILE", help="measure nothing; show what --json wrote to FILE"
    )
    command.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the results to FILE, .svg or .png"
    )
    command.add_argument(
        "--picture", choices=PICTURE_NAMES, action="append",
        help="what to draw (default: everything, or of many problems the rate alone)",
    )  # fmt: skip
    command.set_defaults(function=bench)
