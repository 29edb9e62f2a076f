"""Which kernels and tiles serve few queries and many keys."""

from __future__ import annotations

import numpy as np
import pytest
from caches import results
from cuda_specialisations import target_of

from cupyflash.gpu import route
from cupyflash.gpu.kernels import sm80
from cupyflash.gpu.kernels.spec import Request
from cupyflash.problem import cached

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
        (256, "sm_90", 4, 1, [True, True]),
        (257, "sm_90", 4, 2, [True, False]),
        (256, "sm_80", 6, 1, [False, False]),
    ],
)
def test_grids_of_few_leaves_share_an_sm(keys, arch, warps, blocks, beside):
    """And an SM has two blocks of more leaves, but one of codes."""
    q, k, v = draw((1, 4, 1, 64), *[(1, 1, keys, 64)] * 2)
    call = cached.call(q, k, v, keys)
    launches = route.forward(call, target_of(arch), *results(call)).recipe.launches
    tiles = launches[0].special.tiles
    assert (tiles.threads // 32, tiles.resident_blocks) == (warps, blocks)
    assert [x.special.tiles.beside for x in launches] == beside
    few = keys == 256 and arch == "sm_90"
    of_codes = sm80.decode_tiles(Request(call.problem, target_of(arch)), few, codes=True)
    assert of_codes is not None
    assert of_codes.threads // 32 == (8 if blocks == 2 else warps)
