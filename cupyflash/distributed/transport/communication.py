"""What ranks need of each other: messages of bytes, a small exchange on the host, an end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from ...problem.call import Array

Message = tuple[int, Array]  # the other rank, and contiguous bytes: an array of uint8


class Transfer(Protocol):
    """Messages that are under way."""

    def wait(self, timeout: float, what: str) -> None:
        """Return when all messages have been received, and what was sent may change.

        If that takes longer than `timeout` seconds, or if a rank gave up, raise `DistributedError`;
        `what` says in words what was being waited for.
        """
        ...


class Exchanger(Protocol):
    """Ranks that exchange messages: a communicator, or some ranks of one."""

    rank: int
    size: int

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        """Start to send and to receive messages."""
        ...


@runtime_checkable
class Communicator(Protocol):
    """The ranks that compute a call together, as one of them sees them.

    Attributes
    ----------
    rank, size : int
        The number of this rank, and how many there are.
    nodes : sequence of int
        The machine of each rank.
    takes_device_arrays : bool
        Whether messages may be arrays of a GPU. Then `exchange` begins with them when what computes
        so far on the current stream is done, and `wait` lets what computes from there on wait, on
        the stream that is the current one then. What is sent and received is kept by the caller.
    """

    rank: int
    size: int
    nodes: Sequence[int]
    takes_device_arrays: bool

    def tell(self, message: bytes, timeout: float) -> list[bytes]:
        """Return the messages of all ranks, in their order; each gives its own one.

        If a rank does not come within `timeout` seconds, or gave up, raise `DistributedError`.
        """
        ...

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        """Start to send and to receive messages.

        All ranks make the same number of exchanges: those of one exchange are only received in the
        same exchange of the other rank, in the order in which they are sent.
        """
        ...

    def abort(self, reason: str) -> None:
        """End this communicator on every rank. Who waits, or calls later, gets the reason."""
        ...

    def check(self) -> None:
        """Raise `DistributedError` if a rank gave up."""
        ...


_kinds: set[type] = set()  # of communicators that were seen: to look at all attributes takes time


def is_communicator(value: object) -> bool:
    """Whether a value is a communicator."""
    kind = type(value)
    if kind not in _kinds and isinstance(value, Communicator):
        _kinds.add(kind)
    return kind in _kinds


def expect(comm: Communicator, timeout: float) -> None:
    """Tell ranks whose messages begin together how long they may wait for each other."""
    told = getattr(comm, "expect", None)
    if told is not None:
        told(timeout)


class Some:
    """Some of the ranks of a communicator, for sums and messages between them.

    All ranks make the same exchanges at the same time, each among those of its own kind.

    Parameters
    ----------
    comm : Exchanger
        All ranks.
    ranks : range
        Those that this rank exchanges messages with, and itself.
    """

    def __init__(self, comm: Exchanger, ranks: range) -> None:
        self._comm, self.ranks = comm, ranks
        self.rank, self.size = ranks.index(comm.rank), len(ranks)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        """Start to send and to receive messages; ranks are counted among these."""
        there, back = (
            [(self.ranks[rank], content) for rank, content in each] for each in (sends, receives)
        )
        return self._comm.exchange(there, back)
