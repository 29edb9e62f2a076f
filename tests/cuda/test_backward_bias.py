"""The gradient of a bias by tensor cores, on the CPU: what is particular to it, and its kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cuda_specialisations import BFLOAT16, SHARED_MEMORY, capability
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import FORWARD, REVERSE, randomly
from halves import mostly_thorough
from placement import same_bits

from cupyflash import lookup, masks, scores
from cupyflash.arrays.cuda_device import Target
from cupyflash.expr import tanh
from cupyflash.gpu import route
from cupyflash.gpu.kernels import registry, sm90
from cupyflash.gpu.kernels.spec import RESERVED, Request
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients, Plan
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, backward_bound, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
HALF = np.dtype(np.float16)
HOPPER = Blocks(hopper=True)


def draw(*shapes, dtype=HALF, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def run(call, do, blocks, schedule=REVERSE):
    """Compute dbias on the emulator, into memory that holds NaN; return it and the kernels."""
    emulator = Emulator(blocks, schedule)
    q, v = call.q, call.v
    out, lse = np.empty((*q.shape[:-1], v.shape[-1]), q.dtype), np.empty(q.shape[:-1], np.float32)
    emulator.forward(call, out, lse)
    arrays = (q, call.k, v, call.bias)
    made = Gradients(*(np.full(x.shape, np.nan, x.dtype) for x in arrays))
    emulator.backward(call, do, out, lse, None, made)
    return made.dbias


def bound(call, do, **options):
    precision = Precision.of(call.q.dtype, tensor_cores=True)
    return backward_bound(
        do, call.q, call.k, call.v, precision=precision, block_kv=32, **options
    ).dbias


# Along the axes where a bias has length 1, or none, dS is summed.
SHAPES = {
    "of every pair": (2, 4, 40, 72),
    "of every head": (4, 40, 72),
    "of every entry": (2, 1, 40, 72),
    "of queries and keys": (40, 72),
    "of keys": (2, 4, 1, 72),
    "of queries": (4, 40, 1),
    "of heads": (4, 1, 1),
    "one number": (1, 1),
}
# Warps share keys, or queries, or have all of a tile's keys; 16 and 32 queries of a warp.
TILES = (Blocks(32, 32, 64), Blocks(32, 64, 128), Blocks(16, 32, 32), Blocks(64, 16, 64))


@emulated
@mostly_thorough(
    "name",
    SHAPES,
    quick=("of keys",),
    why="other axes of length 1",
)
def test_sums_over_what_was_broadcast(name):
    number = list(SHAPES).index(name)
    q, do = draw((2, 4, 40, 24), (2, 4, 40, 40))
    k, v = draw((2, 2, 72, 24), (2, 2, 72, 40), seed=1)
    (bias,) = draw(SHAPES[name], seed=2)
    options = {"bias": bias, "mask": masks.causal(offset=3) if number % 2 else None}
    call = validate.call(q, k, v, Options(**options))
    wanted = bound(call, do, **options)
    made = [run(call, do, blocks) for blocks in (TILES[number % 4], HOPPER)]
    assert max(rho(x, *wanted).value for x in made) <= 1
    if wanted.exact.any():
        assert any(x.any() for x in made)


@emulated
@mostly_thorough(
    "name",
    [*SHAPES, "odd sizes", "other strides"],
    quick=("odd sizes",),
    why="other axes of length 1, and strides",
)
def test_a_block_keeps_its_tile_of_the_bias(name):
    # Of 16 bits; what a bias of -inf hides is not finite.
    number = len(SHAPES) if name not in SHAPES else list(SHAPES).index(name)
    lengths = (33, 61) if name == "odd sizes" else (40, 72)
    q, do = draw((2, 4, lengths[0], 24), (2, 4, lengths[0], 40))
    k, v = draw((2, 2, lengths[1], 24), (2, 2, lengths[1], 40), seed=1)
    shape = SHAPES.get(name, (4, *lengths))
    (bias,) = draw(shape, seed=2, dtype=(HALF, BFLOAT16)[number % 2])
    if shape[-1] > 1:
        bias[..., 7:9] = -np.inf
        k[..., 7:9, 3], v[..., 8, :] = np.nan, np.inf
    if name == "other strides":
        bias = np.ascontiguousarray(bias.swapaxes(-1, -2)).swapaxes(-1, -2)
    options = {"bias": bias, "mask": masks.causal(offset=3) if number % 2 else None}
    call = validate.call(q, k, v, Options(**options))
    wanted = bound(call, do, **options)
    for blocks in (TILES[number % 4], HOPPER):
        assert rho(run(call, do, replace(blocks, bias_tiles=True)), *wanted).value <= 1


@pytest.mark.thorough("packed sequences are quick on the CPU, and in the other gradients")
@emulated
@pytest.mark.parametrize("blocks", [TILES[0], HOPPER], ids=["sm80", "sm90"])
@pytest.mark.parametrize("shared", [False, True], ids=["each its own", "shared"])
def test_packed_sequences(blocks, shared):
    offsets = np.array([0, 17, 17, 90]), np.array([0, 70, 75, 150])
    q, do = draw((3, 90, 16), (3, 90, 24), dtype=BFLOAT16)
    k, v = draw((3, 150, 16), (3, 150, 24), dtype=BFLOAT16, seed=1)
    (bias,) = draw((1 if shared else 3, 3, 73, 75), dtype=BFLOAT16, seed=2)
    options = {"mask": masks.window(20, 5)}
    call = validate.varlen_call(q, k, v, *offsets, True, Options(bias=bias, **options))
    made = run(call, do, blocks).astype(np.longdouble)
    total = np.zeros(bias.shape, np.longdouble)
    room = np.zeros(bias.shape, np.longdouble)
    for b in range(3):
        rows, keys = (slice(x[b], x[b + 1]) for x in offsets)
        n, m = rows.stop - rows.start, keys.stop - keys.start
        if not n or not m:
            continue
        place = 0 if shared else b
        own = bias[place, :, :n, :m]
        one = validate.call(q[:, rows], k[:, keys], v[:, keys], Options(bias=own, **options))
        wanted = bound(one, do[:, rows], bias=own, **options)
        total[place, :, :n, :m] += wanted.exact
        room[place, :, :n, :m] += wanted.bound
    assert np.all(abs(made - total) <= room)
    assert np.all(made[room == 0] == 0)
    assert made.any()


@emulated
@mostly_thorough(
    "blocks",
    [TILES[1], HOPPER],
    quick=[TILES[1]],
    why="the edges of Hopper's tiles are quick with what was broadcast",
    ids=["sm80", "sm90"],
)
@mostly_thorough(
    "case",
    ["dropout", "long change", "no columns together", "odd sizes"],
    quick=("odd sizes",),
    why="ways of reading and weights that other kernels share",
)
def test_what_else_takes_part(blocks, case):
    lengths = (33, 61) if case == "odd sizes" else (40, 72)
    width = 13 if case == "odd sizes" else 24
    q, do = draw((2, lengths[0], width), (2, lengths[0], width))
    k, v = draw((2, lengths[1], width), (2, lengths[1], width), seed=1)
    bias = draw((2, *lengths), dtype=np.float32, seed=2)[0]
    options = {"bias": bias}
    if case == "dropout":
        options |= {"dropout": 0.3, "seed": 5}
    if case == "long change":
        slopes = np.array([0.5, 0.25], np.float32)
        options["score_mod"] = scores.score(
            lambda s, b, h, i, j: 3 * tanh(2 * tanh(s / 2) - lookup(slopes)[h] * abs(i - j))
        )
    if case == "no columns together":
        k, v, bias = k[..., ::-1], v[:, ::-1], bias[..., ::-1]
        options["bias"] = bias
    call = validate.call(q, k, v, Options(**options))
    assert rho(run(call, do, blocks), *bound(call, do, **options)).value <= 1


@pytest.mark.thorough("the gradients of q, k and v are quick")
@emulated
@pytest.mark.parametrize("blocks", [TILES[0], HOPPER], ids=["sm80", "sm90"])
def test_hidden_pairs_hide_what_is_not_finite(blocks):
    q, do, k, v = draw((1, 40, 16), (1, 40, 16), (1, 72, 16), (1, 72, 16))
    (bias,) = draw((1, 40, 72), seed=2)
    bias[0, :, 70] = -np.inf
    clean = validate.call(q, k, v, Options(bias=bias, mask=masks.window(8, 2)))
    wanted = run(clean, do, blocks)
    # In no query's window, or hidden by the bias from all that see it.
    k[:, :20], v[:, :20] = np.nan, np.inf
    k[:, 70] = np.nan
    made = run(validate.call(q, k, v, Options(bias=bias, mask=masks.window(8, 2))), do, blocks)
    assert same_bits(made, wanted)
    assert wanted[:, :, 24:70].any()
    assert not wanted[:, :, :24].any()
    assert not wanted[:, :, 70].any()


@pytest.mark.thorough("other orders of the same sums; sums are quick")
@emulated
@pytest.mark.parametrize("blocks", [TILES[3], HOPPER], ids=["sm80", "sm90"])
def test_no_order_of_threads_changes_a_bit(blocks):
    q, do, k, v = draw((3, 2, 40, 16), (3, 2, 40, 16), (3, 2, 72, 16), (3, 2, 72, 16))
    (bias,) = draw((2, 40, 72), seed=2)
    call = validate.call(q, k, v, Options(bias=bias, mask=masks.causal()))
    made = [run(call, do, blocks, order) for order in (FORWARD, REVERSE, randomly(3))]
    assert same_bits(made[0], made[1])
    assert same_bits(made[0], made[2])
    alone = [
        run(validate.call(q[n], k[n], v[n], Options(bias=bias, mask=masks.causal())), do[n], blocks)
        for n in range(3)
    ]
    total = np.sum(np.array(alone, np.float64), axis=0)
    np.testing.assert_allclose(made[0].astype(np.float64), total, rtol=4e-3, atol=4e-3)


# -- which kernel ---------------------------------------------------------------------------------


def kernel(arch, length, plan=None, dtype=HALF, d=64, lacks=""):
    """Return the last kernel of a backward with a bias, and the bytes that it may have."""
    q = np.zeros((2, length, d), dtype)
    call = validate.call(q, q, q, Options(bias=np.zeros((length, length), dtype)))
    gpu = Target(0, arch, capability(arch), 132, SHARED_MEMORY[arch], lacks)
    lse = np.zeros(q.shape[:-1], call.problem.accumulator)
    grads = Gradients(q, q, q, call.bias)
    launches = route.backward(call, gpu, q, q, lse, None, grads, plan).recipe.launches
    return launches[-1].special.kernel


def test_which_kernel_is_launched():
    assert kernel("sm_75", 600) == "backward_bias"
    assert kernel("sm_80", 600) == "backward_sm80_bias"
    assert kernel("sm_120", 600) == "backward_sm80_bias"
    assert kernel("sm_90", 600) == "backward_sm90_bias"
    assert kernel("sm_90", 49, d=32) == "backward_sm80_dkdv_dbias"
    assert kernel("sm_90", 600, lacks="NVRTC is old") == "backward_sm80_bias"
    assert kernel("sm_90", 600, Plan("backward_simt", 32, 32, "for a test")) == "backward_bias"
    assert kernel("sm_90", 600, d=257) == "backward_sm80_bias"
    for dtype in (np.float32, np.float64):
        assert kernel("sm_90", 600, dtype=dtype) == "backward_bias"


@pytest.mark.parametrize("d", [1, 17, 64, 65, 128, 129, 192, 193, 256])
def test_hopper_has_tiles_for_every_head(monkeypatch, d):
    monkeypatch.setattr(sm90, "_slower", lambda *_: None)
    gpu = Target(0, "sm_90", (9, 0), 132, SHARED_MEMORY["sm_90"])
    for d_v in (1, d, 256):
        problem = validate.call(*(np.zeros((1, n), HALF) for n in (d, d, d_v))).problem
        spec, tiles, _ = registry.select("bias", Request(problem, gpu))
        assert spec.name == "backward_sm90_bias"
        blocks = tiles.resident_blocks
        whole = gpu.shared_memory + RESERVED
        assert blocks * (tiles.shared_memory + RESERVED) <= whole


@pytest.mark.parametrize(
    ("bias", "d", "kernel", "stages"),
    [
        (np.zeros((4, 512, 512), BFLOAT16), 64, "backward_sm90_bias", 1),
        (np.zeros((4, 512, 512), HALF).swapaxes(-1, -2), 64, "backward_sm90_bias", 1),
        (np.zeros((4, 512, 512), np.float32), 64, "backward_sm90_bias", 0),
        (np.zeros((4, 512, 512), HALF), 128, "backward_sm90_bias", 0),
        (np.zeros((4, 49, 49), HALF), 48, "backward_sm80_bias", 1),
    ],
    ids=["16 bits", "any strides", "32 bits", "no room", "short rows"],
)
def test_which_blocks_keep_their_tile_of_a_bias(bias, d, kernel, stages):
    h200 = Target(0, "an H200", (9, 0), 132, SHARED_MEMORY["sm_90"])
    q = np.zeros((2, 4, bias.shape[-1], d), BFLOAT16)
    made = route.of_gradients(validate.call(q, q, q, Options(bias=bias)), h200).recipe
    (taken,) = (x for x in made.launches if x.special.kernel == kernel)
    assert taken.special.tiles.bias_stages == stages
