"""backward_sm80_dkdv_tile on the emulator: small heads that are one tile, in one launch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cuda_specialisations import BFLOAT16, target_of
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import FORWARD, REVERSE, randomly
from halves import mostly_thorough
from placement import same_bits

import cupyflash
from cupyflash import masks, scores
from cupyflash.gpu import route
from cupyflash.gpu.kernels import sm80, sm80_tile
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, backward_bound, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
HALF = np.dtype(np.float16)
# A device that computes all heads of a call at once.
ONE_TILE, GENERAL = (Blocks(64, 64, 128, one_tile=x, multiprocessors=9) for x in (True, False))
TILE = "backward_sm80_dkdv_tile"
GRADIENTS = "dq", "dk", "dv"


def draw(*shapes, dtype=BFLOAT16, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def run(call, do, blocks, schedule=FORWARD, dlse=None, names=GRADIENTS, dtypes=None, forward=None):
    """Return gradients, which were written to memory that held NaN, and what was launched."""
    launched = []
    emulator = Emulator(blocks, schedule, runs=lambda special: launched.append(special) or True)
    q, k, v = call.q, call.k, call.v
    out = np.empty((*call.problem.array_lead, *q.shape[-3:-1], v.shape[-1]), q.dtype)
    lse = np.empty(out.shape[:-1], call.problem.accumulator)
    emulator.forward(call, out, lse)
    if forward is not None:
        forward(out, lse)
    launched.clear()
    owners = {"dq": q, "dk": k, "dv": v, "dbias": call.bias, "dsink": call.sink}
    made = Gradients(**{
        name: None if x is None or name not in names
        else np.full(x.shape, np.nan, (dtypes or {}).get(name, x.dtype))
        for name, x in owners.items()
    })  # fmt: skip
    emulator.backward(call, do, out, lse, dlse, made, deterministic=True)
    return made, list(dict.fromkeys(x.spec.name for x in launched))


# -- where ----------------------------------------------------------------------------------------


def device_of(arch):
    return dataclasses.replace(target_of(arch), multiprocessors=132)


def steps(
    len_q, len_k, d=64, dtype=BFLOAT16, arch="sm_90", lead=2, heads=4, packed=False, **options
):
    """Return the names of the kernels of a backward of all gradients, and its route."""
    q, k = np.zeros((lead, 4, len_q, d), dtype), np.zeros((2, heads, len_k, d), dtype)
    if packed:
        ends = np.array([0, len_q]), np.array([0, len_k])
        call = validate.varlen_call(q[0], k[0], k[0], *ends, True, Options(**options))
    else:
        call = validate.call(q, k, k, Options(**options))
    made = route.of_gradients(call, device_of(arch))
    return [step.kernel for step in made.steps], made


def test_heads_of_one_tile_have_one_launch():
    for sizes in ((64, 64), (1, 1), (1, 64), (64, 3), (0, 5)):
        for arch in ("sm_80", "sm_90", "sm_120"):
            names, made = steps(*sizes, arch=arch)
            assert names == [TILE]
            assert made.scratch == 0  # not even delta
    assert "delta, dk, dv and dq" in made.steps[0].why()
    assert steps(9, 9, d=7, dtype=HALF)[0] == [TILE]
    assert steps(64, 64, mask=masks.causal())[0] == [TILE]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"d": 65}, "head sizes 65 and 65 are beyond its 64 in bfloat16"),
        ({"heads": 2}, "heads of queries share keys"),
        ({"score_mod": scores.softcap(2.0)}, "scores are changed, or have a bias"),
        ({"bias": np.zeros((64, 64), BFLOAT16)}, "scores are changed, or have a bias"),
        ({"dropout": 0.1, "seed": 1}, "it has no dropout"),
        ({"lead": 1}, "no block has all of a head to itself"),
    ],
)
def test_why_others_serve(options, why):
    # Of the two kernels that sm_80 has for this, the one that is passed over is named.
    names, made = steps(64, 64, arch="sm_80", **options)
    assert names[:2] == ["backward_delta", sm80.DKDV.name]
    assert f"not by {TILE}, because {why}; " in made.steps[1].why()


def test_others_have_the_usual_kernels():
    for options in (
        {"len_q": 65}, {"len_k": 65}, {"len_k": 0}, {"dtype": np.float32}, {"packed": True},
        {"arch": "sm_75"},
    ):  # fmt: skip
        names, _ = steps(**{"len_q": 64, "len_k": 64, **options})
        assert names[0] == "backward_delta"
        assert TILE not in names


@pytest.mark.parametrize(("entries", "mask", "d", "one"), [
    (66, masks.causal(), 64, True), (67, masks.causal(), 64, False), (67, None, 64, True),
    (66, None, 32, True), (67, None, 32, False), (67, None, 33, True),
])  # fmt: skip
def test_more_heads_than_a_device_computes_at_once(entries, mask, d, one):
    q, device = np.zeros((entries, 4, 64, d), BFLOAT16), device_of("sm_80")
    assert sm80_tile.RESIDENT * device.multiprocessors == 4 * 66
    made = route.of_gradients(validate.call(q, q, q, Options(mask=mask)), device)
    assert (made.steps[0].kernel == TILE) == one
    if not one:
        why = "columns, it is for at most 264 heads of all entries together"
        assert why in made.steps[1].why()
        assert "and here are 268" in made.steps[1].why()


def test_the_gradient_of_a_sink_reads_delta():
    names, made = steps(20, 30, arch="sm_80", sink=np.zeros(4, np.float32))
    assert names == [TILE, "backward_sink"]
    assert made.recipe.scratch["delta"].shape == (2, 4, 20)
    assert all("delta" in dict(map(reversed, x.launch.slots)) for x in made.steps)


def test_an_explanation_counts_what_is_launched():
    def explain(shape, mask=None):
        options = {"dtype": "bfloat16", "device": "A100-80GB", "backward": True, "compile": False}
        return cupyflash.explain(shape, mask=mask, **options)

    made = explain((4, 8, 64, 64), masks.causal())
    (alone,) = made.kernels
    assert alone.name == TILE
    assert alone.computes == "delta, dk and dv, and dq"
    # It reads out instead of delta: every array of the call moves once, and nothing else.
    assert (alone.once.reads, alone.once.writes) == (made.least.reads, made.least.writes)
    assert made.memory == 3 * 2 * 4 * 8 * 64 * 64  # gradients, and no scratch memory
    # Under a mask over many heads, delta is another launch.
    made = explain((256, 12, 64, 32), masks.causal())
    assert [x.name for x in made.kernels] == ["backward_delta", sm80.DKDV.name]
    assert "at most 216 heads of all entries together" in made.reason
    assert len(explain((256, 12, 64, 32)).kernels) == 2  # nor do many narrow heads take one
    assert len(explain((256, 12, 64, 64)).kernels) == 1


# -- results --------------------------------------------------------------------------------------

RNG = np.random.default_rng(3)
CASES = {
    "plain": {},
    "causal": {"mask": masks.causal()},  # where there are fewer keys, the first queries see none
    "lengths": {"mask": masks.lengths(np.array([0, 33], np.int32))},  # all of an entry is hidden
    "window": {"mask": masks.window(20, 7), "scale": -0.3},
    "sink": {"sink": RNG.standard_normal(4).astype(np.float32), "mask": masks.causal(offset=-9)},
}
SHAPES = {"causal": (64, 33, 64, 64), "plain": (64, 64, 64, 64), "sink": (17, 5, 7, 20)}


@emulated
@mostly_thorough(
    "case", CASES, quick=("causal", "sink", "lengths"), why="masks as other kernels have them"
)
def test_bits_are_those_of_three_launches(case):
    len_q, len_k, d, d_v = SHAPES.get(case, (50, 61, 40, 24))
    dtype = HALF if case in ("causal", "window", "plain") else BFLOAT16
    q, do = draw((2, 4, len_q, d), (2, 4, len_q, d_v), dtype=dtype)
    k, v = draw((2, 4, len_k, d), (2, 4, len_k, d_v), dtype=dtype, seed=1)
    call = validate.call(q, k, v, Options(**CASES[case]))
    dlse = None if case == "plain" else draw(do.shape[:-1], dtype=np.float32, seed=2)[0]
    every = (*GRADIENTS, "dsink")
    usual, launched = run(call, do, GENERAL, dlse=dlse, names=every)
    assert launched[0] == "backward_delta"
    for schedule in (REVERSE, randomly(4)):
        made, launched = run(call, do, ONE_TILE, schedule, dlse, every)
        assert launched == [TILE, "backward_sink"][: len(launched)]
        for name, x in made._asdict().items():
            if x is not None:
                assert same_bits(x, getattr(usual, name)), name
                assert np.isfinite(x.astype(float)).all()


@emulated
@mostly_thorough(
    "dtype", (BFLOAT16, HALF), quick=(BFLOAT16,), why="the same of the other type", ids=str
)
def test_gradients_within_the_bound(dtype):
    q, do = draw((1, 4, 37, 64), (1, 4, 37, 32), dtype=dtype)
    k, v = draw((1, 4, 64, 64), (1, 4, 64, 32), dtype=dtype, seed=1)
    options = {"mask": masks.window(30, 3), "scale": 0.7}
    made, launched = run(validate.call(q, k, v, Options(**options)), do, ONE_TILE)
    assert launched == [TILE]
    precision = Precision.of(q.dtype, tensor_cores=True)
    wanted = backward_bound(do, q, k, v, precision=precision, block_kv=64, **options)
    for name in GRADIENTS:
        assert rho(getattr(made, name), *getattr(wanted, name)).value <= 1


@emulated
def test_any_strides_and_entries_alone():
    q, do = draw((3, 12, 4, 24), (3, 12, 4, 16))  # (B, L, H, D)
    k, v = draw((3, 30, 4, 24), (3, 30, 4, 16), seed=1)
    q, do, k, v = (x.swapaxes(-3, -2) for x in (q, do, k, v))
    v, do, options = v[:, :, ::-1], do[..., ::-1], Options(mask=masks.causal())
    call = validate.call(q, k, v, options)
    usual, _ = run(call, do, GENERAL)
    made, launched = run(call, do, ONE_TILE, REVERSE)
    assert launched == [TILE]
    assert all(map(same_bits, made[:3], usual[:3]))
    alone, _ = run(validate.call(q[1:2], k[1:2], v[1:2], options), do[1:2], ONE_TILE)
    assert all(same_bits(x, y[1:2]) for x, y in zip(alone[:3], made[:3], strict=True))


@emulated
def test_pieces_have_wide_gradients():
    q, do = draw((1, 2, 30, 24), (1, 2, 30, 16))
    k, v = draw((1, 2, 40, 24), (1, 2, 40, 16), seed=1)
    call = validate.call(q, k, v, Options())
    dtypes = dict.fromkeys(GRADIENTS, np.float32)
    made, launched = run(call, do, ONE_TILE, REVERSE, dtypes=dtypes)
    assert launched == [TILE]
    usual, _ = run(call, do, ONE_TILE)
    for x, y in zip(made[:3], usual[:3], strict=True):
        assert x.dtype == np.float32
        assert same_bits(x.astype(y.dtype), y)


@emulated
def test_no_queries():
    q, k = np.zeros((2, 2, 0, 16), BFLOAT16), draw((2, 2, 5, 16))[0]
    made, launched = run(validate.call(q, k, k, Options()), q, ONE_TILE)
    assert launched == [TILE]
    assert not made.dk.any()
    assert not made.dv.any()


@emulated
@mostly_thorough(
    "dtype", (BFLOAT16, HALF), quick=(HALF,), why="the same of the other type", ids=str
)
def test_hidden_keys_hide_what_is_not_finite(dtype):
    q, do = draw((1, 2, 60, 24), (1, 2, 60, 16), dtype=dtype)
    k, v = draw((1, 2, 60, 24), (1, 2, 60, 16), dtype=dtype, seed=1)
    call = validate.call(q, k, v, Options(mask=masks.window(9, 4)))
    clean, _ = run(call, do, ONE_TILE)
    k[..., 59, 3], v[..., 59, 2], q[0, 1, 0, 1], do[0, 0, 7, 0] = np.nan, np.inf, -np.inf, np.nan
    made, launched = run(call, do, ONE_TILE, REVERSE)
    assert launched == [TILE]
    usual, _ = run(call, do, GENERAL)
    assert np.array_equal(made.dq[:, :, 8:50], clean.dq[:, :, 8:50])
    assert np.isnan(made.dq[:, :, 59].astype(float)).all()
    assert np.array_equal(made.dk[:, :, 25:45], clean.dk[:, :, 25:45])
    for name in GRADIENTS:
        x, y = getattr(made, name).astype(float), getattr(usual, name).astype(float)
        assert np.array_equal(x, y, equal_nan=True)
