"""A call of one rank: steps of pieces, between which keys, values and their gradients travel.

The messages for the next step are under way while a step is computed. Everything is summed in the
accumulator's type, in the order of the steps and, within a step, of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..masks import Mask
from ..outputs import Targets
from ..pieces.compute import Partial, Sums, Total, parts_of
from ..pieces.parts import call_of, part, part_of_bias, part_of_statistic
from ..pieces.place import Place
from ..problem.call import Array, Call, Gradients, changed
from ..scores import Score
from .all_reduce import all_reduce
from .messages import Memory, Packed, Several, joined
from .partition.exchange_schedule import NOTHING, Step
from .partition.fused_calls import Task
from .partition.intervals import Intervals
from .partition.local_lookups import Runs, local
from .sharded import Lookups
from .transport.communication import Exchanger, Transfer


@dataclass(frozen=True)
class Rank:
    """What one rank computes of a call.

    Attributes
    ----------
    call : Call
        The call. Its arrays are those of the rank; its lengths are those of all ranks.
    rows, keys : Intervals
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
    relays : bool
        Whether ranks pass on what comes from other nodes.
    copies : bool
        Whether messages between devices take SMs only where they arrive.
    taken : dict
        The elements at some positions of the arrays that masks and scores read.
    """

    call: Call
    rows: Intervals
    keys: Intervals
    steps: list[Step]
    comm: Exchanger
    place: Place
    timeout: float
    lookups: Lookups | None = None
    relays: bool = False
    copies: bool = False
    taken: dict[Any, Array] = field(default_factory=dict)

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
        return self.steps[number] if 0 <= number < len(self.steps) else NOTHING

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
        made = call_of(call, piece, q, k, v, bias, task.plain, beside and not self.copies)
        if self.lookups is not None:
            made = self.lookups.of_piece(made, task, keys[2:])
        return self._local(made, task) if task.plain else made

    def _local(self, piece: Call, task: Task) -> Call:
        """Return the call of a plain task, whose mask and score read the elements of its rows."""

        def take(array: Array, runs: Runs) -> Array:
            key = id(array), runs
            if key not in self.taken:
                self.taken[key] = self.place.taken(array, runs)
            return self.taken[key]

        how = self.call.problem, task.positions, take
        made: dict[str, Any] = {}
        if piece.mask is not None:
            made["mask"] = Mask(local(piece.mask.expr, *how))
        if piece.score_mod is not None and not piece.score_mod.learned_tables:
            made["score_mod"] = Score(local(piece.score_mod.expr, *how))
        return changed(piece, **made)


class _Relay:
    """What a rank has got from other nodes, or of its own node, to pass on.

    Attributes
    ----------
    keys : dict of int to Memory
        The keys and values of a step, from another node.
    sums : dict of int to Memory
        The sums over the node of the gradients of those of a step.
    """

    def __init__(self) -> None:
        self.keys: dict[int, Memory] = {}
        self.sums: dict[int, Memory] = {}


class _Exchange:
    """The keys and values of a step, and in the backward gradients.

    These are those of the step two before it. `gradients` are dk and dv of its keys, which return
    to their owners. If keys are relayed, those of the next step come from other nodes, and the
    gradients of the step before these two return there as sums over the node.

    Where a place computes later than it is asked to, messages are packed and sent beside what it
    computes next, even if that is asked for before `post`. What is computed `ahead` of that takes
    the whole device, so that messages are packed before.
    """

    def __init__(
        self, rank: Rank, number: int, relay: _Relay, backward: bool = False,
        gradients: Memory | None = None, ahead: bool = False,
    ) -> None:  # fmt: skip
        self._rank, self._number, self._relay = rank, number, relay
        place = rank.place
        self._what = f"round {min(number, len(rank.steps) - 1)} of {len(rank.steps) - 1}"
        step, far = rank.step(number), rank.step(number + 1)
        before, earlier = (rank.step(number - n) if backward else NOTHING for n in (2, 3))
        self._step, self._before, self._of_step_before = step, before, gradients
        self._sends: list[tuple[int, Packed]] = []
        self._send(step.sends, *self._source(number))
        self._send(far.sends_far, rank.own, rank.keys)
        self._keys = self._room(step.receives, rank.own)
        self._far_keys = self._room(far.receives_far, rank.own)
        if gradients is not None:
            self._send(before.receives, gradients.arrays, before.keys)
        for peer, came in earlier.receives_far.items():
            self._send({peer: came}, relay.sums.pop(number - 3).arrays, came)
        number_type = rank.call.problem.accumulator
        self._gradients, self._far_gradients = (
            self._room(senders, rank.keys_and_values, number_type)
            for senders in (before.sends, earlier.sends_far)
        )
        self._is_needed = len(rank.steps) > 1  # by any rank: all have as many steps
        comes = self._keys, self._far_keys, self._gradients, self._far_gradients
        self._comes = [x for each in comes for x in each]
        self.travels = bool(self._sends or self._comes)
        self._is_packed = ahead
        if ahead:
            self._pack()
        self._mark = place.mark() if self.travels else None  # all its memory is there
        self._transfer: Transfer | None = None

    def _source(self, number: int) -> tuple[Several, Intervals]:
        """Return the arrays with the keys that are sent for a step, and their positions."""
        self._came: tuple[Intervals, Memory] | None = None
        for came in self._step.receives_far.values():
            self._came = came, self._relay.keys.pop(number)
            return self._came[1].arrays, came
        return self._rank.own, self._rank.keys

    def _send(self, wanted: Mapping[int, Intervals], arrays: Several, held: Intervals) -> None:
        place, copies = self._rank.place, self._rank.copies
        self._sends += [
            (x, Packed(place, arrays, held, runs, copies)) for x, runs in wanted.items()
        ]

    def _room(
        self, wanted: Mapping[int, Intervals], like: Several, dtype: np.dtype[Any] | None = None
    ) -> list[tuple[int, Intervals, Memory]]:
        place = self._rank.place
        return [(x, runs, Memory(place, like, runs.count, dtype)) for x, runs in wanted.items()]

    def _pack(self) -> None:
        for _, packed in self._sends:
            packed.pack()

    def post(self) -> None:
        """Post the messages, packed."""
        if not self._is_needed:
            return
        mark, self._mark = self._mark, None
        with nullcontext() if mark is None else self._rank.place.beside(mark):
            if not self._is_packed:
                self._pack()
            receives = [(x, content) for x, _, room in self._comes for content in room.contents]
            sends = [(x, content) for x, packed in self._sends for content in packed.contents]
            self._transfer = self._rank.comm.exchange(sends, receives)

    def wait(self) -> Several:
        """Return the keys and values of the step."""
        rank, relay = self._rank, self._relay
        if not self._is_needed:
            return rank.own
        assert self._transfer is not None
        self._transfer.wait(rank.timeout, self._what)
        self._transfer = None
        self._sends.clear()  # what was sent may be let go, and what was packed
        for _, _, memory in self._far_keys:
            relay.keys[self._number + 1] = memory
        for came in self._before.receives_far.values():
            relay.sums[self._number - 2] = self._sums(came)
        parts = [(wanted, wanted, memory) for _, wanted, memory in self._keys]
        if self._came is not None and self._step.relayed:
            parts.append((self._step.relayed, *self._came))
        self._came = None
        if not parts:
            return rank.own  # no task has keys
        return joined(rank.place, rank.own, parts, self._step.keys)

    def _sums(self, came: Intervals) -> Memory:
        """Return the sums over the node of dk and dv of some keys, added in the order of ranks."""
        rank, before = self._rank, self._before
        place, number_type = rank.place, rank.call.problem.accumulator
        made = Memory(place, rank.keys_and_values, came.count, number_type)
        for x in made.arrays:
            place.clear(x)
        summands = {x: (runs, runs, memory) for x, runs, memory in self._gradients}
        if before.relayed:
            assert self._of_step_before is not None
            summands[rank.comm.rank] = before.relayed, before.keys, self._of_step_before
        for peer in sorted(summands):
            wanted, held, memory = summands[peer]
            for run in wanted:
                for source, total in zip(memory.arrays, made.arrays, strict=True):
                    place.add(part(source, held.rows(run)), part(total, came.rows(run)))
        return made

    def gradients(self) -> Iterator[tuple[Several, range]]:
        """Yield dk and dv that were waited for, and the rows of own keys that have them."""
        direct = [] if self._before.receives_far else self._gradients
        for _, wanted, memory in (*direct, *self._far_gradients):
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

    keys, relay = rank.own, _Relay()
    with rank.place:
        for number, step in enumerate(rank.steps):
            exchange = _Exchange(rank, number + 1, relay, ahead=step.ahead > 0)
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
    alone = _only_task(rank, targets)
    if alone is not None:  # nothing is summed, nor rounded later
        with place:
            _launch(rank, alone, rank.piece(alone, rank.own, False), targets, targets.gradients,
                    deterministic)  # fmt: skip
        return
    rows = [x.rows for step in rank.steps for x in (*step.backward, *step.later, *step.forward)]
    sums = Sums(call, place, targets.gradients, parts_of(rows))
    begins = rank.steps[0]
    keys, totals = rank.own, _Totals(rank, [*begins.backward, *begins.later], rank.keys)
    own = totals
    # Several gradients of the same keys: the second one has more of them, and is written in place.
    held: list[tuple[Several, range]] | None = [] if begins.later and len(rank.steps) == 2 else None
    returned: Memory | None = None
    relay = _Relay()
    with place:
        for n, step in enumerate(rank.steps):
            ahead = rank.copies and n == 0  # else the device has something to do already
            exchange = _Exchange(rank, n + 1, relay, True, returned, ahead)
            if not ahead:
                exchange.post()
            for task in step.backward:
                piece = rank.piece(task, keys, exchange.travels)
                aside = None if n else held
                _compute(rank, task, piece, totals, sums, targets, deterministic, aside)
            if ahead:
                exchange.post()
            returned = totals.whole() if n else None
            keys = exchange.wait()
            for computed, at in exchange.gradients():
                own.add(computed, at)
            if n + 1 < len(rank.steps):
                totals = _Totals(rank, rank.steps[n + 1].backward, rank.steps[n + 1].keys)
        exchange = _Exchange(rank, len(rank.steps) + 1, relay, True, returned)
        exchange.post()
        for task in begins.later:
            piece = rank.piece(task, rank.own, exchange.travels)
            is_last = task is begins.later[-1]
            _compute(rank, task, piece, own, sums, targets, deterministic, None, is_last)
        exchange.wait()
        returned_last = list(exchange.gradients())
        if rank.relays:
            exchange = _Exchange(rank, len(rank.steps) + 2, relay, True)
            exchange.post()
            exchange.wait()
            returned_last += exchange.gradients()
        if bias_is_shared and sums.dbias is not None:
            all_reduce(rank.comm, place, sums.dbias, rank.timeout)
        if sums.dsink is not None:
            all_reduce(rank.comm, place, sums.dsink, rank.timeout)
        own.store(targets.gradients[1:3], [*(held or ()), *returned_last])
        sums.store()


def _only_task(rank: Rank, targets: Targets) -> Task | None:
    """Return the task that has all rows and keys of a rank, if nothing is added to its gradients.

    Gradients of a bias and of a sink are sums over ranks.
    """
    call = rank.call
    if len(rank.steps) > 1 or call.sink is not None or targets.gradients.dbias is not None:
        return None
    tasks = rank.steps[0].backward
    whole = range(rank.rows.count), range(rank.keys.count)
    made = [x for x in targets.gradients[:3] if rank.place.has(x) and x.flags.c_contiguous]
    return tasks[0] if [(x.rows, x.keys) for x in tasks] == [whole] and len(made) == 3 else None


class _Totals:
    """dk and dv of the keys of a step, as sums over tasks."""

    def __init__(self, rank: Rank, tasks: Sequence[Task], held: Intervals) -> None:
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
    _launch(rank, task, own, targets, computed, deterministic)
    sums.add(computed, piece, rows, last)
    if not piece.keys:
        return
    if held is not None:
        held.append(((computed.dk, computed.dv), at))
    elif in_place[0] is not None:
        totals.written(at)
    else:
        totals.add((computed.dk, computed.dv), at)


def _launch(
    rank: Rank, task: Task, own: Call, targets: Targets, gradients: Gradients, deterministic: bool
) -> None:
    """Compute the gradients of a task."""
    rows = task.rows
    statistics = [targets.rows.get(name) for name in ("lse", "dlse")]
    lse, dlse = (None if x is None else part_of_statistic(x, rows) for x in statistics)
    assert lse is not None
    do, out = (part(targets.rows[name], rows) for name in ("do", "out"))
    rank.place.backend.backward_piece(own, do, out, lse, dlse, gradients, deterministic)
