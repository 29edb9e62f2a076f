"""Streamed calls on a device whose streams are late: the transfers, without a GPU.

The device's back end is the CPU's: what it is asked for is done when its stream comes to it.
"""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from halves import mostly_thorough
from host_cupy import in_host, read_in_host
from hypothesis import given
from hypothesis import strategies as st
from placement import same_bits
from stream_cupy import StreamCupy

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, dispatch, masks, scores, streamed
from cupyflash.arrays import transfers
from cupyflash.backends.gpu import Gpu
from cupyflash.pieces import executor, heads, schedule
from cupyflash.pieces.executor import Streamed
from cupyflash.problem.arguments import ANYWHERE
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options
from cupyflash.request import Request

HOST, DEVICE = "host", "device"
ROWS, KEYS = 70, 400


def from_device(array):
    """Return an array of the device in host memory; one that is not there is no array of a kernel.

    None, where there is none.
    """
    assert not isinstance(array, np.ndarray), "a kernel has an array that is not on the device"
    return in_host(array)


class Late(Gpu):
    """A back end that computes on the CPU, when the stream comes to it."""

    def __init__(self, cupy):
        self.cupy = cupy

    def forward_piece(self, call, partial, first, results=None):
        made = tuple(map(from_device, partial)), first, results and tuple(map(from_device, results))
        self._later(dispatch.CPU.forward_piece, call, *made)

    def backward_piece(self, call, *arrays):
        *rows, gradients, _ = arrays
        made = [from_device(x) for x in rows], Gradients(*map(from_device, gradients))
        self._later(lambda call: dispatch.CPU.backward(call, *made[0], made[1], None), call)

    def _later(self, work, call, *arguments):
        names = ("q", "k", "v", "bias", "sink")
        changed = {name: from_device(getattr(call, name)) for name in names}
        changed |= {"mask": read_in_host(call.mask), "score_mod": read_in_host(call.score_mod)}
        call = dataclasses.replace(call, device=None, **changed)
        self.cupy.enqueue(lambda: work(call, *arguments))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(schedule, "TILE", 2)


@pytest.fixture
def device(install, monkeypatch):
    def made(seed=0, pinned=False, block=4096):
        cupy = install(StreamCupy(seed, pinned))
        monkeypatch.setattr(dispatch, "GPU", Late(cupy))
        monkeypatch.setattr(transfers, "BLOCK_BYTES", block)
        return cupy

    return made


def draw(dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(2, 4, ROWS, 16), (2, 2, KEYS, 16), (2, 2, KEYS, 24), (2, 4, ROWS, 24), (2, 4, ROWS)]
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    arrays[4] = arrays[4].astype(np.float32)
    return arrays


def options_of(kind):
    rng = np.random.default_rng(1)
    return {
        "plain": {},
        "window": {"mask": masks.window(3, 3, offset=130)},
        "segments": {
            "mask": masks.segments(np.arange(ROWS) // 20, np.arange(KEYS) // 115),
            "sink": rng.standard_normal(4).astype(np.float32),
        },
        "bias": {
            "bias": rng.standard_normal((4, ROWS, KEYS)).astype(np.float32),
            "score_mod": scores.alibi(np.ones(4, np.float32)),
        },
        "shared bias": {"bias": rng.standard_normal((1, KEYS)).astype(np.float32)},
        "dropout": {"mask": masks.causal(), "dropout": 0.4, "seed": 3},
    }[kind]


def compare(cupy, arrays, homes, chunk, options):
    """Compare a call whose arrays are at these homes with the same one on the CPU, bit by bit."""
    q, k, v, do, dlse = arrays
    chunk_of_host = (ROWS if homes[0] == DEVICE else chunk[0], chunk[1])
    out, lse, vjp = streamed.attention_vjp(q, k, v, chunk=chunk_of_host, return_lse=True, **options)
    gradients = vjp(do, dlse)

    def place(x, home):
        return cupy.asarray(x) if home == DEVICE else x

    at = [place(x, home) for x, home in zip((q, k, v, do, dlse), homes, strict=True)]
    ours, our_lse = streamed.attention(*at[:3], chunk=chunk, device=0, return_lse=True, **options)
    theirs = streamed.attention_backward(
        at[3], *at[:3], ours, our_lse, dlse=at[4], chunk=chunk, device=0, **options
    )
    assert isinstance(ours, np.ndarray) == (homes[0] == HOST)
    for name, x, y in zip(Gradients._fields, theirs, gradients, strict=True):
        if name in ("dq", "dk", "dv"):
            assert isinstance(x, np.ndarray) == (homes["qkv".index(name[1])] == HOST), name
        assert (x is None) == (y is None), name
    cupy.run_all()  # what the device still computes on its own arrays
    pairs = [("out", ours, out), ("lse", our_lse, lse)]
    pairs += [*zip(Gradients._fields, theirs, gradients, strict=True)]
    for name, x, y in pairs:
        if x is not None:
            assert same_bits(in_host(x), y), name


@mostly_thorough(
    "homes", ["hhhhh", "dhhdh", "ddhhd", "hdddd"], quick=["hhhhh", "dhhdh"], why="other homes alike"
)
@mostly_thorough(
    "kind",
    ["plain", "window", "segments", "bias", "shared bias", "dropout"],
    quick=["window", "shared bias", "dropout"],
    why="less to transfer than those have",
)
def test_transfers_change_no_bit(device, kind, homes):
    arrays = draw(ml_dtypes.bfloat16 if kind in ("plain", "dropout") else np.float32)
    places = [DEVICE if home == "d" else HOST for home in homes]
    for seed in range(2):
        cupy = device(seed, pinned=bool(seed))
        compare(cupy, arrays, places, (30, 128), options_of(kind))


def test_the_second_chunk_arrives_while_the_first_one_is_computed(device, monkeypatch):
    """Nothing that is copied waits for what computes, as far as two chunks have memory."""
    q, k, v, *_ = draw()
    cupy, order = device(pinned=True), []
    later_first = itertools.count(0, -1).__next__  # what is copied goes first
    cupy.rng = SimpleNamespace(random=later_first)
    copy, compute = cupy.cuda.runtime.memcpyAsync, dispatch.GPU.forward_piece

    def copied(to, source, size, kind, stream):
        copy(to, source, size, kind, stream)
        cupy.enqueue(lambda: order.append("copy"), stream)

    def computed(*arguments):
        compute(*arguments)
        cupy.enqueue(lambda: order.append("compute"))

    monkeypatch.setattr(cupy.cuda.runtime, "memcpyAsync", copied)
    monkeypatch.setattr(dispatch.GPU, "forward_piece", computed)
    out = streamed.attention(cupy.asarray(q), k, v, chunk=(ROWS, 128))
    cupy.run_all()
    of_chunk = 2 * 2 * 2  # arrays, entries and heads
    assert order.index("compute") == 2 * of_chunk
    assert order.count("copy") == 4 * of_chunk
    assert same_bits(in_host(out), streamed.attention(q, k, v, chunk=(ROWS, 128)))


def test_chunks_of_keys_grow_on_a_device_and_faster_for_more_queries(device, monkeypatch):
    monkeypatch.setattr(executor, "FIRST", 128)
    monkeypatch.setattr(executor, "QUERIES", ROWS)
    q, k, v, *_ = draw()
    cupy = device()
    for queries, expected in ((q, [128, 272]), (q[:, :2], [128, 256, 16])):
        request = Streamed(
            Request(cupy.asarray(queries), k, v, ANYWHERE, options=Options()), "auto", None
        )
        assert [len(keys) for keys in request.schedule.keys] == expected
        ours = streamed.attention(cupy.asarray(queries), k, v)
        cupy.run_all()
        theirs = streamed.attention(queries, k, v)
        assert np.abs(in_host(ours) - theirs).max() < 1e-5


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 100), st.floats(1, 3))
def test_chunks_grow_by_whole_tiles(length, first, more, factor):
    made = schedule.growing(length, 128 * first, 128 * (first + more), factor)
    assert [x for each in made[:3] for x in each[:1]] == [x.start for x in made[:3]]
    assert sum(map(len, made)) == length
    assert all(one.stop == other.start for one, other in itertools.pairwise(made))
    sizes = [len(x) for x in made[:-1]]
    assert all(size % 128 == 0 and size <= 128 * (first + more) for size in sizes)
    assert all(min(int(one * factor), 128 * (first + more)) <= other
               <= one * factor + 128 for one, other in itertools.pairwise(sizes))  # fmt: skip


OF_HEADS = {
    "dropout": {"mask": masks.causal(), "dropout": 0.4, "seed": 3},
    "of one head": {
        "mask": masks.mask(lambda b, h, i, j: (i + h) % 3 != j % 3),
        "score_mod": scores.alibi(np.linspace(0.1, 1, 8).astype(np.float32)),
    },
    "plain": {},
}


@pytest.fixture
def few_tiles(monkeypatch):
    """Let the two query heads of one key-value head be enough for a group."""
    monkeypatch.setattr(heads, "TILES", 2)


def draw_heads():
    rng = np.random.default_rng(2)
    shapes = [(2, n, length, d) for n, length, d in
              ((8, 100, 16), (4, 90, 16), (4, 90, 24), (8, 100, 24))]  # fmt: skip
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize("kind", OF_HEADS)
@mostly_thorough(
    "homes",
    ["hhhh", "dhhd", "ddhd", "dhdh", "dddd"],
    quick=["hhhh", "dhhd"],
    why="other homes alike",
)
def test_heads_with_all_of_their_keys_have_the_bits_of_one_call(device, kind, homes):
    q, k, v, do = arrays = draw_heads()
    out, lse, vjp = cupyflash.attention_vjp(q, k, v, return_lse=True, **OF_HEADS[kind])
    dlse = np.random.default_rng(5).standard_normal(lse.shape, np.float32)
    for seed in range(2):
        cupy = device(seed, pinned=bool(seed))
        at = [x if home == "h" else cupy.asarray(x) for x, home in zip(arrays, homes, strict=True)]
        request = Streamed(Request(*at[:3], ANYWHERE, options=Options(**OF_HEADS[kind])), "auto", 0)
        assert len(request.groups_at(request.place())) == 4
        ours, our_lse = streamed.attention(*at[:3], device=0, return_lse=True, **OF_HEADS[kind])
        more = {"dlse": dlse, "device": 0} | OF_HEADS[kind]
        gradients = streamed.attention_backward(at[3], *at[:3], ours, our_lse, **more)
        cupy.run_all()
        for x, y in ((ours, out), (our_lse, lse), *zip(gradients[:3], vjp(do, dlse), strict=False)):
            assert same_bits(in_host(x), y)
        assert isinstance(gradients.dk, np.ndarray) == (homes[1] == "h")


def test_heads_are_divided_where_each_group_fills_the_device(monkeypatch):
    """And where there is memory for its keys and its queries, and somebody sees each chunk."""

    def made(rows=0, keys=90, travel=(), **options):
        q, k, v, _ = draw_heads()
        request = Streamed(Request(q, k, v, ANYWHERE, options=Options(**options)), (100, 30), None)
        found = heads.groups(request.call, request.schedule, rows, keys, travel)
        assert [x for of in found for x in of.kv] == list(range(4) if found else ())
        assert all(list(of.heads) == [2 * x + n for x in of.kv for n in (0, 1)] for of in found)
        return len(found)

    assert not made()  # 2 tiles of a key-value head
    monkeypatch.setattr(heads, "TILES", 2)
    assert made() == 4
    monkeypatch.setattr(heads, "TILES", 4)
    assert not made()  # 2 groups
    monkeypatch.setattr(heads, "FEWEST", 2)
    assert made() == 2
    assert made(keys=45, rows=50) == 2
    assert not made(keys=44)
    assert not made(rows=49)
    rows_of_all_heads = np.zeros((2, 90, 4, 16)).swapaxes(1, 2)
    assert made(travel=[rows_of_all_heads.copy()]) == 2
    assert not made(travel=[rows_of_all_heads])
    assert not made(mask=masks.prefix(59) & masks.window(None, 0, offset=-40))
    assert made(mask=masks.prefix(61) & masks.causal()) == 2
    assert not made(sink=np.zeros(8, np.float32))
    assert not made(bias=np.zeros((100, 90), np.float32))


def test_keys_that_nobody_sees_are_not_copied(device):
    q, k, v, *_ = draw()
    mask = masks.window(3, 3, offset=130)  # keys 127 to 202
    k[..., 256:, :] = v[..., 256:, :] = np.nan
    cupy = device()
    out = streamed.attention(q, k, v, mask=mask, chunk=(ROWS, 128), device=0)
    assert same_bits(out, streamed.attention(q, k, v, mask=mask, chunk=(ROWS, 128)))
    moved = sum(size for kind, size in cupy.copies if kind == 1)
    assert moved == q.nbytes + (k.nbytes + v.nbytes) * 256 // KEYS


def test_pinned_arrays_are_copied_from_where_they_are(device):
    q, k, v, *_ = draw()
    largest = []
    for pinned in (False, True):
        cupy = device(pinned=pinned)
        streamed.attention(q, k, v, chunk=(ROWS, 256), device=0)
        largest.append(max(size for kind, size in cupy.copies if kind == 1))
    assert largest == [4096, q.nbytes]  # a block, and all queries


@pytest.mark.parametrize("part", [np.s_[:], np.s_[:, 1:3], np.s_[..., :24]], ids=str)
def test_results_in_pinned_memory_arrive_where_they_belong(part, device):
    """Without memory in between, if their rows are in a row."""
    q, k, v, do, lse = draw()
    out, lse = streamed.attention(q, k, v, chunk=128, return_lse=True)
    options = {"chunk": (ROWS, 128)}
    expected = streamed.attention_backward(do, q, k, v, out, lse, **options)
    cupy = device(pinned=True)
    asked, alloc = [], cupy.cuda.alloc_pinned_memory
    cupy.cuda.alloc_pinned_memory = lambda size: (asked.append(size), alloc(size))[1]
    dk, dv = (np.zeros((2, 4, KEYS, 48), np.float32)[part] for _ in "kv")
    dk, dv = dk[:, :2, :, :16], dv[:, :2, :, :24]
    if part == np.s_[:, 1:3]:
        dk, dv = (np.zeros((2, 4, *x.shape[2:]), np.float32)[part] for x in (dk, dv))
    arrays = map(cupy.asarray, (do, q))
    on_device = [*map(cupy.asarray, (out, lse))]
    given = next(arrays), next(arrays), k, v, *on_device
    made = streamed.attention_backward(*given, grads_out=(None, dk, dv), **options)
    assert made.dk is dk
    assert same_bits(dk, expected.dk)
    assert same_bits(dv, expected.dv)
    assert bool(asked) == (part != np.s_[:, 1:3])


def test_arrays_and_numbers_of_another_device_are_refused(device):
    cupy = device()
    q, k, v, do, _ = draw()
    with pytest.raises(ArgumentError, match="device: got -1; expected the number of a GPU"):
        streamed.attention(q, k, v, device=-1)
    with pytest.raises(ArgumentTypeError, match="device: got 'gpu'; expected the number"):
        streamed.attention(q, k, v, device="gpu")
    there = cupy.asarray(q)
    there.device = cupy.Device(1)
    with pytest.raises(ArgumentTypeError, match="q: got an array in the memory of GPU 1"):
        streamed.attention(there, k, v, device=0)
    with pytest.raises(ArgumentTypeError, match="k: got an array in the memory of GPU 0, but q"):
        streamed.attention(q, cupy.asarray(k), v)
    with pytest.raises(ArgumentTypeError, match="out: got an array in host memory; expected one"):
        streamed.attention(cupy.asarray(q), k, v, out=np.empty_like(do))
    out, lse = streamed.attention(q, k, v, device=0, return_lse=True)
    targets = None, cupy.asarray(k), None
    with pytest.raises(
        ArgumentTypeError, match=r"grads_out\.dk: got an array in the memory of GPU"
    ):
        streamed.attention_backward(do, q, k, v, out, lse, device=0, grads_out=targets)


def test_a_capture_is_refused(device, monkeypatch):
    cupy = device()
    monkeypatch.setattr(cupy.cuda.Stream, "is_capturing", lambda _: True)
    with pytest.raises(ArgumentError, match="while a CUDA graph is being captured"):
        streamed.attention(*draw()[:3], device=0)
