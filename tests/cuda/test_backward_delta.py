"""Blocks of backward_delta: how many threads and rows they have, on which no bit depends."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_specialisations import BFLOAT16, SHARED_MEMORY
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import randomly
from halves import mostly_thorough
from placement import same_bits

from cupyflash.arrays.cuda_device import Target
from cupyflash.gpu import route
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options

H200 = Target(0, "NVIDIA H200", (9, 0), 132, SHARED_MEMORY["sm_90"])
emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))


def tiles(q_shape, packed=False):
    """Return the tiles of delta, and those of the kernel that converts dq, on a GPU of 132 SMs."""
    q = np.broadcast_to(np.zeros((), BFLOAT16), q_shape)
    q = np.lib.stride_tricks.as_strided(
        q, q_shape, (0,) * (len(q_shape) - 2) + (2 * q_shape[-1], 2)
    )
    if packed:
        ends = np.array([0, q_shape[-2]])
        call = validate.varlen_call(q, q, q, ends, ends, True, Options())
    else:
        call = validate.call(q, q, q, Options())
    found = {x.special.kernel: x.special.tiles for x in route.of_gradients(call, H200).steps}
    return found["backward_delta"], found.get("backward_dq_rows")


def threads(q_shape, packed=False):
    return tiles(q_shape, packed)[0].threads


def test_threads_are_few_where_blocks_are_many():
    assert threads((2048, 4, 65, 32)) == threads((1024, 4, 65, 32)) == 64
    assert threads((64, 12, 128, 64)) == 128
    assert threads((1, 8, 128, 64)) == threads((1, 8, 4096, 64)) == 256
    assert threads((12, 4096, 64), packed=True) == 256
    fewest = -(-512 * 132 // 64)
    assert threads((fewest, 1, 128, 16)) == 64
    assert threads((fewest - 1, 1, 128, 16)) == 128


def test_rows_are_few_where_blocks_are_few():
    """Of delta, as many as a block loads at a time, or a half; 32 at least."""
    for shape, rows in [
        ((8, 8, 256, 160), (32, 32)),
        ((1, 8, 4096, 128), (32, 32)),
        ((1, 8, 4096, 64), (64, 32)),
        ((1, 8, 4096, 32), (128, 32)),
        ((2, 8, 4096, 128), (128, 128)),
        ((1, 33, 1024, 128), (128, 128)),  # 512 threads for each SM
        ((1, 32, 1024, 128), (32, 32)),
    ]:
        assert tuple(x.block_q for x in tiles(shape)) == rows, shape
    assert [x.block_q for x in tiles((12, 256, 64), packed=True)] == [128, 128]


@emulated
@mostly_thorough(
    ("dtype", "d_v"),
    [(np.dtype(np.float16), 24), (np.dtype(np.float64), 80), (BFLOAT16, 256), (BFLOAT16, 7)],
    quick=[(np.dtype(np.float16), 24)],
    why="other widths of a row, of which lanes have other pieces",
    ids=str,
)
def test_no_bit_depends_on_the_threads_and_rows(dtype, d_v):
    rng = np.random.default_rng(0)
    shapes = (2, 4, 150, 16), (2, 4, 30, 16), (2, 4, 30, d_v), (2, 4, 150, d_v)
    q, k, v, do = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    call = validate.call(q, k, v, Options())
    found, counts = [], []

    def runs(special):
        if special.spec.name == "backward_delta":
            counts.append(special.tiles.threads)
        return True

    for multiprocessors in (1, 3, 100):
        blocks = Blocks(32, 64, 64, multiprocessors=multiprocessors)
        emulator = Emulator(blocks, randomly(multiprocessors), runs=runs)
        out, lse = np.empty(do.shape, dtype), np.empty(do.shape[:-1], call.problem.accumulator)
        emulator.forward(call, out, lse)
        made = Gradients(*(np.full(x.shape, np.nan, x.dtype) for x in (q, k, v)), None, None)
        emulator.backward(call, do, out, lse, None, made, deterministic=True)
        found.append(made)
    assert list(dict.fromkeys(counts)) == [64, 128, 256]
    for gradients in found[1:]:
        assert all(map(same_bits, gradients[:3], found[0][:3]))
        assert np.isfinite(gradients.dq.astype(float)).all()
