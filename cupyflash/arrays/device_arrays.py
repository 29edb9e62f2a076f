"""The few things for which arrays of CuPy need CuPy itself.

CuPy is imported when one of these functions is called; but `is_device_array` never imports it,
because an object can be a CuPy array only if CuPy has been imported already.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from ..errors import ArgumentError
from . import reports, tape
from .cuda_device import current, is_capturing, quick_stream


def is_device_array(value: Any) -> bool:
    """Whether a value is a CuPy array."""
    kind = type(value)
    if kind in _kinds:
        return True
    cupy = sys.modules.get("cupy")
    if cupy is None or isinstance(value, np.ndarray):  # whatever a program has put there
        return False
    if not isinstance(value, getattr(cupy, "ndarray", ())):
        return False
    _kinds.add(kind)
    return True


_kinds: set[type] = set()  # types of CuPy arrays that have been seen


def device_of(array: Any) -> int | None:
    """Return the number of the device on which an array lives; None for host memory."""
    return int(array.device.id) if is_device_array(array) else None


def address(array: Any) -> int:
    """Return where an array's first element lies, in whichever memory."""
    return int(array.data.ptr if is_device_array(array) else array.ctypes.data)


def from_dlpack(value: Any) -> Any:
    """Return a CuPy array that shares the memory of another library's array."""
    import cupy

    return cupy.from_dlpack(value)


def borrowed(
    place: int,
    shape: tuple[int, ...],
    dtype: Any,
    strides: tuple[int, ...],
    device: int,
    owner: object,
) -> Any:
    """Return a CuPy array in another library's memory, in a fraction of DLPack's time.

    Its first element lies at the address `place` of a device, its strides are in bytes, and `owner`
    is kept as long as the array.
    """
    import cupy

    reach = sum(step * (n - 1) for step, n in zip(strides, shape, strict=True) if n)
    memory = cupy.cuda.UnownedMemory(place, reach + dtype.itemsize, owner, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


@contextmanager
def on_stream(stream: int, device: int) -> Iterator[None]:
    """Make a device, and a stream of another library on it, CuPy's current ones for a while."""
    with current(device), _stream(stream):
        yield


class _Foreign:
    """A stream of another library, as CUDA's stream protocol describes it."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer  # the version of the protocol, and the stream


@functools.lru_cache(maxsize=64)
def _stream(pointer: int) -> Any:
    import cupy

    return cupy.cuda.Stream.from_external(_Foreign(pointer))


def read_back(array: Any) -> np.ndarray[Any, Any]:
    """Copy an array to host memory, and wait for it.

    Raises
    ------
    ArgumentError
        If kernels have found wrong offsets meanwhile.
    """
    tape.spoil("an array is read back")
    with array.device:
        read = np.asarray(array.get())
    reports.refuse_offsets(int(array.device.id))
    return read


class OutputSpec:
    """Shape, dtype and memory order of an array to make.

    Parameters
    ----------
    array : array
        An array like it, without gaps.

    Attributes
    ----------
    new : callable
        Does what `empty` does, with nothing said of what memory was missing for.
    """

    __slots__ = ("_dtype", "_shape", "new")

    def __init__(self, array: Any) -> None:
        import cupy

        self._shape, self._dtype = array.shape, array.dtype
        steps = np.cumprod([array.itemsize, *array.shape[:0:-1]])[::-1]
        if array.strides == tuple(steps.tolist()):
            self.new = functools.partial(cupy.ndarray, array.shape, array.dtype)  # as cupy.empty
        else:
            like = array.shape, array.dtype, array.strides, array.nbytes
            self.new = functools.partial(_strided, cupy.ndarray, cupy.cuda.alloc, *like)

    def empty(self) -> Any:
        """Return such an array, uninitialised, on the current device."""
        tape.spoil("an array is made by its spec")
        try:
            return self.new()
        except _out_of_memory() as error:
            _add_note(error, self._shape, self._dtype)
            raise


def _strided(
    ndarray: Any, alloc: Any, shape: tuple[int, ...], dtype: Any, strides: Any, nbytes: int
) -> Any:
    return ndarray(shape, dtype, alloc(nbytes), strides)


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an uninitialised array in C order, on the current device."""
    import cupy

    try:
        made = cupy.ndarray(shape, dtype)
    except _out_of_memory() as error:
        _add_note(error, shape, dtype)
        raise
    if (written := tape.current()) is not None:
        written.allocated(made.data, made.nbytes)
    return made


def memory(size: int) -> Any:
    """Return so many bytes of the current device's memory, as CuPy's arrays have them."""
    import cupy

    try:
        made = cupy.cuda.alloc(size)
    except _out_of_memory() as error:
        _add_note(error, (size,), np.uint8)
        raise
    if (written := tape.current()) is not None:
        written.allocated(made, size)
    return made


def keep_with(array: Any, held: object) -> None:
    """Keep an object as long as an array's memory is held by arrays."""
    weakref.finalize(array if array.base is None else array.base, id, held)


def memory_of(array: Any, begin: int) -> Any:
    """Return the memory of a contiguous array, from one of its bytes on."""
    return array.data + begin


def view(shape: tuple[int, ...], dtype: Any, memory: Any) -> Any:
    """Return an array in C order of memory that is there already."""
    import cupy

    return cupy.ndarray(shape, dtype, memory)


def strided(shape: tuple[int, ...], dtype: Any, memory: Any, strides: tuple[int, ...]) -> Any:
    """Return an array of memory that is there already; strides are in bytes."""
    import cupy

    return cupy.ndarray(shape, dtype, memory, strides)


def _out_of_memory() -> type[Exception]:
    import cupy

    kind: type[Exception] = cupy.cuda.memory.OutOfMemoryError
    return kind


def _add_note(error: Exception, shape: tuple[int, ...], dtype: Any) -> None:
    what = f"an array of shape {tuple(shape)}, dtype {np.dtype(dtype)}"
    error.add_note(f"while cupyflash asked for {what}; every array of the call is as it was")


def _slowest_first(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    # If two strides are equal, an axis of length 1 counts as the faster one.
    return sorted(range(len(shape)), key=lambda axis: (-strides[axis], shape[axis] == 1))


class _Sides(threading.local):
    """The streams of a thread on which `beside` works, by device and by whether it computes."""

    def __init__(self) -> None:
        self.streams: dict[tuple[int, bool], Any] = {}


_sides = _Sides()


def mark() -> Any:
    """Return an event behind all that the current stream was asked for so far."""
    import cupy

    made = cupy.cuda.Event(disable_timing=True)
    made.record(cupy.cuda.get_current_stream())
    if (written := tape.current()) is not None:
        written.marked(made)
    return made


def wait_for(marked: Any) -> None:
    """Let the current stream wait for a mark; the host does not."""
    import cupy

    cupy.cuda.get_current_stream().wait_event(marked)


@contextmanager
def beside(marked: Any, computes: bool = False) -> Iterator[None]:
    """Make another stream the current one for a while; it begins when a mark is reached.

    Memory that is asked for meanwhile is this stream's: no other one gets it later. `computes` says
    that kernels are launched which may wait for SMs. A stream that goes first would let the copies
    of others that go first wait, too, until these kernels have begun.
    """
    import cupy

    device = cupy.cuda.runtime.getDevice()
    side = _sides.streams.get((device, computes))
    if side is None:
        side = cupy.cuda.Stream(non_blocking=True) if computes else quick_stream()
        _sides.streams[device, computes] = side
    side.wait_event(marked)
    written = tape.current()
    with side, nullcontext() if written is None else written.beside(marked, computes):
        yield


def join() -> None:
    """Let the current stream wait for all that was asked for `beside` it."""
    import cupy

    here = cupy.cuda.runtime.getDevice()
    for (device, _), side in _sides.streams.items():
        if device == here:
            made = cupy.cuda.Event(disable_timing=True)
            made.record(side)
            wait_for(made)


def wait_for_current_stream() -> None:
    """Return when everything that the current stream was asked for is done."""
    import cupy

    cupy.cuda.get_current_stream().synchronize()


def memory_order(array: Any, shape: tuple[int, ...]) -> list[int]:
    """Return the axes of a shape as `empty_like` lays them out, the slowest one first."""
    missing = len(shape) - array.ndim
    strides = [*(0,) * missing, *(abs(stride) for stride in array.strides)]
    return _slowest_first(shape, [stride or 2**63 for stride in strides])


def empty_like(array: Any, shape: tuple[int, ...], dtype: Any = None) -> Any:
    """Return an uninitialised array of a shape, with its axes in the memory order of another array.

    `shape` may have more leading axes; these, and axes along which the array repeats itself, become
    the slowest axes. It has the dtype of the other array, too, unless another one is given.
    """
    order = memory_order(array, shape)
    with current(int(array.device.id)):
        made = empty(tuple(shape[axis] for axis in order), array.dtype if dtype is None else dtype)
    return made.transpose([order.index(axis) for axis in range(len(shape))])


MOST_CONSTANTS = 4096  # that are kept; they stay, because graphs may hold their addresses
_constants: dict[tuple[int, tuple[int, ...], bytes], Any] = {}


def constant(array: np.ndarray[Any, Any], name: str, like: Any) -> Any:
    """Return a copy of an argument's few numbers on the device of another array.

    Equal numbers are copied once, and then are there for all streams.
    """
    import cupy

    device = int(like.device.id)
    key = device, array.shape, array.tobytes()
    if (known := _constants.get(key)) is not None:
        return known
    with current(device):
        if is_capturing():
            raise ArgumentError(
                f"{name}: got a number that is not on the device yet, while a CUDA graph is being "
                "captured; expected an array. Pass "
                f"cupy.asarray([[{array.flat[0]}]], cupy.float32), made before the capture, or "
                "call once with this number before it."
            )
        tape.spoil("a number is copied")
        made = cupy.asarray(array)
        wait_for_current_stream()
    if len(_constants) < MOST_CONSTANTS:
        _constants[key] = made
    return made


def to_device(array: Any, dtype: Any) -> Any:
    """Return a contiguous copy of an array, of either memory, in the current device's memory."""
    import cupy

    tape.spoil("an array is copied")
    return cupy.ascontiguousarray(cupy.asarray(array), dtype)
