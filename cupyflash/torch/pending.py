"""Gradients of recognised calls on tensors, which their forward prepares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch

from ..arrays import reports
from ..gpu import driver
from ..gpu.launch import ALIGNMENT, CompiledRecipe
from . import tensors
from .tensors import PLAIN

SMALL = 1 << 20  # bytes of gradients and scratch memory that a forward asks for


class Pending:
    """The gradients of one call, which are computed later.

    Parameters
    ----------
    gradients : Gradients
        What computes them.
    others : tuple of (torch.Tensor or None)
        The mask of the call, if that is a tensor, and its offsets.
    places : tuple of int
        The addresses of q, k, v and out.
    rest : tuple of int
        That of lse, and further addresses.

    Attributes
    ----------
    ready : list of Ready, or nothing
        What is there already, once at most.
    """

    __slots__ = ("gradients", "others", "places", "rest")
    ready: Any = ()

    def __init__(
        self,
        gradients: Gradients,
        others: tuple[torch.Tensor | None, ...],
        places: tuple[int, ...],
        rest: tuple[int, ...],
    ) -> None:
        self.gradients, self.others = gradients, others
        self.places, self.rest = places, rest


class Prepared(Pending):
    """The same, prepared by the forward; `ready` is the last parameter."""

    __slots__ = ("ready",)

    def __init__(
        self,
        gradients: Gradients,
        others: tuple[torch.Tensor | None, ...],
        places: tuple[int, ...],
        rest: tuple[int, ...],
        ready: Ready,
    ) -> None:
        super().__init__(gradients, others, places, rest)
        self.ready = [ready]

    def __del__(self) -> None:
        if self.ready:
            self.gradients.buffers.unused.append(self.ready.pop()[1])


# dq, dk and dv; launches that lack one address; and scratch memory, which is kept until then.
Results: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Ready: TypeAlias = tuple[Results, driver.Buffer, torch.Tensor | None]


class Gradients:
    """Gradients of calls with one signature, which need no signature of their own.

    They are computed on a thread of PyTorch's that has nothing of this in its caches: each function
    and each object takes several times as long as in a forward. So the forward prepares all that it
    can; memory is asked for there only if it is little, as the time of the host matters only then.

    Parameters
    ----------
    compiled : CompiledRecipe
        The launches of gradients that were computed of such a call.
    tables : mapping of str to str
        Names of the arrays that its kernels look up: in the kernels, and in the signature.
    results : sequence of (tuple of int, tuple of int)
        Shapes and strides of dq, dk and dv.
    do : torch.Tensor
        What they were computed of.
    strides : sequence of tuple of int
        Those of q, k, v and out.

    Attributes
    ----------
    names : tuple of str
        The names of addresses, in the signature of the call, that are told in addition.
    are_small : bool
        Whether their memory is asked for in the forward.
    buffers : driver.Buffers
        What launches are told that a forward has prepared.
    device : int
        Where.
    """

    __slots__ = (
        "_adds", "_do", "_has_reports", "_queue", "_results", "_size", "_strides", "_unprepared",
        "are_small", "buffers", "device", "names",
    )  # fmt: skip

    def __init__(
        self,
        compiled: CompiledRecipe,
        tables: Mapping[str, str],
        results: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
        do: torch.Tensor,
        strides: Sequence[tuple[int, ...]],
    ) -> None:
        launches, self._queue = compiled.launches, compiled.queue
        self.device = self._queue.device
        self._do, self._strides = (do.dtype, do.stride(), do.data_ptr() & 15), tuple(strides)
        self._results = results
        item = do.dtype.itemsize
        self._size = -(-compiled.workspace_size // item)
        elements = sum(math.prod(shape) for shape, _ in self._results) + self._size
        self.are_small = elements * item <= SMALL
        self._adds, self._has_reports = compiled.adds_to_dq, bool(compiled.reports)
        scratch = dict(compiled.places)
        names = [*_TOLD, *(launches.names - {*_TOLD, *scratch})]
        self.names = tuple(tables.get(name, name) for name in names[len(_TOLD) :])
        numbers = {name: (n, 0) for n, name in enumerate(names)}
        numbers |= {name: (_SCRATCH, place) for name, place in scratch.items()}
        self._unprepared = launches.buffers(launches.told(numbers))
        late = {"d_out": numbers.pop("d_out")}
        self.buffers = launches.buffers(launches.told(late), launches.told(numbers))

    def prepared(
        self, places: tuple[int, ...], rest: tuple[int, ...], q: torch.Tensor
    ) -> Ready | None:
        """Return new results, and launches that lack the address of do, of places as in `Pending`.

        A dq that is added to is 0. Returns None if the call must go through CuPy.
        """
        made = self._memory(q)
        if made is None:
            return None
        results, scratch, begin, at = made
        buffer = self.buffers.take()
        told = 0, begin, *places, *at, *rest
        if failed := self._queue.launch(buffer.early, 0, *told):
            raise driver.error(failed % driver.ERRORS, driver.REPLACE)
        return results, buffer, scratch

    def _memory(
        self, q: torch.Tensor
    ) -> tuple[Results, torch.Tensor | None, int, tuple[int, int, int]] | None:
        """Return new results, scratch memory and where it begins, and the addresses of results."""
        empty = q.new_empty_strided
        of_q, of_k, of_v = self._results
        results = dq, dk, dv = empty(*of_q), empty(*of_k), empty(*of_v)
        at_dq, at_dk, at_dv = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
        if (at_dq | at_dk | at_dv) & 15:
            return None
        begin, scratch = 0, None
        if self._size:
            scratch = empty((self._size,), (1,))
            begin = -(-scratch.data_ptr() // ALIGNMENT) * ALIGNMENT
        if self._adds:
            dq.zero_()
        return results, scratch, begin, (at_dq, at_dk, at_dv)

    def compute(
        self, pending: Pending, saved: Sequence[Any], do: Any
    ) -> tuple[torch.Tensor, ...] | None:
        """Compute gradients, given the operands of a call and out; None if they are unlike.

        PyTorch has checked the versions of saved tensors, and that `do` has the shape of out and is
        on its device. Users' hooks may have put other tensors in place of the saved ones, elsewhere
        or with other strides.
        """
        if type(do) not in PLAIN:
            return None
        if len(saved) == _FEWEST:
            q, k, v, out = saved
        else:
            q, k, v, _, _, mask, _, offsets_q, offsets_k, out = saved
            wanted = pending.others
            if not (mask is wanted[0] and offsets_q is wanted[1] and offsets_k is wanted[2]):
                return None
        place, queue = do.data_ptr(), self._queue
        at = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        if at != pending.places or (do.dtype, do.stride(), place & 15) != self._do:
            return None
        if (q.stride(), k.stride(), v.stride(), out.stride()) != self._strides:
            return None
        if self._has_reports:
            reports.refuse_offsets(self.device)
        stream, ready = tensors.raw_stream(self.device), None
        # A graph may run several times, and sums in dq are 0 only once.
        if pending.ready and not tensors.records_graph(stream):
            with suppress(IndexError):  # another thread was faster
                ready = pending.ready.pop()
        if ready is not None:
            results, buffer, _ = ready
            buffers = self.buffers
            failed = queue.launch(buffer.block, stream, place)
        else:
            made = self._memory(q)
            if made is None:
                return None
            results, _, begin, at_results = made
            buffers = self._unprepared
            try:
                buffer = buffers.unused.pop()
            except IndexError:
                buffer = buffers.take()
            told = *pending.places, *at_results, *pending.rest
            failed = queue.launch(buffer.block, stream, place, begin, *told)
        if failed:
            # A thread of PyTorch's may have no context yet, which CuPy makes.
            if not (buffer.has_launched(failed) or queue.is_open()):
                return None
            raise buffer.error(failed)
        buffers.unused.append(buffer)
        return results


# The order in which launches of gradients are told addresses.
_TOLD = "d_out", "scratch", "q", "k", "v", "out", "dq", "dk", "dv", "lse"
_SCRATCH = _TOLD.index("scratch")
_FEWEST = 4  # tensors that are saved: q, k, v and out
