"""dq of rows whose keys are one tile: blocks of keys store it, on the emulator."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cuda_specialisations import BFLOAT16, target_of
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import REVERSE, randomly
from halves import mostly_thorough

from cupyflash import explain, masks
from cupyflash.gpu import route
from cupyflash.gpu.kernels import registry
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, backward_bound, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
HALF = np.dtype(np.float16)
KERNELS = {"sm80": Blocks(32, 64, 64), "sm90": Blocks(32, 64, 64, hopper=True)}


def draw(*shapes, dtype=HALF, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def run(call, do, blocks, schedule=REVERSE, dq_dtype=None, deterministic=True):
    """Return all gradients, which were written to memory that held NaN."""
    emulator = Emulator(blocks, schedule)
    q, k, v = call.q, call.k, call.v
    out = np.empty((*call.problem.array_lead, *q.shape[-3:-1], v.shape[-1]), q.dtype)
    lse = np.empty(out.shape[:-1], call.problem.accumulator)
    emulator.forward(call, out, lse)
    dq = np.full(q.shape, np.nan, dq_dtype or q.dtype)
    made = Gradients(dq, *(np.full(x.shape, np.nan, x.dtype) for x in (k, v)), None, None)
    emulator.backward(call, do, out, lse, None, made, deterministic=deterministic)
    return made


# -- where ----------------------------------------------------------------------------------------


def kernels(len_k, d=64, dtype=HALF, arch="sm_80", packed=False, lead=2, deterministic=False):
    """Return the names of the kernels of a backward."""
    q, k = np.zeros((lead, 2, 200, d), dtype), np.zeros((2, 2, len_k, d), dtype)
    if packed:
        ends = np.array([0, 200]), np.array([0, len_k])
        call = validate.varlen_call(q[0], k[0], k[0], *ends, True, Options())
    else:
        call = validate.call(q, k, k, Options())
    made = route.of_gradients(call, target_of(arch), deterministic)
    return [step.kernel for step in made.steps]


def test_kernels_of_one_tile_of_keys():
    whole = ["backward_delta", "backward_sm80_dkdv"]
    sums = [*whole, "backward_dq_rows"]
    assert kernels(128) == kernels(77) == whole
    assert len(kernels(77, arch="sm_90")) == 2  # whichever of the two kernels it is
    assert kernels(128, deterministic=True) == whole
    assert kernels(129) == sums
    assert kernels(129, deterministic=True) == [*whole, "backward_sm80_dq"]
    assert kernels(64, d=200) == whole
    assert kernels(65, d=200) == sums
    assert kernels(100, packed=True) == sums  # it has no code for packed sequences
    assert kernels(100, lead=1) == sums  # entries share q
    assert kernels(100, dtype=np.float32)[1:] == ["backward_simt_dkdv"]
    assert kernels(0) == sums


def test_kernels_of_packed_sequences():
    whole = ["backward_delta", "backward_sm90_dkdv"]
    sums = [*whole, "backward_dq_rows"]
    assert kernels(100, packed=True, arch="sm_90") == whole
    # Longer sequences beside it would have the kernel of dq, whose sums are others.
    exact = kernels(100, packed=True, arch="sm_90", deterministic=True)
    assert exact == [*whole, "backward_sm80_dq"]
    assert kernels(129, packed=True, arch="sm_90") == sums
    q, k = np.zeros((2, 60, 64), HALF), np.zeros((2, 50, 64), HALF)
    for ends_q, ends_k, made in (
        ([0, 40, 60], [0, 20, 50], whole),
        ([0, 40, 60], [0, 50, 50], sums),  # a sequence without keys has no block
        ([0, 60, 60], [0, 50, 50], whole),  # nor has it queries
        ([0, 60, 60], [0, 20, 50], whole),
    ):
        call = validate.varlen_call(q, k, k, np.array(ends_q), np.array(ends_k), True)
        route_of = route.of_gradients(call, target_of("sm_90"))
        assert [step.kernel for step in route_of.steps] == made


def test_what_explain_counts():
    made = explain((256, 64), (100, 64), backward=True, device="A100-80GB", compile=False)
    _, dkdv = made.kernels
    assert dkdv.computes == "dk and dv, and dq"
    queries, keys = 256 * 64 * 2, 100 * 64 * 2
    assert dkdv.most.writes == dkdv.once.writes == {"dk": keys, "dv": keys, "dq": queries}
    assert "dq_accum" not in dkdv.most.reads
    assert made.memory == queries + 2 * keys + 256 * 4  # dq, dk, dv and delta


def test_nobody_knows_whether_sequences_have_keys():
    # Offsets in device memory that are not read: that a sequence has a query says nothing of keys.
    q = np.zeros((2, 60, 64), HALF)
    call = validate.varlen_call(q, q, q, np.array([0, 60]), np.array([0, 60]), True)
    unread = np.array([0, 60])  # the most extreme lengths
    for change, made in (
        ({}, 2),
        ({"unread": True}, 3),
        ({"unread": True, "len_k": unread}, 3),
        ({"unread": True, "len_q": unread, "len_k": unread}, 3),
    ):
        rows = dataclasses.replace(call.problem.rows, **change)
        other = dataclasses.replace(call, problem=dataclasses.replace(call.problem, rows=rows))
        assert len(route.of_gradients(other, target_of("sm_90")).steps) == made


# -- results --------------------------------------------------------------------------------------


CASES = {
    "plain": {},
    "causal": {"mask": masks.causal()},  # the first queries see no key
    "lengths": {"mask": masks.lengths(np.array([0, 33], np.int32))},
    "dropout": {"dropout": 0.3, "seed": 5},
}


@emulated
@mostly_thorough(
    ("kernel", "case"),
    [(kernel, case) for kernel in KERNELS for case in CASES],
    quick=[("sm80", "causal"), ("sm90", "causal")],
    why="masks and weights that other gradients share",
)
def test_gradients(kernel, case):
    options, dtype = CASES[case], HALF if case == "causal" else BFLOAT16
    q, do = draw((2, 4, 150, 40), (2, 4, 150, 24), dtype=dtype)
    k, v = draw((2, 2, 50, 40), (2, 2, 50, 24), dtype=dtype, seed=1)
    call = validate.call(q, k, v, Options(**options))
    precision = Precision.of(q.dtype, tensor_cores=True)
    wanted = backward_bound(do, q, k, v, precision=precision, block_kv=16, **options)
    made = [run(call, do, KERNELS[kernel], order) for order in (REVERSE, randomly(2))]
    for name in ("dq", "dk", "dv"):
        first, second = (getattr(x, name) for x in made)
        assert rho(first, *getattr(wanted, name)).value <= 1
        assert first.tobytes() == second.tobytes()


@emulated
@mostly_thorough("kernel", KERNELS, quick=("sm90",), why="the same of the other kernel")
def test_the_same_as_by_sums(kernel, monkeypatch):
    q, do = draw((1, 2, 150, 24), (1, 2, 150, 16))
    k, v = draw((1, 2, 60, 24), (1, 2, 60, 16), seed=1)
    call = validate.call(q, k, v, Options(mask=masks.window(9, 4)))
    made = run(call, do, KERNELS[kernel])
    wide = run(call, do, KERNELS[kernel], dq_dtype=np.float32)
    monkeypatch.setattr(registry, "has_all_keys", lambda request: False)
    sums = run(call, do, KERNELS[kernel], deterministic=False)
    assert np.array_equal(made.dq, sums.dq)
    assert np.array_equal(wide.dq.astype(HALF), sums.dq)


PACKED = {"plain": {}, "causal": {"mask": masks.causal()}, "window": {"mask": masks.window(9, 4)}}


@emulated
@mostly_thorough("case", PACKED, quick=("causal",), why="masks that other gradients share")
def test_packed_sequences_have_the_same_as_by_sums(case, monkeypatch):
    q, do = draw((4, 260, 40), (4, 260, 24))
    k, v = draw((2, 134, 40), (2, 134, 24), seed=1)
    ends = np.array([0, 70, 70, 231, 260]), np.array([0, 33, 40, 100, 134])
    call = validate.varlen_call(q, k, v, *ends, True, Options(**PACKED[case]))
    made = run(call, do, KERNELS["sm90"], randomly(1), deterministic=False)
    monkeypatch.setattr(registry, "has_all_keys", lambda request: False)
    sums = run(call, do, KERNELS["sm90"], deterministic=False)
    for name in ("dq", "dk", "dv"):
        assert np.array_equal(getattr(made, name), getattr(sums, name))


@emulated
@mostly_thorough("kernel", KERNELS, quick=("sm80",), why="the same of the other kernel")
def test_hidden_keys_hide_what_is_not_finite(kernel):
    q, do = draw((1, 2, 100, 24), (1, 2, 100, 16))
    k, v = draw((1, 2, 60, 24), (1, 2, 60, 16), seed=1)
    mask = masks.window(9, 4)  # of the last queries: the first ones see no key
    clean = run(validate.call(q, k, v, Options(mask=mask)), do, KERNELS[kernel])
    k[..., 59, 3], v[..., 59, 2] = np.nan, np.inf  # which only the last queries see
    made = run(validate.call(q, k, v, Options(mask=mask)), do, KERNELS[kernel])
    assert np.array_equal(made.dq[:, :, :80], clean.dq[:, :, :80])
    assert not made.dq[:, :, :30].any()
    assert np.isnan(made.dq[:, :, 99]).all()
    assert np.isfinite(made.dq[:, :, :80]).all()
