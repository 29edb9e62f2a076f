"""Gradients of rows of at most 64 keys by blocks of one consumer of backward_sm90_dkdv.

Such a block sums up as the first consumer of two would, to whose sums missing keys add zeros: so
its results have the bits of a block of 128 keys, which longer sequences beside it need.
"""

from __future__ import annotations

import numpy as np
import pytest
from cuda_specialisations import BFLOAT16, target_of
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import REVERSE, randomly
from halves import mostly_thorough

from cupyflash import lookup, masks, scores
from cupyflash.gpu import route
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, backward_bound, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
HALF = np.dtype(np.float16)
ALONE, TWO = (Blocks(32, 64, 64, hopper=True, few_keys=few) for few in (True, False))


def draw(*shapes, dtype=HALF, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def run(call, do, blocks, schedule=REVERSE, deterministic=False, dtype=None, read=build.read):
    """Return all gradients, which were written to memory that held NaN."""
    emulator = Emulator(blocks, schedule)
    q, k, v = call.q, call.k, call.v
    out = np.empty((*call.problem.array_lead, *q.shape[-3:-1], v.shape[-1]), q.dtype)
    lse = np.empty(out.shape[:-1], call.problem.accumulator)
    emulator.forward(call, out, lse)
    made = Gradients(*(np.full(x.shape, np.nan, dtype or x.dtype) for x in (q, k, v)), None, None)
    emulator.backward(call, do, out, lse, None, made, deterministic=deterministic)
    return made


# -- where ----------------------------------------------------------------------------------------


def tiles(*keys, d=128, dtype=HALF, deterministic=False, packed=True, **options):
    """Return the kernel of dk and dv of sequences, its keys of a tile, and its threads."""
    ends = np.concatenate([[0], np.cumsum(keys)])
    q = np.zeros((2, ends[-1], d), dtype)
    if packed:
        call = validate.varlen_call(q, q, q, ends, ends, True, Options(**options))
    else:
        call = validate.call(q, q, q, Options(**options))
    made = route.of_gradients(call, target_of("sm_90"), deterministic)
    (step,) = (step for step in made.steps if step.part == "dkdv")
    return step.kernel, step.block_kv, step.special.tiles.threads


def test_tiles_follow_the_longest_sequence():
    alone, two = ("backward_sm90_dkdv", 64, 256), ("backward_sm90_dkdv", 128, 384)
    for deterministic in (False, True):
        assert tiles(64, 1, 0, 30, deterministic=deterministic) == alone
        assert tiles(64, 65, deterministic=deterministic) == two
    assert tiles(64, 64, d=32) == alone
    assert tiles(64, 64, d=136) == ("backward_sm90_dkdv", 64, 384)  # whose consumers share keys
    assert tiles(64, packed=False) == alone
    assert tiles(65, packed=False) == two
    # Tiles of a bias lie beside those of two consumers.
    assert tiles(64, packed=False, bias=np.zeros((64, 64), HALF)) == two


# -- results --------------------------------------------------------------------------------------

SLOPES = np.array([0.5, 0.25, 0.1, 0.05], np.float32)
PACKED = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.window(9, 4)},
    "segments": {"mask": masks.segments(np.arange(280) // 20, np.arange(180) // 20)},
    "dropout": {"dropout": 0.3, "seed": 5},
    "causal, dropout": {"mask": masks.causal(), "dropout": 0.3, "seed": 5},
    "score": {"score_mod": scores.score(lambda s, b, h, i, j: s - lookup(SLOPES)[h] * abs(i - j))},
}
# Sequences without queries, without keys and with few of them, and with several tiles of queries.
ENDS = (
    np.array([0, 70, 70, 134, 254, 255, 280], np.int64),
    np.array([0, 33, 40, 104, 105, 169, 180], np.int64),
)
WITHOUT_KEYS = ENDS[0], np.array([0, 33, 40, 104, 104, 168, 180], np.int64)
SIZES = {"one slab": (40, 24), "two slabs": (104, 128)}


def packed(case, sizes, dtype, ends=ENDS):
    """Return a call of packed sequences, and do."""
    d, d_v = sizes
    q, do = draw((4, ends[0][-1], d), (4, ends[0][-1], d_v), dtype=dtype)
    k, v = draw((2, ends[1][-1], d), (2, ends[1][-1], d_v), dtype=dtype, seed=1)
    return validate.varlen_call(q, k, v, *ends, True, Options(**PACKED[case])), do


def assert_equal(made, wanted):
    """Compare bits of gradients, which are all finite."""
    for name in ("dq", "dk", "dv"):
        found = getattr(made, name)
        assert np.array_equal(found, getattr(wanted, name))
        assert np.isfinite(found.astype(np.float32)).all()


@emulated
@mostly_thorough(
    ("case", "sizes", "dtype"),
    [(case, sizes, dtype) for case in PACKED for sizes in SIZES for dtype in (HALF, BFLOAT16)],
    quick=[
        ("causal", "one slab", HALF),
        ("causal", "two slabs", BFLOAT16),
        ("plain", "two slabs", HALF),
    ],
    why="masks, scores and heads that other gradients share",
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_bits_are_those_of_blocks_of_two_consumers(case, sizes, dtype, deterministic):
    call, do = packed(case, SIZES[sizes], dtype)
    made, usual = (run(call, do, blocks, randomly(1), deterministic) for blocks in (ALONE, TWO))
    assert_equal(made, usual)


@emulated
@pytest.mark.thorough("one type of a few, beside longer sums")
def test_scales_of_float16_that_warps_change_are_those_of_two_consumers():
    """dS of some warps outgrows their scales, in one tile after the other."""
    q, do, k, v = draw((2, 400, 128), (2, 400, 128), (1, 60, 128), (1, 60, 128))
    q *= 4  # some keys weigh little
    do *= (2.0 ** (np.arange(400) // 64 * 2.5 - 12))[:, None].astype(HALF)
    v *= (2.0 ** (5 * (np.arange(60) // 16 % 3)))[:, None].astype(HALF)
    call = validate.varlen_call(q, k, v, [0, 400], [0, 60], True)
    made, usual = (run(call, do, blocks, dtype=np.float32) for blocks in (ALONE, TWO))
    assert_equal(made, usual)


@emulated
def test_sums_of_dq_where_a_sequence_has_no_key():
    call, do = packed("causal", SIZES["two slabs"], BFLOAT16, WITHOUT_KEYS)
    made, usual = (run(call, do, blocks) for blocks in (ALONE, TWO))
    assert_equal(made, usual)
    assert not made.dq[:, 134:254].any()


DENSE = {"plain": {}, "causal": {"mask": masks.causal()}, "dropout": {"dropout": 0.3, "seed": 5}}


@emulated
@mostly_thorough(
    ("case", "shape"),
    [(case, shape) for case in DENSE for shape in ((2, 4), (1, 4), (2, 16))],
    quick=[("causal", (2, 4))],
    why="masks, shared queries and parts of groups that other tiles share",
)
def test_gradients_are_within_the_bound(case, shape):
    entries, heads = shape  # of queries: with one entry, all share them
    q, do = draw((entries, heads, 150, 72), (2, heads, 150, 128), dtype=BFLOAT16)
    k, v = draw((2, 2, 50, 72), (2, 2, 50, 128), dtype=BFLOAT16, seed=1)
    call = validate.call(q, k, v, Options(**DENSE[case]))
    precision = Precision.of(q.dtype, tensor_cores=True)
    wanted = backward_bound(do, q, k, v, precision=precision, block_kv=16, **DENSE[case])
    first, second = (run(call, do, ALONE, order, entries > 1) for order in (REVERSE, randomly(2)))
    for name in ("dq", "dk", "dv"):
        assert rho(getattr(first, name), *getattr(wanted, name)).value <= 1
        if entries > 1:
            assert getattr(first, name).tobytes() == getattr(second, name).tobytes()


@emulated
@mostly_thorough("sizes", SIZES, quick=("two slabs",), why="the same of narrow heads")
def test_what_a_sequence_may_not_see_changes_no_bit(sizes):
    """Neighbours of a sequence are not finite, and so are a key and a query that its mask hides."""
    options = {"mask": masks.window(9, 0)}  # the first queries see no key
    ends = np.array([0, 70, 170, 200]), np.array([0, 40, 90, 140])
    d, d_v = SIZES[sizes]
    q, do = draw((2, 200, d), (2, 200, d_v), dtype=BFLOAT16)
    k, v = draw((2, 140, d), (2, 140, d_v), dtype=BFLOAT16, seed=1)
    clean = run(validate.varlen_call(q, k, v, *ends, True, Options(**options)), do, ALONE)
    for x in (q, do):
        x[:, :70], x[:, 170:], x[:, 90] = np.nan, np.inf, np.nan
    for x in (k, v):
        x[:, :40], x[:, 90:], x[:, 89] = np.nan, np.inf, np.nan  # which the last query alone sees
    made = run(validate.varlen_call(q, k, v, *ends, True, Options(**options)), do, ALONE)
    assert np.array_equal(made.dq[:, 70:160], clean.dq[:, 70:160])
    assert np.array_equal(made.dk[:, 40:80], clean.dk[:, 40:80])
    assert np.isnan(made.dq[:, 169]).all()
