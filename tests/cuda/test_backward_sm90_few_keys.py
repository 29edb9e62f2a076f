"""Gradients of rows of at most 64 keys by blocks of one consumer of backward_sm90_dkdv.

Such a block sums up as the first consumer of two would, to whose sums missing keys add zeros: so
its results have the bits of a block of 128 keys, which longer sequences beside it need.
"""

from __future__ import annotations

import numpy as np
import pytest
from cuda_specialisations import BFLOAT16
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import REVERSE, randomly
from halves import mostly_thorough

from cupyflash import lookup, masks, scores
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, backward_bound, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
HALF = np.dtype(np.float16)
ALONE, TWO = (Blocks(32, 64, 64, hopper=True, few_keys=few) for few in (True, False))


def draw(*shapes, dtype=HALF, seed=0, grows=0.0):
    """Return arrays; numbers of later rows are up to 2^grows times as large."""
    rng = np.random.default_rng(seed)
    found = []
    for shape in shapes:
        factor = 2.0 ** (grows * np.arange(shape[-2]) / shape[-2])
        found.append((rng.standard_normal(shape) * factor[:, None]).astype(dtype))
    return found


def run(call, do, blocks, schedule=REVERSE, deterministic=False, workspace_keys=None):
    """Return all gradients, which were written to memory that held NaN."""
    del workspace_keys
    emulator = Emulator(blocks, schedule)
    q, k, v = call.q, call.k, call.v
    out = np.empty((*call.problem.array_lead, *q.shape[-3:-1], v.shape[-1]), q.dtype)
    lse = np.empty(out.shape[:-1], call.problem.accumulator)
    emulator.forward(call, out, lse)
    made = Gradients(*(np.full(x.shape, np.nan, x.dtype) for x in (q, k, v)), None, None)
    emulator.backward(call, do, out, lse, None, made, deterministic=deterministic)
    return made


SLOPES = np.array([0.5, 0.25, 0.1, 0.05], np.float32)
PACKED = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.window(9, 4)},
    "segments": {"mask": masks.segments(np.arange(280) // 20, np.arange(180) // 20)},
    "dropout": {"dropout": 0.3, "seed": 5},
    "causal, dropout": {"mask": masks.causal(), "dropout": 0.3, "seed": 5},
    "score": {"score_mod": scores.score(lambda s, b, h, i, j: s - lookup(SLOPES)[h] * abs(i - j))},
}
# Sequences without queries, without keys and with few of them, and with several tiles of queries.
ENDS = (
    np.array([0, 70, 70, 134, 254, 255, 280], np.int64),
    np.array([0, 33, 40, 104, 105, 169, 180], np.int64),
)
SIZES = {"one slab": (40, 24), "two slabs": (104, 128)}


def packed(case, sizes, dtype, ends=ENDS, grows=0.0):
    """Return a call of packed sequences, and do."""
    d, d_v = sizes
    q, do = draw((4, ends[0][-1], d), (4, ends[0][-1], d_v), dtype=dtype, grows=grows)
    k, v = draw((2, ends[1][-1], d), (2, ends[1][-1], d_v), dtype=dtype, seed=1)
    return validate.varlen_call(q, k, v, *ends, True, Options(**PACKED[case])), do


@emulated
@mostly_thorough(
    ("case", "sizes", "dtype"),
    [(case, sizes, dtype) for case in PACKED for sizes in SIZES for dtype in (HALF, BFLOAT16)],
    quick=[
        ("causal", "one slab", HALF),
        ("causal", "two slabs", BFLOAT16),
        ("plain", "two slabs", HALF),
    ],
    why="masks, scores and heads that other gradients share",
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_bits_are_those_of_blocks_of_two_consumers(case, sizes, dtype, deterministic):
    call, do = packed(case, SIZES[sizes], dtype)
    made, usual = (run(call, do, blocks, randomly(1), deterministic) for blocks in (ALONE, TWO))
    for name in ("dq", "dk", "dv"):
        assert np.array_equal(getattr(made, name), getattr(usual, name))
        assert np.isfinite(getattr(made, name).astype(np.float32)).all()


@emulated
@pytest.mark.thorough("one type of a few, beside longer sums")
def test_scales_of_float16_that_change_from_tile_to_tile_are_those_of_two_consumers():
    ends = np.array([0, 400]), np.array([0, 60])
    call, do = packed("plain", (128, 128), HALF, ends, grows=14.0)
    made, usual = (run(call, do, blocks) for blocks in (ALONE, TWO))
    for name in ("dq", "dk", "dv"):
        assert np.array_equal(getattr(made, name), getattr(usual, name))
