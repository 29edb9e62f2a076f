"""A call in which every rank computes some heads: rows travel there, and results back.

Each rank has some positions of all heads. It sends to each rank the heads that this one computes,
and gets all positions of its own. So every head is computed in one call, as on one rank.

On a GPU, heads are computed in turns, if those of a turn fill it: rows of the next heads arrive
meanwhile, and results of the ones before return. The first and the last turn are short, because
nothing is computed while their rows arrive and their results return; those between have more heads,
as many as may arrive in the time of the turn before.

With many ranks, those of a group divide the heads among them, and each gets the positions that the
group has. Then keys and values travel in rounds between the ranks of one share in all groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..outputs import Targets
from ..pieces.parts import problem_of_heads
from ..problem.call import Array, Call, Gradients
from . import compute
from .all_reduce import all_reduce
from .compute import Rank
from .messages import together
from .partition.head_batches import head_batches, sees_a_range, shares
from .partition.intervals import Intervals
from .partition.layouts import Layout
from .row_exchange import RowExchange, Rows
from .transport.communication import Some

Spec = tuple[tuple[int, ...], np.dtype[Any]]


class _Item(NamedTuple):
    """Arrays (..., heads, positions, columns) of all ranks, some positions of which each has.

    Attributes
    ----------
    array : array
        This rank's part.
    layout : Layout
        Who has which positions.
    grouped : int
        Heads of the array for each key-value head; 0 if all heads share the array.
    """

    array: Array
    layout: Layout
    grouped: int

    def heads(self, kv: range) -> slice:
        """Return the heads that belong to some key-value heads; all if they share the array."""
        if not self.grouped:
            return slice(None)
        return slice(kv.start * self.grouped, kv.stop * self.grouped)

    def spec(self, kv: range, rows: int) -> Spec:
        """Return the shape and the dtype of a part."""
        shape = self.array.shape
        heads = len(kv) * self.grouped if self.grouped else shape[-3]
        return (*shape[:-3], heads, rows, shape[-1]), self.array.dtype


def on_device(call: Call) -> bool:
    """Return whether a call's arrays are in the memory of a device."""
    return call.device is not None


class _Target(NamedTuple):
    """Where results arrive.

    Attributes
    ----------
    item : _Item
        Where they belong.
    parts : list of array
        For each rank of the group, this rank's positions of the heads that the former computes.
    """

    item: _Item
    parts: list[Array]


class Heads:
    """The call of some heads, and the exchanges before and after it.

    Parameters
    ----------
    rank : Rank
        What this rank has. Its steps are those of its group; there are none if all ranks are one.
    layouts : tuple of 2 Layout
        Those of queries and of keys.
    group : int
        How many ranks in a row divide the heads.
    bias_is_shared : bool
        Whether the bias is one for the rows of all ranks.
    """

    def __init__(
        self, rank: Rank, layouts: tuple[Layout, Layout], group: int, bias_is_shared: bool
    ) -> None:
        self._rank, self._place = rank, rank.place
        self._layout, self._layout_k = layouts
        first = rank.comm.rank // group * group
        self._group = Some(rank.comm, range(first, first + group))
        self._same = Some(rank.comm, range(rank.comm.rank - first, rank.comm.size, group))
        problem = rank.call.problem
        self._shares = shares(problem.heads_kv, group)
        self._own = self._shares[self._group.rank]
        self._heads_of_kv = problem.heads // problem.heads_kv
        self._bias_is_shared = bias_is_shared
        bias = rank.call.bias
        self._bias_travels = bias is not None and not bias_is_shared
        several = self._same.size == 1 and on_device(rank.call)
        self._turns = head_batches(rank.call, self._shares) if several else [self._shares]
        # Copies from peers take SMs in the end, if briefly: they wait for a work tile, not for all.
        # Of a mask that is a range, tiles that blocks prepare ahead are worth more.
        self._beside = len(self._turns) > 1 and not (rank.copies and sees_a_range(rank.call))

    def _rows(self, array: Array, grouped: int | None = None) -> _Item:
        return _Item(array, self._layout, self._heads_of_kv if grouped is None else grouped)

    def _inputs(self) -> dict[str, _Item]:
        call = self._rank.call
        items = {
            "q": self._rows(call.q),
            "k": _Item(call.k, self._layout_k, 1),
            "v": _Item(call.v, self._layout_k, 1),
        }
        if self._bias_travels:
            assert call.bias is not None
            items["bias"] = self._of_bias(call.bias)
        return items

    def _of_bias(self, bias: Array) -> _Item:
        """Return a bias, or its gradient, with an axis of heads."""
        array = bias[None] if bias.ndim < 3 else bias
        return self._rows(array, self._heads_of_kv if array.shape[-3] > 1 else 0)

    def _call(self, got: Mapping[str, Array], kv: range) -> Call:
        """Return the call of some key-value heads of this rank, with all positions."""
        call, heads = self._rank.call, self._heads(kv)
        problem = call.problem
        if len(kv) < problem.heads_kv:
            problem = problem_of_heads(problem, kv)
        bias = got.get("bias", call.bias)
        if bias is not None and not self._bias_travels and bias.ndim > 2 and bias.shape[-3] > 1:
            bias = bias[..., heads, :, :]
        sink = None if call.sink is None else call.sink[heads]
        q, k, v = (got[name] for name in "qkv")
        return replace(
            call, problem=problem, q=q, k=k, v=v, bias=bias, sink=sink, beside=self._beside
        )

    def _heads(self, kv: range) -> slice:
        """Return the query heads of some key-value heads."""
        return slice(kv.start * self._heads_of_kv, kv.stop * self._heads_of_kv)

    def _own_part(self, item: _Item, array: Array, kv: range) -> Array:
        """Return some key-value heads of an array that has those that this rank computes."""
        start = self._own.start
        made: Array = array[..., item.heads(range(kv.start - start, kv.stop - start)), :, :]
        return made

    def _of(self, item: _Item, peer: int) -> Intervals:
        """Return the positions that a rank of the group has."""
        return item.layout.runs[self._group.ranks[peer]]

    def _held(self, item: _Item) -> Intervals:
        """Return the positions that the group has."""
        return item.layout.of_groups(self._group.size).own

    def _of_group(self, call: Call) -> Rank:
        """Return what this rank computes with those of its share in the other groups."""
        rows, keys = (
            each.of_groups(self._group.size).own for each in (self._layout, self._layout_k)
        )
        return replace(self._rank, call=call, rows=rows, keys=keys, comm=self._same)

    def _others(self) -> list[int]:
        return [peer for peer in range(self._group.size) if peer != self._group.rank]

    def _travel(self, sends: dict[int, list[Rows]], receives: dict[int, list[Rows]]) -> RowExchange:
        rank = self._rank
        how = on_device(rank.call), rank.copies
        return RowExchange(self._place, self._group, *how, sends, receives)

    def _room(self, items: Mapping[str, _Item]) -> dict[str, Array]:
        """Return memory for the positions that the group has of this rank's heads."""
        specs = [item.spec(self._own, self._held(item).count) for item in items.values()]
        return dict(zip(items, together(self._place, specs), strict=True))

    def _arriving(
        self, items: Mapping[str, _Item], got: Mapping[str, Array], turn: list[range]
    ) -> RowExchange:
        """Return the rows that travel to the ranks of their heads in a turn."""
        sends: dict[int, list[Rows]] = {}
        receives: dict[int, list[Rows]] = {}
        for peer in self._others():
            sends[peer], receives[peer] = [], []
            for name, item in items.items():
                own = item.layout.own
                theirs = item.array[..., item.heads(turn[peer]), :, :]
                sends[peer].append(Rows(theirs, own, own))
                ours = self._own_part(item, got[name], turn[self._group.rank])
                receives[peer].append(Rows(ours, self._held(item), self._of(item, peer)))
        return self._travel(sends, receives)

    def _keep(self, items: Mapping[str, _Item], got: Mapping[str, Array]) -> None:
        """Write the rows that this rank itself has of its heads to where all are."""
        pairs = []
        for name, item in items.items():
            own = item.array[..., item.heads(self._own), :, :]
            rows = Rows(got[name], self._held(item), item.layout.own)
            pairs += [(source, target) for target, source in rows.beside(own)]
        self._place.store_all(pairs)

    def _leaving(
        self, items: Mapping[str, _Target], computed: Mapping[str, Array], turn: list[range]
    ) -> RowExchange:
        """Return the results that travel from the ranks of their heads in a turn."""
        sends: dict[int, list[Rows]] = {}
        receives: dict[int, list[Rows]] = {}
        for peer in self._others():
            sends[peer], receives[peer] = [], []
            for name, (item, parts) in items.items():
                ours = self._own_part(item, computed[name], turn[self._group.rank])
                sends[peer].append(Rows(ours, self._held(item), self._of(item, peer)))
                start = self._shares[peer].start
                kv = range(turn[peer].start - start, turn[peer].stop - start)
                theirs = parts[peer][..., item.heads(kv), :, :]
                receives[peer].append(Rows(theirs, item.layout.own, item.layout.own))
        return self._travel(sends, receives)

    def _target(self, item: _Item, computed: Array) -> _Target:
        """Return where results arrive: where they belong, if they need not be summed or rounded."""
        if item.grouped and item.array.dtype == computed.dtype:
            parts = [item.array[..., item.heads(kv), :, :] for kv in self._shares]
        else:
            parts = [
                self._place.empty(item.spec(kv, item.layout.count)[0], computed.dtype)
                for kv in self._shares
            ]
        return _Target(item, parts)

    def _finish(self, items: Mapping[str, _Target]) -> None:
        """Write results that arrived elsewhere to where they belong."""
        place = self._place
        for item, parts in items.values():
            if not item.grouped:
                total = parts[0]  # of one array for all heads, in the order of ranks
                for each in parts[1:]:
                    place.add(each, total)
                place.store(total, item.array)
            elif item.array.dtype != parts[0].dtype:
                for kv, each in zip(self._shares, parts, strict=True):
                    place.store(each, item.array[..., item.heads(kv), :, :])

    def _in_turns(
        self,
        items: Mapping[str, _Item],
        got: Mapping[str, Array],
        targets: Mapping[str, _Item],
        computed: Mapping[str, Array],
        compute_heads: Callable[[range], None],
    ) -> None:
        """Compute the heads of one turn after the other, while rows and results travel.

        Two streams take turns, so that the next turn fills what the last blocks of one leave idle.
        """
        place, timeout, own = self._place, self._rank.timeout, self._group.rank
        arriving = [self._arriving(items, got, turn) for turn in self._turns]
        arriving[0].post()
        several = len(self._turns) > 1
        begin = place.mark() if several else None
        self._keep(items, got)
        back = {name: self._target(item, computed[name]) for name, item in targets.items()}
        leaving = [self._leaving(back, computed, turn) for turn in self._turns]
        marks = {n: place.mark() for n in range(1, len(self._turns), 2)}  # all memory is there
        try:
            for n, turn in enumerate(self._turns):
                with place.beside(marks[n], computes=True) if n in marks else nullcontext():
                    arriving[n].wait(timeout, "rows to the ranks of their heads")
                    compute_heads(turn[own])
                    if not n and several:  # the device is busy meanwhile
                        with place.beside(begin):
                            for each in arriving[1:]:
                                each.post()
                    leaving[n].post()
                if n not in marks:
                    arriving[n].let_go()
        except BaseException:
            place.join()  # memory that the other stream uses is let go
            raise
        for came, each in zip(arriving, leaving, strict=True):
            each.wait(timeout, "results from the ranks of their heads")
            came.let_go()
            each.let_go()
        pairs = []
        for name, (item, parts) in back.items():
            rows = Rows(computed[name], self._held(item), item.layout.own)
            pairs += rows.beside(parts[own])
        place.store_all(pairs)
        self._finish(back)

    def forward(self, out: Array, lse: Array) -> None:
        """Write out and lse of the rank's queries."""
        place, problem = self._place, self._rank.call.problem
        items = self._inputs()
        with place:
            got = self._room(items)
            shape = *out.shape[:-3], *got["q"].shape[-3:-1], problem.d_v
            specs = (shape, problem.dtype), (shape[:-1], problem.accumulator)
            made, statistics = together(place, specs)

            def compute_heads(kv: range) -> None:
                call = self._call(self._parts(items, got, kv), kv)
                parts = self._parts(targets, computed, kv)
                results = parts["out"], parts["lse"][..., 0]
                if self._same.size == 1:
                    place.backend.forward_piece(call, results, True)
                else:
                    compute.forward(self._of_group(call), *results)

            targets = {"lse": self._rows(lse[..., None]), "out": self._rows(out)}
            computed = {"lse": statistics[..., None], "out": made}
            self._in_turns(items, got, targets, computed, compute_heads)

    def _parts(
        self, items: Mapping[str, _Item], arrays: Mapping[str, Array], kv: range
    ) -> dict[str, Array]:
        """Return some key-value heads of arrays that have those that this rank computes."""
        return {name: self._own_part(item, arrays[name], kv) for name, item in items.items()}

    def backward(self, targets: Targets, deterministic: bool) -> None:
        """Write the gradients of what the rank holds."""
        place, number = self._place, self._rank.call.problem.accumulator
        inputs, theirs = self._inputs(), targets.gradients
        rows = {
            name: self._rows(array if name in ("do", "out") else array[..., None])
            for name, array in targets.rows.items()
        }
        back = {
            name: item._replace(array=target)
            for (name, item), target in zip(inputs.items(), theirs[:3], strict=False)
        }
        with place:
            got = self._room(inputs | rows)
            whole_call = self._call(got, self._own)
            bias = None if theirs.dbias is None else whole_call.bias
            owners = whole_call.q, whole_call.k, whole_call.v, bias, whole_call.sink
            specs = [
                (x.shape, x.dtype if n < 3 else number)
                for n, x in enumerate(owners)
                if x is not None
            ]
            arrays = iter(together(place, specs))
            own: Gradients = Gradients(*(None if x is None else next(arrays) for x in owners))
            computed = {"q": own.dq, "k": own.dk, "v": own.dv}
            if self._bias_travels and own.dbias is not None:
                back["bias"] = self._of_bias(theirs.dbias)
                computed["bias"] = self._of_bias(own.dbias).array

            def compute_heads(kv: range) -> None:
                call = self._call(self._parts(inputs, got, kv), kv)
                made = self._parts(rows, got, kv)
                parts = self._parts(back, computed, kv)
                gradients = Gradients(parts["q"], parts["k"], parts["v"], own.dbias, own.dsink)
                made |= {name: made[name][..., 0] for name in ("lse", "dlse") if name in made}
                self._backward(call, made, gradients, deterministic)

            self._in_turns(inputs | rows, got, back, computed, compute_heads)
            if own.dbias is not None and not self._bias_travels:
                self._add(own.dbias, theirs.dbias, axis=-3)
            if own.dsink is not None:
                self._add(own.dsink, theirs.dsink, axis=-1)

    def _backward(
        self, call: Call, rows: dict[str, Array], gradients: Gradients, deterministic: bool
    ) -> None:
        """Compute the gradients of a call with the group's positions."""
        if self._same.size == 1:
            do, out, lse, dlse = (rows.get(name) for name in ("do", "out", "lse", "dlse"))
            assert do is not None
            assert out is not None
            assert lse is not None
            backend = self._place.backend
            backend.backward_piece(call, do, out, lse, dlse, gradients, deterministic)
            return
        made = Targets(rows, gradients, gradients)
        compute.backward(self._of_group(call), made, deterministic, self._bias_is_shared)

    def _add(self, computed: Array, target: Array, axis: int) -> None:
        """Write the sum over the group of what each of its ranks has for its heads."""
        place = self._place
        total = place.empty(target.shape, computed.dtype)
        place.clear(total)
        mine = total
        if target.ndim >= -axis and target.shape[axis] > 1:
            index: tuple[Any, ...] = (..., self._heads(self._own), *(slice(None),) * (-axis - 1))
            mine = total[index]
        place.store(computed, mine)
        all_reduce(self._group, place, total, self._rank.timeout)
        place.store(total, target)
