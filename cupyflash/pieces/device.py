"""A GPU as the place where pieces are computed, for arrays in host memory or in its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from ..arrays import copies, cuda_device, device_arrays, elementwise
from ..arrays.device_arrays import is_device_array
from ..arrays.transfers import Transfers
from ..backends.backend import Backend
from ..errors import ArgumentError
from ..expr.bind import in_device_memory
from ..masks import Mask
from ..problem.call import Array, Call
from ..scores import Score
from .place import Parts


@dataclass
class _Slot:
    """Device memory for the parts of one request, and an event behind what computes with them."""

    memory: dict[str, Any]
    consumed: Any


class Device:
    """The memory of a GPU.

    Parts of arrays in host memory are copied to it while the parts before them are computed with:
    two of each are there at a time.
    """

    def __init__(self, backend: Backend, device: int) -> None:
        with cuda_device.current(device):
            if cuda_device.is_capturing():
                raise ArgumentError(
                    "q: a streamed call was made while a CUDA graph is being captured; expected "
                    "none, because the host copies parts of arrays. Capture cupyflash.attention."
                )
        self.backend, self._device = backend, device
        self._transfers = Transfers(device)

    def ready(self, call: Call) -> Call:
        """Return the call with copies of the sink, and of masks' and scores' arrays, if needed."""
        sink, mask, score_mod = call.sink, call.mask, call.score_mod
        with cuda_device.current(self._device):
            if sink is not None and not is_device_array(sink):
                sink = device_arrays.to_device(sink, sink.dtype)
            if mask is not None:
                mask = Mask(in_device_memory(mask.expr))
            if score_mod is not None:
                score_mod = Score(in_device_memory(score_mod.expr))
        return replace(call, sink=sink, mask=mask, score_mod=score_mod)

    def feed(self, requests: Iterable[Parts]) -> Iterator[Parts]:
        """Return the parts in device memory; those of the next request follow meanwhile."""
        wanted = list(requests)
        slots = self._slots(wanted)
        for n, request in enumerate(wanted):
            slot, before = slots[n % 2], slots[1 - n % 2]
            if n:
                before.consumed = self._transfers.mark()
            with cuda_device.current(self._device):
                filled = self._filled(slot, request)
            yield filled

    def _slots(self, requests: Sequence[Parts]) -> list[_Slot]:
        """Return memory for two requests at a time, whichever they are.

        All of it is there before anything computes: what is asked for later may still be in use.
        """
        sizes: dict[str, int] = {}
        for request in requests:
            for name, x in _in_host(request).items():
                sizes[name] = max(sizes.get(name, 0), x.nbytes)
        with cuda_device.current(self._device):
            made = [
                {name: device_arrays.memory(size) for name, size in sizes.items()}
                for _ in requests[:2]
            ]
        begin = self._transfers.mark() if sizes else None
        return [_Slot(memory, begin) for memory in (*made, {}, {})][:2]

    def _filled(self, slot: _Slot, request: Parts) -> Parts:
        in_host = _in_host(request)
        if not in_host:
            return request
        self._transfers.upload_after(slot.consumed)
        parts = dict(request)
        for name, x in in_host.items():
            memory = slot.memory[name]
            self._transfers.upload(x, memory.ptr)
            parts[name] = device_arrays.view(x.shape, x.dtype, memory)
        self._transfers.compute_after_uploads()
        return parts

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialised array in device memory."""
        with cuda_device.current(self._device):
            made: Array = device_arrays.empty(shape, dtype)
        return made

    def has(self, array: Array) -> bool:
        """Return whether an array is in the memory of the device."""
        return is_device_array(array)

    def taken(self, array: Array, positions: Sequence[range]) -> Array:
        """Return the elements at some positions of the last axis of an array in device memory."""
        if len(positions) == 1:
            (only,) = positions
            some: Array = array[..., only.start : only.stop]
            return some
        made = self.empty((*array.shape[:-1], sum(map(len, positions))), array.dtype)
        with cuda_device.current(self._device):
            elementwise.take(array, tuple(positions), made)
        return made

    def sums(self, owner: Array, dtype: np.dtype[Any]) -> Array:
        """Return zeros with the shape of an array, where that array is."""
        if not is_device_array(owner):
            return np.zeros(owner.shape, dtype)
        made = self.empty(owner.shape, dtype)
        elementwise.fill(made, 0)
        return made

    def clear(self, array: Array) -> None:
        """Write 0 to an array."""
        if is_device_array(array):
            elementwise.fill(array, 0)
        else:
            array[...] = 0

    def add(self, computed: Array, to: Array) -> None:
        """Add an array in device memory to one in either memory."""
        if is_device_array(to):
            elementwise.add(computed, to)
        else:
            self._transfers.download(computed, to, adds=True)

    def store(self, computed: Array, to: Array) -> None:
        """Write an array to another one, rounded."""
        if not is_device_array(computed):  # sums in host memory
            self._transfers.receive_all()
            with np.errstate(all="ignore"):
                to[...] = computed.astype(to.dtype, copy=False)
        elif is_device_array(to):
            with cuda_device.current(self._device):
                elementwise.copy(computed, to)
        else:
            rounded = computed
            if computed.dtype != to.dtype:
                rounded = self.empty(computed.shape, to.dtype)
                with cuda_device.current(self._device):
                    elementwise.convert(computed, rounded)
            self._transfers.download(rounded, to)

    def store_all(self, pairs: Sequence[tuple[Array, Array]]) -> None:
        """Write arrays in device memory to other ones there."""
        with cuda_device.current(self._device):
            copies.copy_all(pairs)

    def store_sum(self, summands: Sequence[Array], to: Array) -> None:
        """Write the sum of arrays in device memory to another one there, rounded."""
        first, *others = summands
        while len(others) >= elementwise.MOST_SUMMANDS:
            elementwise.add(others.pop(0), first)
        with cuda_device.current(self._device):
            elementwise.add_up(first, *others, to)

    def mark(self) -> Any:
        """Return an event behind all that was asked for."""
        with cuda_device.current(self._device):
            return device_arrays.mark()

    @contextmanager
    def beside(self, mark: Any, computes: bool = False) -> Iterator[None]:
        """Ask a stream of its own, which begins when a mark is reached."""
        with cuda_device.current(self._device), device_arrays.beside(mark, computes):
            yield

    def join(self) -> None:
        """Let the current stream wait for those of its own."""
        with cuda_device.current(self._device):
            device_arrays.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for all transfers, not for what computes on arrays of the device."""
        self._transfers.finish()


def _in_host(request: Parts) -> dict[str, Array]:
    return {name: x for name, x in request.items() if x is not None and not is_device_array(x)}
