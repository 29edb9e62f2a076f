"""The table of `cupyflash bench`: what contenders did with cases, or with tasks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .text import COLUMNS, megabytes, printable, verdict, wrapped

if TYPE_CHECKING:
    from ..bench import Report, Result, Row, TaskRow


def show(report: Report) -> None:
    """Print the table, why somebody did not take part, and the conditions."""
    notes: dict[str, int] = {}
    below = _tasks(report, notes) if report.tasks else _cases(report, notes)
    reasons = [(f"({number})", reason) for reason, number in notes.items()]
    reasons += [(name, f"did not take part: {why}") for name, why in report.absent.items()]
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    below += [
        ("spread", "distance of the quartiles, as a share of the median"),
        ("device", report.device),
        ("versions", versions),
        ("method", report.method),
    ]
    print()
    print(wrapped(reasons + below))


def _cases(report: Report, notes: dict[str, int]) -> list[tuple[str, str]]:
    from ..bench.results import unit

    decodes = all(row.case.decodes for row in report.rows)
    first = report.rows[0].results[0].contender
    several = len({row.case.dtype for row in report.rows}) > 1
    titles = ("time", "spread", unit(report.kind, decodes), "memory")
    rows = []
    for row in report.rows:
        words = row.case.words + [row.case.dtype] * several
        lines = [line(row, result, report.kind, decodes, notes) for result in row.results]
        rows.append((words, lines))
    _print("problem", titles, f"{printable(first)}: time, memory", first, rows)
    return [
        ("shapes", "batch, heads (of queries/of keys), length (of queries/of keys), head dimension"
         + ("" if several else f"; {report.rows[0].case.dtype}")),
        ("memory", "at the peak, beyond the inputs; of a backward with its forward"),
    ]  # fmt: skip


def _tasks(report: Report, notes: dict[str, int]) -> list[tuple[str, str]]:
    first = report.tasks[0].results[0].contender
    rows = []
    for row in report.tasks:
        words = [row.task.name] + [f"each {row.task.each}"] * (row.task.each != "call")
        words += [
            f"{x.contender} holds {megabytes(x.peak_bytes)}" for x in row.results if x.peak_bytes
        ]
        if row.task.moved:
            words.append(f"{megabytes(row.task.moved)} moved, by count")
        rows.append((words, [task_line(row, result, notes) for result in row.results]))
    _print("task", ("time", "spread"), "ratio", first, rows)
    told = f"the time of {first} divided by that of the contender; below 1, {first} is faster"
    return [("ratio", told)]


def _print(
    subject: str,
    titles: Sequence[str],
    last: str,
    first: str,
    rows: Sequence[tuple[list[str], list[list[str]]]],
) -> None:
    """Print a table of rows, each of which has words and a line of cells for each contender."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    # Text from a file is not markup.
    width = None if sys.stdout.isatty() else COLUMNS
    console = Console(width=width, highlight=False, markup=False)
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False,
        header_style="bold",
    )  # fmt: skip
    table.add_column(subject, no_wrap=subject == "problem")
    table.add_column("contender", no_wrap=True)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column(last)
    for words, lines in rows:
        for n in range(max(len(words), len(lines))):
            cells = [printable(x) for x in lines[n]] if n < len(lines) else [""] * len(lines[0])
            style = "bold" if n < len(lines) and lines[n][0] == first else None
            table.add_row(printable(words[n]) if n < len(words) else "", *cells, style=style)
        table.add_section()
    console.print(table)


def line(row: Row, result: Result, kind: str, decodes: bool, notes: dict[str, int]) -> list[str]:
    """Lay out what one contender did: cells of the table, and its reasons as notes."""
    from ..bench.results import rate

    if not result.seconds:
        return [result.contender, "", "", "", "", _refused(result, notes)]
    factors = row.factors(row.results[0].contender, result.contender)
    words = ""
    if factors and result is not row.results[0]:
        words = verdict(factors[0], 1, "faster", "slower")
        if factors[1]:
            words += ", " + verdict(factors[1], 1, "less", "more")
    return [
        result.contender,
        f"{three_digits(result.seconds * 1e3)} ms",
        f"{100 * result.spread:.0f} %",
        three_digits(rate(row.case, result, kind, decodes)),
        "" if result.peak_bytes is None else megabytes(result.peak_bytes),
        words,
    ]


def task_line(row: TaskRow, result: Result, notes: dict[str, int]) -> list[str]:
    """Lay out what one contender did with a task, as `line` does with a case."""
    if not result.seconds:
        return [result.contender, "", "", _refused(result, notes)]
    ratio = None if result is row.results[0] else row.ratio(result.contender)
    return [
        result.contender,
        duration(result.seconds),
        f"{100 * result.spread:.0f} %",
        "" if ratio is None else three_digits(ratio),
    ]


def _refused(result: Result, notes: dict[str, int]) -> str:
    number = notes.setdefault(result.reason, len(notes) + 1)
    return f"{result.status} ({number})"


def duration(seconds: float) -> str:
    """A time in a unit that suits it."""
    if seconds < 1e-3:
        return f"{three_digits(seconds * 1e6)} µs"
    return f"{three_digits(seconds * 1e3)} ms"


def three_digits(number: float) -> str:
    """A number with three significant digits at least, never with an exponent of ten."""
    return f"{number:.0f}" if number >= 100 else f"{number:#.3g}" if number >= 1e-4 else "0.000"
