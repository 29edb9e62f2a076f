"""Which pieces of a call need to be computed: chunks of queries by chunks of keys, and proofs.

The classes of tiles that kernels skip are computed for whole chunks. A piece that is proven EMPTY
is never computed, and keys that are in no other piece are never read. In a piece that is proven
FULL, the mask is not evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ..expr.bind import Sizes, bind
from ..expr.interval import EMPTY, FULL, PARTIAL, bounds, tile_class
from ..expr.nodes import Expr, operation, walk
from ..expr.tile_classes import tile_classes
from ..lazy import Kept
from ..masks import Mask
from ..problem.call import Array, Call

MOST_CLASSES = 2**22  # of pieces of single heads; with more, all heads and entries share proofs
SPLIT = 8  # a rectangle of chunks that is PARTIAL is divided into so many by so many
FIRST_RECTANGLES = 2**10  # that are examined first, at least
NO_KEYS = range(0)
# A chunk of queries has so many parts of whole tiles; those that see no keys may be left out.
TILE, MOST_PARTS = 128, 64
_kept = Kept[Array](64)  # classes
_MOST_CHUNKS = 1024  # that they may have


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
    sequences : range
        Its packed sequences. If there are several, it has all of each.
    """

    rows: range
    keys: range
    masked: bool
    first: bool
    sequences: range = range(0)


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
    spans : mapping of (int, int) to tuple of range and bool
        Of pieces that do not have all queries of their chunk: those that they have, and whether
        the mask is evaluated.
    """

    rows: Sequence[range]
    keys: Sequence[range]
    classes: Array
    spans: Mapping[tuple[int, int], tuple[range, bool]] = field(default_factory=dict)

    def of_rows(self, n: int) -> list[Piece]:
        """Return the pieces of a chunk of queries, at least one: it has all of the queries.

        It has no keys if the queries see none.
        """
        rows, classes = self.rows[n], self.classes[n]
        needed = [int(m) for m in np.flatnonzero(classes != EMPTY)]
        if not needed:
            return [Piece(rows, NO_KEYS, False, True)]
        made = [Piece(rows, self.keys[needed[0]], bool(classes[needed[0]] != FULL), True)]
        for m in needed[1:]:
            span, masked = self.spans.get((n, m), (rows, bool(classes[m] != FULL)))
            made.append(Piece(span, self.keys[m], masked, False))
        return made

    def by_rows(self) -> Iterator[Piece]:
        """Return the pieces, those of a chunk of queries one after the other."""
        for n in range(len(self.rows)):
            yield from self.of_rows(n)

    def narrowed(self, call: Call) -> Schedule:
        """Return the schedule whose pieces leave out queries that see none of their keys.

        Those are left out that are the first or the last ones of a chunk. The first piece of a
        chunk has all of its queries.
        """
        if call.mask is None or len(self.keys) < 2:
            return self
        parts = [chunks_of(x, _part_size(len(x))) for x in self.rows]
        each = classes(call.mask, call.problem, [x for of in parts for x in of], self.keys)
        found, spans, end = self.classes.copy(), dict[tuple[int, int], tuple[range, bool]](), 0
        for n, of_chunk in enumerate(parts):
            own, end = each[end : end + len(of_chunk)], end + len(of_chunk)
            for m in np.flatnonzero(found[n] == PARTIAL):
                (seen,) = np.nonzero(own[:, m] != EMPTY)
                if not seen.size:
                    found[n, m] = EMPTY
                    continue
                rows = range(of_chunk[seen[0]].start, of_chunk[seen[-1]].stop)
                masked = own[seen[0] : seen[-1] + 1, m] != FULL
                spans[n, int(m)] = rows, bool(masked.any())
        return replace(self, classes=found, spans=spans)

    def by_keys(self) -> Iterator[Piece]:
        """Return the pieces, those of a chunk of keys one after the other; without keys first."""
        return iter(sorted(self.by_rows(), key=lambda piece: (piece.keys.stop, piece.rows.start)))


def chunks(length: int, size: int) -> list[range]:
    """Return chunks of `size` positions; the last one may be shorter."""
    return chunks_of(range(length), size)


def chunks_of(whole: range, size: int) -> list[range]:
    """Return parts of `size` positions of a range; the last one may be shorter."""
    return [whole[first : first + size] for first in range(0, len(whole), size)]


def _part_size(length: int) -> int:
    """Return the positions of the parts of which those that see no keys are left out."""
    return -(-length // (TILE * MOST_PARTS)) * TILE


def growing(length: int, first: int, last: int, factor: float) -> list[range]:
    """Return chunks each of which is `factor` times as long as the one before, up to `last`.

    All but the last one are whole tiles of 128 positions.
    """
    made, begin, size = list[range](), 0, first
    while begin < length:
        made.append(range(begin, min(begin + size, length)))
        begin, size = made[-1].stop, min(-(-int(size * factor) // 128) * 128, last)
    return made


def schedule(call: Call, rows: int, keys: int) -> Schedule:
    """Return the schedule of a call, with chunks of so many queries and keys."""
    lengths = call.rows
    return of_chunks(call, chunks(lengths.known_q, rows), chunks(lengths.known_k, keys))


def of_chunks(call: Call, of_rows: Sequence[range], of_keys: Sequence[range]) -> Schedule:
    """Return the schedule of a call, with these chunks of queries and keys."""
    return Schedule(of_rows, of_keys, classes(call.mask, call.problem, of_rows, of_keys))


def classes(
    mask: Mask | None, problem: Sizes, rows: Sequence[range], keys: Sequence[range]
) -> Array:
    """Return the class of each piece, (chunks of rows, chunks of keys): see `Schedule`.

    Chunks do not overlap, and come in any order. What only numbers decide is kept for later calls:
    no piece is computed before the proofs are there.
    """
    key: Hashable = None
    if mask is not None and len(rows) + len(keys) <= _MOST_CHUNKS:
        structure, arrays = mask.structure
        if not arrays:
            sizes = math.prod(problem.lead), problem.heads, int(problem.len_q), int(problem.len_k)
            key = structure, sizes, tuple(rows), tuple(keys)
            known = _kept.find(key)
            if known is not None:
                return known
    found = _classes(mask, problem, rows, keys)
    found.setflags(write=False)
    if key is not None:
        _kept.keep(key, found)
    return found


def _classes(
    mask: Mask | None, problem: Sizes, rows: Sequence[range], keys: Sequence[range]
) -> Array:
    shape = len(rows), len(keys)
    batch = math.prod(problem.lead)
    if not batch * problem.heads:
        return np.full(shape, EMPTY)
    if mask is None or not all(shape):
        return np.full(shape, FULL)
    allowed = bind(mask.expr, problem)
    symbols: dict[str, Any] = {
        "len_q": np.int64(problem.len_q),
        "len_k": np.int64(problem.len_k),
        "start_q": np.int64(0),
        "start_k": np.int64(0),
    }
    reads = {node.value for node in walk(allowed) if node.op == "symbol"}
    entries = batch if "b" in reads else 1
    heads = problem.heads if "h" in reads else 1
    if math.prod(shape) * entries * heads > MOST_CLASSES:
        root = _class_of_all(allowed)
        ends = {"b_low": 0, "b_high": batch - 1, "h_low": 0, "h_high": problem.heads - 1}
        symbols |= {name: np.int64(end) for name, end in ends.items()}
    else:
        root = tile_class(allowed)
        symbols["b"] = np.arange(entries)[:, None, None]
        symbols["h"] = np.arange(heads)[:, None]

    def of_rectangles(corners: dict[str, Array]) -> Array:
        found = np.asarray(tile_classes(root, symbols | corners, "exact"))
        found = np.broadcast_to(
            found, np.broadcast_shapes(found.shape, (1, 1, len(corners["i_low"])))
        )
        lowest, highest = found.min(axis=(0, 1)), found.max(axis=(0, 1))
        return np.where(lowest == highest, lowest, PARTIAL)

    return _divided(of_rectangles, rows, keys)


def _divided(
    classes_of: Callable[[dict[str, Array]], Array], rows: Sequence[range], keys: Sequence[range]
) -> Array:
    """Return the class of each piece, examining many pieces at once where that proves them.

    A class other than PARTIAL of a rectangle of chunks is that of each piece in it.
    """
    orders = [np.argsort([x.start for x in chunks], kind="stable") for chunks in (rows, keys)]
    low_i, low_j = (
        np.array([x.start for x in chunks])[order]
        for chunks, order in zip((rows, keys), orders, strict=True)
    )
    high_i, high_j = (
        np.array([x.stop - 1 for x in chunks])[order]
        for chunks, order in zip((rows, keys), orders, strict=True)
    )
    shape = len(low_i), len(low_j)
    step = 1
    while math.prod(-(-n // (SPLIT * step)) for n in shape) >= FIRST_RECTANGLES:
        step *= SPLIT
    down, across = (-(-n // step) for n in shape)
    made = np.empty((down * step, across * step), np.int8)  # whole rectangles
    row, column = (x.reshape(-1) for x in np.indices((down, across)))
    while True:
        top, left = row * step, column * step
        bottom, right = np.minimum(top + step, shape[0]), np.minimum(left + step, shape[1])
        kinds = classes_of({
            "i_low": low_i[top], "i_high": high_i[bottom - 1],
            "j_low": low_j[left], "j_high": high_j[right - 1],
        })  # fmt: skip
        rectangles = made.reshape(made.shape[0] // step, step, made.shape[1] // step, step)
        rectangles[row, :, column] = kinds[:, None, None]
        again = kinds == PARTIAL
        if step == 1 or not again.any():
            break
        step //= SPLIT
        row, column = (
            (x[again] * SPLIT)[:, None] + part.reshape(-1)
            for x, part in zip((row, column), np.indices((SPLIT, SPLIT)), strict=True)
        )
        inside = (row * step < shape[0]) & (column * step < shape[1])
        row, column = row[inside], column[inside]
    result = np.empty(shape, np.int8)
    result[np.ix_(*orders)] = made[: shape[0], : shape[1]]
    return result


def _class_of_all(mask: Expr) -> Expr:
    """Return the class of a condition over a tile of all entries and heads."""
    everywhere, somewhere = bounds(mask, ("b", "h", "i", "j"))[mask]
    return operation("where", everywhere, FULL, operation("where", somewhere, PARTIAL, EMPTY))
