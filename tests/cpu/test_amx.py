"""Products by tiles of bfloat16: the emulated unit anywhere, AMX where the CPU has it."""

from __future__ import annotations

import ctypes
import re

import ml_dtypes
import numpy as np
import pytest
from halves import mostly_thorough
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import binding, ir

import cupyflash
from cupyflash import masks
from cupyflash.reference.cpu import amx, amx_code
from cupyflash.reference.cpu.accumulate import accumulate_product
from cupyflash.reference.cpu.addresses import address
from cupyflash.reference.cpu.amx_memory import PANEL, size_of_packed
from cupyflash.reference.cpu.amx_product import UNITS
from cupyflash.reference.cpu.arguments import Registers, TileSizes
from cupyflash.reference.cpu.jit import pointer_of, prepare
from cupyflash.reference.cpu.memory import aligned
from cupyflash.reference.cpu.microkernel import product, round_up, vector_lanes
from cupyflash.reference.cpu.narrow import narrow_rows
from cupyflash.reference.cpu.packing import lanes_of_pair
from cupyflash.testing.bound import Precision, backward_bound, forward_bound, rho

FLOAT32 = np.dtype(np.float32)
PAIR = lanes_of_pair(4)
MOST = 200  # rows, depth and columns of the products here
UNIT = Precision.of(np.float32).unit
EMULATED = UNITS[amx.EMULATED]


def here(kernel, *kinds, number=ctypes.c_float):
    """The address of a kernel, and a function that calls it; `number` is its first argument."""
    kinds = kinds if number is None else (number, *kinds)
    prepare([(kernel, FLOAT32)])
    pointer = pointer_of(kernel, FLOAT32)
    results = ctypes.c_void_p, ctypes.c_void_p
    return pointer, ctypes.CFUNCTYPE(ctypes.c_int32, *results, *kinds)(pointer)


def memory():
    """Scratch for products of up to `MOST` rows, depth and columns, full of NaN."""
    none = [Registers(0, 0)] * 4
    sizes = TileSizes(MOST, MOST, MOST, MOST, 4, 8, MOST, False, False, True, True, False, *none)
    (made,) = aligned([size_of_packed(sizes, MOST)], FLOAT32)
    made[:] = np.nan
    return made


def in_pairs(b):
    """Rows as pairs of vectors, NaN where there is none, and the elements between pairs."""
    depth, columns = b.shape
    pairs = -(-columns // PAIR)
    (made,) = aligned([pairs * depth * PAIR], FLOAT32)
    made[:] = np.nan
    for n in range(columns):
        made[n // PAIR * depth * PAIR :][n % PAIR :: PAIR][:depth] = b[:, n]
    return made, depth * PAIR


def multiplied(kernel, a, b, alpha, maxima):
    """``alpha * a b`` by a kernel of products; the maxima are updated."""
    (rows, depth), columns = a.shape, b.shape[1]
    wide = round_up(columns, vector_lanes(4))
    pairs, pair = in_pairs(np.pad(b, ((0, 0), (0, wide - columns))))
    c, scratch, results = np.full((rows, wide + 3), np.nan, np.float32), memory(), np.zeros(2, int)
    fallback, _ = here(product, *[ctypes.c_int64] * 17)
    _, call = here(kernel, *[ctypes.c_int64] * 17)
    strided = np.full((rows, depth + 5), np.nan, np.float32)
    strided[:, :depth] = a
    largest = np.full(wide, -np.inf, np.float32)
    largest[:columns] = maxima
    status = call(
        address(results), address(results) + 8, alpha, address(strided), depth + 5, 1,
        address(pairs), PAIR, pair, address(c), wide + 3, 0, rows, wide, depth, 4, 0,
        address(largest), address(scratch), fallback,
    )  # fmt: skip
    assert status == 0
    assert np.isnan(c[:, wide:]).all()
    return c[:, :columns], largest[:columns]


def added(kernel, tile, b, target, ahead, seen, along):
    """``target + tile b`` by a kernel of sums; `along` is the axis of `tile` that is contiguous."""
    (rows, depth), columns = tile.shape, b.shape[1]
    wide = round_up(columns, vector_lanes(4))
    pairs, pair = in_pairs(np.pad(b, ((0, 0), (0, wide - columns))))
    result = np.full((rows, wide + 3), np.nan, np.float32)
    result[:, :columns], result[:, columns:wide] = target, 0
    if along == 1:
        stored, strides = np.pad(tile, ((0, 0), (0, 3))), (depth + 3, 1)
    else:
        lanes = -(-rows // 16) * 16
        stored, strides = np.pad(tile.T, ((0, 0), (0, lanes - rows))), (1, lanes)
    stored = np.ascontiguousarray(stored)
    careful = seen is not None
    flags = np.zeros(stored.shape, bool)
    if careful:
        (flags if along == 1 else flags.T)[:rows, :depth] = seen
    flags, scratch, results = flags.reshape(-1), memory(), np.zeros(2, int)
    fma, _ = here(product, *[ctypes.c_int64] * 17)
    _, call = here(kernel, *[ctypes.c_int64] * 23)
    status = call(
        address(results), address(results) + 8, 1.0, fma, address(stored), *strides, rows, depth,
        ahead, address(pairs), pair, wide, 4, address(result), wide + 3, 0, int(careful),
        0, 0, flags.size, 1, address(flags), flags.size, 1, address(scratch),
    )  # fmt: skip
    assert status == 0
    assert np.isnan(result[:, wide:]).all()
    return result[:, :columns]


def drawn(seed, *shape, dtype=ml_dtypes.bfloat16):
    """Random numbers of a type, as float32."""
    x = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return x.astype(dtype).astype(np.float32)


def limit(a, b, extra=4):
    """What rounding may do to each element of the product."""
    sizes = np.abs(a).astype(np.float64) @ np.abs(b)
    return (a.shape[1] + extra) * UNIT * sizes + a.shape[1] * 2.0**-126


sizes = st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 47, 64, 70, 100])


@settings(max_examples=25)
@given(sizes, sizes, sizes, st.integers(0, 2**32))
def test_products(rows, depth, columns, seed):
    a, b = drawn(seed, rows, depth), drawn(seed + 1, depth, columns)
    before = drawn(seed + 2, columns)
    found, largest = multiplied(EMULATED.product, a, b, 0.5, before)
    exact = a.astype(np.float64) @ b
    assert rho(found, exact / 2, limit(a, b)).value <= 1
    assert np.array_equal(largest, np.maximum(found.max(axis=0), before))


@settings(max_examples=25)
@given(sizes, sizes, sizes, st.integers(0, 31), st.integers(0, 2**32), st.sampled_from([0, 1]))
def test_sums(rows, depth, columns, ahead, seed, along):
    tile, b = drawn(seed, rows, depth, dtype=np.float32), drawn(seed + 1, depth, columns)
    target = drawn(seed + 2, rows, columns, dtype=np.float32)
    ahead = 0 if along else ahead
    kernel = EMULATED.accumulate
    found = added(kernel, tile, b, target, ahead, None, along)
    exact = tile.astype(np.float64) @ b + target
    bound = limit(tile, b) + (2 + depth // PANEL) * UNIT * (np.abs(tile) @ np.abs(b) + abs(target))
    assert rho(found, exact, bound).value <= 1


def test_special_numbers_are_multiplied_like_float32():
    a, b = abs(drawn(0, 40, 37)), drawn(1, 37, 40)
    usual, _ = multiplied(EMULATED.product, a, b, 1.0, -np.inf)
    a[3], b[:, 20] = 2.0**-130, -(2.0**60)  # the column's maximum is less than 0
    a[9], b[:, 30] = 2.0**60, 2.0**-130
    a[5, 1], a[17, 2], b[4, 33] = np.nan, np.inf, -np.inf
    found, largest = multiplied(EMULATED.product, a, b, 1.0, -np.inf)
    with np.errstate(all="ignore"):
        exact = a.astype(np.float64) @ b
    nothing = ~np.isfinite(exact)
    assert np.array_equal(found[nothing], exact[nothing].astype(np.float32), equal_nan=True)
    bound = limit(np.where(np.isfinite(a), a, 0), np.where(np.isfinite(b), b, 0))
    assert rho(found[~nothing], exact[~nothing], bound[~nothing]).value <= 1
    expected = np.where(np.isnan(found), -np.inf, found).max(axis=0)
    assert np.array_equal(largest, expected)
    # Rows and columns without any of them keep their bits.
    rows, columns = (np.setdiff1d(np.arange(40), x) for x in ([3, 5, 9, 17], [20, 30, 33]))
    assert np.array_equal(found[np.ix_(rows, columns)], usual[np.ix_(rows, columns)])


@pytest.mark.parametrize("along", [0, 1])
def test_rows_that_are_not_finite_reach_those_that_see_them(along):
    tile, b = abs(drawn(0, 20, 50, dtype=np.float32)), drawn(1, 50, 24)
    seen = np.random.default_rng(2).random(tile.shape) < 0.7
    tile[~seen] = 0
    target, kernel = drawn(3, 20, 24), EMULATED.accumulate
    usual = added(kernel, tile, b, target, 0, None, along)
    hidden = np.array([7, 40])
    seen[:, hidden], tile[:, hidden] = False, 0
    finite = added(kernel, tile, b, target, 0, None, along)
    assert not np.array_equal(finite, usual)
    b[hidden[0]], b[hidden[1], 5] = np.nan, np.inf
    assert np.array_equal(added(kernel, tile, b, target, 0, seen, along), finite)
    b[9, 11], b[3, 2] = np.nan, np.inf
    found = added(kernel, tile, b, target, 0, seen, along)
    assert np.array_equal(np.isnan(found[:, 11]), seen[:, 9])
    assert np.array_equal(np.isposinf(found[:, 2]), seen[:, 3])
    found[seen[:, 9], 11] = finite[seen[:, 9], 11]
    found[seen[:, 3], 2] = finite[seen[:, 3], 2]
    assert np.array_equal(found, finite)


def test_sums_do_not_depend_on_where_they_begin():
    tile, b = drawn(0, 20, 100, dtype=np.float32), drawn(1, 100, 24)
    tile[:, :40] = 0
    target, kernel = np.zeros((20, 24), np.float32), EMULATED.accumulate
    whole = added(kernel, tile, b, target, 0, None, 0)
    assert np.array_equal(added(kernel, tile[:, 40:], b[40:], target, 40 % 32, None, 0), whole)
    assert not np.array_equal(added(kernel, tile[:, 40:], b[40:], target, 0, None, 0), whole)


def test_the_emulated_unit_is_not_the_vector_unit():
    """The tests here would show nothing if both computed the same way."""
    a, b = drawn(0, 16, 64), drawn(1, 64, 16)
    found, _ = multiplied(EMULATED.product, a, b, 1.0, -np.inf)
    other, _ = multiplied(product, a, b, 1.0, -np.inf)
    assert not np.array_equal(found, other)
    target = np.zeros((16, 16), np.float32)
    found = added(EMULATED.accumulate, a, b, target, 0, None, 1)
    assert not np.array_equal(found, added(accumulate_product, a, b, target, 0, None, 1))


MASKS = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.window(40, 3),
    "program": masks.mask(lambda b, h, i, j: (i + j) % 3 > 0),
}


def results(mask, shape, dropout=0.0):
    """Problem, output, log-sum-exp and gradients of a call."""
    rng = np.random.default_rng(0)
    heads, len_q, len_k, d, d_v = shape
    q, k, v, do = (
        rng.standard_normal((1, h, n, columns)).astype(ml_dtypes.bfloat16)
        for h, n, columns in (
            (heads, len_q, d), (1, len_k, d), (1, len_k, d_v), (heads, len_q, d_v),
        )
    )  # fmt: skip
    options = {"mask": MASKS[mask], "dropout": dropout, "seed": 3 if dropout else None}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    gradients = cupyflash.attention_backward(do, q, k, v, out, lse, **options)
    return (do, q, k, v), options, (out, lse, *gradients[:3])


SHAPE = 2, 130, 150, 40, 24


@mostly_thorough(
    "mask", MASKS, quick=["causal"], why="the tiles of a mask are those of the other kernels"
)
def test_calls_are_within_the_bounds(monkeypatch, mask):
    monkeypatch.setenv(amx.VARIABLE, amx.EMULATED)
    (do, q, k, v), options, found = results(mask, SHAPE, 0.25 if mask == "causal" else 0)
    precision = Precision.of(ml_dtypes.bfloat16)
    forward = forward_bound(q, k, v, precision=precision, **options)
    backward = backward_bound(do, q, k, v, precision=precision, **options)
    assert forward.ill_conditioned == 0
    for actual, expected in zip(
        found, (forward.out, forward.lse, backward.dq, backward.dk, backward.dv), strict=True
    ):
        assert rho(actual, expected.exact, expected.bound).value <= 1
    monkeypatch.setenv(amx.VARIABLE, amx.NONE)
    assert not np.array_equal(found[1], results(mask, SHAPE)[2][1])


def test_nan_in_one_batch_entry_changes_no_bit_of_another(monkeypatch):
    """Where something is NaN, blocks of queries are longer, and nothing is left out of a tile.

    Results have so many elements that some are rounded otherwise if their sums differ.
    """
    monkeypatch.setenv(amx.VARIABLE, amx.EMULATED)
    rng = np.random.default_rng(0)
    q, k, v, do = rng.standard_normal((4, 2, 4, 500, 64)).astype(ml_dtypes.bfloat16)

    def call():
        out, lse = cupyflash.attention(q, k, v, mask=MASKS["window"], return_lse=True)
        gradients = cupyflash.attention_backward(do, q, k, v, out, lse, mask=MASKS["window"])
        return out, lse, *gradients[:3]

    clean = call()
    for array in q, k, v, do:
        array[1, 0, 7] = np.nan
    for one, other in zip(clean, call(), strict=True):
        assert one[0].tobytes() == other[0].tobytes()


def test_results_are_rounded_like_numbers_of_numpy():
    bits = np.random.default_rng(0).integers(0, 2**32, (5, 99), np.uint32)
    bits[0, :8] = [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0x7F7FFFFF, 0x18000, 0x8000, 1]
    numbers, found = bits.view(np.float32), np.zeros((5, 120), ml_dtypes.bfloat16)
    _, narrow = here(narrow_rows, *[ctypes.c_int64] * 6, number=None)
    status = np.zeros(2, int)
    places = address(numbers), 99 * 4, 5, 99, address(found), 240
    assert narrow(address(status), address(status) + 8, *places) == 0
    with np.errstate(all="ignore"):
        expected = numbers.astype(ml_dtypes.bfloat16)
    assert np.array_equal(found[:, :99].view(np.uint16), expected.view(np.uint16))
    assert not found[:, 99:].any()


def test_results_are_written_in_place_whatever_their_strides(monkeypatch):
    monkeypatch.setenv(amx.VARIABLE, amx.EMULATED)
    (do, q, k, v), options, (out, lse, *gradients) = results("causal", SHAPE)
    for step in 1, 2:  # rows that lie apart; elements that do
        made = [np.zeros((*x.shape[:-1], 3 * x.shape[-1]), x.dtype) for x in (out, *gradients)]
        views = [x[..., : step * x.shape[-1] // 3 : step] for x in made]
        cupyflash.attention(q, k, v, out=views[0], **options)
        into = (*views[1:], None, None)
        cupyflash.attention_backward(do, q, k, v, out, lse, grads_out=into, **options)
        for view, whole, expected in zip(views, made, (out, *gradients), strict=True):
            assert np.array_equal(view, expected)
            view[...] = 0
            assert not whole.any()


def test_the_number_of_threads_changes_no_bit(monkeypatch):
    monkeypatch.setenv(amx.VARIABLE, amx.EMULATED)
    found = []
    for threads in "1", "3":
        monkeypatch.setenv("CUPYFLASH_NUM_THREADS", threads)
        found.append(results("causal", (4, 300, 300, 16, 16))[2])
    for one, other in zip(*found, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.skipif(not amx.is_available(), reason="this CPU has no AMX for bfloat16")
@pytest.mark.parametrize("mask", MASKS)
def test_amx_gives_the_bits_of_the_emulated_unit(monkeypatch, mask):
    found = []
    for unit in amx.NATIVE, amx.EMULATED:
        monkeypatch.setenv(amx.VARIABLE, unit)
        found.append(results(mask, SHAPE)[2])
    for one, other in zip(*found, strict=True):
        assert one.tobytes() == other.tobytes()


def test_the_environment_chooses_the_unit(monkeypatch):
    for available, usual in ((True, amx.NATIVE), (False, amx.NONE)):
        monkeypatch.setattr(amx, "is_available", lambda available=available: available)
        monkeypatch.delenv(amx.VARIABLE, raising=False)
        assert amx.tile_unit() == usual
        for unit in amx.EMULATED, amx.NONE:
            monkeypatch.setenv(amx.VARIABLE, unit)
            assert amx.tile_unit() == unit
    monkeypatch.setenv(amx.VARIABLE, amx.NATIVE)
    with pytest.raises(ValueError, match="has no AMX"):
        amx.tile_unit()
    monkeypatch.setenv(amx.VARIABLE, "always")
    with pytest.raises(ValueError, match="expected 'native', 'emulated' or 'none'"):
        amx.tile_unit()


@pytest.mark.parametrize("parts", [1, 3])
def test_the_instructions_of_a_block(parts):
    module = ir.Module()
    word = ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [word] * 4), "block")
    builder = ir.IRBuilder(function.append_basic_block())
    amx_code.emit_begin(builder)
    amx_code.emit_amx(builder, parts, 2, 2, *function.args)
    amx_code.emit_end(builder)
    builder.ret_void()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    module.triple = "x86_64-unknown-linux-gnu"
    target = binding.Target.from_triple(module.triple)
    machine = target.create_target_machine(cpu="sapphirerapids", opt=3)
    text = machine.emit_assembly(binding.parse_assembly(str(module)))
    names = re.findall(r"^\s+(ldtilecfg|tile\w+|tdpbf16ps)\b", text, re.MULTILINE)
    assert names[:5] == ["ldtilecfg"] + 4 * ["tilezero"]
    assert names[-5:] == 4 * ["tilestored"] + ["tilerelease"]
    assert names.count("tdpbf16ps") == 4 * parts
    assert names.count("tileloadd") == 2 + 2 * parts
