"""The order in which FlashAttention and FlashAttention-2 visit tiles."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from svg import BLUE, GREEN, GREY, ORANGE, PURPLE, TEXT, figure

ROWS, COLUMNS = 4, 3
COLOURS = [BLUE, ORANGE, GREEN, PURPLE]


def grid(axes: Any, title: str, keys_outside: bool) -> None:
    """Draw tiles with their numbers, a colour for each pass of the outer loop."""
    axes.set_title(title)
    for i in range(ROWS):
        for j in range(COLUMNS):
            outer = j if keys_outside else i
            order = j * ROWS + i if keys_outside else i * COLUMNS + j
            tile = Rectangle((j, i), 0.94, 0.94, color=COLOURS[outer], alpha=0.85, lw=0)
            axes.add_patch(tile)
            axes.text(j + 0.47, i + 0.47, order + 1, color="white", ha="center", va="center")
    outside = {"arrowstyle": "->", "color": TEXT, "lw": 1.4}
    inside = {"arrowstyle": "->", "color": GREY, "lw": 1.4}
    along, down = (outside, inside) if keys_outside else (inside, outside)
    axes.annotate("", (COLUMNS, -0.25), (0, -0.25), arrowprops=along)
    axes.annotate("", (-0.25, ROWS), (-0.25, 0), arrowprops=down)
    axes.text(COLUMNS / 2, -0.4, "keys and values", ha="center", va="bottom")
    axes.text(-0.4, ROWS / 2, "queries", ha="right", va="center", rotation=90)
    axes.set(xlim=(-0.9, COLUMNS + 0.1), ylim=(ROWS + 0.1, -0.9), aspect="equal")
    axes.set_axis_off()


def draw() -> Figure:
    """Return the figure."""
    made, (left, right) = figure(6.4, 3.6, 1, 2)
    grid(left, "FlashAttention", keys_outside=True)
    grid(right, "FlashAttention-2", keys_outside=False)
    return made
