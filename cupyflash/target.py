"""What a GPU is: frozen facts, and the few things that only CuPy can say or do with its arrays.

CuPy is imported when one of these functions is called, and `is_device_array` does not even then:
an object is a CuPy array only where CuPy has been imported already.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

MAX_GRID = 2**31 - 1  # blocks of one launch, along x
OLDEST_CAPABILITY = (7, 5)  # Turing's; for older ones the kernels are never compiled in tests


@dataclass(frozen=True)
class Target:
    """Facts about one device.

    Attributes
    ----------
    device : int
        Its number in this process.
    name : str
        As the driver calls it.
    capability : tuple of int
        Compute capability, (9, 0) for Hopper.
    multiprocessors : int
        How many there are.
    shared_memory : int
        Bytes of shared memory that one block may have.
    lacks : str
        What kernels for compute capability 9.0 alone need and is not installed, in words.
    """

    device: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    lacks: str = ""


@functools.cache
def of(device: int) -> Target:
    """Return the facts of a device of this process."""
    import cupy

    facts = cupy.cuda.runtime.getDeviceProperties(device)
    return Target(
        device=device,
        name=facts["name"].decode(),
        capability=(int(facts["major"]), int(facts["minor"])),
        multiprocessors=int(facts["multiProcessorCount"]),
        shared_memory=int(facts["sharedMemPerBlockOptin"]),
        lacks=_lacks(),
    )


_HOPPER_NVRTC = (12, 9)  # the first that compiles for sm_90a where CuPy asks for sm_90


def _lacks() -> str:
    import cupy

    version = tuple(cupy.cuda.nvrtc.getVersion())
    if version < _HOPPER_NVRTC:
        came, wanted = (".".join(map(str, x)) for x in (version, _HOPPER_NVRTC))
        return f"NVRTC is {came} and not {wanted}"
    if importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed"
    return ""


def here() -> Target:
    """Return the facts of the current device."""
    import cupy

    return of(int(cupy.cuda.runtime.getDevice()))


def is_device_array(value: Any) -> bool:
    """Whether a value is a CuPy array."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, getattr(cupy, "ndarray", ()))


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


def read_back(array: Any) -> np.ndarray[Any, Any]:
    """Copy an array to host memory, and wait for it."""
    with array.device:
        return np.asarray(array.get())


def is_capturing() -> bool:
    """Whether the current device's current stream records a CUDA graph."""
    import cupy

    return bool(cupy.cuda.get_current_stream().is_capturing())


def synchronize() -> None:
    """Wait for the current device's current stream."""
    import cupy

    cupy.cuda.get_current_stream().synchronize()


def current(device: int) -> AbstractContextManager[Any]:
    """Make a device the current one for a while; quick where it is already."""
    import cupy

    return _HERE if cupy.cuda.runtime.getDevice() == device else cupy.cuda.Device(device)


_HERE: AbstractContextManager[Any] = nullcontext()


class Form(NamedTuple):
    """Shape, dtype and memory order of an array that is to be made.

    Attributes
    ----------
    shape : tuple of int
        As in memory, the slowest axis first.
    dtype : numpy.dtype
        Of its elements.
    axes : tuple of int or None
        The axes of the array in those of `shape`; None where they are the same.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[int, ...] | None

    @staticmethod
    def of(array: Any) -> Form:
        """Return the form of an array without gaps."""
        order = _slowest_first(array.shape, array.strides)
        axes = tuple(order.index(axis) for axis in range(array.ndim))
        shape = tuple(array.shape[axis] for axis in order)
        return Form(shape, array.dtype, None if axes == tuple(range(array.ndim)) else axes)

    def empty(self) -> Any:
        """Return such an array, uninitialised, on the current device."""
        made = empty(self.shape, self.dtype)
        return made if self.axes is None else made.transpose(self.axes)


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an uninitialised array in C order, on the current device."""
    import cupy

    try:
        return cupy.ndarray(shape, dtype)  # what cupy.empty calls
    except cupy.cuda.memory.OutOfMemoryError as error:
        error.add_note(
            f"while cupyflash asked for an array of shape {tuple(shape)}, dtype {np.dtype(dtype)}; "
            "every array of the call is as it was"
        )
        raise


def _slowest_first(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    # Of two equal strides, that of an axis of length 1 belongs to the faster axis.
    return sorted(range(len(shape)), key=lambda axis: (-strides[axis], shape[axis] == 1))


def fill(array: Any, value: float) -> None:
    """Write one number to every element."""
    with array.device:
        array.fill(value)


def empty_like(array: Any, shape: tuple[int, ...]) -> Any:
    """Return an uninitialised array of a shape, with the axes in memory as those of an array.

    `shape` may have more leading axes; they, and axes along which the array repeats itself, lie
    farthest apart.
    """
    missing = len(shape) - array.ndim
    strides = [*(0,) * missing, *(abs(stride) for stride in array.strides)]
    order = _slowest_first(shape, [stride or 2**63 for stride in strides])
    with current(int(array.device.id)):
        made = empty(tuple(shape[axis] for axis in order), array.dtype)
    return made.transpose([order.index(axis) for axis in range(len(shape))])


def to_device(array: Any, dtype: Any) -> Any:
    """Return a contiguous copy of an array, of either memory, in the current device's memory."""
    import cupy

    return cupy.ascontiguousarray(cupy.asarray(array), dtype)
