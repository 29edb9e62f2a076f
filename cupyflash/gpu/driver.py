"""Launches compiled kernels by one call of CUDA's driver, which is half of CuPy's way to it.

A kernel's parameters are in a buffer that is used again and again; only addresses change in it.
A kernel that waits for earlier grids itself (kernels_cu/ptx/grid.cuh) is launched such that it may
begin while the one before it ends, where the device and its driver can do that.
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

from ..arrays import cuda_device

MAP_WORDS = 16  # of an encoded tensor map
KNOWN = ("13", "14")  # versions of CuPy in which both work as they are used here
# The oldest device on which grids overlap, and the first driver whose graphs keep that.
OVERLAP_CAPABILITY, OVERLAP_DRIVER = (9, 0), 12030


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
    early : Early or None
        How to launch with them, if that may begin while the launch before ends.
    """

    words: Any
    arguments: tuple[Any, ...]
    pointers: int
    early: Early | None = None


def words_of(template: bytes) -> int:
    """Return how many words of a buffer parameters take; tensor maps follow them."""
    return -(-len(template) // 8)


def buffer(template: bytes, maps: int = 0, early: Early | None = None) -> Buffer:
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
    return Buffer(memory.data, tuple(arguments), start + 8 * end, early)


class Early:
    """Launches of one kernel that may begin while the launch before ends, for one thread.

    They are CUDA's programmatic dependent launches.
    """

    def __init__(self, function: int, grid: int, threads: int, shared_memory: int) -> None:
        from cuda.bindings import driver

        self._launch, self._function = driver.cuLaunchKernelEx, driver.CUfunction(function)
        self._success = driver.CUresult.CUDA_SUCCESS
        self._config = config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_memory
        overlaps = driver.CUlaunchAttribute()
        kinds = driver.CUlaunchAttributeID
        overlaps.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        value = driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        overlaps.value = value
        config.attrs, config.numAttrs = [overlaps], 1

    def __call__(self, stream: int, pointers: int) -> None:
        """Launch on a stream, with parameters at the addresses that `pointers` lists."""
        self._config.hStream = stream
        (error,) = self._launch(self._config, self._function, pointers, 0)
        if error != self._success:
            raise RuntimeError(f"cuLaunchKernelEx: {error}")


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
        self.overlaps = self._is_known and _overlaps(cupy, device)

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


def _overlaps(cupy: Any, device: int) -> bool:
    target = cuda_device.of(device)
    return (
        target.capability >= OVERLAP_CAPABILITY
        and not target.lacks
        and cupy.cuda.runtime.driverGetVersion() >= OVERLAP_DRIVER
    )


def _is_known(cupy: Any) -> bool:
    per_thread = os.environ.get("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "0") != "0"
    return cupy.__version__.partition(".")[0] in KNOWN and not per_thread


def function(kernel: Any, device: int) -> int:
    """Return the driver's handle of a kernel that CuPy has compiled for the current device."""
    return int(kernel.kernel.ptr) if queue(device).launch else 0
