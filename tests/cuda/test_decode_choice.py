"""Which kernels and tiles serve few queries and many keys."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from caches import results
from cuda_specialisations import target_of

from cupyflash import masks
from cupyflash.gpu import decode_route, route
from cupyflash.gpu.kernels import sm80
from cupyflash.gpu.kernels.spec import Request
from cupyflash.problem import cached, validate
from cupyflash.problem.codes import CacheCodes
from cupyflash.problem.options import Options

F16 = np.dtype(np.float16)


def draw(*shapes):
    rng = np.random.default_rng(16)
    return [rng.standard_normal(shape).astype(F16) for shape in shapes]


@pytest.mark.parametrize("name", ["q", "k", "v", "none"])
@pytest.mark.parametrize("how", ["begins later", "rows apart", "columns apart"])
def test_only_aligned_arrays_have_copies_without_other_code(name, how):
    arrays = dict(zip("qkv", draw((2, 4, 3, 64), *[(2, 2, 200, 64)] * 2), strict=True))
    if name != "none":
        x = arrays[name]
        room = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), F16)
        moved = {
            "begins later": room[..., 4:68],
            "rows apart": np.zeros((*x.shape[:-1], 68), F16)[..., :64],
            "columns apart": room[..., ::2],
        }[how]
        moved[...] = x
        arrays[name] = moved
    call = cached.call(*arrays.values(), 190)
    launches = route.forward(call, target_of("sm_90"), *results(call)).recipe.launches
    assert [x.special.aligned for x in launches] == [name == "none", False]
    if name == "none":
        assert "aligned" in launches[0].special.name


@pytest.mark.parametrize(
    ("keys", "arch", "warps", "blocks", "beside"),
    [
        (2048, "sm_90", 4, 1, [True, True]),
        (2049, "sm_90", 4, 2, [True, False]),
        (2048, "sm_80", 6, 1, [False, False]),
    ],
)
def test_grids_of_few_leaves_share_an_sm(keys, arch, warps, blocks, beside):
    """And an SM has two blocks of more leaves, but one of codes."""
    q, k, v = draw((1, 4, 1, 64), *[(1, 1, keys, 64)] * 2)
    call = cached.call(q, k, v, keys)
    target = dataclasses.replace(target_of(arch), multiprocessors=8)
    launches = route.forward(call, target, *results(call)).recipe.launches
    tiles = launches[0].special.tiles
    assert (tiles.threads // 32, tiles.resident_blocks) == (warps, blocks)
    assert [x.special.tiles.beside for x in launches] == beside
    few = keys == 2048 and arch == "sm_90"
    of_codes = sm80.decode_tiles(Request(call.problem, target_of(arch)), few, codes=True)
    assert of_codes is not None
    assert of_codes.threads // 32 == (8 if blocks == 2 else warps)


@pytest.mark.parametrize(
    ("batch", "keys", "d", "arch", "whole"),
    [
        (3, 512, 64, "sm_90", True),
        (4, 512, 64, "sm_90", False),  # more tasks than SMs
        (3, 513, 64, "sm_90", False),  # twice as many turns of a warp as if SMs shared the keys
        (6, 1024, 64, "sm_90", True),
        (6, 1025, 64, "sm_90", False),  # too many bytes
        (3, 512, 128, "sm_90", False),
        (6, 512, 128, "sm_90", True),
        (6, 513, 128, "sm_90", False),
        (6, 512, 128, "sm_80", True),
        (3, 512, 64, "sm_86", False),  # no room for eight warps
    ],
)
def test_few_small_tasks_are_whole(batch, keys, d, arch, whole):
    """Then one kernel serves the call, without workspace; lengths and masks have no part in it."""
    target = dataclasses.replace(target_of(arch), multiprocessors=12 if batch != 4 else 7)
    q, k, v = draw((batch, 4, 3, d), *[(batch, 2, keys, d)] * 2)
    for lengths in (1, keys):
        made = route.of(cached.call(q, k, v, lengths), target)
        parts = ["decode"] if whole else ["decode", "join"]
        assert [step.part for step in made.steps] == parts
        assert (made.scratch == 0) == whole
        if whole:
            (step,) = made.steps
            assert (step.grid, step.special.tiles.threads) == (2 * batch, 256)
            assert "whole" in step.special.name


@pytest.mark.parametrize(
    ("batch", "keys", "d", "arch", "tasks", "threads"),
    [
        # Of 12 SMs, with room for 96 warps.
        (24, 1024, 128, "sm_90", 2, 128),
        (22, 1024, 128, "sm_90", 2, 128),
        (21, 1024, 128, "sm_90", 0, 128),  # more than a tenth of the warps would have no node
        (25, 1024, 128, "sm_90", 0, 128),  # more tasks than SMs have room for at a time
        (24, 960, 128, "sm_90", 2, 128),
        (24, 1025, 128, "sm_90", 0, 128),  # three nodes: four warps of a task
        (48, 512, 64, "sm_90", 4, 128),
        (12, 2048, 64, "sm_90", 1, 128),
        (12, 1536, 64, "sm_90", 0, 128),  # a fourth of the warps would have no node
        (6, 4096, 64, "sm_90", 1, 256),
        (6, 4097, 64, "sm_90", 0, 128),  # more nodes than warps
        (24, 1024, 128, "sm_80", 0, 128),
        (24, 1024, 136, "sm_90", 0, 192),  # a node is not in registers
    ],
)
def test_tasks_whose_nodes_fill_all_sms_are_whole(batch, keys, d, arch, tasks, threads):
    """A warp has a node; lengths and masks have no part in it."""
    target = dataclasses.replace(target_of(arch), multiprocessors=12)
    q, k, v = draw((batch, 4, 3, d), *[(batch, 2, keys, d)] * 2)
    for lengths in (1, keys):
        for mask in (None, masks.window(5, 0)):
            made = route.of(cached.call(q, k, v, lengths, options=Options(mask=mask)), target)
            step, tiles = made.steps[0], made.steps[0].special.tiles
            assert [x.part for x in made.steps] == ["decode", "join"][: 1 if tasks else 2]
            assert (made.scratch == 0) == (tasks > 0)
            assert (tiles.whole, tiles.whole_tasks, tiles.threads) == (tasks > 0, tasks, threads)
            if tasks:
                assert step.grid == -(-2 * batch // tasks)
                assert f"tasks{tasks}" in step.special.name


def test_tasks_of_nodes_are_numbers_of_each_entry():
    """Codes take more work, and entries may share keys."""
    target = dataclasses.replace(target_of("sm_90"), multiprocessors=12)
    q, k, v = draw((24, 4, 1, 64), *[(24, 2, 1024, 64)] * 2)
    codes, scale = k.astype(np.int8), np.ones((24, 2, 1024, 1), np.float32)
    of_codes = cached.call(q, codes, codes, 900, given=CacheCodes(scale, scale, "int8"))
    for call, whole in [
        (cached.call(q, k, v, 900), True),
        (cached.call(q, k, v, 900, shared=600), False),
        (of_codes, False),
    ]:
        (step, *others) = route.of(call, target).steps
        assert step.special.tiles.whole == whole
        assert bool(others) != whole


def test_packed_queries_are_not_whole():
    """All numbers of them have the same workspace."""
    q, k, v = draw((4, 3, 64), *[(2, 2, 512, 64)] * 2)
    target = dataclasses.replace(target_of("sm_90"), multiprocessors=132)
    call = cached.call(q, k, v, 9, None, np.array([0, 1, 3]), Options())
    assert [step.part for step in route.of(call, target).steps] == ["decode", "join"]


ONE, TWO = ((3, 4, n, 64) for n in (1, 2))
MASKS = {
    "causal": (masks.causal(), True),
    "first": (masks.causal(0), False),
    "offsets": (masks.causal(np.array([700, 800, 900])), False),
    "window": (masks.window(7, 0), False),
    "segments": (masks.segments(np.zeros(1, int), np.zeros(1024, int)), False),
    "both": (masks.causal() & masks.window(7, None), False),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kind", ["cached", "dense"])
@pytest.mark.parametrize("shape", [ONE, TWO], ids=["one", "two"])
def test_one_query_has_no_causal_mask(name, kind, shape):
    """It sees every key. Others keep their masks, and other masks stay."""
    q, k, v = draw(shape, *[(3, 2, 1024, 64)] * 2)
    mask, drops = MASKS[name]
    options = Options(mask=mask)
    if kind == "cached":
        call = cached.call(q, k, v, np.array([700, 800, 900]), options=options)
    else:
        call = validate.call(q, k, v, options)
    made = route.of(call, target_of("sm_90"))
    assert made.steps[0].part == "decode"
    functions = made.steps[0].special.functions
    assert functions.has_mask == (not drops or shape == TWO)
    assert call.mask is not None  # the call is not changed


def test_packed_queries_keep_their_mask():
    """Only offsets say how many there are, and all numbers of them have the same kernels."""
    q, k, v = draw((4, 3, 64), *[(3, 2, 1024, 64)] * 2)
    options, offsets = Options(mask=masks.causal()), np.arange(4)
    call = cached.call(q, k, v, 900, None, offsets, options)
    assert route.of(call, target_of("sm_90")).steps[0].special.functions.has_mask


def test_a_piece_of_a_longer_sequence_keeps_its_mask():
    q, k, v = draw(ONE, *[(3, 2, 1024, 64)] * 2)
    call = validate.call(q, k, v, Options(mask=masks.causal()))
    problem = dataclasses.replace(call.problem, whole=call.problem)
    piece = dataclasses.replace(call, problem=problem)
    assert decode_route._without_full_mask(piece) is piece


def test_rows_of_many_heads_keep_their_mask():
    """A forward kernel serves them, with tiles that a mask may change."""
    q, k, v = draw((1, 65, 1, 64), *[(1, 1, 1024, 64)] * 2)
    call = cached.call(q, k, v, 900, options=Options(mask=masks.causal()))
    assert decode_route._without_full_mask(call) is call
