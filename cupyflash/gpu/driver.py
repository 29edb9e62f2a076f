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
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import cuda_device

MAP_WORDS = 16  # of an encoded tensor map
_LINE = 8  # words at a multiple of which a tensor map begins
KNOWN = ("13", "14")  # versions of CuPy in which `Function.ptr` works as it is used here
# The oldest device on which grids overlap, and the first driver whose graphs keep that.
OVERLAP_CAPABILITY, OVERLAP_DRIVER = (9, 0), 12030
# CUlaunchConfig and CUlaunchAttribute of cuda.h, in words of eight bytes.
_CONFIG_WORDS, _STREAM, _ATTRIBUTES, _COUNT = 7, 4, 5, 6
LAUNCH, CLEAR, REPLACE = "cuLaunchKernelEx", "cuMemsetD32Async", "cuTensorMapReplaceAddress"
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
    maps : tuple of bytes
        Encoded tensor maps, which follow them as further parameters; they have any address.
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
    maps: tuple[bytes, ...]
    overlaps: bool

    @property
    def parameter_words(self) -> int:
        """How many words of eight bytes parameters take; tensor maps follow them."""
        words = -(-len(self.template) // 8)
        return _whole_lines(words) if self.maps else words

    @property
    def words(self) -> int:
        """How many words what the driver is told takes: parameters, pointers to them, and how."""
        count = len(self.maps)
        parameters = self.parameter_words + MAP_WORDS * count
        return _whole_lines(parameters + 1 + count + _CONFIG_WORDS + _ATTRIBUTE_WORDS)


def _whole_lines(words: int) -> int:
    return -(-words // _LINE) * _LINE


class Value(NamedTuple):
    """A word that is written when launches are made, or the address of a tensor map.

    Attributes
    ----------
    place : int
        Where it or the map is, in words of a buffer.
    number : int
        Which of the values that `Queue.launch` is told; `STREAM` is the first one.
    added : int
        What is added to that.
    """

    place: int
    number: int
    added: int


class Told(NamedTuple):
    """What launches are told.

    Attributes
    ----------
    words, maps : sequence of Value
        What is written, and the addresses of tensor maps.
    """

    words: Sequence[Value] = ()
    maps: Sequence[Value] = ()


class Functions(NamedTuple):
    """The addresses of the driver's functions; that of launches is 0 if CuPy must make them."""

    launch: int = 0
    replace: int = 0


STREAM = 0
ERRORS = 2**32  # what the number of a call is multiplied with, behind its error's number


class Buffer:
    """What the driver is told of some launches, in host memory, for one thread at a time.

    Parameters
    ----------
    kernels : sequence of Kernel
        What is launched, in order. What the driver is told of one begins behind that of the others.
    functions : Functions
        Those of the driver.
    told : Told
        What is told when they are launched.
    early : Told
        What is told before.

    Attributes
    ----------
    words : memoryview
        Words of eight bytes, to write to.
    block : int
        What `Queue.launch` takes to tell the values, the stream among them, and to launch.
    early : int
        What it takes to tell the early ones.
    launches : tuple of (int, int, int)
        Of each launch, what the driver's function takes: the addresses of its configuration, of the
        kernel and of pointers to its parameters.
    streams : tuple of int
        The words that have the stream.
    """

    __slots__ = (
        "_arguments", "_calls", "_held", "_kernels", "_one", "block", "early", "launches",
        "streams", "words",
    )  # fmt: skip

    def __init__(
        self,
        kernels: Sequence[Kernel],
        functions: Functions,
        told: Told,
        early: Told = Told(),  # noqa: B008, it is never changed
    ) -> None:
        memory = np.zeros(sum(kernel.words for kernel in kernels) + _LINE, np.uint64)
        memory = memory[-(memory.ctypes.data // 8) % _LINE :]
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
            for n, encoded in enumerate(kernel.maps):
                held = memory[first + n * MAP_WORDS : first + (n + 1) * MAP_WORDS]
                held[:] = np.frombuffer(encoded, np.uint64)
                arguments.append(held.view(f"V{8 * MAP_WORDS}"))
            pointers = first + len(kernel.maps) * MAP_WORDS
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
        self._calls = [REPLACE] * len(told.maps)
        made = [
            _block(functions, start, launched, streams, each)
            for launched, each in ((launches, told), ([], early))
        ]
        made += [_block(functions, start, [each], [], Told()) for each in launches]
        self._held = memory, made
        self.block, self.early, *self._one = (x.ctypes.data for x in made)

    def has_launched(self, failed: int) -> bool:
        """Return whether a launch had been made when a call for `block` failed.

        `failed` is what `Queue.launch` returned, which was not 0.
        """
        return failed // ERRORS > len(self._calls)

    def error(self, failed: int, of: int | None = None) -> RuntimeError:
        """Return what to raise for that, or for launch number `of` alone."""
        n, number = divmod(failed, ERRORS)
        if of is None and n < len(self._calls):
            return error(number, self._calls[n])
        made = error(number, LAUNCH)
        made.add_note(self.note(n - len(self._calls) if of is None else of))
        return made

    def note(self, n: int) -> str:
        """Return words that name the kernel of a launch."""
        return f"while running the kernel {self._kernels[n].name}"

    def one(self, n: int) -> int:
        """Return what `Queue.launch` takes to make one of the launches, and to write nothing."""
        return self._one[n]

    def launch_by_cupy(self, n: int) -> None:
        """Make one of the launches on CuPy's current stream."""
        kernel = self._kernels[n]
        kernel.by_cupy(
            (kernel.grid,), (kernel.threads,), self._arguments[n], shared_mem=kernel.shared_memory
        )


def _block(
    functions: Functions,
    start: int,
    launches: Sequence[tuple[int, int, int]],
    streams: Iterable[int],
    told: Told,
) -> Any:
    """Return what `Queue.launch` takes to tell values and to launch, for words at an address."""
    from . import launcher

    calls: list[tuple[int, ...]] = []
    arguments: list[tuple[int, int, int, int]] = []
    for place, number, added in told.maps:
        arguments.append((len(calls), 1, number, added))
        calls.append((functions.replace, start + 8 * place))
    calls += [(functions.launch, *each) for each in launches]
    values = [*(Value(place, STREAM, 0) for place in streams), *told.words]
    return launcher.block(calls, [(start + 8 * x, n, y) for x, n, y in values], arguments)


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
        functions: Functions,
        told: Told,
        early: Told = Told(),  # noqa: B008, it is never changed
    ) -> None:
        self._told = kernels, functions, told, early
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
        What tells values and launches, as `launcher.launch` says. It takes a block of a `Buffer`,
        the stream, and further values.
    functions : Functions
        Those of the driver.
    clear : callable or None
        The driver's function that takes an address, a number of 32 bits, how often to write it from
        there on, and the stream, and returns an error's number or 0; None if CuPy must launch.
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
        self.launch, self.functions = launcher.launch(), Functions()
        self.clear: Any = None
        if self._is_known:
            pointer, found = ctypes.c_void_p, library()
            self.functions = Functions(_address(LAUNCH))
            self.clear = found.cuMemsetD32Async
            self.clear.argtypes = pointer, ctypes.c_uint, ctypes.c_size_t, pointer
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


def _address(name: str) -> int:
    """Return the address of a function of the driver."""
    return ctypes.cast(getattr(library(), name), ctypes.c_void_p).value or 0


def functions(queue: Queue, kernels: Sequence[Kernel]) -> Functions:
    """Return the functions by which kernels are launched."""
    if not any(kernel.maps for kernel in kernels):
        return queue.functions
    return queue.functions._replace(replace=_address(REPLACE))


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
    return int(kernel.kernel.ptr) if queue(device).functions.launch else 0
