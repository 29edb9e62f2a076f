"""Messages between GPUs of one machine, moved by copy engines, so that no SM is taken for them.

Each rank has a mailbox in the memory of its GPU: for each peer some slots, and two counters. The
sender copies a chunk of a message to a slot, and counts it at the receiver. The receiver copies it
to where it belongs, and counts that at the sender, which may then fill the slot again. Streams wait
for counters, the host waits for nothing. Memory of users and of CuPy's pool is never shared between
processes, as it may be let go at any time.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..arrays.cuda_device import current, quick_stream
from ..arrays.device_arrays import address
from .communication import Communicator, Message

SLOT = 8 * 2**20  # bytes of a slot: long enough for the link's full rate
SLOTS = 4  # for each peer, so that neither side waits for the other one's counters
_COUNTERS = 256  # bytes in front of the slots: two counters, and what aligns the slots
_ARRIVED, _TAKEN = 0, 128  # where the counters are
_BOX = _COUNTERS + SLOTS * SLOT  # bytes for one peer
_ANY = 4  # cudaMemcpyKind: the driver finds out where memory is
_RELEASE = 2**30  # added to counters when a communicator ends: everything waits for less
_PATIENCE = 2.0  # seconds in which all that waits has to be over in the end
_NAME = secrets.token_hex(16)  # of this process: numbers are those of containers


def _process() -> str:
    """Return a name that no other process has."""
    return _NAME


def _stream_memory_operations() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return functions that let a stream wait until a counter is high enough, and set one."""
    from cuda.bindings import driver

    success = driver.CUresult.CUDA_SUCCESS

    def checked(function: Any) -> Callable[..., None]:
        def call(stream: int, place: int, value: int) -> None:
            (error,) = function(stream, place, value % 2**32, 0)
            if error != success:
                raise RuntimeError(f"{function.__name__}: {error}")

        return call

    return checked(driver.cuStreamWaitValue32), checked(driver.cuStreamWriteValue32)


@dataclass
class _Peer:
    """Another rank.

    Attributes
    ----------
    own, there : int
        Addresses of the box that it fills here, and of the one that this rank fills there.
    sent, received : int
        Chunks so far.
    """

    own: int
    there: int
    sent: int = 0
    received: int = 0


class Peers:
    """The ranks whose GPUs this rank's GPU can write to.

    Parameters
    ----------
    device : int
        The GPU of this rank.
    boxes : dict of int to (int, int)
        Of each peer, the addresses of the box that it fills, and of the box that this rank fills.
    let_go : callable
        Frees the boxes, once nothing uses them.
    """

    def __init__(
        self, device: int, boxes: dict[int, tuple[int, int]], let_go: Callable[[], None]
    ) -> None:
        import cupy

        self._device, self._runtime = device, cupy.cuda.runtime
        self._peers = {rank: _Peer(*both) for rank, both in boxes.items()}
        self._wait, self._write = _stream_memory_operations()
        self._event = cupy.cuda.Event
        with current(device):
            self._out, self._in, self._rescue = (quick_stream() for _ in range(3))
        ending = weakref.finalize(
            self, _end, device, self._out, self._wait, list(self._peers.values()), let_go
        )
        ending.atexit = False  # the process ends, and its memory with it

    def __contains__(self, rank: int) -> bool:
        return rank in self._peers

    def exchange(
        self, begin: Any, sends: Sequence[Message], receives: Sequence[Message]
    ) -> Any:
        """Start to send and to receive behind an event; return one behind all that.

        Chunks are asked for in turns, all first ones at first. A rank's n-th chunk waits for
        earlier ones only, so that ranks never wait for each other in a circle, even if the device
        runs all streams one after the other.
        """
        out, back = self._out, self._in
        for stream in (out, back):
            stream.wait_event(begin)
        steps = [self._chunks(sends), self._chunks(receives)]
        for leave, come in itertools.zip_longest(*steps, fillvalue=()):
            for rank, place, size in leave:
                self._send(rank, place, size)
            for rank, place, size in come:
                self._receive(rank, place, size)
        sent, arrived = (self._event(disable_timing=True) for _ in range(2))
        sent.record(out)
        back.wait_event(sent)
        arrived.record(back)
        return arrived

    def _chunks(self, messages: Sequence[Message]) -> Iterator[list[tuple[int, int, int]]]:
        """Yield the first chunks for all ranks, then the second ones, and so on."""
        of_ranks: dict[int, list[tuple[int, int, int]]] = {}
        for rank, array in messages:
            place, size = address(array), array.size
            chunks = of_ranks.setdefault(rank, [])
            chunks += [
                (rank, place + at, min(SLOT, size - at)) for at in range(0, size, SLOT)
            ]
        for several in itertools.zip_longest(*of_ranks.values()):
            yield [chunk for chunk in several if chunk is not None]

    def _send(self, rank: int, place: int, size: int) -> None:
        peer, stream = self._peers[rank], self._out.ptr
        slot = peer.there + _COUNTERS + peer.sent % SLOTS * SLOT
        if peer.sent >= SLOTS:
            self._wait(stream, peer.own + _TAKEN, peer.sent - SLOTS + 1)
        self._runtime.memcpyAsync(slot, place, size, _ANY, stream)
        peer.sent += 1
        self._write(stream, peer.there + _ARRIVED, peer.sent)

    def _receive(self, rank: int, place: int, size: int) -> None:
        peer, stream = self._peers[rank], self._in.ptr
        slot = peer.own + _COUNTERS + peer.received % SLOTS * SLOT
        peer.received += 1
        self._wait(stream, peer.own + _ARRIVED, peer.received)
        self._runtime.memcpyAsync(place, slot, size, _ANY, stream)
        self._write(stream, peer.there + _TAKEN, peer.received)

    def end(self) -> None:
        """Let nothing wait any more. A peer may still count, so this is said more than once."""
        deadline = time.monotonic() + _PATIENCE
        with current(self._device):
            while not (self._out.done and self._in.done) and time.monotonic() < deadline:
                for peer in self._peers.values():
                    for counter in (_ARRIVED, _TAKEN):
                        value = max(peer.sent, peer.received) + _RELEASE
                        self._write(self._rescue.ptr, peer.own + counter, value)
                time.sleep(1e-3)


def connect(ranks: Communicator, device: int, timeout: float) -> Peers | None:
    """Return the ranks of this machine whose GPUs are connected to this rank's; None if none are.

    All ranks call it.
    """
    mates = [x for x in range(ranks.size) if ranks.nodes[x] == ranks.nodes[ranks.rank]]
    place, offer = _offer(device, len(mates) - 1)
    offers = [json.loads(x) for x in ranks.tell(json.dumps(offer).encode(), timeout)]
    opened = {}
    for rank in mates:
        if place and rank != ranks.rank and (there := _opened(offers[rank], device)):
            opened[rank] = there
    reached = [json.loads(x) for x in ranks.tell(json.dumps(sorted(opened)).encode(), timeout)]
    mutual = [rank for rank in opened if ranks.rank in reached[rank]]
    if not mutual:
        _let_go(device, place, [])
        return None

    def box(whole: int, owner: int, other: int) -> int:
        return whole + (mates.index(other) - (other > owner)) * _BOX

    boxes = {
        rank: (box(place, ranks.rank, rank), box(opened[rank], rank, ranks.rank))
        for rank in mutual
    }
    foreign = [x for rank, x in opened.items() if offers[rank]["process"] != _process()]
    return Peers(device, boxes, lambda: _let_go(device, place, foreign))


def _offer(device: int, peers: int) -> tuple[int, dict[str, Any]]:
    """Return the address of this rank's boxes, 0 if it has none, and what others need to know."""
    offer: dict[str, Any] = {"process": _process(), "device": device}
    try:
        _stream_memory_operations()
        import cupy

        runtime = cupy.cuda.runtime
        if not peers:
            return 0, offer
        with current(device):
            place = runtime.malloc(peers * _BOX)
            runtime.memset(place, 0, peers * _BOX)
            runtime.deviceSynchronize()
            handle = runtime.ipcGetMemHandle(place)
    except Exception as error:  # noqa: BLE001, NCCL serves without it
        return 0, offer | {"why": str(error)}
    return place, offer | {"place": place, "handle": handle.hex()}


def _opened(offer: dict[str, Any], device: int) -> int:
    """Return where a peer's boxes are in this rank's address space; 0 if they cannot be reached."""
    if "place" not in offer:
        return 0
    import cupy

    runtime = cupy.cuda.runtime
    try:
        with current(device):
            if offer["process"] != _process():
                return int(runtime.ipcOpenMemHandle(bytes.fromhex(offer["handle"])))
            peer = offer["device"]
            if peer != device and not runtime.deviceCanAccessPeer(device, peer):
                return 0
            if peer != device:
                _enable(runtime, peer)
            return int(offer["place"])
    except runtime.CUDARuntimeError:
        return 0


_ALREADY = 704  # cudaErrorPeerAccessAlreadyEnabled


def _enable(runtime: Any, peer: int) -> None:
    """Let the current device reach the memory of another one."""
    try:
        runtime.deviceEnablePeerAccess(peer)
    except runtime.CUDARuntimeError as error:
        if error.status != _ALREADY:
            raise


def _end(
    device: int, stream: Any, wait: Callable[..., Any], peers: list[_Peer], let_go: Callable[[], None]
) -> None:
    """Free the boxes when peers have taken all from theirs, and have counted that here."""
    deadline = time.monotonic() + _PATIENCE
    with current(device):
        for peer in peers:
            wait(stream.ptr, peer.own + _TAKEN, peer.sent)
        while not stream.done and time.monotonic() < deadline:
            time.sleep(1e-3)
        if stream.done:
            let_go()


def _let_go(device: int, place: int, foreign: Sequence[int]) -> None:
    """Close the boxes of others, and free the own ones."""
    import cupy

    with current(device):
        for each in foreign:
            cupy.cuda.runtime.ipcCloseMemHandle(each)
        if place:
            cupy.cuda.runtime.free(place)
