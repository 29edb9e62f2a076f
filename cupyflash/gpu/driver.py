"""Launches compiled kernels by one call of CUDA's driver, which is half of CuPy's way to it.

A kernel's parameters are in a buffer that is used again and again; only addresses change in it.
CuPy documents neither `cupy.cuda.driver` nor `Function.ptr`. So CuPy itself launches if its version
is not among those whose sources were checked for this, or if the environment selects per-thread
default streams.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any, NamedTuple

import numpy as np

MAP_WORDS = 16  # of an encoded tensor map
KNOWN = ("13", "14")  # versions of CuPy in which both work as they are used here


class Buffer(NamedTuple):
    """Parameters of one launch in host memory.

    Attributes
    ----------
    words : memoryview
        Words of eight bytes, to write to.
    arguments : tuple of numpy.ndarray
        The same memory, as CuPy's arguments.
    pointers : int
        The address of the list of arguments, as the driver expects it.
    """

    words: Any
    arguments: tuple[Any, ...]
    pointers: int


def words_of(template: bytes) -> int:
    """Return how many words of a buffer parameters take; tensor maps follow them."""
    return -(-len(template) // 8)


def buffer(template: bytes, maps: int = 0) -> Buffer:
    """Return a new buffer that begins as `template`, with so many arguments of `MAP_WORDS` more."""
    count = words_of(template)
    end = count + MAP_WORDS * maps
    memory = np.zeros(end + 1 + maps, np.uint64)
    memory.view(np.uint8)[: len(template)] = np.frombuffer(template, np.uint8)
    start = memory.ctypes.data
    memory[end] = start  # the list of arguments has this entry, and those of maps
    arguments = [memory.view(np.uint8)[: len(template)].view(f"V{len(template)}")]
    for n in range(maps):
        first = count + MAP_WORDS * n
        memory[end + 1 + n] = start + 8 * first
        arguments.append(memory[first : first + MAP_WORDS].view(f"V{8 * MAP_WORDS}"))
    return Buffer(memory.data, tuple(arguments), start + 8 * end)


class _Thread(threading.local):
    """The devices for which CuPy has made a context in a thread, which the driver does not."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_thread = _Thread()


class Queue:
    """Where launches on one device go: the current stream of the calling thread."""

    def __init__(self, device: int) -> None:
        import cupy

        self.device = device
        self._current_device = cupy.cuda.runtime.getDevice
        self.current_stream = cupy.cuda.get_current_stream
        self._is_known = _is_known(cupy)
        self.launch: Any = cupy.cuda.driver.launchKernel if self._is_known else None
        self.memset: Any = cupy.cuda.runtime.memsetAsync

    def is_here(self) -> bool:
        """Whether the device is the current one."""
        here: bool = self._current_device() == self.device
        return here

    def is_open(self) -> bool:
        """Whether `launch` works in this thread, on any stream of the device."""
        return self.device in _thread.devices and self.is_here()

    def pointer(self) -> Any:
        """Return the current stream's pointer for `launch`, or None if CuPy must launch.

        The device must be the current one.
        """
        if self.device in _thread.devices:
            return self.current_stream().ptr
        if self._is_known:
            _thread.devices.add(self.device)  # as soon as CuPy has launched
        return None


@functools.cache
def queue(device: int) -> Queue:
    """Return the queue of a device."""
    return Queue(device)


def _is_known(cupy: Any) -> bool:
    per_thread = os.environ.get("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "0") != "0"
    return cupy.__version__.partition(".")[0] in KNOWN and not per_thread


def function(kernel: Any, device: int) -> int:
    """Return the driver's handle of a kernel that CuPy has compiled for the current device."""
    return int(kernel.kernel.ptr) if queue(device).launch else 0
