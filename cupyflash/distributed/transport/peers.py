"""Messages between GPUs of one machine, moved by copy engines: the way takes no SMs.

Each rank has a mailbox in the memory of its GPU: for each peer some slots, and two counters. The
sender copies a chunk of a message to a slot, and counts it at the receiver. The receiver copies it
to where it belongs, and counts that at the sender, which may then fill the slot again. Streams wait
for counters, the host waits for nothing. Memory of users and of CuPy's pool is never shared between
processes, as it may be let go at any time.
"""

from __future__ import annotations

import itertools
import json
import operator
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...arrays.cuda_device import current, quick_stream
from ...arrays.device_arrays import address
from . import meeting
from .communication import Communicator, Message

SLOT = 16 * 2**20  # bytes of a slot: long enough for the link's full rate
SLOTS = 4  # for each peer, so that neither side waits for the other one's counters
_COUNTERS = 256  # bytes in front of the slots: two counters, and what aligns the slots
_ARRIVED, _TAKEN = 0, 128  # where the counters are
_BOX = _COUNTERS + SLOTS * SLOT  # bytes for one peer
Span = tuple[int, int, int]  # a rank, and the address and the number of bytes for it, or from it

BLOCK = 64 * 2**10  # bytes in a row from which on rows are sent from where they are, or received
_RELEASE = 2**30  # added to counters when a communicator ends: everything waits for less
_PATIENCE = 2.0  # seconds in which all that waits has to be over in the end


class _Stream:
    """What a stream is asked for, by the driver: copies between GPUs and within one, counters."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.stream = quick_stream()
        self._driver, self._place = driver, driver.CUdeviceptr
        attributes = driver.CUmemcpyAttributes()
        attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        # Drivers that heed it take no SMs for copies within a device; that for CUDA 13.0 does not.
        attributes.flags = driver.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE.value
        self._attributes = [attributes]

    def copy(self, parts: Sequence[_Part], place: int, leaves: bool) -> None:
        """Copy parts to one place in a row, or from there.

        The driver refuses a part that lies in two pieces of memory, though they adjoin.
        """
        there = [self._place(place + part.at) for part in parts]
        here = [self._place(part.place) for part in parts]
        sizes = [part.size for part in parts]
        both = (there, here) if leaves else (here, there)
        self._asked(
            self._driver.cuMemcpyBatchAsync,
            *both, sizes, len(sizes), self._attributes, [0], 1, self.stream.ptr,
        )  # fmt: skip

    def wait(self, counter: int, value: int) -> None:
        """Wait until a counter is as high as a value, or higher."""
        self._asked(self._driver.cuStreamWaitValue32, self.stream.ptr, counter, value % 2**32, 0)

    def count(self, counter: int, value: int) -> None:
        """Set a counter."""
        self._asked(self._driver.cuStreamWriteValue32, self.stream.ptr, counter, value % 2**32, 0)

    def _asked(self, function: Any, *arguments: Any) -> None:
        (error,) = function(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{function.__name__}: {error}")


class _Part(NamedTuple):
    """Bytes in a row, of a chunk.

    Attributes
    ----------
    place : int
        Their address.
    at, size : int
        Where they begin in the chunk, and how many there are.
    """

    place: int
    at: int
    size: int


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
        self._device = device
        self._peers = {rank: _Peer(*box) for rank, box in boxes.items()}
        with current(device):
            self._out, self._in, self._rescue = (_Stream() for _ in range(3))
        ending = weakref.finalize(
            self, _end, device, self._out, self._in, list(self._peers.values()), let_go
        )
        ending.atexit = False  # the process ends, and its memory with it

    def __contains__(self, rank: int) -> bool:
        return rank in self._peers

    def exchange(self, begin: Any, sends: Sequence[Span], receives: Sequence[Span]) -> Any:
        """Start to send and to receive behind an event; return one behind all that.

        Messages to one rank are one row of bytes. Chunks are asked for in turns, all first ones at
        first. A rank's n-th chunk waits for earlier ones only, so that ranks never wait for each
        other in a circle, even if the device runs all streams one after the other.
        """
        out, back = self._out, self._in
        for each in (out, back):
            each.stream.wait_event(begin)
        steps = [_chunks(sends), _chunks(receives)]
        for leave, come in itertools.zip_longest(*steps, fillvalue=()):
            for rank, parts in leave:
                self._send(self._peers[rank], parts)
            for rank, parts in come:
                self._receive(self._peers[rank], parts)
        back.stream.wait_event(_event(out.stream))
        return _event(back.stream)

    def _send(self, peer: _Peer, parts: Sequence[_Part]) -> None:
        if peer.sent >= SLOTS:
            self._out.wait(peer.own + _TAKEN, peer.sent - SLOTS + 1)
        self._out.copy(parts, peer.there + _COUNTERS + peer.sent % SLOTS * SLOT, True)
        peer.sent += 1
        self._out.count(peer.there + _ARRIVED, peer.sent)

    def _receive(self, peer: _Peer, parts: Sequence[_Part]) -> None:
        self._in.wait(peer.own + _ARRIVED, peer.received + 1)
        self._in.copy(parts, peer.own + _COUNTERS + peer.received % SLOTS * SLOT, False)
        peer.received += 1
        self._in.count(peer.there + _TAKEN, peer.received)

    def end(self) -> None:
        """Let nothing wait any more. A peer may still count, so this is said more than once."""
        deadline = time.monotonic() + _PATIENCE
        with current(self._device):
            while not (self._out.stream.done and self._in.stream.done):
                for peer in self._peers.values():
                    for counter in (_ARRIVED, _TAKEN):
                        value = max(peer.sent, peer.received) + _RELEASE
                        self._rescue.count(peer.own + counter, value)
                if time.monotonic() > deadline:
                    break
                time.sleep(1e-3)


def in_blocks(array: Any) -> bool:
    """Return whether an array can be sent from where it is: its rows lie in long blocks."""
    *_, rows, columns = array.shape
    steps = columns * array.itemsize, array.itemsize
    return bool(array.strides[-2:] == steps and rows * columns * array.itemsize >= BLOCK)


def _chunks(spans: Sequence[Span]) -> Iterator[list[tuple[int, list[_Part]]]]:
    """Yield the first chunks for all ranks, then the second ones, and so on."""
    of_ranks: dict[int, list[list[_Part]]] = {}
    room: dict[int, int] = {}  # in a rank's last chunk
    for rank, place, size in spans:
        chunks = of_ranks.setdefault(rank, [])
        done = 0
        while done < size:
            if not room.get(rank):
                chunks.append([])
                room[rank] = SLOT
            some = min(size - done, room[rank])
            chunks[-1].append(_Part(place + done, SLOT - room[rank], some))
            done, room[rank] = done + some, room[rank] - some
    for several in itertools.zip_longest(*of_ranks.values()):
        yield [(rank, x) for rank, x in zip(of_ranks, several, strict=True) if x is not None]


def spans(messages: Sequence[Message]) -> list[Span]:
    """Return what messages consist of, each in C order."""
    return [(rank, *block) for rank, array in messages for block in _blocks(array)]


def _blocks(array: Any) -> list[tuple[int, int]]:
    """Return addresses and sizes of the parts of an array that are bytes in a row, in C order."""
    place, size = address(array), array.nbytes
    if not size or array.flags.c_contiguous:
        return [(place, size)]
    *sizes, rows, columns = array.shape
    block = rows * columns * array.itemsize
    steps = array.strides[:-2]
    return [
        (place + sum(map(operator.mul, index, steps)), block)
        for index in itertools.product(*map(range, sizes))
    ]


def _event(stream: Any) -> Any:
    import cupy

    made = cupy.cuda.Event(disable_timing=True)
    made.record(stream)
    return made


def connect(ranks: Communicator, device: int, timeout: float, copies: bool = True) -> Peers | None:
    """Return the ranks of this machine whose GPUs are connected to this rank's; None if none are.

    All ranks call it, also those that do not want to copy.
    """
    mates = [x for x in range(ranks.size) if ranks.nodes[x] == ranks.nodes[ranks.rank]]
    place, offer = _offer(device, len(mates) - 1 if copies else 0)
    offers = [json.loads(x) for x in ranks.tell(json.dumps(offer).encode(), timeout)]

    def box(whole: int, owner: int, other: int) -> int:
        return whole + (mates.index(other) - (other > owner)) * _BOX

    opened = {}
    foreign = []
    for rank in mates:
        if not place or rank == ranks.rank or not (there := _opened(offers[rank], device)):
            continue
        foreign.append(there)
        if _reaches(device, box(place, ranks.rank, rank), box(there, rank, ranks.rank)):
            opened[rank] = there
    reached = [json.loads(x) for x in ranks.tell(json.dumps(sorted(opened)).encode(), timeout)]
    mutual = [rank for rank in opened if ranks.rank in reached[rank]]
    if not mutual:
        _let_go(device, place, foreign)
        return None
    boxes = {
        rank: (box(place, ranks.rank, rank), box(opened[rank], rank, ranks.rank)) for rank in mutual
    }
    return Peers(device, boxes, lambda: _let_go(device, place, foreign))


def _reaches(device: int, own: int, there: int) -> bool:
    """Return whether the driver copies from a box here to one of a peer, and counts there.

    Nobody uses them yet: a byte is copied to a slot, and counters are set to 0, as they are.
    """
    with current(device):
        try:
            stream = _Stream()
            stream.copy([_Part(own + _COUNTERS, 0, 1)], there + _COUNTERS, True)
            for counter in (_ARRIVED, _TAKEN):
                stream.count(there + counter, 0)
            stream.stream.synchronize()
        except Exception:  # noqa: BLE001, NCCL serves without it
            return False
    return True


def _offer(device: int, peers: int) -> tuple[int, dict[str, Any]]:
    """Return the address of this rank's boxes, 0 if it has none, and what others need to know."""
    offer: dict[str, Any] = {"process": meeting.process(), "device": device}
    place = 0
    try:
        import cupy

        runtime = cupy.cuda.runtime
        if not peers:
            return 0, offer
        with current(device):
            place = runtime.malloc(peers * _BOX)
            runtime.memset(place, 0, peers * _BOX)
            runtime.deviceSynchronize()
            handle = runtime.ipcGetMemHandle(place)
            _try(_Stream(), place)
    except Exception as error:  # noqa: BLE001, NCCL serves without it
        _let_go(device, place, [])
        return 0, offer | {"why": str(error)}
    return place, offer | {"place": place, "handle": handle.hex()}


def _try(stream: _Stream, place: int) -> None:
    """Raise an error if the driver, or its bindings, lack what streams are asked for."""
    stream.wait(place + _ARRIVED, 0)
    stream.copy([_Part(place + _COUNTERS, 0, 1)], place + _COUNTERS + SLOT, True)
    stream.count(place + _ARRIVED, 0)
    stream.stream.synchronize()


def _opened(offer: dict[str, Any], device: int) -> int:
    """Return where a peer's boxes are in this rank's address space; 0 if they cannot be reached.

    Ranks of one process do not copy to each other: what one asks of the driver may wait for its
    device, and meanwhile keep the other one from sending what that device waits for.
    """
    if "place" not in offer or offer["process"] == meeting.process():
        return 0
    import cupy

    runtime = cupy.cuda.runtime
    try:
        with current(device):
            return int(runtime.ipcOpenMemHandle(bytes.fromhex(offer["handle"])))
    except runtime.CUDARuntimeError:
        return 0


def _end(
    device: int, out: _Stream, back: _Stream, peers: list[_Peer], let_go: Callable[[], None]
) -> None:
    """Free the boxes when all from peers was taken, and they have taken all and counted that."""
    deadline = time.monotonic() + _PATIENCE
    with current(device):
        out.stream.done  # noqa: B018, CuPy makes this thread's context, which the driver needs
        for peer in peers:
            out.wait(peer.own + _TAKEN, peer.sent)
        while not (is_over := out.stream.done and back.stream.done):
            if time.monotonic() > deadline:
                break
            time.sleep(1e-3)
        if is_over:
            let_go()


def _let_go(device: int, place: int, foreign: Sequence[int]) -> None:
    """Close the boxes of others, and free the own ones."""
    if not place:
        return
    import cupy

    with current(device):
        for each in foreign:
            cupy.cuda.runtime.ipcCloseMemHandle(each)
        cupy.cuda.runtime.free(place)
