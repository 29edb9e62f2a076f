"""Calls on codes of float8: what they are checked for, and what they return on a CPU."""

from __future__ import annotations

import builtins

import ml_dtypes
import numpy as np
import pytest
from coded_arrays import FORMATS, NAN_CODE, Coded, draw
from halves import mostly_thorough
from placement import same_bits

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, attention, masks, plan, quantize, scores
from cupyflash.problem.formats import FORMATS as ALL_FORMATS
from cupyflash.problem.formats import values
from cupyflash.testing import Precision, forward_bound, rho

E4M3, E5M2 = FORMATS
EACH = pytest.mark.parametrize("form", FORMATS)
ONE = np.ones((1, 1), np.float32)


def drawn(form=E4M3, by="row", shapes=((2, 4, 20, 16), (2, 2, 30, 16), (2, 2, 30, 24))):
    return Coded.of(form, *draw(*shapes), by=by)


@EACH
def test_every_code_means_its_number(form):
    expected = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, form)).astype(np.float32)
    assert np.array_equal(values(ALL_FORMATS[form]), expected, equal_nan=True)
    signs = np.signbit(values(ALL_FORMATS[form])) == np.signbit(expected)
    assert signs[~np.isnan(expected)].all()


@EACH
@mostly_thorough(
    "out_dtype",
    ["float16", "bfloat16", "float32"],
    quick=["bfloat16", "float32"],
    why="float16 is rounded to as bfloat16 is",
)
@pytest.mark.parametrize("by", ["row", "head", "all"])
def test_results_are_within_the_bound(form, out_dtype, by):
    held = drawn(form, by)
    sink = np.array([0.5, -np.inf, 3, -2], np.float32)
    options = {"mask": masks.causal(), "score_mod": scores.softcap(3.0), "sink": sink}
    out, lse = attention(
        *held.arrays, **held.options, **options, out_dtype=out_dtype, return_lse=True
    )
    assert out.dtype.name == out_dtype
    assert lse.dtype == np.float32
    precision = Precision.of_codes(out_dtype)
    bound = forward_bound(*held.numbers, precision=precision, **options)
    assert not bound.ill_conditioned
    assert rho(out, *bound.out).value <= 1
    assert rho(lse, *bound.lse).value <= 1


def test_the_output_is_rounded_once():
    """The scale is not rounded to the output's type, as it would be with the codes' numbers."""
    held = drawn(by="all")
    wide = attention(*held.arrays, **held.options, out_dtype="float32")
    out = attention(*held.arrays, **held.options, out_dtype="float16")
    assert same_bits(out, wide.astype(np.float16))


@EACH
def test_bytes_and_their_types_are_the_same(form):
    held = drawn(form)
    typed = [x.view(getattr(ml_dtypes, form)) for x in held.arrays]
    named = dict(held.options)
    first = attention(*typed, **named)
    assert first.dtype == ml_dtypes.bfloat16
    assert same_bits(first, attention(*held.arrays, **named))
    named.pop("qkv_dtype")
    assert same_bits(first, attention(*typed, **named))
    assert same_bits(first, attention(*typed, **named, out_dtype=ml_dtypes.bfloat16))


def test_what_quantize_returns_can_be_passed():
    q, k, v = draw(*[(3, 600, 32)] * 3)
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (quantize(x, E4M3) for x in (q, k, v))
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    few = attention(q8[:, :1], k8, v8, **scales | {"q_scale": q_scale[:, :1]})
    assert few.shape == (3, 1, 32)
    out = np.empty((3, 600, 32), np.float16)
    assert attention(q8, k8, v8, **scales, out_dtype="float16", out=out) is out
    pairs = (q8, q_scale), (k8, k_scale), (v8, v_scale)
    exact = attention(*(codes.astype(np.float32) * scale for codes, scale in pairs))
    assert same_bits(out, exact.astype(np.float16))


@pytest.mark.parametrize("number", [0.25, np.float32(0.3), np.array(0.7), 2], ids=repr)
@pytest.mark.parametrize("packed", [False, True])
def test_a_scale_may_be_a_number(number, packed):
    held = drawn(shapes=((4, 20, 16), (2, 30, 16), (2, 30, 24)))
    names = "q_scale", "k_scale", "v_scale"
    function = cupyflash.attention_varlen if packed else attention
    offsets = ([0, 7, 20], [0, 9, 30]) if packed else ()
    one, whole = (
        function(*held.arrays, *offsets, **{**held.options, **dict.fromkeys(names, scale)})
        for scale in (number, np.full((1, 1), number, np.float32))
    )
    assert same_bits(one, whole)
    assert plan(*held.arrays, **{**held.options, **dict.fromkeys(names, number)}).kernel


def test_a_matrix_is_one_head():
    held = drawn()
    plain = attention(*held.arrays, **held.options)
    one = Coded(
        held.form,
        tuple(x[0, 0] for x in held.arrays),
        tuple(x[0, 0] for x in held.scales),
    )
    assert same_bits(attention(*one.arrays, **one.options), plain[0, 0])


def test_the_memory_order_is_that_of_the_queries():
    held = drawn()
    turned = [x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in held.arrays]
    out = attention(*turned, **held.options)
    assert out.swapaxes(1, 2).flags.c_contiguous
    assert same_bits(out, attention(*held.arrays, **held.options))


def test_nan_stays_where_it_is_seen():
    held = drawn(shapes=((1, 20, 16), (1, 30, 16), (1, 30, 16)))
    spoilt = [x.copy() for x in held.arrays]
    spoilt[2][0, 25, 3] = NAN_CODE
    out = attention(*spoilt, **held.options, mask=masks.causal())
    expected = np.zeros(out.shape, bool)
    expected[0, 15:, 3] = True
    np.testing.assert_array_equal(np.isnan(out), expected)


def test_the_plan_says_that_codes_become_numbers():
    held = drawn()
    made = plan(*held.arrays, **held.options)
    assert made.kernel == "reference.forward"
    assert "codes of float8_e4m3fn become float32 with their scales first" in made.reason


# -- errors ---------------------------------------------------------------------------------------


def wrong(match, kind=ArgumentError, arrays=None, **changed):
    held = drawn()
    before = [x.copy() for x in held.arrays]
    with pytest.raises(kind, match=match):
        attention(*(arrays or held.arrays), **(held.options | changed))
    assert all(same_bits(a, b) for a, b in zip(held.arrays, before, strict=True))


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_every_array_needs_its_scale(name):
    wrong(f"{name}: got None with {name[0]} of float8_e4m3fn", **{name: None})
    wrong(f"{name}: got dtype float64", ArgumentTypeError, **{name: np.ones((1, 1))})
    wrong(f"{name}: got list.* np.asarray\\({name}, np.float32", ArgumentTypeError, **{name: [1.0]})
    wrong(f"{name}: got bool", ArgumentTypeError, **{name: True})
    wrong(f"{name}: got shape .* broadcasts", **{name: np.ones((7, 1), np.float32)})
    wrong(f"{name}: got shape .* broadcasts", **{name: np.ones((1, 16), np.float32)})


def test_bytes_need_a_type():
    wrong("qkv_dtype: got None with q of uint8", qkv_dtype=None)
    wrong("qkv_dtype: got int8.*attention_cached", qkv_dtype="int8")
    wrong("qkv_dtype: got float64", ArgumentTypeError, qkv_dtype=np.float64)
    held = drawn()
    typed = [x.view(ml_dtypes.float8_e4m3fn) for x in held.arrays]
    wrong("got float8_e5m2 with q of float8_e4m3fn", ArgumentTypeError, typed, qkv_dtype=E5M2)
    typed[1] = typed[1].view(ml_dtypes.float8_e5m2)
    wrong("expected codes of one type", ArgumentTypeError, typed, qkv_dtype=None)


def test_all_three_are_codes_or_none():
    held = drawn()
    arrays = [held.numbers[0].astype(np.float16), *held.arrays[1:]]
    wrong("q: got float16 .*call attention_cached", ArgumentTypeError, arrays)
    wrong("v: got int8", ArgumentTypeError, [*held.arrays[:2], held.arrays[2].view(np.int8)])
    x = np.ones((1, 4, 8), np.float32)
    with pytest.raises(ArgumentTypeError, match="leave out_dtype out"):
        attention(x, x, x, out_dtype="float16")
    with pytest.raises(ArgumentTypeError, match="leave q_scale, k_scale out"):
        attention(x, x, x, q_scale=ONE, k_scale=ONE)


def test_the_type_of_the_output():
    wrong("out_dtype: got float64", ArgumentTypeError, out_dtype="float64")
    wrong("out_dtype: got 3", ArgumentTypeError, out_dtype=3)
    wrong("out: got shape", out=np.empty((2, 4, 20, 24), np.float32))


def test_bfloat16_needs_ml_dtypes(monkeypatch):
    held, imported = drawn(), builtins.__import__

    def without(name, *args, **keywords):
        if name == "ml_dtypes":
            raise ImportError(name)
        return imported(name, *args, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ArgumentError, match="out_dtype='float16'"):
        attention(*held.arrays, **held.options)
    assert attention(*held.arrays, **held.options, out_dtype="float16").dtype == np.float16


@pytest.mark.parametrize("name", ["attention_vjp", "attention", "attention_backward"])
def test_codes_without_scales_are_refused(name):
    x = np.zeros((1, 4, 8), ml_dtypes.float8_e4m3fn)
    y = np.zeros((1, 4, 8), np.float16)
    lse = np.zeros((1, 4), np.float32)
    arrays = (y, x, x, x, y, lse) if name == "attention_backward" else (x, x, x)
    with pytest.raises(ArgumentTypeError, match=r"q: got dtype float8_e4m3fn.*of 16 bits"):
        getattr(cupyflash, name)(*arrays)


def test_precision_is_for_numbers():
    wrong("precision", ArgumentError, precision="tf32x3")
