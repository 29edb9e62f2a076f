"""The choice of tiles: what it promises of a multiprocessor's memory, registers and threads."""

from __future__ import annotations

import pytest
from cuda_specialisations import SHARED_MEMORY

from cupyflash.gpu.kernels.simt import FEWEST_THREADS, KERNELS, LEAN, fit
from cupyflash.gpu.kernels.spec import REGISTERS, RESERVED

TYPES = {"float16": (4, 2), "float32": (4, 4), "float64": (8, 8)}
SIZES = (1, 3, 32, 40, 64, 96, 128, 192, 256, 400, 512)


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_resident_blocks_fit_together(kernel, dtype, arch):
    limit = SHARED_MEMORY[arch]
    for d in SIZES:
        for spare in (0, 2):
            tiles = fit(kernel, *TYPES[dtype], d, d, spare, limit)
            assert tiles is not None
            assert 1 <= tiles.resident_blocks <= REGISTERS // (tiles.threads * 128)
            taken = tiles.resident_blocks * (tiles.shared_memory + RESERVED)
            assert taken <= limit + RESERVED


@pytest.mark.parametrize("arch", [x for x in SHARED_MEMORY if x != "sm_75"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_multiprocessor_is_busy(kernel, dtype, arch):
    for d in SIZES[:-2]:
        tiles = fit(kernel, *TYPES[dtype], d, d, 0, SHARED_MEMORY[arch])
        assert tiles is not None
        # Eight tiles of rows in float64 leave room for one block of 128 threads.
        fewest = 128 if kernel in LEAN and dtype == "float64" else FEWEST_THREADS
        assert tiles.resident_blocks * tiles.threads >= fewest, (d, tiles)


def test_the_largest_tiles_are_those_of_the_table():
    limit = SHARED_MEMORY["sm_90"]

    def chosen(kernel, dtype, d, d_v=None):
        tiles = fit(kernel, *TYPES[dtype], d, d if d_v is None else d_v, 0, limit)
        assert tiles is not None
        return tiles.block_q, tiles.block_kv, tiles.threads

    assert chosen("forward_simt", "float32", 32) == (128, 64, 128)
    assert chosen("backward_simt_dkdv", "float16", 16) == (64, 128, 128)
    assert chosen("backward_bias", "float32", 32) == (128, 64, 128)
    assert chosen("reduce_keys", "float32", 32, 0) == (64, 128, 128)
    assert chosen("forward_simt", "float32", 128) == (64, 128, 128)
    assert chosen("backward_simt_dkdv", "float32", 64) == (128, 64, 128)
    assert chosen("backward_simt_dkdv", "float16", 128) == (64, 128, 256)
    assert chosen("backward_simt_dq", "float32", 64) == (64, 64, 128)
    assert chosen("backward_simt_dq", "float32", 128) == (128, 64, 256)
    assert chosen("forward_simt", "float64", 128) == (32, 64, 128)


def test_given_blocks_are_taken_or_none():
    tiles = fit("backward_simt_dkdv", 4, 4, 64, 64, 0, SHARED_MEMORY["sm_90"], (32, 64))
    assert tiles is not None
    assert (tiles.block_q, tiles.block_kv) == (32, 64)
    assert fit("forward_simt", 4, 4, 64, 64, 0, SHARED_MEMORY["sm_90"], (512, 512)) is None
