"""Packed sequences in pieces: chunks end where sequences do, and pairs of others are left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..expr.bind import Sizes, bind
from ..expr.interval import EMPTY, FULL, PARTIAL, bounds, tile_class
from ..expr.nodes import Expr, operation, walk
from ..expr.tile_classes import tile_classes
from ..masks import Mask
from ..problem.call import Array
from .schedule import MOST_CLASSES


@dataclass(frozen=True)
class Packed:
    """Sizes of packed sequences, as masks know them; lengths and starts are arrays of int64."""

    lead: tuple[int, ...]
    heads: int
    len_q: Array
    len_k: Array
    start_q: Array
    start_k: Array
    packed: bool = True


class Cells(NamedTuple):
    """Parts of chunks that belong to one sequence each, in the order of positions.

    Attributes
    ----------
    start, stop : array of int
        The packed positions of each.
    chunk : array of int
        The chunk that has it.
    sequence : array of int
        The sequence that has it.
    """

    start: Array
    stop: Array
    chunk: Array
    sequence: Array

    @property
    def size(self) -> Array:
        """Positions of each."""
        count: Array = self.stop - self.start
        return count

    @staticmethod
    def of(chunks: Sequence[range], starts: Array) -> Cells:
        """Cut chunks, which have every position once, where sequences start."""
        first = np.array([x.start for x in chunks], np.int64)
        stop = max((x.stop for x in chunks), default=0)
        cuts = np.unique(np.concatenate([first, starts[starts < stop]]))
        order = np.argsort(first)
        return Cells(
            cuts,
            np.append(cuts[1:], stop)[: len(cuts)],
            order[np.searchsorted(first[order], cuts, "right") - 1],
            np.searchsorted(starts, cuts, "right") - 1,  # the last one; those before it are empty
        )


class Pairs(NamedTuple):
    """Every pair of a cell of queries and a cell of keys of the same sequence.

    Attributes
    ----------
    rows, keys : array of int
        The number of the cell of queries, and of that of keys.
    classes : array of int
        The class of each pair for all heads together.
    """

    rows: Array
    keys: Array
    classes: Array


def pairs(mask: Mask | None, problem: Sizes, rows: Cells, keys: Cells) -> Pairs:
    """Return the pairs of cells, by cells of queries."""
    count = math.prod(problem.lead)
    first = np.searchsorted(keys.sequence, np.arange(count))
    numbers = np.bincount(keys.sequence, minlength=count)
    each = numbers[rows.sequence]
    at_rows = np.repeat(np.arange(len(each)), each)
    at_keys = np.arange(len(at_rows)) - np.repeat(np.cumsum(each) - each, each)
    at_keys += first[rows.sequence[at_rows]]
    return Pairs(at_rows, at_keys, _classes(mask, problem, rows, keys, at_rows, at_keys))


def _classes(
    mask: Mask | None, problem: Sizes, rows: Cells, keys: Cells, at_rows: Array, at_keys: Array
) -> Array:
    if mask is None or not at_rows.size:
        return np.full(len(at_rows), FULL)
    allowed = bind(mask.expr, problem)
    b = rows.sequence[at_rows]
    symbols: dict[str, Any] = {
        name: np.asarray(getattr(problem, name), np.int64)[b]
        for name in ("len_q", "len_k", "start_q", "start_k")
    }
    symbols["b"] = b
    for name, cells, at in (("i", rows, at_rows), ("j", keys, at_keys)):
        starts = symbols["start_q" if name == "i" else "start_k"]
        symbols[f"{name}_low"] = cells.start[at] - starts
        symbols[f"{name}_high"] = cells.stop[at] - 1 - starts
    reads_heads = any(node.op == "symbol" and node.value == "h" for node in walk(allowed))
    if reads_heads and len(b) * problem.heads > MOST_CLASSES:
        symbols |= {"h_low": np.int64(0), "h_high": np.int64(problem.heads - 1)}
        return np.broadcast_to(tile_classes(_of_all_heads(allowed), symbols, "exact"), b.shape)
    symbols["h"] = np.arange(problem.heads if reads_heads else 1)[:, None]
    found = np.asarray(tile_classes(tile_class(allowed), symbols, "exact"))
    found = np.broadcast_to(found, np.broadcast_shapes(found.shape, (1, len(b))))
    lowest, highest = found.min(axis=0), found.max(axis=0)
    return np.where(lowest == highest, lowest, PARTIAL)


def _of_all_heads(mask: Expr) -> Expr:
    everywhere, somewhere = bounds(mask, ("h", "i", "j"))[mask]
    return operation("where", everywhere, FULL, operation("where", somewhere, PARTIAL, EMPTY))
