"""Caches of other libraries: pages, AMD's float8 and quantised tensors, converted bit by bit."""

from __future__ import annotations

import importlib

import ml_dtypes
import numpy as np
import pytest

from cupyflash import ArgumentError, ArgumentTypeError, attention, attention_cached, foreign
from cupyflash.problem import formats

RNG = np.random.default_rng(0)
P, PAGE, HEADS, D = 5, 8, 2, 32


def stored(layout, rows, slots, pages=P):
    """Write rows (tokens, Hkv, D) to slots, as each library says where an element lies."""
    x = 16 // rows.itemsize
    shapes = {
        "NHD": (pages, PAGE, HEADS, D),
        "HND": (pages, HEADS, PAGE, D),
        "paged_attention_k": (pages, HEADS, D // x, PAGE, x),
        "paged_attention_v": (pages, HEADS, D, PAGE),
    }
    made = np.full(shapes[layout], 99, rows.dtype)
    for token, slot in enumerate(slots):
        page, row = divmod(int(slot), PAGE)
        for h in range(HEADS):
            for d in range(D):
                places = {
                    "NHD": (page, row, h, d),
                    "HND": (page, h, row, d),
                    "paged_attention_k": (page, h, d // x, row, d % x),
                    "paged_attention_v": (page, h, d, row),
                }
                made[places[layout]] = rows[token, h, d]
    return made


LAYOUTS = ["NHD", "HND", "paged_attention_k", "paged_attention_v"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_lie_as_they_are_documented(layout, dtype):
    rows = (10 * RNG.standard_normal((19, HEADS, D))).astype(dtype)
    table = np.array([3, 0, 4])
    slots = [table[j // PAGE] * PAGE + j % PAGE for j in range(19)]
    theirs = stored(layout, rows, slots)
    ours = foreign.pages(theirs, layout)
    assert ours.shape == (P, HEADS, PAGE, D)
    assert np.shares_memory(ours, theirs) == (layout != "paged_attention_k")
    for token in range(19):
        row = ours[table[token // PAGE], :, token % PAGE]
        assert row.tobytes() == rows[token].tobytes()
    back = foreign.pages(ours, layout, inverse=True)
    assert back.shape == theirs.shape
    assert back.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("layouts", [("NHD", "NHD"), ("paged_attention_k", "paged_attention_v")])
def test_attention_reads_pages_by_a_block_table(layouts):
    rows = RNG.standard_normal((2, 2, 19, HEADS, D)).astype(np.float32)  # keys and values
    table, lengths = np.array([[3, 0, 5], [1, 4, 2]], np.int32), np.array([19, 11], np.int32)
    slots = [table[b, j // PAGE] * PAGE + j % PAGE for b in range(2) for j in range(lengths[b])]
    k, v = (
        foreign.pages(stored(layout, np.concatenate([x[0], x[1, :11]]), slots, 6), layout)
        for layout, x in zip(layouts, rows, strict=True)
    )
    q = RNG.standard_normal((2, 4, 1, D)).astype(np.float32)
    out = attention_cached(q, k, v, lengths, table=table)
    for b, n in enumerate(lengths):
        keys, values = (np.ascontiguousarray(x[b, :n].swapaxes(0, 1)) for x in rows)
        np.testing.assert_allclose(out[b], attention(q[b], keys, values), 1e-5, 1e-6)


def test_pages_of_other_axes_are_refused():
    x = np.zeros((2, P, PAGE, HEADS, D), np.float16)
    with pytest.raises(ArgumentError, match=r"x: got shape .*; expected \(P, page, Hkv, D\)"):
        foreign.pages(x, "NHD")
    with pytest.raises(ArgumentError, match="layout: got 'BSHD'; expected one of NHD, HND"):
        foreign.pages(x[0], "BSHD")
    with pytest.raises(ArgumentError, match="x: got 32 for its last axis; expected x = 8"):
        foreign.pages(x, "paged_attention_k")
    with pytest.raises(ArgumentError, match="x: got 12 for its last axis; expected a multiple of"):
        foreign.pages(x[0, ..., :12], "paged_attention_k", inverse=True)


PAIRS = [("float8_e4m3fnuz", "float8_e4m3fn"), ("float8_e5m2fnuz", "float8_e5m2")]


def all_codes(name):
    return np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name))


@pytest.mark.parametrize(("theirs", "own"), PAIRS)
def test_codes_of_amd_mean_the_same_numbers(theirs, own):
    codes, largest = all_codes(theirs), float(ml_dtypes.finfo(own).max) / 2
    codes = codes[~(np.abs(codes.astype(np.float32)) > largest)]
    made, scale = foreign.fnuz(codes, np.float32(0.3))
    assert made.dtype.name == own
    assert scale == np.float32(0.15)
    wide = codes.astype(np.float32) * np.float32(0.3)
    assert np.array_equal(made.astype(np.float32) * scale, wide, equal_nan=True)
    back, again = foreign.fnuz(made, scale, inverse=True)
    assert back.tobytes() == codes.tobytes()
    assert again == np.float32(0.3)


@pytest.mark.parametrize(("theirs", "own"), PAIRS)
def test_codes_here_become_those_of_amd(theirs, own):
    codes = all_codes(own)
    codes = codes[~np.isinf(codes.astype(np.float32))]
    made, scale = foreign.fnuz(codes, [3.0], inverse=True)
    assert made.dtype.name == theirs
    assert scale.tolist() == [6.0]
    wide = codes.astype(np.float32)
    assert np.array_equal(made.astype(np.float32) * 2, wide, equal_nan=True)


def test_numbers_that_the_other_type_has_not_are_named():
    largest = np.array([240], ml_dtypes.float8_e4m3fnuz)
    with pytest.raises(ArgumentError, match="240 of float8_e4m3fnuz is none of float8_e4m3fn"):
        foreign.fnuz(largest, 1.0)
    with pytest.raises(ArgumentError, match="57344 of float8_e5m2fnuz is none of float8_e5m2"):
        foreign.fnuz(np.array([57344], ml_dtypes.float8_e5m2fnuz), 1.0)
    with pytest.raises(ArgumentError, match="inf of float8_e5m2 is none of float8_e5m2fnuz"):
        foreign.fnuz(np.array([np.inf], ml_dtypes.float8_e5m2), 1.0, inverse=True)
    with pytest.raises(ArgumentTypeError, match="codes: got dtype uint8; expected float8_e4m3fnuz"):
        foreign.fnuz(np.zeros(3, np.uint8), 1.0)
    with pytest.raises(ArgumentError, match="scale: its half or double is no float32"):
        foreign.fnuz(np.zeros(3, ml_dtypes.float8_e4m3fn), np.float32(3e38), inverse=True)


@pytest.mark.parametrize("theirs", [pair[0] for pair in PAIRS])
def test_a_cache_of_amd_says_who_converts_it(theirs):
    q, k = np.zeros((1, 1, 1, 8), np.float32), np.zeros((1, 1, 3, 8), getattr(ml_dtypes, theirs))
    scales = {"k_scale": 1.0, "v_scale": 1.0}
    said = r"cupyflash\.foreign\.fnuz converts"
    with pytest.raises(ArgumentError, match=f"k_scale: got scales with k of {theirs}.*{said}"):
        attention_cached(q, k, k, 3, **scales)
    raw = k.view(np.uint8)
    with pytest.raises(ArgumentTypeError, match=f"kv_dtype: got {theirs}.*{said}"):
        attention_cached(q, raw, raw, 3, kv_dtype=theirs, **scales)
    with pytest.raises(ArgumentError, match=f"dtype: got '{theirs}'.*{said}"):
        foreign.float8(q, theirs)


def test_codes_of_amd_in_pytorch():
    torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')
    numbers = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    codes = numbers.to(torch.float8_e4m3fnuz)
    made, scale = foreign.fnuz(codes, 1.0)
    assert np.array_equal(made.astype(np.float32) * scale, codes.float().numpy())


def by_hand(name, qdata, scale, block, **more):
    """A tensor with the attributes that those of torchao have."""
    return type(name, (), {"qdata": qdata, "scale": scale, "block_size": block, **more})()


def test_tensors_by_hand():
    torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')
    draw = torch.Generator().manual_seed(3)
    qdata = torch.randint(-8, 8, (3, 64), dtype=torch.int8, generator=draw)
    for columns in (32, 64):  # that share a scale
        scale = torch.rand(3, 64 // columns, generator=draw)
        zero = torch.zeros(3, 64 // columns, dtype=torch.int8)
        more = {"target_dtype": torch.int4, "zero_point": zero}
        made = foreign.torchao(
            by_hand("IntxUnpackedToInt8Tensor", qdata, scale, (1, columns), **more)
        )
        assert made.scale.shape == (3, 2)
        wanted = qdata.float() * scale.repeat_interleave(columns, 1)
        assert np.array_equal(numbers_of(made), wanted.numpy())
    row = torch.rand(3, 1, generator=draw)
    codes = qdata.float().to(torch.float8_e4m3fn)
    for name, data, kind in (
        ("Int8Tensor", qdata, "int8"), ("Float8Tensor", codes, "float8_e4m3fn")
    ):  # fmt: skip
        made = foreign.torchao(by_hand(name, data, row, [1, 64]))
        assert made.kv_dtype == kind
        assert np.array_equal(numbers_of(made), (data.float() * row).numpy())
        whole = foreign.torchao(by_hand(name, data, row[:1], [3, 64]))
        assert whole.scale.tolist() == [[float(row[0])]] * 3
    with pytest.raises(ArgumentError, match="zero points"):
        foreign.torchao(by_hand("Int8Tensor", qdata, row, [1, 64], zero_point=row))
    with pytest.raises(ArgumentError, match=r"scale for blocks of \(1, 32\); int8 here"):
        foreign.torchao(by_hand("Int8Tensor", qdata, torch.rand(3, 2), [1, 32]))
    with pytest.raises(ArgumentTypeError, match="tensor: got Int4Tensor; expected"):
        foreign.torchao(by_hand("Int4Tensor", qdata, row, [1, 32]))


@pytest.fixture(scope="module")
def torchao():
    reason = "torchao is not installed: tensors by hand are tried"
    return pytest.importorskip("torchao.quantization", reason=reason)


def numbers_of(made):
    if made.kv_dtype != "int4":
        return made.codes.astype(np.float32) * made.scale
    numbers = formats.numbers(made.codes, formats.FORMATS["int4"])
    return numbers * np.repeat(made.scale, 32, axis=-1)


@pytest.mark.parametrize("kind", ["Int8Tensor", "Float8Tensor"])
@pytest.mark.parametrize("granularity", ["PerRow", "PerTensor"])
def test_tensors_of_torchao(torchao, kind, granularity):
    import torch

    x = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(0))
    of = getattr(torchao, kind).from_hp
    tensor = of(
        x, granularity=getattr(importlib.import_module("torchao.quantization"), granularity)()
    )
    made = foreign.torchao(tensor)
    assert made.kv_dtype == {"Int8Tensor": "int8", "Float8Tensor": "float8_e4m3fn"}[kind]
    assert made.scale.shape == (2, 3, 5, 1)
    assert np.array_equal(numbers_of(made), tensor.dequantize().numpy())
    q = np.ones((2, 3, 1, 64), np.float32)
    out = attention_cached(
        q, made.codes, made.codes, 5, k_scale=made.scale, v_scale=made.scale, kv_dtype=made.kv_dtype
    )
    wide = numbers_of(made)
    np.testing.assert_allclose(out, attention_cached(q, wide, wide, 5), 1e-4, 1e-5)


@pytest.mark.parametrize("group", [32, 64])
def test_int4_of_torchao(torchao, group):
    import torch

    x = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(1))
    tensor = torchao.IntxUnpackedToInt8Tensor.from_hp(x, (1, 1, 1, group), torch.int4)
    made = foreign.torchao(tensor)
    assert made.codes.shape == (2, 3, 5, 32)
    assert made.scale.shape == (2, 3, 5, 2)
    assert np.array_equal(numbers_of(made), tensor.dequantize().numpy())


def test_tensors_of_torchao_that_do_not_fit(torchao):
    import torch

    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    primitives = importlib.import_module("torchao.quantization.quant_primitives")
    row = torchao.PerRow()
    asymmetric = primitives.MappingType.ASYMMETRIC
    with pytest.raises(ArgumentError, match=r"zero points \(asymmetric\); codes here mean scale"):
        foreign.torchao(torchao.Int8Tensor.from_hp(x, row, mapping_type=asymmetric))
    group = torchao.PerGroup(32)
    with pytest.raises(ArgumentError, match=r"scale for blocks of \(1, 32\); float8_e4m3fn here"):
        foreign.torchao(torchao.Float8Tensor.from_hp(x, granularity=group))
    amd = torchao.Float8Tensor.from_hp(x, float8_dtype=torch.float8_e4m3fnuz)
    with pytest.raises(ArgumentError, match=r"codes of float8_e4m3fnuz; .*foreign\.fnuz converts"):
        foreign.torchao(amd)
    with pytest.raises(ArgumentTypeError, match="tensor: got Tensor; expected an Int8Tensor"):
        foreign.torchao(x)
    mx = importlib.import_module("torchao.prototype.mx_formats.mx_tensor").MXTensor
    with pytest.raises(ArgumentTypeError, match=r"tensor: got MXTensor; .*dequantize"):
        foreign.torchao(mx.to_mx(x, torch.float8_e4m3fn))
