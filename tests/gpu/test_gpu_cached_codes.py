"""Caches of codes on a GPU: within the bound, the same bits in any layout, and new rows."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from coded_caches import FORMATS, MIXED, Coded, forms_of, meaning, words

import cupyflash
from cupyflash import ArgumentError, masks
from cupyflash.gpu.kernels import decode
from cupyflash.testing import Precision, forward_bound, rho

pytestmark = pytest.mark.gpu
TYPES = [np.float16, ml_dtypes.bfloat16, np.float32]


@pytest.fixture
def cupy(gpu):
    import cupy

    return cupy


def draw(dtype, *shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def bits(array):
    return array.get().view(f"u{array.dtype.itemsize}")


ANY = pytest.mark.parametrize("form", [*FORMATS, *MIXED], ids=words)  # of keys and of values


def moved(cupy, held):
    """Return the same cache on the device."""
    names = [*held.names, *(["table"] if held.table is not None else [])]
    return dataclasses.replace(held, **{x: cupy.asarray(getattr(held, x)) for x in names})


def coded(cupy, form, room=3000, dim=64, dtype=np.float16):
    """Return a cache of codes, on the host and on the device."""
    k, v = draw(np.float32, (3, 2, room, dim), (3, 2, room, dim), seed=5)
    held = Coded.of(form, k, v, dtype=dtype)
    return held, moved(cupy, held)


def attend(q, held, lengths, **options):
    return cupyflash.attention_cached(q, held.k, held.v, lengths, **held.options, **options)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda x: np.dtype(x).name)
@ANY
def test_codes_are_within_the_bound(cupy, dtype, form):
    lengths = [3000, 0, 1111]
    host, _ = coded(cupy, form, dtype=dtype)
    held = moved(cupy, host.poisoned(lengths))
    (q,) = draw(dtype, (3, 8, 2, 64))
    out, lse = attend(
        cupy.asarray(q), held, cupy.asarray(lengths), mask=masks.causal(), return_lse=True
    )
    precision = Precision.of(np.dtype(dtype), np.dtype(dtype).itemsize == 2).with_codes()
    k, v = host.numbers
    for b, length in enumerate(lengths):
        own = q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length]
        bound = forward_bound(*own, precision=precision, block_kv=64, mask=masks.causal())
        assert rho(out[b : b + 1].get(), *bound.out).value <= 1
        assert rho(lse[b : b + 1].get(), *bound.lse).value <= 1


@ANY
def test_pages_and_drafts_of_codes_change_no_bit(cupy, form):
    host, held = coded(cupy, form, room=700)
    (q,) = draw(np.float16, (3, 8, 2, 64))
    q, lengths = cupy.asarray(q), cupy.asarray([700, 77, 600])
    out = attend(q, held, lengths, mask=masks.causal())
    pages = moved(cupy, host.paged(16))
    assert np.array_equal(bits(attend(q, pages, lengths, mask=masks.causal())), bits(out))
    for n in range(2):
        step = attend(q[:, :, n : n + 1], held, lengths - 1 + n)
        assert np.array_equal(bits(step), bits(out[:, :, n : n + 1]))


@pytest.mark.parametrize("form", MIXED, ids=words)
def test_keys_and_values_have_the_bits_that_they_have_beside_their_own_kind(cupy, form):
    """The log-sum-exp is that of keys alone, and weights that are equal leave values alone."""
    held, by_keys, by_values = (
        coded(cupy, x, room=700)[1] for x in (form, (form[0],) * 2, (form[1],) * 2)
    )
    (q,) = draw(np.float16, (3, 8, 2, 64))
    q, lengths = cupy.asarray(q), cupy.asarray([700, 77, 600])
    (_, lse), (_, expected) = (attend(q, x, lengths, return_lse=True) for x in (held, by_keys))
    assert np.array_equal(bits(lse), bits(expected))
    out, expected = (attend(cupy.zeros_like(q), x, lengths) for x in (held, by_values))
    assert np.array_equal(bits(out), bits(expected))


@pytest.mark.parametrize("form", [("int8", "int4"), (None, "float8_e4m3fn"), ("int4", None)])
def test_shared_keys_and_values_of_different_types_change_no_bit(cupy, monkeypatch, form):
    monkeypatch.setattr(decode, "FEWEST_SHARED_BYTES", 0)
    host, _ = coded(cupy, form, room=1400)
    for name in host.names:
        getattr(host, name)[1:, :, :1100] = getattr(host, name)[:1, :, :1100]
    held = moved(cupy, host)
    (q,) = draw(np.float16, (3, 8, 1, 64))
    q, lengths = cupy.asarray(q), cupy.asarray([1400, 1100, 600])
    shared = {**held.options, "shared": 1100}
    out = cupyflash.attention_cached(q, held.k, held.v, lengths, **shared)
    assert np.array_equal(bits(out), bits(attend(q, held, lengths)))
    told = cupyflash.plan_cached(q, held.k, held.v, lengths, **shared)
    assert "decode_sm80_shared reads the first 1024 positions" in told.reason


def test_a_scale_may_be_a_number(cupy):
    """Also in a graph, if a call before had the same number."""
    _, held = coded(cupy, ("int8", "float8_e4m3fn"), room=700)
    (q,) = draw(np.float16, (3, 8, 1, 64))
    q, lengths = cupy.asarray(q), cupy.asarray([700, 77, 600], cupy.int32)
    arrays = {name: cupy.full((1, 1), 0.0217, cupy.float32) for name in ("k_scale", "v_scale")}
    given = {"kv_dtype": held.form}
    want = cupyflash.attention_cached(q, held.k, held.v, lengths, **given, **arrays)
    for number in (0.0217, np.float32(0.0217), np.array(0.0217)):
        scales = {"k_scale": number, "v_scale": number}
        out = cupyflash.attention_cached(q, held.k, held.v, lengths, **given, **scales)
        assert np.array_equal(bits(out), bits(want))
    workspace = cupy.empty(
        cupyflash.workspace_size_cached(q, held.k, held.v, **given, **scales), cupy.uint8
    )
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        try:
            scaled = {"k_scale": 0.9173, "v_scale": 0.0217, "workspace": workspace}
            with pytest.raises(ArgumentError, match="while a CUDA graph is being captured"):
                cupyflash.attention_cached(q, held.k, held.v, lengths, **given, **scaled)
            out.fill(0)
            again = {**scales, "workspace": workspace, "out": out}
            cupyflash.attention_cached(q, held.k, held.v, lengths, **given, **again)
        finally:
            graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    assert np.array_equal(bits(out), bits(want))


@pytest.mark.parametrize("form", FORMATS)
def test_every_code_means_the_same_on_a_gpu(cupy, form):
    codes = np.arange(256, dtype=np.uint8).reshape(1, 1, 1, -1)
    scale = cupy.full((1, 1, 1, 1), 0.375, cupy.float32)
    k = cupy.zeros((1, 1, 1, 32 if form == "int4" else 64), np.uint8)
    held, q = Coded(form, k, cupy.asarray(codes), scale, scale), cupy.zeros((1, 1, 1, 64), "f4")
    expected = meaning(codes, scale.get(), form).astype(np.float32)
    assert np.array_equal(attend(q, held, 1).get(), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda x: np.dtype(x).name)
@ANY
def test_new_rows_have_the_codes_of_quantize(cupy, form, dtype):
    k_new, v_new = (cupy.asarray(x) for x in draw(dtype, (3, 2, 5, 64), (3, 2, 5, 64), seed=6))
    v_new[0, 1, 2, 3], v_new[1, 0, 0, 9] = np.nan, np.inf
    _, held = coded(cupy, form, room=40, dtype=dtype)
    angles = cupy.outer(cupy.arange(40), cupy.asarray([1.0, 0.3, 0.1])).astype(cupy.float32)
    rotary = cupyflash.Rotary(cupy.cos(angles), cupy.sin(angles))
    lengths = cupy.asarray([40, 5, 17])
    cupyflash.append(k_new, v_new, held.k, held.v, lengths, rotary=rotary, **held.options)
    turned = cupyflash.rope(k_new, lengths[:, None] - 5 + cupy.arange(5), rotary)
    for name, new, each in zip("kv", (turned, v_new), forms_of(form), strict=True):
        codes, scale = (new, None) if each is None else cupyflash.quantize(new, each)
        for b, n in enumerate((40, 5, 17)):
            rows = slice(n - 5, n)
            found = getattr(held, name)[b, :, rows].get()
            if each is None:
                assert np.array_equal(bits(held.k if name == "k" else held.v)[b, :, rows],
                                      bits(codes)[b])  # fmt: skip
                continue
            assert np.array_equal(found, codes[b].get().view(np.uint8))
            found = getattr(held, f"{name}_scale")[b, :, rows]
            assert np.array_equal(bits(found), bits(scale[b]))


@pytest.mark.parametrize("form", ["int8", ("int8", "int4"), (None, "int8")], ids=words)
def test_one_graph_serves_all_lengths_of_codes(cupy, form):
    _, held = coded(cupy, form)
    (q,) = draw(np.float16, (3, 8, 1, 64))
    q, lengths = cupy.asarray(q), cupy.asarray([10, 20, 30], cupy.int32)
    size = cupyflash.workspace_size_cached(q, held.k, held.v, **held.options)
    workspace, out = cupy.empty(size, cupy.uint8), cupy.empty_like(q)
    attend(q, held, lengths)  # compiles
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        attend(q, held, lengths, out=out, workspace=workspace)
        graph = stream.end_capture()
    for n in ([3000, 1, 0], [64, 65, 513]):
        lengths[:] = cupy.asarray(n, cupy.int32)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert np.array_equal(bits(out), bits(attend(q, held, lengths)))
