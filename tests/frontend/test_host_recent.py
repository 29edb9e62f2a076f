"""Calls over a cache that are made again by one call of C: when they are, and when they are not."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import threading
import weakref
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from forks import fork
from other_path import OtherPathError, only_again
from own_team import another_call_has_the_team, counted
from placement import same_bits

from cupyflash import ArgumentError, ArgumentTypeError, attention, attention_cached, masks
from cupyflash.backends import host_recent
from cupyflash.reference.cpu import decode_launch, repeat

F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
BF16 = np.dtype(ml_dtypes.bfloat16)
ROOM = 200
pytestmark = pytest.mark.skipif(not repeat.IS_POSSIBLE, reason="this Python has other arrays")


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """Nothing is known of calls before a test."""
    empty = {}
    monkeypatch.setattr(host_recent, "_known", empty)
    return empty


def drawn(batch=1, heads=6, heads_kv=6, d=48, room=ROOM, dtype=F32, seed=0, queries=1):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, heads, queries, d)).astype(dtype)
    k, v = (rng.standard_normal((batch, heads_kv, room, d)).astype(dtype) for _ in "kv")
    return q, k, v


@pytest.mark.parametrize("mask", [None, masks.window(400, 0)])
def test_fewer_keys_than_the_kernel_for_few_queries_serves_keep_their_kernel(known, mask):
    q, k, v = drawn(heads=3, heads_kv=3, d=32, room=700)
    numbers = (385, 447, 448, 449, 512, 513, 576)

    def made():
        return [attention(q, k[:, :, :n], v[:, :, :n], mask=mask) for n in numbers]

    before = made()
    for n in (449, 513, 576):
        for _ in range(5):
            attention(q, k[:, :, :n], v[:, :, :n], mask=mask)
    assert known or mask is not None
    for n, a, b in zip(numbers, before, made(), strict=True):
        assert same_bits(a, b), n


def checked(q, k, v, length):
    """The result of a call that is not made again: it has an option."""
    return attention_cached(q, k, v, length, return_lse=True)[0]


def warm(q, k, v, length):
    for _ in range(3):
        attention_cached(q, k, v, length)


@pytest.mark.parametrize(
    "sizes",
    [
        {}, {"batch": 3}, {"heads": 8, "heads_kv": 2}, {"d": 20}, {"dtype": F64}, {"queries": 3},
        {"dtype": BF16, "heads_kv": 2}, {"dtype": F16, "d": 20},
    ],
    ids=str,
)  # fmt: skip
def test_the_same_bits_as_of_a_checked_call(sizes):
    q, k, v = drawn(**sizes)
    expected = [checked(q, k, v, n) for n in range(1, ROOM + 1)]
    for first in (1, 65, 129, 193):
        warm(q, k, v, first)
    with only_again():
        for n, x in enumerate(expected, start=1):
            out = attention_cached(q, k, v, n)
            assert same_bits(out, x), n
            assert out.dtype == x.dtype
            assert out.flags.writeable


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(),
        masks.window(50, 0),
        masks.window(70, 0),
        masks.window(100, None) & masks.causal(),
        masks.causal(offset=-120),
        masks.window(30, 0, offset=-100),
        masks.prefix(70),
    ],
    ids=str,
)
def test_one_query_under_a_mask(mask):
    q, k, v = drawn(heads_kv=3)
    expected = [
        attention_cached(q, k, v, n, mask=mask, return_lse=True)[0] for n in range(1, ROOM + 1)
    ]
    is_other = 0
    for n, x in enumerate(expected, start=1):
        for _ in range(2):
            assert same_bits(attention_cached(q, k, v, n, mask=mask), x), n
        with only_again(), contextlib.suppress(OtherPathError):
            is_other += 1
            assert same_bits(attention_cached(q, k, v, n, mask=mask), x), n
            is_other -= 1
    assert is_other <= 10, "schedules come once"
    assert same_bits(attention_cached(q, k, v, 150), checked(q, k, v, 150))
    with only_again(), pytest.raises(OtherPathError):
        attention_cached(q, k, v, 150, mask=mask | masks.prefix(3))


def test_one_query_under_a_mask_of_arrays():
    """What it looks up may change."""
    q, k, v = drawn()
    lengths = np.array([90])
    mask = masks.lengths(lengths)
    for n in (90, 90, 90, 50, 120, 100):
        lengths[0] = n
        assert same_bits(attention_cached(q, k, v, 100, mask=mask), checked(q, k, v, min(n, 100)))


def test_no_mask_for_several_queries_or_entries():
    for sizes in ({"queries": 3}, {"batch": 2}):
        q, k, v = drawn(**sizes)
        expected = attention_cached(q, k, v, 100, mask=masks.causal(), return_lse=True)[0]
        for _ in range(4):
            assert same_bits(attention_cached(q, k, v, 100, mask=masks.causal()), expected)


def test_one_query_of_dense_arrays_under_a_window():
    q, k, v = drawn(room=700)
    mask = masks.window(64, 0)
    for n in range(513, 600):
        x = attention(q, k[:, :, :n], v[:, :, :n], mask=mask, return_lse=True)[0]
        for _ in range(3):
            assert same_bits(attention(q, k[:, :, :n], v[:, :, :n], mask=mask), x), n
    with only_again():
        attention(q, k[:, :, :n], v[:, :, :n], mask=mask)


@pytest.mark.parametrize("entries", [(1, 1), (2, 2), (2, 1)], ids=str)
def test_one_query_of_any_number_of_keys(entries):
    """The cache of a user, of which a call gets a view that grows; its axes may be broadcast."""
    q, _, _ = drawn(batch=entries[0], heads_kv=3)
    _, k, v = drawn(batch=entries[1], heads_kv=3, room=700)
    expected = {}
    for n in range(513, 577):
        expected[n] = attention(q, k[:, :, :n], v[:, :, :n], return_lse=True)[0]
    for _ in range(3):
        attention(q, k[:, :, :513], v[:, :, :513])
    with only_again():
        for n, x in expected.items():
            assert same_bits(attention(q, k[:, :, :n], v[:, :, :n]), x), n
        for keys, values in ((k[:, :, :530], v[:, :, :529]), (k[:, :, :600], v[:, :, :600])):
            with pytest.raises(OtherPathError):
                attention(q, keys, values)
    with pytest.raises(ArgumentError, match="v"):
        attention(q, k[:, :, :530], v[:, :, :529])
    again = np.ascontiguousarray(k[:, :, :540]), np.ascontiguousarray(v[:, :, :540])
    for _ in range(4):  # of other strides
        assert same_bits(attention(q, *again), expected[540])
    assert same_bits(attention(q, k[:, :, :541], v[:, :, :541]), expected[541])


def test_arrays_may_be_others_of_the_same_form():
    """As those of the layers of a model, which are views of one array."""
    warm(*drawn(), 100)
    for seed in range(1, 4):
        q, k, v = drawn(seed=seed)
        both = np.stack([k, v])
        with only_again():
            out = attention_cached(q, both[0], both[1], 101)
        assert same_bits(out, checked(q, k, v, 101))


def in_other_order(x):
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def misaligned(x):
    memory = np.empty(x.nbytes + 1, np.uint8)
    made = memory[1:].view(x.dtype).reshape(x.shape)
    made[...] = x
    return made


def test_the_output_has_the_order_of_the_queries():
    q, k, v = drawn(batch=2, queries=3)
    usual, q = attention_cached(q, k, v, 100), in_other_order(q)
    for _ in range(4):
        out = attention_cached(q, k, v, 100)
        assert out.strides == q.strides
        assert same_bits(out, usual)


def read_only(x):
    made = x.copy()
    made.flags.writeable = False
    return made


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("change", [in_other_order, misaligned, read_only])
def test_arrays_of_another_form_are_looked_at(change, place):
    arrays = drawn(batch=2)
    warm(*arrays, 100)
    changed = [change(x) if n == place else x for n, x in enumerate(arrays)]
    if changed[place].strides != arrays[place].strides or change is not in_other_order:
        with only_again(), pytest.raises(OtherPathError):
            attention_cached(*changed, 100)
    assert same_bits(attention_cached(*changed, 100), checked(*arrays, 100))


def test_an_array_that_changes_in_place_is_looked_at():
    q, k, v = drawn()
    warm(q, k, v, 100)
    v.shape = (1, 6, ROOM // 2, 96)
    with only_again(), pytest.raises(OtherPathError):
        attention_cached(q, k, v, 100)
    with pytest.raises(ArgumentError, match="k"):
        attention_cached(q, k, v, 100)
    v.shape = k.shape
    k.dtype = np.int32
    with pytest.raises(ArgumentTypeError, match="k"):
        attention_cached(q, k, v, 100)
    k.dtype = np.float32
    with only_again():
        attention_cached(q, k, v, 100)


@pytest.mark.parametrize("length", [ROOM + 1, -1, 2**63, 2**64 + 100, -(2**64)])
def test_a_wrong_length_is_an_error_each_time(length):
    arrays = drawn()
    warm(*arrays, ROOM)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="lengths"):
            attention_cached(*arrays, length)


def test_a_length_is_no_condition():
    arrays = drawn()
    warm(*arrays, 1)
    with pytest.raises(ArgumentTypeError):
        attention_cached(*arrays, True)


def test_what_is_no_array_is_looked_at():
    q, k, v = drawn()
    warm(q, k, v, 100)
    with pytest.raises(ArgumentTypeError, match="v"):
        attention_cached(q, k, v.tolist(), 100)
    with pytest.raises(ArgumentTypeError):
        attention_cached(q, k, object(), 100)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_an_array_of_one_length_may_change(dtype):
    q, k, v = drawn()
    lengths = np.array([100], dtype)
    warm(q, k, v, lengths)
    for n in (101, 90, 128):
        lengths[0] = n
        with only_again():
            out = attention_cached(q, k, v, lengths)
        assert same_bits(out, checked(q, k, v, n))
    lengths[0] = ROOM + 1
    with pytest.raises(ArgumentError, match="lengths"):
        attention_cached(q, k, v, lengths)
    several = drawn(batch=2)
    warm(*several, 100)
    lengths[0] = 100
    with pytest.raises(ArgumentTypeError, match="lengths"):
        attention_cached(*several, lengths)
    with pytest.raises(ArgumentTypeError, match="lengths"):
        attention_cached(q, k, v, lengths.astype(np.float32))


def test_options_are_no_part_of_it():
    q, k, v = drawn()
    for _ in range(4):
        attention_cached(q, k, v, 100, scale=0.5)
    usual = checked(q, k, v, 100)
    assert same_bits(attention_cached(q, k, v, 100), usual)
    warm(q, k, v, 100)
    assert not same_bits(attention_cached(q, k, v, 100, scale=0.5), usual)
    assert same_bits(attention_cached(q, k, v, 100), usual)


@pytest.fixture
def shared(monkeypatch):
    """Calls of a kernel that some threads share, on a machine with two."""
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "2")
    seen, usual = [], decode_launch.parallel

    def count(run, items, *rest):
        seen.append(items)
        usual(run, items, *rest)

    monkeypatch.setattr(decode_launch, "parallel", count)
    return seen


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_several_threads_are_for_long_calls(shared, monkeypatch, dtype):
    """To wake one takes longer than a part of a short call."""
    monkeypatch.setattr(decode_launch, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    for room, items in ((1000, []), (10_000, [2])):
        q, k, v = drawn(room=room, dtype=dtype)
        expected = checked(q, k, v, room)
        warm(q, k, v, room)
        shared.clear()
        with counted() as regions, only_again():
            assert same_bits(attention_cached(q, k, v, room), expected)
        assert (shared, regions) == ([], [len(items)])
        with another_call_has_the_team(), only_again():
            assert same_bits(attention_cached(q, k, v, room), expected)
        assert shared == items


def test_several_threads_are_for_calls_that_take_long_on_a_slower_machine(shared, monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr(decode_launch, "time", SimpleNamespace(perf_counter=seconds.__next__))
    arrays = drawn(room=1000)
    warm(*arrays, 1000)
    shared.clear()
    with another_call_has_the_team(), only_again():
        attention_cached(*arrays, 1000)
    assert shared == [2]


def test_a_shared_call_that_was_interrupted_can_be_made_again(shared, monkeypatch):
    arrays = drawn(room=10_000)
    expected = checked(*arrays, 10_000)
    warm(*arrays, 10_000)

    def interrupted(*_):
        raise KeyboardInterrupt

    with only_again():
        with another_call_has_the_team(), monkeypatch.context() as patch:
            patch.setattr(decode_launch, "parallel", interrupted)
            with pytest.raises(KeyboardInterrupt):
                attention_cached(*arrays, 10_000)
        assert same_bits(attention_cached(*arrays, 10_000), expected)


def test_a_schedule_that_comes_once_is_not_kept(known):
    arrays = drawn()
    for n in (1, 65, 129, 193):
        attention_cached(*arrays, n)
    assert not known


def test_few_are_kept(known):
    for room in range(100, 100 + 2 * host_recent.MOST):
        warm(*drawn(heads=1, heads_kv=1, d=16, room=room), 50)
        assert len(known) <= host_recent.MOST
    assert len(known) == host_recent.MOST


def test_no_array_is_kept_alive():
    arrays = drawn()
    warm(*arrays, 100)
    seen = [weakref.ref(x) for x in arrays]
    del arrays
    gc.collect()
    assert not any(x() is not None for x in seen)


def test_many_threads_make_the_same_call():
    q, k, v = drawn(room=1000)
    warm(q, k, v, 1000)
    expected = {n: checked(q, k, v, n) for n in (990, 1000)}
    wrong = []

    def call(n):
        outs = (attention_cached(q, k, v, n) for _ in range(300))
        wrong.extend(n for out in outs if not same_bits(out, expected[n]))

    workers = [threading.Thread(target=call, args=(990 + 10 * (n % 2),)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    with only_again():
        attention_cached(q, k, v, 1000)


class SignalError(Exception):
    pass


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers")
def test_an_interrupted_call_can_be_made_again(no_collector):
    q, k, v = drawn()
    warm(q, k, v, 100)

    def handler(number, frame):
        raise SignalError

    before = signal.signal(signal.SIGALRM, handler)
    came = 0
    try:
        for n in range(60):
            came += 1
            with contextlib.suppress(SignalError):
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + 1e-6 * n)
                while True:
                    attention_cached(q, k, v, 100)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert came == 60
    expected = checked(q, k, v, 100)
    with only_again():
        assert same_bits(attention_cached(q, k, v, 100), expected)


@pytest.mark.parametrize("place", ["behind the check of arrays", "in the kernel"])
def test_an_interrupted_call_of_several_threads_lets_go_of_what_it_took(monkeypatch, place):
    q, k, v = drawn()
    interrupts = []

    def interrupted(function):
        def call(*args):
            made = function(*args)
            if interrupts:
                raise interrupts.pop()
            return made

        return call

    monkeypatch.setattr(decode_launch.DecodeCall, "_items", lambda *_: 2)
    if place == "in the kernel":
        monkeypatch.setattr(decode_launch, "parallel", interrupted(decode_launch.parallel))
    else:  # where Python calls the handler of a signal that has come in the meantime
        begin = interrupted(repeat._function())
        monkeypatch.setattr(repeat, "_function", lambda: begin)
    expected = checked(q, k, v, 100)
    warm(q, k, v, 100)
    others = another_call_has_the_team() if place == "in the kernel" else contextlib.nullcontext()
    with others, only_again():
        for _ in range(2):
            interrupts.append(SignalError())
            with pytest.raises(SignalError):
                attention_cached(q, k, v, 100)
            assert same_bits(attention_cached(q, k, v, 100), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_begins_anew():
    q, k, v = drawn()
    warm(q, k, v, 100)
    expected = checked(q, k, v, 100)
    child = fork()
    if child == 0:
        is_right = same_bits(attention_cached(q, k, v, 100), expected)
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
