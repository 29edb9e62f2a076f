"""Which kernels and tiles serve few queries and many keys."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from caches import results
from cuda_specialisations import target_of

from cupyflash.gpu import route
from cupyflash.gpu.kernels import sm80
from cupyflash.gpu.kernels.spec import Request
from cupyflash.problem import cached
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


def test_packed_queries_are_not_whole():
    """All numbers of them have the same workspace."""
    q, k, v = draw((4, 3, 64), *[(2, 2, 512, 64)] * 2)
    target = dataclasses.replace(target_of("sm_90"), multiprocessors=132)
    call = cached.call(q, k, v, 9, None, np.array([0, 1, 3]), Options())
    assert [step.part for step in route.of(call, target).steps] == ["decode", "join"]
