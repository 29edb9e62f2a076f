"""Arrays in device memory that change between a call and its gradients: never a wrong number."""

from __future__ import annotations

import threading
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, lookup, masks, scores
from cupyflash.arrays import reports
from cupyflash.gpu import checksum_launches
from cupyflash.gpu.launch import compiled_recipe
from cupyflash.gpu.writer import Recipe
from cupyflash.reference.cpu.checksum import checksums

pytestmark = pytest.mark.gpu
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@pytest.fixture
def cupy(gpu, monkeypatch):
    import cupy

    monkeypatch.setattr(checksum_launches, "FIRST", 1000)  # more than a test has: each is checked

    yield cupy
    cupy.cuda.get_current_stream().synchronize()
    for words, _, _ in reports._reports.values():
        words[:] = memoryview(bytes(words.nbytes)).cast(words.format)  # no other test is told


def draw(cupy, shape, seed=0, dtype=np.float32):
    made = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return cupy.asarray(made.astype(dtype))


class Case:
    """A call with everything that a function of gradients keeps."""

    def __init__(self, cupy, kind, dtype=np.float32):
        self.kind, self.cupy = kind, cupy
        heads, rows, columns = 4, 67, 32
        shape = (heads, rows, columns) if kind == "packed" else (2, heads, rows, columns)
        self.arrays = {name: draw(cupy, shape, n, dtype) for n, name in enumerate("qkv")}
        self.arrays["bias"] = draw(cupy, (heads, rows, rows), 3)
        if kind == "packed":
            self.arrays["bias"] = draw(cupy, (heads, 40, 40), 3)
        self.arrays["sink"] = draw(cupy, (heads,), 4)
        self.arrays["lengths"] = cupy.full(2, 37)
        self.arrays["slopes"] = draw(cupy, (heads,), 5)
        self.offsets = cupy.asarray([0, 27, rows])
        self.do = draw(cupy, shape, 6, dtype)

    def __call__(self, **more):
        x = self.arrays
        options = {
            "mask": masks.lengths(x["lengths"]),
            "score_mod": scores.alibi(lookup(x["slopes"])),
            "bias": x["bias"],
            "sink": x["sink"],
            "return_lse": True,
            "deterministic": True,
        } | more
        qkv = x["q"], x["k"], x["v"]
        if self.kind == "packed":
            return cupyflash.attention_varlen_vjp(*qkv, self.offsets, self.offsets, **options)
        return cupyflash.attention_vjp(*qkv, **options)

    def wait(self):
        self.cupy.cuda.get_current_stream().synchronize()


KINDS = pytest.mark.parametrize("kind", ["dense", "packed"])
SHOWN = {"lengths": "array 0 of mask", "slopes": "array 0 of score_mod"}


def same(cupy, found, wanted):
    """Whether gradients have the same bits."""
    return all(
        bool((a.view(np.uint8) == b.view(np.uint8)).all())
        for a, b in zip(found, wanted, strict=True)
    )


@KINDS
@pytest.mark.parametrize("name", "q k v bias sink lengths slopes out lse".split())
def test_a_changed_array_makes_gradients_nan_and_the_next_call_an_error(cupy, kind, name):
    case = Case(cupy, kind)
    case()[2](case.do)  # the second time, everything is recognised
    for _ in range(2):
        out, lse, vjp = case()
        array = {**case.arrays, "out": out, "lse": lse}[name]
        element = array[(-1,) * array.ndim].copy()
        array[(-1,) * array.ndim] -= 1
        gradients = vjp(case.do)
        for x in gradients:
            assert bool(cupy.isnan(x).all())
        case.wait()
        array[(-1,) * array.ndim] = element
        with pytest.raises(ArgumentError, match=f"changed in place .*: {SHOWN.get(name, name)};"):
            vjp(case.do)
        assert not any(bool(cupy.isnan(x).any()) for x in vjp(case.do))  # it is what it was
        case.wait()
        case()  # nothing else is reported


@KINDS
@pytest.mark.parametrize("dtype", DTYPES)
def test_unchanged_arrays_give_the_bits_of_an_unchecked_call(cupy, kind, dtype):
    case = Case(cupy, kind, dtype)
    wanted = case(check=False)[2](case.do)
    vjp = case()[2]
    for _ in range(3):
        assert same(cupy, vjp(case.do), wanted)
    case.arrays["k"] += 1
    assert all(bool(cupy.isnan(x.astype(np.float64)).all()) for x in vjp(case.do))


def test_a_thousand_repeats_give_no_false_alarm(cupy):
    x = draw(cupy, (1, 4, 512, 64), dtype=np.float16)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.get_current_stream().synchronize()
    kept = []
    for n in range(1000):
        with streams[n % 2]:
            out, vjp = cupyflash.attention_vjp(x, x, x, mask=masks.causal())
            gradients = vjp(out)
            if n % 50 == 0:
                kept.append((gradients, vjp(out)))  # words of its own
    for stream in streams:
        stream.synchronize()
    assert checksum_launches.reported(x) == []
    for pair in kept:
        assert not any(bool(cupy.isnan(g).any()) for each in pair for g in each if g is not None)


def test_threads_with_streams_of_their_own_give_no_false_alarm(cupy):
    x = draw(cupy, (1, 4, 256, 64), dtype=np.float16)
    cupy.cuda.get_current_stream().synchronize()
    found = []

    def work(stream):
        with stream:
            for _ in range(100):
                out, vjp = cupyflash.attention_vjp(x, x, x)
                found.append(bool(cupy.isnan(vjp(out).dq).any()))

    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)] + [cupy.cuda.Stream.null] * 2
    threads = [threading.Thread(target=work, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 100 * len(threads)
    assert not any(found)
    assert checksum_launches.reported(x) == []


def test_short_calls_are_checked_at_first_and_then_some(cupy, monkeypatch):
    monkeypatch.setattr(checksum_launches, "FIRST", 8)
    x, y = (draw(cupy, (1, 2, 41, 24)) for _ in range(2))
    found = []
    for _ in range(100):
        out, vjp = cupyflash.attention_vjp(x, y, y)
        out += 1
        found.append(bool(cupy.isnan(vjp(x).dq).all()))
        checksum_launches.reported(x)  # no other call is told
    assert all(found[:8])
    assert 8 < sum(found) < 50


def test_sums_are_those_of_the_cpu(cupy):
    x = draw(cupy, (2, 300, 3, 64))
    arrays = [x, x.transpose(0, 2, 1, 3)[:, 1], x[..., :37], x[..., 1:17], x[::-1, ::2], x[..., :1]]
    arrays.append(draw(cupy, (2, 4, 4096, 128), dtype=np.float16))
    arrays.append(cupy.arange(1001, dtype=np.uint8)[1:])
    named = {f"x{n}": array for n, array in enumerate(arrays)}
    rows = checksum_launches._rows(named, range(len(arrays)))
    kept = cupy.zeros(1 + checksum_launches.WARPS * rows[-1][1].end, np.uint64)
    recipe = compiled_recipe(Recipe(tuple(checksum_launches.launches(rows))), x.device.id)
    places = {name: array.data.ptr for name, array in named.items()}
    recipe.forward(places | {"kept": kept.data.ptr})
    begins = [0] + [checksum_launches.WARPS * row.end for _, row in rows]
    found = [sum(map(int, kept[1 + a : 1 + b].get())) % 2**64 for a, b in pairwise(begins)]
    host = []
    for array in arrays:  # with the same strides
        base = array if array.base is None else array.base
        begin = array.data.ptr - base.data.ptr
        memory = base.get().view(np.uint8).ravel()
        host.append(np.ndarray(array.shape, array.dtype, memory.data, begin, array.strides))
    assert found == [n % 2**64 for n in checksums(host)]


def test_a_forward_in_a_graph_is_summed_at_every_replay(cupy):
    x = draw(cupy, (1, 4, 128, 64))
    cupy.cuda.Device().synchronize()
    cupyflash.attention_vjp(x, x, x)[1](x)  # compiled
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cupyflash.attention_vjp(x, x, x)[1](x)
        stream.synchronize()
        stream.begin_capture()
        _out, vjp = cupyflash.attention_vjp(x, x, x)
        graph = stream.end_capture()
        for _ in range(2):
            x += 1  # in between replays, it may change
            graph.launch()
            wanted = cupyflash.attention_vjp(x, x, x, check=False, deterministic=True)[1](x)
            found = vjp(x)
            assert not any(bool(cupy.isnan(g).any()) for g in found[:3])
            np.testing.assert_allclose(found.dv.get(), wanted.dv.get(), rtol=1e-4, atol=1e-4)
        x += 1
        assert bool(cupy.isnan(vjp(x).dq).all())
    stream.synchronize()


def test_nothing_waits(cupy):
    """A call returns while the device is busy with what came before."""
    x = draw(cupy, (1, 2, 64, 32))
    big = draw(cupy, (2, 16, 8192, 128), dtype=np.float16)
    cupyflash.attention_vjp(x, x, x)[1](x)
    stream, done = cupy.cuda.get_current_stream(), cupy.cuda.Event()
    for _ in range(2):  # the first one compiles
        stream.synchronize()
        for _ in range(10):
            cupyflash.attention(big, big, big)
        done.record(stream)
        cupyflash.attention_vjp(x, x, x)[1](x)
        waited = done.done
    assert not waited
