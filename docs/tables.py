"""Directives that write tables: `table-of` of names and meanings, others of benchmarks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

from cupyflash.bench import Report, TaskRow
from cupyflash.commands.bench_table import duration, three_digits

MEASURED = Path(__file__).parent / "measured"
# What contenders are called in a table.
TITLES = {
    "cupyflash": "cupyflash",
    "standard": "NumPy",
    "torch-sdpa": "PyTorch",
    "torch-cudnn": "cuDNN",
    "torch-flash": "FlashAttention",
    "torch-efficient": "memory-efficient",
    "torch-flex": "FlexAttention",
    "torch-varlen": "varlen_attn",
    "flash-attn-4": "FlashAttention-4",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
}
# In suites where they are something else.
TITLES_OF = {
    "programs": {"standard": "its own lines"},
    "derivatives": {"torch-math": "PyTorch's math"},
}
MANY = 3  # others; of more, the fastest is shown


def row_of(*cells: nodes.Node) -> nodes.row:
    """Return a row of cells."""
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", cell)) for cell in cells))


class TableOf(Directive):
    """``table-of module NAME``: values are texts, or have a formula."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        module, name = self.arguments
        mapping = getattr(importlib.import_module(module), name)
        group = nodes.tgroup("", cols=2)
        group += [nodes.colspec(colwidth=width) for width in (30, 70)]
        body = nodes.tbody("")
        for key, value in mapping.items():
            text = value if isinstance(value, str) else value.formula
            body += row_of(nodes.literal("", key), nodes.Text(text))
        group += body
        return [nodes.table("", group)]


def filled(head: list[str], rows: list[list[str]], widths: list[int]) -> nodes.table:
    """Return a table with a head."""
    group = nodes.tgroup("", cols=len(head))
    group += [nodes.colspec(colwidth=width) for width in widths]
    group += nodes.thead("", row_of(*map(nodes.Text, head)))
    group += nodes.tbody("", *(row_of(*map(nodes.Text, cells)) for cells in rows))
    return nodes.table("", group)


def titles_of(suite: str) -> dict[str, str]:
    """Return what contenders are called in the table of a suite."""
    return TITLES | TITLES_OF.get(suite, {})


def measured(report: Report) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a report of tasks, rows that lose included.

    Of many contenders, a row shows the fastest one after the first.
    """
    first, *others = report.contenders
    many = len(others) > MANY
    titles = titles_of(report.suite)
    head = [report.suite, titles[first]]
    head += ["fastest of the others"] if many else [titles[name] for name in others]
    head += ["ratio"] if many else [f"ratio to {titles[name]}" for name in others]
    counted = any(row.task.moved for row in report.tasks)
    head += ["counted MB"] * counted
    held = [name for name in report.contenders if any(map(peak_of(name), report.tasks))]
    head += [f"MB of {titles[name]}" for name in held]
    rows = []
    for row in report.tasks:
        each = "" if row.task.each == "call" else f", each {row.task.each}"
        beside = [row.fastest] if many else others
        results = [row.of(name) for name in (first, *beside)]
        times = [duration(x.seconds) if x and x.seconds else "" for x in results]
        if many and times[1]:
            times[1] += f" ({titles[row.fastest]})"
        ratios = [row.ratio(name) for name in beside]
        cells = [row.task.name + each, *times]
        cells += ["" if x is None else three_digits(x) for x in ratios]
        cells += [three_digits(row.task.moved / 1e6)] * counted
        peaks = [peak_of(name)(row) for name in held]
        rows.append(cells + ["" if x is None else three_digits(x / 1e6) for x in peaks])
    return head, rows


def peak_of(name: str) -> Callable[[TaskRow], int | None]:
    """Return what says how many bytes a contender held in a row, if that was measured."""

    def peak(row: TaskRow) -> int | None:
        result = row.of(name)
        return None if result is None else result.peak_bytes

    return peak


def ratios(report: Report) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a grid of a report's ratios.

    A task's name has three parts. The middle one says in which column its ratio is, the others in
    which row.
    """
    cells: dict[str, dict[str, str]] = {}
    (other,) = report.contenders[1:]
    for row in report.tasks:
        first, column, last = row.task.name.split(", ")
        ratio = row.ratio(other)
        cells.setdefault(f"{last}, {first}", {})[column] = "" if ratio is None else f"{ratio:.2f}"
    columns = list(dict.fromkeys(column for found in cells.values() for column in found))
    head = [f"ratio to {titles_of(report.suite)[other]}", *columns]
    rows = [[name, *(found.get(x, "") for x in columns)] for name, found in cells.items()]
    return head, rows


def rates(report: Report) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a grid of TFLOP/s, in each cell those of all contenders.

    A row is of a length and a size of heads, a column of a pass and a variant.
    """
    cells: dict[str, dict[str, str]] = {}
    for row in report.rows:
        found = [row.of(name) for name in report.contenders]
        told = [
            f"{row.case.flops / x.seconds / 1e12:.0f}" if x and x.seconds else "" for x in found
        ]
        name = f"{row.case.d}, {row.case.len_q}"
        cells.setdefault(name, {})[f"{row.case.direction} {row.case.variant}"] = " / ".join(told)
    columns = list(dict.fromkeys(column for found in cells.values() for column in found))
    titles = titles_of(report.suite)
    head = [f"heads of, length: {' / '.join(titles[x] for x in report.contenders)}", *columns]
    return head, [[name, *(found.get(x, "") for x in columns)] for name, found in cells.items()]


class Measured(Directive):
    """``measured FILE``: the report of tasks in a file of docs/measured, and its conditions.

    Its content stands for the table as long as there is no such file, and says how to make one.
    """

    required_arguments = 1
    has_content = True
    cells = staticmethod(measured)

    def run(self) -> list[nodes.Node]:
        """Return the table, and a paragraph."""
        file = MEASURED / self.arguments[0]
        self.state.document.settings.env.note_dependency(str(file))
        if self.content and not file.exists():
            found = nodes.Element()
            self.state.nested_parse(self.content, self.content_offset, found)
            return list(found.children)
        report = Report.from_json(file.read_text(encoding="utf-8"))
        head, rows = self.cells(report)
        versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
        words = f"{report.device}. {versions}. {report.method}"
        widths = [40] + [60 // (len(head) - 1)] * (len(head) - 1)
        return [filled(head, rows, widths), nodes.paragraph("", "", nodes.emphasis("", words))]


class Ratios(Measured):
    """``ratios FILE``: the same as a grid of ratios."""

    cells = staticmethod(ratios)


class Rates(Measured):
    """``rates FILE``: the report of cases, as a grid of TFLOP/s."""

    cells = staticmethod(rates)


def setup(app: Any) -> dict[str, bool]:
    """Tell Sphinx of the directives."""
    app.add_directive("table-of", TableOf)
    app.add_directive("measured", Measured)
    app.add_directive("ratios", Ratios)
    app.add_directive("rates", Rates)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
