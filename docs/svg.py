"""How the figures look, and how they become SVG."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

# Readable on white and on black.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#3a86d8", "#e07b2e", "#2a9d7c", "#9a6dd7", "#8a9099"
# They stand for colours of the page, and are replaced in its SVG.
TEXT, LINE, GROUND = "#010203", "#010204", "#010205"
OF_THE_PAGE = {TEXT: "currentColor", LINE: "var(--color-background-border)", GROUND: "none"}

SETTINGS = {
    "svg.fonttype": "none",  # letters stay letters
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": TEXT,
    "axes.facecolor": GROUND,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.titlesize": 10,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.hashsalt": "cupyflash",  # the same ids in every build
}


def figure(width: float, height: float, *grid: int) -> tuple[Figure, Any]:
    """Return a figure of so many inches, and its axes: one, or `grid` of them."""
    made = Figure(figsize=(width, height), layout="constrained")
    return made, made.subplots(*grid)


def svg_of(made: Figure) -> str:
    """Return a figure as SVG, without a date or a version."""
    stream = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    made.savefig(stream, format="svg", transparent=True, metadata=nothing)
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    return re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px system-ui, sans-serif", text)


def drawings_of(draw: Callable[[], Any]) -> list[str]:
    """Return what a function draws: a matplotlib figure, an SVG, or a list of them."""
    with mpl.rc_context(SETTINGS):
        drawn = draw()
        each = drawn if isinstance(drawn, list) else [drawn]
        return [one if isinstance(one, str) else svg_of(one) for one in each]


def inline_svg(text: str, alt: str, name: str) -> str:
    """Return an SVG as a part of a page that has other drawings, in the page's colours."""
    for stand_in, colour in OF_THE_PAGE.items():
        text = text.replace(stand_in, colour)
    # Ids are those of the page: make them this figure's own.
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'"#(?![0-9a-f]{6}")', f'"#{name}-', text)
    text = text.replace("url(#", f"url(#{name}-")
    size = re.search(r'width="([\d.]+)(pt)?" height="[\d.]+(?:pt)?"', text)
    if size is None:
        raise ValueError(f"the SVG of {name} does not say how large it is")
    width = float(size[1]) * (4 / 3 if size[2] else 1)  # in pixels
    text = text.replace(size[0], f'style="max-width: {width:.0f}px; width: 100%; height: auto"', 1)
    label = html.escape(alt, quote=True)
    text = text.replace(' role="img"', "", 1)
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
