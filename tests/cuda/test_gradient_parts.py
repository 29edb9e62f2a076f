"""Gradients as sums of parts that several blocks have, or entries that share keys, on the emulator.

How many parts there are follows lengths and heads alone, and so no bit depends on the batch.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import REVERSE, randomly
from halves import mostly_thorough
from hypothesis import given, settings
from hypothesis import strategies as st
from placement import Placed, random_layout, same_bits

from cupyflash import explain, masks
from cupyflash.gpu import launch, rowwise, workspace
from cupyflash.gpu.workspace import ArraySpec, parts_of
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, backward_bound, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
HALF = np.float16
TENSOR, HOPPER, PORTABLE = Blocks(32, 64, 64), Blocks(hopper=True), Blocks(tensor=False)


def draw(*shapes, dtype=HALF, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def run(call, do, blocks, schedule=REVERSE, deterministic=False):
    """Return all gradients, which were written to memory that held NaN."""
    emulator = Emulator(blocks, schedule)
    q, k, v = call.q, call.k, call.v
    out = np.empty((*call.problem.array_lead, *q.shape[-3:-1], v.shape[-1]), q.dtype)
    lse = np.empty(out.shape[:-1], call.problem.accumulator)
    emulator.forward(call, out, lse)
    owners = q, k, v, call.bias, call.sink
    made = Gradients(*(None if x is None else np.full(x.shape, np.nan, x.dtype) for x in owners))
    room = np.empty(emulator.workspace_size(call), np.uint8)
    emulator.backward(call, do, out, lse, None, made, room, deterministic=deterministic)
    return made


# -- how many -------------------------------------------------------------------------------------


def of(heads, heads_kv, len_q, len_k, batch=1, bias=None, d=8):
    q = np.zeros((batch, heads, len_q, d), HALF)
    k = np.zeros((batch, heads_kv, len_k, d), HALF)
    bias = None if bias is None else np.zeros(bias, HALF)
    call = validate.call(q, k, k, Options(bias=bias))
    made = workspace.scratch_of(call, True, share_queries=True)
    return made.key_parts, made.bias_parts


def test_few_key_heads_of_many_queries_have_parts():
    assert of(32, 1, 8192, 8192) == (4, 1)  # of 64 blocks
    assert of(16, 2, 2048, 2048) == (2, 1)  # as many as have 8192 rows of 64 columns
    assert of(32, 1, 1024, 1024, d=128) == (8, 1)  # 4096 of 128
    assert of(8, 1, 2048, 2048, d=256) == (8, 1)  # of 32 blocks
    assert of(8, 1, 4096, 4096, d=256) == (4, 1)  # of 64
    assert of(32, 8, 4096, 4096) == (1, 1)  # enough blocks
    assert of(2, 1, 2**15, 128)[0] == 2  # as many as there are heads
    assert of(32, 1, 8192, 8192, batch=64) == of(32, 1, 8192, 8192)
    assert of(32, 1, 0, 0) == (1, 1)


def test_a_tile_of_the_bias_that_many_scores_share_has_parts():
    assert of(4, 4, 49, 49, 2048, (1, 4, 49, 49))[1] == 96
    assert of(4, 4, 256, 256, 256, (4, 256, 256))[1] == 8
    assert of(12, 12, 512, 512, 16, (1, 12, 512, 512))[1] == 1  # enough tiles
    assert of(4, 4, 64, 64, 15, (4, 64, 64))[1] == 1  # too few planes
    assert of(4, 4, 64, 64, 4, (64, 64))[1] == 2  # heads are planes, too
    assert of(4, 4, 64, 64, 4, (4, 4, 64, 64))[1] == 1  # nothing is shared
    assert of(16, 16, 4096, 4096, 2, (16, 1, 1))[1] == 32  # a number for each head
    assert of(16, 16, 4096, 4096, 2, (1, 1, 1))[1] == 512  # one in all
    assert of(16, 16, 4096, 4096, 2, (1, 1, 4096))[1] == 12
    assert of(16, 16, 4096, 4096, 2, (16, 4096, 1))[1] == 1  # enough tiles
    assert of(2, 2, 512, 4096, 1, (1, 512, 1))[1] == 2  # as many as there are planes
    assert of(4, 4, 300, 64, 1, (1, 1, 1))[1] == 2  # with eight tiles of scores and more
    assert of(4, 4, 0, 64, 1, (1, 1, 1))[1] == 1
    alone, one_of_many = (of(4, 4, 512, 512, n, (n, 4, 1, 1))[1] for n in (1, 9))
    assert alone == one_of_many == 8


def test_packed_sequences_have_no_parts_of_keys():
    q, k = np.zeros((32, 8192, 8), HALF), np.zeros((1, 8192, 8), HALF)
    ends = np.array([0, 8192])
    call = validate.varlen_call(q, k, k, ends, ends, True, Options())
    assert workspace.scratch_of(call, True, share_queries=True).key_parts == 1


def test_parts_of_packed_sequences_depend_on_no_other_sequence():
    q = np.zeros((32, 8192, 8), HALF)

    def parts(ends, shape):
        options = Options(bias=np.zeros(shape, HALF))
        call = validate.varlen_call(q, q, q, ends, ends, True, options)
        return workspace.scratch_of(call, True).bias_parts

    apart, together = np.array([0, 512, 8192]), np.array([0, 8192])
    assert parts(apart, (2, 1, 1, 1)) == 1  # of a number for each sequence
    assert parts(apart, (1, 1, 1)) == parts(together, (1, 1, 1)) == 512


def test_what_explain_counts():
    made = explain((4, 4096, 64), (1, 512, 64), backward=True, device="H100", compile=False)
    dkdv, sums = made.kernels[1], made.kernels[-1]
    parts = 2 * 2 * 512 * 64 * 4
    assert dkdv.blocks == 2 * 4
    assert dkdv.once.writes["parts"] == sums.once.reads["parts"] == parts
    assert sums.once.writes == {"dk": 512 * 64 * 2, "dv": 512 * 64 * 2}
    assert "dk" not in dkdv.once.writes


# -- results --------------------------------------------------------------------------------------


@pytest.fixture(name="few_rows")
def _few_rows(monkeypatch):
    monkeypatch.setattr(workspace, "FEWEST_OF_QUERIES", 64 * 128)


@emulated
@mostly_thorough(
    "case",
    ["sm80", "sm90", "sm90 causal", "sm80 deterministic", "sm90 values of all entries"],
    quick=("sm90 causal",),
    why="the other kernel, and ways of adding that others share",
)
def test_parts_of_dk_and_dv(case, few_rows):
    blocks = HOPPER if "sm90" in case else TENSOR
    options = {"mask": masks.causal()} if "causal" in case else {}
    q, do = draw((2, 5, 70, 16), (2, 5, 70, 24))
    k, v = draw((2, 1, 90, 16), (1 if "entries" in case else 2, 1, 90, 24), seed=1)
    call = validate.call(q, k, v, Options(**options))
    assert workspace.scratch_of(call, True, share_queries=True).key_parts == 5
    made = run(call, do, blocks, deterministic="deterministic" in case)
    precision = Precision.of(q.dtype, tensor_cores=True)
    wanted = backward_bound(do, q, k, v, precision=precision, block_kv=16, **options)
    for name in ("dq", "dk", "dv"):
        assert rho(getattr(made, name), *getattr(wanted, name)).value <= 1
    if "entries" not in case:
        alone = run(validate.call(q[1:], k[1:], v[1:], Options(**options)), do[1:], blocks)
        assert same_bits(made.dk[1:], alone.dk)
        assert same_bits(made.dv[1:], alone.dv)


@emulated
@mostly_thorough(
    "case",
    ["sm80", "sm90", "portable", "sm80 of all heads", "portable of queries and heads"],
    quick=("sm80",),
    why="the other kernels, and other axes of length 1",
)
def test_parts_of_dbias(case):
    blocks = {"sm8": TENSOR, "sm9": HOPPER, "por": PORTABLE}[case[:3]]
    dtype = np.float32 if blocks is PORTABLE else HALF
    q, k, v, do = (draw((17, 2, n, 16), dtype=dtype, seed=n)[0] for n in (40, 24, 24, 40))
    shape = 1 if "heads" in case else 2, 1 if "queries" in case else 40, 24
    (bias,) = draw(shape, dtype=dtype, seed=3)
    call = validate.call(q, k, v, Options(bias=bias))
    planes = 34 if "heads" in case else 17
    assert workspace.scratch_of(call, True, share_queries=True).bias_parts == planes // 8
    precision = Precision.of(q.dtype, tensor_cores=dtype == HALF)
    wanted = backward_bound(do, q, k, v, bias=bias, precision=precision, block_kv=16)
    made = [run(call, do, blocks, schedule).dbias for schedule in (REVERSE, randomly(1))]
    assert rho(made[0], *wanted.dbias).value <= 1
    assert same_bits(*made)


def sums(pairs, schedule):
    """Run the launch that sums parts, into places that hold NaN; return the sums."""
    placed, given, addresses = {}, {}, {}
    for n, (name, (parts, gradient)) in enumerate(pairs.items()):
        layout = random_layout(np.random.default_rng(n), gradient.ndim, gradient.itemsize)
        layout = layout._replace(shift=gradient.itemsize * (n % 2))  # they are aligned
        placed[name] = Placed(gradient.shape, gradient.dtype, layout)
        addresses |= {name: placed[name].view.ctypes.data, parts_of(name): parts.ctypes.data}
        spec = ArraySpec(parts.shape, parts.dtype)
        given[name] = parts_of(name), spec, placed[name].view
    dtype = next(iter(pairs.values()))[1].dtype.name
    made = rowwise.sums(given, dtype)

    def work():
        compiled = launch.CompiledRecipe(
            SimpleNamespace(pointer=lambda: 0), launch.CompiledLaunches((made,), 0), ()
        )
        compiled.forward(addresses)

    Emulator(schedule=schedule)._run(work)
    return {name: x.view.copy() for name, x in placed.items()}


@emulated
@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_sums_are_those_of_parts_in_order(seed):
    rng = np.random.default_rng(seed)
    dtype = np.dtype([np.float16, np.float32, np.float64][seed % 3])
    accumulator = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    pairs = {}
    for name in ("dk", "dv", "dbias")[: rng.integers(1, 4)]:
        lead = tuple(rng.integers(1, 6, rng.integers(1, 4)).tolist())
        rest = (*rng.integers(1, 4, 2).tolist(), int(rng.choice([1, 3, 8, 12])))
        own = tuple(1 if rng.random() < 0.6 else n for n in lead)
        parts = rng.standard_normal((*lead, *rest)).astype(accumulator)
        pairs[name] = parts, np.empty((*own, *rest), dtype)
    made = sums(pairs, randomly(seed))
    for name, (parts, gradient) in pairs.items():
        axes = [n for n, size in enumerate(gradient.shape) if size != parts.shape[n]]
        rest = [n for n in range(parts.ndim) if n not in axes]
        inner = [parts.shape[n] for n in rest]
        total = None
        for part in parts.transpose(axes + rest).reshape(-1, *inner):
            total = part if total is None else total + part
        assert same_bits(made[name], total.reshape(gradient.shape).astype(dtype))


@emulated
def test_a_gradient_of_the_sink_with_gaps_is_copied():
    q, k, v, do = draw((1, 3, 20, 16), (1, 3, 20, 16), (1, 3, 20, 16), (1, 3, 20, 16))
    sink = np.linspace(-1, 1, 3).astype(np.float32)
    call = validate.call(q, k, v, Options(sink=sink))
    plain = run(call, do, TENSOR).dsink
    emulator = Emulator(TENSOR)
    out, lse = np.empty_like(q), np.empty(q.shape[:-1], np.float32)
    emulator.forward(call, out, lse)
    spread = np.full(6, np.nan, np.float32)
    made = Gradients(*map(np.empty_like, (q, k, v)), None, spread[::2])
    emulator.backward(call, do, out, lse, None, made)
    assert same_bits(spread[::2].copy(), plain)
    assert np.isnan(spread[1::2]).all()
