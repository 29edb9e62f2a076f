"""Codes of 8 and 4 bits on NumPy arrays: those of a specification, bit by bit."""

from __future__ import annotations

import re
import sys

import ml_dtypes
import numpy as np
import pytest
from codes import (
    DTYPES,
    LARGEST,
    LEAST,
    PER,
    any_numbers,
    grouped,
    half_step,
    meaning,
    quantized,
)
from hypothesis import given
from hypothesis import strategies as st
from placement import Placed, bits, random_layout, same_bits

from cupyflash import ArgumentError, ArgumentTypeError, attention, attention_cached, quantize
from cupyflash.arrays.dtypes import accumulator

F32 = np.float32
EACH = pytest.mark.parametrize("form", LARGEST)
SHAPES = [(3, 5, 64), (2, 3, 2, 12), (7,), (4, 1), (2, 96), (3, 300), (1, 2, 1, 2, 64)]


def assert_codes(x, form, group=None, per="row"):
    codes, scale = quantize(x, form, group=group, per=per)
    wanted, wanted_scale = quantized(x, form, group, per)
    assert scale.shape == wanted_scale.shape
    assert same_bits(scale, wanted_scale)
    assert codes.shape == wanted.shape
    assert np.array_equal(bits(codes), bits(wanted))
    return codes, scale


@given(
    st.integers(0, 2**32 - 1), st.sampled_from(sorted(LARGEST)), st.sampled_from(DTYPES),
    st.tuples(st.sampled_from(SHAPES), st.booleans()),
)  # fmt: skip
def test_codes_are_those_of_the_specification(seed, form, dtype, what):
    rng = np.random.default_rng(seed)
    shape, whole_rows = what
    if form == "int4" and shape[-1] % 2:
        shape = (*shape[:-1], 64)
    group = shape[-1] if whole_rows or (form == "int4" and shape[-1] % 32) else None
    values = any_numbers(rng, shape, dtype)
    placed = Placed(shape, dtype, random_layout(rng, len(shape), dtype.itemsize, True), values)
    assert_codes(placed.view, form, group)
    placed.check()


@given(
    st.integers(0, 2**32 - 1), st.sampled_from(sorted(LARGEST)), st.sampled_from(DTYPES),
    st.sampled_from([(3, 5, 64), (2, 3, 2, 12), (8,), (4, 2), (1, 2, 1, 2, 6)]),
    st.sampled_from(PER[1:]),
)  # fmt: skip
def test_rows_share_the_scale_of_their_largest_number(seed, form, dtype, shape, per):
    rng = np.random.default_rng(seed)
    values = any_numbers(rng, shape, dtype)
    placed = Placed(shape, dtype, random_layout(rng, len(shape), dtype.itemsize, True), values)
    assert_codes(placed.view, form, per=per)
    placed.check()


@EACH
@pytest.mark.parametrize("per", PER[1:])
def test_scales_of_many_rows_are_those_of_attention(form, per):
    """They broadcast to the rows of a cache and, of float8, to those of attention."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 3, 20, 32)).astype(F32) for _ in range(3))
    (codes_k, k_scale), (codes_v, v_scale) = (quantize(x, form, per=per) for x in (k, v))
    meant = [
        (scale * meaning(codes, form)).astype(F32)
        for codes, scale in ((codes_k, k_scale), (codes_v, v_scale))
    ]
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    raw = codes_k.view(np.uint8), codes_v.view(np.uint8)
    out = attention_cached(q, *raw, 20, **scales, kv_dtype=form, mask=None)
    np.testing.assert_allclose(out, attention(q, *meant), rtol=1e-4, atol=1e-5)
    if form.startswith("float8"):
        codes_q, q_scale = quantize(q, form, per=per)
        out = attention(
            codes_q.view(np.uint8), *raw, q_scale=q_scale, **scales, qkv_dtype=form,
            out_dtype="float32",
        )  # fmt: skip
        numbers = (q_scale * meaning(codes_q, form)).astype(F32)
        np.testing.assert_allclose(out, attention(numbers, *meant), rtol=1e-4, atol=1e-5)


@EACH
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_number_of_16_bits(form, dtype):
    """Among its neighbours, and as a part of the largest code."""
    every = np.arange(2**16, dtype=np.uint16).view(dtype).reshape(-1, 64)
    assert_codes(every, form)
    assert_codes(np.ascontiguousarray(every.T), form)
    largest = LARGEST[form]
    with np.errstate(invalid="ignore"):
        finite = every[np.abs(every.astype(F32)) < largest]
    finite = finite[: len(finite) // 30 * 30].reshape(-1, 30)
    ends = np.full((len(finite), 2), largest, dtype)
    codes, scale = assert_codes(np.concatenate([ends, finite], axis=1), form, 32)
    assert (scale == 1).all()
    if form.startswith("float8"):
        direct = finite.astype(getattr(ml_dtypes, form))
        assert np.array_equal(bits(codes[:, 2:]), bits(direct))


@EACH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_err_by_half_a_step(form, dtype):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((40, 64)) * np.exp(rng.standard_normal((40, 1)))).astype(dtype)
    codes, scale = quantize(x, form)
    wide = grouped(x, form, None).astype(np.float64)
    scale = scale[..., None].astype(np.float64)
    meant = meaning(codes, form).reshape(wide.shape)
    step = half_step(wide / scale, form) * scale
    unit = 2 * np.finfo(accumulator(x.dtype)).eps * np.abs(wide)
    # A scale that was rounded down makes the largest number larger than the largest code.
    over = np.maximum(np.abs(wide) - scale * LARGEST[form], 0)
    assert (np.abs(wide - scale * meant) <= step + unit).all()
    assert (over <= 2.0**-24 * np.abs(wide)).all()
    assert (np.abs(meant).max(axis=-1) == LARGEST[form]).all()


@pytest.mark.parametrize(
    ("form", "ties", "even"),
    [
        ("int8", [0.5, 1.5, -3.5], [0, 2, -4]),
        ("int4", [0.5, 1.5, -3.5], [0, 2, -4]),
        ("float8_e4m3fn", [17, 19, -(2.0**-10)], [16, 20, 0]),  # steps of 2, and of 2**-9
        ("float8_e5m2", [18, 22, -3 * 2.0**-17], [16, 24, -(2.0**-15)]),  # of 4, and of 2**-16
    ],
)
def test_a_tie_goes_to_the_even_code(form, ties, even):
    codes, scale = quantize(np.array([*ties, LARGEST[form]], F32), form, group=4)
    assert scale == [1]
    assert meaning(codes, form).tolist() == [*even, LARGEST[form]]


@EACH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_is_not_lost(form, dtype):
    x = np.ones((4, 64), dtype)
    x[0, 5], x[1, 6], x[2, :2] = np.nan, -np.inf, (np.inf, np.nan)
    codes, scale = quantize(x, form, group=64)
    assert np.isnan(scale[[0, 2], 0]).all()
    assert scale[1] == np.inf
    assert np.isfinite(scale[3])
    meant = meaning(codes, form)
    of_nan = 0 if form.startswith("int") else np.nan
    for row in (0, 2):
        np.testing.assert_array_equal(meant[row], np.full(64, of_nan))
    assert meant[1, 6] == -LARGEST[form]
    assert not np.delete(meant[1], 6).any()
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(meant[:3] * scale[:3]).any()
    assert (meant[3] == LARGEST[form]).all()


@EACH
@pytest.mark.parametrize("per", PER[1:])
def test_what_is_not_finite_belongs_to_all_rows_of_its_scale(form, per):
    x = np.ones((2, 3, 4, 64), F32)
    x[0, 1, 2, 5], x[1, 2, 0, 6] = np.nan, -np.inf
    codes, scale = assert_codes(x, form, per=per)
    if per == "tensor":
        assert np.isnan(scale).all()
        return
    assert np.isnan(scale[0, 1]).all()
    assert scale[1, 2] == np.inf
    assert np.isfinite(scale).sum() == 4
    meant = meaning(codes, form)
    np.testing.assert_array_equal(meant[0, 1], np.full((4, 64), 0 if form[0] == "i" else np.nan))
    assert meant[1, 2, 0, 6] == -LARGEST[form]
    assert np.count_nonzero(meant[1, 2]) == 1
    assert (meant[0, 0] == LARGEST[form]).all()


@EACH
def test_the_smallest_scale(form):
    x = np.zeros((3, 64), F32)
    x[1, 3], x[2, 4] = 2.0**-149, -(2.0**-126)
    codes, scale = quantize(x, form, group=64)
    assert (scale == LEAST).all()
    meant = meaning(codes, form)
    assert not meant[:2].any()  # 2**-23 of a step
    assert meant[2, 4] == -1
    assert np.signbit(meaning(quantize(-x, "float8_e4m3fn")[0], "float8_e4m3fn")).all(axis=1)[0]


@EACH
def test_numbers_of_float64_beyond_the_scales(form):
    x = np.full((2, 32), 1e300)
    x[1] = 1e-300
    codes, scale = quantize(x, form)
    assert scale[:, 0].tolist() == [np.inf, LEAST]
    assert not meaning(codes, form).any()
    # The largest that float32 has is fine.
    x = np.full((1, 32), 3e38)
    codes, scale = quantize(x, form)
    np.testing.assert_allclose(scale * meaning(codes, form), x, rtol=1e-6)


@EACH
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (2, 0), (0,)])
def test_empty_axes(form, shape):
    codes, scale = assert_codes(np.ones(shape, F32), form)
    assert codes.size == 0
    if shape == (2, 0) and form != "int4":
        assert scale.tolist() == [[np.float32(LEAST)]] * 2


@EACH
@pytest.mark.parametrize("per", PER[1:])
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (2, 0), (0,), (0, 3, 64)])
def test_scales_without_rows_are_the_smallest(form, per, shape):
    codes, scale = assert_codes(np.ones(shape, F32), form, per=per)
    assert codes.size == 0
    assert scale.shape[-1] == 1
    assert (scale == LEAST).all()


def test_types_and_shapes():
    x = np.ones((2, 3, 64), np.float16)
    for form, dtype, width, scales in (
        ("int8", np.int8, 64, 1),
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn, 64, 1),
        ("float8_e5m2", ml_dtypes.float8_e5m2, 64, 1),
        ("int4", np.uint8, 32, 2),
    ):
        codes, scale = quantize(x, form)
        assert codes.dtype == dtype
        assert codes.shape == (2, 3, width)
        assert (scale.shape, scale.dtype) == ((2, 3, scales), F32)
    assert quantize(x, "int8", group=64)[1].shape == (2, 3, 1)
    assert quantize(x, "int4", group=64)[1].shape == (2, 3, 1)


def test_a_type_may_be_named_or_passed():
    x = np.random.default_rng(0).standard_normal((3, 32)).astype(F32)
    for name, types in {
        "int8": [np.int8, np.dtype(np.int8)],
        "float8_e4m3fn": [ml_dtypes.float8_e4m3fn, np.dtype(ml_dtypes.float8_e4m3fn)],
        "float8_e5m2": [ml_dtypes.float8_e5m2],
        "int4": [ml_dtypes.int4],
    }.items():
        for each in types:
            for mine, wanted in zip(quantize(x, each), quantize(x, name), strict=True):
                assert same_bits(mine, wanted)


@pytest.mark.parametrize("form", ["float8_e4m3fn", "float8_e5m2"])
def test_without_ml_dtypes_codes_are_bytes(form, monkeypatch):
    x = np.random.default_rng(0).standard_normal((3, 32)).astype(F32)
    wanted = quantize(x, form)[0].view(np.uint8)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert same_bits(quantize(x, form)[0], wanted)


def test_results_have_the_memory_order_of_x():
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 64)).astype(F32).swapaxes(1, 2)
    for form in LARGEST:
        codes, scale = assert_codes(x, form)
        for made in (codes, scale):
            assert made.swapaxes(1, 2).flags.c_contiguous


def test_the_settings_of_numpy_stay_out():
    x = np.array([[np.inf, 1e-45], [np.nan, 3e38]], F32)
    with np.errstate(all="raise"):
        for form in ("int8", "float8_e5m2"):
            quantize(x, form)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int3",), "dtype: got int3; expected int8, float8_e4m3fn, float8_e5m2, int4"),
        ((np.float32,), "dtype: got float32; expected int8"),
        ((None,), "dtype: got float64; expected int8"),
        ((3.5,), "dtype: got 3.5; expected int8"),
    ],
)
def test_types_that_there_are_not(arguments, message):
    with pytest.raises(ArgumentTypeError, match=message):
        quantize(np.ones((2, 4), F32), *arguments)


@pytest.mark.parametrize(
    ("shape", "form", "group", "message"),
    [
        ((), "int8", None, r"x: got shape \(\); expected \(\.\.\., D\)"),
        ((2, 5), "int4", None, "expected an even number of columns. Pad"),
        ((2, 48), "int4", None, "group: got None, which means 32, for int4 .* expected 48, one"),
        ((2, 48), "int4", 16, "group: got 16 for int4 with .* expected 48, one"),
        ((2, 64), "int4", 16, "group: got 16 for int4 with .* expected 32, or 64, one scale for"),
        ((2, 64), "int8", 32, "group: got 32 for int8 with .* expected 64, one scale for each row"),
        ((2, 48), "int8", 0, "group: got 0 .* expected 48"),
        ((2, 48), "int8", -4, "group: got -4 .* expected 48"),
        ((2, 48), "float8_e5m2", 96, "group: got 96 .* expected 48"),
    ],
)
def test_groups_that_nothing_takes(shape, form, group, message):
    x = np.ones(shape, F32)
    with pytest.raises(ArgumentError, match=message) as caught:
        quantize(x, form, group=group)
    if "group:" in message:
        wanted = int(re.search(r"Pass group=(\d+)", str(caught.value))[1])
        codes, scale = quantize(x, form, group=wanted)
        rows = {"k_scale": scale[None, None], "v_scale": scale[None, None], "kv_dtype": form}
        raw = codes.view(np.uint8)[None, None]
        attention_cached(x[None, None], raw, raw, 2, **rows)  # it takes them


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"per": "block"}, ArgumentError, "per: got 'block'; expected 'row', .* no function takes"),
        ({"per": "heads"}, ArgumentError, "per: got 'heads'; expected .* Say per='row'"),
        ({"per": None}, ArgumentTypeError, "per: got None; .* 'row', 'head', 'tensor'"),
        ({"per": 1}, ArgumentTypeError, "per: got 1; expected what has a scale"),
        ({"per": "head", "group": 32}, ArgumentError, "group: got 32 with per='head', .* Leave"),
        ({"per": "tensor", "group": True}, ArgumentError, "group: got True with per='tensor'"),
    ],
)
def test_scales_that_nothing_takes(options, error, message):
    with pytest.raises(error, match=message):
        quantize(np.ones((2, 64), F32), "int8", **options)


def test_all_columns_may_be_named_where_rows_share_a_scale():
    assert quantize(np.ones((3, 64), F32), "int4", group=64, per="head")[1].shape == (1, 1)


def test_other_arguments_that_are_wrong():
    x = np.ones((2, 4), F32)
    for group in (True, 2.0, "all"):
        with pytest.raises(ArgumentTypeError, match=r"group: got .*; expected how many columns"):
            quantize(x, "int8", group=group)
    with pytest.raises(ArgumentTypeError, match="x: got dtype int64"):
        quantize(np.ones((2, 4), int), "int8")
    with pytest.raises(ArgumentTypeError, match="did you mean group"):
        quantize(x, "int8", groups=2)
    assert quantize(x, "int8", group=np.int64(4))[1].shape == (2, 1)
