"""Which back end computes a call. It is chosen once, by the type of the call's arrays."""

from __future__ import annotations

from .arrays.device_arrays import is_device_array
from .backends.backend import Backend
from .backends.cpu import Cpu
from .backends.gpu import Gpu
from .problem.call import Array

CPU, GPU = Cpu(), Gpu()


def backend_of(array: Array) -> Backend:
    """Return what computes calls on arrays like this one; all arrays of a call are alike."""
    return GPU if is_device_array(array) else CPU
