"""Split keys: one query's tiles on one multiprocessor, and on all of them."""

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from svg import BLUE, LINE, ORANGE, figure

TILES = 8


def draw() -> Figure:
    """Return the figure."""
    made, both = figure(6.6, 2.4, 1, 2)
    for axes, parts in zip(both, (1, TILES), strict=True):
        for tile in range(TILES):
            when, where = (tile, 0) if parts == 1 else (0, tile)
            axes.add_patch(Rectangle((when + 0.05, where + 0.1), 0.9, 0.8, color=BLUE, lw=0))
        if parts > 1:
            axes.add_patch(Rectangle((1.05, 0.1), 0.4, 0.8, color=ORANGE, lw=0))
            axes.text(1.6, 0.5, "join", color=ORANGE, va="center")
        for line in range(1, TILES):
            axes.axhline(line, color=LINE, lw=0.6)
        title = "one part" if parts == 1 else f"{parts} parts"
        axes.set(title=title, xlim=(0, TILES), ylim=(0, TILES), xlabel="time")
        axes.set_xticks([])
        axes.set_yticks([])
    both[0].set_ylabel("multiprocessors")
    return made
