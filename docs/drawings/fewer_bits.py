"""What a model loses with caches of fewer bits, from the tables of the page."""

import re
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from svg import BLUE, GREEN, ORANGE, TEXT, figure

PAGE = Path(__file__).parents[1] / "howto" / "fewer_bits.md"
ROW = re.compile(r"^\| ([\w,]+) +\|(.*)\|$", re.MULTILINE)
CHANGE = re.compile(r"([+-]\d+\.\d+) ± (\d+\.\d+) %")
WITH = ("as they are", "hadamard of q, k", "hadamard of q, k and v")


def tables() -> list[dict[str, np.ndarray]]:
    """Return the two tables: type of the cache -> (change, standard error) in three columns."""
    rows = [(name, CHANGE.findall(cells)) for name, cells in ROW.findall(PAGE.read_text("utf-8"))]
    found = [(name, np.array(cells, float)) for name, cells in rows if len(cells) == len(WITH)]
    half = len(found) // 2
    return [dict(found[:half]), dict(found[half:])]


def draw() -> Figure:
    """Return the figure."""
    made, both = figure(7.2, 3.4, 1, 2)
    titles = "the model's own keys", "two columns of keys 16 times as large"
    for axes, table, title in zip(both, tables(), titles, strict=True):
        at = np.arange(len(table))
        for n, (name, colour) in enumerate(zip(WITH, (ORANGE, BLUE, GREEN), strict=True)):
            change, error = np.array([cells[n] for cells in table.values()]).T
            place = at + 0.25 * (n - 1)
            axes.errorbar(place, change, error, fmt="os^"[n], ms=5, color=colour, label=name)
        axes.axhline(0, color=TEXT, lw=0.8)
        axes.set_yscale("symlog", linthresh=0.01, linscale=0.5)
        ticks = [0, 0.01, 0.1, 1, 10]
        axes.set_yticks(ticks, [f"{x:g} %" for x in ticks])
        axes.minorticks_off()
        axes.set_ylim(-0.02, 90)
        axes.set_xticks(at, [name.replace("float8_", "") for name in table], rotation=25)
        axes.set_title(title)
        axes.grid(visible=True, axis="y")
    both[0].set_ylabel("change of the perplexity")
    both[0].legend(loc="upper left", fontsize=9)
    return made
