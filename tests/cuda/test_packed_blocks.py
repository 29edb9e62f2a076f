"""Which blocks of packed sequences the blocks of a launch have, on the emulator."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_specialisations import target_of
from emulator import build
from emulator.calls import Blocks, Emulator
from emulator.machine import FORWARD, randomly

from cupyflash import masks
from cupyflash.gpu import route
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, backward_bound_varlen, forward_bound_varlen, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
RNG = np.random.default_rng(0)
LENGTHS = {
    "many": (RNG.integers(0, 41, 75), RNG.integers(1, 41, 75)),  # searched
    "one block each": (RNG.integers(0, 17, 40), RNG.integers(1, 17, 40)),
    "two blocks each": (RNG.integers(17, 33, 9), RNG.integers(30, 33, 9)),
    "one": (np.array([37]), np.array([20])),
    "none": (np.array([0, 0]), np.array([0, 0])),
}


def ends(lengths):
    return np.r_[0, np.cumsum(lengths)]


def draw(lengths, heads=(2, 1), d=4):
    totals = [int(x.sum()) for x in lengths]
    shapes = (heads[0], totals[0], d), *[(heads[1], totals[1], d)] * 2
    return [RNG.standard_normal(shape).astype(np.float32) for shape in shapes]


@emulated
@pytest.mark.parametrize("name", LENGTHS)
def test_every_row_is_computed(name):
    lengths = LENGTHS[name]
    q, k, v = draw(lengths)
    offsets, options = tuple(map(ends, lengths)), {"mask": masks.causal()}
    call = validate.varlen_call(q, k, v, *offsets, True, Options(**options))
    out, lse = np.full(q.shape, np.nan, q.dtype), np.full(q.shape[:-1], np.nan, q.dtype)
    Emulator(Blocks(16, 16, 64), randomly(2)).forward(call, out, lse)
    options |= {"precision": Precision.of(q.dtype), "block_kv": 16}
    bound = forward_bound_varlen(q, k, v, *offsets, **options)
    assert rho(out, *bound.out).value <= 1
    assert rho(lse, *bound.lse).value <= 1
    do = RNG.standard_normal(out.shape).astype(q.dtype)
    made = [np.full(x.shape, np.nan, x.dtype) for x in (q, k, v)]
    Emulator(Blocks(16, 16, 64), FORWARD).backward(
        call, do, out, lse, None, Gradients(*made, None, None)
    )
    wanted = backward_bound_varlen(do, q, k, v, *offsets, **options)
    for name, x in zip(("dq", "dk", "dv"), made, strict=True):
        assert rho(x, *getattr(wanted, name)).value <= 1


@emulated
def test_a_search_of_three_steps():
    lengths = np.r_[np.ones(600, int), 45, np.ones(600, int)]
    q, k, v = draw((lengths, lengths), (1, 1))
    call = validate.varlen_call(q, k, v, ends(lengths), ends(lengths), True, Options())
    out, lse = np.full(q.shape, np.nan, q.dtype), np.full(q.shape[:-1], np.nan, q.dtype)
    Emulator(Blocks(16, 16, 64)).forward(call, out, lse)
    alone = np.r_[:600, 645:1245]  # a row that sees itself alone
    assert np.array_equal(out[:, alone], v[:, alone])


def test_a_launch_has_no_more_blocks_than_sequences_of_the_longest_length():
    def grids(*lengths):
        q = np.zeros((2, sum(lengths), 128), np.float16)
        call = validate.varlen_call(q, q, q, *[ends(lengths)] * 2, True, Options())
        steps = route.of_gradients(call, target_of("sm_90")).steps
        return [step.grid for step in steps if step.kernel == "backward_sm90_dkdv"]

    assert grids(*[64] * 10) == [2 * 10]
    assert grids(*[129] * 10) == [2 * 20]  # and not 10 more than 1290 / 128
    assert grids(1000, *[8] * 10) == [2 * (1080 // 128 + 11)]
