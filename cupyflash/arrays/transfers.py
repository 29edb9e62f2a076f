"""Copies between host memory and a device that run beside the computation.

The device copies without help of the CPU only from and to pinned memory. Other arrays are copied
through blocks of it, by several threads; what is pinned already is copied from where it is. Uploads
and downloads have a stream each. Events order them with what computes, on the stream that was the
current one of the device in the beginning: nothing waits on the host but for a free block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from . import device_arrays
from .cuda_device import current

Array = np.ndarray[Any, Any]

BLOCK_BYTES = 16 * 2**20
BLOCKS = 4
PARTS = 8  # a thread each: one copies about a quarter of what the device takes
_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind


class _Pinned(NamedTuple):
    """Pinned memory; `used` is behind the last copy from it."""

    memory: Any
    used: Any


class _Download(NamedTuple):
    """What arrives in pinned memory, and where it belongs."""

    arrived: Any
    memory: Any  # None if it arrives where it belongs
    source: Any  # in device memory, until it was read
    target: Array
    adds: bool


class Transfers:
    """Copies to and from one device, in the order in which they are asked for.

    Parameters
    ----------
    device : int
        The device.
    """

    def __init__(self, device: int) -> None:
        import cupy

        self._cuda, self._device = cupy.cuda, device
        with current(device):
            self._computing = cupy.cuda.get_current_stream()
        self._streams: dict[str, Any] = {}
        self._blocks: list[_Pinned] = []
        self._turn = 0
        self._downloads: list[_Download] = []

    @property
    def _up(self) -> Any:
        return self._stream("up")

    @property
    def _down(self) -> Any:
        return self._stream("down")

    def _stream(self, name: str) -> Any:
        """Return one of the streams; calls without arrays in host memory need none."""
        if name not in self._streams:
            with current(self._device):
                self._streams[name] = self._cuda.Stream(non_blocking=True)
        return self._streams[name]

    def mark(self) -> Any:
        """Return an event behind everything that computes so far."""
        return self._event(self._computing)

    def upload_after(self, event: Any) -> None:
        """Let uploads from here on wait for an event."""
        self._up.wait_event(event)

    def compute_after_uploads(self) -> None:
        """Let what computes from here on wait for all uploads so far."""
        self._computing.wait_event(self._event(self._up))

    def upload(self, array: Array, place: int) -> None:
        """Copy an array in host memory to an address of the device, in C order."""
        if not array.size:
            return
        copy = self._cuda.runtime.memcpyAsync
        if self._is_pinned(array) and (blocks := _blocks(array)) is not None:
            for part in blocks:
                copy(place, part.ctypes.data, part.nbytes, _TO_DEVICE, self._up.ptr)
                place += part.nbytes
            return
        for part in _parts(array, BLOCK_BYTES):
            block = self._free_block()
            self._in_parallel(np.copyto, _view(block.memory, part), part)
            copy(place, block.memory.ptr, part.nbytes, _TO_DEVICE, self._up.ptr)
            block.used.record(self._up)
            place += part.nbytes

    def download(self, source: Any, target: Array, adds: bool = False) -> None:
        """Copy an array in device memory, in C order, to an array in host memory, or add it there.

        Both have the same dtype. The target may be read after `finish`.
        """
        if not target.size:
            return
        while len(self._downloads) > 1:
            self._receive()
        blocks = None if adds or not self._is_pinned(target) else _blocks(target)
        memory: Any = None if blocks else self._cuda.alloc_pinned_memory(source.nbytes)
        self._down.wait_event(self.mark())
        place = device_arrays.address(source)
        ends = [(x.ctypes.data, x.nbytes) for x in blocks or ()] or [(memory.ptr, source.nbytes)]
        for to, size in ends:
            self._cuda.runtime.memcpyAsync(to, place, size, _TO_HOST, self._down.ptr)
            place += size
        arrived = self._event(self._down)
        self._downloads.append(_Download(arrived, memory, source, target, adds))

    def receive_all(self) -> None:
        """Wait until every download is where it belongs."""
        while self._downloads:
            self._receive()

    def finish(self) -> None:
        """Wait for every transfer: then the host may read what arrived and change what was sent.

        An exception from a signal leaves out what has not been received, and the rest is over.
        """
        try:
            self.receive_all()
        finally:
            for stream in self._streams.values():
                stream.synchronize()

    def _receive(self) -> None:
        arrived, memory, _, target, adds = self._downloads.pop(0)
        arrived.synchronize()
        if memory is None:
            return
        source = _view(memory, target)
        if adds:
            from ..reference.cpu.sums import add

            self._in_parallel(lambda to, x: add(x, to), target, source)
        else:
            self._in_parallel(np.copyto, target, source)

    def _event(self, stream: Any) -> Any:
        with current(self._device):
            event = self._cuda.Event(disable_timing=True)
            event.record(stream)
        return event

    def _free_block(self) -> _Pinned:
        """Return the block that was used least lately, once its last copy is over."""
        if len(self._blocks) < BLOCKS:
            with current(self._device):
                event = self._cuda.Event(disable_timing=True)
            self._blocks.append(_Pinned(self._cuda.alloc_pinned_memory(BLOCK_BYTES), event))
            return self._blocks[-1]
        block = self._blocks[self._turn]
        self._turn = (self._turn + 1) % BLOCKS
        block.used.synchronize()
        return block

    def _is_pinned(self, array: Array) -> bool:
        found = self._cuda.runtime.pointerGetAttributes(array.ctypes.data)
        return bool(found.devicePointer and found.hostPointer)

    def _in_parallel(self, work: Callable[[Array, Array], Any], to: Array, source: Array) -> None:
        """Work on parts of two arrays of the same shape."""
        if to.dtype.kind not in "biuf":  # bfloat16: NumPy copies what it knows faster
            to, source = (x.view(f"u{x.itemsize}") for x in (to, source))
        if to.nbytes < 2**20:
            work(to, source)
            return
        from ..reference.cpu.threads import parallel

        axis = max(range(to.ndim - 1), key=lambda n: to.shape[n], default=0)
        ends = np.linspace(0, to.shape[axis], PARTS + 1).astype(int).tolist()
        parts = [
            (*(slice(None),) * axis, slice(first, last))
            for first, last in itertools.pairwise(ends)
            if first < last
        ]

        def run(first: int, last: int) -> None:
            for part in parts[first:last]:
                work(to[part], source[part])

        parallel(run, len(parts), (to, source))


def _view(memory: Any, like: Array) -> Array:
    """Return the array in C order at the beginning of pinned memory that is like another one."""
    flat: Array = np.frombuffer(memory, np.uint8, like.nbytes)
    made: Array = flat.view(like.dtype).reshape(like.shape)
    return made


def _blocks(array: Array) -> list[Array] | None:
    """Return the parts of an array whose elements are in a row, in C order; None if rows are not.

    They are the array itself, or its last two axes.
    """
    if array.flags.c_contiguous:
        return [array]
    if array.ndim < 2 or not array[(0,) * (array.ndim - 2)].flags.c_contiguous:
        return None
    return [array[index] for index in np.ndindex(array.shape[:-2])]


def _parts(array: Array, most: int) -> Iterator[Array]:
    """Yield parts of at most so many bytes, if a row is not longer, in C order."""
    axis = next((n for n, size in enumerate(array.shape) if size > 1), None)
    if array.nbytes <= most or axis is None:
        yield array
        return
    each = max(1, most * array.shape[axis] // array.nbytes)
    for first in range(0, array.shape[axis], each):
        part = array[(*(slice(None),) * axis, slice(first, first + each))]
        yield from _parts(part, most)
