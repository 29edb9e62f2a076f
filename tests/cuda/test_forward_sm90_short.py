"""The forward by warpgroups where the keys of a row are one tile, or few that fit, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_specialisations import SHARED_MEMORY, capability
from emulator.machine import FORWARD, REVERSE, randomly
from halves import mostly_thorough
from placement import same_bits
from warpgroup_calls import TYPES, draw, emulated, run, within_the_bound

from cupyflash import masks, scores
from cupyflash.arrays.cuda_device import Target
from cupyflash.gpu import route
from cupyflash.gpu.kernels import grid, sm90
from cupyflash.gpu.kernels.spec import RESERVED, row_bytes
from cupyflash.problem import validate
from cupyflash.problem.options import Options

H200 = Target(0, "sm_90", capability("sm_90"), 132, SHARED_MEMORY["sm_90"])
BIAS = np.random.default_rng(0).standard_normal((4, 150, 150)).astype(TYPES[1])
BIAS[1, 3] = BIAS[2, :, 5] = BIAS[3, :, 64:128] = -np.inf
LENGTHS = masks.lengths(np.array([7, 64, 0], np.int32))


@emulated
@mostly_thorough(
    ("tiles", "shapes", "options"),
    [
        ((128, 208, 1), ((2, 3, 197, 64), (2, 3, 197, 64)), {}),
        ((64, 80, 3), ((2, 4, 200, 64), (2, 2, 77, 64)), {}),
        ((64, 80, 3), ((2, 2, 70, 64), (2, 1, 77, 64)), {"dropout": 0.3, "seed": 3}),
        ((64, 80, 3), ((1, 2, 70, 64), (1, 2, 77, 64)), {"scale": -0.3}),
        ((128, 80, 1), ((3, 200, 40), (3, 77, 40)), {}),
        ((64, 64, 3), ((3, 3, 64, 32), (3, 3, 64, 32)), {"mask": LENGTHS}),
        ((64, 64, 3), ((2, 2, 5, 64), (2, 2, 1, 64)), {}),
        ((64, 64, 3), ((2, 2, 5, 64), (2, 2, 0, 64)), {}),
        ((128, 128, 1), ((1, 4, 128, 128), (1, 2, 128, 128)), {"mask": masks.causal()}),
        ((64, 128, 2), ((1, 4, 200, 64), (1, 2, 128, 64)), {"mask": masks.causal()}),
        ((192, 80, 1), ((2, 2, 250, 40), (2, 1, 77, 40)), {}),
        ((64, 64, 3), ((3, 4, 49, 32), (3, 4, 49, 32)), {"bias": BIAS[:, :49, :49]}),
        ((64, 64, 3), ((2, 4, 150, 32), (2, 4, 150, 32)), {"bias": BIAS}),
        ((64, 128, 2), ((1, 4, 150, 64), (1, 4, 150, 64)), {"bias": BIAS, "mask": masks.causal()}),
        ((128, 144, 1), ((2, 257, 80), (2, 257, 80)), {}),
        ((128, 144, 1), ((2, 130, 72), (2, 257, 72)), {}),
        ((128, 64, 1), ((1, 130, 160), (1, 256, 160)), {}),
        ((128, 128, 1), ((1, 70, 96), (1, 200, 96)), {"mask": masks.causal()}),
    ],
    quick=lambda case: case[0] in ((64, 80, 3), (64, 64, 3)),
    why="other widths; the quick ones keep keys, and have none, and masks",
    ids=str,
)
@pytest.mark.parametrize("multiprocessors", [1, 2])
def test_tiles_by_the_length_of_keys(tiles, shapes, options, multiprocessors):
    dtype = TYPES[tiles[1] % 3 % 2]
    q, k, v = draw(dtype, *shapes, shapes[1])
    schedule = (FORWARD, REVERSE, randomly(1))[shapes[0][-2] % 3]
    found = run(q, k, v, schedule, multiprocessors=multiprocessors, warpgroups=tiles, **options)
    within_the_bound(q, k, v, *found[:2], **options)


@emulated
def test_a_head_alone_has_the_same_bits():
    q, k, v = draw(TYPES[1], (3, 2, 150, 64), *[(3, 2, 77, 64)] * 2)
    out, lse, _ = run(q, k, v, warpgroups=(64, 80, 3))
    for b in range(3):
        alone = run(q[b, :1], k[b, :1], v[b, :1], FORWARD, warpgroups=(64, 80, 3))
        assert same_bits(alone[0], out[b, :1])
        assert same_bits(alone[1], lse[b, :1])


@emulated
@pytest.mark.parametrize("options", [{}, {"mask": LENGTHS}], ids=["plain", "lengths"])
def test_values_that_are_not_finite(options):
    # Of v, so that its keys are checked, and repaired in shared memory where they take no part.
    q, k, v = draw(TYPES[1], (3, 2, 150, 64), *[(3, 2, 64, 64)] * 2)
    v[0, 0, 3, 1], v[0, 1, 20, 5], v[2, 0, 0, 0] = np.nan, np.inf, np.nan
    out, lse, _ = run(q, k, v, multiprocessors=1, warpgroups=(64, 64, 3), **options)
    assert np.isnan(out[0, 0, :, 1].astype(np.float32)).all()
    assert not np.isnan(out[0, 0, :, 2:].astype(np.float32)).any()
    hidden = bool(options)
    assert np.isfinite(out[0, 1, :, 5].astype(np.float32)).all() == hidden
    assert (out[2].astype(np.float32) == 0).all() == hidden
    assert np.isneginf(lse[2]).all() == hidden


@emulated
@mostly_thorough(
    ("name", "d"),
    [("causal", 128), ("plain", 128), ("causal", 80)],
    quick=[("causal", 128)],
    why="another mask and head, a build each",
)
def test_wide_heads_have_two_stages_of_queries(name, d):
    """Where a work tile is one of scores, and a block has several work tiles."""
    options = {"mask": masks.causal()} if name == "causal" else {}
    q, k, v = draw(TYPES[1], (2, 4, 128, d), *[(2, 2, 128, d)] * 2)
    tiles = sm90.forward_tiles(128, 128, d, d, True, 1, True)
    rows = row_bytes(d)
    assert tiles.shared_memory > 3 * 128 * rows + 4 * 128 * rows
    out, lse, _ = run(q, k, v, multiprocessors=1, warpgroups=(128, 128, 1), **options)
    within_the_bound(q, k, v, out, lse, **options)


SHORT = np.array([0, 64, 64, 65, 100, 164]), np.array([0, 64, 66, 66, 100, 150])
OF_PACKED = {
    "plain": {},
    "causal": {"mask": masks.causal(), "dropout": 0.2, "seed": 3},
    "window": {"mask": masks.window(9, 4), "scale": -0.1},
}


@emulated
@mostly_thorough(
    ("name", "d", "tiles"),
    [("plain", 64, (64, 64, 3)), ("causal", 128, (64, 64, 2)), ("window", 40, (192, 80, 1))],
    quick=[("causal", 128, (64, 64, 2))],
    why="other heads and tiles, and no mask",
)
def test_short_packed_sequences_have_the_same_bits_in_small_tiles(name, d, tiles, monkeypatch):
    dtype, options = TYPES[d // 128], OF_PACKED[name]
    q, k, v = draw(dtype, (2, 464, d), *[(1, 450, d)] * 2)
    q[:, 164:], k[:, 150:] = 1, np.nan  # of another sequence, which has more keys than a tile
    beside = tuple(np.append(x, n) for x, n in zip(SHORT, (464, 450), strict=True))
    usual = run(q, k, v, offsets=beside, **options)
    monkeypatch.setattr(grid, "TURNS", 1)
    short = q[:, :164], k[:, :150], v[:, :150]
    for multiprocessors, schedule in ((1, FORWARD), (2, randomly(1))):
        how = {"warpgroups": tiles, "multiprocessors": multiprocessors}
        out, lse, _ = run(*short, schedule, offsets=SHORT, **how, **options)
        within_the_bound(*short, out, lse, SHORT, **options)
        assert same_bits(usual[0][:, :164], out)
        assert same_bits(usual[1][:, :164], lse)


# -- which tiles are chosen -----------------------------------------------------------------------


def plan_of(len_q, len_k, d, **options):
    q, k = (np.zeros((2, n, d), np.float16) for n in (len_q, len_k))
    return route.of(validate.call(q, k, k, Options(**options)), H200)


def test_a_short_row_is_one_tile():
    for len_q, len_k, d in ((197, 197, 64), (4096, 77, 40), (128, 128, 128), (64, 64, 32)):
        route = plan_of(len_q, len_k, d)
        tiles = route.steps[-1].special.tiles
        assert tiles.one_tile
        assert len_k <= tiles.block_kv < len_k + 32
    bias = np.zeros((49, 49), np.float16)
    assert plan_of(49, 49, 32, bias=bias).steps[-1].special.tiles.one_tile
    assert plan_of(257, 257, 80).plan.block_kv == 144
    assert not plan_of(1024, 1024, 64).steps[-1].special.tiles.one_tile


def test_the_choice_does_not_depend_on_the_batch():
    for batch in (1, 7, 1000):
        q = np.broadcast_to(np.zeros((197, 64), np.float16), (batch, 197, 64))
        assert route.of(validate.call(q, q, q), H200).plan.block_kv == 208


def packed_tiles(*lengths, d=128, **options):
    ends = np.r_[0, np.cumsum(lengths)]
    q = np.zeros((2, ends[-1], d), np.float16)
    route_of = route.of(validate.varlen_call(q, q, q, ends, ends, True, Options(**options)), H200)
    return route_of.steps[-1].special.tiles


def test_short_packed_sequences_have_small_tiles():
    usual = packed_tiles(300, mask=masks.causal())
    assert (usual.block_q, usual.block_kv, usual.one_tile) == (128, 128, False)
    few = packed_tiles(64, 20, 0, 64, mask=masks.causal())
    assert (few.block_q, few.block_kv, few.resident_blocks, few.one_tile) == (64, 64, 2, True)
    assert packed_tiles(64, 20, 129, mask=masks.causal()) == usual
    assert packed_tiles(176, 100).one_tile  # without a mask, tiles have more keys
    assert packed_tiles(60, 60, d=64).resident_blocks == 3
    assert not packed_tiles(40, 7, d=512).one_tile
    assert not packed_tiles(60, 60, score_mod=scores.softcap(3.0)).one_tile


def test_the_kernel_of_packed_sequences_does_not_depend_on_lengths():
    for d in (8, 64, 128, 256):
        for lengths in ((1,), (16, 3), (64, 64), (5000,), (1, 5000)):
            ends = np.r_[0, np.cumsum(lengths)]
            q = np.zeros((2, ends[-1], d), np.float16)
            call = validate.varlen_call(q, q, q, ends, ends, True, Options())
            assert route.of(call, H200).steps[-1].kernel == "forward_sm90"


def test_the_tiles_of_short_rows_fit():
    for d in range(8, 257, 8):
        for d_v in (8, d, 256):
            for len_k in (1, 49, 77, 100, 128, 197, 257, 600):
                for registers in ("plain, few keys", "masks", "bias"):
                    has_bias = registers == "bias"
                    tiles = sm90.choose_forward(d, d_v, registers, has_bias, 300, len_k)
                    whole = (tiles.shared_memory + RESERVED) * tiles.resident_blocks
                    assert whole <= SHARED_MEMORY["sm_90"] + RESERVED
                    assert not tiles.one_tile or len_k <= tiles.block_kv
                    assert registers == "plain, few keys" or tiles.block_kv <= 128
