"""What arrays in device memory held, compared with what such arrays hold later.

The device compares, behind what it was asked for before. Nothing has to be copied to the host but a
word, for which the host waits when it wants to know.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import tape


@functools.cache
def _comparison() -> Any:
    import cupy

    return cupy.ElementwiseKernel(
        "T x, T y", "raw uint64 differs", "if (x != y) differs[0] = 1", "cupyflash_compare"
    )


class Contents:
    """What arrays of the current device hold when this is made.

    Parameters
    ----------
    arrays : sequence of array
        The arrays. Each has elements.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        import cupy

        self._held = [_bits(x).copy() for x in arrays]
        pinned = cupy.cuda.alloc_pinned_memory(8)
        self._word = np.frombuffer(pinned, np.uint64, 1)
        device = int(arrays[0].device.id)
        memory = cupy.cuda.UnownedMemory(int(pinned.ptr), 8, pinned, device)
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        self._differs = cupy.ndarray((1,), np.uint64, pointer)
        self._compared: Any = None

    def compare(self, arrays: Sequence[Any]) -> None:
        """Ask the current stream to compare arrays of the same shapes and dtypes with these."""
        import cupy

        self._word[0] = 0
        with tape.paused():
            for held, array in zip(self._held, arrays, strict=True):
                _comparison()(held, _bits(array), self._differs)
            self._compared = cupy.cuda.Event(disable_timing=True)
            self._compared.record(cupy.cuda.get_current_stream())

    def are_same(self) -> bool:
        """Wait until they are compared, and return whether all bits are equal."""
        self._compared.synchronize()
        return not self._word[0]


def _bits(array: Any) -> Any:
    return array.view(np.dtype(f"u{array.itemsize}"))
