"""A call computed piece by piece: partial results in the accumulator's type, in a fixed order.

The forward keeps the output and the LSE of a chunk of queries in the accumulator's type. The keys
of each piece join them, and the output is rounded once, behind the last piece. The backward of a
piece gets the output and the LSE of the whole call: so its weights are those of the whole call, and
gradients are sums over pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from ..problem.call import Array, Call, Gradients
from .parts import call_of, part, part_of_pairs, part_of_statistic
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
    problem, pieces = call.problem, list(schedule.by_rows())
    readers = _Readers(call, pieces, place, lambda _: {})
    for rows, group in itertools.groupby(pieces, lambda piece: piece.rows):
        shape = *problem.lead, problem.heads, len(rows)
        wide = place.empty((*shape, problem.d_v), problem.accumulator)
        wide_lse = place.empty(shape, problem.accumulator)
        for piece in group:
            place.backend.forward_piece(readers.of(piece)[0], wide, wide_lse, piece.first)
        place.store(wide, part(out, rows))
        place.store(wide_lse, part_of_statistic(lse, rows))
    place.finish()


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

    number = call.problem.accumulator
    pieces = [x for x in schedule.by_keys() if x.keys or call.sink is not None]
    readers = _Readers(call, pieces, place, rows_too)
    dq, dbias = place.sums(call.q, number), _BiasGradient(call, place, gradients.dbias)
    dsink = None if call.sink is None else place.sums(call.sink, number)
    for keys in set(schedule.keys) - {x.keys for x in pieces}:  # which no query sees
        for gradient in (gradients.dk, gradients.dv):
            place.clear(part(gradient, keys))
    for keys, group in itertools.groupby(pieces, lambda piece: piece.keys):
        sums: list[Array] = []
        for piece in group:
            own, rows = readers.of(piece)
            computed = Gradients(*(
                None if x is None else place.empty(x.shape, number)
                for x in (own.q, own.k, own.v, own.bias, own.sink)
            ))  # fmt: skip
            place.backend.backward(
                own,
                *(rows[name] for name in ("do", "out", "lse", "dlse")),
                computed,
                workspace=None,
                deterministic=deterministic,
            )
            place.add(computed.dq, part(dq, piece.rows))
            if computed.dbias is not None:
                dbias.add(computed.dbias, piece)
            if dsink is not None and computed.dsink is not None:
                place.add(computed.dsink, dsink)
            if sums:
                for total, summand in zip(sums, (computed.dk, computed.dv), strict=True):
                    place.add(summand, total)
            else:
                sums = [computed.dk, computed.dv]
        if keys:
            for total, gradient in zip(sums, (gradients.dk, gradients.dv), strict=True):
                place.store(total, part(gradient, keys))
    place.store(dq, gradients.dq)
    dbias.store()
    if dsink is not None:
        place.store(dsink, gradients.dsink)
    place.finish()


class _BiasGradient:
    """The gradient of the bias: sums, if several pieces have the same part of it."""

    def __init__(self, call: Call, place: Place, target: Array | None) -> None:
        bias = call.bias
        self._place, self._target = place, target
        self._total: Array | None = None
        if bias is None or target is None:
            return
        if bias.ndim < 2 or 1 in bias.shape[-2:]:
            self._total = place.sums(bias, call.problem.accumulator)
        else:
            place.clear(target)  # of pieces that are not computed

    def add(self, computed: Array, piece: Piece) -> None:
        """Add what a piece gives."""
        if self._total is not None:
            self._place.add(computed, part_of_pairs(self._total, piece.rows, piece.keys))
        elif self._target is not None:
            self._place.store(computed, part_of_pairs(self._target, piece.rows, piece.keys))

    def store(self) -> None:
        """Write the sums, if there are any."""
        if self._total is not None and self._target is not None:
            self._place.store(self._total, self._target)
