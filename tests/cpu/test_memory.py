"""What memory a call needs, asks for and keeps: workspace, peak, and what a vjp holds."""

from __future__ import annotations

import gc
import tracemalloc
import types
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from halves import mostly_thorough
from placement import POISON, Layout, Placed, same_bits

from cupyflash import (
    ArgumentError,
    attention,
    attention_backward,
    attention_varlen_backward,
    attention_varlen_vjp,
    attention_vjp,
    masks,
    scores,
    workspace_size,
)
from cupyflash.reference.cpu.packing import lanes_of_pair

F32 = np.float32
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)


def filled(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


def random_problem() -> Any:
    shapes = (2, 4, 37, 9), (2, 4, 37, 16), (2, 2, 53, 16), (2, 2, 53, 9)
    return tuple(filled(*shape) for shape in shapes)


# Workspace


def varying_problem(kind: str) -> Any:
    shapes = {
        "narrow": (1, 1, 1, 300, 1, 1),
        "wide values": (2, 1, 1, 129, 1, 200),
        "wide keys": (1, 2, 200, 3, 257, 1),
        "many heads": (1, 8, 130, 65, 5, 17),
    }
    batch, heads, len_q, len_k, d, d_v = shapes[kind]
    do, q = filled(batch, heads, len_q, d_v), filled(batch, heads, len_q, d)
    return do, q, filled(batch, heads, len_k, d), filled(batch, heads, len_k, d_v)


@BY_DTYPE
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(steps=(2, 1, -1, 2), shift=1)], ids=["C", "odd"]
)
@pytest.mark.parametrize("kind", ["narrow", "wide values", "wide keys", "many heads"])
def test_the_workspace_suffices_and_changes_no_bit(kind, layout, dtype):
    problem = [x.astype(dtype) for x in varying_problem(kind)]
    out, lse, vjp = attention_vjp(*problem[1:], return_lse=True)
    expected = vjp(problem[0])
    do, q, k, v = (Placed(x.shape, dtype, layout, x).view for x in problem)
    dlse = np.zeros(lse.shape, lse.dtype)
    targets = [Placed(x.shape, dtype, layout) for x in (q, k, v)]
    scratch = Placed((workspace_size(q, k, v),), np.uint8, Layout(shift=7))
    assert (scratch.view == POISON).all()
    grads = attention_backward(
        do,
        q,
        k,
        v,
        out,
        lse,
        dlse=dlse,
        workspace=scratch.view,
        grads_out=[x.view for x in targets],
    )
    for placed in (scratch, *targets):
        placed.check()
    for mine, wanted in zip(grads[:3], expected[:3], strict=True):
        assert same_bits(mine, wanted)


def test_the_workspace_of_a_packed_call():
    offsets_q, offsets_k = [0, 0, 7, 137, 150], [0, 3, 3, 90, 91]
    q, k, v = (filled(2, n, d, dtype=np.float16) for n, d in ((150, 5), (91, 5), (91, 20)))
    given = (q, k, v, offsets_q, offsets_k)
    out, lse, vjp = attention_varlen_vjp(*given, return_lse=True)
    expected = vjp(out)
    size = workspace_size(q, k, v, offsets_q=offsets_q, offsets_k=offsets_k)
    scratch = Placed((size,), np.uint8, Layout(shift=3))
    grads = attention_varlen_backward(
        out, q, k, v, out, lse, offsets_q, offsets_k, workspace=scratch.view
    )
    scratch.check()
    for mine, wanted in zip(grads[:3], expected[:3], strict=True):
        assert same_bits(mine, wanted)


def test_workspace_size_is_linear():
    def size(length: int, heads: int = 2) -> int:
        x = np.broadcast_to(np.float16(0), (3, heads, length, 64))
        return workspace_size(x, x, x)

    step = size(4096) - size(2048)
    assert size(6144) - size(4096) == step
    assert size(2048 * 512) - size(2048 * 511) == step
    assert size(2048) < step * 1.01
    # No more than a dozen arrays of the size of q in float32.
    assert size(4096) < 12 * 4 * 3 * 2 * 4096 * 64


def test_the_workspace_of_many_short_sequences():
    """A short sequence takes a vector of queries, not a block of them."""
    x = np.broadcast_to(np.float32(0), (1, 10**5, 4))
    offsets = np.arange(10**5 + 1)
    size = workspace_size(x, x, x, offsets_q=offsets, offsets_k=offsets)
    # 11 rows of 16 numbers, and two panels of 4 rows, which are pairs of vectors.
    assert size < 10**5 * 4 * (12 * 16 + 2 * 4 * lanes_of_pair(4))


def test_an_exact_workspace_is_needed():
    do, q, k, v = random_problem()
    out, lse = attention(q, k, v, return_lse=True)
    workspace = np.empty(workspace_size(q, k, v) - 1, np.uint8)
    with pytest.raises(ArgumentError, match="workspace_size"):
        attention_backward(do, q, k, v, out, lse, workspace=workspace)


# Memory


def peak_bytes(function: Any) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "2")


@mostly_thorough(
    "dtype",
    [np.float32, np.float16],
    quick=[np.float16],
    why="the other type by the same rule",
    ids=str,
)
def test_peak_memory_is_linear(dtype, two_threads):
    def peaks(length: int) -> tuple[int, int]:
        x = filled(1, 2, length, 16, dtype=dtype)
        out, lse, vjp = attention_vjp(x, x, x, mask=masks.causal(), return_lse=True)
        vjp(x)  # has everything compiled
        return (
            peak_bytes(lambda: attention(x, x, x, mask=masks.causal())),
            peak_bytes(lambda: attention_backward(x, x, x, x, out, lse, mask=masks.causal())),
        )

    lengths = (1024, 2048, 4096)
    for at_l, at_2l, at_4l in zip(*map(peaks, lengths), strict=True):
        fixed = 700_000  # tiles and registers of two threads
        assert at_2l < 2 * at_l + fixed
        assert at_4l < 4 * at_l + fixed
        assert at_4l < 4096 * 4096  # far below one byte per score of the two heads


def kept_arrays(function: Any) -> list[np.ndarray]:
    """Return the arrays that a function keeps alive, views counted as what they view."""
    found: dict[int, np.ndarray] = {}
    seen: set[int] = set()
    pending = gc.get_referents(function)
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, (type, types.ModuleType, types.FunctionType)):
            continue
        seen.add(id(value))
        if isinstance(value, np.ndarray):
            while isinstance(value.base, np.ndarray):
                value = value.base
            found[id(value)] = value
        else:
            pending += gc.get_referents(value)
    return list(found.values())


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_vjp_keeps_its_inputs_and_results_only(return_lse):
    _, q, k, v = random_problem()
    result = attention_vjp(q, k, v, mask=masks.causal(), return_lse=return_lse)
    out, vjp = result[0], result[-1]
    kept = kept_arrays(vjp)
    assert {id(x) for x in (q, k, v, out)} < {id(x) for x in kept}
    floats = [x for x in kept if x.dtype == q.dtype]
    assert len(floats) == 5
    assert sum(x.nbytes for x in floats) == sum(x.nbytes for x in (q, k, v, out)) + 2 * 4 * 37 * 4
    assert len(kept) == len(floats) + 2  # where pieces lie that are summed, and the sums
    assert sum(x.nbytes for x in kept) < 1.01 * sum(x.nbytes for x in floats)


def test_a_vjp_lets_go_with_itself():
    _, q, k, v = random_problem()
    out, vjp = attention_vjp(q, k, v)
    watched = [weakref.ref(x) for x in (q, k, v, out)]
    vjp(out)
    gc.disable()
    try:
        del q, k, v, _
        assert all(reference() is not None for reference in watched)
        del out, vjp
        assert not any(reference() is not None for reference in watched)
    finally:
        gc.enable()


def test_a_call_keeps_nothing():
    _, q, k, v = random_problem()
    table = filled(4)
    out = attention(q, k, v, score_mod=scores.alibi(table), bias=filled(37, 53))
    watched = [weakref.ref(x) for x in (q, k, v, table, out)]
    gc.disable()
    try:
        del q, k, v, table, out, _
        assert not any(reference() is not None for reference in watched)
    finally:
        gc.enable()


def test_packed_qkv_is_not_copied(two_threads):
    length = 8192
    qkv, grad = filled(1, length, 3, 2, 64), np.empty((1, length, 3, 2, 64), F32)
    q, k, v = (qkv[:, :, n].swapaxes(-3, -2) for n in range(3))
    mask = masks.window(32, 0)
    out, lse = attention(q, k, v, mask=mask, return_lse=True)
    do, again, lse_again = np.ones_like(out), np.empty_like(out), np.empty_like(lse)

    def forward():
        attention(q, k, v, mask=mask, out=again, lse_out=lse_again)

    forward()  # loads kernels and modules
    assert peak_bytes(forward) < 0.2 * q.nbytes
    targets = {
        "grads_out": [grad[:, :, n].swapaxes(-3, -2) for n in range(3)],
        "workspace": np.empty(workspace_size(q, k, v, mask=mask), np.uint8),
    }

    def backward():
        attention_backward(do, q, k, v, out, lse, mask=mask, **targets)

    backward()
    assert peak_bytes(backward) < 0.25 * q.nbytes  # scratch of two threads


@pytest.mark.parametrize("queries", [5, 50])  # by the kernel for few queries, and by the tiled one
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
def test_keys_of_16_bits_are_not_copied(dtype, queries, two_threads, monkeypatch):
    monkeypatch.setenv("CUPYFLASH_AMX", "none")  # sums by AMX have an order of their own
    # A copy in float32 would be twice as large as they are.
    q, k, v = (filled(1, 2, length, 24, dtype=dtype) for length in (queries, 40_000, 40_000))
    for mask in (None, masks.causal()):
        attention(q, k[:, :, :900], v[:, :, :900], mask=mask)  # compiles
        found: list[Any] = []
        peak = peak_bytes(lambda m=mask, to=found: to.append(attention(q, k, v, mask=m)))
        assert peak < 0.2 * k.nbytes
        exact = attention(*(x.astype(F32) for x in (q, k, v)), mask=mask)
        assert same_bits(found[0], exact.astype(dtype))


# Repeated rows

# Axes of k and v, (3, 2, 4096, 9), that repeat what is there once.
REPEATED = [(2,), (1,), (0,), (0, 1), (0, 1, 2)]


def repeated(axes: tuple[int, ...], width: int, dtype: Any) -> np.ndarray:
    shape = (3, 2, 4096, width)
    once = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    return np.broadcast_to(filled(*once, dtype=dtype), shape)


@BY_DTYPE
@pytest.mark.parametrize("axes", REPEATED, ids=str)
def test_repeated_rows_are_copied_once(axes: tuple[int, ...], dtype: Any) -> None:
    q, k, v = filled(3, 2, 5, 9, dtype=dtype), *(repeated(axes, n, dtype) for n in (9, 7))
    whole = [np.ascontiguousarray(x) for x in (k, v)]
    out, lse = attention(q, k, v, return_lse=True)
    wanted = attention(q, *whole, return_lse=True)
    assert same_bits(out, wanted[0])
    assert same_bits(lse, wanted[1])
    ours = attention_backward(out, q, k, v, out, lse)
    for a, b in zip(ours[:3], attention_backward(out, q, *whole, out, lse)[:3], strict=True):
        assert same_bits(a, b)


@BY_DTYPE
def test_keys_that_are_all_one_row_take_the_memory_of_one(dtype: Any) -> None:
    q, row = filled(1, 1, 3, 7, dtype=dtype), np.arange(7).astype(dtype)
    x = np.broadcast_to(row, (1, 1, 2**20, 7))
    attention(q, x[:, :, :9], x[:, :, :9])  # compiles
    found: list[Any] = []
    peak = peak_bytes(lambda: found.append(attention(q, x, x)))
    assert peak < 2**20  # a whole copy has 32 MiB or more
    assert (found[0] == row).all()  # equal weights of small whole numbers: no sum is rounded
