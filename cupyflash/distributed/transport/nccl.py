"""Ranks that have a GPU each: arrays of the device travel from GPU to GPU, all else on the host.

They are copied between GPUs of a machine that are connected, and else travel by NCCL. Messages are
ordered by events, and the host waits for none of them; ranks that are threads of one process begin
theirs together. A thread looks whether they arrive in time and whether another rank gave up, and
then ends what is under way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...arrays.cuda_device import current, quick_stream
from ...arrays.device_arrays import is_device_array
from ...errors import DistributedError
from . import meeting
from .communication import Communicator, Message, Transfer
from .faults import absent
from .peers import Peers, Span, connect, spans

_PAUSE = 2e-3  # seconds between two looks at what is under way
_IDLE = 1.0  # seconds without anything under way, after which the thread ends
_ID = 60.0  # seconds in which all ranks have to begin
_TIMEOUT = 300.0  # seconds in which the ranks of a process come to a message, unless told


class Nccl:
    """The GPUs of some ranks.

    Parameters
    ----------
    ranks : Communicator
        The ranks. They agree by it, and arrays in host memory travel by it.
    device : int
        The GPU of this rank; each rank has another one.
    copies : bool
        Whether it copies to connected GPUs of its machine.

    Attributes
    ----------
    copies : bool
        Whether all messages are copied, so that kernels need not leave SMs to what sends them.
    """

    takes_device_arrays = True

    def __init__(self, ranks: Communicator, device: int, copies: bool = True) -> None:
        import cupy
        from cupy.cuda import nccl

        self._host, self._nccl, self._device = ranks, nccl, device
        self.rank, self.size, self.nodes = ranks.rank, ranks.size, ranks.nodes
        self._speaking = threading.RLock()  # the host's ranks are asked by one thread at a time
        own = b"" if self.rank else nccl.get_unique_id()
        unique = ranks.tell(own, _ID)[0]
        with current(device):
            self._comm = nccl.NcclCommunicator(self.size, unique, self.rank)
            self._cuda = cupy.cuda
            self._stream = quick_stream()
        self._timeout = _TIMEOUT
        processes = ranks.tell(str(meeting.process()).encode(), _ID)
        mates = [x for x in range(self.size) if processes[x] == processes[self.rank]]
        self._mates = frozenset(mates) - {self.rank}  # the other ranks of this process
        self._meeting = meeting.meeting(unique)
        self._peers: Peers | None = connect(ranks, device, _ID, copies)
        others = (rank for rank in range(self.size) if rank != self.rank)
        self.copies = self._peers is not None and all(rank in self._peers for rank in others)
        self._watch = _Watch(self)

    def check(self) -> None:
        """Raise `DistributedError` if a rank gave up."""
        with self._speaking:
            self._host.check()

    def abort(self, reason: str) -> None:
        """End the communicator on every rank, and what NCCL is doing on this one."""
        with self._speaking:
            self._host.abort(reason)
        self.end()

    def end(self) -> None:
        """End what is under way: what waits on the device for a rank that does not come."""
        comm, self._comm = self._comm, None
        if comm is not None:
            if self._peers is not None:
                self._peers.end()
            comm.abort()

    def tell(self, message: bytes, timeout: float) -> list[bytes]:
        """Return the messages of all ranks."""
        with self._speaking:
            return self._host.tell(message, timeout)

    def expect(self, timeout: float) -> None:
        """Let messages from here on take so many seconds to be begun on the other ranks."""
        self._timeout = timeout

    def synchronize(self, timeout: float = 300.0) -> None:
        """Wait until all messages have arrived; raise `DistributedError` if a rank gave up."""
        self._watch.wait(timeout)
        self.check()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        """Start to send and to receive; the device begins when what computes so far is done."""
        if not any(is_device_array(array) for _, array in (*sends, *receives)):
            with self._speaking:
                return self._host.exchange(sends, receives)
        return self.exchange_spans(spans(sends), spans(receives))

    def exchange_spans(self, sends: Sequence[Span], receives: Sequence[Span]) -> Transfer:
        """Start to send and to receive what lies at some addresses of the device."""
        self.check()
        assert self._comm is not None
        with current(self._device):
            stream, peers = self._cuda.get_current_stream(), self._peers
            begin = self._event(stream)
            if peers is None:
                arrived = self._by_nccl(begin, sends, receives)
            else:
                if stream.is_capturing():
                    raise DistributedError(
                        "a call over ranks was made while a CUDA graph is being captured; expected "
                        "none: what GPUs of a machine count with would be the same in every replay"
                    )
                near = [[x for x in each if x[0] in peers] for each in (sends, receives)]
                far = [[x for x in each if x[0] not in peers] for each in (sends, receives)]
                copied = peers.exchange(begin, *near) if any(near) else begin
                arrived = self._by_nccl(copied, *far) if any(far) else copied
        return _Transfer(self, arrived, sorted({x[0] for x in (*sends, *receives)}))

    def _by_nccl(self, begin: Any, sends: Sequence[Span], receives: Sequence[Span]) -> Any:
        """Start to send and to receive by NCCL behind an event; return one behind all that."""
        comm, nccl, stream = self._comm, self._nccl, self._stream
        assert comm is not None
        stream.wait_event(begin)
        mates = sorted({rank for rank, _, size in (*sends, *receives) if size} & self._mates)
        self._meet(mates)
        nccl.groupStart()
        try:
            for rank, place, size in sends:
                if size:
                    comm.send(place, size, nccl.NCCL_UINT8, rank, stream.ptr)
            for rank, place, size in receives:
                if size:
                    comm.recv(place, size, nccl.NCCL_UINT8, rank, stream.ptr)
        finally:
            nccl.groupEnd()
        self._meet(mates)
        return self._event(stream)

    def _meet(self, mates: list[int]) -> None:
        """Wait until other ranks of this process are here, too."""
        if not mates:
            return
        missing = self._meeting.meet(self.rank, mates, self._timeout, self.check)
        if missing:
            what = "the ranks of a process begin messages together"
            self.abort(absent(self.rank, missing, self._timeout, what))
        self.check()  # another rank may have given up meanwhile

    def let_wait(self, arrived: Any) -> None:
        """Let what the current stream is asked for from here on wait for messages."""
        with current(self._device):
            self._cuda.get_current_stream().wait_event(arrived)

    def watch(self, arrived: Any, peers: list[int], timeout: float, what: str) -> None:
        """Look after a message until it has arrived."""
        self._watch.add(_UnderWay(arrived, time.monotonic() + timeout, peers, timeout, what))

    def gave_up(self) -> bool:
        """Return whether a rank gave up, if nobody else is asking just now."""
        if not self._speaking.acquire(blocking=False):
            return False
        try:
            self._host.check()
        except DistributedError:
            return True
        finally:
            self._speaking.release()
        return False

    def _event(self, stream: Any) -> Any:
        event = self._cuda.Event(disable_timing=True)
        event.record(stream)
        return event


class _Transfer:
    """Messages on the stream of a device."""

    def __init__(self, comm: Nccl, arrived: Any, peers: list[int]) -> None:
        self._comm, self._arrived, self._peers = comm, arrived, peers

    def wait(self, timeout: float, what: str) -> None:
        """Let what computes from here on wait for the messages."""
        self._comm.let_wait(self._arrived)
        self._comm.watch(self._arrived, self._peers, timeout, what)


class _UnderWay(NamedTuple):
    """Messages that have not been seen to arrive."""

    arrived: Any
    deadline: float
    peers: list[int]
    timeout: float
    what: str


class _Watch:
    """A thread that looks after messages as long as there are any."""

    def __init__(self, comm: Nccl) -> None:
        self._comm = comm
        self._changed = threading.Condition()
        self._under_way: deque[_UnderWay] = deque()
        self._runs = False

    def add(self, message: _UnderWay) -> None:
        """Look after a message, too. The thread is not woken: it would take turns with this one."""
        with self._changed:
            self._under_way.append(message)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, daemon=True, name="cupyflash-nccl").start()

    def wait(self, timeout: float) -> None:
        """Wait until nothing is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way, timeout)

    def _run(self) -> None:
        busy = time.monotonic()
        while True:
            with self._changed:
                oldest = self._under_way[0] if self._under_way else None
                if oldest is None and time.monotonic() > busy + _IDLE:
                    self._runs = False
                    return
            if oldest is None:
                time.sleep(_PAUSE)
                continue
            busy = time.monotonic()
            if oldest.arrived.done:
                with self._changed:
                    self._under_way.popleft()
                    self._changed.notify_all()
                continue
            if self._comm.gave_up():
                self._comm.end()
            elif time.monotonic() > oldest.deadline:
                reason = absent(self._comm.rank, oldest.peers, oldest.timeout, oldest.what)
                self._comm.abort(reason)
            else:
                time.sleep(_PAUSE)
                continue
            with self._changed:
                self._under_way.clear()
                self._changed.notify_all()
