"""Score matrices in a terminal: two characters for each cell, block characters or ASCII."""

from __future__ import annotations

import sys

from ...expr.interval import EMPTY, FULL, PARTIAL
from .survey import Array, Grid
from .svg import ticks

NAMES = {EMPTY: "EMPTY", PARTIAL: "PARTIAL", FULL: "FULL"}
SIGNS = {EMPTY: "··", PARTIAL: "▒▒", FULL: "██"}
MOST_CELLS = (32, 40)  # rows and columns that fit into 100 columns
_ASCII = str.maketrans({"·": ".", "▒": "+", "█": "#", "│": "|", "→": ">", "↓": "v"})


def ascii_only(text: str) -> str:
    """Return a picture in characters that every terminal has."""
    return text.translate(_ASCII)


def can_show(text: str) -> bool:
    """Whether Python's standard output has all characters of a text."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def shown(text: str) -> str:
    """Return a picture in characters that standard output has."""
    if can_show(text):
        return text
    return ascii_only(text).encode("ascii", "backslashreplace").decode()


def picture(grid: Grid) -> str:
    """Return the cells of a grid, with axes: queries from top to bottom, keys from left to right.

    Parameters
    ----------
    grid : Grid
        At most `MOST_CELLS`, to fit into 100 columns.

    Returns
    -------
    str
        Lines without trailing space; the last lines say what a cell is. If all tiles are alike, one
        line says so.
    """
    alike = _alike(grid)
    if alike:
        return alike
    margin = max(len(str(grid.len_q)), len("queries ↓")) + 1
    lines = [f"{'queries ↓':>{margin - 1}}  keys →", _axis(grid, margin)]
    labels = _labels(grid.edges_q, grid.len_q)
    for row, classes in enumerate(grid.classes):
        cells = "".join(SIGNS[kind] for kind in classes.tolist())
        lines.append(f"{labels.get(row, ''):>{margin - 1}} │{cells}│")
    lines.append(f"{grid.len_q:>{margin - 1}}")
    lines += [" " * (margin + 1) + words for words in _legend(grid)]
    return "\n".join(line.rstrip() for line in lines)


def _alike(grid: Grid) -> str:
    """Return what all tiles are; nothing where they differ."""
    counts = grid.tiles.sum(axis=(0, 1)).tolist()
    kind = max((EMPTY, PARTIAL, FULL), key=lambda kind: counts[kind])
    if counts[kind] < sum(counts):
        return ""
    one = counts[kind] == 1
    if grid.block_q * grid.block_kv > 1:
        what = f"tile{'' if one else 's'} of {grid.block_q} queries x {grid.block_kv} keys"
        verb = "is" if one else "are"
        said = f"{verb} {NAMES[kind]}{', skipped' if kind == EMPTY else ''}"
    else:
        what = f"pair{'' if one else 's'} of a query and a key"
        said = "attends" if one else "attend"
        if kind != FULL:
            said = "is masked" if one else "are masked"
    return f"{SIGNS[kind]} {'the one' if one else f'all {counts[kind]:,}'} {what} {said}"


def _legend(grid: Grid) -> list[str]:
    tile = f"{grid.block_q} queries x {grid.block_kv} keys"
    several = f"{grid.down} x {grid.across}"
    if grid.block_q * grid.block_kv > 1:
        signs = f"{SIGNS[FULL]} FULL  {SIGNS[PARTIAL]} PARTIAL  {SIGNS[EMPTY]} EMPTY, skipped"
        cell = f"one tile of {tile}"
        several += f" tiles of {tile}"
    else:
        signs = f"{SIGNS[FULL]} attends  {SIGNS[EMPTY]} masked"
        cell = "one pair of a query and a key"
        several += " pairs"
    if grid.down * grid.across == 1:
        return [f"{signs}; a cell is {cell}"]
    return [signs, f"a cell is {several}, {SIGNS[PARTIAL]} unless all are alike"]


def _labels(edges: Array, length: int) -> dict[int, str]:
    """Return for rows or columns of cells that begin at a tick its position."""
    wanted = ticks(length)[:-1]
    return {n: str(edge) for n, edge in enumerate(edges[:-1].tolist()) if edge in wanted}


def _axis(grid: Grid, margin: int) -> str:
    line = ""
    for column, words in _labels(grid.edges_k, grid.len_k).items():
        at = margin + 1 + 2 * column
        if not line or at > len(line):
            line = f"{line:<{at}}{words}"
    end = margin + 1 + 2 * (len(grid.edges_k) - 1)
    return f"{line:<{end}} {grid.len_k}"
