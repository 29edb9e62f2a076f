"""Ranks of MPI, by mpi4py. Waiting is done by asking again and again, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentTypeError, DistributedError
from .communication import Message
from .faults import absent, wrong_size

_TELL, _NOTE, _DATA = 1, 2, 3  # tags; exchanges have one each, from the last on
_TAGS = 2**14  # of exchanges; every MPI has as many
_LONGEST_PAUSE = 1e-3  # seconds between two questions
_kept: list[Any] = []  # what MPI may still read or write after the end of a communicator


class Mpi:
    """The ranks of a communicator of mpi4py, which is duplicated.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The communicator.
    """

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise ArgumentTypeError(
                f"communicator: got {type(comm).__name__}; expected an intracommunicator of "
                "mpi4py, as MPI.COMM_WORLD."
            )
        self._mpi = MPI
        self._comm = comm.Dup()
        self.rank, self.size = int(comm.rank), int(comm.size)
        names = self._comm.allgather(MPI.Get_processor_name())
        self.nodes: Sequence[int] = [names.index(name) for name in names]
        self._ended: str | None = None
        self._notes: list[Any] = []
        self._exchanges = 0

    def check(self) -> None:
        """Raise `DistributedError` if a rank gave up."""
        if self._ended is None:
            status = self._mpi.Status()
            if self._comm.Iprobe(self._mpi.ANY_SOURCE, _NOTE, status):
                note = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
                self._comm.Recv([note, self._mpi.BYTE], status.source, _NOTE)
                self._ended = note.tobytes().decode()
        if self._ended is not None:
            raise DistributedError(self._ended)

    def abort(self, reason: str) -> None:
        """End the communicator, and tell every rank why."""
        if self._ended is not None:
            return
        self._ended = reason
        note = np.frombuffer(reason.encode(), np.uint8)
        for rank in self._others():
            self._notes.append((self._comm.Isend([note, self._mpi.BYTE], rank, _NOTE), note))
        _kept.extend(self._notes)

    def tell(self, message: bytes, timeout: float) -> list[bytes]:
        """Return the messages of all ranks."""
        self.check()
        own = np.frombuffer(message, np.uint8)
        sent = [self._comm.Isend([own, self._mpi.BYTE], rank, _TELL) for rank in self._others()]
        told = {self.rank: message}

        def came() -> bool:
            for rank in self._others():
                status = self._mpi.Status()
                if rank not in told and self._comm.Iprobe(rank, _TELL, status):
                    part = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
                    self._comm.Recv([part, self._mpi.BYTE], rank, _TELL)
                    told[rank] = part.tobytes()
            return len(told) == self.size and self._mpi.Request.Testall(sent)

        def missing() -> list[int]:
            return [rank for rank in self._others() if rank not in told] or self._others()

        self.wait_for(came, missing, timeout, "what the ranks agree on", (own, sent))
        return [told[rank] for rank in range(self.size)]

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Transfer:
        """Start to send and to receive."""
        self.check()
        byte, tag = self._mpi.BYTE, _DATA + self._exchanges % _TAGS
        self._exchanges += 1
        received = [self._comm.Irecv([x, byte], rank, tag) for rank, x in receives]
        sent = [self._comm.Isend([x, byte], rank, tag) for rank, x in sends]
        return _Transfer(self, self._mpi, sends, receives, received + sent)

    def wait_for(
        self,
        done: Callable[[], bool],
        missing: Callable[[], list[int]],
        timeout: float,
        what: str,
        used: Any,
    ) -> None:
        """Wait until something is done; if it never is, keep what MPI uses for it."""
        deadline, pause = time.monotonic() + timeout, 0.0
        try:
            while not done():
                self.check()
                if time.monotonic() > deadline:
                    self.abort(absent(self.rank, missing(), timeout, what))
                    self.check()
                time.sleep(pause)
                pause = min(pause + 1e-5, _LONGEST_PAUSE)
        except BaseException:
            _kept.append(used)
            raise

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]


class _Transfer:
    """Requests of MPI, and the memory that they use."""

    def __init__(
        self,
        comm: Mpi,
        mpi: Any,
        sends: Sequence[Message],
        receives: Sequence[Message],
        requests: list[Any],
    ) -> None:
        self._comm, self._mpi = comm, mpi
        self._sends, self._receives, self._requests = sends, receives, requests

    def wait(self, timeout: float, what: str) -> None:
        """Wait for all of them, and check how many bytes came."""
        peers = [rank for rank, _ in (*self._receives, *self._sends)]
        statuses = [self._mpi.Status() for _ in peers]
        open_ones = set(range(len(peers)))

        def done() -> bool:
            for n in sorted(open_ones):
                try:
                    if self._requests[n].Test(statuses[n]):
                        open_ones.discard(n)
                except self._mpi.Exception as error:
                    if error.Get_error_class() != self._mpi.ERR_TRUNCATE:
                        raise
                    self._refuse(n, statuses[n], what)
            return not open_ones

        def missing() -> list[int]:
            return sorted({peers[n] for n in open_ones})

        used = self._requests, self._sends, self._receives
        self._comm.wait_for(done, missing, timeout, what, used)
        for n, (_, target) in enumerate(self._receives):
            if statuses[n].Get_count(self._mpi.BYTE) != target.size:
                self._refuse(n, statuses[n], what)

    def _refuse(self, n: int, status: Any, what: str) -> None:
        """End the communicator because a message does not fit."""
        rank, target = self._receives[n]
        came = max(int(status.Get_count(self._mpi.BYTE)), 0)
        words = str(came) if came < target.size else f"more than {target.size}"
        self._comm.abort(wrong_size(self._comm.rank, rank, words, target.size, what))
        self._comm.check()
