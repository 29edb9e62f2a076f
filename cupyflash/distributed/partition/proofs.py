"""Which keys each rank needs, and what it computes with them, by the mask's own proofs.

Every pair of a chunk of queries and a chunk of keys has a class. With packed sequences, chunks end
where sequences do, and only pairs of one sequence are looked at.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...expr.interval import EMPTY, FULL
from ...lazy import cached_property
from ...pieces import packed
from ...pieces.packed import Cells
from ...pieces.schedule import NO_KEYS, Piece, classes
from ...problem.call import Array, Call
from .intervals import Intervals
from .layouts import Layout


class _Held(NamedTuple):
    """Cells of positions, and the rank that holds each."""

    cells: Cells
    rank: Array


def _held(layout: Layout, starts: Array) -> _Held:
    chunks, owners = layout.chunks
    cells = Cells.of(chunks, starts)
    return _Held(cells, owners[cells.chunk])


def _cut(runs: Sequence[range], at: int) -> list[range]:
    """Return runs, of which the one that has a position in its inside is two."""
    return [
        range(*ends)
        for run in runs
        for ends in ((run.start, min(run.stop, at)), (max(run.start, at), run.stop))
        if ends[0] < ends[1]
    ]


class Proofs:
    """The classes of all pairs of cells that are not EMPTY.

    Parameters
    ----------
    call : Call
        The call.
    layout, layout_k : Layout
        Who holds its queries and its keys.
    """

    def __init__(self, call: Call, layout: Layout, layout_k: Layout) -> None:
        problem = call.problem
        self._layout, self._layout_k, self.size = layout, layout_k, layout.size
        self._packed = problem.packed
        starts = [problem.rows.of_queries.start(keys) for keys in (False, True)]
        self._starts = starts
        self._rows, self._keys = (
            _held(each, start) for each, start in zip((layout, layout_k), starts, strict=True)
        )
        if problem.packed:
            self._lengths = np.asarray(problem.len_q), np.asarray(problem.len_k)
            found = packed.pairs(call.mask, problem, self._rows.cells, self._keys.cells)
            self._at_rows, self._at_keys, kinds = found
        else:
            chunks = [
                [range(*ends) for ends in zip(x.cells.start.tolist(), x.cells.stop.tolist(),
                                              strict=True)]
                for x in (self._rows, self._keys)
            ]  # fmt: skip
            made = classes(call.mask, problem, *chunks)
            self._at_rows, self._at_keys = np.nonzero(made)
            kinds = made[self._at_rows, self._at_keys]
        seen = kinds != EMPTY
        self._at_rows, self._at_keys = self._at_rows[seen], self._at_keys[seen]
        self._full = kinds[seen] == FULL
        self._used = np.zeros((self.size, len(self._keys.rank)), bool)  # by each rank
        self._used[self._rows.rank[self._at_rows], self._at_keys] = True

    def of_groups(self, size: int) -> Proofs:
        """Return the proofs of groups of ranks in a row, each of which counts as one."""
        if size == 1:
            return self
        made = copy.copy(self)
        for name in ("keys", "work", "rows", "_of_owners"):
            made.__dict__.pop(name, None)
        made._layout, made._layout_k = (x.of_groups(size) for x in (self._layout, self._layout_k))
        made.size = self.size // size
        made._rows, made._keys = (x._replace(rank=x.rank // size) for x in (made._rows, made._keys))
        made._used = np.logical_or.reduceat(self._used, np.arange(0, self.size, size), axis=0)
        return made

    @cached_property
    def keys(self) -> Array:
        """How many keys each rank needs of each, (owners, users); its own ones count, too."""
        made = np.zeros((self.size, self.size), np.int64)
        users, cells = np.nonzero(self._used)
        np.add.at(made, (self._keys.rank[cells], users), self._keys.cells.size[cells])
        return made

    def keys_of_groups(self, size: int) -> Array:
        """Return how many keys of each rank some of so many ranks in a row need, (owners, groups).

        A key that several of them need counts once.
        """
        made = np.zeros((self.size, self.size // size), np.int64)
        used = np.logical_or.reduceat(self._used, np.arange(0, self.size, size), axis=0)
        groups, cells = np.nonzero(used)
        np.add.at(made, (self._keys.rank[cells], groups), self._keys.cells.size[cells])
        return made

    @cached_property
    def work(self) -> Array:
        """The pairs that each rank computes with the keys of each, (owners, users).

        A pair of cells that the mask hides in part counts half.
        """
        area = self._rows.cells.size[self._at_rows] * self._keys.cells.size[self._at_keys]
        owners, users = self._keys.rank[self._at_keys], self._rows.rank[self._at_rows]
        weights = area * (0.5 + 0.5 * self._full)
        flat = np.bincount(owners * self.size + users, weights, self.size**2)
        made: Array = flat.reshape(self.size, self.size)
        return made

    @cached_property
    def rows(self) -> Array:
        """How many queries of each rank see keys of each, (owners, users)."""
        made = np.zeros((self.size, self.size), np.int64)
        seen = np.zeros((self.size, len(self._rows.rank)), bool)
        seen[self._keys.rank[self._at_keys], self._at_rows] = True
        owners, cells = np.nonzero(seen)
        np.add.at(made, (owners, self._rows.rank[cells]), self._rows.cells.size[cells])
        return made

    @property
    def held(self) -> tuple[Array, Array]:
        """How many queries, and how many keys, each rank holds."""
        rows, keys = (
            np.bincount(each.rank, each.cells.size, self.size).astype(np.int64)
            for each in (self._rows, self._keys)
        )
        return rows, keys

    @property
    def own(self) -> tuple[Intervals, Intervals]:
        """The positions of the queries, and of the keys, that this rank holds."""
        return self._layout.own, self._layout_k.own

    def pairs(self) -> Array:
        """Return whether a rank needs keys of another one, (owners, users)."""
        found: Array = self.keys > 0
        np.fill_diagonal(found, False)
        return found

    def needed(self, user: int, owner: int) -> Intervals:
        """Return the positions of one rank's keys that another rank needs."""
        return self.needed_by_any(range(user, user + 1), owner)

    def needed_by_any(self, users: range, owner: int) -> Intervals:
        """Return the positions of one rank's keys that any of some ranks in a row needs."""
        cells = self._of_owners[owner]
        cells = cells[self._used[users.start : users.stop, cells].any(axis=0)]
        start, stop = self._keys.cells.start[cells], self._keys.cells.stop[cells]
        if not cells.size:
            return Intervals(())
        ends = np.flatnonzero(stop[:-1] != start[1:])
        firsts, lasts = start[np.append(0, ends + 1)], stop[np.append(ends, -1)]
        return Intervals(tuple(map(range, firsts.tolist(), lasts.tolist())))

    @cached_property
    def _of_owners(self) -> list[Array]:
        order = np.argsort(self._keys.rank, kind="stable")
        ends = np.cumsum(np.bincount(self._keys.rank, minlength=self.size))
        return np.split(order, ends[:-1])

    def pieces(self, keys: Sequence[Intervals]) -> list[list[Piece]]:
        """Return what this rank computes with the keys of each step.

        Every position is in the keys of one step at most. The first piece of some rows says so;
        rows without keys have a piece without keys in the first step.
        """
        spans = [(number, span) for number, runs in enumerate(keys) for span in runs]
        made: list[list[Piece]] = [[] for _ in keys]
        begun: set[range] = set()
        find = self._packed_pieces if self._packed else self._dense_pieces
        for number, piece in find(spans, self._layout.own.ranges):
            made[number].append(piece._replace(first=piece.rows not in begun))
            begun.add(piece.rows)
        made[0] += [Piece(rows, NO_KEYS, False, True) for rows in self._layout.own.without(begun)]
        return made

    def cut_pieces(self, keys: Intervals) -> list[Piece]:
        """Return what this rank computes with its own keys, in more pieces if it has one run.

        Packed sequences are not cut. Nothing says which pieces are the first ones.
        """
        runs, spans = list(self._layout.own), list(keys)
        if len(runs) == 1:
            (run,) = runs
            middle = (run.start + len(run) // 2) // self._layout.chunk * self._layout.chunk
            runs = _cut(runs, middle)
            if np.any(self._keys.cells.start == middle):
                spans = _cut(spans, middle)
        found = self._dense_pieces([(0, span) for span in spans], runs)
        return [piece for _, piece in found]

    def _own_pairs(
        self, spans: list[tuple[int, range]], runs: Sequence[range]
    ) -> tuple[Array, Array, Array, Array]:
        """Return this rank's pairs with keys in some spans, by spans, then by runs of queries.

        The four arrays are the number of the span and of the run, and the cells.
        """
        own = np.flatnonzero(self._rows.rank[self._at_rows] == self._layout.rank)
        firsts = np.array([span.start for _, span in spans], np.int64)
        stops = np.array([each.stop for _, each in spans], np.int64)
        order = np.argsort(firsts)
        starts = self._keys.cells.start[self._at_keys[own]]
        place = np.searchsorted(firsts[order], starts, "right") - 1
        span = order[place]
        inside = (place >= 0) & (starts < stops[span])
        own, span = own[inside], span[inside]
        rows = self._at_rows[own]
        starts = np.array([x.start for x in runs], np.int64)
        run = np.searchsorted(starts, self._rows.cells.start[rows], "right") - 1
        return span, run, own, np.lexsort((run, span))

    def _dense_pieces(
        self, spans: list[tuple[int, range]], runs: Sequence[range]
    ) -> Iterator[tuple[int, Piece]]:
        """Go through runs of queries by runs of keys, step by step."""
        if not spans:
            return
        span, run, own, _ = self._own_pairs(spans, runs)
        flat = span * len(runs) + run
        some = np.bincount(flat, minlength=len(spans) * len(runs))
        full = np.bincount(flat, self._full[own], len(some))
        of_runs, of_spans = (
            np.searchsorted(held.cells.start, [each.stop for each in ranges])
            - np.searchsorted(held.cells.start, [each.start for each in ranges])
            for held, ranges in ((self._rows, runs), (self._keys, [x for _, x in spans]))
        )
        for n in np.flatnonzero(some).tolist():
            s, r = divmod(n, len(runs))
            masked = bool(full[n] < of_runs[r] * of_spans[s])
            yield spans[s][0], Piece(runs[r], spans[s][1], masked, False)

    def _packed_pieces(
        self, spans: list[tuple[int, range]], runs: Sequence[range]
    ) -> Iterator[tuple[int, Piece]]:
        """Go through parts of sequences; those that are whole in a run and a span join."""
        if not spans:
            return
        span, run, own, order = self._own_pairs(spans, runs)
        sequence = self._rows.cells.sequence[self._at_rows[own]]
        order = np.lexsort((sequence, run, span))
        span, run, sequence, full = span[order], run[order], sequence[order], self._full[own][order]
        new = np.flatnonzero(
            np.append(True, (np.diff(span) != 0) | (np.diff(run) != 0) | (np.diff(sequence) != 0))
        ) if len(order) else np.empty(0, np.int64)  # fmt: skip
        if not new.size:
            return
        count = np.diff(np.append(new, len(order)))
        fulls = np.add.reduceat(full.astype(np.int64), new)
        span, run, sequence = span[new], run[new], sequence[new]
        rows_low, rows_high, keys_low, keys_high = (
            np.array([getattr(x, end) for x in ranges])[at]
            for ranges, at in ((runs, run), ([x for _, x in spans], span))
            for end in ("start", "stop")
        )
        (start_q, start_k), (len_q, len_k) = self._starts, self._lengths
        first_q, first_k = start_q[sequence], start_k[sequence]
        last_q, last_k = first_q + len_q[sequence], first_k + len_k[sequence]
        whole = (
            (first_q >= rows_low) & (last_q <= rows_high)
            & (first_k >= keys_low) & (last_k <= keys_high)
        )  # fmt: skip
        top, bottom = np.maximum(first_q, rows_low), np.minimum(last_q, rows_high)
        left, right = np.maximum(first_k, keys_low), np.minimum(last_k, keys_high)
        masked = fulls < count  # or where a pair is EMPTY:
        masked |= count < self._cells(self._rows, top, bottom) * self._cells(
            self._keys, left, right
        )
        # What lies between two of them has no rows or no keys, or its keys would be needed.
        same = (np.diff(span) == 0) & (np.diff(run) == 0)
        joins = whole[1:] & whole[:-1] & same
        begins = np.flatnonzero(np.append(True, ~joins))
        for first, end in zip(begins, np.append(begins[1:], len(sequence)), strict=True):
            last = end - 1
            yield (
                spans[span[first]][0],
                Piece(
                    range(int(top[first]), int(bottom[last])),
                    range(int(left[first]), int(right[last])),
                    bool(masked[first:end].any()),
                    False,
                    range(int(sequence[first]), int(sequence[last]) + 1),
                ),
            )

    @staticmethod
    def _cells(held: _Held, low: Array, high: Array) -> Array:
        """Return how many cells lie between positions."""
        starts = held.cells.start
        number: Array = np.searchsorted(starts, high) - np.searchsorted(starts, low)
        return number
