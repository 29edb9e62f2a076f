"""Arrays of host memory that the launches of a recipe read on a device."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..arrays import device_arrays
from ..arrays.per_stream import PerStream
from ..problem.call import Array


class Upload(NamedTuple):
    """A copy for one stream.

    Attributes
    ----------
    addresses : mapping of str to int
        Where each array is, by name.
    owner : Any
        The memory. Whoever launches keeps it until then.
    """

    addresses: Mapping[str, int]
    owner: Any


class Uploads:
    """Short arrays, of which each stream that reads them has a copy in device memory.

    Parameters
    ----------
    arrays : mapping of str to numpy.ndarray
        Arrays of int64, which nobody changes.
    """

    __slots__ = ("_arrays", "_copies")

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays
        self._copies: PerStream[Upload] = PerStream()

    def of(self, stream: int) -> Upload:
        """Return the copy for the current device's current stream, at this address."""
        return self._copies.of(stream, self._made)

    def _made(self) -> Upload:
        joined = np.concatenate(list(self._arrays.values()))
        memory = device_arrays.to_device(joined, joined.dtype)
        begin = device_arrays.address(memory)
        return Upload({name: begin + place for name, place in self.places.items()}, memory)

    @property
    def places(self) -> dict[str, int]:
        """Where each array lies in the memory of a copy."""
        ends = itertools.accumulate(array.nbytes for array in self._arrays.values())
        return dict(zip(self._arrays, (0, *ends), strict=False))
