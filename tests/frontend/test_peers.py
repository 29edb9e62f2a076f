"""Copies between GPUs of one machine: on devices whose streams are late, in any order."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from placement import same_bits
from stream_cupy import StreamCupy

from cupyflash import distributed
from cupyflash.distributed import DistributedError
from cupyflash.distributed.transport import meeting, nccl, peers


class Wait:
    """A stream waits for a counter in the memory of its device."""

    def __init__(self, place, value):
        self._counter = ctypes.c_uint32.from_address(place)
        self._value = value

    @property
    def done(self):
        return (self._counter.value - self._value) % 2**32 < 2**31


def _set(place, value):
    ctypes.c_uint32.from_address(place).value = value % 2**32


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Keep what lives already out of the collections of each test: half a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def cupy(install, monkeypatch):
    """Return a CuPy whose devices are one memory, with slots of four bytes."""
    monkeypatch.setattr(peers, "SLOT", 4)
    monkeypatch.setattr(peers, "_BOX", peers._COUNTERS + peers.SLOTS * 4)
    monkeypatch.setattr(peers, "_PATIENCE", 0.05)

    def made(seed=0):
        gc.collect()  # ranks of another CuPy
        module = install(StreamCupy(seed))
        module.held = {}
        module.refuses = False  # what leaves

        def malloc(size):
            memory = np.full(size, 0xFF, np.uint8)
            module.held[memory.ctypes.data] = memory
            return memory.ctypes.data

        runtime = module.cuda.runtime
        runtime.malloc, runtime.free = malloc, module.held.pop
        runtime.memset = lambda *x: ctypes.memset(*x)
        runtime.ipcGetMemHandle = lambda place: place.to_bytes(64, "little")
        runtime.ipcOpenMemHandle = lambda handle: int.from_bytes(handle, "little")
        runtime.ipcCloseMemHandle = lambda place: module.closed.append(place)
        runtime.CUDARuntimeError = type("CUDARuntimeError", (RuntimeError,), {"status": 0})
        module.closed = []
        runtime.deviceSynchronize = lambda: None

        class Stream:
            """What `peers._Stream` asks the driver for."""

            def __init__(self):
                self.stream = module.cuda.Stream()

            def copy(self, parts, place, leaves):
                if leaves and module.refuses:
                    raise RuntimeError("CUDA_ERROR_INVALID_VALUE")
                for here, at, size in parts:
                    both = (place + at, here) if leaves else (here, place + at)
                    module.enqueue(functools.partial(ctypes.memmove, *both, size), self.stream.ptr)

            def wait(self, counter, value):
                module.queues[self.stream.ptr].append(Wait(counter, value))

            def count(self, counter, value):
                module.enqueue(lambda: _set(counter, value), self.stream.ptr)

        monkeypatch.setattr(peers, "_Stream", Stream)
        return module

    yield made
    gc.collect()


def connected(cupy, monkeypatch, size=2, apart=True):
    """Return what the ranks of one machine have of each other; each is a process if `apart`."""
    if apart:
        monkeypatch.setattr(meeting, "process", threading.get_ident)
    return distributed.Threads(size).run(lambda comm: peers.connect(comm, 0, 10))


def drawn(cupy, rng, sizes):
    """Return messages between ranks by sender and receiver, and where they are to arrive."""
    sent, come = {}, {}
    for pair, several in sizes.items():
        sent[pair] = [cupy.asarray(rng.integers(0, 256, n).astype(np.uint8)) for n in several]
        come[pair] = [cupy.ndarray((n,), np.uint8) for n in several]
    return sent, come


def exchanged(cupy, ranks, sent, come):
    """Ask every rank for an exchange; return the events behind them."""
    made = []
    for rank, own in enumerate(ranks):
        begin = cupy.cuda.Event()
        begin.record(cupy.cuda.Stream(0))
        sends = [(b, x) for (a, b), several in sent.items() if a == rank for x in several]
        receives = [(a, x) for (a, b), several in come.items() if b == rank for x in several]
        made.append(own.exchange(begin, peers.spans(sends), peers.spans(receives)))
    return made


def test_ranks_that_connect_at_the_same_time_reach_each_other(cupy, monkeypatch):
    """The driver of these tests serves threads that take turns at any moment."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for seed in range(10):
            ranks = connected(cupy(seed), monkeypatch, 4)
            assert all(n in own for own in ranks for n in range(4) if own is not ranks[n])
    finally:
        sys.setswitchinterval(interval)


@settings(max_examples=30, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 4), st.data())
def test_messages_arrive_whatever_comes_first(cupy, monkeypatch, seed, size, data):
    """Several exchanges at once, of messages that are longer than all slots, or empty."""
    module = cupy(seed)
    ranks = connected(module, monkeypatch, size)
    rng = np.random.default_rng(seed)
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    drawn_sizes = st.lists(st.integers(0, 40), max_size=3)
    for _ in range(2):
        several = [
            drawn(module, rng, {pair: data.draw(drawn_sizes) for pair in pairs}) for _ in range(3)
        ]
        events = [exchanged(module, ranks, *each) for each in several]
        events[-1][0].synchronize()
        module.run_all()
        for sent, come in several:
            for pair, messages in sent.items():
                for x, y in zip(messages, come[pair], strict=True):
                    assert same_bits(x.host, y.host), pair


@pytest.mark.parametrize("seed", range(20))
def test_an_exchange_is_over_when_all_was_sent_and_received(cupy, monkeypatch, seed):
    module = cupy(seed)
    ranks = connected(module, monkeypatch)
    sent, come = drawn(module, np.random.default_rng(0), {(0, 1): [15], (1, 0): [15]})
    module.run_all()
    expected = {pair: x.host.copy() for pair, [x] in sent.items()}
    events = exchanged(module, ranks, sent, come)
    for rank, event in enumerate(events):
        event.synchronize()
        assert same_bits(come[1 - rank, rank][0].host, expected[1 - rank, rank])
        sent[rank, 1 - rank][0].host.fill(0xFF)  # may change from here on
    module.run_all()
    assert same_bits(come[1, 0][0].host, expected[1, 0])
    assert same_bits(come[0, 1][0].host, expected[0, 1])


def test_streams_that_share_a_queue_do_not_wait_for_each_other_in_a_circle(cupy, monkeypatch):
    """A device may run what is asked of several streams one after the other."""
    module = cupy(2)
    ranks = connected(module, monkeypatch, 3)
    for each in ranks:
        module.queues[each._in.stream.ptr] = module.queues[each._out.stream.ptr]
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    sent, come = drawn(module, np.random.default_rng(0), {pair: [100, 30] for pair in pairs})
    # In the worst order: each rank receives at first from the one that sends to it last.
    order = sorted(pairs, key=lambda pair: (pair[1] - pair[0]) % 3)
    sent, come = {x: sent[x] for x in order}, {x: come[x] for x in order[::-1]}
    exchanged(module, ranks, sent, come)
    module.run_all()
    assert all(
        same_bits(x.host, y.host) for p in pairs for x, y in zip(sent[p], come[p], strict=True)
    )


def test_nothing_waits_behind_the_end(cupy, monkeypatch):
    module = cupy(3)
    ranks = connected(module, monkeypatch)
    sent, come = drawn(module, np.random.default_rng(0), {(0, 1): [100], (1, 0): [100]})
    made = exchanged(module, ranks[:1], sent, come)  # the other one does not come
    with pytest.raises(AssertionError, match="never happens"):
        made[0].synchronize()
    ranks[0].end()
    made[0].synchronize()


@pytest.mark.parametrize("seed", range(5))
def test_boxes_are_freed_when_they_are_empty(cupy, monkeypatch, seed):
    module = cupy(seed)
    ranks = connected(module, monkeypatch)
    assert len(module.held) == 2
    sent, come = drawn(module, np.random.default_rng(0), {(0, 1): [50]})
    exchanged(module, ranks, sent, come)
    monkeypatch.setattr(peers, "_PATIENCE", 5)
    done = module.cuda.Stream.done

    def asked_again(stream):
        """Something happens whenever the host asks."""
        happened = []
        module.enqueue(lambda: happened.append(True), 0)
        module.run_until(lambda: happened)
        return done.fget(stream)

    def free(place, free=module.cuda.runtime.free):
        assert same_bits(sent[0, 1][0].host, come[0, 1][0].host), "a box that is not empty"
        free(place)

    monkeypatch.setattr(module.cuda.runtime, "free", free)
    monkeypatch.setattr(module.cuda.Stream, "done", property(asked_again))
    del ranks[:]
    gc.collect()
    assert not module.held
    assert len(module.closed) == 2


def test_ranks_that_are_not_connected_have_no_boxes(cupy, monkeypatch):
    module = cupy()
    monkeypatch.setattr(peers, "_try", lambda *_: 1 / 0)
    assert connected(module, monkeypatch) == [None, None]
    assert not module.held


def test_ranks_of_one_process_have_no_boxes(cupy, monkeypatch):
    module = cupy()
    assert connected(module, monkeypatch, apart=False) == [None, None]
    assert not module.held


def test_a_peer_to_which_the_driver_does_not_copy_has_no_box(cupy, monkeypatch):
    module = cupy()
    monkeypatch.setattr(peers, "_try", lambda *_: None)
    module.refuses = True
    assert connected(module, monkeypatch) == [None, None]
    assert not module.held
    assert len(module.closed) == 2


def test_messages_that_adjoin_stay_apart():
    """They may be pieces of memory of their own, and no part may lie in two of them."""
    ((first,),) = ([x for _, x in each] for each in peers._chunks([(1, 4096, 8), (1, 4104, 4)]))
    assert first == [(4096, 0, 8), (4104, 8, 4)]


def test_ranks_of_which_one_cannot_reach_the_other_have_no_boxes(cupy, monkeypatch):
    module = cupy()
    tried, opens = [], module.cuda.runtime.ipcOpenMemHandle

    def opened(handle):
        tried.append(handle)
        if len(tried) > 1:
            raise module.cuda.runtime.CUDARuntimeError
        return opens(handle)

    monkeypatch.setattr(module.cuda.runtime, "ipcOpenMemHandle", opened)
    assert connected(module, monkeypatch) == [None, None]
    assert not module.held
    assert len(module.closed) == 1


def test_ranks_on_other_machines_have_none(cupy, monkeypatch):
    cupy()
    monkeypatch.setattr(meeting, "process", threading.get_ident)
    made = distributed.Threads(4, 2).run(lambda comm: peers.connect(comm, 0, 10))
    assert [[rank in own for rank in range(4)] for own in made] == [
        [False, True, False, False], [True, False, False, False],
        [False, False, False, True], [False, False, True, False],
    ]  # fmt: skip


class Nccl:
    """NCCL, whose messages are the bytes of the sender when its stream comes to them."""

    NCCL_UINT8 = 1

    def __init__(self, module):
        self.module, self.boxes, self.sends, self.ended = module, {}, [], []
        self.groupStart = self.groupEnd = lambda: None
        self.get_unique_id = lambda: b"id"

        class Communicator:
            def __init__(comm, size, unique, rank):
                assert unique == b"id"
                comm.rank = rank

            def send(comm, place, size, kind, rank, stream):
                self.sends.append((comm.rank, rank))
                box = self.boxes.setdefault((comm.rank, rank), [])
                module.enqueue(lambda: box.append(ctypes.string_at(place, size)), stream)

            def recv(comm, place, size, kind, rank, stream):
                box = self.boxes.setdefault((rank, comm.rank), [])
                module.queues[stream].append(Came(box))
                module.enqueue(lambda: ctypes.memmove(place, box.pop(0), size), stream)

            def abort(comm):
                self.ended.append(comm.rank)

        self.NcclCommunicator = Communicator


class Came:
    """A stream waits for a message."""

    def __init__(self, box):
        self._box = box

    @property
    def done(self):
        return bool(self._box)


@pytest.fixture
def gpus(cupy, monkeypatch):
    """Return ranks with a GPU each, on some nodes, and what they use."""
    monkeypatch.setattr(nccl, "_IDLE", 0.0)

    def made(size, nodes, seed=0, copies=lambda rank: True):
        module = cupy(seed)
        module.cuda.nccl = Nccl(module)
        monkeypatch.setitem(sys.modules, "cupy.cuda", module.cuda)
        monkeypatch.setattr(meeting, "process", threading.get_ident)
        threads = distributed.Threads(size, nodes)
        return module, threads.run(
            lambda comm: distributed.communicator(comm, device=0, copies=copies(comm.rank))
        )

    yield made
    for thread in threading.enumerate():
        if thread.name == "cupyflash-nccl":  # it keeps its ranks
            thread.join(10)


@pytest.mark.parametrize(("size", "nodes"), [(2, 1), (2, 2), (4, 2), (4, 1)])
def test_messages_to_other_machines_go_by_nccl_and_others_are_copied(gpus, size, nodes):
    for seed in range(3):
        module, comms = gpus(size, nodes, seed)
        assert all(comm.copies == (nodes == 1) for comm in comms)
        pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
        sent, come = drawn(module, np.random.default_rng(seed), {pair: [9, 30] for pair in pairs})
        transfers = []
        for comm in comms:
            sends = [(b, x) for (a, b), xs in sent.items() if a == comm.rank for x in xs]
            receives = [(a, x) for (a, b), xs in come.items() if b == comm.rank for x in xs]
            transfers.append(comm.exchange(sends, receives))
        for transfer in transfers:
            transfer.wait(10, "a test")
        module.cuda.Stream(0).synchronize()  # on which all of them are waited for
        for pair in pairs:
            assert all(
                same_bits(x.host, y.host) for x, y in zip(sent[pair], come[pair], strict=True)
            )
        of_node = size // nodes
        far = {(a, b) for a, b in pairs if a // of_node != b // of_node}
        assert set(module.cuda.nccl.sends) == far


def test_messages_of_a_rank_that_does_not_copy_go_by_nccl(gpus):
    module, comms = gpus(3, 1, copies=lambda rank: rank != 1)
    assert not any(comm.copies for comm in comms)
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    sent, come = drawn(module, np.random.default_rng(0), {pair: [30] for pair in pairs})
    for comm in comms:
        sends = [(b, x) for (a, b), [x] in sent.items() if a == comm.rank]
        receives = [(a, x) for (a, b), [x] in come.items() if b == comm.rank]
        comm.exchange(sends, receives)
    module.run_all()
    assert all(same_bits(sent[pair][0].host, come[pair][0].host) for pair in pairs)
    assert set(module.cuda.nccl.sends) == {pair for pair in pairs if 1 in pair}


def test_no_rank_copies_while_a_graph_is_being_captured(gpus, monkeypatch):
    module, comms = gpus(2, 1)
    monkeypatch.setattr(module.cuda.Stream, "is_capturing", lambda _: True)
    with pytest.raises(DistributedError, match="while a CUDA graph is being captured"):
        comms[0].exchange([(1, module.ndarray((4,), np.uint8))], [])


def test_a_rank_that_gives_up_lets_nothing_wait(gpus):
    module, comms = gpus(2, 1)
    transfer = comms[0].exchange([], [(1, module.ndarray((40,), np.uint8))])
    with pytest.raises(AssertionError, match="never happens"):
        module.run_all()
    comms[1].abort("rank 1 gave up")
    comms[0].end()
    transfer.wait(10, "a test")
    module.run_all()
    assert sorted(module.cuda.nccl.ended) == [0, 1]
    with pytest.raises(DistributedError, match="rank 1 gave up"):
        comms[0].exchange([], [(1, module.ndarray((40,), np.uint8))])


def test_ranks_of_one_process_begin_messages_together(gpus, monkeypatch):
    """Neither goes on, and asks the driver for what may wait, before both have begun."""
    module, comms = gpus(2, 1, copies=lambda rank: False)
    for comm in comms:
        comm._mates = frozenset({1 - comm.rank})
    events, event = [], module.cuda.nccl.groupEnd
    monkeypatch.setattr(module.cuda.nccl, "groupEnd", lambda: (event(), events.append("begun")))
    arrays = [module.ndarray((40,), np.uint8) for _ in range(4)]

    def first():
        comms[0].exchange([(1, arrays[0])], [(1, arrays[1])])
        events.append("on")

    thread = threading.Thread(target=first)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert not events
    comms[0].exchange([], [(1, arrays[1][:0])])  # nothing travels, and nobody is met
    comms[1].exchange([(0, arrays[2])], [(0, arrays[3])])
    thread.join(10)
    assert not thread.is_alive()
    assert events[:3] == ["begun"] * 3
    module.run_all()


def test_a_rank_that_does_not_come_to_a_message_is_named(gpus):
    module, comms = gpus(3, 1, copies=lambda rank: False)
    comms[0]._mates = frozenset({1, 2})
    comms[0].expect(0.2)
    array = module.ndarray((40,), np.uint8)
    with pytest.raises(DistributedError, match=r"rank 0 timed out after 0\.2 s .* rank 2 \("):
        comms[0].exchange([(2, array)], [])
    with pytest.raises(DistributedError, match="rank 2"):
        comms[2].exchange([], [(0, array)])


def test_a_rank_that_gave_up_is_not_met(gpus):
    module, comms = gpus(2, 1, copies=lambda rank: False)
    comms[0]._mates = frozenset({1})
    comms[1].abort("rank 1 gave up")
    with pytest.raises(DistributedError, match="rank 1 gave up"):
        comms[0].exchange([(1, module.ndarray((40,), np.uint8))], [])


# Other tests of the process may have started threads: the child ends at once.
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning", "ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_another_process():
    """Its parent's ranks cannot be met."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, meeting.process().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 999).decode() != meeting.process()
    os.close(read)
    os.close(write)


def test_a_call_tells_its_ranks_how_long_to_wait_for_each_other():
    for seconds in (7.0, 2):
        heard: list[float] = []
        comm = distributed.Threads(1).ranks[0]
        comm.expect = heard.append
        layout = distributed.layout(comm, 8)
        q = np.ones((2, 8, 4), np.float32)
        distributed.attention(q, q, q, comm=comm, layout=layout, check=False, timeout=seconds)
        assert heard == [seconds]
