"""Calls that `forward_sm90` or, of float32, `forward_sm90_tf32` computes on the emulator."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import REVERSE
from halves import mostly_thorough

from cupyflash.costs.figures.survey import survey
from cupyflash.expr.key_range import key_range
from cupyflash.gpu.kernels.registry import Choice
from cupyflash.gpu.kernels.spec import Request
from cupyflash.problem import validate
from cupyflash.problem.bound_exprs import trees
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, forward_bound, forward_bound_varlen, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
TYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
EACH_TYPE = mostly_thorough(
    "dtype",
    TYPES,
    quick=[TYPES[1]],
    why="float16 differs from bfloat16 in its conversions",
    ids=str,
)


@dataclass(frozen=True)
class Warpgroups(Blocks):
    """Calls go to `forward_sm90`, of float32 to `forward_sm90_tf32`, or nowhere."""

    hopper: bool = True

    def choose(self, part: str, request: Request) -> Choice:
        """Return the kernel of the forward, and its tiles."""
        choice = super().choose(part, request)
        wanted = "forward_sm90_tf32" if request.problem.dtype == np.float32 else "forward_sm90"
        assert choice.spec.name == wanted
        return choice


def draw(dtype, *shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def precision_of(dtype):
    return "tf32x3" if dtype == np.float32 else None


def run(
    q,
    k,
    v,
    schedule=REVERSE,
    out=None,
    read=build.read,
    offsets=None,
    multiprocessors=2,
    warpgroups=None,
    bias_tiles=False,
    **options,
):
    """Compute out and lse on the emulator, into memory that holds NaN."""
    options |= {"precision": precision_of(q.dtype)}
    if offsets is None:
        call = validate.call(q, k, v, Options(**options))
    else:
        call = validate.varlen_call(q, k, v, *offsets, True, Options(**options))
    lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    if out is None:
        out = np.empty((*lead, *q.shape[-3:-1], v.shape[-1]), q.dtype)
    out[...] = np.nan
    lse = np.full(out.shape[:-1], np.nan, np.float32)
    visited = np.zeros(1, np.uint64)
    blocks = Warpgroups(
        multiprocessors=multiprocessors, warpgroups=warpgroups, bias_tiles=bias_tiles
    )
    Emulator(blocks, schedule, read=read).forward(call, out, lse, visited)
    return out, lse, int(visited[0])


def tiles_to_visit(q, k, v, tiles, mask):
    """Return how many tiles of a call on dense arrays are not EMPTY."""
    call = validate.call(q, k, v, Options(mask=mask))
    problem, allowed = call.problem, trees(call).allowed
    missing = 0
    if key_range(allowed, problem) is not None:
        rows = -(-(problem.len_q % tiles[0]) // 16) * 16  # of the first tile
        missing = -rows % tiles[0]
    return survey(allowed, problem, *tiles, missing=missing).tiles.visited


def within_the_bound(q, k, v, out, lse, offsets=None, **options):
    precision = Precision.of(q.dtype, tensor_cores=True, precision=precision_of(q.dtype))
    options |= {"precision": precision, "block_kv": 64}
    if offsets is None:
        bound = forward_bound(q, k, v, **options)
    else:
        bound = forward_bound_varlen(q, k, v, *offsets, **options)
    assert rho(out, *bound.out).value <= 1
    assert rho(lse, *bound.lse).value <= 1
