"""The forward by warpgroups with tiles of the bias in shared memory, on the CPU."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from cuda_specialisations import SHARED_MEMORY, target_of
from emulator import build
from emulator.machine import FORWARD, REVERSE, Fault, randomly
from halves import mostly_thorough
from placement import same_bits
from warpgroup_calls import TYPES, draw, emulated, run, within_the_bound

from cupyflash import masks, scores
from cupyflash.arrays.cuda_device import Target
from cupyflash.gpu import route
from cupyflash.gpu.kernels import bias_tiles, sm90
from cupyflash.gpu.writer import request_of
from cupyflash.problem import validate
from cupyflash.problem.options import Options

H200 = Target(0, "NVIDIA H200", (9, 0), 132, SHARED_MEMORY["sm_90"])
BFLOAT16, FLOAT16, FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.float32


def bias_of(dtype, shape, hides=True):
    """Return a bias in which rows, keys and tiles are hidden; one row has no key left."""
    bias = np.random.default_rng(4).standard_normal(shape).astype(dtype)
    if hides:
        bias[..., 5:9] = bias[..., 0, :, 64:128] = -np.inf
        bias[..., -1, 3 % shape[-2], :] = -np.inf
    return bias


def obstacle(bias, q=(2, 3, 64, 64), k=(2, 3, 64, 64)):
    q, k = np.zeros(q, FLOAT16), np.zeros(k, FLOAT16)
    call = validate.call(q, k, k, Options(bias=bias))
    arrays = {"q": (q, 3), "k": (k, 3), "v": (k, 3)}
    return bias_tiles.obstacle(request_of(call, target_of("sm_90"), arrays))


@emulated
@mostly_thorough(
    ("kind", "shape", "q_shape", "k_shape", "tiles", "options"),
    [
        (BFLOAT16, (2, 130, 200), (2, 2, 130, 64), (2, 2, 200, 64), None, {}),
        (FLOAT32, (2, 1, 72), (1, 2, 70, 32), (1, 2, 72, 32), (64, 64, 3), {}),
        (FLOAT16, (2, 1, 130, 200), (2, 3, 130, 40), (2, 1, 200, 40), (64, 128, 2), {}),
        (FLOAT32, (2, 130, 200), (2, 130, 64), (2, 200, 64), (192, 128, 1), {}),
        (BFLOAT16, (1, 70, 264), (3, 70, 128), (1, 264, 128), None, {"scale": -0.3}),
        (BFLOAT16, (3, 1, 2, 70, 72), (3, 2, 2, 70, 64), (3, 2, 2, 72, 64), None, {}),
        (BFLOAT16, (2, 260, 264), (2, 260, 64), (2, 264, 64), None, {"mask": masks.causal()}),
        (FLOAT16, (2, 100, 200), (2, 100, 256), (2, 200, 192), None, {}),
        (FLOAT32, (2, 100, 200), (2, 100, 160), (2, 200, 160), None, {"dropout": 0.3, "seed": 1}),
        (BFLOAT16, (2, 100, 80), (2, 100, 64), (2, 80, 64), (64, 80, 3), {}),
        (BFLOAT16, (2, 200, 208), (2, 200, 64), (2, 208, 64), (192, 112, 1), {}),
        (
            BFLOAT16,
            (2, 130, 200),
            (2, 2, 130, 64),
            (2, 2, 200, 64),
            None,
            {"score_mod": scores.softcap(2.0), "mask": masks.window(60, 60), "dropout": 0.2},
        ),
    ],
    quick=lambda case: case[2][-1] == 32,
    why="other types, broadcast axes, tiles and options; another quick test has rows of 16 bits",
    ids=str,
)
def test_tiles_of_a_bias(kind, shape, q_shape, k_shape, tiles, options):
    dtype = TYPES[shape[-1] // 8 % 2]
    q, k = draw(dtype, q_shape, (*k_shape[:-1], q_shape[-1]))
    (v,) = draw(dtype, k_shape, seed=1)
    bias = bias_of(kind, shape, hides=shape[-2] > 1)
    schedule = (FORWARD, REVERSE, randomly(1))[shape[-1] // 8 % 3]
    if "dropout" in options:
        options = {"seed": 3} | options
    out, lse, _ = run(q, k, v, schedule, warpgroups=tiles, bias_tiles=True, bias=bias, **options)
    within_the_bound(q, k, v, out, lse, bias=bias, **options)


@emulated
@mostly_thorough(
    "kind", [BFLOAT16, FLOAT32], quick=[BFLOAT16], why="the other width reads likewise", ids=str
)
def test_what_lies_behind_a_bias_of_minus_infinity_changes_no_bit(kind):
    q, k, v = draw(BFLOAT16, (2, 70, 64), *[(2, 136, 64)] * 2)
    bias = bias_of(kind, (2, 70, 136))
    plain, lse, _ = run(q, k, v, warpgroups=(64, 64, 3), bias_tiles=True, bias=bias)
    k[:, 5:9], v[:, 5:9] = np.nan, np.inf
    k[0, 64:128], v[0, 64:128] = np.inf, np.nan
    out, other, _ = run(q, k, v, FORWARD, warpgroups=(64, 64, 3), bias_tiles=True, bias=bias)
    assert same_bits(plain, out)
    assert same_bits(lse, other)
    assert (out[-1, 3] == 0).all()
    assert lse[-1, 3] == -np.inf


TILES = "sm90/bias_tiles.cuh"
ORDERS = re.compile(
    r"(?:pipeline\.(?:wait|init)\w*|ptx::mbarrier_arrive_expect_tx|warpgroup::arrive_warp)\([^;]*;"
)


@emulated
@pytest.mark.parametrize("number", range(5))
@pytest.mark.thorough("mutants; that the emulator reports faults is quick")
def test_nothing_that_orders_may_be_missing(number):
    def read(name):
        text = build.read(name)
        if name == TILES:
            found = list(ORDERS.finditer(text))
            assert len(found) == 5
            text = f"{text[: found[number].start()]};{text[found[number].end() :]}"
        return text

    q, k, v = draw(BFLOAT16, (2, 70, 64), *[(2, 520, 64)] * 2)
    bias = bias_of(BFLOAT16, (2, 70, 520))

    def run_often():
        for schedule in (FORWARD, REVERSE, *map(randomly, range(4))):
            run(q, k, v, schedule, read=read, warpgroups=(64, 64, 3), bias_tiles=True, bias=bias)

    with pytest.raises(Fault):
        run_often()


@pytest.mark.thorough("what is not finite goes the same way for every bias")
@emulated
def test_infinite_logits_are_those_of_the_score_change():
    q, k, v = draw(FLOAT16, (1, 70, 64), *[(1, 136, 64)] * 2)
    bias = bias_of(FLOAT16, (1, 70, 136))
    bias[0, 10, 30], bias[0, 11, 31] = np.inf, np.nan
    k[0, 40, 2] = np.inf
    v[0, 50, 3] = np.nan
    found = [
        run(q, k, v, warpgroups=(64, 64, 3), bias_tiles=tiles, bias=bias) for tiles in (True, False)
    ]
    for tiles, expression in zip(*(x[:2] for x in found), strict=True):
        assert (np.isnan(tiles) == np.isnan(expression)).all()
        assert np.allclose(tiles, expression, 1e-2, 1e-2, equal_nan=True)


@pytest.mark.thorough("a head that is alone has the same tiles")
@emulated
def test_bits_do_not_depend_on_the_batch():
    q, k, v = draw(BFLOAT16, (3, 2, 130, 64), *[(3, 2, 200, 64)] * 2)
    bias = bias_of(BFLOAT16, (3, 1, 130, 200))
    out, lse, _ = run(q, k, v, bias_tiles=True, bias=bias)
    alone = run(q[1:2], k[1:2], v[1:2], bias_tiles=True, bias=bias[1:2], multiprocessors=1)
    assert same_bits(out[1:2], alone[0])
    assert same_bits(lse[1:2], alone[1])


@pytest.mark.parametrize(
    ("bias", "why"),
    [
        (np.zeros((3, 64, 64), FLOAT32), None),
        (np.zeros((2, 1, 1, 64), FLOAT16), None),
        (np.zeros((64, 72), FLOAT16)[:, :64], None),
        (np.zeros((64, 65), FLOAT16)[:, :64], "rows do not begin at multiples of 16 bytes"),
        (np.zeros((64, 72), FLOAT16)[:, 1:65], "rows do not begin at multiples of 16 bytes"),
        (np.zeros((64, 64), FLOAT16).T, "its columns lie apart"),
        (np.zeros((64, 64), FLOAT16)[:, ::-1], "its columns lie apart"),
        (np.zeros((64, 64), FLOAT16)[::-1], "an axis runs backwards"),
        (np.zeros((64, 1), FLOAT16), "all keys have the same"),
        (np.zeros((64, 64)), "it is float64"),
    ],
)
def test_which_a_tensor_map_describes(bias, why):
    assert obstacle(bias) == why


def test_leading_axes_may_stay_apart():
    shape = (2, 3, 2, 4, 64, 64)
    assert obstacle(np.zeros((3, 1, 4, 64, 64), FLOAT16), shape[1:], shape[1:]) is None
    assert "two leading axes" in obstacle(np.zeros((2, 1, 2, 1, 64, 64), FLOAT16), shape, shape)
    many = (2,) * 6 + (8, 8)
    bias = np.zeros((2, 1, 2, 1, 2, 1, 8, 8), FLOAT16)
    assert "cannot be joined" in obstacle(bias, many, many)


def test_every_tile_fits():
    for d in (8, 64, 72, 128, 160, 256):
        for itemsize in (2, 4):
            tiles = sm90.fit_forward_bias(d, d, itemsize)
            assert tiles.bias_stages >= 1
            assert tiles.shared_memory <= sm90.SHARED_MEMORY


@pytest.mark.thorough("the tests of score changes have it quick")
@emulated
def test_a_bias_that_has_no_map_is_part_of_the_score_change():
    q, k, v = draw(BFLOAT16, (1, 20, 16), *[(1, 49, 16)] * 2)
    bias = bias_of(BFLOAT16, (1, 20, 49), hides=False)
    out, lse, _ = run(q, k, v, bias_tiles=True, bias=bias)
    within_the_bound(q, k, v, out, lse, bias=bias)


@pytest.mark.parametrize(
    ("q_shape", "bias", "causal", "name"),
    [
        ((16, 12, 512, 64), (12, 512, 512), False, "bias_bf16__q64_kv128"),
        ((16, 12, 512, 64), (12, 512, 512), True, "mask_bias_bf16_tma__q64_kv64"),
        ((8, 12, 1024, 64), (8, 1, 1, 1024), False, "bias_bf16__q64_kv128"),
        ((256, 4, 256, 32), (4, 256, 256), False, "bias_bf16_tma__q64_kv64"),
        ((64, 4, 64, 32), (4, 64, 64), False, "one_bias_bf16_tma__q64_kv64"),
        ((2048, 4, 49, 32), (4, 49, 49), False, "one_score__q64_kv64"),
    ],
)
def test_which_calls_take_tiles_of_a_bias(q_shape, bias, causal, name):
    q, bias = (np.broadcast_to(np.zeros(x[-1:], BFLOAT16), x) for x in (q_shape, bias))
    q, bias = (np.lib.stride_tricks.as_strided(x, x.shape, steps(x)) for x in (q, bias))
    options = Options(bias=bias, mask=masks.causal() if causal else None)
    taken = route.of(validate.call(q, q, q, options), H200).recipe.launches[0]
    assert taken.special.name.endswith(name)
    assert len(taken.maps) == (5 if "bias" in name else 4)
    assert (taken.special.tiles.bias_stages > 0) == ("bias" in name)


def steps(x):
    """Return the strides of a contiguous array; nobody reads its elements."""
    return tuple(int(np.prod(x.shape[n + 1 :])) * x.itemsize for n in range(x.ndim))
