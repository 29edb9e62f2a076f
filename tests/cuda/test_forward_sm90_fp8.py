"""Codes of float8 on Hopper's tensor cores, on the CPU; and on GPUs that widen them first."""

from __future__ import annotations

import numpy as np
import pytest
from coded_arrays import FORMATS, NAN_CODE, Coded, draw
from cuda_specialisations import target_of
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import FORWARD, REVERSE, randomly
from halves import mostly_thorough
from placement import same_bits

from cupyflash import attention, attention_varlen, masks, scores
from cupyflash.gpu import route
from cupyflash.gpu.kernels import sm90_fp8
from cupyflash.problem import coded, validate
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, forward_bound, forward_bound_varlen, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
E4M3, E5M2 = FORMATS
EACH = mostly_thorough(
    "form", FORMATS, quick=[E4M3], why="e5m2 differs from e4m3 in one operand of an instruction"
)


def call_of(held, out_dtype="float32", offsets=None, **options):
    given = coded.Fp8(*held.scales, held.form, out_dtype)
    if offsets is None:
        return validate.call(*held.arrays, Options(**options), given=given)
    return validate.varlen_call(*held.arrays, *offsets, True, Options(**options), given=given)


def run(held, schedule=REVERSE, hopper=True, out=None, read=build.read, **options):
    """Compute out and lse on the emulator, into memory that holds NaN."""
    call = call_of(held, **options)
    problem = call.problem
    lead = () if problem.packed else problem.lead
    if out is None:
        out = np.empty((*lead, problem.heads, call.q.shape[-2], problem.d_v), problem.dtype)
    out[...] = np.nan
    lse = np.full(out.shape[:-1], np.nan, np.float32)
    blocks = Blocks(hopper=hopper, multiprocessors=2)
    Emulator(blocks, schedule, read=read).forward(call, out, lse)
    return out, lse


def within_the_bound(held, results, how="codes", out_dtype="float32", offsets=None, **options):
    options |= {"precision": Precision.of_codes(out_dtype, how), "block_kv": 32}
    if offsets is None:
        bound = forward_bound(*held.numbers, **options)
    else:
        bound = forward_bound_varlen(*held.numbers, *offsets, **options)
    assert not bound.ill_conditioned
    for ours, bounded in zip(results, (bound.out, bound.lse), strict=True):
        assert rho(ours, *bounded).value <= 1


# -- numbers --------------------------------------------------------------------------------------


@emulated
@EACH
@mostly_thorough("d", [64, 128, 256], quick=[128], why="other tiles of the same code")
@mostly_thorough("edge", [-1, 0, 1], quick=[1], why="the same with less of a tile")
def test_sizes_at_the_edges_of_tiles(form, d, edge):
    block_q, block_kv = sm90_fp8.TILES[d]
    blocks = 6 if d == 128 else 1  # fewer queries have other tiles
    q, k, v = draw((1, blocks * block_q + edge, d), *[(1, 2 * block_kv + edge, d)] * 2)
    held = Coded.of(form, q, k, v, by="head")
    within_the_bound(held, run(held, scale=0.02), scale=0.02)


@emulated
@EACH
@mostly_thorough("d", [64, 128], quick=[64], why="the same with wider rows")
def test_warps_that_see_no_key_of_a_tile(form, d):
    q, k, v = draw((1, 1100 if d == 128 else 380, d), *[(1, 500, d)] * 2)
    held = Coded.of(form, q, k, v, by="head")
    options = {"mask": masks.window(20, 20), "scale": 0.02}
    within_the_bound(held, run(held, **options), **options)


@emulated
@EACH
@mostly_thorough(
    "by",
    [("head", "row", "all"), ("row", "head", "row"), ("all", "head", "head"), ("row",) * 3],
    quick=[("row",) * 3],
    why="other scales of the same code",
    ids="-".join,
)
@mostly_thorough(
    "out_dtype", ["float32", "bfloat16"], quick=["bfloat16"], why="most quick tests have float32"
)
def test_scales_belong_to_rows_heads_or_all(form, by, out_dtype):
    q, k, v = draw((2, 4, 70, 64), (2, 2, 130, 64), (2, 2, 130, 80))
    held = Coded.of(form, q, k, v, by=by)
    results = run(held, out_dtype=out_dtype, mask=masks.causal())
    within_the_bound(held, results, out_dtype=out_dtype, mask=masks.causal())


@emulated
@EACH
@mostly_thorough(
    "name",
    ["softcap", "segments", "bias", "dropout", "sink"],
    quick=["bias"],
    why="the emulator compiles each for some seconds",
)
def test_every_option(form, name):
    q, k, v = draw((4, 70, 64), (2, 130, 64), (2, 130, 64))
    bias = np.random.default_rng(0).standard_normal((70, 130)).astype(np.float32)
    bias[:, 100:] = -np.inf
    options = {
        "softcap": {"score_mod": scores.softcap(2.0), "mask": masks.causal()},
        "segments": {"mask": masks.mask(lambda b, h, i, j: (i + j) % 3 > 0)},
        "bias": {"bias": bias},
        "dropout": {"dropout": 0.3, "seed": 5},
        "sink": {"sink": np.array([0.5, -np.inf, 3, -2], np.float32), "scale": -0.2},
    }[name]
    held = Coded.of(form, q, k, v, by=("row", "head", "head"))
    within_the_bound(held, run(held, **options), **options)


@pytest.mark.thorough("other factors of the same products")
@emulated
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-30, 1e-38])
def test_factors_that_scores_are_multiplied_by(scale):
    held = Coded.of(E4M3, *draw(*[(1, 130, 64)] * 3), by="head")
    scales = (held.scales[0] * np.float32(scale), *held.scales[1:])
    held = Coded(E4M3, held.arrays, scales)
    within_the_bound(held, run(held))


@emulated
@mostly_thorough(
    "sizes",
    [(1, 1e-9, 1e6), (1e6, 1e-9, 1), (1, 1e30, 1e-3), (1e-36, 1e-36, 1e-38), (-1, 1, 0)],
    quick=[(-1, 1, 0)],
    why="other orders of tiles with small, large and no values",
    ids=str,
)
@mostly_thorough(
    "mask", [None, masks.causal()], quick=[None], why="masked tiles have units of rows", ids=str
)
def test_tiles_of_values_of_any_size(sizes, mask):
    held = Coded.of(E4M3, *draw((1, 130, 64), *[(1, 384, 64)] * 2), by="row")
    q, k, v = held.scales
    v = v * np.repeat(np.float32(sizes), 128)[:, None]
    held = Coded(E4M3, held.arrays, (q, k, v))
    options = {} if mask is None else {"mask": mask}
    within_the_bound(held, run(held, **options), **options)


@emulated
@mostly_thorough("by", ["head", "row"], quick=["row"], why="the same maxima without scales of keys")
def test_rows_whose_scores_are_negative(by):
    q, k, v = draw((2, 130, 64), (1, 300, 64), (1, 300, 64))
    q, k = -np.abs(q), np.abs(k)
    q[0, ::3] *= -1
    held = Coded.of(E4M3, q, k, v, by=by)
    within_the_bound(held, run(held))


@emulated
@EACH
@pytest.mark.parametrize("packed_by", ["row"])
def test_packed_sequences(form, packed_by):
    offsets = np.array([0, 70, 70, 130]), np.array([0, 100, 130, 230])
    q, k, v = draw((2, 130, 64), (1, 230, 64), (1, 230, 64))
    held = Coded.of(form, q, k, v, by=packed_by)
    options = {"offsets": offsets, "mask": masks.causal()}
    within_the_bound(held, run(held, **options), **options)


@pytest.mark.thorough("races are looked for in every quick call")
@emulated
@pytest.mark.parametrize("by", ["head", "row"])
def test_no_bit_depends_on_the_schedule(by):
    held = Coded.of(E4M3, *draw((2, 200, 64), (1, 300, 64), (1, 300, 64)), by=by)
    first = run(held, FORWARD, mask=masks.causal())
    for schedule in (REVERSE, randomly(1)):
        for a, b in zip(run(held, schedule, mask=masks.causal()), first, strict=True):
            assert same_bits(a, b)


# -- what is not finite ---------------------------------------------------------------------------


@emulated
@EACH
@mostly_thorough(
    "by", ["head", "row"], quick=["row"], why="scales of heads are seen by all rows in any case"
)
def test_unseen_keys_change_no_bit(form, by):
    """Keys that no query sees may be NaN, and their scales may be anything."""
    q, k, v = draw((1, 100, 64), (1, 150, 64), (1, 150, 64))
    held = Coded.of(form, q, k, v, by=by)
    mask = masks.window(20, 0)
    spoilt = [x.copy() for x in held.arrays]
    seen = mask.to_array(1, 1, 100, 150)[0, 0].any(axis=0)
    assert not seen.all()
    for x in spoilt[1:]:
        x[:, ~seen] = NAN_CODE
    first = run(held, mask=mask)
    for unseen in (np.nan, 1e30) if by == "row" else (None,):
        scales = [x.copy() for x in held.scales]
        for x in scales[1:] if by == "row" else ():
            x[:, ~seen] = unseen
        results = run(Coded(form, tuple(spoilt), tuple(scales)), mask=mask)
        for a, b in zip(results, first, strict=True):
            assert same_bits(a, b)


@emulated
@EACH
@mostly_thorough(
    "options",
    [{"mask": masks.causal()}, {"mask": masks.causal(), "score_mod": scores.softcap(3.0)}],
    quick=lambda options: "score_mod" not in options,
    why="the same code after other scores",
    ids=lambda options: "-".join(options),
)
def test_scales_of_keys_that_others_see_change_no_bit(form, options):
    """A value that is much larger than others of its tile, for queries that do not see it."""
    held = Coded.of(form, *draw(*[(1, 150, 64)] * 3), by="row")
    scales = [x.copy() for x in held.scales]
    for x in scales[1:]:
        x[:, 120] *= 1e6
    other = Coded(form, held.arrays, tuple(scales))
    for a, b in zip(run(held, **options), run(other, **options), strict=True):
        assert same_bits(a[:, :120], b[:, :120])
        assert not same_bits(a[:, 120:], b[:, 120:])


@emulated
@EACH
@pytest.mark.parametrize("where", [0, 1, 2], ids=["q", "k", "v"])
@mostly_thorough(
    "options",
    [{"mask": masks.causal()}, {}, {"bias": np.zeros((1, 1), np.float32)}],
    quick=lambda options: "mask" in options,
    why="without a mask every query sees every key",
    ids=lambda options: next(iter(options), "full"),
)
def test_what_is_not_finite_is_where_the_cpu_has_it(form, where, options):
    held = Coded.of(form, *draw(*[(1, 150, 64)] * 3), by="head")
    spoilt = [x.copy() for x in held.arrays]
    spoilt[where][0, 120, 3] = NAN_CODE if form == E4M3 or where < 2 else 0xFC  # -inf
    held = held.with_arrays(*spoilt)
    results = run(held, **options)
    twin = attention(*held.arrays, **held.options, **options, out_dtype="float32", return_lse=True)
    for a, b in zip(results, twin, strict=True):
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
        # The weight of an infinite value may be rounded to 0, whose product with it is NaN.
        known = ~np.isnan(a) | np.isnan(b)
        assert known.mean() > 0.999
        np.testing.assert_array_equal(a[known & ~np.isfinite(b)], b[known & ~np.isfinite(b)])


# -- GPUs that widen codes ------------------------------------------------------------------------


@emulated
@EACH
@mostly_thorough(
    "out_dtype",
    ["float16", "bfloat16", "float32"],
    quick=["bfloat16"],
    why="the kernels of these types have quick tests",
)
def test_other_gpus_widen_codes_first(form, out_dtype):
    """The kernel `dequantize` does."""
    q, k, v = draw((2, 1, 40, 24), (1, 2, 70, 24), (2, 2, 70, 40))
    held = Coded.of(form, q.repeat(2, 1), k, v, by=("row", "head", "all"))
    results = run(held, hopper=False, out_dtype=out_dtype, mask=masks.causal())
    how = "out_dtype"
    within_the_bound(held, results, how, out_dtype=out_dtype, mask=masks.causal())


# -- when it is chosen ----------------------------------------------------------------------------


def arrays(*lead, length=512, d=64):
    x = np.zeros((*lead, length, d), np.uint8)
    return Coded(E4M3, (x,) * 3, (np.ones((1, 1), np.float32),) * 3)


@pytest.mark.parametrize(
    ("held", "arch", "expected"),
    [
        (arrays(2), "sm_90", None),
        (arrays(2, length=500), "sm_90", "512 queries and keys or more"),
        (arrays(2, d=40), "sm_90", "multiples of 16 bytes"),
        (arrays(2, d=288), "sm_90", "beyond its 256"),
        (arrays(2), "sm_80", "for compute capability 9.0"),
    ],
    ids=["served", "short", "unaligned", "wide", "A100"],
)
def test_when_codes_are_multiplied_as_they_are(held, arch, expected):
    made = route.of(call_of(held, "bfloat16"), target_of(arch)).plan
    assert (made.kernel == "forward_sm90_fp8") == (expected is None)
    if expected is not None:
        assert expected in made.reason
        assert "turns codes of float8_e4m3fn into bfloat16 first" in made.reason


def test_packed_codes_of_the_public_function():
    offsets = np.array([0, 30, 100]), np.array([0, 50, 120])
    held = Coded.of(E4M3, *draw((2, 100, 32), (2, 120, 32), (2, 120, 32)))
    results = attention_varlen(
        *held.arrays, *offsets, **held.options, out_dtype="float16", return_lse=True
    )
    within_the_bound(held, results, "float32", out_dtype="float16", offsets=offsets)
