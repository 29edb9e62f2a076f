"""A call in which every rank computes some heads: rows travel there, and results back.

Each rank has some positions of all heads. It sends to each rank the heads that this one computes,
and gets all positions of its own. So every head is computed in one call, as on one rank.
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
from .compute import Rank
from .layouts import Layout
from .messages import viewed
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
        What this rank has.
    layouts : tuple of 2 Layout
        Those of queries and of keys.
    bias_is_shared : bool
        Whether the bias is one for the rows of all ranks.
    """

    def __init__(self, rank: Rank, layouts: tuple[Layout, Layout], bias_is_shared: bool) -> None:
        self._rank, self._place = rank, rank.place
        self._layout, self._layout_k = layouts
        problem = rank.call.problem
        self._shares = shares(problem.heads_kv, rank.comm.size)
        self._own = self._shares[rank.comm.rank]
        self._group = problem.heads // problem.heads_kv
        bias = rank.call.bias
        self._bias_travels = bias is not None and not bias_is_shared

    @property
    def _heads(self) -> slice:
        """The query heads that this rank computes."""
        return slice(self._own.start * self._group, self._own.stop * self._group)

    def _rows(self, array: Array, grouped: int | None = None) -> _Item:
        return _Item(array, self._layout, self._group if grouped is None else grouped)

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
        return self._rows(array, self._group if array.shape[-3] > 1 else 0)

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

    def _gather(self, items: Mapping[str, _Item]) -> dict[str, Array]:
        """Return all positions of this rank's heads, from all ranks."""
        rank, place, comm = self._rank, self._place, self._rank.comm
        others = [peer for peer in range(comm.size) if peer != comm.rank]
        sends = []
        for peer in others:
            specs = {
                name: item.spec(self._shares[peer], item.layout.count)
                for name, item in items.items()
            }
            content, parts = _parcel(place, specs)
            for name, item in items.items():
                place.store(item.array[..., item.heads(self._shares[peer]), :, :], parts[name])
            sends.append((peer, content))
        came = {}
        for peer in others:
            came[peer] = _parcel(place, {
                name: item.spec(self._own, item.layout.runs[peer].count)
                for name, item in items.items()
            })  # fmt: skip
        receives = [(peer, content) for peer, (content, _) in came.items()]
        transfer = comm.exchange(sends, receives)
        made = {}
        for name, item in items.items():
            made[name] = place.empty(*item.spec(self._own, item.layout.length))
        transfer.wait(rank.timeout, "rows to the ranks of their heads")
        del sends, receives
        for name, item in items.items():
            for peer, runs in enumerate(item.layout.runs):
                mine = peer == comm.rank
                source = item.array[..., item.heads(self._own), :, :] if mine else None
                source = came[peer][1][name] if source is None else source
                for run in runs:
                    place.store(part(source, runs.rows(run)), part(made[name], run))
        return made

    def _return(self, items: Mapping[str, _Item], computed: Mapping[str, Array]) -> None:
        """Write this rank's positions of all heads, from the ranks that computed them.

        `items` has the targets, and `computed` all positions of this rank's heads.
        """
        rank, place, comm = self._rank, self._place, self._rank.comm
        others = [peer for peer in range(comm.size) if peer != comm.rank]
        sends = []
        for peer in others:
            specs = {
                name: (item.spec(self._own, item.layout.runs[peer].count)[0], computed[name].dtype)
                for name, item in items.items()
            }
            content, parts = _parcel(place, specs)
            for name, item in items.items():
                for run in item.layout.runs[peer]:
                    rows = item.layout.runs[peer].rows(run)
                    place.store(part(computed[name], run), part(parts[name], rows))
            sends.append((peer, content))
        came = {}
        for peer in others:
            came[peer] = _parcel(place, {
                name: (item.spec(self._shares[peer], item.layout.count)[0], computed[name].dtype)
                for name, item in items.items()
            })  # fmt: skip
        receives = [(peer, content) for peer, (content, _) in came.items()]
        comm.exchange(sends, receives).wait(rank.timeout, "results from the ranks of their heads")
        for name, item in items.items():
            own = place.empty(item.spec(self._own, item.layout.count)[0], computed[name].dtype)
            for run in item.layout.own:
                place.store(part(computed[name], run), part(own, item.layout.own.rows(run)))
            parts_of = [
                own if peer == comm.rank else came[peer][1][name] for peer in range(comm.size)
            ]
            if item.grouped:
                for peer, source in enumerate(parts_of):
                    place.store(source, item.array[..., item.heads(self._shares[peer]), :, :])
                continue
            total = parts_of[0]  # of one array for all heads, in the order of ranks
            for source in parts_of[1:]:
                place.add(source, total)
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
            place.backend.forward(call, made, statistics)
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
            place.backend.backward(
                call, got["do"], got["out"], lse, dlse, gradients,
                workspace=None, deterministic=deterministic,
            )  # fmt: skip
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
        """Write the sum over ranks of what each has for its heads."""
        place = self._place
        total = place.empty(target.shape, computed.dtype)
        place.clear(total)
        mine = total
        if target.ndim >= -axis and target.shape[axis] > 1:
            index: tuple[Any, ...] = (..., self._heads, *(slice(None),) * (-axis - 1))
            mine = total[index]
        place.store(computed, mine)
        add_over_ranks(self._rank.comm, place, total, self._rank.timeout)
        place.store(total, target)


def _parcel(place: Place, specs: Mapping[str, Spec]) -> tuple[Array, dict[str, Array]]:
    """Return memory for one message, and the arrays in it; those with large elements first."""
    names = sorted(specs, key=lambda name: -specs[name][1].itemsize)
    sizes = [math.prod(specs[name][0]) * specs[name][1].itemsize for name in names]
    content = place.empty((sum(sizes),), np.dtype(np.uint8))
    arrays, begin = {}, 0
    for name, size in zip(names, sizes, strict=True):
        arrays[name] = viewed(content, begin, *specs[name])
        begin += size
    return content, arrays
