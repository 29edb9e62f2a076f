"""What a GPU is: frozen facts, its current stream, and whether it is the current device.

CuPy is imported when one of these functions is called.
"""

from __future__ import annotations

import functools
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

MAX_GRID = 2**31 - 1  # blocks of one launch, along x
OLDEST_CAPABILITY = (7, 5)  # Turing's; tests never compile the kernels for older ones


@dataclass(frozen=True)
class Target:
    """Facts about one device.

    Attributes
    ----------
    device : int
        Its number in this process.
    name : str
        The driver's name for it.
    capability : tuple of int
        Compute capability, (9, 0) for Hopper.
    multiprocessors : int
        Number of SMs.
    shared_memory : int
        Bytes of shared memory that one block may have.
    lacks : str
        In words, what the kernels for compute capability 9.0 only need but is not installed.
    """

    device: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    lacks: str = ""


def has_cupy() -> bool:
    """Whether CuPy can be imported, without which no kernel runs on a GPU."""
    try:
        import cupy  # noqa: F401, whether it can be is the question
    except ImportError:
        return False
    return True


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


_HOPPER_NVRTC = (12, 9)  # the first that compiles for sm_90a if CuPy asks for sm_90


def _lacks() -> str:
    import cupy

    version = tuple(cupy.cuda.nvrtc.getVersion())
    if version < _HOPPER_NVRTC:
        came, wanted = (".".join(map(str, x)) for x in (version, _HOPPER_NVRTC))
        return f"NVRTC is {came} and not {wanted}"
    try:
        found = importlib.util.find_spec("cuda.bindings")
    except ModuleNotFoundError:  # of `cuda`
        found = None
    return "" if found else "cuda-bindings is not installed"


def here() -> Target:
    """Return the facts of the current device."""
    import cupy

    return of(int(cupy.cuda.runtime.getDevice()))


def is_capturing() -> bool:
    """Whether the current device's current stream records a CUDA graph."""
    import cupy

    return bool(cupy.cuda.get_current_stream().is_capturing())


def current_stream() -> int:
    """Return the address of the current device's current stream."""
    import cupy

    return int(cupy.cuda.get_current_stream().ptr)


def synchronize() -> None:
    """Wait for the current device's current stream."""
    import cupy

    cupy.cuda.get_current_stream().synchronize()


_HIGHEST = -5  # priority of a stream; CUDA takes its own highest one, if that is lower


def quick_stream() -> Any:
    """Return a new stream of the current device.

    Its work begins as soon as an SM is free, though that of other streams waits for SMs, too.
    """
    import cupy

    return cupy.cuda.Stream(non_blocking=True, priority=_HIGHEST)


def current(device: int) -> AbstractContextManager[Any]:
    """Make a device the current one for a while; quick where it is already."""
    import cupy

    return _HERE if cupy.cuda.runtime.getDevice() == device else cupy.cuda.Device(device)


_HERE: AbstractContextManager[Any] = nullcontext()
