"""Score matrices as SVG, written by hand: a few paths, whatever the number of cells.

Text and axes have a grey that is readable on light and dark pages, and the background is the
page's. The colours also differ in lightness, so colour-blind readers can tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...expr.interval import EMPTY, FULL, PARTIAL

Array = np.ndarray[Any, Any]

GREY = "#767676"  # 4.5 : 1 on white, and on black
# Of Okabe and Ito's palette: blue for FULL, orange for PARTIAL.
PAINT = {
    EMPTY: f'fill="{GREY}" fill-opacity="0.13"',
    PARTIAL: 'fill="#e69f00"',
    FULL: 'fill="#1b78b4"',
}
HIDDEN = 'fill="#e69f00" fill-opacity="0.22"'  # a masked pair of a PARTIAL tile
WIDTH, SHORTEST, LONGEST = 380.0, 36.0, 460.0  # of the drawing of a matrix
LEFT, TOP, RIGHT = 58.0, 26.0, 26.0
LINE = 17.0
FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"


def _number(x: float) -> str:
    return f"{x:.2f}".rstrip("0").rstrip(".")


def ticks(length: int, most: float = 8) -> list[int]:
    """Return positions along an axis: multiples of a power of two, and the end; or both ends."""
    step = 1
    while step * 4 < length:
        step *= 2
    found = list(range(0, length, step))
    if len(found) > 1 and length - found[-1] < step / 2:
        found.pop()
    return [*found, length] if len(found) < most else [0, length]


def path(cells: Array, edges_y: Array, edges_x: Array) -> str:
    """Return a path of every cell that is set; neighbours in a row become one box."""
    parts = []
    for row, line in enumerate(cells):
        changes = np.flatnonzero(np.diff(np.concatenate([[False], line, [False]])))
        top, bottom = edges_y[row], edges_y[row + 1]
        for first, last in zip(changes[::2], changes[1::2], strict=True):
            left, width = edges_x[first], edges_x[last] - edges_x[first]
            parts.append(
                f"M{_number(left)} {_number(top)}h{_number(width)}"
                f"v{_number(bottom - top)}h{_number(-width)}z"
            )
    return "".join(parts)


def escape(words: str) -> str:
    """Return words as XML text; what XML cannot hold becomes U+FFFD."""
    words = "".join(x if x.isprintable() or x == "\n" else "\ufffd" for x in words)
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{_number(x)}" y="{_number(y)}"{more}>{escape(words)}</text>'


def matrix(
    layers: Sequence[tuple[str, Array]],
    edges_q: Array,
    edges_k: Array,
    *,
    title: str,
    legend: Sequence[tuple[str, str]],
    notes: Sequence[str] = (),
    lines: tuple[Any, Any] = ((), ()),
) -> str:
    """Return a matrix of cells as SVG: queries from top to bottom, keys from left to right.

    Parameters
    ----------
    layers : sequence of (str, array of bool)
        How cells are painted (attributes of SVG), and which cells: (rows, columns).
    edges_q, edges_k : array of int
        The queries and keys at which rows and columns of cells begin, and at which the last one
        ends.
    title : str
        Title above the matrix.
    legend : sequence of (str, str)
        Paint and description.
    notes : sequence of str
        Lines below the legend.
    lines : tuple of two arrays of int
        Queries and keys at which lines are drawn over the cells.

    Returns
    -------
    str
        A whole SVG document.
    """
    len_q, len_k = int(edges_q[-1]), int(edges_k[-1])
    height = min(max(WIDTH * len_q / len_k, SHORTEST), LONGEST)
    width = min(max(height * len_k / len_q, SHORTEST), WIDTH)
    top = TOP + 2.2 * LINE
    scale_y, scale_x = height / len_q, width / len_k
    y, x = top + edges_q * scale_y, LEFT + edges_k * scale_x
    bottom, right = top + height, LEFT + width
    body = [f'<path d="{path(cells, y, x)}" {paint}/>' for paint, cells in layers if np.any(cells)]
    strokes = [f"M{_number(LEFT)} {_number(top + n * scale_y)}H{_number(right)}" for n in lines[0]]
    strokes += [
        f"M{_number(LEFT + n * scale_x)} {_number(top)}V{_number(bottom)}" for n in lines[1]
    ]
    if strokes:
        body.append(f'<path d="{"".join(strokes)}" stroke="{GREY}" stroke-width="0.7"/>')
    body.append(
        f'<rect x="{_number(LEFT)}" y="{_number(top)}" width="{_number(width)}" '
        f'height="{_number(height)}" fill="none" stroke="{GREY}"/>'
    )
    marks = []
    for n in ticks(len_k, width / (8 * len(str(len_k)) + 8)):
        at = LEFT + n * scale_x
        marks.append(f"M{_number(at)} {_number(top)}v-4")
        body.append(_text(at, top - 7, str(n), ' text-anchor="middle" font-size="11"'))
    for n in ticks(len_q, height / 18):
        at = top + n * scale_y
        marks.append(f"M{_number(LEFT)} {_number(at)}h-4")
        body.append(_text(LEFT - 7, at + 4, str(n), ' text-anchor="end" font-size="11"'))
    body.append(f'<path d="{"".join(marks)}" stroke="{GREY}"/>')
    body.append(_text(LEFT, TOP - 8, title, ' font-size="13" font-weight="600"'))
    body.append(_text(right, top - 22, "keys j →", ' text-anchor="end" font-size="12"'))
    turned = (
        f' text-anchor="end" font-size="12" transform="rotate(-90 {_number(14)} {_number(top)})"'
    )
    body.append(_text(14, top + 4, "← queries i", turned))

    down, across, most = bottom + 2.0 * LINE, LEFT, right
    for paint, words in legend:
        wide = 24 + 6.7 * len(words)
        if across > LEFT and across + wide > LEFT + WIDTH + RIGHT:
            down, across = down + 1.25 * LINE, LEFT
        body.append(
            f'<rect x="{_number(across)}" y="{_number(down - 10)}" width="12" height="12" '
            f'stroke="{GREY}" stroke-width="0.7" {paint}/>'
        )
        body.append(_text(across + 18, down, words, ' font-size="12"'))
        across += wide + 8
        most = max(most, across)
    for note in notes:
        down += 1.25 * LINE
        body.append(_text(LEFT, down, note, ' font-size="11"'))
        most = max(most, LEFT + 6.1 * len(note))
    whole_width = max(most, LEFT + 7.6 * len(title)) + RIGHT
    whole_height = down + LINE
    size = f"{_number(whole_width)} {_number(whole_height)}"
    sizes = 'width="{}" height="{}"'.format(*size.split())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {sizes} viewBox="0 0 {size}" role="img" '
        f'font-family="{FONT}" fill="{GREY}">\n<title>{escape(title)}</title>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )
