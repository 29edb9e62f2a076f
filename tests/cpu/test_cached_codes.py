"""Caches of codes of 8 and 4 bits on the CPU: attention over what they mean, and new rows."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from coded_caches import FORMATS, MIXED, NAMES, NAN_CODE, Coded, forms_of, meaning, words
from halves import mostly_thorough
from hypothesis import given, settings
from hypothesis import strategies as st
from placement import same_bits

from cupyflash import Rotary, append, attention_cached, masks, quantize, rope
from cupyflash.testing import Precision, forward_bound, rho

EACH = pytest.mark.parametrize("form", FORMATS)
# Formats of keys and of values, too.
ANY = mostly_thorough(
    "form",
    [*FORMATS, *MIXED],
    quick=[*FORMATS, ("int8", "int4"), ("int4", None), (None, "float8_e4m3fn")],
    why="keys and values are found and converted apart, each as in the others",
    ids=words,
)
F16, BF16, F32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
DTYPES = mostly_thorough(
    "dtype", [F16, BF16, F32], quick=[BF16, F32], why="float16 is read as bfloat16 is", ids=str
)
LENGTHS = np.array([130, 0, 65])


def draw(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def numbers(*shapes, seed=0):
    """Rows of very different sizes."""
    rng = np.random.default_rng(seed)
    return [
        (x * np.exp(rng.standard_normal((*x.shape[:-1], 1)))).astype(np.float32)
        for x in draw(*shapes, seed=seed)
    ]


def cache(form, d=64, d_v=32, room=140, dtype=F32, **rows):
    return Coded.of(form, *numbers((3, 2, room, d), (3, 2, room, d_v)), dtype=dtype, **rows)


def attend(q, held, lengths=LENGTHS, **options):
    arrays = held.k, held.v, lengths
    return attention_cached(q, *arrays, return_lse=True, **(held.options | options))


def check(q, held, out, lse, lengths=LENGTHS, **options):
    """Hold every entry to the bound of attention over what its codes mean."""
    precision = Precision.of(q.dtype).with_codes()
    for b, n in enumerate(lengths):
        k, v = (x[b, :, :n] for x in held.numbers)
        bound = forward_bound(q[b], k, v, precision=precision, **options)
        assert not bound.ill_conditioned
        for ours, bounded in ((out[b], bound.out), (lse[b], bound.lse)):
            assert rho(ours, *bounded).value <= 1


def same(ours, expected):
    assert all(same_bits(a, b) for a, b in zip(ours, expected, strict=True))


@ANY
@DTYPES
@pytest.mark.parametrize(("d", "d_v"), [(64, 32), (6, 50)])
def test_attention_is_that_over_what_codes_mean(form, dtype, d, d_v):
    held = cache(form, d, d_v, dtype=dtype)
    (q,) = draw((3, 6, 3, d), dtype=dtype, seed=1)
    out, lse = attend(q, held.poisoned(LENGTHS), mask=masks.causal())
    check(q, held, out, lse, mask=masks.causal())


@ANY
def test_attention_has_the_bits_of_numbers_in_float32(form):
    """Products with scales are rounded to float32 once, which is what numbers in float32 are."""
    held = cache(form)
    k, v = (x.astype(np.float32) for x in held.numbers)
    (q,) = draw((3, 4, 2, 64), seed=1)
    options = {"mask": masks.causal(), "return_lse": True}
    same(attend(q, held, mask=masks.causal()), attention_cached(q, k, v, LENGTHS, **options))


def test_groups_of_columns_have_their_scales():
    """Several groups of a row, read in place, and beside each other in one block of values."""
    held = cache("int4", d=96, d_v=160)
    k, v = (x.astype(np.float32) for x in held.numbers)
    for heads in (2, 10):
        (q,) = draw((3, heads, 1, 96), seed=1)
        same(attend(q, held), attention_cached(q, k, v, LENGTHS, return_lse=True))


def test_rows_of_int4_may_have_one_scale():
    held = cache("int4", whole_rows=True)
    assert held.k_scale.shape[-1] == 1
    (q,) = draw((3, 2, 1, 64), seed=1)
    check(q, held, *attend(q, held))


@EACH
@pytest.mark.parametrize("step", [1, 2], ids=["neighbours", "with gaps"])
def test_every_code_means_its_number(form, step):
    """The only key has all the weight, so the output is its value, multiplied by the scale."""
    codes = np.arange(256 * step, dtype=np.uint8).reshape(1, 1, 1, -1)[..., ::step]
    codes = np.ascontiguousarray(codes).repeat(step, -1)[..., ::step] if step > 1 else codes
    scale = np.array([0.375], np.float32)
    k = np.zeros((1, 1, 1, 2), np.uint8)
    d = 4 if form == "int4" else 2
    q = np.zeros((1, 1, 1, d), np.float32)
    out = attention_cached(q, k, codes, 1, k_scale=scale, v_scale=scale, kv_dtype=form)
    expected = meaning(codes, scale, form).astype(np.float32)
    assert np.array_equal(out[0, 0, 0], expected[0, 0, 0], equal_nan=True)


@EACH
@pytest.mark.parametrize("shape", [(), (1,), (2, 1, 1), (3, 1, 1, 1), (1, 2, 140, 1)], ids=str)
def test_scales_broadcast_to_their_array(form, shape):
    held = cache(form, whole_rows=True)
    scale = np.random.default_rng(1).uniform(0.1, 1.0, shape).astype(np.float32)
    whole = np.broadcast_to(scale, held.k_scale.shape).copy()
    (q,) = draw((3, 2, 2, 64), seed=1)
    few = dataclasses.replace(held, k_scale=scale, v_scale=scale)
    same(attend(q, few), attend(q, dataclasses.replace(held, k_scale=whole, v_scale=whole)))


@ANY
@mostly_thorough("page", [1, 7, 64], quick=[7], why="pages of every length are found alike")
def test_pages_change_no_bit(form, page):
    held = cache(form, dtype=F16)
    (q,) = draw((3, 4, 3, 64), dtype=np.float16, seed=1)
    same(attend(q, held.paged(page), mask=masks.causal()), attend(q, held, mask=masks.causal()))


@ANY
def test_what_is_unused_changes_no_bit(form):
    """Also what a mask hides: scales that are NaN, and codes that are."""
    held = cache(form)
    (q,) = draw((3, 4, 1, 64), seed=1)
    mask = masks.window(20, 0)
    spoilt = held.poisoned(LENGTHS)
    for b, n in enumerate(LENGTHS):
        for name in held.names:
            if name.endswith("scale"):
                getattr(spoilt, name)[b, :, : max(n - 30, 0)] = np.nan
        spoilt.v[b, :, : max(n - 30, 0)] = NAN_CODE.get(forms_of(form)[1], np.nan)
    same(attend(q, spoilt, mask=mask), attend(q, held, mask=mask))


@ANY
def test_drafts_are_steps_and_entries_are_calls(form):
    held = cache(form, dtype=F16)
    (q,) = draw((3, 4, 3, 64), dtype=np.float16, seed=1)
    lengths = np.array([130, 3, 65])
    out, lse = attend(q, held, lengths, mask=masks.causal())
    for n in range(3):
        step = attend(np.ascontiguousarray(q[:, :, n : n + 1]), held, lengths - 2 + n)
        same((out[:, :, n : n + 1], lse[:, :, n : n + 1]), step)
    offsets = np.array([0, 3, 6, 9])
    packed = q.swapaxes(0, 1).reshape(4, 9, 64)
    packed_out, packed_lse = attend(packed, held, lengths, offsets_q=offsets, mask=masks.causal())
    same(
        (packed_out, packed_lse), (x.swapaxes(0, 1).reshape(4, 9, *x.shape[3:]) for x in (out, lse))
    )


@EACH
def test_a_prompt_of_many_queries(form):
    held = cache(form)
    (q,) = draw((3, 2, 65, 64), seed=1)
    lengths = np.array([130, 65, 65])
    out, _ = attend(q, held, lengths, mask=masks.causal())
    last, _ = attend(np.ascontiguousarray(q[:, :, -1:]), held, lengths)
    same([out[:, :, -1:]], [last])


@EACH
def test_values_may_be_columns_of_the_keys(form):
    held = cache(form, d=96)
    columns = 32 if form == "int4" else 64
    groups = 2 if form == "int4" else 1
    views = {"v": held.k[..., :columns], "v_scale": held.k_scale[..., :groups]}
    copies = {name: x.copy() for name, x in views.items()}
    (q,) = draw((3, 2, 1, 96), seed=1)
    ours, expected = (attend(q, dataclasses.replace(held, **x)) for x in (views, copies))
    same(ours, expected)


def typed(x, form):
    """Return an array that says its format itself, as far as types do."""
    if form in (None, "int4"):
        return x
    return x.view(np.int8 if form == "int8" else getattr(ml_dtypes, form))


@ANY
def test_an_array_says_its_codes_itself(form):
    """Only bytes of int4 must be told."""
    (q,) = draw((3, 2, 1, 64), seed=1)
    held, forms = cache(form), forms_of(form)
    arrays = [typed(x, each) for x, each in zip((held.k, held.v), forms, strict=True)]
    scales = {"k_scale": held.k_scale, "v_scale": held.v_scale}
    told = tuple("int4" if each == "int4" else None for each in forms)
    for kv_dtype in (told, list(told), held.form, *([None] if told == (None, None) else [])):
        ours = attention_cached(q, *arrays, LENGTHS, kv_dtype=kv_dtype, **scales)
        same([ours], [attend(q, held)[0]])


NUMBERS = [0.02, np.float32(0.02), np.float64(0.02), np.array(0.02), np.array(0.02, np.float16), 3]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda x: f"{type(x).__name__} {x}")
def test_a_scale_may_be_a_number(number):
    """As engines hold it; of each type it means the float32 that is nearest."""
    held = cache(("int8", "float8_e4m3fn"))
    (q,) = draw((3, 2, 1, 64), seed=1)
    one, whole = ({**held.options, "v_scale": x} for x in (number, np.full((), number, F32)))
    for options in (one, whole):
        options["k_scale"] = options["v_scale"]
    ours, expected = (attention_cached(q, held.k, held.v, LENGTHS, **x) for x in (one, whole))
    same([ours], [expected])
    assert not same_bits(ours, attend(q, held)[0])


MASKS = [None, masks.causal(), masks.window(20, 0), masks.mask(lambda b, h, i, j: (i + j) % 3 > 0)]


@mostly_thorough(
    "form",
    [*FORMATS, *MIXED],
    quick=["int4", ("int8", "int4")],
    why="codes of a byte lie as other elements do",
    ids=words,
)
@settings(max_examples=15)
@given(data=st.data())
def test_any_layout_keeps_to_the_bound_and_changes_no_bit(form, data):
    """Pages of any length, heads inside of rows, any mask; NaN in whatever lies unused."""
    draw_one = data.draw
    rng = np.random.default_rng(draw_one(st.integers(0, 2**32)))
    lengths = draw_one(st.lists(st.sampled_from([0, 1, 63, 64, 65, 130]), min_size=1, max_size=3))
    heads, group = draw_one(st.integers(1, 2)), draw_one(st.integers(1, 5))
    d, d_v = (draw_one(st.sampled_from([2, 8, 32, 34, 64, 80])) for _ in range(2))
    shape = (len(lengths), heads, max(*lengths, 1) + 3)
    k, v = (rng.standard_normal((*shape, n)).astype(np.float32) for n in (d, d_v))
    dtype = draw_one(st.sampled_from([F16, BF16, F32]))
    held = Coded.of(form, k, v, whole_rows=draw_one(st.booleans()), dtype=dtype)
    q = rng.standard_normal((len(lengths), heads * group, 2, d)).astype(dtype)
    options = {"mask": draw_one(st.sampled_from(MASKS))}
    whole = held.poisoned(lengths)
    out, lse = attend(q, whole, np.array(lengths), **options)
    check(q, held, out, lse, lengths, **options)
    paged = whole.paged(draw_one(st.sampled_from([1, 5, 64, 100])), seed=1)
    same(attend(q, paged, np.array(lengths), **options), (out, lse))
    turned = {
        name: np.ascontiguousarray(getattr(paged, name).swapaxes(1, 2)).swapaxes(1, 2)
        for name in held.names
    }
    inside = dataclasses.replace(paged, **turned)
    same(attend(q, inside, np.array(lengths), **options), (out, lse))


# New rows


def empty(form, shape, pages=None, whole_rows=False, fill=0xA5, dtype=F32):
    """A cache whose bytes are all `fill`."""
    made = dict.fromkeys(NAMES)
    for name, columns, each in zip("kv", (64, 32), forms_of(form), strict=True):
        if each is None:
            made[name] = np.full((*shape, columns), fill, dtype)
            continue
        packed = 2 if each == "int4" else 1
        groups = columns // 32 if each == "int4" and not whole_rows else 1
        made[name] = np.full((*shape, columns // packed), fill, np.uint8)
        made[f"{name}_scale"] = np.full((*shape, groups), 7.0, np.float32)
    return Coded(form, **made, table=pages)


@ANY
@DTYPES
@pytest.mark.parametrize("whole_rows", [False, True], ids=["groups", "whole rows"])
def test_new_rows_have_the_codes_of_quantize(form, dtype, whole_rows):
    """In pages, packed, rotated; and nothing else changes."""
    table = np.array([[4, 1, 0], [2, 3, 5]])
    held = empty(form, (6, 2, 5), table, whole_rows, dtype=dtype)
    k_new, v_new, q = draw((2, 7, 64), (2, 7, 32), (4, 7, 64), dtype=dtype)
    angles = np.outer(np.arange(15), [1.0, 0.3, 0.1]).astype(np.float32)
    rotary = Rotary(np.cos(angles), np.sin(angles))
    lengths, offsets = np.array([9, 3]), np.array([0, 5, 7])
    turned = append(
        k_new, v_new, held.k, held.v, lengths, offsets=offsets, q=q, rotary=rotary, **held.options
    )
    positions = np.array([4, 5, 6, 7, 8, 1, 2])
    assert same_bits(turned, rope(q, positions, rotary))
    expected = empty(form, (6, 2, 5), table, whole_rows, dtype=dtype)
    rows = Coded.of(form, rope(k_new, positions, rotary), v_new, whole_rows, dtype)
    entries = np.array([0] * 5 + [1] * 2)
    page, row = table[entries, positions // 5], positions % 5
    for name in held.names:
        getattr(expected, name).swapaxes(1, 2)[page, row] = getattr(rows, name).swapaxes(0, 1)
        assert same_bits(getattr(held, name), getattr(expected, name)), name


@ANY
def test_appended_rows_are_attended(form):
    held = empty(form, (1, 2, 40))
    k_new, v_new, q = draw((1, 2, 33, 64), (1, 2, 33, 32), (1, 4, 1, 64))
    append(k_new, v_new, held.k, held.v, 33, **held.options)
    at_once = Coded.of(form, k_new, v_new)
    same(attend(q, held, 33), attend(q, at_once, 33))


@EACH
def test_values_that_are_columns_of_the_keys_are_written_once(form):
    shape = (1, 2, 8)
    held = empty(form, shape)
    (k_new,) = draw((1, 2, 3, 64))
    groups = 1 if held.k_scale.shape[-1] == 1 else held.v_scale.shape[-1]
    v, v_scale = held.k[..., : held.v.shape[-1]], held.k_scale[..., :groups]
    append(
        k_new, k_new[..., :32], held.k, v, 5, k_scale=held.k_scale, v_scale=v_scale, kv_dtype=form
    )
    rows = Coded.of(form, k_new, k_new)
    assert same_bits(held.k[:, :, 2:5], rows.k)
    assert same_bits(held.k_scale[:, :, 2:5], rows.k_scale)


def test_typed_caches_are_written_in_place():
    k_new, v_new = draw((1, 2, 3, 16), (1, 2, 3, 16))
    for form in FORMATS[:3]:
        dtype = np.dtype(np.int8) if form == "int8" else np.dtype(getattr(ml_dtypes, form))
        k, v = np.zeros((2, 8, 1, 2, 16), dtype).transpose(0, 2, 3, 1, 4)  # heads inside
        k_scale, v_scale = np.zeros((2, 1, 2, 8, 1), np.float32)
        append(k_new, v_new, k, v, 3, k_scale=k_scale, v_scale=v_scale)
        codes, scale = quantize(v_new, form)
        assert same_bits(v[:, :, :3].view(np.uint8), codes.view(np.uint8))
        assert same_bits(v_scale[:, :, :3], scale)


@EACH
def test_numbers_that_are_not_finite_are_not_lost(form):
    held = empty(form, (1, 1, 2))
    k_new, v_new = draw((1, 1, 2, 64), (1, 1, 2, 32))
    v_new[0, 0, 0, 3] = np.nan
    append(k_new, v_new, held.k, held.v, 2, **held.options)
    (q,) = draw((1, 1, 1, 64))
    out, _ = attend(q, held, 2)
    assert np.isnan(out).all()
    hidden, _ = attend(q, held, 2, mask=masks.window(0, 0))
    assert np.isfinite(hidden).all()
