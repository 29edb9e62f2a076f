"""A call computed piece by piece: partial results in the accumulator's type, in a fixed order.

The forward keeps the output and the LSE of a chunk of queries in the accumulator's type. The keys
of each piece join them, and the output is rounded once, behind the last piece. The backward of a
piece gets the output and the LSE of the whole call: so its weights are those of the whole call, and
gradients are sums over pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..lazy import cached_property
from ..problem.call import Array, Call, Gradients, Problem, Results
from .parts import call_of, part, part_of_bias, part_of_pairs, part_of_statistic
from .place import Parts, Place
from .schedule import Piece, Schedule


class _Reader:
    """Parts of arrays at the place of computation, in the order in which pieces need them."""

    def __init__(
        self, place: Place, order: Iterable[Any], parts_at: Callable[[Any], Parts]
    ) -> None:
        self._wanted = [key for key, _ in itertools.groupby(order)]
        self._feed = zip(self._wanted, place.feed(map(parts_at, self._wanted)), strict=True)
        self._key: Any = None
        self._parts: Parts = {}

    def at(self, key: Any) -> Parts:
        """Return the parts at the current or at the next positions."""
        if key != self._key:
            self._key, self._parts = next(self._feed)
            assert key == self._key
        return self._parts


class _Readers:
    """The parts of a call's arrays; `rows_too` are further ones that a piece's queries have."""

    def __init__(
        self, call: Call, pieces: list[Piece], place: Place, rows_too: Callable[[range], Parts]
    ) -> None:
        self._call, bias = call, call.bias
        self._rows = _Reader(
            place,
            (piece.rows for piece in pieces),
            lambda rows: {"q": part(call.q, rows), **rows_too(rows)},
        )
        self._keys = _Reader(
            place,
            (piece.keys for piece in pieces),
            lambda keys: {"k": part(call.k, keys), "v": part(call.v, keys)},
        )
        self._pairs = _Reader(
            place,
            ((piece.rows, piece.keys) for piece in pieces),
            lambda pair: {"bias": None if bias is None else part_of_pairs(bias, *pair)},
        )

    def of(self, piece: Piece) -> tuple[Call, Parts]:
        """Return the call of a piece, and the parts that its queries have."""
        rows, keys = self._rows.at(piece.rows), self._keys.at(piece.keys)
        bias = self._pairs.at((piece.rows, piece.keys))["bias"]
        q, k, v = rows["q"], keys["k"], keys["v"]
        assert q is not None
        assert k is not None
        assert v is not None
        return call_of(self._call, piece, q, k, v, bias), rows


def forward(call: Call, schedule: Schedule, place: Place, out: Array, lse: Array) -> None:
    """Write out and lse, wherever they live."""
    readers = _Readers(call, list(schedule.by_rows()), place, lambda _: {})
    with place:
        for n, rows in enumerate(schedule.rows):
            partial = Partial(place, call.problem, part(out, rows), part_of_statistic(lse, rows))
            pieces = schedule.of_rows(n)
            for piece in pieces:
                own = range(piece.rows.start - rows.start, piece.rows.stop - rows.start)
                partial.compute(readers.of(piece)[0], piece.first, piece is pieces[-1], own)


class Partial:
    """Out and lse of some queries, while pieces with their keys are computed.

    Parameters
    ----------
    place : Place
        Where they are computed.
    problem : Problem
        The whole call.
    out, lse : array
        Where they are written behind the last piece, in any memory.
    """

    def __init__(self, place: Place, problem: Problem, out: Array, lse: Array) -> None:
        self._place, self._number, self._results = place, problem.accumulator, (out, lse)

    @cached_property
    def _wide(self) -> tuple[Array, Array]:
        out, lse = (self._place.empty(x.shape, self._number) for x in self._results)
        return out, lse

    def begin(self, piece: Call, rows: range) -> None:
        """Compute the first piece of some of the queries; it is not their last one."""
        self._place.backend.forward_piece(piece, _rows_of(self._wide, rows), True)

    def compute(self, piece: Call, first: bool, last: bool, rows: range | None = None) -> None:
        """Compute a piece; `rows` says which of the queries it has, unless it has all of them."""
        backend, results = self._place.backend, self._results
        count = results[0].shape[-2]
        rows = range(count) if rows is None else rows
        if last and self._place.has(results[0]):
            to = _rows_of(results, rows)
            backend.forward_piece(piece, to if first else _rows_of(self._wide, rows), first, to)
            self._store(range(rows.start))
            self._store(range(rows.stop, count))
            return
        backend.forward_piece(piece, _rows_of(self._wide, rows), first)
        if last:
            self._store(range(count))

    def _store(self, rows: range) -> None:
        if rows:
            pairs = zip(_rows_of(self._wide, rows), _rows_of(self._results, rows), strict=True)
            for wide, to in pairs:
                self._place.store(wide, to)


def _rows_of(results: Results, rows: range) -> Results:
    out, lse = results
    if len(rows) == out.shape[-2]:
        return results
    return part(out, rows), part_of_statistic(lse, rows)


def backward(
    call: Call,
    schedule: Schedule,
    place: Place,
    do: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    gradients: Gradients,
    deterministic: bool,
) -> None:
    """Write every gradient, wherever it lives. Each of dk and dv is written once."""

    def rows_too(rows: range) -> Parts:
        return {
            "do": part(do, rows),
            "out": part(out, rows),
            "lse": part_of_statistic(lse, rows),
            "dlse": None if dlse is None else part_of_statistic(dlse, rows),
        }

    pieces = [x for x in schedule.by_keys() if x.keys or call.sink is not None]
    readers = _Readers(call, pieces, place, rows_too)
    with place:
        parts = parts_of([*schedule.rows, *(x.rows for x in pieces)])
        sums = Sums(call, place, gradients, parts)
        for keys in set(schedule.keys) - {x.keys for x in pieces}:  # which no query sees
            for gradient in gradients[1:3]:
                place.clear(part(gradient, keys))
        for keys, group in itertools.groupby(pieces, lambda piece: piece.keys):
            totals: tuple[Array, Array] | None = None  # dk and dv of these keys
            for piece in group:
                own, rows = readers.of(piece)
                computed = sums.empty(own, piece.rows)
                do_rows, out_rows, lse_rows = rows["do"], rows["out"], rows["lse"]
                assert do_rows is not None
                assert out_rows is not None
                assert lse_rows is not None
                place.backend.backward_piece(
                    own, do_rows, out_rows, lse_rows, rows["dlse"], computed, deterministic
                )
                sums.add(computed, piece, piece.rows)
                if totals is None:
                    totals = computed.dk, computed.dv
                else:
                    for summand, total in zip(computed[1:3], totals, strict=True):
                        place.add(summand, total)
            assert totals is not None
            for total, gradient in zip(totals, gradients[1:3], strict=True):
                place.store(total, part(gradient, keys))
        sums.store()


class Total:
    """A gradient of rows as a sum over pieces; the first piece of a part is written in place.

    Parameters
    ----------
    place : Place
        Where pieces are computed.
    total : array
        The sum, in any memory. It holds zeros, unless there are parts.
    parts : iterable of range
        Rows that are written in place at first: every piece has those of one part, or of several
        in a row. The sum is then where pieces are computed.
    """

    def __init__(self, place: Place, total: Array, parts: Iterable[range] = ()) -> None:
        self._place, self._total = place, total
        self._parts = frozenset(parts)
        self._unwritten = set(self._parts)

    def _of(self, rows: range) -> list[range]:
        """Return the parts that have some of the rows."""
        if rows in self._parts:
            return [rows]
        return [x for x in self._parts if x.start < rows.stop and rows.start < x.stop]

    def in_place(self, rows: range) -> Array | None:
        """Return where a piece's gradient is to be computed, if it is the first one there."""
        parts = self._of(rows)
        if not parts or not self._unwritten.issuperset(parts):
            return None
        assert sum(map(len, parts)) == len(rows)
        return part(self._total, rows)

    def written(self, rows: range) -> None:
        """Note that a piece's gradient was computed in place."""
        self._unwritten.difference_update(self._of(rows))

    def add(self, computed: Array, rows: range) -> None:
        """Add a gradient that was computed elsewhere; where there is none yet, write it."""
        fresh = self._unwritten.intersection(self._of(rows))
        beyond = [x for x in fresh if x.start < rows.start or rows.stop < x.stop]
        for x in beyond:
            self._place.clear(part(self._total, x))
            fresh.remove(x)
            self._unwritten.remove(x)
        self._unwritten -= fresh
        ends = sorted({rows.start, rows.stop, *(end for x in fresh for end in (x.start, x.stop))})
        for start, stop in itertools.pairwise(ends):
            of_rows = part(computed, range(start - rows.start, stop - rows.start))
            put = self._place.store if range(start, stop) in fresh else self._place.add
            put(of_rows, part(self._total, range(start, stop)))

    def store(self, target: Array, more: Sequence[tuple[Array, range]]) -> None:
        """Write the sum to an array, rounded, with gradients of some rows that are added last."""
        total = self.whole()
        for rows in parts_of([range(total.shape[-2]), *(at for _, at in more)]):
            summands = [part(total, rows)]
            for array, at in more:
                if at.start <= rows.start and rows.stop <= at.stop:
                    summands.append(part(array, range(rows.start - at.start, rows.stop - at.start)))
            self._place.store_sum(summands, part(target, rows))

    def whole(self) -> Array:
        """Return the sum; parts that no piece had are 0."""
        for rows in self._unwritten:
            self._place.clear(part(self._total, rows))
        self._unwritten.clear()
        return self._total


def parts_of(ranges: Iterable[range]) -> list[range]:
    """Return the parts of which each of some ranges has one, or several in a row."""
    found = [x for x in ranges if x]
    ends = sorted({end for x in found for end in (x.start, x.stop)})
    return [
        range(*each)
        for each in itertools.pairwise(ends)
        if any(x.start <= each[0] and each[1] <= x.stop for x in found)
    ]


class Sums:
    """The gradients of a call but dk and dv, as sums over pieces in the accumulator's type.

    Attributes
    ----------
    dbias, dsink : array or None
        The sums so far. A bias of which every element is in one piece has none: its gradient is
        written at once.
    """

    def __init__(self, call: Call, place: Place, targets: Gradients, rows: Iterable[range]) -> None:
        self._call, self._place, self._targets = call, place, targets
        self._number = call.problem.accumulator
        if place.has(call.q):
            self._dq = Total(place, place.empty(call.q.shape, self._number), rows)
        else:
            self._dq = Total(place, place.sums(call.q, self._number))
        self.dsink = None if call.sink is None else place.sums(call.sink, self._number)
        self.dbias: Array | None = None
        self._last_dq: list[tuple[Array, range]] = []  # to be added while the sum is rounded
        bias = None if targets.dbias is None else call.bias
        self._has_dbias = bias is not None
        if bias is not None and call.rows.of_queries.shares_pairs(bias):
            self.dbias = place.sums(bias, self._number)  # several pieces have the same part of it
        elif bias is not None:
            place.clear(targets.dbias)  # of pieces that are not computed

    def empty(
        self, piece: Call, rows: range, dk: Array | None = None, dv: Array | None = None
    ) -> Gradients:
        """Return uninitialised gradients of a piece with these rows of the arrays.

        `dk` and `dv` are given where they are computed in place.
        """
        bias = piece.bias if self._has_dbias else None
        owners = piece.q, piece.k, piece.v, bias, piece.sink
        made = self._dq.in_place(rows), dk, dv, None, None
        return Gradients(*(
            self._place.empty(owner.shape, self._number) if x is None and owner is not None else x
            for x, owner in zip(made, owners, strict=True)
        ))  # fmt: skip

    def add(self, computed: Gradients, piece: Piece, rows: range, last: bool = False) -> None:
        """Add the gradients of a piece; `rows` says where its queries are in the arrays.

        `last` says that no piece follows, at a place that has all arrays.
        """
        place = self._place
        if self._dq.in_place(rows) is not None:
            self._dq.written(rows)
        elif last:
            self._last_dq.append((computed.dq, rows))
        else:
            self._dq.add(computed.dq, rows)
        if computed.dbias is not None and self.dbias is not None:
            place.add(computed.dbias, self._of_bias(self.dbias, piece, rows))
        elif computed.dbias is not None:
            place.store(computed.dbias, self._of_bias(self._targets.dbias, piece, rows))
        if computed.dsink is not None and self.dsink is not None:
            place.add(computed.dsink, self.dsink)

    def _of_bias(self, array: Array, piece: Piece, rows: range) -> Array:
        return part_of_bias(self._call, array, piece, rows, piece.keys)

    def store(self) -> None:
        """Write the sums."""
        if self._last_dq:
            self._dq.store(self._targets.dq, self._last_dq)
        else:
            self._place.store(self._dq.whole(), self._targets.dq)
        sums = (self.dbias, self._targets.dbias), (self.dsink, self._targets.dsink)
        for total, target in sums:
            if total is not None:
                self._place.store(total, target)
