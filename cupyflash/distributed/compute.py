"""A call of one rank: steps of pieces, between which keys, values and their gradients travel.

The messages for the next step are under way while a step is computed. Everything is summed in the
accumulator's type, in the order of the steps and, within a step, of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from ..pieces.compute import Partial, Sums, Total, parts_of
from ..pieces.parts import call_of, part, part_of_bias, part_of_statistic
from ..pieces.place import Place
from ..pieces.steps import Targets
from ..problem.call import Array, Call
from .communication import Exchanger, Transfer
from .messages import Memory, Packed, Several, joined
from .rounds import Step
from .runs import Runs
from .sharded import Lookups
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
    lookups : Lookups or None
        What masks and scores read of divided arrays, if they do.
    """

    call: Call
    rows: Runs
    keys: Runs
    steps: list[Step]
    comm: Exchanger
    place: Place
    timeout: float
    lookups: Lookups | None = None

    @property
    def keys_and_values(self) -> Several:
        """The rank's keys and values."""
        return self.call.k, self.call.v

    @property
    def own(self) -> Several:
        """What travels of the rank's arrays."""
        return *self.keys_and_values, *(() if self.lookups is None else self.lookups.own)

    def step(self, number: int) -> Step:
        """Return a step; before the first and after the last, one in which nothing is done."""
        return self.steps[number] if 0 <= number < len(self.steps) else _NOTHING

    def piece(self, task: Task, keys: Several, beside: bool) -> Call:
        """Return the call of a task, from the keys and values of its step.

        `beside` says whether messages travel meanwhile.
        """
        call, piece = self.call, task.piece
        bias = call.bias
        if bias is not None:
            bias = part_of_bias(call, bias, piece, task.rows, piece.keys)
        k, v = (part(x, task.keys) for x in keys[:2])
        q = part(call.q, task.rows)
        made = call_of(call, piece, q, k, v, bias, task.plain, beside)
        return made if self.lookups is None else self.lookups.of_piece(made, task, keys[2:])


class _Exchange:
    """The keys and values of a step, and the gradients of those of the step two before it.

    `gradients` are dk and dv of the keys of that step, which return to their owners.

    Where a place computes later than it is asked to, messages are packed and sent beside what it
    computes next, even if that is asked for before `post`. What is computed `ahead` of that takes
    the whole device, so that messages are packed before.
    """

    def __init__(
        self, rank: Rank, number: int, gradients: Memory | None = None, ahead: bool = False
    ) -> None:
        self._rank, place, problem = rank, rank.place, rank.call.problem
        self._what = f"round {min(number, len(rank.steps) - 1)} of {len(rank.steps) - 1}"
        self._step = rank.step(number)
        before = _NOTHING if gradients is None else rank.step(number - 2)
        self._sends = [
            (peer, Packed(place, rank.own, rank.keys, wanted))
            for peer, wanted in self._step.sends.items()
        ]
        self._keys = [
            (peer, wanted, Memory(place, rank.own, wanted.count))
            for peer, wanted in self._step.receives.items()
        ]
        self._gradients = [
            (peer, wanted, Memory(place, rank.keys_and_values, wanted.count, problem.accumulator))
            for peer, wanted in before.sends.items()
        ]
        if gradients is not None:
            self._sends += [
                (peer, Packed(place, gradients.arrays, before.keys, wanted))
                for peer, wanted in before.receives.items()
            ]
        self.travels = bool(self._sends or self._keys or self._gradients)
        self._is_packed = ahead
        if ahead:
            self._pack()
        self._mark = place.mark() if self.travels else None  # all its memory is there
        self._transfer: Transfer | None = None

    def _pack(self) -> None:
        for _, packed in self._sends:
            packed.pack()

    def post(self) -> None:
        """Post the messages, packed."""
        mark, self._mark = self._mark, None
        with nullcontext() if mark is None else self._rank.place.beside(mark):
            if not self._is_packed:
                self._pack()
            self._transfer = self._posted()

    def _posted(self) -> Transfer:
        receives = [
            (peer, content)
            for peer, _, memory in (*self._keys, *self._gradients)
            for content in memory.contents
        ]
        sends = [(peer, x) for peer, packed in self._sends for x in packed.contents]
        return self._rank.comm.exchange(sends, receives)

    def wait(self) -> Several:
        """Return the keys and values of the step."""
        rank = self._rank
        assert self._transfer is not None
        self._transfer.wait(rank.timeout, self._what)
        self._transfer = None
        self._sends.clear()  # what was sent may be let go, and what was packed
        if not self._keys:
            return rank.own  # no task has keys
        parts = [(wanted, memory) for _, wanted, memory in self._keys]
        return joined(rank.place, rank.own, parts, self._step.keys)

    def gradients(self) -> Iterator[tuple[Several, range]]:
        """Yield dk and dv that were waited for, and the rows of own keys that have them."""
        for _, wanted, memory in self._gradients:
            for run in wanted:
                dk, dv = (part(x, wanted.rows(run)) for x in memory.arrays)
                yield (dk, dv), self._rank.keys.rows(run)


def forward(rank: Rank, out: Array, lse: Array) -> None:
    """Write out and lse of the rank's queries."""
    last = {task.rows: task for step in rank.steps for task in step.forward}
    # Where later tasks have all rows of a run, those of its halves are parts of it.
    runs = {x: next(y for y in sorted(last, key=len, reverse=True) if _has(y, x)) for x in last}
    problem = rank.call.problem
    partial = {
        rows: Partial(rank.place, problem, part(out, rows), part_of_statistic(lse, rows))
        for rows in runs.values()
    }

    def compute(task: Task, keys: Several, beside: bool) -> None:
        own, run = rank.piece(task, keys, beside), runs[task.rows]
        if run == task.rows:
            partial[run].compute(own, task.piece.first, task is last[run])
        else:
            partial[run].begin(own, range(task.rows.start - run.start, task.rows.stop - run.start))

    keys = rank.own
    with rank.place:
        for number, step in enumerate(rank.steps):
            exchange = _Exchange(rank, number + 1, ahead=step.ahead > 0)
            for task in step.forward[: step.ahead]:
                compute(task, keys, False)
            exchange.post()
            for task in step.forward[step.ahead :]:
                compute(task, keys, exchange.travels)
            keys = exchange.wait()


def _has(rows: range, others: range) -> bool:
    return rows.start <= others.start and others.stop <= rows.stop


def backward(rank: Rank, targets: Targets, deterministic: bool, bias_is_shared: bool) -> None:
    """Write the gradients of what the rank holds."""
    call, place = rank.call, rank.place
    rows = [x.rows for step in rank.steps for x in (*step.backward, *step.later, *step.forward)]
    sums = Sums(call, place, targets.gradients, parts_of(rows))
    begins = rank.steps[0]
    keys, totals = rank.own, _Totals(rank, [*begins.backward, *begins.later], rank.keys)
    own = totals
    # Several gradients of the same keys: the second one has more of them, and is written in place.
    held: list[tuple[Several, range]] | None = [] if begins.later and len(rank.steps) == 2 else None
    returned: Memory | None = None
    with place:
        for n, step in enumerate(rank.steps):
            exchange = _Exchange(rank, n + 1, returned)
            exchange.post()
            for task in step.backward:
                piece = rank.piece(task, keys, exchange.travels)
                aside = None if n else held
                _compute(rank, task, piece, totals, sums, targets, deterministic, aside)
            returned = totals.whole() if n else None
            keys = exchange.wait()
            for computed, at in exchange.gradients():
                own.add(computed, at)
            if n + 1 < len(rank.steps):
                totals = _Totals(rank, rank.steps[n + 1].backward, rank.steps[n + 1].keys)
        exchange = _Exchange(rank, len(rank.steps) + 1, returned)
        exchange.post()
        for task in begins.later:
            piece = rank.piece(task, rank.own, exchange.travels)
            is_last = task is begins.later[-1]
            _compute(rank, task, piece, own, sums, targets, deterministic, None, is_last)
        exchange.wait()
        if bias_is_shared and sums.dbias is not None:
            add_over_ranks(rank.comm, place, sums.dbias, rank.timeout)
        if sums.dsink is not None:
            add_over_ranks(rank.comm, place, sums.dsink, rank.timeout)
        own.store(targets.gradients[1:3], [*(held or ()), *exchange.gradients()])
        sums.store()


class _Totals:
    """dk and dv of the keys of a step, as sums over tasks."""

    def __init__(self, rank: Rank, tasks: Sequence[Task], held: Runs) -> None:
        number = rank.call.problem.accumulator
        self._memory = Memory(rank.place, rank.keys_and_values, held.count, number)
        some = [task.keys for task in tasks if task.piece.keys]
        whole = range(held.count)
        parts = parts_of([whole, *some])
        self._totals = [Total(rank.place, x, parts) for x in self._memory.arrays]

    def in_place(self, at: range) -> list[Array | None]:
        """Return where dk and dv of a task are to be computed, if it is the first one there."""
        return [total.in_place(at) for total in self._totals]

    def written(self, at: range) -> None:
        """Note that dk and dv of a task were computed in place."""
        for total in self._totals:
            total.written(at)

    def add(self, computed: Several, at: range) -> None:
        """Add dk and dv."""
        for summand, total in zip(computed, self._totals, strict=True):
            total.add(summand, at)

    def store(self, targets: Sequence[Array], more: Sequence[tuple[Several, range]]) -> None:
        """Write the sums, rounded, with dk and dv that are added last."""
        for n, (total, target) in enumerate(zip(self._totals, targets, strict=True)):
            total.store(target, [(computed[n], at) for computed, at in more])

    def whole(self) -> Memory:
        """Return the sums; those of keys that no task had are 0."""
        for total in self._totals:
            total.whole()
        return self._memory


def _compute(
    rank: Rank, task: Task, own: Call, totals: _Totals, sums: Sums, targets: Targets,
    deterministic: bool, held: list[tuple[Several, range]] | None = None, last: bool = False,
) -> None:  # fmt: skip
    """Compute the gradients of a task, and add them; or leave those of keys to `held`.

    `last` says that there is no task behind it.
    """
    rows, at, piece = task.rows, task.keys, task.piece
    if not piece.keys and own.sink is None:
        return
    in_place = totals.in_place(at) if held is None and piece.keys else [None, None]
    computed = sums.empty(own, rows, *in_place)
    statistics = [targets.rows.get(name) for name in ("lse", "dlse")]
    lse, dlse = (None if x is None else part_of_statistic(x, rows) for x in statistics)
    assert lse is not None
    do, out = (part(targets.rows[name], rows) for name in ("do", "out"))
    rank.place.backend.backward_piece(own, do, out, lse, dlse, computed, deterministic)
    sums.add(computed, piece, rows, last)
    if not piece.keys:
        return
    if held is not None:
        held.append(((computed.dk, computed.dv), at))
    elif in_place[0] is not None:
        totals.written(at)
    else:
        totals.add((computed.dk, computed.dv), at)
