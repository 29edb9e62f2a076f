"""dq of rows whose keys are one tile: blocks of keys store it, on the emulator."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cuda_specialisations import BFLOAT16, target_of
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import REVERSE, randomly
from halves import mostly_thorough

from cupyflash import explain, lookup, masks, scores
from cupyflash.gpu import route
from cupyflash.gpu.kernels import registry
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, backward_bound, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
HALF = np.dtype(np.float16)
KERNELS = {"sm80": Blocks(32, 64, 64), "sm90": Blocks(32, 64, 64, hopper=True)}


def draw(*shapes, dtype=HALF, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def run(call, do, blocks, schedule=REVERSE, dq_dtype=None, deterministic=True, dtype=None):
    """Return all gradients, which were written to memory that held NaN."""
    emulator = Emulator(blocks, schedule)
    q, k, v = call.q, call.k, call.v
    out = np.empty((*call.problem.array_lead, *q.shape[-3:-1], v.shape[-1]), q.dtype)
    lse = np.empty(out.shape[:-1], call.problem.accumulator)
    emulator.forward(call, out, lse)
    dq = np.full(q.shape, np.nan, dq_dtype or q.dtype)
    made = Gradients(dq, *(np.full(x.shape, np.nan, dtype or x.dtype) for x in (k, v)), None, None)
    emulator.backward(call, do, out, lse, None, made, deterministic=deterministic)
    return made


# -- where ----------------------------------------------------------------------------------------


def kernels(len_k, d=64, dtype=HALF, arch="sm_80", packed=False, lead=2, deterministic=False):
    """Return the names of the kernels of a backward."""
    q, k = np.zeros((lead, 2, 200, d), dtype), np.zeros((2, 2, len_k, d), dtype)
    if packed:
        ends = np.array([0, 200]), np.array([0, len_k])
        call = validate.varlen_call(q[0], k[0], k[0], *ends, True, Options())
    else:
        call = validate.call(q, k, k, Options())
    made = route.of_gradients(call, target_of(arch), deterministic)
    return [step.kernel for step in made.steps]


def test_kernels_of_one_tile_of_keys():
    whole = ["backward_delta", "backward_sm80_dkdv"]
    sums = [*whole, "backward_dq_rows"]
    assert kernels(128) == kernels(77) == whole
    assert len(kernels(77, arch="sm_90")) == 2  # whichever of the two kernels it is
    assert kernels(128, deterministic=True) == whole
    assert kernels(129) == sums
    assert kernels(129, deterministic=True) == [*whole, "backward_sm80_dq"]
    assert kernels(64, d=200) == whole
    assert kernels(65, d=200) == sums
    assert kernels(100, packed=True) == sums  # it has no code for packed sequences
    assert kernels(100, lead=1) == sums  # entries share q
    assert kernels(100, dtype=np.float32)[1:] == ["backward_simt_dkdv"]
    assert kernels(0) == sums


def test_kernels_of_packed_sequences():
    whole = ["backward_delta", "backward_sm90_dkdv"]
    sums = [*whole, "backward_dq_rows"]
    assert kernels(100, packed=True, arch="sm_90") == whole
    # Longer sequences beside it would have the kernel of dq, whose sums are others.
    exact = kernels(100, packed=True, arch="sm_90", deterministic=True)
    assert exact == [*whole, "backward_sm80_dq"]
    assert kernels(129, packed=True, arch="sm_90") == sums
    q, k = np.zeros((2, 60, 64), HALF), np.zeros((2, 50, 64), HALF)
    for ends_q, ends_k, made in (
        ([0, 40, 60], [0, 20, 50], whole),
        ([0, 40, 60], [0, 50, 50], sums),  # a sequence without keys has no block
        ([0, 60, 60], [0, 50, 50], whole),  # nor has it queries
        ([0, 60, 60], [0, 20, 50], whole),
    ):
        call = validate.varlen_call(q, k, k, np.array(ends_q), np.array(ends_k), True)
        route_of = route.of_gradients(call, target_of("sm_90"))
        assert [step.kernel for step in route_of.steps] == made


def test_what_explain_counts():
    made = explain((256, 64), (100, 64), backward=True, device="A100-80GB", compile=False)
    _, dkdv = made.kernels
    assert dkdv.computes == "dk and dv, and dq"
    queries, keys = 256 * 64 * 2, 100 * 64 * 2
    assert dkdv.most.writes == dkdv.once.writes == {"dk": keys, "dv": keys, "dq": queries}
    assert "dq_accum" not in dkdv.most.reads
    assert made.memory == queries + 2 * keys + 256 * 4  # dq, dk, dv and delta


def test_nobody_knows_whether_sequences_have_keys():
    # Offsets in device memory that are not read: that a sequence has a query says nothing of keys.
    q = np.zeros((2, 60, 64), HALF)
    call = validate.varlen_call(q, q, q, np.array([0, 60]), np.array([0, 60]), True)
    unread = np.array([0, 60])  # the most extreme lengths
    for change, made in (
        ({}, 2),
        ({"unread": True}, 3),
        ({"unread": True, "len_k": unread}, 3),
        ({"unread": True, "len_q": unread, "len_k": unread}, 3),
    ):
        rows = dataclasses.replace(call.problem.rows, **change)
        other = dataclasses.replace(call, problem=dataclasses.replace(call.problem, rows=rows))
        assert len(route.of_gradients(other, target_of("sm_90")).steps) == made


# -- results --------------------------------------------------------------------------------------


CASES = {
    "plain": {},
    "causal": {"mask": masks.causal()},  # the first queries see no key
    "lengths": {"mask": masks.lengths(np.array([0, 33], np.int32))},
    "dropout": {"dropout": 0.3, "seed": 5},
}


@emulated
@mostly_thorough(
    ("kernel", "case"),
    [(kernel, case) for kernel in KERNELS for case in CASES],
    quick=[("sm80", "causal"), ("sm90", "causal")],
    why="masks and weights that other gradients share",
)
def test_gradients(kernel, case):
    options, dtype = CASES[case], HALF if case == "causal" else BFLOAT16
    q, do = draw((2, 4, 150, 40), (2, 4, 150, 24), dtype=dtype)
    k, v = draw((2, 2, 50, 40), (2, 2, 50, 24), dtype=dtype, seed=1)
    call = validate.call(q, k, v, Options(**options))
    precision = Precision.of(q.dtype, tensor_cores=True)
    wanted = backward_bound(do, q, k, v, precision=precision, block_kv=16, **options)
    made = [run(call, do, KERNELS[kernel], order) for order in (REVERSE, randomly(2))]
    for name in ("dq", "dk", "dv"):
        first, second = (getattr(x, name) for x in made)
        assert rho(first, *getattr(wanted, name)).value <= 1
        assert first.tobytes() == second.tobytes()


@emulated
@mostly_thorough("kernel", KERNELS, quick=("sm90",), why="the same of the other kernel")
def test_the_same_as_by_sums(kernel, monkeypatch):
    q, do = draw((1, 2, 150, 24), (1, 2, 150, 16))
    k, v = draw((1, 2, 60, 24), (1, 2, 60, 16), seed=1)
    call = validate.call(q, k, v, Options(mask=masks.window(9, 4)))
    made = run(call, do, KERNELS[kernel])
    wide = run(call, do, KERNELS[kernel], dq_dtype=np.float32)
    monkeypatch.setattr(registry, "has_all_keys", lambda request: False)
    sums = run(call, do, KERNELS[kernel], deterministic=False)
    assert np.array_equal(made.dq, sums.dq)
    assert np.array_equal(wide.dq.astype(HALF), sums.dq)


PACKED = {"plain": {}, "causal": {"mask": masks.causal()}, "window": {"mask": masks.window(9, 4)}}


@emulated
@mostly_thorough("case", PACKED, quick=("causal",), why="masks that other gradients share")
def test_packed_sequences_have_the_same_as_by_sums(case, monkeypatch):
    q, do = draw((4, 260, 40), (4, 260, 24))
    k, v = draw((2, 134, 40), (2, 134, 24), seed=1)
    ends = np.array([0, 70, 70, 231, 260]), np.array([0, 33, 40, 100, 134])
    call = validate.varlen_call(q, k, v, *ends, True, Options(**PACKED[case]))
    made = run(call, do, KERNELS["sm90"], randomly(1), deterministic=False)
    monkeypatch.setattr(registry, "has_all_keys", lambda request: False)
    sums = run(call, do, KERNELS["sm90"], deterministic=False)
    for name in ("dq", "dk", "dv"):
        assert np.array_equal(getattr(made, name), getattr(sums, name))


@emulated
@mostly_thorough("kernel", KERNELS, quick=("sm80",), why="the same of the other kernel")
def test_hidden_keys_hide_what_is_not_finite(kernel):
    q, do = draw((1, 2, 100, 24), (1, 2, 100, 16))
    k, v = draw((1, 2, 60, 24), (1, 2, 60, 16), seed=1)
    mask = masks.window(9, 4)  # of the last queries: the first ones see no key
    clean = run(validate.call(q, k, v, Options(mask=mask)), do, KERNELS[kernel])
    k[..., 59, 3], v[..., 59, 2] = np.nan, np.inf  # which only the last queries see
    made = run(validate.call(q, k, v, Options(mask=mask)), do, KERNELS[kernel])
    assert np.array_equal(made.dq[:, :, :80], clean.dq[:, :, :80])
    assert not made.dq[:, :, :30].any()
    assert np.isnan(made.dq[:, :, 99]).all()
    assert np.isfinite(made.dq[:, :, :80]).all()


# -- rows of at most 64 keys: a block of one consumer has the bits of one of two -------------------

ALONE, TWO = (Blocks(32, 64, 64, hopper=True, few_keys=few) for few in (True, False))


def few(call, do, blocks, schedule=REVERSE, deterministic=False, dtype=None):
    """Return all gradients in a type, to whose sums missing keys add zeros."""
    return run(call, do, blocks, schedule, dtype, deterministic, dtype)


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


SLOPES = np.array([0.5, 0.25, 0.1, 0.05], np.float32)
SHORT = {
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
    return validate.varlen_call(q, k, v, *ends, True, Options(**SHORT[case])), do


def assert_equal(made, wanted):
    """Compare bits of gradients, which are all finite."""
    for name in ("dq", "dk", "dv"):
        found = getattr(made, name)
        assert np.array_equal(found, getattr(wanted, name))
        assert np.isfinite(found.astype(np.float32)).all()


@emulated
@mostly_thorough(
    ("case", "sizes", "dtype"),
    [(case, sizes, dtype) for case in SHORT for sizes in SIZES for dtype in (HALF, BFLOAT16)],
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
    made, usual = (few(call, do, blocks, randomly(1), deterministic) for blocks in (ALONE, TWO))
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
    made, usual = (few(call, do, blocks, dtype=np.float32) for blocks in (ALONE, TWO))
    assert_equal(made, usual)


@emulated
def test_sums_of_dq_where_a_sequence_has_no_key():
    call, do = packed("causal", SIZES["two slabs"], BFLOAT16, WITHOUT_KEYS)
    made, usual = (few(call, do, blocks) for blocks in (ALONE, TWO))
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
    first, second = (few(call, do, ALONE, order, entries > 1) for order in (REVERSE, randomly(2)))
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
    clean = few(validate.varlen_call(q, k, v, *ends, True, Options(**options)), do, ALONE)
    for x in (q, do):
        x[:, :70], x[:, 170:], x[:, 90] = np.nan, np.inf, np.nan
    for x in (k, v):
        x[:, :40], x[:, 90:], x[:, 89] = np.nan, np.inf, np.nan  # which the last query alone sees
    made = few(validate.varlen_call(q, k, v, *ends, True, Options(**options)), do, ALONE)
    assert np.array_equal(made.dq[:, 70:160], clean.dq[:, 70:160])
    assert np.array_equal(made.dk[:, 40:80], clean.dk[:, 40:80])
    assert np.isnan(made.dq[:, 169]).all()


@emulated
@mostly_thorough(
    "sizes", ("one slab", "two slabs"), quick=("two slabs",), why="the same of narrow heads"
)
@pytest.mark.parametrize("few_keys", [False, True])
def test_rows_that_are_not_aligned_have_the_same_bits(sizes, few_keys):
    """dq is stored 16 bytes at a time, or in pairs, or number by number."""
    call, do = packed("causal", SIZES[sizes], HALF)
    emulator = Emulator(Blocks(32, 64, 64, hopper=True, few_keys=few_keys), randomly(3))
    rows, d = call.q.shape[:2], call.q.shape[-1]
    out, lse = np.empty(do.shape, HALF), np.empty(rows, np.float32)
    emulator.forward(call, out, lse)
    vectors, pairs, numbers, columns = (np.full((*rows, d + n), np.nan, HALF) for n in (0, 2, 1, 0))
    results = (
        vectors, pairs[..., 2:], numbers[..., :d],
        columns.reshape(rows[0], d, rows[1]).swapaxes(1, 2),
    )  # fmt: skip
    for dq in results:
        made = Gradients(dq, np.empty_like(call.k), np.empty_like(call.v), None, None)
        emulator.backward(call, do, out, lse, None, made, deterministic=False)
        assert np.array_equal(dq, vectors)
    assert np.isfinite(vectors).all()
    assert np.isnan(pairs[..., :2]).all()
    assert np.isnan(numbers[..., d:]).all()
