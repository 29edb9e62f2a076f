"""A call of one rank: steps of pieces, between which keys, values and their gradients travel.

The messages for the next step are under way while a step is computed. Everything is summed in the
accumulator's type, in the order of the steps and, within a step, of the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..pieces.compute import Sums
from ..pieces.parts import call_of, part, part_of_bias, part_of_statistic
from ..pieces.place import Place
from ..pieces.schedule import Piece
from ..pieces.steps import Targets
from ..problem.call import Array, Call
from .communication import Exchanger, Transfer
from .messages import Memory, Two, joined, packed
from .rounds import Step
from .runs import Runs
from .sums import add_over_ranks

_NOTHING = Step({}, {}, Runs(()), [])


@dataclass(frozen=True)
class Rank:
    """What one rank computes of a call.

    Attributes
    ----------
    call : Call
        The call. Its arrays are those of the rank; its lengths are those of all ranks.
    rows, keys : Runs
        The positions that the rank holds.
    steps : list of Step
        What it sends, receives and computes.
    comm : Exchanger
        The ranks.
    place : Place
        Where it computes.
    timeout : float
        Seconds to wait for other ranks, each time.
    """

    call: Call
    rows: Runs
    keys: Runs
    steps: list[Step]
    comm: Exchanger
    place: Place
    timeout: float

    @property
    def own(self) -> Two:
        """The rank's keys and values."""
        return self.call.k, self.call.v

    def step(self, number: int) -> Step:
        """Return a step; before the first and after the last, one in which nothing is done."""
        return self.steps[number] if 0 <= number < len(self.steps) else _NOTHING

    def piece(self, piece: Piece, held: Runs, keys: Two) -> Call:
        """Return the call of a piece, from keys and values at the positions `held`."""
        rows, at = self.rows.rows(piece.rows), held.rows(piece.keys)
        bias = self.call.bias
        if bias is not None:
            bias = part_of_bias(self.call, bias, piece, rows, piece.keys)
        k, v = (part(x, at) for x in keys)
        return call_of(self.call, piece, part(self.call.q, rows), k, v, bias)


class _Exchange:
    """The keys and values of a step, and the gradients of those of the step two before it.

    `gradients` are dk and dv of the keys of that step, which return to their owners.
    """

    def __init__(self, rank: Rank, number: int, gradients: Memory | None = None) -> None:
        self._rank, place, problem = rank, rank.place, rank.call.problem
        self._what = f"round {min(number, len(rank.steps) - 1)} of {len(rank.steps) - 1}"
        self._step = rank.step(number)
        before = _NOTHING if gradients is None else rank.step(number - 2)
        sends = [
            (peer, packed(place, rank.own, rank.keys, wanted, problem.dtype))
            for peer, wanted in self._step.sends.items()
        ]
        self._keys = [
            (peer, wanted, Memory(place, rank.own, wanted.count, problem.dtype))
            for peer, wanted in self._step.receives.items()
        ]
        self._gradients = [
            (peer, wanted, Memory(place, rank.own, wanted.count, problem.accumulator))
            for peer, wanted in before.sends.items()
        ]
        if gradients is not None and len(before.receives) == 1:
            sends += [(peer, gradients) for peer in before.receives]
        elif gradients is not None:
            sends += [
                (peer, packed(place, gradients.arrays, before.keys, wanted, problem.accumulator))
                for peer, wanted in before.receives.items()
            ]
        receives = [(peer, memory.content) for peer, _, memory in (*self._keys, *self._gradients)]
        contents = [(peer, memory.content) for peer, memory in sends]
        self._transfer: Transfer | None = rank.comm.exchange(contents, receives)

    def wait(self, totals: Two | None = None) -> tuple[Runs, Two]:
        """Return the keys and values of the step; add the gradients to those of own keys."""
        rank = self._rank
        assert self._transfer is not None
        self._transfer.wait(rank.timeout, self._what)
        self._transfer = None  # and with it what was sent
        for _, wanted, memory in self._gradients:
            assert totals is not None
            for run in wanted:
                for came, total in zip(memory.arrays, totals, strict=True):
                    rank.place.add(part(came, wanted.rows(run)), part(total, rank.keys.rows(run)))
        parts = [(wanted, memory) for _, wanted, memory in self._keys]
        return self._step.keys, joined(rank.place, rank.own, parts, self._step.keys)


def forward(rank: Rank, out: Array, lse: Array) -> None:
    """Write out and lse of the rank's queries."""
    place, problem = rank.place, rank.call.problem
    partial: dict[range, Two] = {}
    lead = () if problem.packed else problem.lead
    for rows in dict.fromkeys(piece.rows for step in rank.steps for piece in step.pieces):
        shape = *lead, problem.heads, len(rows)
        wide = place.empty((*shape, problem.d_v), problem.accumulator)
        partial[rows] = wide, place.empty(shape, problem.accumulator)
    held, keys = rank.keys, rank.own
    with place:
        for number, step in enumerate(rank.steps):
            exchange = _Exchange(rank, number + 1)
            for piece in step.pieces:
                own = rank.piece(piece, held, keys)
                place.backend.forward_piece(own, *partial[piece.rows], piece.first)
            held, keys = exchange.wait()
        for rows, (wide, wide_lse) in partial.items():
            place.store(wide, part(out, rank.rows.rows(rows)))
            place.store(wide_lse, part_of_statistic(lse, rank.rows.rows(rows)))


def backward(rank: Rank, targets: Targets, deterministic: bool, bias_is_shared: bool) -> None:
    """Write the gradients of what the rank holds."""
    call, place, number = rank.call, rank.place, rank.call.problem.accumulator
    sums = Sums(call, place, targets.gradients)

    def zeros(held: Runs) -> Memory:
        memory = Memory(place, rank.own, held.count, number)
        place.clear(memory.content)
        return memory

    held, keys, totals = rank.keys, rank.own, zeros(rank.keys)
    own = totals.arrays
    returned: Memory | None = None
    with place:
        for n, step in enumerate(rank.steps):
            exchange = _Exchange(rank, n + 1, returned)
            for piece in step.pieces:
                if piece.keys or call.sink is not None:
                    _piece(rank, piece, held, keys, totals.arrays, sums, targets, deterministic)
            returned = totals if n else None
            held, keys = exchange.wait(own)
            totals = zeros(held)
        _Exchange(rank, len(rank.steps) + 1, returned).wait(own)
        if bias_is_shared and sums.dbias is not None:
            add_over_ranks(rank.comm, place, sums.dbias, rank.timeout)
        if sums.dsink is not None:
            add_over_ranks(rank.comm, place, sums.dsink, rank.timeout)
        for total, gradient in zip(own, targets.gradients[1:3], strict=True):
            place.store(total, gradient)
        sums.store()


def _piece(
    rank: Rank, piece: Piece, held: Runs, keys: Two, totals: Two, sums: Sums, targets: Targets,
    deterministic: bool,
) -> None:  # fmt: skip
    """Compute the gradients of a piece, and add them."""
    rows, at = rank.rows.rows(piece.rows), held.rows(piece.keys)
    own = rank.piece(piece, held, keys)
    computed = sums.empty(own)
    statistics = [targets.rows.get(name) for name in ("lse", "dlse")]
    lse, dlse = (None if x is None else part_of_statistic(x, rows) for x in statistics)
    assert lse is not None
    do, out = (part(targets.rows[name], rows) for name in ("do", "out"))
    rank.place.backend.backward(
        own, do, out, lse, dlse, computed, workspace=None, deterministic=deterministic
    )
    sums.add(computed, piece, rows)
    for summand, total in zip(computed[1:3], totals, strict=True):
        rank.place.add(summand, part(total, at))
