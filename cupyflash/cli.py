"""The command line: `cupyflash demo` and `cupyflash info`.

Plain text tables and argparse, so that it runs on what the package itself depends on.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import info, verify_cli

if TYPE_CHECKING:
    from .demo import Checked, Comparison

COLUMNS = 100
DTYPES = ("float32", "float16", "float64")
CPU_RUNS, GPU_RUNS = 5, 20  # of a median, at most


def table(rows: Sequence[Sequence[str]], left: int = 1, header: int = 1) -> str:
    """Lay out rows of cells, columns two spaces apart, with a rule below the header.

    Parameters
    ----------
    rows : sequence of sequence of str
        The header first; all of one length.
    left : int, optional
        Columns that are flush left; the others, numbers, are flush right.
    header : int, optional
        Rows that the header has.

    Returns
    -------
    str
        Lines without trailing space.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(header, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def megabytes(number: float) -> str:
    """Bytes in MB, with two significant digits at least."""
    millions = number / 1e6
    return f"{millions:.0f} MB" if millions >= 10 else f"{millions:.1f} MB"


def milliseconds(seconds: float) -> str:
    """Seconds in ms, with two significant digits at least."""
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2f} ms"


def ratio(number: float) -> str:
    """A factor with two significant digits at least."""
    return (
        f"{number:.0f}x" if number >= 10 else f"{number:.1f}x" if number >= 1 else f"{number:.2f}x"
    )


def verdict(standard: float, ours: float, less: str, more: str) -> str:
    """Say by which factor `ours` is less or more than `standard`, in the words given."""
    factor = standard / ours
    return f"{ratio(factor)} {less}" if factor >= 1 else f"{ratio(1 / factor)} {more}"


def span(factors: Sequence[float], what: str) -> str:
    """Say in one phrase what some factors, standard over ours, mean."""
    low, high = min(factors), max(factors)
    if low >= 1:
        return f"{ratio(low)} to {ratio(high)} less {what}"
    if high < 1:
        return f"{ratio(1 / high)} to {ratio(1 / low)} more {what}"
    return f"from {ratio(1 / low)} more to {ratio(high)} less {what}"


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


def wrapped(lines: Sequence[tuple[str, str]]) -> str:
    """Lay out labels and texts, the texts below each other and broken at 100 columns."""
    indent = 2 + max(len(label) for label, _ in lines)
    return "\n".join(
        textwrap.fill(
            text,
            COLUMNS,
            initial_indent=f"{label:<{indent}}",
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for label, text in lines
    )


def choose_device(wanted: str | None) -> tuple[str, str]:
    """Return the demo's device, cpu or gpu, and in words why no other, or how to choose it.

    Raises
    ------
    ValueError
        A GPU was wanted, and none can be used; the message says why and what to do.
    """
    if wanted == "cpu":
        return "cpu", "--device gpu measures a GPU"
    obstacle = info.gpu_obstacle()
    if not obstacle:
        return "gpu", "--device cpu measures the CPU"
    if wanted == "gpu":
        raise ValueError(f"--device gpu: no GPU can be used, since {obstacle}")
    return "cpu", f"no GPU can be used, since {obstacle}"


def demo(options: argparse.Namespace) -> int:
    """Measure real attention against standard attention, and check it against the bound."""
    try:
        kind, choice = choose_device(options.device)
        threads = number_of_threads() if kind == "cpu" else 0
    except ValueError as error:
        print(textwrap.fill(f"error: {error}", COLUMNS), file=sys.stderr)
        return 1
    from . import demo as work
    from . import measure

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
    if dtype == "float16":
        standard += "; float16 is widened to float32"
    text, inputs = (work.load(dtype, n, meter.xp) for n in (1, repeat))
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
    from .reference import threads

    return threads.num_threads()


def version() -> str:
    """Version of the package."""
    return str(importlib.import_module("cupyflash").__version__)


def show_info(_: argparse.Namespace) -> int:
    """Print versions, threads, devices and the cache folders."""
    print(wrapped(info.lines(version())))
    return 0


def positive(text: str) -> int:
    """Read a positive whole number."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} came, a whole number from 1 was wanted")
    return number


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="cupyflash", description="Exact attention for NumPy-style array code."
    )
    top.add_argument("--version", action="version", version=f"cupyflash {version()}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    text = "time, memory and error of real attention, against standard attention"
    command = commands.add_parser("demo", help=text, description=f"Show {text}.")
    command.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        help="NumPy arrays on the CPU or CuPy arrays on the current GPU (default: the GPU where "
        "one can be used, else the CPU)",
    )
    command.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], help="of q, k, v (default: %(default)s)"
    )
    command.add_argument(
        "--repeat",
        type=positive,
        metavar="N",
        help="tile the text of 512 tokens N times (default: 3; on a GPU 16, or less where standard "
        "attention would not fit)",
    )
    command.add_argument(
        "--runs",
        type=positive,
        metavar="N",
        help=f"at most so many runs per median (default: {CPU_RUNS}; on a GPU {GPU_RUNS})",
    )
    command.set_defaults(function=demo)

    verify_cli.add_command(commands)

    text = "versions, threads, devices and cache folders"
    command = commands.add_parser("info", help=text, description=f"Show {text}.")
    command.set_defaults(function=show_info)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        What follows the program's name; ``sys.argv`` unless given.

    Returns
    -------
    int
        Exit status: 0 when all went well, 1 when the demo cannot run or finds an error beyond
        the bound. Wrong arguments exit with 2.
    """
    options = parser().parse_args(arguments)
    status: int = options.function(options)
    return status
