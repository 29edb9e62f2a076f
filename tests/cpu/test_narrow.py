"""Results of 16 bits: kernels round them as NumPy does, and write them where they belong."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
from llvmlite import ir
from test_vectors import run_here

from cupyflash import attention, attention_backward
from cupyflash.problem import replay
from cupyflash.reference.cpu import narrow, operands
from cupyflash.reference.cpu.vectors import INT

WORD, HALF = ir.IntType(32), ir.IntType(16)
EMITTED = {
    np.float16: narrow._emit_half,
    ml_dtypes.bfloat16: narrow._emit_bfloat,
}


def rounder(emit, lanes):
    """Compile a function that rounds as many numbers of float32 at an address to another one."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [INT] * 2), "rounded")
    builder = ir.IRBuilder(function.append_basic_block())
    word, half = (x if lanes == 1 else ir.VectorType(x, lanes) for x in (WORD, HALF))
    source, target = function.args

    def constant(value):
        return ir.Constant(word, value if lanes == 1 else [value] * lanes)

    bits = builder.load(builder.inttoptr(source, word.as_pointer()))
    bits.align = 4
    value = builder.trunc(emit(builder, bits, constant), half)
    builder.store(value, builder.inttoptr(target, half.as_pointer())).align = 2
    builder.ret_void()
    return run_here(module, "rounded", ctypes.c_int64, ctypes.c_int64)


def around(kind):
    """Numbers at, and next to, every number of 16 bits and the middle of any two."""
    every = np.arange(2**16, dtype=np.uint16).view(kind).astype(np.float32)
    every = np.sort(every[np.isfinite(every)])
    middles = (every[:-1].astype(np.float64) + every[1:]) / 2
    exact = np.concatenate([every, middles.astype(np.float32)])
    most = np.float32(np.finfo(np.float32).max)
    special = np.array([np.inf, -np.inf, np.nan, -np.nan, most, -most, 65519.996, 65520, 1e-45])
    near = [np.nextafter(exact, np.float32(end)) for end in (np.inf, -np.inf)]
    bits = np.random.default_rng(0).integers(0, 2**32, 2**16, np.uint32).view(np.float32)
    return np.concatenate([exact, *near, special.astype(np.float32), bits])


@pytest.mark.parametrize("kind", EMITTED)
@pytest.mark.parametrize("lanes", [1, 16])
def test_rounding_is_that_of_numpy(kind, lanes):
    held, run = rounder(EMITTED[kind], lanes)
    x = around(kind)
    x = x[:: 97 if lanes == 1 else 1]
    x = np.concatenate([x, np.zeros(-len(x) % lanes, np.float32)])
    got = np.empty(len(x), kind)
    for n in range(0, len(x), lanes):
        run(x.ctypes.data + 4 * n, got.ctypes.data + 2 * n)
    with np.errstate(all="ignore"):
        wanted = x.astype(kind)
    is_nan = np.isnan(x)
    assert np.array_equal(np.isnan(got.astype(np.float32)), is_nan)
    assert np.array_equal(got.view(np.uint16)[~is_nan], wanted.view(np.uint16)[~is_nan])
    del held


SHAPES = {
    "one pass": ((3, 4, 40, 20), (3, 2, 50, 20)),
    "two passes": ((1, 1, 400, 20), (1, 1, 300, 20)),
    "several queries' keys": ((3, 1, 40, 16), (1, 1, 50, 16)),
}


@pytest.mark.parametrize("kind", EMITTED)
@pytest.mark.parametrize("name", SHAPES)
def test_results_are_those_that_numpy_rounds(kind, name, monkeypatch):
    """Also results between the rows of others, which are not touched."""
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "3")
    rng = np.random.default_rng(0)
    of_q, of_k = SHAPES[name]
    q, do = (rng.standard_normal(of_q, np.float32).astype(kind) for _ in "qd")
    k, v = (rng.standard_normal(of_k, np.float32).astype(kind) for _ in "kv")

    def computed(places):
        out, lse = places(q), np.empty(q.shape[:-1], np.float32)
        attention(q, k, v, out=out, lse_out=lse, return_lse=True)
        grads = tuple(places(x) for x in (q, k, v))
        attention_backward(do, q, k, v, out, lse, grads_out=grads)
        return out, *grads

    def between(x):
        wide = np.full((*x.shape[:-2], 2 * x.shape[-2], x.shape[-1] + 3), 7, kind)
        return wide[..., ::2, 1:-2]

    with monkeypatch.context() as patch:
        # Kernels then read copies, and NumPy rounds what they write.
        wide = operands.Layout.has_whole_rows
        patch.setattr(
            operands.Layout, "has_whole_rows", lambda self, x: x.itemsize > 2 and wide(self, x)
        )
        apart = computed(lambda x: np.empty_like(x).swapaxes(-1, -2).copy().swapaxes(-1, -2))
    for places in (np.empty_like, between):
        for one, other in zip(computed(places), apart, strict=True):
            assert np.array_equal(one.view(np.uint16), other.view(np.uint16))
            if places is between:
                wide = one.base.copy()
                wide[..., ::2, 1:-2] = 7
                assert (wide == kind(7)).all()


@pytest.mark.parametrize("kind", EMITTED)
def test_results_of_16_bits_take_no_copies(kind, monkeypatch):
    monkeypatch.setattr(replay, "_entries", {})
    x = np.ones((4, 8, 64, 64), kind)
    attention(x, x, x)
    (entry,) = replay._entries.values()
    assert entry.nbytes == 0
