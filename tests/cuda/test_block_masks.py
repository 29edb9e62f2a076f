"""Masks of which a query sees a range of each block of keys, on the emulator: the same pairs."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import REVERSE
from halves import mostly_thorough
from placement import same_bits

from cupyflash import masks
from cupyflash.problem import validate
from cupyflash.problem.options import Options

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

LEN_Q, LEN_K = 150, 290
HALF, BRAIN, SINGLE = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


def image(width, reach):
    return masks.mask(
        lambda b, h, i, j: (
            (abs(i // width - j // width) <= reach) & (abs(i % width - j % width) <= reach)
        )
    )


MASKS = {
    "image 64": image(64, 3),
    "image 56": image(56, 2),
    "chunks": masks.mask(lambda b, h, i, j: (i // 32 == j // 32) & (j <= i)),
    "strips": masks.mask(lambda b, h, i, j: (j % 96 >= i % 7) & ((i >> 6) == (j >> 6)) & (h == 0)),
    "band": masks.mask(lambda b, h, i, j: abs(i - j + 40) <= 9),
    "far": masks.mask(lambda b, h, i, j: (j % 64 <= i % 64 - 40) & (j // 64 <= i)),
}
DEVICES = {
    "sm90": (BRAIN, Blocks(hopper=True, warpgroups=(128, 128, 1)), {}),
    "sm90 narrow": (HALF, Blocks(hopper=True, warpgroups=(64, 64, 1)), {}),
    "sm90 112": (BRAIN, Blocks(hopper=True, warpgroups=(64, 112, 1)), {}),
    "sm80": (HALF, Blocks(), {}),
    "sm80 wide": (SINGLE, Blocks(), {"precision": "tf32x3"}),
}


def forward(device, mask):
    dtype, blocks, options = DEVICES[device]
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 2, LEN_Q, 24)).astype(dtype)
    k, v = (rng.standard_normal((1, 2, LEN_K, 24)).astype(dtype) for _ in "kv")
    call = validate.call(q, k, v, Options(mask=mask, **options))
    out, lse = np.full_like(q, np.nan), np.full(q.shape[:-1], np.nan, np.float32)
    Emulator(blocks, REVERSE).forward(call, out, lse)
    return out, lse


@mostly_thorough(
    ("device", "name"),
    [(device, name) for device in DEVICES for name in MASKS],
    quick=[("sm90", "image 64"), ("sm80", "image 56")],
    why="more masks and tiles",
)
def test_bits_are_those_of_the_dense_mask(device, name):
    mask = MASKS[name]
    dense = masks.dense(mask.to_array(1, 2, LEN_Q, LEN_K))
    for one, other in zip(forward(device, mask), forward(device, dense), strict=True):
        assert np.isfinite(one.astype(np.float32)[:, 0]).any()
        assert same_bits(one, other)
