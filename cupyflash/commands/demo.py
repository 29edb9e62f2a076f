"""The command `cupyflash demo`: real attention beside standard attention, and its error."""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..arrays.dtypes import FLOATS
from . import info
from .text import (
    COLUMNS,
    complain,
    megabytes,
    milliseconds,
    span,
    table,
    verdict,
    whole_number,
    wrapped,
)

if TYPE_CHECKING:
    from ..bench.demo import Checked, Comparison

CPU_RUNS, GPU_RUNS = 5, 20  # the most for a median


def comparison_table(lines: Sequence[Comparison]) -> str:
    """Lay out time and memory of standard attention and of cupyflash, side by side."""
    rows = [
        ["", "", "time", "time", "", "memory", "memory", ""],
        ["mask", "pass", "standard", "cupyflash", "", "standard", "cupyflash", ""],
    ]
    rows += [
        [
            line.mask,
            line.work,
            milliseconds(line.standard_seconds),
            milliseconds(line.ours_seconds),
            verdict(line.standard_seconds, line.ours_seconds, "faster", "slower"),
            megabytes(line.standard_bytes),
            megabytes(line.ours_bytes),
            verdict(line.standard_bytes, line.ours_bytes, "less", "more"),
        ]
        for line in lines
    ]
    return table(rows, left=2, header=2)


def error_table(checks: Sequence[Checked]) -> str:
    """Lay out the worst errors as shares of their bounds."""
    rows = [["mask", *checks[0].share, "largest error of O"]]
    for line in checks:
        shares = [f"{share:.3f}" if share < 10 else f"{share:.1e}" for share in line.share.values()]
        rows.append([line.mask, *shares, f"{line.largest:.1e}"])
    return table(rows)


def choose_device(wanted: str | None) -> tuple[str, str]:
    """Return the demo's device, cpu or gpu, and in words why, or how to choose the other one.

    Raises
    ------
    ValueError
        If a GPU was asked for, and none can be used; the message says why and what to do.
    """
    if wanted == "cpu":
        return "cpu", "--device gpu measures a GPU"
    obstacle = info.gpu_obstacle()
    if not obstacle:
        return "gpu", "--device cpu measures the CPU"
    if wanted == "gpu":
        raise ValueError(f"--device gpu: no GPU can be used, because {obstacle}")
    return "cpu", f"no GPU can be used, because {obstacle}"


def demo(options: argparse.Namespace) -> int:
    """Measure real attention against standard attention, and check it against the bound."""
    try:
        kind, choice = choose_device(options.device)
        threads = number_of_threads() if kind == "cpu" else 0
    except ValueError as error:
        complain(error)
        return 1
    from ..bench import demo as work
    from ..bench import measure

    dtype, repeat, runs = options.dtype, options.repeat, options.runs
    if kind == "cpu":
        meter: measure.Meter = measure.Cpu()
        repeat, runs = repeat or work.CPU_REPEAT, runs or CPU_RUNS
        device = f"CPU, {info.processor()}; {threads} threads for cupyflash"
        standard = "NumPy, whose matrix products choose their own number of threads"
    else:
        meter = gpu = measure.Gpu()
        repeat, runs = repeat or work.gpu_repeat(dtype, gpu.free_memory()), runs or GPU_RUNS
        device = f"GPU {gpu.number()}, {gpu.name()}"
        standard = "CuPy, whose matrix products are cuBLAS's"
    if dtype in ("float16", "bfloat16"):
        standard += f"; {dtype} is widened to float32"
    try:
        text, inputs = (work.load(dtype, n, meter.xp) for n in (1, repeat))
    except ImportError as error:
        complain(f"--{error}")
        return 1
    heads, length, width = inputs.q.shape
    scores = megabytes(work.score_bytes(dtype, repeat))
    tiled = f"the text {repeat} times over" if repeat > 1 else "the text as it is"
    lines = [
        ("data", "q, k, v of the second layer of all-MiniLM-L6-v2 over the first "
         f"{work.TOKENS} tokens of the Apache License 2.0 (the gradient do is random)"),
        ("timed", f"{tiled}: {length} tokens, whose scores take {scores}"),
        ("shape", f"({heads}, {length}, {width}): heads, tokens, head dimension; {dtype}"),
        ("device", device),
        ("", f"({choice})"),
        ("standard", f"attention that holds all scores, written in {standard}"),
    ]  # fmt: skip
    print("Exact attention of a real transformer layer over a real text\n")
    print(wrapped(lines))
    sys.stdout.flush()

    start = time.perf_counter()
    for causal in (False, True):
        meter.seconds(work.candidates(meter.xp, text, causal, backward=True)[1])
    print(wrapped([("kernels ", f"ready after {time.perf_counter() - start:.1f} s")]) + "\n")
    sys.stdout.flush()

    found = work.compare(meter, inputs, runs)
    counts = sorted({line.runs for line in found})
    many = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    print(f"Time (runs per median: {many}, taken in turn) and peak memory beyond q, k and v:\n")
    print(comparison_table(found) + "\n")
    sys.stdout.flush()

    every = 6 if dtype == "float64" else 4  # exact values beyond float64 take longer
    checks = work.check(text, every)
    worst = max(share for line in checks for share in line.share.values())
    print("Error, as the largest share of an element's rounding-error bound: at most 1 is right")
    print(f"(on the text as it is, {-(-heads // every)} of its {heads} heads):\n")
    print(error_table(checks) + "\n")

    time_phrase = span([line.standard_seconds / line.ours_seconds for line in found], "time")
    memory_phrase = span([line.standard_bytes / line.ours_bytes for line in found], "memory")
    summary = f"Against standard attention, cupyflash took {time_phrase} and {memory_phrase}."
    print(textwrap.fill(summary, COLUMNS))
    if worst > 1:
        print(f"An error lies BEYOND the bound ({worst:.3g} of it): please report this output.")
        return 1
    print(f"Every error checked is within the bound (at most {worst:.3f} of it).")
    return 0


def number_of_threads() -> int:
    """Threads of a call on NumPy arrays; a ValueError says what is wrong with the setting."""
    from ..reference.cpu.thread_limits import num_threads

    return num_threads()


def add_command(subparsers: Any) -> None:
    """Add `demo` to the command line."""
    text = "time, memory and error of real attention, against standard attention"
    command = subparsers.add_parser("demo", help=text, description=f"Show {text}.")
    command.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        help="NumPy arrays on the CPU or CuPy arrays on the current GPU (default: the GPU where "
        "one can be used, else the CPU)",
    )
    command.add_argument(
        "--dtype", choices=FLOATS, default="float32", help="of q, k, v (default: %(default)s)"
    )
    command.add_argument(
        "--repeat",
        type=whole_number(1),
        metavar="N",
        help="tile the text of 512 tokens N times (default: 3; on a GPU 16, or less where standard "
        "attention would not fit)",
    )
    command.add_argument(
        "--runs",
        type=whole_number(1),
        metavar="N",
        help=f"at most so many runs per median (default: {CPU_RUNS}; on a GPU {GPU_RUNS})",
    )
    command.set_defaults(function=demo)
