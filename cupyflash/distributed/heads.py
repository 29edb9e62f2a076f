"""A call in which every rank computes some heads: rows travel there, and results back.

Each rank has some positions of all heads. It sends to each rank the heads that this one computes,
and gets all positions of its own. So every head is computed in one call, as on one rank.

With many ranks, those of a group divide the heads among them, and each gets the positions that the
group has. Then keys and values travel in rounds between the ranks of one share in all groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..pieces.parts import part
from ..pieces.place import Place
from ..pieces.steps import Targets
from ..problem.call import Array, Call, Gradients
from ..problem.positions import whole
from . import compute
from .communication import Some
from .compute import Rank
from .layouts import Layout
from .messages import viewed
from .runs import Runs
from .sums import add_over_ranks

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
        """Return the heads that belong to some key-value heads."""
        if not self.grouped:
            return slice(None)
        return slice(kv.start * self.grouped, kv.stop * self.grouped)

    def spec(self, kv: range, rows: int) -> Spec:
        """Return the shape and the dtype of a part."""
        shape = self.array.shape
        heads = len(kv) * self.grouped if self.grouped else shape[-3]
        return (*shape[:-3], heads, rows, shape[-1]), self.array.dtype


def shares(heads_kv: int, size: int) -> list[range]:
    """Return the key-value heads that each rank computes."""
    ends = [heads_kv * rank // size for rank in range(size + 1)]
    return list(itertools.starmap(range, itertools.pairwise(ends)))


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

    @property
    def _heads(self) -> slice:
        """The query heads that this rank computes."""
        return slice(self._own.start * self._heads_of_kv, self._own.stop * self._heads_of_kv)

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

    def _call(self, got: Mapping[str, Array]) -> Call:
        """Return the call of this rank's heads, with all positions."""
        call, heads = self._rank.call, self._heads
        problem = call.problem
        if len(self._own) < problem.heads_kv:
            problem = replace(
                problem,
                heads=heads.stop - heads.start,
                heads_kv=len(self._own),
                origin_h=problem.origin_h + heads.start,
                whole=whole(problem),
            )
        bias = got.get("bias", call.bias)
        if bias is not None and not self._bias_travels and bias.ndim > 2 and bias.shape[-3] > 1:
            bias = bias[..., heads, :, :]
        sink = None if call.sink is None else call.sink[heads]
        return replace(
            call, problem=problem, q=got["q"], k=got["k"], v=got["v"], bias=bias, sink=sink
        )

    def _of(self, item: _Item, peer: int) -> Runs:
        """Return the positions that a rank of the group has."""
        return item.layout.runs[self._group.ranks[peer]]

    def _held(self, item: _Item) -> Runs:
        """Return the positions that the group has."""
        return item.layout.of_groups(self._group.size).own

    def _of_group(self, call: Call) -> Rank:
        """Return what this rank computes with those of its share in the other groups."""
        rows, keys = (
            each.of_groups(self._group.size).own for each in (self._layout, self._layout_k)
        )
        return replace(self._rank, call=call, rows=rows, keys=keys, comm=self._same)

    def _exchange(
        self, sends: Mapping[int, _Parcel], specs: Mapping[int, Mapping[str, Spec]], what: str
    ) -> dict[int, dict[str, Array]]:
        """Send a parcel to each other rank of the group, and return what each of them sent."""
        came = {peer: _Parcel(self._place, each) for peer, each in specs.items()}
        self._group.exchange(
            [(peer, parcel.content) for peer, parcel in sends.items()],
            [(peer, parcel.content) for peer, parcel in came.items()],
        ).wait(self._rank.timeout, what)
        return {peer: parcel.arrays for peer, parcel in came.items()}

    def _others(self) -> list[int]:
        return [peer for peer in range(self._group.size) if peer != self._group.rank]

    def _gather(self, items: Mapping[str, _Item]) -> dict[str, Array]:
        """Return the positions that the group has of this rank's heads."""
        place, sends, specs = self._place, {}, {}
        for peer in self._others():
            theirs = self._shares[peer]
            sends[peer] = _Parcel(
                place, {name: item.spec(theirs, item.layout.count) for name, item in items.items()}
            )
            for name, item in items.items():
                own = item.array[..., item.heads(theirs), :, :]
                place.store(own, sends[peer].arrays[name])
            specs[peer] = {
                name: item.spec(self._own, self._of(item, peer).count)
                for name, item in items.items()
            }
        parts = self._exchange(sends, specs, "rows to the ranks of their heads")
        parts[self._group.rank] = {
            name: item.array[..., item.heads(self._own), :, :] for name, item in items.items()
        }
        made = {}
        for name, item in items.items():
            held = self._held(item)
            made[name] = place.empty(*item.spec(self._own, held.count))
            for peer in range(self._group.size):
                runs = self._of(item, peer)
                for run in runs:
                    source = part(parts[peer][name], runs.rows(run))
                    place.store(source, part(made[name], held.rows(run)))
        return made

    def _return(self, items: Mapping[str, _Item], computed: Mapping[str, Array]) -> None:
        """Write this rank's positions of all heads, from the ranks that computed them.

        `items` has the targets, and `computed` the group's positions of this rank's heads.
        """
        place = self._place

        def parcel(peer: int) -> _Parcel:
            made = _Parcel(place, {
                name: (item.spec(self._own, self._of(item, peer).count)[0], computed[name].dtype)
                for name, item in items.items()
            })  # fmt: skip
            for name, item in items.items():
                runs, held = self._of(item, peer), self._held(item)
                for run in runs:
                    source = part(computed[name], held.rows(run))
                    place.store(source, part(made.arrays[name], runs.rows(run)))
            return made

        specs = {
            peer: {
                name: (item.spec(self._shares[peer], item.layout.count)[0], computed[name].dtype)
                for name, item in items.items()
            }
            for peer in self._others()
        }
        sends = {peer: parcel(peer) for peer in self._others()}
        parts = self._exchange(sends, specs, "results from the ranks of their heads")
        del sends
        parts[self._group.rank] = parcel(self._group.rank).arrays
        for name, item in items.items():
            if item.grouped:
                for peer, of_peer in parts.items():
                    heads = item.heads(self._shares[peer])
                    place.store(of_peer[name], item.array[..., heads, :, :])
                continue
            total = parts[0][name]  # of one array for all heads, in the order of ranks
            for peer in range(1, self._group.size):
                place.add(parts[peer][name], total)
            place.store(total, item.array)

    def forward(self, out: Array, lse: Array) -> None:
        """Write out and lse of the rank's queries."""
        place, problem = self._place, self._rank.call.problem
        with place:
            call = self._call(self._gather(self._inputs()))
            shape = *call.q.shape[-3:-1], problem.d_v
            if not problem.packed:
                shape = *problem.lead, *shape
            made = place.empty(shape, problem.dtype)
            statistics = place.empty(shape[:-1], problem.accumulator)
            if self._same.size == 1:
                place.backend.forward_piece(call, (made, statistics), True)
            else:
                compute.forward(self._of_group(call), made, statistics)
            del call
            items = {"lse": self._rows(lse[..., None]), "out": self._rows(out)}
            self._return(items, {"lse": statistics[..., None], "out": made})

    def backward(self, targets: Targets, deterministic: bool) -> None:
        """Write the gradients of what the rank holds."""
        place, number = self._place, self._rank.call.problem.accumulator
        items = self._inputs()
        for name, array in targets.rows.items():
            items[name] = self._rows(array if name in ("do", "out") else array[..., None])
        with place:
            got = self._gather(items)
            call = self._call(got)
            gradients = Gradients(*(
                None if x is None else place.empty(x.shape, x.dtype if n < 3 else number)
                for n, x in enumerate((call.q, call.k, call.v, call.bias, call.sink))
            ))  # fmt: skip
            lse, dlse = (got[name][..., 0] if name in got else None for name in ("lse", "dlse"))
            assert lse is not None
            if self._same.size == 1:
                place.backend.backward_piece(
                    call, got["do"], got["out"], lse, dlse, gradients, deterministic
                )
            else:
                rows = {"do": got["do"], "out": got["out"], "lse": lse}
                made = Targets(
                    rows if dlse is None else rows | {"dlse": dlse}, gradients, gradients
                )
                own = self._of_group(call)
                compute.backward(own, made, deterministic, self._bias_is_shared)
            del call, got
            theirs, owners = targets.gradients, self._inputs()
            back = {
                name: item._replace(array=target)
                for (name, item), target in zip(owners.items(), theirs[:3], strict=False)
            }
            computed = {"q": gradients.dq, "k": gradients.dk, "v": gradients.dv}
            if self._bias_travels:
                back["bias"] = self._of_bias(theirs.dbias)
                computed["bias"] = self._of_bias(gradients.dbias).array
            self._return(back, computed)
            if gradients.dbias is not None and not self._bias_travels:
                self._add(gradients.dbias, theirs.dbias, axis=-3)
            if gradients.dsink is not None:
                self._add(gradients.dsink, theirs.dsink, axis=-1)

    def _add(self, computed: Array, target: Array, axis: int) -> None:
        """Write the sum over the group of what each of its ranks has for its heads."""
        place = self._place
        total = place.empty(target.shape, computed.dtype)
        place.clear(total)
        mine = total
        if target.ndim >= -axis and target.shape[axis] > 1:
            index: tuple[Any, ...] = (..., self._heads, *(slice(None),) * (-axis - 1))
            mine = total[index]
        place.store(computed, mine)
        add_over_ranks(self._group, place, total, self._rank.timeout)
        place.store(total, target)


class _Parcel:
    """Memory for one message.

    Attributes
    ----------
    content : array of uint8
        The message.
    arrays : dict of str to array
        The same bytes as arrays; those with large elements come first.
    """

    def __init__(self, place: Place, specs: Mapping[str, Spec]) -> None:
        names = sorted(specs, key=lambda name: -specs[name][1].itemsize)
        sizes = [math.prod(specs[name][0]) * specs[name][1].itemsize for name in names]
        self.content = place.empty((sum(sizes),), np.dtype(np.uint8))
        self.arrays: dict[str, Array] = {}
        begin = 0
        for name, size in zip(names, sizes, strict=True):
            self.arrays[name] = viewed(self.content, begin, *specs[name])
            begin += size
