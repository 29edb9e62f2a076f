"""Caches of codes of 8 and 4 bits by the CUDA kernels on the CPU: read, and written."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from caches import results
from coded_caches import FORMATS, MIXED, NAMES, NAN_CODE, Coded, forms_of, meaning, words
from cuda_specialisations import target_of
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import REVERSE, randomly
from emulator.problems import HostMemory
from gpu_arrays import Copies
from halves import mostly_thorough
from placement import same_bits

from cupyflash import Rotary, lookup, masks, rope
from cupyflash.gpu import route
from cupyflash.gpu.kernels import registry
from cupyflash.gpu.kernels.spec import Request
from cupyflash.problem import append as appends
from cupyflash.problem import cached
from cupyflash.problem.codes import CacheCodes
from cupyflash.problem.formats import FORMATS as FORMATS_BY_NAME
from cupyflash.problem.options import Options
from cupyflash.rowwise import APPEND
from cupyflash.testing import Precision, forward_bound, rho

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
F16, BF16, F32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
QUICK = [("int8", BF16), ("float8_e4m3fn", F32), ("int4", F16)]
EACH = mostly_thorough(
    ("form", "dtype"),
    [(form, dtype) for form in (*FORMATS, *MIXED) for dtype in (F16, BF16, F32)],
    quick=[
        *QUICK,
        (("int8", "int4"), BF16),
        ((None, "float8_e4m3fn"), BF16),
        (("int4", None), F16),
        (("float8_e5m2", "int8"), F32),
    ],
    why="each format and each type are in a quick case, or differ by constants",
    ids=lambda x: str(x) if isinstance(x, np.dtype) else words(x),
)
RARE = mostly_thorough(
    ("form", "dtype"),
    [(form, dtype) for form in FORMATS for dtype in (F16, BF16, F32)],
    quick=[("float8_e4m3fn", BF16)],
    why="these codes are not finite, and become numbers of another type",
)
HALVES = mostly_thorough(
    ("form", "dtype"),
    [(form, dtype) for form in FORMATS for dtype in (F16, BF16)],
    quick=[("int8", BF16)],
    why="what is skipped is the same in each",
)
FORM = mostly_thorough("form", FORMATS, quick=["int4"], why="int4 has groups, too")
PAIRS = mostly_thorough(
    ("form", "dtype"),
    [(form, dtype) for form in MIXED for dtype in (F16, BF16)],
    quick=[(("int8", "int4"), BF16)],
    why="what each side computes does not depend on the other one's format",
    ids=lambda x: str(x) if isinstance(x, np.dtype) else words(x),
)
LENGTHS = np.array([130, 0, 65])


def draw(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def cache(form, d=64, d_v=32, room=140, dtype=F32, **rows):
    k, v = draw((3, 2, room, d), (3, 2, room, d_v))
    rng = np.random.default_rng(1)
    sizes = np.exp(rng.standard_normal((2, 3, 2, room, 1)))
    scaled = (x * np.float32(s) for x, s in zip((k, v), sizes, strict=True))
    return Coded.of(form, *scaled, dtype=dtype, **rows)


def run(q, held, lengths=LENGTHS, offsets_q=None, blocks=None, schedule=REVERSE, **options):
    """Compute out and lse over a cache, into memory that holds NaN."""
    given = CacheCodes(held.k_scale, held.v_scale, held.form)
    arrays = q, held.k, held.v, lengths, held.table, offsets_q
    call = cached.call(*arrays, Options(**options), given)
    out, lse = results(call)
    Emulator(blocks or Blocks(), schedule).forward(call, out, lse)
    return out, lse


def same(ours, expected):
    assert all(same_bits(a, b) for a, b in zip(ours, expected, strict=True))


@EACH
def test_attention_is_that_over_what_codes_mean(form, dtype):
    held = cache(form, dtype=dtype)
    (q,) = draw((3, 6, 3, 64), dtype=dtype, seed=1)
    out, lse = run(q, held.poisoned(LENGTHS), mask=masks.causal())
    precision = Precision.of(dtype, dtype != F32).with_codes()
    for b, n in enumerate(LENGTHS):
        k, v = (x[b, :, :n] for x in held.numbers)
        bound = forward_bound(q[b], k, v, precision=precision, block_kv=64, mask=masks.causal())
        assert rho(out[b], *bound.out).value <= 1
        assert rho(lse[b], *bound.lse).value <= 1


@PAIRS
def test_keys_and_values_have_the_bits_that_they_have_beside_their_own_kind(form, dtype):
    """The log-sum-exp is that of keys alone, and weights that are equal leave values alone."""
    (q,) = draw((3, 6, 2, 64), dtype=dtype, seed=1)
    held, by_keys, by_values = (
        cache(each, dtype=dtype) for each in (form, (form[0],) * 2, (form[1],) * 2)
    )
    masked = {"mask": masks.causal()}
    (_, lse), (_, expected) = (run(q, x, **masked) for x in (held, by_keys))
    same([lse], [expected])
    (out, _), (expected, _) = (run(np.zeros_like(q), x, **masked) for x in (held, by_values))
    same([out], [expected])


@RARE
def test_every_code_means_its_number(form, dtype):
    """The only key has all the weight, so the output is its value, multiplied by the scale.

    And queries of which one element is 1 have scores that are keys, multiplied by theirs.
    """
    codes = np.arange(256, dtype=np.uint8).reshape(1, 1, 4, 64)
    scale = np.array([0.375, 1.0, 0.5, 1.5], np.float32).reshape(1, 1, 4, 1)
    numbers = meaning(codes, scale, form)
    columns = numbers.shape[-1]
    zeros = np.zeros((1, 1, 4, 2), np.uint8)
    held = Coded(form, zeros, codes, scale, scale)
    q = np.zeros((1, 1, 4, 4 if form == "int4" else 2), dtype)
    out, _ = run(q, held, 4, mask=masks.mask(lambda b, h, i, j: i == j))
    with np.errstate(over="ignore"):
        assert np.array_equal(out, numbers.astype(dtype), equal_nan=True)
    finite = np.isfinite(meaning(codes, np.ones_like(scale), form))
    if form != "int4":
        codes = np.where(finite, codes, 0)
        numbers = meaning(codes, scale, form)
    held = Coded(form, codes.astype(np.uint8), zeros, scale, scale)
    q = np.eye(columns, dtype=dtype)[None, None]
    for j in range(4):
        mask = masks.mask(lambda b, h, i, key, j=j: key == j)
        _, lse = run(q, held, 4, scale=1.0, mask=mask)
        np.testing.assert_allclose(lse[0, 0], numbers[0, 0, j], rtol=2.0**-20, atol=2.0**-20)


@pytest.mark.thorough("codes that are not finite are quick on the CPU")
@RARE
def test_what_is_not_finite_stays_with_its_pairs(form, dtype):
    """Codes and scales that are NaN or infinite, of keys that some queries do not see."""
    held, lengths = cache(form), np.array([140, 140, 140])
    (q,) = draw((3, 2, 1, 64), dtype=dtype, seed=4)
    spoilt = held.poisoned([139, 135, 140])
    spoilt.k_scale[2, :, 70:80] = np.inf
    spoilt.v[2, :, 3] = NAN_CODE[form]
    spoilt.v_scale[2, :, 3] = np.nan
    unseen = np.zeros((3, 140), bool)
    unseen[0, 139:] = unseen[1, 135:] = unseen[2, 70:80] = unseen[2, 3] = True
    hidden = lookup(unseen)
    seen = masks.mask(lambda b, h, i, j: ~hidden[b, j])
    same(run(q, spoilt, lengths, mask=seen), run(q, held, lengths, mask=seen))
    out, _ = run(q, spoilt, lengths)
    assert np.isnan(out).all()


SIZES = mostly_thorough(
    ("form", "d", "d_v"),
    [
        *((form, *own) for form in FORMATS for own in ((40, 72), (96, 24), (136, 64), (256, 256))),
        *((form, 33, 17) for form in FORMATS if form != "int4"),
        *((form, 40, 72) for form in MIXED),
        *((form, 256, 136) for form in [("int8", "int4"), (None, "int4"), ("int4", None)]),
        ((None, "int8"), 33, 17),
        (("float8_e4m3fn", None), 33, 17),
    ],
    quick=[("int4", 40, 72), ((None, "int4"), 40, 72)],
    why="sizes whose rows are whole vectors are quick above",
    ids=lambda x: str(x) if isinstance(x, int) else words(x),
)


@SIZES
def test_head_sizes_and_strides(form, d, d_v):
    held = cache(form, d, d_v, dtype=BF16)
    apart = {}
    for name in ("k", "v"):
        x = getattr(held, name)
        wide = np.full((*x.shape[:-1], 2 * x.shape[-1] + 3), 0xA5, x.dtype)
        wide[..., : 2 * x.shape[-1] : 2] = x
        apart[name] = wide[..., : 2 * x.shape[-1] : 2]
    (q,) = draw((3, 6, 2, d), dtype=BF16, seed=5)
    out, lse = run(q, held, mask=masks.causal())
    precision = Precision.of(BF16, True).with_codes()
    for b, n in enumerate(LENGTHS):
        k, v = (x[b, :, :n] for x in held.numbers)
        bound = forward_bound(q[b], k, v, precision=precision, block_kv=64, mask=masks.causal())
        assert rho(out[b], *bound.out).value <= 1
        assert rho(lse[b], *bound.lse).value <= 1
    same(run(q, dataclasses.replace(held, **apart), mask=masks.causal()), (out, lse))


@FORM
def test_pages_and_drafts_and_packed_queries_change_no_bit(form):
    held, lengths = cache(form), np.array([130, 3, 65])
    (q,) = draw((3, 4, 3, 64), seed=1)
    out, lse = run(q, held, lengths, mask=masks.causal())
    same(run(q, held.paged(7), lengths, mask=masks.causal()), (out, lse))
    step = run(np.ascontiguousarray(q[:, :, 1:2]), held, lengths - 1)
    same((out[:, :, 1:2], lse[:, :, 1:2]), step)
    packed, offsets = q.swapaxes(0, 1).reshape(4, 9, 64), np.array([0, 3, 6, 9])
    packed_out, packed_lse = run(packed, held, lengths, offsets, mask=masks.causal())
    same(
        (packed_out, packed_lse),
        (out.swapaxes(0, 1).reshape(4, 9, 32), lse.swapaxes(0, 1).reshape(4, 9)),
    )


@HALVES
def test_steps_of_few_rows_have_the_bits_of_drafts_of_many(form, dtype):
    """A draft has 9 rows, and a step 3: half of a product's rows are skipped."""
    held, lengths = cache(form), np.array([140, 67, 65])
    (q,) = draw((3, 6, 3, 64), dtype=dtype, seed=1)
    out, lse = run(q, held, lengths, mask=masks.causal())
    for n in range(3):
        step = run(np.ascontiguousarray(q[:, :, n : n + 1]), held, lengths - 2 + n)
        same((out[:, :, n : n + 1], lse[:, :, n : n + 1]), step)


@FORM
def test_scales_broadcast_to_their_array(form):
    held = cache(form, whole_rows=True)
    (q,) = draw((3, 2, 1, 64), seed=1)
    for shape in ((), (2, 1, 1), (3, 1, 140, 1)):
        scale = np.random.default_rng(2).uniform(0.1, 1.0, shape).astype(np.float32)
        whole = np.broadcast_to(scale, held.k_scale.shape).copy()
        made = (dataclasses.replace(held, k_scale=x, v_scale=x) for x in (scale, whole))
        same(*(run(q, x) for x in made))


@pytest.mark.thorough("three queries of each head are quick")
@FORM
def test_a_prompt_of_many_queries(form):
    """No kernel of a prompt reads codes, so the kernel of few queries has all tasks."""
    held, lengths = cache(form), np.array([130, 80, 65])
    (q,) = draw((3, 2, 65, 64), dtype=F16, seed=1)
    out, lse = run(q, held, lengths, mask=masks.causal(), blocks=Blocks(hopper=True))
    last = run(np.ascontiguousarray(q[:, :, -1:]), held, lengths)
    same((out[:, :, -1:], lse[:, :, -1:]), last)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_the_kernel_of_few_queries_serves_prompts(arch):
    """Whatever the type of the queries, because the kernels of prompts read no codes."""
    held = cache("int8")
    given = CacheCodes(held.k_scale, held.v_scale, held.form)
    for len_q, dtype in ((1, F16), (70, BF16), (70, F32)):
        (q,) = draw((3, 2, len_q, 64), dtype=dtype)
        call = cached.call(q, held.k, held.v, LENGTHS, None, None, Options(), given)
        target = target_of(arch)
        choice = registry.select("decode", Request(call.problem, target, call))
        assert choice.spec.codes
        tensor = dtype != F32 and arch != "sm_75"
        assert choice.spec.name == ("decode_sm80" if tensor else "decode_simt")
        out, lse = results(call)
        launches = route.forward(call, target, out, lse).recipe.launches
        assert [x.special.spec.part for x in launches] == ["decode", "join"]
        special = launches[0].special
        assert special.k_codes == special.v_codes == FORMATS_BY_NAME["int8"]


# New rows


@EACH
def test_new_rows_have_the_codes_of_quantize(form, dtype):
    """In pages, packed, rotated; and nothing else changes."""
    k_new, v_new, q = draw((2, 7, 64), (2, 7, 32), (4, 7, 64), dtype=dtype)
    v_new[0, 2, 5] = np.nan
    v_new[1, 3, 5] = np.inf
    angles = np.outer(np.arange(15), [1.0, 0.3, 0.1]).astype(np.float32)
    positions = np.array([4, 5, 6, 7, 8, 1, 2])
    table = np.array([[4, 1, 0], [2, 3, 5]])
    for seed, whole_rows, interleaved in ((0, False, False), (1, True, True)):
        rotary = Rotary(np.cos(angles), np.sin(angles), interleaved)
        copies = Copies(HostMemory())
        held = {}
        for name, columns, each in zip("kv", (64, 32), forms_of(form), strict=True):
            if each is None:
                held[name] = np.full((6, 2, 5, columns), 0xA5, dtype)
                continue
            groups = columns // 32 if each == "int4" and not whole_rows else 1
            held[name] = np.full((6, 2, 5, columns // (2 if each == "int4" else 1)), 0xA5, np.uint8)
            held[f"{name}_scale"] = np.full((6, 2, 5, groups), 7.0, np.float32)
        device = dict.fromkeys(NAMES)
        device |= {name: copies.array(x, True, True) for name, x in held.items()}
        turned = np.empty(q.shape, dtype)
        target = copies.array(turned, True)
        checked = appends.append(
            *(copies.array(x) for x in (k_new, v_new)), device["k"], device["v"],
            copies.array(np.array([9, 3])), copies.array(table), copies.array(np.array([0, 5, 7])),
            copies.array(q), rotary, None, None,
            CacheCodes(device["k_scale"], device["v_scale"], form),
        )  # fmt: skip
        Emulator(schedule=randomly(seed)).rowwise(APPEND, checked, out=target)
        copies.check()
        rows = Coded.of(form, rope(k_new, positions, rotary), v_new, whole_rows, dtype)
        entries = np.array([0] * 5 + [1] * 2)
        page, row = table[entries, positions // 5], positions % 5
        for name, before in held.items():
            expected = before.copy()
            expected.swapaxes(1, 2)[page, row] = getattr(rows, name).swapaxes(0, 1)
            assert same_bits(copies.value(before), expected), name
        assert same_bits(copies.value(turned), rope(q, positions, rotary))
