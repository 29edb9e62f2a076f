"""Which pieces of a call need to be computed: chunks of queries by chunks of keys, and proofs.

The classes of tiles that kernels skip are computed for whole chunks. A piece that is proven EMPTY
is never computed, and keys that are in no other piece are never read. In a piece that is proven
FULL, the mask is not evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..expr.bind import Sizes, bind
from ..expr.interval import EMPTY, FULL, PARTIAL, bounds, tile_class
from ..expr.nodes import Expr, operation, walk
from ..expr.tile_classes import tile_classes
from ..masks import Mask
from ..problem.call import Array, Call

MOST_CLASSES = 2**22  # of pieces of single heads; with more, all heads and entries share proofs
NO_KEYS = range(0)


class Piece(NamedTuple):
    """A piece of a call.

    Attributes
    ----------
    rows, keys : range
        Its queries and its keys.
    masked : bool
        Whether the mask is evaluated.
    first : bool
        Whether it is the first piece of its queries, in the order of `by_rows`. The sink is part of
        it.
    """

    rows: range
    keys: range
    masked: bool
    first: bool


@dataclass(frozen=True)
class Schedule:
    """The pieces of a call, in a fixed order.

    Attributes
    ----------
    rows, keys : sequence of range
        The chunks of queries and of keys.
    classes : array of int
        The class of each piece for all entries and heads together, (chunks of rows, chunks of
        keys): FULL if it is FULL for each of them, EMPTY if it is EMPTY for each.
    """

    rows: Sequence[range]
    keys: Sequence[range]
    classes: Array

    def by_rows(self) -> Iterator[Piece]:
        """Return the pieces, those of a chunk of queries one after the other.

        Every chunk of queries has at least one piece. It has no keys if the queries see none.
        """
        for rows, classes in zip(self.rows, self.classes, strict=True):
            needed = np.flatnonzero(classes != EMPTY)
            for n in needed:
                yield Piece(rows, self.keys[int(n)], bool(classes[n] != FULL), bool(n == needed[0]))
            if not needed.size:
                yield Piece(rows, NO_KEYS, False, True)

    def by_keys(self) -> Iterator[Piece]:
        """Return the pieces, those of a chunk of keys one after the other; without keys first."""
        return iter(sorted(self.by_rows(), key=lambda piece: (piece.keys.stop, piece.rows.start)))


def chunks(length: int, size: int) -> list[range]:
    """Return chunks of `size` positions; the last one may be shorter."""
    return [range(first, min(first + size, length)) for first in range(0, length, size)]


def schedule(call: Call, rows: int, keys: int) -> Schedule:
    """Return the schedule of a call, with chunks of so many queries and keys."""
    of_rows = chunks(call.problem.len_q, rows)
    of_keys = chunks(call.problem.len_k, keys)
    return Schedule(of_rows, of_keys, classes(call.mask, call.problem, of_rows, of_keys))


def classes(
    mask: Mask | None, problem: Sizes, rows: Sequence[range], keys: Sequence[range]
) -> Array:
    """Return the class of each piece, (chunks of rows, chunks of keys): see `Schedule`."""
    shape = len(rows), len(keys)
    batch = math.prod(problem.lead)
    if not batch * problem.heads:
        return np.full(shape, EMPTY)
    if mask is None or not all(shape):
        return np.full(shape, FULL)
    allowed = bind(mask.expr, problem)
    symbols = {
        "i_low": np.array([x.start for x in rows])[:, None],
        "i_high": np.array([x.stop - 1 for x in rows])[:, None],
        "j_low": np.array([x.start for x in keys]),
        "j_high": np.array([x.stop - 1 for x in keys]),
        "len_q": np.int64(problem.len_q),
        "len_k": np.int64(problem.len_k),
        "start_q": np.int64(0),
        "start_k": np.int64(0),
    }
    reads = {node.value for node in walk(allowed) if node.op == "symbol"}
    entries = batch if "b" in reads else 1
    heads = problem.heads if "h" in reads else 1
    if math.prod(shape) * entries * heads > MOST_CLASSES:
        ends = {"b_low": 0, "b_high": batch - 1, "h_low": 0, "h_high": problem.heads - 1}
        symbols |= {name: np.int64(end) for name, end in ends.items()}
        found = tile_classes(_class_of_all(allowed), symbols, "exact")
        return np.broadcast_to(found, shape)
    symbols["b"] = np.arange(entries)[:, None, None, None]
    symbols["h"] = np.arange(heads)[:, None, None]
    found = np.asarray(tile_classes(tile_class(allowed), symbols, "exact"))
    found = np.broadcast_to(found, np.broadcast_shapes(found.shape, (1, 1, *shape)))
    lowest, highest = found.min(axis=(0, 1)), found.max(axis=(0, 1))
    return np.where(lowest == highest, lowest, PARTIAL)


def _class_of_all(mask: Expr) -> Expr:
    """Return the class of a condition over a tile of all entries and heads."""
    everywhere, somewhere = bounds(mask, ("b", "h", "i", "j"))[mask]
    return operation("where", everywhere, FULL, operation("where", somewhere, PARTIAL, EMPTY))
