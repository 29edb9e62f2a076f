"""Where pieces are computed, and how parts of arrays get there and back."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, Self

import numpy as np

from ..arrays import interop
from ..backends.backend import Backend
from ..problem.call import Array, Call

Parts = Mapping[str, Array | None]


class Place(Protocol):
    """A device whose back end computes pieces, and its connection to the arrays of a call."""

    backend: Backend

    def ready(self, call: Call) -> Call:
        """Return the call with the arrays at this place that every piece reads whole."""
        ...

    def feed(self, requests: Iterable[Parts]) -> Iterator[Parts]:
        """Return parts of arrays at this place, one request after the other.

        The parts of a request may be used until the next one is asked for.
        """
        ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialised array at this place."""
        ...

    def has(self, array: Array) -> bool:
        """Return whether an array is in the memory of this place."""
        ...

    def taken(self, array: Array, positions: Sequence[range]) -> Array:
        """Return the elements at some positions of the last axis of an array at this place.

        It is a view if they are one range.
        """
        ...

    def sums(self, owner: Array, dtype: np.dtype[Any]) -> Array:
        """Return zeros with the shape of an array, where that array lives."""
        ...

    def clear(self, array: Array) -> None:
        """Write 0 to an array, wherever it lives."""
        ...

    def add(self, computed: Array, to: Array) -> None:
        """Add what was computed at this place to an array, wherever it lives."""
        ...

    def store(self, computed: Array, to: Array) -> None:
        """Write what was computed at this place, or summed by `add`, to an array, rounded."""
        ...

    def store_all(self, pairs: Sequence[tuple[Array, Array]]) -> None:
        """Write the first array of each pair to the second one; all are at this place."""
        ...

    def store_sum(self, summands: Sequence[Array], to: Array) -> None:
        """Write the sum of arrays, added in their order, to another one, rounded.

        All are where `sums` are; the first one may be changed.
        """
        ...

    def mark(self) -> Any:
        """Return a mark behind all that was asked for; None if that is done, as all that will be.

        What is asked for within `beside` of a mark waits for that only, and not for what follows.
        """
        ...

    def beside(self, mark: Any, computes: bool = False) -> AbstractContextManager[None]:
        """Context: queue work on a side stream that starts after `mark`.

        Transfers go first there. If it `computes`, it has a stream like the caller's.
        """
        ...

    def join(self) -> None:
        """Let what is asked for from here on wait for all that was asked for `beside` it."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None:
        """Wait until the host may read what was added or stored, and change what was read."""


class Host:
    """The memory of the host, where the CPU reads each part in place.

    Parts of files that are mapped to memory are asked for before they are needed.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def ready(self, call: Call) -> Call:
        """Return the call as it is."""
        return call

    def feed(self, requests: Iterable[Parts]) -> Iterator[Parts]:
        """Return the parts as they are; the next ones are being read from their files."""
        ahead: Parts | None = None
        for request in requests:
            for array in request.values():
                if array is not None:
                    _read_ahead(array)
            if ahead is not None:
                yield ahead
            ahead = request
        if ahead is not None:
            yield ahead

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialised array."""
        return np.empty(shape, dtype)

    def has(self, array: Array) -> bool:  # noqa: ARG002, calls on the CPU have no others
        """Return True."""
        return True

    def taken(self, array: Array, positions: Sequence[range]) -> Array:
        """Return the elements at some positions of the last axis."""
        parts = [array[..., x.start : x.stop] for x in positions]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, -1)

    def sums(self, owner: Array, dtype: np.dtype[Any]) -> Array:
        """Return zeros with the shape of an array."""
        return np.zeros(owner.shape, dtype)

    def clear(self, array: Array) -> None:
        """Write 0 to an array."""
        array[...] = 0

    def add(self, computed: Array, to: Array) -> None:
        """Add one array to another."""
        from ..reference.cpu import sums

        sums.add(computed, to)

    def store(self, computed: Array, to: Array) -> None:
        """Write an array to another one, rounded."""
        from ..reference.cpu import sums

        sums.store(computed, to)

    def store_all(self, pairs: Sequence[tuple[Array, Array]]) -> None:
        """Write arrays to other ones."""
        for computed, to in pairs:
            self.store(computed, to)

    def store_sum(self, summands: Sequence[Array], to: Array) -> None:
        """Write the sum of arrays to another one, rounded."""
        first, *others = summands
        for each in others:
            self.add(each, first)
        self.store(first, to)

    def mark(self) -> None:
        """Return None."""

    def join(self) -> None:
        """Return: nothing was asked for elsewhere."""

    def beside(
        self,
        mark: Any,  # noqa: ARG002, there are none
        computes: bool = False,  # noqa: ARG002, likewise
    ) -> AbstractContextManager[None]:
        """Change nothing."""
        return nullcontext()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Return at once: everything was done when it was asked for."""


def _read_ahead(array: Array) -> None:
    """Ask the system to read an array from its file, if it is mapped from one."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if not isinstance(owner, mmap.mmap) or not array.size or not hasattr(mmap, "MADV_WILLNEED"):
        return
    start = np.frombuffer(owner, np.uint8).ctypes.data
    for index in np.ndindex(array.shape[:-2]):
        low, high = interop.span(array[index])
        first = (low - start) // mmap.PAGESIZE * mmap.PAGESIZE
        owner.madvise(mmap.MADV_WILLNEED, first, high - start - first)
