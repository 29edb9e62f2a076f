"""Packed sequences in pieces by the GPU's kernels, on the emulator: as ranks compute them."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from ranks import blocks_of

from cupyflash import distributed, masks, scores
from cupyflash.distributed.partition import schemes
from cupyflash.pieces.compute import Partial
from cupyflash.pieces.parts import call_of, part, part_of_bias, part_of_statistic
from cupyflash.pieces.place import Host
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, backward_bound_varlen, forward_bound_varlen, rho

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
OFFSETS = np.array([0, 9, 9, 21, 50, 57, 64])  # a rank has whole sequences, and a part of one
LONGEST = 29
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
KERNELS = {"simt": Blocks(16, 16, 64, tensor=False), "sm80": Blocks(32, 16, 64)}


def options_of(kind):
    rng = np.random.default_rng(5)
    if kind == "scores":
        return {
            "mask": masks.window(9, 3),
            "score_mod": scores.alibi(np.ones(2, np.float32)),
            "bias": rng.standard_normal((2, 1, LONGEST)).astype(np.float32),
            "sink": np.ones(2, np.float32),
        }
    if kind == "dropout":
        return {"mask": masks.causal(), "dropout": 0.4, "seed": 7}
    return {}


@pytest.mark.thorough("compiles kernels for the emulator, 20 s for each case")
@pytest.mark.parametrize(
    ("kernels", "kind"),
    [("sm80", "dropout"), ("sm80", "scores"), ("sm80", "none"), ("simt", "dropout")],
)
def test_packed_pieces_of_two_ranks_are_within_the_bound(kernels, kind):
    rng = np.random.default_rng(0)
    total = int(OFFSETS[-1])
    shapes = (2, total, 16), (1, total, 16), (1, total, 16), (2, total, 16)
    q, k, v, do = (rng.standard_normal(shape).astype(BFLOAT16) for shape in shapes)
    options = options_of(kind)
    whole = validate.varlen_call(q, k, v, OFFSETS, OFFSETS, True, Options(**options))
    place = Host(Emulator(KERNELS[kernels], deterministic=True))
    out, lse = np.full_like(do, np.nan), np.full(do.shape[:-1], np.nan, np.float32)
    sums = [np.zeros(x.shape, np.float32) for x in (q, k, v)]
    several = 0
    with blocks_of(4):
        made = [distributed.layout(comm, total) for comm in distributed.Threads(2).ranks]
        of_ranks = [schemes.plan(whole, x, x, "rounds", (0, 0)).steps for x in made]
    pieces = [task.piece for steps in of_ranks for step in steps for task in step.forward]

    def call(piece):
        bias = whole.bias
        if bias is not None:
            bias = part_of_bias(whole, bias, piece, piece.rows, piece.keys)
        arrays = part(q, piece.rows), part(k, piece.keys), part(v, piece.keys)
        return call_of(dataclasses.replace(whole, q=q), piece, *arrays, bias)

    for rows in dict.fromkeys(piece.rows for piece in pieces):
        results = part(out, rows), part_of_statistic(lse, rows)
        held = tuple(x.copy() for x in results)
        partial = Partial(place, whole.problem, *held)
        of_rows = [piece for piece in pieces if piece.rows == rows]
        for piece in of_rows:
            several += len(piece.sequences) > 1
            partial.compute(call(piece), piece.first, piece is of_rows[-1])
        for computed, result in zip(held, results, strict=True):
            result[...] = computed
    assert several
    for piece in pieces:
        own = call(piece)
        gradients = Gradients(*(
            None if x is None else np.full(x.shape, np.nan, np.float32)
            for x in (own.q, own.k, own.v, own.bias, own.sink)
        ))  # fmt: skip
        rows = part(do, piece.rows), part(out, piece.rows), part_of_statistic(lse, piece.rows)
        place.backend.backward_piece(own, *rows, None, gradients, True)
        for summed, computed, at in zip(
            sums, gradients[:3], (piece.rows, piece.keys, piece.keys), strict=True
        ):
            part(summed, at)[...] += computed
    how = {"precision": Precision.of(BFLOAT16, kernels != "simt"), "splits": 3, "block_kv": 16}
    how |= options
    arrays = q, k, v, OFFSETS, OFFSETS
    bound = forward_bound_varlen(*arrays, **how)
    assert rho(out, *bound.out).value <= 1
    assert rho(lse, *bound.lse).value <= 1
    bounds = backward_bound_varlen(do, *arrays, **how)
    for name, summed in zip(("dq", "dk", "dv"), sums, strict=True):
        assert rho(summed.astype(BFLOAT16), *getattr(bounds, name)).value <= 1, name
