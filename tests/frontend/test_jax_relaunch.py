"""Launches of programs' calls on a GPU that are made again by the addresses alone.

No GPU is needed: frames are made here, and a stand-in for CuPy writes down what kernels are told.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager

import host_cupy
import numpy as np
import pytest

import cupyflash
from cupyflash import Rotary, masks, scores
from cupyflash.arrays import device_arrays
from cupyflash.gpu import relaunch
from cupyflash.gpu.launch import ALIGNMENT
from cupyflash.problem import replay

jax = pytest.importorskip("jax", reason='needs JAX: pip install ".[jax]"')

import jax.numpy as jnp  # noqa: E402 (after the skip)

from cupyflash.jax import attention, attention_cached, attention_varlen, rope, target  # noqa: E402

if jax.default_backend() != "cpu":
    pytest.skip("programs for the CPU are tried here", allow_module_level=True)

CAUSAL = masks.causal()
X = [np.random.default_rng(n).standard_normal((2, 4, 40, 64)).astype(np.float16) for n in range(3)]
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
TURNS = np.outer(np.arange(40), [1.0, 0.1]).astype(np.float32)


class Frame:
    """A call of a target at addresses."""

    def __init__(self, operands, results, stream=70):
        self._operands, self._results, self._stream = operands, results, stream

    def operands(self, count):
        assert count == len(self._operands)
        return list(self._operands)

    def results(self, count):
        assert count == len(self._results)
        return list(self._results)

    def stream(self):
        return self._stream

    def device(self):
        return 0


class Call:
    """A call of a program that was lowered, with memory of its own for its arrays."""

    def __init__(self, entry):
        self.entry = entry
        self.count = len(entry._operands)
        self.memory = [self.new(x) for x in (*entry._operands, *entry._results)]

    @staticmethod
    def new(x, shift=0):
        """Return memory for an array that begins at a multiple of 256, and so many bytes more."""
        size = int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize
        held = np.zeros(size + 512, np.uint8)
        return held[-held.ctypes.data % 256 + shift :][:size]

    def run(self, memory=None, stream=70):
        addresses = [x.ctypes.data for x in memory or self.memory]
        self.entry.on_gpu(Frame(addresses[: self.count], addresses[self.count :], stream))

    def elsewhere(self, shift=0):
        return [self.new(x, shift) for x in (*self.entry._operands, *self.entry._results)]


@pytest.fixture
def streams(cupy, monkeypatch):
    """Make the streams of calls the current ones of CuPy."""

    @contextmanager
    def on_stream(stream, device):
        with cupy.stream(stream):
            yield

    monkeypatch.setattr(device_arrays, "on_stream", on_stream)


@pytest.fixture
def scratch(cupy, monkeypatch):
    """Give scratch memory out from one place on, until this list is cleared."""
    asked, room = [], cupy.alloc(1 << 24)

    def memory(size):
        begin = sum(-(-x // ALIGNMENT) * ALIGNMENT for x in asked)
        asked.append(size)
        return room + begin

    monkeypatch.setattr(device_arrays, "memory", memory)
    monkeypatch.setattr(relaunch, "_scratch", {})
    return asked


@pytest.fixture
def borrowed(monkeypatch):
    """Return a list of the arrays that are made in XLA's memory."""
    made = []
    borrow = device_arrays.borrowed

    def watched(*how):
        made.append(borrow(*how))
        return made[-1]

    monkeypatch.setattr(device_arrays, "borrowed", watched)
    return made


def calls_of(function, *arrays):
    """Return the calls of a program, each with memory of its own."""
    before = set(target._entries)
    lowered = jax.jit(lambda *x: function(*x)).lower(*arrays)  # it was never lowered before
    made = [Call(target._entries[n]) for n in sorted(set(target._entries) - before)]
    for call in made:
        call.program = lowered  # it keeps the functions
    return made


def told(cupy):
    words = [launch.words for launch in cupy.launches]
    streams = [launch.stream for launch in cupy.launches]
    cupy.launches.clear()
    return words, streams


def gradient(**options):
    def loss(q, k, v, sink):
        return attention(q, k, v, sink=sink, **options).astype(jnp.float32).sum()

    sink = None if options.pop("has_sink", False) is False else jnp.asarray(SLOPES)
    argnums = (0, 1, 2) if sink is None else (0, 1, 2, 3)
    return lambda *x: jax.grad(loss, argnums)(*x, sink)


def with_a_seed(q, k, v):
    return attention(q, k, v, dropout=0.5, seed=7, mask=CAUSAL)


def with_a_key(q, k, v):
    return attention(q, k, v, dropout=0.5, seed=jnp.int32(3), mask=CAUSAL)


def packed(q, k, v):
    ends = jnp.array([0, 11, 40], jnp.int32)
    return attention_varlen(q[0], k[0], v[0], ends, ends, mask=CAUSAL)


def over_a_cache(q, k, v):
    lengths = jnp.array([40, 7], jnp.int32)
    return attention_cached(q[:, :, :1], k, v, lengths, score_mod=scores.alibi(SLOPES))


def turned(q, k, v):
    return rope(q, jnp.arange(40), Rotary(np.cos(TURNS), np.sin(TURNS))) + k + v


def with_axes_swapped(q, k, v):
    return attention(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v)), mask=masks.window(3, 3))


CALLS = {
    "attention": lambda q, k, v: attention(q, k, v, mask=CAUSAL),
    "look-ups": lambda q, k, v: attention(q, k, v, score_mod=scores.alibi(SLOPES)),
    "gradients": gradient(mask=CAUSAL),
    "gradients of many options": gradient(
        score_mod=[scores.softcap(3.0), scores.alibi(SLOPES)], has_sink=True
    ),
    "a seed": with_a_seed,
    "a key": with_a_key,
    "packed sequences": packed,
    "a cache": over_a_cache,
    "rope": turned,
    "swapped axes": with_axes_swapped,
}


def test_what_kernels_add_to_is_zero_before(streams, cupy):
    x = [a.astype(np.float32) for a in X]
    _, call = calls_of(gradient(precision="tf32x3"), *x)
    for _ in range(2):
        call.run()
    there = call.elsewhere()
    for memory in there:
        memory[...] = 255
    call.run(there)
    assert not there[call.count].any()  # dq
    assert (there[call.count + 1] == 255).all()


@pytest.mark.parametrize("name", CALLS)
def test_kernels_are_told_what_they_are_told_otherwise(
    streams, cupy, borrowed, scratch, name, monkeypatch
):
    for call in calls_of(CALLS[name], *X):
        for _ in range(2):
            call.run()
        assert borrowed
        told(cupy)
        there = call.elsewhere()
        borrowed.clear()
        scratch.clear()
        call.run(there)
        assert not borrowed
        found = told(cupy)
        assert found[0]
        with monkeypatch.context() as patched:
            patched.setattr(call.entry._relaunches, "_found", {})
            scratch.clear()
            call.run(there)
        words, streams_of = told(cupy)
        assert found[1] == streams_of == [70] * len(streams_of)
        for x, y in zip(found[0], words, strict=True):
            assert np.array_equal(x, y)


def test_each_stream_has_its_launches(streams, cupy, borrowed):
    (call,) = calls_of(CALLS["look-ups"], *X)
    places = []
    for stream in (70, 71):
        for _ in range(2):
            call.run(stream=stream)
        borrowed.clear()
        told(cupy)
        call.run(stream=stream)
        assert not borrowed
        ((words,), (of_launch,)) = told(cupy)
        assert of_launch == stream
        places.append(words)
    assert not np.array_equal(*places)  # the slopes have a copy for each stream


def test_arrays_that_are_not_aligned_go_the_other_way(streams, cupy, borrowed):
    (call,) = calls_of(CALLS["attention"], *X)
    for _ in range(2):
        call.run()
    borrowed.clear()
    call.run(call.elsewhere(shift=8))
    assert len(borrowed) == 5


def test_arrays_in_one_memory_are_not_told_apart(streams, cupy, borrowed):
    """A call is kept when its arrays are apart; then it serves arrays that are not."""
    (call,) = calls_of(CALLS["attention"], *X)
    q, k, _, *results = call.memory
    for _ in range(3):
        call.run([q, k, k, *results])
    assert not call.entry._relaunches._found
    call.run()
    assert call.entry._relaunches._found
    borrowed.clear()
    told(cupy)
    call.run([q, q, q, *results])
    assert not borrowed
    ((words,), _) = told(cupy)
    assert list(words).count(q.ctypes.data) == 6  # of parameters, and of tensor maps
    assert k.ctypes.data not in words


def test_results_that_are_copied_are_copied_every_time(streams, cupy, borrowed):
    """Those of vmap are summed, say."""

    def run(operands, into, shapes):
        return [cupyflash.attention(*operands)]

    def made(*x):
        shape = jax.ShapeDtypeStruct(X[0].shape, X[0].dtype)
        return target.bind(target.Function(run), [shape], "sequential", x)[0]

    (call,) = calls_of(made, *X)
    for _ in range(4):
        borrowed.clear()
        call.run()
        assert len(borrowed) == 4
    assert not call.entry._relaunches._found


def test_calls_that_are_checked_every_time_are_not_kept(streams, cupy, monkeypatch):
    monkeypatch.setattr(replay, "_entries", {})
    monkeypatch.setattr(replay, "keep", lambda *_: None)
    (call,) = calls_of(CALLS["attention"], *X)
    for _ in range(6):
        call.run()
    assert not call.entry._relaunches._found
    assert len(told(cupy)[0]) == 6


def test_scratch_memory_of_a_stream_is_used_again(streams, cupy, monkeypatch):
    """By all calls, if it is large enough; what a call holds no other one has."""
    monkeypatch.setattr(relaunch, "_scratch", {})
    memory = relaunch._Scratch(0, 70)
    first = memory.take(1000)
    other = memory.take(10)
    assert first[1].ptr != other[1].ptr
    memory.give_back(first)
    assert memory.take(900) is first
    memory.give_back(first)
    assert memory.take(1001)[1].ptr != first[1].ptr


def test_a_thread_of_which_nothing_is_known_goes_the_other_way(streams, cupy, borrowed):
    (call,) = calls_of(CALLS["attention"], *X)
    for _ in range(2):
        call.run()
    borrowed.clear()
    thread = threading.Thread(target=call.run)
    thread.start()
    thread.join()
    assert len(borrowed) == 5


@pytest.mark.parametrize("failure", ["launch", "fill"])
def test_errors_of_the_driver_say_which_kernel_fails(streams, cupy, failure):
    x = [a.astype(np.float32) for a in X]
    _, call = calls_of(gradient(precision="tf32x3"), *x)
    for _ in range(2):
        call.run()
    if failure == "launch":
        cupy.during_launch = lambda: host_cupy.TOO_MANY_RESOURCES
    else:
        (found,) = call.entry._relaunches._found.values()
        found._parts[0].clear = lambda *_: host_cupy.TOO_MANY_RESOURCES
    with pytest.raises(RuntimeError, match="OUT_OF_RESOURCES"):
        call.run()
