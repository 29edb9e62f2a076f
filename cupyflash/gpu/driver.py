"""Launches compiled kernels by CUDA's driver alone, which is half of CuPy's way to it.

What the driver is told of some launches is in host memory that is used again and again; only
addresses and the stream change in it. A kernel that waits for earlier grids itself
(kernels_cu/ptx/grid.cuh) is launched such that it may begin while the one before it ends, where the
device and its driver can do that: CUDA's programmatic dependent launches.
CuPy does not document `Function.ptr`. So CuPy itself launches if its version is not among those
whose sources were checked for this, or if the environment selects per-thread default streams.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import cuda_device

MAP_WORDS = 16  # of an encoded tensor map
KNOWN = ("13", "14")  # versions of CuPy in which `Function.ptr` works as it is used here
# The oldest device on which grids overlap, and the first driver whose graphs keep that.
OVERLAP_CAPABILITY, OVERLAP_DRIVER = (9, 0), 12030
# CUlaunchConfig and CUlaunchAttribute of cuda.h, in words of eight bytes.
_CONFIG_WORDS, _STREAM, _ATTRIBUTES, _COUNT = 7, 4, 5, 6
LAUNCH = "cuLaunchKernelEx"
_ATTRIBUTE_WORDS, _ATTRIBUTE_VALUE, _OVERLAPS = 9, 1, 6  # the last one is the attribute's number


class Kernel(NamedTuple):
    """A compiled kernel, and how it is launched.

    Attributes
    ----------
    name : str
        Of the kernel.
    by_cupy : Any
        The kernel as CuPy has it.
    function : int
        The driver's handle.
    grid, threads, shared_memory : int
        Blocks, threads of a block, and its bytes of dynamic shared memory.
    template : bytes
        Its parameters without addresses.
    maps : int
        How many tensor maps follow them as further parameters.
    overlaps : bool
        Whether it may begin while the launch before ends.
    """

    name: str
    by_cupy: Any
    function: int
    grid: int
    threads: int
    shared_memory: int
    template: bytes
    maps: int
    overlaps: bool

    @property
    def parameter_words(self) -> int:
        """How many words of eight bytes parameters take; tensor maps follow them."""
        return -(-len(self.template) // 8)

    @property
    def words(self) -> int:
        """How many words what the driver is told takes: parameters, pointers to them, and how."""
        parameters = self.parameter_words + MAP_WORDS * self.maps
        return parameters + 1 + self.maps + _CONFIG_WORDS + _ATTRIBUTE_WORDS


class Value(NamedTuple):
    """A word that is written when launches are made.

    Attributes
    ----------
    place : int
        Where, in words of a buffer.
    number : int
        Which of the values that `Queue.launch` is told; `STREAM` is the first one.
    added : int
        What is added to that.
    """

    place: int
    number: int
    added: int


STREAM = 0
ERRORS = 2**32  # what a launch's number is multiplied with, behind its error's number


class Buffer:
    """What the driver is told of some launches, in host memory, for one thread at a time.

    Parameters
    ----------
    kernels : sequence of Kernel
        What is launched, in order. What the driver is told of one begins behind that of the others.
    function : int
        The address of the driver's function; 0 if CuPy must launch.
    values : sequence of Value
        What is written when they are launched.
    early : sequence of Value
        What is written before.

    Attributes
    ----------
    words : memoryview
        Words of eight bytes, to write to.
    block : int
        What `Queue.launch` takes to write the values, the stream among them, and to launch.
    early : int
        What it takes to write the early ones.
    launches : tuple of (int, int, int)
        Of each launch, what the driver's function takes: the addresses of its configuration, of the
        kernel and of pointers to its parameters.
    streams : tuple of int
        The words that have the stream.
    """

    __slots__ = (
        "_arguments", "_held", "_kernels", "_one", "block", "early", "launches", "streams", "words",
    )  # fmt: skip

    def __init__(
        self,
        kernels: Sequence[Kernel],
        function: int,
        values: Sequence[Value],
        early: Sequence[Value] = (),
    ) -> None:
        from . import launcher

        memory = np.zeros(sum(kernel.words for kernel in kernels), np.uint64)
        self._kernels, self.words = kernels, memory.data
        self._arguments: list[list[Any]] = []  # of each launch, as CuPy takes them
        launches, streams = [], []
        begin, start = 0, memory.ctypes.data
        for kernel in kernels:
            parameters = memory[begin : begin + kernel.parameter_words].view(np.uint8)
            parameters = parameters[: len(kernel.template)]
            parameters[:] = np.frombuffer(kernel.template, np.uint8)
            arguments = [parameters.view(f"V{len(kernel.template)}")]
            first = begin + kernel.parameter_words
            for n in range(kernel.maps):
                held = memory[first + n * MAP_WORDS : first + (n + 1) * MAP_WORDS]
                arguments.append(held.view(f"V{8 * MAP_WORDS}"))
            pointers = first + kernel.maps * MAP_WORDS
            memory[pointers : pointers + len(arguments)] = [x.ctypes.data for x in arguments]
            config = pointers + len(arguments)
            attribute = config + _CONFIG_WORDS
            sizes = kernel.grid, 1, 1, kernel.threads, 1, 1, kernel.shared_memory, 0
            memory[config : config + _STREAM].view(np.uint32)[:] = sizes
            memory[config + _ATTRIBUTES] = start + 8 * attribute
            memory[config + _COUNT] = int(kernel.overlaps)
            memory[attribute] = _OVERLAPS
            memory[attribute + _ATTRIBUTE_VALUE] = 1
            self._arguments.append(arguments)
            streams.append(config + _STREAM)
            launches.append((start + 8 * config, kernel.function, start + 8 * pointers))
            begin += kernel.words
        self.launches, self.streams = tuple(launches), tuple(streams)
        of_stream = [Value(place, STREAM, 0) for place in streams]
        made = [
            launcher.block(function, launched, [(start + 8 * x, n, y) for x, n, y in written])
            for launched, written in (
                (launches, (*of_stream, *values)),
                ([], (*of_stream, *early)),
                *(([each], ()) for each in launches),
            )
        ]
        self._held = memory, made
        self.block, self.early, *self._one = (x.ctypes.data for x in made)

    def one(self, n: int) -> int:
        """Return what `Queue.launch` takes to make one of the launches, and to write nothing."""
        return self._one[n]

    def launch_by_cupy(self, n: int) -> None:
        """Make one of the launches on CuPy's current stream."""
        kernel = self._kernels[n]
        kernel.by_cupy(
            (kernel.grid,), (kernel.threads,), self._arguments[n], shared_mem=kernel.shared_memory
        )


class Buffers:
    """The buffers of some launches, one for each thread that has made them.

    The parameters are those of `Buffer`.

    Attributes
    ----------
    unused : list of Buffer
        Those that nobody uses; whoever takes one puts it back when the launches are made.
    """

    __slots__ = ("_told", "unused")

    def __init__(
        self,
        kernels: Sequence[Kernel],
        function: int,
        values: Sequence[Value],
        early: Sequence[Value] = (),
    ) -> None:
        self._told = kernels, function, values, early
        self.unused: list[Buffer] = []

    def take(self) -> Buffer:
        """Return a buffer that nobody uses."""
        try:
            return self.unused.pop()
        except IndexError:
            return Buffer(*self._told)


def error(number: int, function: str) -> RuntimeError:
    """Return what to raise for an error that a function of the driver returned."""
    name = ctypes.c_char_p()
    library().cuGetErrorName(number, ctypes.byref(name))
    words = f"error {number}" if name.value is None else name.value.decode()
    return RuntimeError(f"{function}: {words}")


@functools.cache
def library() -> Any:
    """Return CUDA's driver, whose functions take and return what C's do."""
    return ctypes.CDLL("nvcuda" if os.name == "nt" else "libcuda.so.1")


class _Thread(threading.local):
    """The devices for which CuPy has made a context in a thread, which the driver does not."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_thread = _Thread()


class Queue:
    """Where launches on one device go: the current stream of the calling thread.

    Attributes
    ----------
    device : int
        Its number.
    launch : callable
        What writes values and launches, as `launcher.launch` says. It takes a block of a `Buffer`,
        the stream, and further values.
    function : int
        The address of the driver's function that launches; 0 if CuPy must launch.
    overlaps : bool
        Whether a launch may begin while the one before ends.
    alloc : callable
        Returns so many bytes of the current device's memory.
    """

    def __init__(self, device: int) -> None:
        import cupy

        from . import launcher

        self.device = device
        self._current_device = cupy.cuda.runtime.getDevice
        self.current_stream = cupy.cuda.get_current_stream
        self.alloc = cupy.cuda.alloc
        self._is_known = _is_known(cupy)
        self.launch, self.function = launcher.launch(), 0
        if self._is_known:
            pointer, found = ctypes.c_void_p, library()
            self.function = ctypes.cast(found.cuLaunchKernelEx, pointer).value or 0
        self.overlaps = self._is_known and _overlaps(cupy, device)

    def is_here(self) -> bool:
        """Whether the device is the current one."""
        here: bool = self._current_device() == self.device
        return here

    def is_open(self) -> bool:
        """Whether `launch` works in this thread, on any stream of the device."""
        device = self.device
        return device in _thread.devices and self._current_device() == device

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
        and cupy.cuda.runtime.driverGetVersion() >= OVERLAP_DRIVER
    )


def _is_known(cupy: Any) -> bool:
    per_thread = os.environ.get("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "0") != "0"
    if cupy.__version__.partition(".")[0] not in KNOWN or per_thread:
        return False
    try:
        return hasattr(library(), LAUNCH)
    except OSError:  # under another name than those that are known
        return False


def function(kernel: Any, device: int) -> int:
    """Return the driver's handle of a kernel that CuPy has compiled for the current device."""
    return int(kernel.kernel.ptr) if queue(device).function else 0
