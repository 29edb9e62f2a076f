"""Drawings of masks: by tiles, and pair by pair."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...errors import ArgumentError, ArgumentTypeError
from ...expr.bind import Dense, bind, in_host_memory
from ...expr.evaluate import evaluate
from ...expr.interval import EMPTY, FULL, PARTIAL
from ...expr.nodes import Expr
from ...expr.tile_classes import RANGE_LIMIT
from ...files import check_ending, write_text
from . import svg, terminal
from .survey import Grid, survey, symbols_of

MOST_PAIRS = 256  # queries, and keys, that are drawn pair by pair
MOST_CELLS = (96, 96)


class HasExpr(Protocol):
    """A mask."""

    @property
    def expr(self) -> Expr:
        """Its condition."""


@dataclass(frozen=True)
class Figure:
    """A picture: a notebook shows it by itself.

    Attributes
    ----------
    svg : str
        An SVG document.
    text : str
        The same picture in block characters, as wide as a terminal. `str` and `print` use ASCII
        instead where Python's standard output does not have these characters.
    """

    svg: str
    text: str

    def _repr_svg_(self) -> str:
        return self.svg

    def __str__(self) -> str:
        return terminal.shown(self.text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file.

        Parameters
        ----------
        path : str or path-like
            Its name. With the ending .txt the file has the text, otherwise the SVG.

        Raises
        ------
        ArgumentError
            The name has the ending of another format, such as .png.
        """
        file = Path(path)
        check_ending(file, "save", (".svg", ".txt"))
        write_text(file, self.text + "\n" if file.suffix.lower() == ".txt" else self.svg)


def _condition(mask: Any, sizes: Dense) -> Expr | None:
    if mask is None:
        return None
    if not isinstance(getattr(mask, "expr", None), Expr) or mask.expr.type != "bool":
        raise ArgumentTypeError(
            f"mask: got {type(mask).__name__}; expected a mask of cupyflash.masks, or None for no "
            "mask. Wrap an array with masks.dense(array); call a constructor, as in "
            "masks.causal()."
        )
    return bind(in_host_memory(mask.expr), sizes)


def checked(sizes: dict[str, Any]) -> None:
    """Raise unless every size is a positive integer."""
    for name, n in sizes.items():
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
            raise ArgumentError(f"{name}: got {n!r}; expected an integer of 1 or more.")


def _sizes(
    len_q: int, len_k: int | None, batch: int | tuple[int, ...], heads: int, at: tuple[int, int]
) -> Dense:
    len_k = len_q if len_k is None else len_k
    lead = batch if isinstance(batch, tuple) else (batch,)
    checked({"len_q": len_q, "len_k": len_k, "heads": heads})
    checked({"batch": math.prod(lead)})
    if not (0 <= at[0] < math.prod(lead) and 0 <= at[1] < heads):
        raise ArgumentError(
            f"at: got {at}; expected a batch entry below {math.prod(lead)} and a head below "
            f"{heads}."
        )
    return Dense(tuple(int(n) for n in lead), int(heads), int(len_q), int(len_k))


def _survey(
    allowed: Expr | None,
    sizes: Dense,
    blocks: tuple[int, int],
    most: Sequence[tuple[int, int]],
    at: tuple[int, int],
    machine: str,
) -> tuple[Grid, ...]:
    if machine not in RANGE_LIMIT:
        raise ArgumentError(f"machine: got {machine!r}; expected one of {', '.join(RANGE_LIMIT)}.")
    return survey(
        allowed, sizes, *blocks, machine=machine, most_cells=most, at=at, only_grids=True
    ).grids


def mask_tiles(
    mask: HasExpr | None,
    len_q: int,
    len_k: int | None = None,
    *,
    block_q: int = 64,
    block_kv: int = 64,
    batch: int | tuple[int, ...] = 1,
    heads: int = 1,
    at: tuple[int, int] = (0, 0),
    machine: str = "exact",
    title: str | None = None,
    notes: Sequence[str] = (),
) -> Figure:
    """Draw which tiles of the score matrix a mask leaves empty, partial and full.

    Parameters
    ----------
    mask : Mask or None
        A mask of `cupyflash.masks`; None is no mask.
    len_q, len_k : int
        Numbers of queries and keys; by default there are as many keys as queries.
    block_q, block_kv : int
        Queries and keys of a tile.
    batch : int or tuple of int
        Number of batch entries, or the leading axes.
    heads : int
        Query heads.
    at : tuple of int
        Batch entry and head that are drawn.
    machine : {"exact", "gpu", "cpu"}
        How many elements of the mask's arrays are examined for a tile: all, or as many as the
        kernels examine. Kernels treat a tile as partial if there are too many.
    title : str, optional
        Title above the drawing; by default the mask's condition.
    notes : sequence of str
        Lines below the drawing.

    Returns
    -------
    Figure
        A figure with one cell for each tile, or for several tiles if the matrix is large; it says
        for how many.

    Examples
    --------
    >>> from cupyflash import figures, masks
    >>> print(figures.mask_tiles(masks.causal(), 256))
    queries ↓  keys →
               0 64  192 256
            0 │▒▒······│
           64 │██▒▒····│
          128 │████▒▒··│
          192 │██████▒▒│
          256
               ██ FULL  ▒▒ PARTIAL  ·· EMPTY, skipped; a cell is one tile of 64 queries x 64 keys
    """
    checked({"block_q": block_q, "block_kv": block_kv})
    sizes = _sizes(len_q, len_k, batch, heads, at)
    allowed = _condition(mask, sizes)
    most = MOST_CELLS, terminal.MOST_CELLS
    fine, small = _survey(allowed, sizes, (block_q, block_kv), most, at, machine)
    title = words_of(mask) if title is None else title
    return Figure(tiles_svg(fine, title, notes), terminal.picture(small))


def tiles_svg(grid: Grid, title: str, notes: Sequence[str] = ()) -> str:
    """Return the SVG of a grid of tiles."""
    classes = grid.classes
    counts = grid.tiles.sum(axis=(0, 1))
    legend = [
        (
            svg.PAINT[kind],
            f"{terminal.NAMES[kind]} {counts[kind]:,}{' (skipped)' if kind == EMPTY else ''}",
        )
        for kind in (FULL, PARTIAL, EMPTY)
    ]
    said = [*notes, f"tiles of {grid.block_q} queries x {grid.block_kv} keys"]
    if grid.down * grid.across > 1:
        said.append(
            f"a cell stands for {grid.down} x {grid.across} tiles: orange unless all are alike"
        )
    fine = max(classes.shape) <= 48
    lines = (grid.edges_q[1:-1], grid.edges_k[1:-1]) if fine else ((), ())
    layers = [(svg.PAINT[kind], classes == kind) for kind in (EMPTY, PARTIAL, FULL)]
    return svg.matrix(
        layers, grid.edges_q, grid.edges_k, title=title, legend=legend, notes=said, lines=lines
    )


def mask_pairs(
    mask: HasExpr | None,
    len_q: int,
    len_k: int | None = None,
    *,
    block_q: int | None = None,
    block_kv: int | None = None,
    batch: int | tuple[int, ...] = 1,
    heads: int = 1,
    at: tuple[int, int] = (0, 0),
    machine: str = "exact",
    title: str | None = None,
    notes: Sequence[str] = (),
) -> Figure:
    """Draw a mask pair by pair, with a kernel's tiles over the pairs.

    Parameters
    ----------
    mask : Mask or None
        A mask of `cupyflash.masks`; None is no mask.
    len_q, len_k : int
        Numbers of queries and keys, at most 256; by default there are as many keys as queries.
    block_q, block_kv : int, optional
        Numbers of queries and keys in a tile; without them no tiles are drawn.
    batch : int or tuple of int
        Number of batch entries, or the leading axes.
    heads : int
        Query heads.
    at : tuple of int
        Batch entry and head that are drawn.
    machine : {"exact", "gpu", "cpu"}
        How many elements of the mask's arrays are examined for a tile: all, or as many as the
        kernels examine. Kernels treat a tile as partial if there are too many.
    title : str, optional
        Title above the drawing; by default the mask's condition.
    notes : sequence of str
        Lines below the drawing.

    Returns
    -------
    Figure
        Blue pairs lie in tiles that are full, orange ones in tiles that are masked pair by pair.

    Raises
    ------
    ArgumentError
        If there are too many pairs for a picture: `mask_tiles` draws any number.
    """
    sizes = _sizes(len_q, len_k, batch, heads, at)
    if max(sizes.len_q, sizes.len_k) > MOST_PAIRS:
        raise ArgumentError(
            f"len_q, len_k: got {sizes.len_q} and {sizes.len_k}; expected at most {MOST_PAIRS}, "
            "because every pair is drawn. figures.mask_tiles draws any number."
        )
    tiled = block_q is not None or block_kv is not None
    block_q = sizes.len_q if block_q is None else block_q
    block_kv = sizes.len_k if block_kv is None else block_kv
    checked({"block_q": block_q, "block_kv": block_kv})
    allowed = _condition(mask, sizes)
    most = [(MOST_PAIRS, MOST_PAIRS)]
    (tiles,) = _survey(allowed, sizes, (block_q, block_kv), most, at, machine)
    i, j = np.arange(sizes.len_q), np.arange(sizes.len_k)
    shape = sizes.len_q, sizes.len_k
    pairs = np.ones(shape, bool)
    if allowed is not None:
        value = evaluate(allowed, symbols_of(sizes, *at, i=i[:, None], j=j[None]))
        pairs = np.broadcast_to(value, shape)
    title = words_of(mask) if title is None else title
    drawn = _pairs_svg(pairs, tiles, title, tiled, notes)
    most = [terminal.MOST_CELLS]
    (small,) = _survey(allowed, sizes, (1, 1), most, at, machine)
    return Figure(drawn, terminal.picture(small))


def _pairs_svg(pairs: Any, grid: Grid, title: str, tiled: bool, notes: Sequence[str]) -> str:
    len_q, len_k = pairs.shape
    classes = grid.classes[
        np.arange(len_q)[:, None] // grid.block_q, np.arange(len_k)[None] // grid.block_kv
    ]
    paint = svg.PAINT
    edges = np.arange(len_q + 1), np.arange(len_k + 1)
    kept = f"{int(pairs.sum()):,} of {pairs.size:,} pairs attend"
    if not tiled:
        legend = [(paint[FULL], "attends"), (paint[EMPTY], "masked")]
        layers = [(paint[FULL], pairs), (paint[EMPTY], ~pairs)]
        return svg.matrix(layers, *edges, title=title, legend=legend, notes=[*notes, kept])
    counts = grid.tiles.sum(axis=(0, 1))
    layers = [
        (paint[EMPTY], classes == EMPTY),
        (svg.HIDDEN, (classes == PARTIAL) & ~pairs),
        (paint[PARTIAL], (classes == PARTIAL) & pairs),
        (paint[FULL], classes == FULL),
    ]
    legend = [
        (paint[FULL], f"FULL {counts[FULL]}"),
        (paint[PARTIAL], f"PARTIAL {counts[PARTIAL]}: attends"),
        (svg.HIDDEN, "masked"),
        (paint[EMPTY], f"EMPTY {counts[EMPTY]} (skipped)"),
    ]
    said = [*notes, f"tiles of {grid.block_q} queries x {grid.block_kv} keys; {kept}"]
    lines = grid.edges_q[1:-1], grid.edges_k[1:-1]
    return svg.matrix(layers, *edges, title=title, legend=legend, notes=said, lines=lines)


def words_of(mask: Any, most: int = 62) -> str:
    """Return a mask's condition, shortened to so many characters."""
    if mask is None:
        return "no mask"
    words = str(mask.expr)
    if words.startswith("(") and words.endswith(")"):
        words = words[1:-1]
    return words if len(words) <= most else words[: most - 3] + "..."
