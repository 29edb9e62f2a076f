"""Ranks that are threads of one process, and have a GPU each: they begin their messages together.

What one of them asks of the driver, a kernel to be loaded or memory, may wait for its device, and
keeps the others from asking meanwhile. If that device waits for a message that another one has not
yet begun to send, neither goes on. So no rank begins a message before the others of it are there,
and none goes on before they have begun it.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

_NAME = secrets.token_hex(16)  # numbers of processes are those of containers
_LOOK = 0.05  # seconds between two looks whether a rank gave up


def process() -> str:
    """Return a name that no other process has."""
    return f"{_NAME}-{os.getpid()}"  # a forked child has its parent's token


class Meeting:
    """Where the ranks of one process wait for each other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._came: Counter[tuple[int, int]] = Counter()  # how often a rank came to meet another

    def meet(
        self, rank: int, others: Sequence[int], timeout: float, check: Callable[[], None]
    ) -> list[int]:
        """Wait until others have come to meet a rank as often as it came to meet them.

        Parameters
        ----------
        rank, others : int, sequence of int
            The rank that comes, and whom it meets.
        timeout : float
            Seconds in which they have to come.
        check : callable
            It is called now and then, and raises if a rank gave up.

        Returns
        -------
        list of int
            Those that did not come in time.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            for other in others:
                self._came[rank, other] += 1
            self._changed.notify_all()
        while True:
            check()
            with self._changed:
                missing = self._missing(rank, others)
                if not missing or time.monotonic() > deadline:
                    return missing
                self._changed.wait_for(lambda: not self._missing(rank, others), _LOOK)

    def _missing(self, rank: int, others: Sequence[int]) -> list[int]:
        came = self._came
        return [other for other in others if came[other, rank] < came[rank, other]]


_lock = threading.Lock()
_meetings: WeakValueDictionary[bytes, Meeting] = WeakValueDictionary()


def meeting(name: bytes) -> Meeting:
    """Return where the ranks of this process meet that know a name."""
    with _lock:
        found = _meetings.get(name)
        if found is None:
            found = _meetings[name] = Meeting()
        return found
