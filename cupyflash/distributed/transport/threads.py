"""Ranks that are threads of one process: for tests, and to try a program without MPI."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ...arrays import device_arrays, elementwise
from ...arrays.device_arrays import is_device_array
from ...arrays.integers import integer
from ...errors import ArgumentError, ArgumentTypeError, DistributedError
from ...problem.call import Array
from .communication import Message
from .faults import absent, gave_up, wrong_size

T = TypeVar("T")
_TELL = 0  # the number of no exchange


class Threads:
    """Ranks in one process.

    Parameters
    ----------
    size : int
        The number of ranks.
    nodes : int
        How many machines they are taken to be on, as many ranks on each.

    Attributes
    ----------
    ranks : tuple of Communicator
        The ranks. Each is used by one thread at a time.
    """

    def __init__(self, size: int, nodes: int = 1) -> None:
        ranks, machines = integer(size), integer(nodes)
        if ranks is None:
            raise ArgumentTypeError(f"Threads: got {size!r}; expected a number of ranks.")
        if ranks < 1:
            raise ArgumentError(f"Threads: got {size} ranks; expected 1 or more.")
        if machines is None:
            raise ArgumentTypeError(f"nodes: got {nodes!r}; expected a number of machines.")
        if machines < 1 or ranks % machines:
            raise ArgumentError(f"nodes: got {nodes} for {size} ranks; expected a divisor.")
        shared = _Shared(tuple(rank * machines // ranks for rank in range(ranks)))
        self.ranks = tuple(_Rank(rank, ranks, shared) for rank in range(ranks))

    def run(self, function: Callable[[Any], T]) -> list[T]:
        """Call a function on every rank at once.

        Parameters
        ----------
        function : callable
            It gets the rank's communicator. If it raises on one rank, the others are ended. If a
            signal's handler raises while the caller waits, all are ended, and it waits for them.

        Returns
        -------
        list
            What it returned on each rank.
        """
        results: list[Any] = [None] * len(self.ranks)
        errors: list[tuple[float, BaseException]] = []

        def call(comm: _Rank) -> None:
            try:
                results[comm.rank] = function(comm)
            except BaseException as error:  # noqa: BLE001, it is raised again below
                errors.append((time.monotonic(), error))
                comm.abort(gave_up(comm.rank, error))

        threads = [threading.Thread(target=call, args=(comm,)) for comm in self.ranks]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # from a signal: end the ranks, and wait for what they do
            self.ranks[0].abort(gave_up(0, error))
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            raise
        if errors:
            raise min(errors, key=lambda x: x[0])[1]
        return results


class _Shared:
    """What the ranks of a process share."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self.nodes = nodes
        self.changed = threading.Condition()
        # By sender, receiver and the number of the exchange; what ranks tell each other has none.
        self.boxes: defaultdict[tuple[int, int, int], deque[Any]] = defaultdict(deque)
        self.ended: str | None = None


class _Rank:
    """One of the ranks of `Threads`."""

    takes_device_arrays = True

    def __init__(self, rank: int, size: int, shared: _Shared) -> None:
        self.rank, self.size = rank, size
        self.nodes = shared.nodes
        self.shared = shared
        self._exchanges = 0

    def check(self) -> None:
        """Raise `DistributedError` if a rank gave up."""
        if self.shared.ended is not None:
            raise DistributedError(self.shared.ended)

    def abort(self, reason: str) -> None:
        """End the communicator; the first reason stays."""
        with self.shared.changed:
            if self.shared.ended is None:
                self.shared.ended = reason
            self.shared.changed.notify_all()

    def tell(self, message: bytes, timeout: float) -> list[bytes]:
        """Return the messages of all ranks."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        self._send(_TELL, [(rank, message) for rank in others])
        told: dict[int, bytes] = self.receive(_TELL, others, timeout, "what the ranks agree on")
        return [told.get(rank, message) for rank in range(self.size)]

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Transfer:
        """Send copies at once; receive when it is waited for."""
        self._exchanges += 1
        self._send(self._exchanges, [(rank, _copy(message)) for rank, message in sends])
        return _Transfer(self, self._exchanges, receives)

    def _send(self, exchange: int, messages: Sequence[tuple[int, Any]]) -> None:
        with self.shared.changed:
            self.check()
            for rank, message in messages:
                self.shared.boxes[self.rank, rank, exchange].append(message)
            self.shared.changed.notify_all()

    def receive(
        self,
        exchange: int,
        ranks: Sequence[int],
        timeout: float,
        what: str,
        left: float | None = None,
    ) -> dict[int, Any]:
        """Return the next message of each rank; `left` is what is left of the timeout."""
        with self.shared.changed:
            boxes = {rank: self.shared.boxes[rank, self.rank, exchange] for rank in ranks}
            self.shared.changed.wait_for(
                lambda: self.shared.ended is not None or all(boxes.values()),
                timeout if left is None else left,
            )
            self.check()
            missing = [rank for rank, box in boxes.items() if not box]
            if missing:
                self.abort(absent(self.rank, missing, timeout, what))
                self.check()
            came = {rank: box.popleft() for rank, box in boxes.items()}
            for rank in [rank for rank, box in boxes.items() if not box]:
                del self.shared.boxes[rank, self.rank, exchange]
            return came


def _copy(message: Any) -> Array:
    """Return a copy; one of a device is complete, so that any stream may read it."""
    if not is_device_array(message):
        own: Array = message.copy()
        return own
    with message.device:
        made: Array = device_arrays.empty(message.shape, message.dtype)
        elementwise.convert(message, made)
        device_arrays.wait_for_current_stream()
    return made


class _Transfer:
    """Messages that have been sent, and that are to be received."""

    def __init__(self, comm: _Rank, exchange: int, receives: Sequence[Message]) -> None:
        self._comm, self._exchange, self._receives = comm, exchange, receives

    def wait(self, timeout: float, what: str) -> None:
        """Receive the messages."""
        deadline = time.monotonic() + timeout
        for rank, target in self._receives:
            left = max(deadline - time.monotonic(), 0)
            came: Array = self._comm.receive(self._exchange, [rank], timeout, what, left)[rank]
            if came.size != target.size:
                self._comm.abort(wrong_size(self._comm.rank, rank, came.size, target.size, what))
                self._comm.check()
            if is_device_array(target):
                elementwise.convert(came, target)
            else:
                target[...] = came
