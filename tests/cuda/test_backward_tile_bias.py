"""backward_sm80_dkdv_dbias on the emulator: small heads that are one tile, with dbias."""

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

from cupyflash import masks, scores
from cupyflash.gpu import route
from cupyflash.gpu.kernels import sm80_tile
from cupyflash.gpu.workspace import parts_of
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, backward_bound, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
HALF = np.dtype(np.float16)
ONE_TILE = Blocks(64, 64, 128, one_tile=True, multiprocessors=9, bias_tiles=True)
GENERAL = dataclasses.replace(ONE_TILE, one_tile=False)
TILE = sm80_tile.DKDV_BIAS.name
GRADIENTS = "dq", "dk", "dv", "dbias"


def draw(*shapes, dtype=BFLOAT16, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def run(call, do, blocks=ONE_TILE, schedule=FORWARD, dlse=None, dtypes=None):
    """Return gradients, which were written to memory that held NaN, and what was launched."""
    launched = []
    emulator = Emulator(blocks, schedule, runs=lambda special: launched.append(special) or True)
    q, k, v = call.q, call.k, call.v
    out = np.empty((*call.problem.array_lead, *q.shape[-3:-1], v.shape[-1]), q.dtype)
    lse = np.empty(out.shape[:-1], call.problem.accumulator)
    emulator.forward(call, out, lse)
    launched.clear()
    owners = {"dq": q, "dk": k, "dv": v, "dbias": call.bias, "dsink": call.sink}
    made = Gradients(**{
        name: None if x is None
        else np.full(x.shape, np.nan, (dtypes or {}).get(name, x.dtype))
        for name, x in owners.items()
    })  # fmt: skip
    emulator.backward(call, do, out, lse, dlse, made, deterministic=True)
    return made, list(dict.fromkeys(x.spec.name for x in launched))


def window(entries=9, heads=2, len_q=49, len_k=49, d=32, d_v=32, dtype=BFLOAT16, **options):
    """Return a call with a bias that entries share, and do."""
    q, do = draw((entries, heads, len_q, d), (entries, heads, len_q, d_v), dtype=dtype)
    k, v = draw((entries, heads, len_k, d), (entries, heads, len_k, d_v), dtype=dtype, seed=1)
    (bias,) = draw((heads, len_q, len_k), dtype=dtype, seed=2)
    return validate.call(q, k, v, Options(**{"bias": bias, **options})), do


# -- where ----------------------------------------------------------------------------------------


def device_of(arch="sm_90"):
    return dataclasses.replace(target_of(arch), multiprocessors=132)


def steps(call, arch="sm_90"):
    return [step.kernel for step in route.of_gradients(call, device_of(arch)).steps]


def shaped(entries=8, heads=4, len_q=49, len_k=49, d=32, dtype=BFLOAT16, **options):
    q = np.zeros((entries, heads, len_q, d), dtype)
    k = np.zeros((entries, options.pop("heads_kv", heads), len_k, d), dtype)
    bias = options.pop("bias", np.zeros((heads, len_q, len_k), dtype))
    return validate.call(q, k, k, Options(bias=bias, **options))


def test_windows_have_one_launch_and_sums():
    for arch in ("sm_80", "sm_90", "sm_120"):
        for sizes in ((49, 49), (64, 64), (1, 64), (64, 3)):
            assert steps(shaped(len_q=sizes[0], len_k=sizes[1]), arch) == [TILE, "backward_sums"]
    assert steps(shaped(d=7, dtype=HALF)) == [TILE, "backward_sums"]
    assert steps(shaped(entries=7)) == [TILE]  # so few entries are one part
    assert steps(shaped(bias=np.zeros((8, 4, 49, 49), BFLOAT16))) == [TILE]
    made = route.of_gradients(shaped(entries=2048), device_of())
    assert made.steps[0].grid == 384
    assert made.recipe.scratch.keys() == {parts_of("dbias")}
    assert "delta, dk, dv and dq and parts of dbias" in made.steps[0].why()
    # The parts of a slice of the bias do not depend on how many there are.
    some = np.zeros((3, 4, 49, 49), BFLOAT16)
    q = np.zeros((5 * 8, 3, 4, 49, 32), BFLOAT16)
    sliced = route.of_gradients(validate.call(q, q, q, Options(bias=some)), device_of())
    assert sliced.recipe.scratch[parts_of("dbias")].shape == (10, 3, 4, 49, 49)
    assert sliced.steps[0].grid == 10 * 3 * 4


@pytest.mark.parametrize("other", [
    {"d": 33}, {"len_q": 65}, {"len_k": 65}, {"dtype": np.float32}, {"heads_kv": 2},
    {"mask": masks.causal()}, {"score_mod": scores.softcap(2.0)}, {"dropout": 0.1, "seed": 1},
    {"bias": np.zeros((4, 49, 49), np.float32)}, {"bias": np.zeros((4, 1, 49), BFLOAT16)},
    {"sink": np.zeros(4, np.float32)}, {"len_k": 0}, {"len_q": 0},
])  # fmt: skip
def test_others_have_the_usual_kernels(other):
    assert TILE not in steps(shaped(**other))


def test_without_the_gradient_of_the_bias():
    call = shaped()
    rows = np.zeros(call.q.shape, BFLOAT16)
    lse = np.zeros(call.q.shape[:-1], np.float32)
    gradients = Gradients(call.q, call.k, call.v)
    made = route.backward(call, device_of(), rows, rows, lse, None, gradients)
    assert TILE not in [x.kernel for x in made.steps]


# -- results --------------------------------------------------------------------------------------


@emulated
@mostly_thorough(
    "dtype", (BFLOAT16, HALF), quick=(BFLOAT16,), why="the same of the other type", ids=str
)
@pytest.mark.parametrize("sizes", [(49, 49, 32, 32), (64, 30, 20, 9), (5, 64, 32, 16)])
def test_gradients_within_the_bound(dtype, sizes):
    options = {"scale": -0.3} if sizes[0] == 5 else {}
    call, do = window(9, 2, *sizes, dtype=dtype, **options)
    dlse = draw(do.shape[:-1], dtype=np.float32, seed=3)[0]
    made, launched = run(call, do, dlse=dlse)
    assert launched == [TILE, "backward_sums"]
    precision = Precision.of(dtype, tensor_cores=True)
    wanted = backward_bound(
        do, call.q, call.k, call.v, precision=precision, block_kv=64, dlse=dlse, bias=call.bias,
        **options,
    )  # fmt: skip
    for name in GRADIENTS:
        assert rho(getattr(made, name), *getattr(wanted, name)).value <= 1, name
    for schedule in (REVERSE, randomly(4)):
        again, _ = run(call, do, schedule=schedule, dlse=dlse)
        assert all(same_bits(x, y) for x, y in zip(again[:4], made[:4], strict=True))


@emulated
def test_entries_alone_have_the_same_bits():
    call, do = window(6, 2)
    made, _ = run(call, do)
    alone = validate.call(*(x[3:4] for x in (call.q, call.k, call.v)), Options(bias=call.bias))
    again, launched = run(alone, do[3:4])
    assert launched == [TILE]
    for name in GRADIENTS[:3]:
        assert same_bits(getattr(again, name), getattr(made, name)[3:4])


@emulated
def test_any_strides_slices_and_one_head():
    q, do = draw((4, 3, 20, 2, 24), (4, 3, 20, 2, 16))  # (B, W, L, H, D)
    k, v = draw((4, 3, 30, 2, 24), (4, 3, 30, 2, 16), seed=1)
    q, do, k, v = (x.swapaxes(-3, -2) for x in (q, do, k, v))
    v, do = v[..., ::-1, :], do[..., ::-1]
    for lead in ((3, 2), (1, 2), (3, 1), (1, 1)):
        bias = draw((*lead, 30, 20), seed=4)[0].swapaxes(-1, -2)
        call = validate.call(q, k, v, Options(bias=bias))
        usual, _ = run(call, do, GENERAL)
        made, launched = run(call, do, schedule=REVERSE)
        assert launched[0] == TILE
        for name in GRADIENTS:
            x, y = (getattr(z, name).astype(float) for z in (made, usual))
            np.testing.assert_allclose(x, y, atol=0.03 * np.abs(y).max(), rtol=0.02)


@emulated
def test_pieces_with_wide_gradients_have_the_usual_kernels():
    call, do = window(5, 1, 20, 30, 24, 16)
    _, launched = run(call, do, dtypes=dict.fromkeys(GRADIENTS, np.float32))
    assert TILE not in launched
    _, launched = run(call, do, dtypes={"dbias": np.float32})
    assert launched == [TILE]


@emulated
@mostly_thorough(
    "dtype", (BFLOAT16, HALF), quick=(HALF,), why="the same of the other type", ids=str
)
def test_hidden_pairs_hide_what_is_not_finite(dtype):
    call, do = banded(dtype)
    clean, launched = run(call, do)
    assert launched[0] == TILE
    usual, _ = run(call, do, GENERAL)
    for name in GRADIENTS:
        x, y = (getattr(z, name).astype(float) for z in (clean, usual))
        np.testing.assert_allclose(x, y, atol=0.02 * np.abs(y).max(), rtol=0.02)
    assert not clean.dq[:, :, 33].any()
    k, v, q = call.k, call.v, call.q
    k[..., 59, 3], v[..., 59, 2], q[0, 0, 0, 1], do[1, 0, 7, 0] = np.nan, np.inf, -np.inf, np.nan
    do[:, :, 33] = np.nan
    made, _ = run(call, do, schedule=REVERSE)
    same_in_the_middle(made, clean)
    assert np.isnan(made.dq[:, :, 59].astype(float)).all()
    assert np.isnan(made.dv[1, 0, :14, 0].astype(float)).all()


def banded(dtype=BFLOAT16):
    """Return a call whose bias hides keys that are 8 or more away, and all of query 33."""
    call, do = window(4, 1, 60, 60, 24, 16, dtype=dtype)
    call.bias[...] = np.where(np.abs(np.subtract.outer(range(60), range(60))) < 8, 0.5, -np.inf)
    call.bias[:, 33] = -np.inf
    return call, do


def same_in_the_middle(made, clean):
    assert same_bits(made.dq[:, :, 15:52], clean.dq[:, :, 15:52])
    for name in ("dk", "dv"):
        x, y = getattr(made, name), getattr(clean, name)
        assert same_bits(x[:, :, 22:45], y[:, :, 22:45])
    assert same_bits(made.dv[1, 0, 15:45], clean.dv[1, 0, 15:45])
    assert same_bits(made.dbias[0, 22:45, 22:45], clean.dbias[0, 22:45, 22:45])


@emulated
@pytest.mark.parametrize(
    "changes",
    [
        {"q": (0, 2.0**120), "k": (59, 2.0**120)},
        {"do": (0, 2.0**120), "v": (59, -(2.0**120))},
        {"do": (0, 2.0**120), "v": (0, 2.0**120)},
        {"v": (59, np.inf)},
        {"k": (59, np.nan)},
    ],
    ids=["a score", "dP", "delta", "a value", "a key"],
)
def test_hidden_pairs_hide_what_overflows(changes):
    call, do = banded()
    clean, _ = run(call, do)
    arrays = {"q": call.q, "k": call.k, "v": call.v, "do": do}
    for name, (row, value) in changes.items():
        arrays[name][..., row, 1] = value
    made, _ = run(call, do)
    same_in_the_middle(made, clean)
    hidden = np.isneginf(call.bias[0].astype(float))
    assert not made.dbias[0][hidden].any()


@emulated
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_hidden_pairs_hide_gradients_of_lse(value):
    call, do = banded()
    dlse = np.zeros(do.shape[:-1], np.float32)
    clean, _ = run(call, do, dlse=dlse)
    dlse[..., 0], dlse[1, 0, 59] = value, value
    made, _ = run(call, do, dlse=dlse)
    same_in_the_middle(made, clean)
    assert not made.dbias[0, 0, 8:].any()
    assert not np.isfinite(made.dq[:, 0, 0].astype(float)).any()


@emulated
def test_shifted_windows():
    """Half of the windows hide pairs, in a bias for each window that images share."""
    images, windows, heads, n, d = 5, 4, 2, 49, 32
    q, k, v, do = draw(*[(images, windows, n, heads, d)] * 4)
    q, k, v, do = (x.swapaxes(-3, -2) for x in (q, k, v, do))
    part = np.arange(n) % 7 < 3
    bias = draw((windows, heads, n, n), dtype=np.float32, seed=2)[0]
    bias[2:, :, part[:, None] != part] = -np.inf
    call = validate.call(q, k, v, Options(bias=bias.astype(BFLOAT16)))
    made, launched = run(call, do)
    assert launched[0] == TILE
    wanted = backward_bound(
        do, q, k, v, precision=Precision.of(BFLOAT16, tensor_cores=True), block_kv=64,
        bias=call.bias,
    )  # fmt: skip
    for name in GRADIENTS:
        assert rho(getattr(made, name), *getattr(wanted, name)).value <= 1, name
    # A window's gradients are those that it has alone.
    for w in (0, 3):
        own = [x[:, w : w + 1] for x in (q, k, v, do)]
        alone = validate.call(*own[:3], Options(bias=call.bias[w : w + 1]))
        again, _ = run(alone, own[3], schedule=REVERSE)
        assert same_bits(again.dbias, made.dbias[w : w + 1])
        assert same_bits(again.dk, np.ascontiguousarray(made.dk[:, w : w + 1]))


@emulated
def test_entries_that_begin_anywhere():
    """Only some entries allow copies of 16 bytes."""
    call, do = window(5, 2, 20, 30, 24, 16)
    wanted, _ = run(call, do)

    def moved(x):
        entries, heads, rows, columns = x.shape
        room = np.zeros((entries, heads, rows * columns + 4), x.dtype)
        room[..., : rows * columns] = x.reshape(entries, heads, -1)
        step = x.dtype.itemsize
        strides = (*room.strides[:2], columns * step, step)
        return np.lib.stride_tricks.as_strided(room, x.shape, strides)

    other = validate.call(*(moved(x) for x in (call.q, call.k, call.v)), Options(bias=call.bias))
    made, launched = run(other, moved(do))
    assert launched[0] == TILE
    assert all(same_bits(x, y) for x, y in zip(made[:4], wanted[:4], strict=True))


@emulated
def test_a_workspace_has_room():
    call, do = window(9, 1, 20, 30, 24, 16)
    wanted, _ = run(call, do)
    emulator = Emulator(ONE_TILE)
    out, lse = np.empty(do.shape, do.dtype), np.empty(do.shape[:-1], np.float32)
    emulator.forward(call, out, lse)
    made = Gradients(*(np.empty_like(x) for x in (call.q, call.k, call.v, call.bias)))
    size = emulator.workspace_size(call)
    emulator.backward(call, do, out, lse, None, made, workspace=np.empty(size, np.uint8))
    assert all(same_bits(x, y) for x, y in zip(made[:4], wanted[:4], strict=True))
