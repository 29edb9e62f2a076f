"""Which blocks of packed sequences the blocks of a launch have, on the emulator."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_specialisations import target_of
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import randomly
from halves import mostly_thorough

from cupyflash import masks
from cupyflash.gpu import route
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, backward_bound_varlen, forward_bound_varlen, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
RNG = np.random.default_rng(0)
LENGTHS = {
    "searched": RNG.permutation(np.r_[RNG.integers(0, 20, 40), 70, 131]),
    "one block each": RNG.integers(1, 65, 34),
    "two blocks each": RNG.integers(129, 150, 3),
    "none": np.array([0, 0]),
}


def ends(lengths):
    return np.r_[0, np.cumsum(lengths)]


@emulated
@mostly_thorough(
    "name", LENGTHS, quick=("searched", "one block each"), why="ends of sequences, quick elsewhere"
)
def test_every_row_is_computed(name):
    lengths = LENGTHS[name]
    q, k, v, do = (
        RNG.standard_normal((1, int(lengths.sum()), 16)).astype(np.float16) for _ in range(4)
    )
    offsets, options = (ends(lengths),) * 2, {"mask": masks.causal()}
    call = validate.varlen_call(q, k, v, *offsets, True, Options(**options))
    out, lse = np.full(q.shape, np.nan, q.dtype), np.full(q.shape[:-1], np.nan, np.float32)
    emulator = Emulator(Blocks(hopper=True, warpgroups=(64, 64, 2)), randomly(2))
    emulator.forward(call, out, lse)
    options |= {"precision": Precision.of(q.dtype, tensor_cores=True), "block_kv": 64}
    bound = forward_bound_varlen(q, k, v, *offsets, **options)
    assert rho(out, *bound.out).value <= 1
    assert rho(lse, *bound.lse).value <= 1
    made = [np.full(x.shape, np.nan, x.dtype) for x in (q, k, v)]
    gradients = Gradients(*made, None, None)
    emulator.backward(call, do, out, lse, None, gradients, deterministic=False)
    wanted = backward_bound_varlen(do, q, k, v, *offsets, **options)
    for name, x in zip(("dq", "dk", "dv"), made, strict=True):
        assert rho(x, *getattr(wanted, name)).value <= 1


def test_a_launch_has_no_more_blocks_than_sequences_of_the_longest_length():
    def grids(*lengths):
        q = np.zeros((2, sum(lengths), 128), np.float16)
        call = validate.varlen_call(q, q, q, *[ends(lengths)] * 2, True, Options())
        steps = route.of_gradients(call, target_of("sm_90")).steps
        return [step.grid for step in steps if step.part == "dkdv"]

    assert grids(*[64] * 10) == [2 * 10]
    assert grids(*[129] * 10) == [2 * 20]  # and not 10 more than 1290 / 128
    assert grids(1000, *[8] * 10) == [2 * (1080 // 128 + 11)]
