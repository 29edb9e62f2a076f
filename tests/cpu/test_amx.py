"""Products by tiles of bfloat16: the emulated unit anywhere, AMX where the CPU has it."""

from __future__ import annotations

import ctypes
import re

import ml_dtypes
import numpy as np
import pytest
from halves import mostly_thorough
from llvmlite import binding, ir
from test_vectors import run_here

import cupyflash
from cupyflash import masks
from cupyflash.problem import replay
from cupyflash.reference.cpu import amx, amx_code, kernels
from cupyflash.reference.cpu.addresses import address
from cupyflash.reference.cpu.amx_pack import PACKINGS
from cupyflash.reference.cpu.amx_scores import scores_filler
from cupyflash.reference.cpu.jit import pointer_of, prepare
from cupyflash.reference.cpu.memory import aligned
from cupyflash.reference.cpu.narrow import narrow_rows
from cupyflash.testing.bound import Precision, backward_bound, forward_bound, rho

FLOAT32 = np.dtype(np.float32)


def block(unit, form):
    """A module with a function that takes `Places`, and does one block by a unit."""
    module = ir.Module()
    words = [ir.IntType(64)] * len(amx_code.Places._fields)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), words), "block")
    builder = ir.IRBuilder(function.append_basic_block())
    made = unit(builder)
    made.begin()
    amx_code.emit_block(made, form, amx_code.Places(*function.args))
    made.end()
    builder.ret_void()
    return module


def operand(rng, steps, parts):
    """Two tiles of words, (tile, step, part, row, word), and the two numbers of each."""
    (memory,) = aligned([2 * steps * parts * 256], FLOAT32)
    words = memory.view(np.uint32).reshape(2, steps, parts, 16, 16)
    numbers = rng.standard_normal((*words.shape, 2), np.float32).astype(ml_dtypes.bfloat16)
    words[...] = numbers.view(np.uint32)[..., 0]
    return words, numbers.astype(np.float64)


def step_by_numpy(a, b):
    """What one instruction adds: low and high numbers apart, then both."""
    low, high = np.zeros((2, 16, 16), np.float32)
    for k in range(16):
        low[...] = np.outer(a[:, k, 0], b[k, :, 0]) + low
        high[...] = np.outer(a[:, k, 1], b[k, :, 1]) + high
    return low + high


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("parts", [(1, 1), (3, 1), (1, 3), (2, 2)])
def test_the_order_of_sums_is_the_instructions(sizes, parts):
    rng, steps = np.random.default_rng(0), 3
    form = amx_code.Form(*sizes, *parts, adds=True)
    (a, of_a), (b, of_b) = (operand(rng, steps, count) for count in parts)
    c = rng.standard_normal((32, 40), np.float32)
    expected = c.copy()
    for m in range(sizes[0]):
        for n in range(sizes[1]):
            cell = expected[16 * m : 16 * m + 16, 16 * n : 16 * n + 16]
            for s in range(steps):
                for x, y in form.products():
                    cell += step_by_numpy(of_a[m, s, x], of_b[n, s, y])
    held, run = run_here(block(amx_code.EmulatedUnit, form), "block", *[ctypes.c_int64] * 11)
    run(
        address(a[0]), 64, address(a[1]), 64, parts[0] * 1024, address(b[0]), address(b[1]),
        parts[1] * 1024, steps, address(c), 160,
    )  # fmt: skip
    assert np.array_equal(c, expected)
    del held


def test_numbers_that_are_not_normal_are_0_in_tiles():
    """Of bfloat16 in A or B, and of float32 in C, in sums and in results."""
    rng = np.random.default_rng(0)
    tiny = np.float32(2.0**-127)
    module = block(amx_code.EmulatedUnit, amx_code.Form(1, 1, 1, 1, adds=True))
    held, run = run_here(module, "block", *[ctypes.c_int64] * 11)
    # 2^-133 times any number; 2^-64 times 2^-63; C of 2^-127; C of 2^-126.
    for bits, other, before, expected in (
        (0x00010001, None, 0, 0),
        (0x1F801F80, 0x20002000, 0, 0),
        (0, None, tiny, 0),
        (0x00000001, 0x3F803F80, 2 * tiny, 2 * tiny),
    ):
        (a, _), (b, _) = operand(rng, 1, 1), operand(rng, 1, 1)
        a[...], c = bits, np.full((16, 16), before, np.float32)
        if other:
            b[...] = other
        run(address(a), 64, 0, 0, 0, address(b), 0, 0, 1, address(c), 64)
        assert (c == expected).all()
    del held


KINDS = pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16])
MASKS = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.window(40, 3),
    "program": masks.mask(lambda b, h, i, j: (i + j) % 3 > 0),
}


def results(mask, shape, dropout=0.0, kind=ml_dtypes.bfloat16):
    """Problem, output, log-sum-exp and gradients of a call."""
    rng = np.random.default_rng(0)
    heads, len_q, len_k, d, d_v = shape
    q, k, v, do = (
        rng.standard_normal((1, h, n, columns)).astype(kind)
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
    ("mask", "kind"),
    [(mask, kind) for kind in (ml_dtypes.bfloat16, np.float16) for mask in MASKS],
    quick=[("causal", ml_dtypes.bfloat16)],
    why="masks have the tiles of the other kernels, and both types the same steps",
)
def test_calls_are_within_the_bounds(monkeypatch, mask, kind):
    monkeypatch.setenv(amx.VARIABLE, amx.EMULATED)
    (do, q, k, v), options, found = results(mask, SHAPE, 0.25 if mask == "causal" else 0, kind)
    precision = Precision.of(kind)
    forward = forward_bound(q, k, v, precision=precision, **options)
    backward = backward_bound(do, q, k, v, precision=precision, **options)
    assert forward.ill_conditioned == 0
    for actual, expected in zip(
        found, (forward.out, forward.lse, backward.dq, backward.dk, backward.dv), strict=True
    ):
        assert rho(actual, expected.exact, expected.bound).value <= 1
    monkeypatch.setenv(amx.VARIABLE, amx.NONE)
    assert not np.array_equal(found[1], results(mask, SHAPE, kind=kind)[2][1])


def drawn_call(len_q, len_k, d=32, heads=2, kind=ml_dtypes.bfloat16):
    """Queries, keys and values."""
    rng = np.random.default_rng(len_q)
    shapes = ((1, heads, len_q, d), (1, heads, len_k, d), (1, heads, len_k, d))
    return [rng.standard_normal(shape).astype(kind) for shape in shapes]


def same(one, other):
    """Whether results have the same bits."""
    return [x.tobytes() for x in one] == [x.tobytes() for x in other]


@KINDS
@pytest.mark.parametrize("d", [32, 40])
def test_a_mask_has_the_bits_of_its_array(monkeypatch, d, kind):
    """Also one that hides nothing has those of no mask: scores are scaled in other passes."""
    monkeypatch.setenv(amx.VARIABLE, amx.EMULATED)
    arrays = drawn_call(150, 170, d, kind=kind)
    i, j = np.arange(150)[:, None], np.arange(170)
    window = masks.window(40, 3)
    shown = np.where((j <= i + 20 + 3) & (j >= i + 20 - 40), 0, -np.inf)
    for mask, bias in ((None, np.zeros_like(shown)), (window, shown)):
        found = cupyflash.attention(*arrays, mask=mask, return_lse=True)
        bias = bias.astype(np.float32)[None, None]
        assert same(found, cupyflash.attention(*arrays, bias=bias, return_lse=True))


@KINDS
def test_a_query_has_the_bits_that_it_has_alone(monkeypatch, kind):
    monkeypatch.setenv(amx.VARIABLE, amx.EMULATED)
    q, k, v = drawn_call(210, 170, kind=kind)
    whole = cupyflash.attention(q, k, v, return_lse=True)
    for first, last in ((0, 1), (37, 90), (200, 210)):
        part = cupyflash.attention(q[..., first:last, :], k, v, return_lse=True)
        assert same(part, [x[:, :, first:last] for x in whole])


@pytest.mark.parametrize("d", [32, 40])
def test_subnormal_queries_and_keys_count(monkeypatch, d):
    monkeypatch.setenv(amx.VARIABLE, amx.EMULATED)
    q, k, v = (abs(x) for x in drawn_call(70, 90, d))
    tiny, huge = 2.0**-130, 2.0**129 / d
    q[:, :, 3], k[:, 1, 80] = tiny, huge  # the products are 1 / 2 and more
    q[:, 0, 9] = tiny
    k[:, 0, 80] = huge
    found = cupyflash.attention(q, k, v, return_lse=True, scale=1.0)
    bound = forward_bound(q, k, v, precision=Precision.of(ml_dtypes.bfloat16), scale=1.0)
    for actual, expected in zip(found, bound[:2], strict=True):
        assert rho(actual[:, :, [3]], *(x[:, :, [3]] for x in expected)).value <= 1
    q[:, :, 3] = 0
    flushed = cupyflash.attention(q, k, v, return_lse=True, scale=1.0)
    assert not np.array_equal(found[1][:, :, 3], flushed[1][:, :, 3])
    assert same([x[:, :, 10:] for x in found], [x[:, :, 10:] for x in flushed])


@KINDS
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_values_that_are_not_finite_reach_the_queries_that_see_them(monkeypatch, dropout, kind):
    monkeypatch.setenv(amx.VARIABLE, amx.EMULATED)
    q, k, v = drawn_call(100, 140, kind=kind)
    options = {"mask": masks.causal(), "dropout": dropout, "seed": 1 if dropout else None}
    clean = cupyflash.attention(q, k, v, return_lse=True, **options)
    v[0, 0, 130, 5], v[0, 1, 100, 7] = np.nan, np.inf
    found = cupyflash.attention(q, k, v, return_lse=True, **options)
    sees = {key: np.arange(100) + 40 >= key for key in (100, 130)}
    assert np.array_equal(np.isnan(found[0][0, 0, :, 5]), sees[130])
    seen = ~np.isfinite(found[0][0, 1, :, 7])
    assert np.array_equal(seen, sees[100])
    if not dropout:
        assert (found[0][0, 1, seen, 7] == np.inf).all()
    found[0][0, 0, :, 5], found[0][0, 1, :, 7] = clean[0][0, 0, :, 5], clean[0][0, 1, :, 7]
    assert same(found, clean)


@mostly_thorough(
    "kind", [ml_dtypes.bfloat16, np.float16], quick=[ml_dtypes.bfloat16],
    why="gradients have the same steps in both types; results of both are quick",
)  # fmt: skip
def test_infinity_and_nan_are_those_of_float32(monkeypatch, kind):
    """Anywhere in any array: nothing but what they belong to is computed from them."""
    rng = np.random.default_rng(0)
    q, k, v = drawn_call(70, 90, 24, kind=kind)
    do = drawn_call(70, 90, 24, kind=kind)[0] * kind(0.5)
    options = {"mask": masks.window(40, 40)}

    def call(unit):
        monkeypatch.setenv(amx.VARIABLE, unit)
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        return [out, lse, *cupyflash.attention_backward(do, q, k, v, out, lse, **options)[:3]]

    for array in q, k, v, do:
        for value in np.inf, -np.inf, np.nan:
            place = (0, *(rng.integers(n) for n in array.shape[1:]))
            kept, array[place] = array[place], value
            for found, expected in zip(call(amx.EMULATED), call(amx.NONE), strict=True):
                both = (found.astype(np.float32), expected.astype(np.float32))
                found, expected = (np.where(np.isfinite(x), 0, x) for x in both)
                assert np.array_equal(found, expected, equal_nan=True)
            array[place] = kept


def test_no_kernel_multiplies_but_those_by_tiles(monkeypatch):
    """And delta alone widens rows."""
    monkeypatch.setattr(replay, "_entries", {})
    monkeypatch.setenv(amx.VARIABLE, amx.EMULATED)
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "1")
    wanted = []
    monkeypatch.setattr(kernels, "prepare", lambda each: (wanted.extend(each), prepare(each)))
    q, k, v = drawn_call(40, 50)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    assert {each.__name__ for each, _ in wanted} == {
        "forward_emulated",
        "narrow_rows",
        "load_ahead",
    }
    wanted.clear()
    cupyflash.attention_backward(q, q, k, v, out, lse)
    by_tiles = {"gradient_emulated", "backward_dkdv_emulated"}
    assert {each.__name__ for each, _ in wanted} == {
        *by_tiles, "backward_delta", "head_checksums", "widen_rows", "narrow_rows", "load_ahead",
    }  # fmt: skip


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
    prepare([(narrow_rows, FLOAT32)])
    kinds = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 6
    narrow = ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(pointer_of(narrow_rows, FLOAT32))
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
@KINDS
@pytest.mark.parametrize("mask", MASKS)
def test_amx_gives_the_bits_of_the_emulated_unit(monkeypatch, mask, kind):
    found = []
    for unit in amx.NATIVE, amx.EMULATED:
        monkeypatch.setenv(amx.VARIABLE, unit)
        found.append(results(mask, SHAPE, kind=kind)[2])
    for one, other in zip(*found, strict=True):
        assert one.tobytes() == other.tobytes()


def test_helpers_of_variants_have_names_of_their_own():
    """Kernels from disk are linked by them: a name that two had was that of the first one."""
    made = [
        amx_code.multiplier(unit, *parts, adds)
        for unit in (amx_code.MatrixUnit, amx_code.EmulatedUnit)
        for parts in ((1, 1), (1, 3), (3, 1))
        for adds in (False, True)
    ]
    made += [each for packing in PACKINGS.values() for each in packing[3:]]
    made += [scores_filler(amx_code.MatrixUnit, packing) for packing in PACKINGS.values()]
    names = [each.py_func.__qualname__ for each in made]
    assert len(set(names)) == len(names)


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
    monkeypatch.setenv(amx.VARIABLE, amx.EMULATED)
    monkeypatch.setattr(amx.vectors, "HOST", amx.vectors.registers_of({}, "aarch64"))
    with pytest.raises(ValueError, match="need vectors of 32 bytes or more; this CPU has 16"):
        amx.tile_unit()


@pytest.mark.parametrize(("parts", "loads"), [((1, 1), 4), ((3, 1), 8), ((1, 3), 8), ((2, 2), 12)])
def test_the_instructions_of_a_block(parts, loads):
    module = block(amx_code.MatrixUnit, amx_code.Form(2, 2, *parts))
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    module.triple = "x86_64-unknown-linux-gnu"
    target = binding.Target.from_triple(module.triple)
    machine = target.create_target_machine(cpu="sapphirerapids", opt=3)
    text = machine.emit_assembly(binding.parse_assembly(str(module)))
    names = re.findall(r"^\s+(ldtilecfg|tile\w+|tdpbf16ps)\b", text, re.MULTILINE)
    assert names[:5] == ["ldtilecfg"] + 4 * ["tilezero"]
    assert names[-5:] == 4 * ["tilestored"] + ["tilerelease"]
    assert names.count("tdpbf16ps") == 4 * parts[0] * parts[1]
    assert names.count("tileloadd") == loads
