"""backward_sm80_dkdv_tile on the emulator: heads that are one tile, in one launch."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_specialisations import BFLOAT16, target_of
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import FORWARD, REVERSE, randomly
from halves import mostly_thorough
from placement import same_bits

from cupyflash import masks, scores
from cupyflash.gpu import route
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, backward_bound, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
HALF = np.dtype(np.float16)
ONE_TILE, GENERAL = (Blocks(64, 64, 128, one_tile=x) for x in (True, False))
ALONE = Blocks(64, 64, 128, one_tile=True, multiprocessors=99)  # a block has an SM
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


def steps(len_q, len_k, d=64, dtype=BFLOAT16, arch="sm_90", lead=2, packed=False, **options):
    """Return the names of the kernels of a backward of all gradients."""
    q, k = np.zeros((lead, 4, len_q, d), dtype), np.zeros((2, 2, len_k, d), dtype)
    if packed:
        ends = np.array([0, len_q]), np.array([0, len_k])
        call = validate.varlen_call(q[0], k[0], k[0], *ends, True, Options(**options))
    else:
        call = validate.call(q, k, k, Options(**options))
    made = route.of_gradients(call, target_of(arch))
    return [step.kernel for step in made.steps], made


def test_heads_of_one_tile_have_one_launch():
    for sizes in ((64, 64), (1, 1), (1, 64), (64, 3), (0, 5)):
        for arch in ("sm_80", "sm_90", "sm_120"):
            names, made = steps(*sizes, arch=arch)
            assert names == ["backward_sm80_dkdv_tile"]
            assert made.scratch == 0  # not even delta
    assert "delta, dk, dv and dq" in made.steps[0].why()
    assert steps(64, 64, d=128)[0] == steps(9, 9, d=7, dtype=HALF)[0] == ["backward_sm80_dkdv_tile"]
    assert steps(64, 64, mask=masks.causal(), dropout=0.1, seed=1)[0] == ["backward_sm80_dkdv_tile"]


def test_others_have_the_usual_kernels():
    for options in (
        {"len_q": 65}, {"len_k": 65}, {"len_k": 0}, {"d": 136}, {"dtype": np.float32},
        {"packed": True}, {"lead": 1}, {"arch": "sm_75"},
    ):  # fmt: skip
        names, _ = steps(**{"len_q": 64, "len_k": 64, **options})
        assert names[0] == "backward_delta"
        assert "backward_sm80_dkdv_tile" not in names


def test_who_else_reads_delta():
    bias, sink = np.zeros((4, 20, 30), np.float32), np.zeros(4, np.float32)
    for options, others in (
        ({"sink": sink}, ["backward_sink"]),
        ({"bias": bias}, ["backward_sm80_bias"]),
        ({"bias": bias, "sink": sink}, ["backward_sink", "backward_sm80_bias"]),
    ):
        names, made = steps(20, 30, arch="sm_80", **options)
        assert names == ["backward_sm80_dkdv_tile", *others]
        assert made.recipe.scratch["delta"].shape == (2, 4, 20)
        assert all("delta" in dict(map(reversed, x.launch.slots)) for x in made.steps)


# -- results --------------------------------------------------------------------------------------

RNG = np.random.default_rng(3)
CASES = {
    "plain": {},
    "causal": {"mask": masks.causal()},  # where there are fewer keys, the first queries see none
    "lengths": {"mask": masks.lengths(np.array([0, 33], np.int32))},  # all of an entry is hidden
    "dropout": {"dropout": 0.3, "seed": 5, "mask": masks.window(20, 7)},
    "bias": {"bias": RNG.standard_normal((2, 1, 50, 61)).astype(np.float32)},
    "softcap": {"score_mod": scores.softcap(2.0), "mask": masks.causal()},
    "sink": {"sink": RNG.standard_normal(4).astype(np.float32), "mask": masks.causal(offset=-9)},
}
SHAPES = {"causal": (64, 33, 64, 64), "plain": (64, 64, 128, 128), "sink": (17, 5, 7, 20)}


@emulated
@mostly_thorough(
    "case", CASES, quick=("causal", "sink", "bias"), why="masks and weights as other kernels have"
)
def test_bits_are_those_of_three_launches(case):
    len_q, len_k, d, d_v = SHAPES.get(case, (50, 61, 40, 24))
    dtype = HALF if case in ("causal", "dropout", "plain") else BFLOAT16
    q, do = draw((2, 4, len_q, d), (2, 4, len_q, d_v), dtype=dtype)
    k, v = draw((2, 2, len_k, d), (2, 2, len_k, d_v), dtype=dtype, seed=1)
    call = validate.call(q, k, v, Options(**CASES[case]))
    dlse = None if case == "plain" else draw(do.shape[:-1], dtype=np.float32, seed=2)[0]
    every = (*GRADIENTS, "dbias", "dsink")
    usual, launched = run(call, do, GENERAL, dlse=dlse, names=every)
    assert launched[0] == "backward_delta"
    for blocks, schedule in ((ONE_TILE, REVERSE), (ALONE, randomly(4))):
        made, launched = run(call, do, blocks, schedule, dlse, every)
        assert launched[0] == "backward_sm80_dkdv_tile"
        assert "backward_delta" not in launched
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
    k, v = draw((1, 1, 64, 64), (1, 1, 64, 32), dtype=dtype, seed=1)
    options = {"mask": masks.window(30, 3), "scale": 0.7}
    made, _ = run(validate.call(q, k, v, Options(**options)), do, ONE_TILE)
    precision = Precision.of(q.dtype, tensor_cores=True)
    wanted = backward_bound(do, q, k, v, precision=precision, block_kv=64, **options)
    for name in GRADIENTS:
        assert rho(getattr(made, name), *getattr(wanted, name)).value <= 1


@emulated
def test_entries_that_share_keys_and_any_strides():
    q, do = draw((3, 12, 4, 24), (3, 12, 4, 16))  # (B, L, H, D)
    k, v = draw((30, 2, 24), (30, 2, 16), seed=1)
    q, do, k, v = (x.swapaxes(-3, -2) for x in (q, do, k, v))
    v = np.broadcast_to(v, (3, *v.shape))
    call = validate.call(q, k, v[:, :, ::-1], Options(mask=masks.causal()))
    usual, _ = run(call, do[..., ::-1], GENERAL)
    made, launched = run(call, do[..., ::-1], ONE_TILE, REVERSE)
    assert launched[0] == "backward_sm80_dkdv_tile"
    assert all(map(same_bits, made[:3], usual[:3]))
    # An entry has the same bits alone.
    alone, _ = run(
        validate.call(q[1:2], k, v[1:2, :, ::-1], call_options()), do[1:2, ..., ::-1], ONE_TILE
    )
    assert same_bits(alone.dq, made.dq[1:2])


def call_options():
    return Options(mask=masks.causal())


@emulated
def test_pieces_have_wide_gradients():
    q, do = draw((1, 2, 30, 24), (1, 2, 30, 16))
    k, v = draw((1, 1, 40, 24), (1, 1, 40, 16), seed=1)
    call = validate.call(q, k, v, Options())
    dtypes = dict.fromkeys(GRADIENTS, np.float32)
    made, _ = run(call, do, ONE_TILE, REVERSE, dtypes=dtypes)
    usual, _ = run(call, do, ONE_TILE)
    for x, y in zip(made[:3], usual[:3], strict=True):
        assert x.dtype == np.float32
        assert same_bits(x.astype(y.dtype), y)


@emulated
def test_no_queries():
    q, k = np.zeros((2, 2, 0, 16), BFLOAT16), draw((2, 2, 5, 16))[0]
    made, launched = run(validate.call(q, k, k, Options()), q, ONE_TILE)
    assert launched == ["backward_sm80_dkdv_tile"]
    assert not made.dk.any()
    assert not made.dv.any()


@emulated
@mostly_thorough(
    "dtype", (BFLOAT16, HALF), quick=(HALF,), why="the same of the other type", ids=str
)
def test_hidden_keys_hide_what_is_not_finite(dtype):
    q, do = draw((1, 2, 60, 24), (1, 2, 60, 16), dtype=dtype)
    k, v = draw((1, 1, 60, 24), (1, 1, 60, 16), dtype=dtype, seed=1)
    call = validate.call(q, k, v, Options(mask=masks.window(9, 4)))
    clean, _ = run(call, do, ONE_TILE)
    k[..., 59, 3], v[..., 59, 2], q[0, 1, 0, 1], do[0, 0, 7, 0] = np.nan, np.inf, -np.inf, np.nan
    made, _ = run(call, do, ONE_TILE, REVERSE)
    usual, _ = run(call, do, GENERAL)
    assert np.array_equal(made.dq[:, :, 8:50], clean.dq[:, :, 8:50])
    assert np.isnan(made.dq[:, :, 59].astype(float)).all()
    assert np.array_equal(made.dk[:, :, 25:45], clean.dk[:, :, 25:45])
    for name in GRADIENTS:
        x, y = getattr(made, name).astype(float), getattr(usual, name).astype(float)
        assert np.array_equal(x, y, equal_nan=True)
