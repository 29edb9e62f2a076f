"""Calls over ranks on a device whose streams are late: what travels is packed beside a piece.

One rank computes on the device. The messages of the others are those of a call on NumPy arrays.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from host_cupy import in_host
from late_ranks import LENGTH, Device, Late, Replay, ReplayOfRows, ReplayOfSpans, both, on_host
from placement import same_bits
from ranks import blocks_of

from cupyflash import dispatch, distributed, masks
from cupyflash.arrays import device_arrays, elementwise
from cupyflash.arrays import tape as tapes
from cupyflash.distributed import heads
from cupyflash.distributed.messages import bytes_of
from cupyflash.distributed.partition import head_batches as of_heads
from cupyflash.distributed.recorded_call import RecordingCommunicator
from cupyflash.distributed.transport import peers
from cupyflash.gpu import launch_cache
from cupyflash.pieces.compute import Total
from cupyflash.pieces.device import Device as Gpus
from cupyflash.pieces.place import Host


@pytest.mark.parametrize(
    ("size", "kind", "scheme", "nodes"),
    [
        (2, "zigzag", "rounds", 1),
        (2, "zigzag", "rounds", 2),
        (2, "contiguous", "gather", 1),
        (3, "cyclic", "rounds", 1),
        (3, "cyclic", "gather", 1),
        (6, "cyclic", "nodes", 3),
    ],
)
def test_messages_are_packed_beside_a_piece_and_hold_what_they_ought_to(
    size, kind, scheme, nodes, install, monkeypatch
):
    with blocks_of(4):
        asked = []
        for spy, own, expected in on_host(distributed.Threads(size, nodes), kind, scheme):
            cupy = install(Device(seed=spy.rank))
            monkeypatch.setattr(dispatch, "GPU", Late(cupy))
            comm = Replay(spy, cupy)
            layout = distributed.layout(comm, LENGTH, kind=kind)
            for again in range(3):
                cupy.asked.clear()
                cupy.shares.clear()
                results = both(list(map(cupy.asarray, own)), comm, layout, scheme)
                cupy.run_all()
                assert all(map(same_bits, map(in_host, results), expected)), again
                assert all(same_bits(x, like) for x, like in comm.sent)
                asked.append(list(cupy.asked))
                assert cupy.shares[0] == (nodes > 1)  # the whole device, ahead of them
                assert any(cupy.shares)
            assert asked[-1] == asked[-3]  # made for the first time, and from a tape
    assert any("copy" in each for each in asked) == (kind != "contiguous")
    # Within a node, the device begins before messages are posted, which wait for no piece.
    begun = [each[: each.index("exchange")] for each in asked]
    assert [each.count("piece") for each in begun] == [int(nodes == 1)] * len(asked)
    assert all("copy" not in each[each.index("piece") :] for each in begun if nodes == 1)
    if size == 2:  # what comes at last is added while the sums are rounded
        ends = [each[-each[::-1].index("piece") :] for each in asked]
        assert not any("add" in each for each in ends)
        assert any(each.count("sum of 2") + each.count("sum of 3") >= 3 for each in ends)


@pytest.mark.parametrize(
    ("size", "kind", "scheme"),
    [(2, "zigzag", "rounds"), (2, "contiguous", "gather"), (3, "zigzag", "rounds"),
     (3, "cyclic", "rounds"), (4, "cyclic", "gather")],
)  # fmt: skip
def test_messages_that_are_copied_leave_the_device_to_pieces(
    size, kind, scheme, install, monkeypatch
):
    """Nothing waits for them, and rows in blocks are sent from where they are."""
    monkeypatch.setattr(peers, "BLOCK", 1)
    with blocks_of(4):
        for spy, own, expected in on_host(distributed.Threads(size), kind, scheme):
            cupy = install(Device(seed=spy.rank))
            monkeypatch.setattr(dispatch, "GPU", Late(cupy))
            comm = Replay(spy, cupy, copies=True)
            layout = distributed.layout(comm, LENGTH, kind=kind)
            for again in range(3):
                cupy.asked.clear()
                cupy.shares.clear()
                results = both(list(map(cupy.asarray, own)), comm, layout, scheme)
                cupy.run_all()
                for x, y in zip(map(in_host, results), expected, strict=True):
                    wide = x.astype(np.float32), y.astype(np.float32)
                    np.testing.assert_allclose(*wide, rtol=1e-5, atol=2e-3)
                assert all(same_bits(x, like) for x, like in comm.sent), again
                assert not any(cupy.shares)
                begun = cupy.asked[: cupy.asked.index("exchange")]
                own_runs = 1 if kind == "contiguous" else len(list(layout.own))
                assert 1 <= begun.count("piece") <= own_runs
                if kind == "zigzag":  # of a rank, one run or both
                    assert "copy" not in cupy.asked


@pytest.mark.parametrize("copies", [False, True, "in place"])
@pytest.mark.parametrize(("size", "kind"), [(2, "zigzag"), (2, "contiguous"), (3, "cyclic")])
@pytest.mark.parametrize(("fewest", "least", "turns"), [(7, 1, 4), (7, 2, 3), (2, 1, 2), (1, 1, 1)])
def test_rows_and_results_travel_while_heads_are_computed(
    size, kind, fewest, least, turns, copies, install, monkeypatch
):
    """In turns, the first and the last of which are short; one rank has a head more."""
    heads_kv = size * fewest + 1
    in_place, copies = copies == "in place", bool(copies)
    monkeypatch.setattr(of_heads, "TILES", 2 * least)  # of two entries with a tile each
    monkeypatch.setattr(heads, "on_device", lambda call: True)  # for those in host memory, too
    with blocks_of(4):
        comms = distributed.Threads(size)
        for spy, own, expected in on_host(comms, kind, "heads", heads_kv, copies):
            cupy = install(Device(seed=spy.rank))
            monkeypatch.setattr(dispatch, "GPU", Late(cupy))
            replay = ReplayOfRows if in_place else ReplayOfSpans if copies else Replay
            comm = replay(spy, cupy, copies)
            monkeypatch.setattr(peers, "BLOCK", 1 if in_place else 1 << 30)
            layout = distributed.layout(comm, LENGTH, kind=kind)
            asked = []
            for again in range(3):
                cupy.asked.clear()
                cupy.shares.clear()
                results = both(list(map(cupy.asarray, own)), comm, layout, "heads")
                cupy.run_all()
                assert all(map(same_bits, map(in_host, results), expected)), again
                assert all(same_bits(x, like.reshape(-1).view(np.uint8)) for x, like in comm.sent)
                asked.append([x for x in cupy.asked if x in ("piece", "exchange")])
                assert cupy.shares == [turns > 1 and not copies] * (2 * turns)
            ahead = ["exchange", "piece", *["exchange"] * (turns - 1), "exchange"]
            assert asked == 3 * [2 * (ahead + (turns - 1) * ["piece", "exchange"])]


@pytest.mark.parametrize("copies", [False, True])
def test_memory_of_messages_stays_until_the_stream_that_asked_for_it_waits(
    copies, install, monkeypatch
):
    """Calls that are checked every time, whose kernels ask for memory; no tape holds arrays."""
    ids = np.arange(LENGTH) // 40
    monkeypatch.setattr(of_heads, "TILES", 1)
    monkeypatch.setattr(heads, "on_device", lambda call: True)  # for those in host memory, too
    with blocks_of(4):
        mask = masks.causal() & masks.segments(ids)
        made = on_host(distributed.Threads(2), "zigzag", "heads", 15, copies, mask)
        for seed, (spy, own, expected) in enumerate(2 * made):
            cupy = install(Device(seed))
            cupy.burst = 25
            monkeypatch.setattr(dispatch, "GPU", Late(cupy, (64, 192, 384, 1024, 4096)))
            comm = (ReplayOfSpans if copies else Replay)(spy, cupy, copies)
            layout = distributed.layout(comm, LENGTH, kind="zigzag")
            there = masks.causal() & masks.segments(cupy.asarray(ids))
            for _ in range(2):
                results = both(list(map(cupy.asarray, own)), comm, layout, "heads", there)
                cupy.run_all()
                assert all(map(same_bits, map(in_host, results), expected)), seed


@pytest.mark.parametrize("seed", range(6))
def test_the_caller_waits_for_turns_on_the_other_stream_if_one_fails(seed, install, monkeypatch):
    """Their memory is let go then."""
    monkeypatch.setattr(of_heads, "TILES", 1)
    monkeypatch.setattr(heads, "on_device", lambda call: True)  # for those in host memory, too
    with blocks_of(4):
        spy, own, _ = on_host(distributed.Threads(2), "zigzag", "heads", 14)[0]
        cupy = install(Device(seed))
        cupy.burst = 25
        monkeypatch.setattr(dispatch, "GPU", Late(cupy))
        compute, pieces, busy = dispatch.GPU.forward_piece, [], []

        def third_fails(*arguments):
            pieces.append(1)
            if len(pieces) == 3:
                raise MemoryError
            compute(*arguments)

        monkeypatch.setattr(dispatch.GPU, "forward_piece", third_fails)
        comm = Replay(spy, cupy)
        layout = distributed.layout(comm, LENGTH, kind="zigzag")
        with pytest.raises(AssertionError, match="MemoryError"):
            both(list(map(cupy.asarray, own)), comm, layout, "heads")
        sides = [each.ptr for each in device_arrays._sides.streams.values()]
        cupy.enqueue(lambda: busy.extend(len(cupy.queues[each]) for each in sides))
        cupy.run_all()
        assert busy == [0, 0]


def test_no_tape_holds_arrays(install, monkeypatch):
    monkeypatch.setattr(heads, "on_device", lambda call: True)  # for those in host memory, too
    with blocks_of(4):
        spy, own, _ = on_host(distributed.Threads(2), "zigzag", "heads")[0]
        cupy, owners = install(Device(0)), []
        monkeypatch.setattr(dispatch, "GPU", Late(cupy))
        ask = cupy.alloc
        monkeypatch.setattr(cupy, "alloc", lambda size: _watched(ask(size), owners))
        comm = Replay(spy, cupy)
        layout = distributed.layout(comm, LENGTH, kind="zigzag")
        for _ in range(2):
            results = both(list(map(cupy.asarray, own)), comm, layout, "heads")
            cupy.run_all()
            del results
            gc.collect()
            assert len(owners) > 5
            assert not [each for each in owners if each() is not None]


def _watched(memory, owners):
    owners.append(weakref.ref(memory.owner))
    return memory


@pytest.mark.parametrize(
    ("shape", "part", "is_rows"),
    [
        ((2, 3, 8, 5), np.s_[:], False),  # by a kernel that loads four elements at a time
        ((1, 3, 5, 5), np.s_[:], True),
        ((2, 3, 8, 5), np.s_[..., 2:6, :], True),
        ((1, 3, 8, 1), np.s_[..., 7:, :], False),
        ((4,), np.s_[1:2], True),
        ((2, 3, 8, 5), np.s_[..., 1:3], True),
        ((2, 3, 8, 5), np.s_[:, 1:, 2:, :], False),
        ((6, 5), np.s_[::-1], False),
        ((6, 5), np.s_[:0], False),
    ],
)
def test_rows_that_are_not_aligned_are_copied_by_the_driver(shape, part, is_rows, install):
    cupy = install(Device(0))
    whole = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    for dtype, by_driver in ((np.int16, is_rows), (np.float32, False)):
        for to in (cupy.ndarray(whole[part].shape, dtype), cupy.ndarray(shape, dtype)[part]):
            source = cupy.asarray(whole)[part]
            cupy.run_all()
            cupy.asked.clear()
            elementwise.copy(source, to)
            cupy.run_all()
            assert same_bits(to.host, whole[part].astype(dtype))
            assert ("copy" in cupy.asked) == by_driver


def test_sums_that_are_rounded_are_one_pass_in_their_order(install):
    cupy = install(Device(0))
    rng = np.random.default_rng(0)
    place = Gpus(Late(cupy), 0)
    for count in range(1, 8):
        arrays = (3.0 * rng.standard_normal((count, 500))).astype(np.float32)
        rounded = cupy.ndarray((500,), np.float32)
        cupy.asked.clear()
        place.store_sum(list(map(cupy.asarray, arrays)), rounded)
        cupy.run_all()
        expected = arrays[0].copy()
        for each in arrays[1:]:
            expected += each
        assert same_bits(rounded.host, expected)
        adds = ["add"] * max(count - 4, 0)
        asked = [x for x in cupy.asked if x != "rows"]
        assert asked == [*adds, *[f"sum of {min(count, 4)}"] * (count > 1)]


@pytest.mark.parametrize(
    ("part", "in_rows"),
    [
        (np.s_[:], True),
        (np.s_[:, 2:6], True),
        (np.s_[:, 5:], True),
        (np.s_[:, :, 4:8], True),
        (np.s_[:, 3:, 4:], False),  # several rows in each of several blocks
        (np.s_[:, :, 1:5], False),  # not aligned
        (np.s_[:, :, 4:10], False),
        (np.s_[:, :, ::2], False),
        (np.s_[::-1], False),
    ],
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rows_are_summed_several_elements_at_a_time(part, in_rows, dtype, install):
    """Wherever rows begin; with the bits of sums of one element at a time."""
    cupy = install(Device(0))
    rng = np.random.default_rng(0)
    number = np.float64 if dtype == np.float64 else np.float32
    first, second = rng.standard_normal((2, 3, 8, 12)).astype(number)
    wide, to = cupy.asarray(first)[part], cupy.ndarray(first.shape, dtype)[part]
    cupy.run_all()
    cupy.asked.clear()
    elementwise.add_up(wide, cupy.asarray(second[part].copy()), to)
    elementwise.add(cupy.asarray(second[part].copy()), wide)
    cupy.run_all()
    total = first[part] + second[part]
    assert same_bits(to.host, total.astype(dtype))
    assert same_bits(wide.host, total)
    assert cupy.asked == ["sum of 2", *["rows"] * in_rows, "add", *["rows"] * in_rows]


def test_sums_are_written_where_nothing_was_and_added_elsewhere():
    rng = np.random.default_rng(0)
    summands = [(rng.standard_normal((3, len(at), 4)), at)
                for at in map(range, (3, 0, 2, 9), (6, 9, 8, 10))]  # fmt: skip
    asked = []

    class Place(Host):
        def clear(self, array):
            asked.append(("clear", array.shape[-2]))
            super().clear(array)

        def add(self, computed, to):
            asked.append(("add", to.shape[-2]))
            super().add(computed, to)

        def store(self, computed, to):
            asked.append(("write", to.shape[-2]))
            super().store(computed, to)

    made = np.full((3, 10, 4), np.nan)
    total = Total(Place(dispatch.CPU), made, [range(3), range(3, 6), range(6, 9), range(9, 10)])
    for x, at in summands:
        total.add(x, at)
    expected = np.zeros((3, 10, 4))
    for x, at in summands:
        expected[:, at.start : at.stop] += x
    assert same_bits(total.whole(), expected)
    assert asked == [
        ("write", 3), ("write", 3), ("add", 3), ("write", 3), ("add", 6), ("write", 1),
    ]  # fmt: skip
    total = Total(Place(dispatch.CPU), made, [range(10)])
    total.add(*summands[0])
    expected[...] = 0
    expected[:, 3:6] = summands[0][0]
    assert same_bits(total.whole(), expected)
    assert asked[-2:] == [("clear", 10), ("add", 3)]


def test_what_is_added_last_may_have_some_rows_of_a_sum():
    rng = np.random.default_rng(0)
    draw = {at: rng.standard_normal((3, len(at), 4)) for at in map(range, (0, 2, 5), (5, 8, 10))}
    first = rng.standard_normal((3, 6, 4))
    made, rounded = np.full((3, 10, 4), np.nan), np.empty((3, 10, 4), np.float32)
    total = Total(Host(dispatch.CPU), made, [range(6), range(6, 10)])
    total.in_place(range(6))[...] = first
    total.written(range(6))
    total.store(rounded, [(x, at) for at, x in draw.items()])
    expected = np.zeros((3, 10, 4))
    expected[:, :6] = first
    for at, x in draw.items():
        expected[:, at.start : at.stop] += x
    assert same_bits(rounded, expected.astype(np.float32))


def test_a_tape_keeps_what_is_read_beside_until_its_messages_are_waited_for(install):
    """By what is asked for next, which gets memory that is let go."""
    for seed in range(8):
        cupy = install(Device(seed))
        content = cupy.asarray(np.arange(64, dtype=np.float32))
        ranks = Sender(cupy)
        tape = tapes.Tape({"x": content}, {}, launch_cache.reach)

        def call(content=content, ranks=ranks, tape=tape):
            source, message = (device_arrays.empty((64,), np.float32) for _ in "12")
            elementwise.convert(content, source)
            mark = device_arrays.mark()
            with device_arrays.beside(mark):
                elementwise.convert(source, message)
                transfer = RecordingCommunicator(ranks, tape).exchange([(1, bytes_of(message))], [])
            elementwise.fill(device_arrays.empty((64,), np.float32), 0)
            transfer.wait(1, "a message")

        with tape.recording():
            call()
        tape.finish()
        tape.play(device_arrays, {"x": content}, {}, ranks.exchange, 1)
        cupy.run_all()
        assert [x.view(np.float32).tolist() for x in ranks.sent] == [list(range(64))] * 2


class Sender:
    """A rank on the device, to which nothing comes."""

    rank, size = 0, 2

    def __init__(self, cupy):
        self._cupy, self.sent = cupy, []
        self._stream = cupy.cuda.Stream(non_blocking=True)

    def exchange(self, sends, receives):
        assert not receives
        ready, arrived = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        ready.record(self._cupy.cuda.get_current_stream())
        self._stream.wait_event(ready)
        for _, message in sends:
            self._cupy.enqueue(self._sending(message.host), self._stream.ptr)
        arrived.record(self._stream)
        return Sent(self._cupy, arrived)

    def _sending(self, host):
        return lambda: self.sent.append(host.copy())


class Sent:
    """Its messages."""

    def __init__(self, cupy, arrived):
        self._cupy, self._arrived = cupy, arrived

    def wait(self, timeout, what):
        self._cupy.cuda.get_current_stream().wait_event(self._arrived)
