"""Pictures of a report, by matplotlib: TFLOP/s bars, speed-up and memory curves.

matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from .results import MEASURED, Report, Row, TaskRow, rate, unit
from .suites import OURS, OURS_FP8, PAGES, SMALL_PAGES

Axes = Any  # of matplotlib
SUFFIXES = (".svg", ".png")
# Okabe and Ito's colours, which colour-blind people can tell apart. A name has the same colour in
# all pictures.
COLOURS = {
    OURS: "#0072B2",
    PAGES: "#F0E442",
    SMALL_PAGES: "#000000",
    "cupyflash-int8": "#882255",
    "cupyflash-e4m3": "#44AA99",
    "cupyflash-int4": "#999933",
    "cupyflash-int8-int4": "#661100",
    OURS_FP8: "#88CCEE",
    "standard": "#8C8C8C",
    "torch-cudnn": "#009E73",
    "torch-flash": "#E69F00",
    "torch-efficient": "#56B4E9",
    "torch-flex": "#CC79A7",
    "torch-varlen": "#6699CC",
    "flash-attn-4": "#332288",
    "torch-cpu": "#D55E00",
    "torch-math": "#4D4D4D",
    "torch-sdpa": "#DDCC77",
    "onnxruntime": "#B2182B",
    "openvino": "#7F3C8D",
}
MARKERS = "osD^vP*X"
STYLE = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "axes.edgecolor": "#B0B0B0",
    "axes.labelcolor": "#202020",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "font.family": "DejaVu Sans",
    "text.color": "#202020",
    "legend.frameon": False,
    "svg.hashsalt": "cupyflash bench",  # the same numbers give the same file
}
MANY = 3  # groups of curves; if there are more, only the rates are drawn


@dataclass(frozen=True)
class Group:
    """Rows that share an x axis: sequence lengths, or the kinds of masks at one length.

    Attributes
    ----------
    title : str
        What the rows share.
    axis : str
        What the x axis is.
    labels : tuple of str
        One for each row.
    rows : tuple of Row
        In the order of the axis.
    kind : str
        cpu or gpu.
    grows : bool
        Whether the axis has growing numbers, so that a curve makes sense.
    """

    title: str
    axis: str
    labels: tuple[str, ...]
    rows: tuple[Row, ...]
    kind: str
    grows: bool = False

    @property
    def contenders(self) -> list[str]:
        """Names of those that measured something here, in order."""
        names = [x.contender for row in self.rows for x in row.results if x.status == MEASURED]
        return list(dict.fromkeys(names))


def groups(report: Report) -> list[Group]:
    """Sort rows into groups: those that differ in batch, heads and length only, or in the mask."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    kinds, shapes = ({getattr(x.case, name) for x in report.rows} for name in ("kind", "shape"))
    by_mask = len(kinds) > len(shapes)
    for row in report.rows:
        case = row.case
        key: tuple[Any, ...] = (case.direction, case.dtype, case.d, case.decodes)
        key += (case.shape,) if by_mask else (case.variant,)
        found.setdefault(key, []).append(row)
    return [_group(rows, report.kind, by_mask) for rows in found.values()]


def _group(rows: list[Row], kind: str, by_mask: bool) -> Group:
    case = rows[0].case
    if by_mask:
        title = f"{case.direction}, ({case.shape.replace(',', ', ')}), {case.dtype}"
        labels = [row.case.kind.replace(" ", "\n") for row in rows]
        return Group(title, "mask or score change", tuple(labels), tuple(rows), kind)
    title = f"{case.direction}, {case.variant}, D = {case.d}, {case.dtype}"
    if case.decodes:
        labels = [f"{row.case.batch} ×\n{row.case.len_k}" for row in rows]
        return Group(f"one query, {title}", "sequences × keys", tuple(labels), tuple(rows), kind)
    rows = sorted(rows, key=lambda row: row.case.len_k)
    labels = [f"{row.case.len_k}" for row in rows]
    if len(set(labels)) == len(labels) and all(x.case.len_q == x.case.len_k for x in rows):
        return Group(title, "sequence length", tuple(labels), tuple(rows), kind, grows=True)
    labels = ["{},{},\n{},{}".format(*row.case.shape.split(",")) for row in rows]
    return Group(title, "batch, heads, length, D", tuple(labels), tuple(rows), kind)


def rate_bars(axes: Axes, group: Group, _: str) -> None:
    """Draw how fast everybody is: bars for each row, one per contender."""
    names = group.contenders
    width = 0.8 / len(names)
    decodes = group.rows[0].case.decodes
    for n, name in enumerate(names):
        for at, row in enumerate(group.rows):
            result = row.of(name)
            if result is None or not result.seconds:
                continue
            place = at + (n - (len(names) - 1) / 2) * width
            height = rate(row.case, result, group.kind, decodes)
            bar = axes.bar(place, height, 0.92 * width, color=_colour(name, n), label=name)
            words = f"{height:.0f}" if height >= 10 else f"{height:.1f}"
            small = 8 - (len(names) * len(group.rows) > 18) - 2 * (len(words) > 3)
            axes.bar_label(bar, [words], padding=1, fontsize=small, color="#404040")
    axes.set_xticks(range(len(group.rows)), group.labels)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.12)
    axes.set_ylabel(unit(group.kind, decodes) + " of K and V" * decodes)
    axes.set_xlabel(group.axis)


def speed_up(axes: Axes, group: Group, against: str) -> None:
    """Draw how many times as fast as one contender the others are."""

    def factor(row: Row, name: str) -> float:
        found = row.factors(name, against)
        return found[0] if found else float("nan")

    names = [name for name in group.contenders if name != against]
    _curves(axes, group, names, factor)
    for name in names[:1]:
        for at, row in enumerate(group.rows):
            value = factor(row, name)
            if value == value:
                axes.annotate(
                    f"{value:.1f}x", (at, value), xytext=(0, 7), textcoords="offset points",
                    ha="center", fontsize=8, color="#404040",
                )  # fmt: skip
    axes.axhline(1, color=_colour(against, 0), linewidth=1.6, label=against, zorder=1)
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(lambda x, _: f"{x:g}x")
    axes.set_ylabel(f"times as fast as {against}")


def memory(axes: Axes, group: Group, _: str) -> None:
    """Draw the peak memory of everybody."""
    ticker = importlib.import_module("matplotlib.ticker")
    _curves(axes, group, group.contenders, _megabytes)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=9))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_formatter(lambda x, _: f"{x / 1e3:g} GB" if x >= 1e3 else f"{x:g} MB")
    axes.set_ylabel("peak memory beyond the inputs")


def _megabytes(row: Row, name: str) -> float:
    result = row.of(name)
    return (result.peak_bytes or 0) / 1e6 if result else float("nan")


def _curves(
    axes: Axes, group: Group, names: Sequence[str], value: Callable[[Row, str], float]
) -> None:
    places = range(len(group.rows))
    for n, name in enumerate(group.contenders):
        if name not in names:
            continue
        axes.plot(
            places, [value(row, name) for row in group.rows], color=_colour(name, n), label=name,
            marker=MARKERS[n % len(MARKERS)], markersize=6, linewidth=2 if group.grows else 0,
        )  # fmt: skip
    axes.set_xticks(places, group.labels)
    axes.set_xlabel(group.axis)


PICTURES: dict[str, Callable[[Axes, Group, str], None]] = {
    "rate": rate_bars,
    "speed-up": speed_up,
    "memory": memory,
}


def _colour(name: str, number: int) -> str:
    spare = ("#332288", "#117733", "#AA4499")
    return COLOURS.get(name, spare[number % len(spare)])


def caption(report: Report) -> str:
    """Return the conditions, without a date."""
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    return f"{report.device}. {versions}. {report.method}"


def draw(report: Report, file: Path, against: str, pictures: Sequence[str] = ()) -> None:
    """Draw a report to a file.

    Parameters
    ----------
    report : Report
        What was measured.
    file : Path
        Its name ends in .svg or .png.
    against : str
        The contender that speed-ups compare with; nothing for the fastest one, of tasks alone.
    pictures : sequence of str, optional
        Names in `PICTURES`; by default all, or only the rates if there are many groups.

    Raises
    ------
    ArgumentError
        If there is nothing to draw, or the file has another ending.
    ImportError
        If matplotlib is not installed.
    """
    check_suffix(file)
    if report.tasks:
        _save(file, lambda: _tasks_figure(report, against))
        return
    found = [group for group in groups(report) if group.contenders]
    if not found:
        raise ArgumentError("there is nothing to draw, because nothing was measured")
    curves = len(found) <= MANY and all(group.grows for group in found)
    chosen = list(pictures) or list(PICTURES if curves else ["rate"])
    if "speed-up" in chosen and (against not in report.contenders or len(report.contenders) < 2):
        if pictures:
            raise ArgumentError(
                f"a speed-up needs measurements of {against} and of another contender"
            )
        chosen.remove("speed-up")
    _save(file, lambda: _figure(report, found, chosen, against))


def _save(file: Path, draw_it: Callable[[], Any]) -> None:
    with library().rc_context(STYLE):
        metadata = {"Date": None} if file.suffix == ".svg" else None
        draw_it().savefig(file, dpi=150, metadata=metadata)


def _tasks_figure(report: Report, against: str) -> Any:
    """Draw the time of every contender as bars, a group for each task, and ratios beside them.

    Where bytes are counted, they have bars of their own beside these.
    """
    rows = [row for row in report.tasks if any(x.seconds for x in row.results)]
    if not rows:
        raise ArgumentError("there is nothing to draw, because nothing was measured")
    names = report.contenders
    text = textwrap.fill(caption(report), 130)
    below = 0.35 + 0.19 * (text.count("\n") + 1)
    height = 1.1 + below + 0.21 * len(rows) * (len(names) + 1)
    figure = library().figure.Figure(figsize=(9.0, height))
    counted = any(row.task.moved for row in rows)
    panels = figure.subplots(
        1, 1 + counted, squeeze=False, sharey=True, width_ratios=(2.2, 1)[: 1 + counted]
    )
    axes = panels[0, 0]
    thick = 0.8 / len(names)
    for at, row in enumerate(rows):
        for n, name in enumerate(names):
            result = row.of(name)
            if result is None or not result.seconds:
                continue
            place = at + (n - (len(names) - 1) / 2) * thick
            bar = axes.barh(
                place, 1e6 * result.seconds, 0.92 * thick, color=_colour(name, n), label=name
            )
            words = f"{1e6 * result.seconds:,.3g}" if result.seconds < 1e-3 else (
                f"{1e6 * result.seconds:,.0f}"
            )  # fmt: skip
            ratio = row.ratio(name) if name == (against or row.fastest) else None
            words += "" if ratio is None else f"  (ratio {ratio:.3g})"
            axes.bar_label(bar, [words], padding=2, fontsize=8, color="#404040")
    titles = ["\n".join(textwrap.wrap(row.task.name, 34)) for row in rows]
    axes.set_yticks(range(len(rows)), titles)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}")
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.25, y=0.01)
    each = " or ".join(dict.fromkeys(row.task.each for row in rows))
    axes.set_xlabel(f"µs for a {each}")
    if counted:
        _bytes(panels[0, 1], rows)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(
        handles.values(), handles, loc="upper center", ncols=len(handles), fontsize=10,
        bbox_to_anchor=(0.5, 1 - 0.05 / height),
    )  # fmt: skip
    figure.text(0.15 / 9, 0.12 / height, text, fontsize=8, color="#505050", va="bottom")
    figure.tight_layout(rect=(0, below / height, 1, 1 - 0.4 / height))
    return figure


def _bytes(axes: Axes, rows: list[TaskRow]) -> None:
    """Draw the counted bytes of tasks as bars beside their times."""
    megabytes = [row.task.moved / 1e6 for row in rows]
    bars = axes.barh(range(len(rows)), megabytes, 0.5, color="#CC79A7")
    axes.bar_label(bars, [f"{x:,.3g}" for x in megabytes], padding=2, fontsize=8, color="#404040")
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.25)
    axes.set_xlabel("MB moved, by count")


def _figure(report: Report, found: list[Group], chosen: list[str], against: str) -> Any:
    """Lay out the panels: a row for a group where it has several pictures, else a grid."""
    matplotlib = library()
    widest = max(len(group.rows) * len(group.contenders) for group in found)
    width = min(9.0, max(4.8, 1.2 + 0.3 * widest))
    panels = [(group, name) for group in found for name in chosen]
    columns = len(chosen)
    if columns == 1:
        columns = 3 if len(found) % 3 == 0 else min(len(found), 2)
    lines = -(-len(panels) // columns)
    widths = [width if name == "rate" else 4.6 for name in chosen] if len(chosen) > 1 else None
    total = sum(widths) if widths else columns * width
    words = caption(report)
    if "memory" in chosen:
        words += " Memory: at the peak; of a backward with its forward."
    text = textwrap.fill(words, int(total * 15))
    below = 0.35 + 0.19 * (text.count("\n") + 1)
    height = 3.5 * lines + 0.75 + below
    figure = matplotlib.figure.Figure(figsize=(total, height))
    grid = figure.subplots(lines, columns, squeeze=False, width_ratios=widths)
    for axes, (group, name) in zip(grid.flat, panels, strict=False):
        PICTURES[name](axes, group, against)
        if name == chosen[0]:
            axes.set_title(group.title, loc="left")
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        found_handles, labels = axes.get_legend_handles_labels()
        for handle, label in zip(found_handles, labels, strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles, loc="upper center", ncols=len(handles), fontsize=10,
        bbox_to_anchor=(0.5, 1 - 0.05 / height),
    )  # fmt: skip
    figure.text(0.15 / total, 0.12 / height, text, fontsize=8, color="#505050", va="bottom")
    figure.tight_layout(rect=(0, below / height, 1, 1 - 0.45 / height), h_pad=2, w_pad=2)
    return figure


def check_suffix(file: Path) -> None:
    """Refuse a file that is no picture by its name."""
    if file.suffix not in SUFFIXES:
        raise ArgumentError(
            f"got the file {file}; expected a name that ends in {' or '.join(SUFFIXES)}"
        )


def library() -> Any:
    """Return matplotlib."""
    importlib.import_module("matplotlib.figure")
    return importlib.import_module("matplotlib")
