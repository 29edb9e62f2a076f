"""Ranks of MPI, by mpi4py. Waiting is done by asking again and again, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...errors import ArgumentTypeError, DistributedError
from .communication import Message
from .faults import absent, wrong_size

_TELL, _NOTE, _DATA = 1, 2, 3  # tags; from the last one on they are those of `_Tags`
_LONGEST_PAUSE = 1e-3  # seconds between two questions
_kept: list[Any] = []  # communicators that have ended: MPI may still use their memory


class _Tags:
    """Tags of messages, by the number of the exchange and by their size.

    A message of another size than the one that is received would have another tag, so that it is
    not received: where one is too long, not every MPI stops at the end of the memory given.
    """

    def __init__(self, highest: int) -> None:
        bits = (highest - _DATA).bit_length() - 1
        self._exchanges = 1 << (bits // 3)
        self._sizes = (1 << (bits - bits // 3)) - 1  # odd, for sizes differ by powers of 2

    def tag(self, exchange: int, size: int) -> int:
        return _DATA + exchange % self._exchanges * self._sizes + size % self._sizes

    def is_of(self, tag: int, exchange: int) -> bool:
        """Whether a message is one of an exchange, of whatever size."""
        return tag >= _DATA and (tag - _DATA) // self._sizes == exchange % self._exchanges


class Mpi:
    """The ranks of a communicator of mpi4py, which is duplicated.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The communicator.
    """

    takes_device_arrays = False

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise ArgumentTypeError(
                f"communicator: got {type(comm).__name__}; expected an intracommunicator of "
                "mpi4py, as MPI.COMM_WORLD."
            )
        self.mpi, self.comm = MPI, comm.Dup()
        self.rank, self.size = int(comm.rank), int(comm.size)
        names = self.comm.allgather(MPI.Get_processor_name())
        self.nodes: Sequence[int] = [names.index(name) for name in names]
        highest: Any = self.comm.Get_attr(MPI.TAG_UB)
        self.tags = _Tags(int(highest))
        self.in_use: set[Any] = set()  # transfers that have not been waited for
        self._sent: list[Any] = []  # what this rank told last, or its note
        self._exchanges = 0
        self._ended: str | None = None

    def check(self) -> None:
        """Raise `DistributedError` if a rank gave up."""
        if self._ended is None:
            status = self.mpi.Status()
            if self.comm.Iprobe(self.mpi.ANY_SOURCE, _NOTE, status):
                self._end(self._received(status).decode())
        if self._ended is not None:
            raise DistributedError(self._ended)

    def abort(self, reason: str) -> None:
        """End the communicator, and tell every rank why."""
        if self._ended is None:
            self._end(reason)
            self._sent += self._send(reason.encode(), _NOTE)

    def _end(self, reason: str) -> None:
        self._ended = reason
        _kept.append(self)

    def _send(self, message: bytes, tag: int) -> list[Any]:
        """Send bytes to all other ranks; mpi4py's requests keep them."""
        content = [np.frombuffer(message, np.uint8), self.mpi.BYTE]
        return [self.comm.Isend(content, rank, tag) for rank in self._others()]

    def _received(self, status: Any) -> bytes:
        """Return a message that has arrived."""
        content = np.empty(status.Get_count(self.mpi.BYTE), np.uint8)
        self.comm.Recv([content, self.mpi.BYTE], status.source, status.tag)
        return content.tobytes()

    def tell(self, message: bytes, timeout: float) -> list[bytes]:
        """Return the messages of all ranks."""
        self.check()
        self._sent = self._send(message, _TELL)
        told = {self.rank: message}

        def came() -> bool:
            status = self.mpi.Status()
            for rank in self._others():
                if rank not in told and self.comm.Iprobe(rank, _TELL, status):
                    told[rank] = self._received(status)
            return len(told) == self.size and bool(self.mpi.Request.Testall(self._sent))

        def missing() -> list[int]:
            return [rank for rank in self._others() if rank not in told] or self._others()

        self.wait_for(came, missing, timeout, "what the ranks agree on")
        return [told[rank] for rank in range(self.size)]

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Transfer:
        """Start to send and to receive."""
        self.check()
        self._exchanges += 1
        return _Transfer(self, self._exchanges, sends, receives)

    def wait_for(
        self, done: Callable[[], bool], missing: Callable[[], list[int]], timeout: float, what: str
    ) -> None:
        """Wait until something is done."""
        deadline, pause = time.monotonic() + timeout, 0.0
        while not done():
            self.check()
            if time.monotonic() > deadline:
                self.abort(absent(self.rank, missing(), timeout, what))
                self.check()
            time.sleep(pause)
            pause = min(pause + 1e-5, _LONGEST_PAUSE)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]


class _Transfer:
    """Requests of MPI, and the memory that they use."""

    def __init__(
        self, comm: Mpi, exchange: int, sends: Sequence[Message], receives: Sequence[Message]
    ) -> None:
        self._comm, self._exchange = comm, exchange
        self._sends, self._receives = sends, receives
        byte, tag = comm.mpi.BYTE, comm.tags.tag
        self._requests = [
            *(comm.comm.Irecv([x, byte], rank, tag(exchange, x.size)) for rank, x in receives),
            *(comm.comm.Isend([x, byte], rank, tag(exchange, x.size)) for rank, x in sends),
        ]
        comm.in_use.add(self)

    def wait(self, timeout: float, what: str) -> None:
        """Wait for all of them."""
        peers = [rank for rank, _ in (*self._receives, *self._sends)]
        under_way = set(range(len(peers)))

        def done() -> bool:
            for n in sorted(under_way):
                if self._requests[n].Test():
                    under_way.discard(n)
                elif n < len(self._receives):
                    self._check_size(n, what)
            return not under_way

        def missing() -> list[int]:
            return sorted({peers[n] for n in under_way})

        self._comm.wait_for(done, missing, timeout, what)
        self._comm.in_use.discard(self)

    def _check_size(self, n: int, what: str) -> None:
        """End the communicator if a message of another size is there than the one expected."""
        comm, (rank, target) = self._comm, self._receives[n]
        status = comm.mpi.Status()
        there = comm.comm.Iprobe(rank, comm.mpi.ANY_TAG, status)
        if there and comm.tags.is_of(status.tag, self._exchange):
            came = int(status.Get_count(comm.mpi.BYTE))
            if came != target.size:
                comm.abort(wrong_size(comm.rank, rank, came, target.size, what))
                comm.check()
