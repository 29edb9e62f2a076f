"""The classes of a causal mask's tiles."""

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from svg import BLUE, GREY, ORANGE, figure

from cupyflash.reference.algorithms import causal_tiles

COLOURS = {"empty": "#8a909933", "partial": ORANGE, "full": BLUE}


def draw() -> Figure:
    """Return the figure."""
    table = causal_tiles.table(1024, 1024, 32, 32)
    made, axes = figure(4.6, 3.6)
    edges = np.arange(33)
    mesh = axes.pcolor(
        edges, edges, table, cmap=ListedColormap(list(COLOURS.values())), vmin=0, vmax=2
    )
    mesh.set(edgecolor="white", linewidth=0.6)
    axes.set(aspect="equal", xlabel="blocks of 32 keys", ylabel="blocks of 32 queries")
    axes.invert_yaxis()
    axes.set_xticks([0, 32])
    axes.set_yticks([0, 32])
    for spine in axes.spines.values():
        spine.set_visible(False)
    counts = np.bincount(table.ravel(), minlength=3)
    handles = [
        Patch(color=colour, label=f"{name}: {count}")
        for (name, colour), count in zip(COLOURS.items(), counts, strict=True)
    ]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.02, 0.5))
    axes.tick_params(color=GREY)
    return made
