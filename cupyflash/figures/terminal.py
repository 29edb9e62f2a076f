"""Score matrices in a terminal: two characters a cell."""

from __future__ import annotations

from collections.abc import Sequence

from ..expr.interval import EMPTY, FULL, PARTIAL
from .survey import Grid
from .svg import ticks

BLOCKS = {EMPTY: "··", PARTIAL: "▒▒", FULL: "██"}
ASCII = {EMPTY: " .", PARTIAL: "++", FULL: "##"}
MOST_CELLS = (32, 40)  # rows and columns that find room in 100 columns


def signs(unicode: bool) -> dict[int, str]:
    """Return how a cell of each class is written."""
    return BLOCKS if unicode else ASCII


def picture(grid: Grid, unicode: bool = True) -> str:
    """Return the cells of a grid, with axes: queries from top to bottom, keys from left to right.

    Parameters
    ----------
    grid : Grid
        At most `MOST_CELLS`, to fit into 100 columns.
    unicode : bool
        Whether block characters may be used, or ASCII alone.

    Returns
    -------
    str
        Lines without trailing space.
    """
    shown = signs(unicode)
    arrow = "→" if unicode else "->"
    margin = max(len(str(grid.len_q)), len("queries")) + 1
    lines = [" " * margin + f" keys {arrow}", _axis(grid, margin)]
    edges = grid.edges_q
    labelled = _labels([int(n) for n in edges[:-1]], grid.len_q)
    side = "|" if not unicode else "│"
    for row, classes in enumerate(grid.classes):
        label = "queries" if row == 1 and len(edges) > 2 else labelled.get(row, "")
        cells = "".join(shown[kind] for kind in classes.tolist())
        lines.append(f"{label:>{margin - 1}} {side}{cells}{side}")
    lines.append(f"{grid.len_q:>{margin - 1}}")
    return "\n".join(line.rstrip() for line in lines)


def _labels(edges: Sequence[int], length: int) -> dict[int, str]:
    """Return for rows or columns of cells that begin at a tick its position."""
    wanted = ticks(length)[:-1]
    return {n: str(edge) for n, edge in enumerate(edges) if edge in wanted}


def _axis(grid: Grid, margin: int) -> str:
    line = " " * (margin + 1)
    edges = [int(n) for n in grid.edges_k[:-1]]
    for column, words in _labels(edges, grid.len_k).items():
        at = margin + 1 + 2 * column
        if at >= len(line.rstrip()) + 1:
            line = f"{line.rstrip():<{at}}{words}"
    end = margin + 1 + 2 * len(edges)
    return f"{line:<{end}} {grid.len_k}"
