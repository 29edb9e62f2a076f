"""What each stream of a GPU has for itself, a copy of an array in host memory, say."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

MOST_STREAMS = 8
_PER_THREAD = 2  # the default stream that each thread has for itself


class PerStream(Generic[T]):
    """One thing for each stream of a device: it is made, read and freed in the stream's order.

    So nobody waits for it. If there are more than `MOST_STREAMS`, all of them are forgotten.
    """

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[Any, T] = {}

    def of(self, stream: int, make: Callable[[], T]) -> T:
        """Return that of the current stream, at this address; `make` makes the first one."""
        key = (stream, threading.get_ident()) if stream == _PER_THREAD else stream
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= MOST_STREAMS:
                self._made.clear()
            found = self._made[key] = make()
        return found
