"""The command line: `cupyflash demo` and `cupyflash info`.

Plain text tables and argparse, so that it runs on what the package itself depends on.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import verify_cli

if TYPE_CHECKING:
    from .demo import Checked, Comparison

DTYPES = ("float32", "float16", "float64")


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


def demo(options: argparse.Namespace) -> int:
    """Measure real attention against standard attention, and check it against the bound."""
    from . import demo as measure
    from .reference import threads

    try:
        number_of_threads = threads.num_threads()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    text, inputs = measure.load(options.dtype), measure.load(options.dtype, options.repeat)
    heads, length, width = inputs.q.shape
    scores = megabytes(heads * length**2 * max(inputs.q.itemsize, 4))
    tiled = f"the text {options.repeat} times over" if options.repeat > 1 else "the text as it is"
    print("Exact attention of a real transformer layer over a real text\n")
    print("data     q, k, v of the second layer of all-MiniLM-L6-v2 over the first")
    print(f"         {measure.TOKENS} tokens of the Apache License 2.0 (the gradient do is random)")
    print(f"timed    {tiled}: {length} tokens, whose scores take {scores}")
    print(f"shape    ({heads}, {length}, {width}): heads, tokens, head dimension; {options.dtype}")
    print(f"threads  {number_of_threads} for cupyflash; standard attention is NumPy, whose")
    print("         matrix products choose their own number")
    sys.stdout.flush()

    start = time.perf_counter()
    for causal in (False, True):
        measure.candidates(text, causal, backward=True)[1]()
    print(f"kernels  ready after {time.perf_counter() - start:.1f} s\n")
    sys.stdout.flush()

    lines = measure.compare(inputs, options.runs)
    runs = sorted({line.runs for line in lines})
    many = f"{runs[0]}" if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"
    print(f"Time (runs per median: {many}, taken in turn) and peak memory beyond q, k and v:\n")
    print(comparison_table(lines) + "\n")
    sys.stdout.flush()

    every = 6 if options.dtype == "float64" else 4  # exact values beyond float64 take longer
    checks = measure.check(text, every)
    worst = max(share for line in checks for share in line.share.values())
    print("Error, as the largest share of an element's rounding-error bound: at most 1 is right")
    print(f"(on the text as it is, {-(-heads // every)} of its {heads} heads):\n")
    print(error_table(checks) + "\n")

    time_phrase = span([line.standard_seconds / line.ours_seconds for line in lines], "time")
    memory_phrase = span([line.standard_bytes / line.ours_bytes for line in lines], "memory")
    print(f"Against standard attention, cupyflash took {time_phrase} and {memory_phrase}.")
    if worst > 1:
        print(f"An error lies BEYOND the bound ({worst:.3g} of it): please report this output.")
        return 1
    print(f"Every error checked is within the bound (at most {worst:.3f} of it).")
    return 0


def version() -> str:
    """Version of the package."""
    return str(importlib.import_module("cupyflash").__version__)


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """Name of the CPU, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def devices() -> list[tuple[str, str]]:
    """CuPy and the GPUs it sees, or what to install: label and text."""
    try:
        cupy: Any = importlib.import_module("cupy")
    except ImportError:
        return [
            ("CuPy", "not installed; for NVIDIA GPUs: pip install 'cupyflash[cuda12]'"),
            ("", "(CUDA 12) or pip install 'cupyflash[cuda13]' (CUDA 13)"),
            ("devices", "none"),
        ]
    found = [("CuPy", str(cupy.__version__))]
    if not cupy.is_available():
        return [*found, ("devices", "none: CuPy finds no usable NVIDIA GPU")]
    for number in range(cupy.cuda.runtime.getDeviceCount()):
        facts = cupy.cuda.runtime.getDeviceProperties(number)
        text = (
            f"{number}: {facts['name'].decode()}, compute capability "
            f"{facts['major']}.{facts['minor']}, {facts['totalGlobalMem'] / 2**30:.0f} GiB"
        )
        found.append(("devices" if number == 0 else "", text))
    return found


def info(_: argparse.Namespace) -> int:
    """Print versions, threads, devices and the cache folder."""
    from .reference import jit, threads

    with warnings.catch_warnings():  # said below in words of its own
        warnings.simplefilter("ignore")
        writable = jit.cache_is_writable()
    how = os.environ.get("CUPYFLASH_NUM_THREADS")
    how = f"CUPYFLASH_NUM_THREADS={how}" if how else "CUPYFLASH_NUM_THREADS sets it"
    try:
        number_of_threads = f"{threads.num_threads()} ({how})"
    except ValueError as error:  # a wrong setting is what somebody may be looking for here
        number_of_threads = str(error)
    lines = [
        ("cupyflash", version()),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("NumPy", np.__version__),
        ("Numba", installed("numba") or "not installed"),
        ("ml_dtypes", installed("ml_dtypes") or "not installed; bfloat16 arrays need it"),
        *devices(),
        ("CPU", f"{processor()}, {usable_cores()} usable cores"),
        ("threads", number_of_threads),
        ("CPU kernels", f"{jit.cache_folder()}"),
        ("", "writable" if writable else "NOT writable: every process compiles them again;"),
    ]
    if not writable:
        lines.append(("", "set CUPYFLASH_CACHE_DIR to a folder of yours that is"))
    width = max(len(label) for label, _ in lines)
    for label, text in lines:
        print(f"{label:<{width}}  {text}")
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
        "--dtype", choices=DTYPES, default=DTYPES[0], help="of q, k, v (default: %(default)s)"
    )
    command.add_argument(
        "--repeat",
        type=positive,
        default=3,
        metavar="N",
        help="tile the text of 512 tokens N times (default: %(default)s)",
    )
    command.add_argument(
        "--runs",
        type=positive,
        default=5,
        metavar="N",
        help="at most so many runs per median (default: %(default)s)",
    )
    command.set_defaults(function=demo)

    verify_cli.add_command(commands)

    text = "versions, threads, devices and cache folders"
    command = commands.add_parser("info", help=text, description=f"Show {text}.")
    command.set_defaults(function=info)
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
