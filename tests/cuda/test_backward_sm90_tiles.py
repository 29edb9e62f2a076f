"""The backward by warpgroups with tiles of the bias in shared memory, on the CPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from cuda_specialisations import SHARED_MEMORY, target_of
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import FORWARD, REVERSE, randomly
from halves import mostly_thorough
from harness import attend
from placement import same_bits

from cupyflash import masks, scores
from cupyflash.arrays.cuda_device import Target
from cupyflash.gpu import route
from cupyflash.gpu.kernels import bias_tiles, sm90, sm90_dkdv
from cupyflash.gpu.writer import request_of
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, backward_bound, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
HALF, BRAIN = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def draw(dtype, *shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def bias_of(dtype, shape):
    """Return a bias in which keys and a row are hidden."""
    bias = draw(dtype, shape, seed=4)[0]
    bias[..., 5:9] = -np.inf
    if len(shape) > 2 and shape[-2] > 1:
        bias[..., -1, 3, :] = -np.inf
    return bias


def run(q, k, v, do, schedule=REVERSE, tiles=True, saved=None, **options):
    """Compute dq, dk and dv on the emulator, into memory that holds NaN."""
    saved = attend(q, k, v, **options) if saved is None else saved
    call = validate.call(q, k, v, Options(**options))
    made = Gradients(*(np.full(x.shape, np.nan, x.dtype) for x in (q, k, v)))
    blocks = Blocks(hopper=True, bias_tiles=tiles)
    Emulator(blocks, schedule).backward(call, do, saved.out, saved.lse, None, made)
    return made[:3]


@emulated
@mostly_thorough(
    ("dtype", "kind", "shape", "q_shape", "k_shape", "options"),
    [
        (BRAIN, BRAIN, (2, 70, 136), (2, 70, 64), (2, 136, 64), {}),
        (BRAIN, HALF, (2, 1, 136), (2, 2, 70, 64), (2, 1, 136, 64), {}),
        (HALF, BRAIN, (2, 1, 130, 264), (2, 2, 130, 32), (2, 2, 264, 32), {"scale": -0.3}),
        (BRAIN, BRAIN, (70, 200), (2, 70, 128), (1, 200, 128), {}),
        (HALF, HALF, (2, 200, 264), (2, 200, 64), (1, 264, 64), {"mask": masks.causal()}),
        (HALF, BRAIN, (1, 200, 264), (1, 200, 128), (1, 264, 128), {"mask": masks.window(90, 9)}),
        (BRAIN, BRAIN, (2, 70, 136), (2, 70, 96), (2, 136, 96), {"dropout": 0.3, "seed": 1}),
    ],
    quick=lambda case: case[2] == (2, 70, 136) and not case[5],
    why="other types, broadcast axes, heads and options",
    ids=str,
)
def test_gradients_with_tiles_of_a_bias(dtype, kind, shape, q_shape, k_shape, options):
    q, k, v, do = draw(dtype, q_shape, k_shape, k_shape, q_shape)
    bias = bias_of(kind, shape)
    schedule = (FORWARD, REVERSE, randomly(1))[shape[-1] // 8 % 3]
    made = run(q, k, v, do, schedule, bias=bias, **options)
    precision = Precision.of(q.dtype, tensor_cores=True)
    bound = backward_bound(do, q, k, v, precision=precision, block_kv=64, bias=bias, **options)
    assert max(rho(x, *b).value for x, b in zip(made, bound[:3], strict=True)) <= 1


@pytest.mark.thorough("hidden keys and rows are quick, and what a score change hides")
@emulated
@pytest.mark.parametrize("d", [64, 128])
def test_what_lies_behind_a_bias_of_minus_infinity_changes_no_bit(d):
    q, k, v, do = draw(BRAIN, *[(2, n, d) for n in (70, 136, 136, 70)])
    bias = bias_of(BRAIN, (2, 70, 136))
    saved = attend(q, k, v, bias=bias)
    plain = run(q, k, v, do, bias=bias, saved=saved)
    k[:, 5:9], v[:, 5:9] = np.nan, np.inf
    q[-1, 3], do[-1, 3] = np.nan, np.inf
    other = run(q, k, v, do, FORWARD, bias=bias, saved=saved)
    assert all(same_bits(x, y) for x, y in zip(plain, other, strict=True))


@pytest.mark.parametrize(
    ("d", "bias", "options", "stages"),
    [
        (64, np.zeros((2, 70, 72), HALF), {}, 2),
        (128, np.zeros((1, 72), HALF), {}, 2),
        (160, np.zeros((2, 70, 72), HALF), {}, None),
        (64, np.zeros((2, 70, 72), np.float32), {}, None),
        (64, np.zeros((2, 70, 72), HALF), {"score_mod": scores.softcap(3.0)}, None),
        (64, np.zeros((72, 70), HALF).T, {}, None),
    ],
    ids=["16 bits", "one row", "wide heads", "32 bits", "changed scores", "other strides"],
)
def test_where_tiles_of_a_bias_have_room(d, bias, options, stages):
    q, k = np.zeros((2, 70, d), HALF), np.zeros((2, 72, d), HALF)
    call = validate.call(q, k, k, Options(bias=bias, **options))
    request = request_of(call, target_of("sm_90"), {"q": (q, 3), "k": (k, 3), "v": (k, 3)})
    found = bias_tiles.beside_queries(request, sm90_dkdv.fit_dkdv(d, d))
    assert (None if found is None else found.bias_stages) == stages
    assert found is None or found.shared_memory <= sm90.SHARED_MEMORY


def test_which_calls_take_tiles_of_a_bias():
    h200 = Target(0, "NVIDIA H200", (9, 0), 132, SHARED_MEMORY["sm_90"])
    q = np.zeros((2, 4, 512, 64), BRAIN)
    for bias, kind in ((np.zeros((4, 512, 512), BRAIN), "bias_bf16"), (np.zeros((4, 512, 1)), "")):
        made = route.of_gradients(validate.call(q, q, q, Options(bias=bias)), h200).recipe
        (taken,) = (x for x in made.launches if x.special.kernel == "backward_sm90_dkdv")
        assert ("bias_bf16" in taken.special.name) == (kind != "")
        assert len(taken.maps) == (7 if kind else 6)
        assert taken.maps[-1].name == ("table 0" if kind else "dv")
