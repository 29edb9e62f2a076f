"""A call of one rank: steps of pieces, between which keys, values and their gradients travel.

The messages for the next step are under way while a step is computed. Everything is summed in the
accumulator's type, in the order of the steps and, within a step, of the ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ..pieces.compute import Partial, Sums, Total
from ..pieces.parts import call_of, part, part_of_bias, part_of_statistic
from ..pieces.place import Place
from ..pieces.steps import Targets
from ..problem.call import Array, Call, Gradients
from .communication import Exchanger, Transfer
from .messages import Memory, Two, joined, packed
from .rounds import Step
from .runs import Runs
from .sums import add_over_ranks
from .tasks import Task

_NOTHING = Step({}, {}, Runs(()), [], [], [])


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

    def piece(self, task: Task, keys: Two, beside: bool) -> Call:
        """Return the call of a task, from the keys and values of its step.

        `beside` says whether messages travel meanwhile.
        """
        call, piece = self.call, task.piece
        bias = call.bias
        if bias is not None:
            bias = part_of_bias(call, bias, piece, task.rows, piece.keys)
        k, v = (part(x, task.keys) for x in keys)
        q = part(call.q, task.rows)
        return call_of(call, piece, q, k, v, bias, task.plain, beside)


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
        self.travels = bool(sends or receives)
        self._transfer: Transfer | None = rank.comm.exchange(contents, receives)

    def wait(self, totals: Two | None = None) -> Two:
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
        return joined(rank.place, rank.own, parts, self._step.keys)


def forward(rank: Rank, out: Array, lse: Array) -> None:
    """Write out and lse of the rank's queries."""
    last = {task.rows: task for step in rank.steps for task in step.forward}
    partial = {
        rows: Partial(rank.place, rank.call.problem, part(out, rows), part_of_statistic(lse, rows))
        for rows in last
    }
    keys = rank.own
    with rank.place:
        for number, step in enumerate(rank.steps):
            exchange = _Exchange(rank, number + 1)
            for task in step.forward:
                own = rank.piece(task, keys, exchange.travels)
                is_last = task is last[task.rows]
                partial[task.rows].compute(own, task.piece.first, is_last)
            keys = exchange.wait()


def backward(rank: Rank, targets: Targets, deterministic: bool, bias_is_shared: bool) -> None:
    """Write the gradients of what the rank holds."""
    call, place = rank.call, rank.place
    rows = {task.rows for step in rank.steps for task in step.forward}
    sums = Sums(call, place, targets.gradients, rows)
    keys, totals = rank.own, _Totals(rank, rank.steps[0], rank.keys)
    own = totals.memory.arrays
    returned: Memory | None = None
    with place:
        for n, step in enumerate(rank.steps):
            exchange = _Exchange(rank, n + 1, returned)
            for task in step.backward:
                if task.piece.keys or call.sink is not None:
                    _piece(rank, task, keys, totals, sums, targets, deterministic, exchange.travels)
            returned = totals.memory if n else None
            keys = exchange.wait(own)
            totals = _Totals(rank, rank.step(n + 1), rank.step(n + 1).keys)
        _Exchange(rank, len(rank.steps) + 1, returned).wait(own)
        if bias_is_shared and sums.dbias is not None:
            add_over_ranks(rank.comm, place, sums.dbias, rank.timeout)
        if sums.dsink is not None:
            add_over_ranks(rank.comm, place, sums.dsink, rank.timeout)
        for total, gradient in zip(own, targets.gradients[1:3], strict=True):
            place.store(total, gradient)
        sums.store()


class _Totals:
    """dk and dv of the keys of a step, as sums over its tasks.

    The first task of keys that no other range of the step shares is written in place.
    """

    def __init__(self, rank: Rank, step: Step, held: Runs) -> None:
        self.memory = Memory(rank.place, rank.own, held.count, rank.call.problem.accumulator)
        tasks = [task.keys for task in step.backward if task.piece.keys]
        ranges = sorted({(at.start, at.stop) for at in tasks})
        apart = all(one[1] <= other[0] for one, other in itertools.pairwise(ranges))
        covered = sum(stop - start for start, stop in ranges) == held.count
        parts = [range(*ends) for ends in ranges] if apart and covered else []
        if not parts:
            rank.place.clear(self.memory.content)
        self._totals = [Total(rank.place, x, parts) for x in self.memory.arrays]

    def in_place(self, at: range) -> list[Array | None]:
        """Return where dk and dv of a piece are to be computed, if it is the first one there."""
        return [total.in_place(at) for total in self._totals]

    def add(self, computed: Gradients, at: range) -> None:
        """Add the gradients of a piece with keys."""
        for summand, total in zip(computed[1:3], self._totals, strict=True):
            total.add(summand, at)


def _piece(
    rank: Rank, task: Task, keys: Two, totals: _Totals, sums: Sums, targets: Targets,
    deterministic: bool, beside: bool,
) -> None:  # fmt: skip
    """Compute the gradients of a task, and add them."""
    rows, at, piece = task.rows, task.keys, task.piece
    own = rank.piece(task, keys, beside)
    computed = sums.empty(own, rows, *totals.in_place(at))
    statistics = [targets.rows.get(name) for name in ("lse", "dlse")]
    lse, dlse = (None if x is None else part_of_statistic(x, rows) for x in statistics)
    assert lse is not None
    do, out = (part(targets.rows[name], rows) for name in ("do", "out"))
    rank.place.backend.backward_piece(own, do, out, lse, dlse, computed, deterministic)
    sums.add(computed, piece, rows)
    if piece.keys:
        totals.add(computed, at)
