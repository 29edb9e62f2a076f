"""Heads that share keys as rows of one: the same results by fewer tiles; and when they are not."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from cuda_specialisations import SHARED_MEMORY
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import randomly
from halves import mostly_thorough
from placement import same_bits

from cupyflash import masks, scores
from cupyflash.arrays.cuda_device import Target
from cupyflash.gpu import route
from cupyflash.gpu.workspace import ArraySpec
from cupyflash.problem import pack_gqa, validate
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, forward_bound, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
BRAIN = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
F64 = np.dtype(np.float64)
BLOCKS = Blocks(32, 16, 64)
HEADS, HEADS_KV, KEYS = 6, 2, 53


def draw(dtype, len_q, order="BHLD", heads=HEADS, keys=KEYS, d_v=16):
    rng = np.random.default_rng(len_q)
    q = rng.standard_normal((2, heads, len_q, 24)).astype(dtype)
    if order == "BLHD":
        q = np.ascontiguousarray(q.swapaxes(1, 2)).swapaxes(1, 2)
    k, v = (rng.standard_normal((2, HEADS_KV, keys, n)).astype(dtype) for n in (24, d_v))
    return q, k, v


def run(q, k, v, blocks=BLOCKS, out=None, **options):
    call = validate.call(q, k, v, Options(**options))
    if out is None:
        out = np.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    out[...] = np.nan
    lse = np.full(q.shape[:-1], np.nan, call.problem.accumulator)
    visited = np.zeros(1, np.uint64)
    Emulator(blocks, randomly(1)).forward(call, out, lse, visited)
    return out, lse, int(visited[0])


def within_the_bound(q, k, v, out, lse, **options):
    precision = Precision.of(q.dtype, tensor_cores=q.dtype != F32)
    bound = forward_bound(q, k, v, precision=precision, block_kv=16, **options)
    assert rho(out, *bound.out).value <= 1
    assert rho(lse, *bound.lse).value <= 1


rng = np.random.default_rng(0)
MASKS = {
    "none": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.window(7, 2)},
    "heads differ": {"mask": masks.mask(lambda b, h, i, j: (j + h + 2 * b + i) % 3 > 0)},
    "dense": {"mask": masks.dense(rng.random((HEADS, 1, KEYS)) < 0.7)},
    "lengths": {"mask": masks.lengths(np.array([KEYS, 0]))},
    "documents": {"mask": masks.segments(np.zeros(1, int), np.arange(KEYS) // 20)},
}
SCORES = {
    "slopes": {"score_mod": scores.alibi(2.0 ** -np.arange(HEADS)), "mask": masks.causal()},
    "slopes of entries": {"score_mod": scores.alibi(rng.random((2, HEADS)))},
    "bias of heads": {"bias": rng.standard_normal((HEADS, 1, KEYS)).astype(np.float32)},
    "bias of entries": {"bias": rng.standard_normal((2, 1, 1, KEYS)).astype(np.float32)},
}


@emulated
@mostly_thorough(
    "dtype", [F32, BRAIN, F64], quick=[BRAIN], why="kernels with the same rows of heads", ids=str
)
@mostly_thorough(
    "name",
    [*MASKS, *SCORES],
    quick=[*MASKS, *SCORES][1::5],
    why="more masks and changes of the same rows",
)
def test_one_query_of_each_head(monkeypatch, dtype, name):
    options = (MASKS | SCORES)[name]
    if "bias" in options:
        options = {"bias": options["bias"].astype(dtype)}
    for order in ("BHLD", "BLHD"):
        q, k, v = draw(dtype, 1, order)
        out, lse, tiles = run(q, k, v, **options)
        within_the_bound(q, k, v, out, lse, **options)
        monkeypatch.setattr(pack_gqa, "MOST_QUERIES", 0)
        apart = run(q, k, v, **options)
        monkeypatch.undo()
        assert same_bits(out, apart[0])
        assert same_bits(lse, apart[1])
        seen = apart[2] / (HEADS // HEADS_KV)
        assert tiles == seen if name not in ("heads differ", "dense") else seen <= tiles <= 16


@emulated
@mostly_thorough(
    "name",
    [name for name in MASKS if name not in ("dense", "documents")],
    quick=["none", "heads differ"],
    why="masks that are quick with one query of each head, or on the CPU",
)
@mostly_thorough("len_q", [2, 7, 11, 64], quick=(7,), why="other numbers of rows in a tile")
def test_some_queries_of_each_head(monkeypatch, name, len_q):
    q, k, v = draw(BRAIN, len_q)
    options = MASKS[name]
    out, lse, tiles = run(q, k, v, **options)
    within_the_bound(q, k, v, out, lse, **options)
    monkeypatch.setattr(pack_gqa, "MOST_QUERIES", 0)
    apart = run(q, k, v, **options)
    assert same_bits(out, apart[0])
    assert same_bits(lse, apart[1])
    if len_q <= 10 and name == "none":  # three heads fill a tile of 32
        assert tiles == apart[2] / 3


@pytest.mark.thorough("sixteen heads on the emulator")
@emulated
def test_rows_of_warpgroups(monkeypatch):
    # Sixteen heads of 40 queries are five tiles of 128 rows, instead of sixteen.
    q, k, v = draw(BRAIN, 40, heads=32, keys=600, d_v=64)
    options = {"mask": masks.causal()}
    for slower, kernel in ((None, "forward_sm90"), ("it is slower", "forward_sm80")):
        monkeypatch.setattr("cupyflash.gpu.kernels.sm90._slower", lambda *_, why=slower: why)
        plan = route.of(validate.call(q, k, v, Options(**options)), H200).plan
        assert plan.kernel == kernel
        assert "the 16 heads that share keys are rows of one" in plan.reason
    monkeypatch.undo()
    out, lse, tiles = run(q, k, v, Blocks(hopper=True), **options)
    within_the_bound(q, k, v, out, lse, **options)
    assert tiles == 2 * HEADS_KV * 5 * 5  # keys by 128


@emulated
def test_results_with_gaps_keep_heads_apart():
    q, k, v = draw(BRAIN, 3)
    plain = run(q, k, v)
    gaps = np.full((2, HEADS, 4, 16), 7, BRAIN)
    out, lse, tiles = run(q, k, v, out=gaps[:, :, :3])
    assert tiles == 3 * plain[2]
    assert same_bits(out, plain[0])
    assert same_bits(lse, plain[1])
    assert (gaps[:, :, 3] == 7).all()


H200 = Target(0, "an H200", (9, 0), 132, SHARED_MEMORY["sm_90"], lacks="")


@pytest.mark.parametrize(
    ("len_q", "order", "options", "why"),
    [
        (65, "BHLD", {}, "there are 65 queries"),
        (2, "BLHD", {}, "rows of heads do not follow each other"),
        (2, "BHLD", SCORES["slopes"], "scores change"),
        (1, "BHLD", {"sink": np.zeros(HEADS, F32)}, "sinks and dropout"),
        (1, "BHLD", {"dropout": 0.5, "seed": 1}, "sinks and dropout"),
        (0, "BHLD", {}, "there are 0 queries"),
    ],
)
def test_what_is_in_the_way(len_q, order, options, why):
    call = validate.call(*draw(F32, len_q, order), Options(**options))
    assert why in pack_gqa.obstacle(call)
    assert pack_gqa.joined(call) == (call, ())
    assert "rows of one" not in route.of(call, H200).plan.reason


def test_packed_sequences_and_heads_that_share_nothing():
    q, k, v = draw(F32, 1)
    assert "no heads share" in pack_gqa.obstacle(validate.call(q[:, :2], k, v))
    offsets = np.array([0, 1])
    packed = validate.varlen_call(q[0], k[0, :, :1], v[0, :, :1], offsets, offsets, True)
    assert "packed" in pack_gqa.obstacle(packed)


def test_views_are_of_the_same_memory():
    call = validate.call(*draw(F32, 3))
    out, lse = np.empty((2, HEADS, 3, 16), F32), ArraySpec((2, HEADS, 3), F32)
    made, (rows, laid) = pack_gqa.joined(call, (out, 3), (lse, 2))
    assert np.shares_memory(made.q, call.q)
    assert np.shares_memory(rows, out)
    assert made.q.shape == (2, HEADS_KV, 9, 24)
    assert rows.shape == (2, HEADS_KV, 9, 16)
    assert laid == ArraySpec((2, HEADS_KV, 9), F32)
    problem = made.problem
    assert (problem.heads, problem.len_q, problem.heads_in_rows) == (HEADS_KV, 9, 3)
    assert dataclasses.asdict(pack_gqa.apart(problem)) == dataclasses.asdict(call.problem)
