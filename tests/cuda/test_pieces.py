"""Pieces of a call by the GPU's kernels, on the emulator: positions, wide results, sums."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from cuda_specialisations import SHARED_MEMORY
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from halves import mostly_thorough
from placement import same_bits

from cupyflash import masks, scores
from cupyflash.arrays.cuda_device import Target
from cupyflash.gpu import route
from cupyflash.pieces import compute
from cupyflash.pieces.parts import call_of, part
from cupyflash.pieces.place import Host
from cupyflash.pieces.schedule import schedule
from cupyflash.problem import validate
from cupyflash.problem.arguments import ANYWHERE
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options
from cupyflash.request import Request
from cupyflash.testing import Precision, backward_bound, forward_bound, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
H200 = Target(0, "an H200", (9, 0), 132, SHARED_MEMORY["sm_90"])
KERNELS = {
    "simt": Blocks(16, 16, 64, tensor=False),
    "sm80": Blocks(32, 16, 64),
    "sm90": Blocks(hopper=True),
}
CASES = [
    ("simt", BFLOAT16, "causal"),
    ("sm80", BFLOAT16, "causal"),
    ("sm90", BFLOAT16, "causal"),
    ("simt", np.dtype(np.float16), "scores"),
    ("sm80", BFLOAT16, "scores"),
    ("sm80", BFLOAT16, "odd heads"),
    ("sm80", np.dtype(np.float32), "few queries"),
    ("sm80", np.dtype(np.float64), "causal"),
    ("sm90", np.dtype(np.float16), "scores"),
]


def options_of(kind):
    rng = np.random.default_rng(5)
    if kind == "scores":
        return {
            "mask": masks.window(40, 9),
            "score_mod": scores.alibi(np.ones(4, np.float32)),
            "bias": rng.standard_normal((1, 90)).astype(np.float32),
            "sink": np.ones(4, np.float32),
        }
    if kind == "few queries":  # whose heads are rows of one
        return {"mask": masks.mask(lambda b, h, i, j: (i + h + j) % 3 > 0)}
    return {"mask": masks.causal(), "dropout": 0.4, "seed": 7}


@emulated
@mostly_thorough(
    ("kernels", "dtype", "kind"), CASES, quick=CASES[1:2],
    why="the same epilogues and counters in other kernels",
)  # fmt: skip
def test_pieces_are_within_the_bound(kernels, dtype, kind):
    rows, keys = (30 if kind == "few queries" else 70), 90
    d, chunk = (33 if kind == "odd heads" else 64), (64, 29)  # each piece begins at another key
    if kernels == "sm90":
        rows, keys, chunk = 200, 90 if kind == "scores" else 300, (256, 129)
    rng = np.random.default_rng(0)
    shapes = (1, 4, rows, d), (1, 2, keys, d), (1, 2, keys, d), (1, 4, rows, d)
    q, k, v, do = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    options = options_of(kind)
    call, place = validate.call(q, k, v, Options(**options)), Host(Emulator(KERNELS[kernels]))
    made = schedule(call, *chunk)
    assert kernels == "sm90" or len(list(made.by_rows())) > len(made.rows)
    out = np.full(do.shape, np.nan, dtype)
    lse = np.full(do.shape[:-1], np.nan, call.problem.accumulator)
    compute.forward(call, made, place, out, lse)
    owners = q, k, v, call.bias, call.sink
    gradients = Gradients(*(None if x is None else np.full_like(x, np.nan) for x in owners))
    compute.backward(call, made, place, do, out, lse, None, gradients, deterministic=False)
    how = {"precision": Precision.of(dtype, kernels != "simt"), "splits": -(-keys // chunk[1])}
    how |= {"block_kv": 16, **options}
    bound = forward_bound(q, k, v, **how)
    assert rho(out, *bound.out).value <= 1
    assert rho(lse, *bound.lse).value <= 1
    bounds = backward_bound(do, q, k, v, **how)
    for name, gradient in zip(Gradients._fields, gradients, strict=True):
        if gradient is not None:
            assert rho(gradient, *getattr(bounds, name)).value <= 1, name


@emulated
@mostly_thorough(
    ("kernels", "dtype", "d"),
    [("simt", np.float16, 40), ("simt", np.float64, 33), ("sm80", BFLOAT16, 72),
     ("sm80", np.float16, 33), ("sm80", np.float64, 40), ("sm80", np.float32, 33),
     ("sm80", BFLOAT16, 136), ("sm80", np.float32, 192), ("sm80", np.float16, 256),
     ("sm90", BFLOAT16, 128), ("sm90", np.float16, 72), ("sm90", np.float32, 40),
     ("sm90", BFLOAT16, 192), ("sm90", np.float16, 160), ("sm90", BFLOAT16, 256)],
    quick=[("sm80", BFLOAT16, 72), ("sm90", np.float16, 72), ("sm90", BFLOAT16, 192)],
    why="the same epilogue with other fragments",
)  # fmt: skip
@pytest.mark.parametrize("gap", [0, 3])
def test_keys_join_the_result_before_them(kernels, dtype, d, gap):
    """Some rows have no keys here, some none before, and some neither; and memory has gaps."""
    rng = np.random.default_rng(d)
    q, k, v = (rng.standard_normal((2, 3, n, d)).astype(dtype) for n in (70, 50, 50))
    tf32 = {"precision": "tf32x3"} if dtype == np.float32 else {}
    mask = masks.mask(lambda b, h, i, j: i % 5 > 0)
    call = validate.call(q, k, v, Options(mask=mask, **tf32))
    backend, number = Emulator(KERNELS[kernels]), call.problem.accumulator
    shape = q.shape[:-1]
    own = np.empty(q.shape, number), np.empty(shape, number)
    backend.forward_piece(call, own, True)
    out = np.full((*shape, d + gap), np.nan, number)[..., :d]
    lse = np.full((*shape, 1 + gap), np.nan, number)[..., 0]
    out[...] = 3 * rng.standard_normal(out.shape)
    lse[...] = 3 + 2 * rng.standard_normal(shape)
    lse[..., ::7], out[..., ::7, :] = -np.inf, np.nan
    out[0, 0, 1], lse[0, 0, 1] = np.finfo(number).max, 3
    out[..., 3::10, :] = own[0][..., 3::10, :]
    largest = np.fmax(abs(own[0]), abs(out))  # no mean is larger
    with np.errstate(all="ignore"):
        sums = np.logaddexp(own[1].astype(np.longdouble), lse)
        means = np.zeros(q.shape, np.longdouble)
        for part_out, part_lse in (own, (out, lse)):
            weight = np.exp(part_lse - sums)[..., None]
            means += np.where(np.isneginf(part_lse)[..., None], 0, weight * part_out)
    results = np.full(q.shape, np.nan, dtype), np.full(shape, np.nan, number)
    backend.forward_piece(call, (out, lse), False, results)
    backend.forward_piece(call, (out, lse), False)
    eps = np.finfo(number).eps
    assert np.isneginf(lse[..., ::35]).all()
    assert np.isfinite(np.delete(lse, np.s_[::35], axis=-1)).all()
    assert same_bits(results[1], lse)
    assert (abs(out) <= largest).all()
    assert (abs(out - means) <= 20 * eps * np.maximum(abs(means), 10)).all()
    some = np.isfinite(lse)
    assert (abs(lse[some] - sums[some]) <= 20 * eps * 10).all()
    assert same_bits(out[..., 7::35, :], own[0][..., 7::35, :])  # no keys before
    with np.errstate(over="ignore"):
        assert same_bits(results[0], out.astype(dtype))


@emulated
@pytest.mark.parametrize("kernels", ["simt", "sm80"])
def test_few_queries_and_many_keys_are_pieces_too(kernels):
    """Such a call alone is one of the decode kernels, which have no wide results and join none."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 2, 3, 32)).astype(BFLOAT16)
    k, v = rng.standard_normal((2, 1, 2, 1200, 32)).astype(BFLOAT16)
    backend = Emulator(KERNELS[kernels])
    partial = np.full(q.shape, np.nan, np.float32), np.full(q.shape[:-1], np.nan, np.float32)
    results = np.full(q.shape, np.nan, BFLOAT16), np.full(q.shape[:-1], np.nan, np.float32)
    for n, keys in enumerate((range(600), range(600, 1200))):
        own = validate.call(q, part(k, keys), part(v, keys), Options())
        backend.forward_piece(own, partial, n == 0, results if n else None)
    precision = Precision.of(BFLOAT16, kernels != "simt")
    bound = forward_bound(q, k, v, precision=precision, splits=2, block_kv=16)
    assert rho(results[0], *bound.out).value <= 1
    assert rho(results[1], *bound.lse).value <= 1


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_one_kernel_serves_all_pieces(dropout):
    x = np.zeros((1, 4, 4096, 64), BFLOAT16)
    score = scores.alibi(np.ones(4, np.float32))
    options = Options(mask=masks.causal(), score_mod=score, dropout=dropout, seed=1)
    call = validate.call(x, x, x, options)
    call = dataclasses.replace(call, device=0)
    launches = []
    for piece in schedule(call, 1024, 512).by_rows():
        if piece.masked:
            own = call_of(call, piece, part(x, piece.rows), *[part(x, piece.keys)] * 2, None)
            out = np.zeros((1, 4, 1024, 64), np.float32)
            launches += route.forward(own, H200, out, out[..., 0]).recipe.launches
    assert len(launches) == 8
    (special,) = {launch.special for launch in launches}
    assert "_wide__" in special.name
    assert special.origins == (dropout > 0)
    assert len({launch.template for launch in launches}) == len(launches)


def test_a_gpu_rounds_chunks_to_whole_tiles(monkeypatch):
    from cupyflash.pieces import executor

    x = np.zeros((1, 1000, 8), np.float32)
    monkeypatch.setattr(executor, "check_homes", lambda *_: None)
    request = executor.Streamed(Request(x, x, x, ANYWHERE, options=Options()), (300, 129), 0)
    assert [len(keys) for keys in request.schedule.keys] == [256, 256, 256, 232]
    assert [len(rows) for rows in request.schedule.rows] == [300, 300, 300, 100]


@pytest.mark.thorough("another grid of a kernel that has quick tests")
@emulated
@pytest.mark.parametrize("masked", [False, True])
def test_tiles_that_go_to_any_free_sm_have_the_same_bits(masked):
    """While messages travel, no block computes tiles that were dealt to it in advance."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 3, 600, 64)).astype(BFLOAT16)
    call = validate.call(x, x, x, Options(mask=masks.causal() if masked else None))
    emulator, made, grids = Emulator(Blocks(hopper=True)), [], []
    for beside in (False, True):
        results = np.full(x.shape, np.nan, BFLOAT16), np.full(x.shape[:-1], np.nan, np.float32)
        own = dataclasses.replace(call, beside=beside)
        emulator.forward_piece(own, results, True)
        made.append(results)
        few = dataclasses.replace(H200, multiprocessors=4)
        own = dataclasses.replace(own, device=0)
        (launch,) = route.forward(own, few, *results).recipe.launches
        grids.append(launch.grid)
    assert all(same_bits(one, other) for one, other in zip(*made, strict=True))
    assert grids[0] == 4 < grids[1]


@pytest.mark.thorough("heads from elsewhere are quick on the CPU")
@emulated
@pytest.mark.parametrize("kernels", ["simt", "sm80"])
def test_dropout_of_some_heads_is_that_of_the_whole_call(kernels):
    """Ranks that divide heads, and packed sequences in pieces, count heads from elsewhere."""
    rng = np.random.default_rng(0)
    q, do = (rng.standard_normal((2, 4, 40, 16)).astype(BFLOAT16) for _ in "12")
    k, v = (rng.standard_normal((2, 2, 50, 16)).astype(BFLOAT16) for _ in "12")
    backend = Emulator(KERNELS[kernels])

    def work(call, do):
        out, lse = np.empty_like(call.q), np.empty(call.q.shape[:-1], np.float32)
        backend.forward_piece(call, (out, lse), True)
        made = Gradients(*(np.empty_like(x) for x in (call.q, call.k, call.v)))
        backend.backward(call, do, out, lse, None, made, deterministic=True)
        return out, lse, *made[:3]

    whole = validate.call(q, k, v, Options(dropout=0.4, seed=7))
    expected = work(whole, do)
    some = validate.call(*(x[1:, x.shape[1] // 2 :] for x in (q, k, v)), Options())
    problem = dataclasses.replace(
        whole.problem, lead=(1,), heads=2, heads_kv=1, origin_h=2, origin_b=1, whole=whole.problem
    )
    found = work(dataclasses.replace(some, problem=problem), do[1:, 2:])
    for ours, theirs in zip(found, expected, strict=True):
        assert same_bits(ours, theirs[1:, theirs.shape[1] // 2 :])
