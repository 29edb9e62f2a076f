"""Every CUDA kernel, run on the CPU: within the bound, and what else it promises."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from emulator import build
from emulator.blocks import Blocks, Chosen
from emulator.calls import Emulator
from emulator.machine import FORWARD, REVERSE, randomly
from emulator.problems import (
    HostMemory,
    combine_bounds,
    emulator_of,
    ratios,
    run_backward,
    run_forward,
    target,
)
from gpu_arrays import Copies
from halves import mostly_thorough
from harness import attend, attend_backward, call_of, with_offsets
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from placement import Placed, random_layout, same_bits
from strategies import BFLOAT16, DTYPES, MASKS, SCORES, Problem, Sizes, problems

from cupyflash import masks, scores
from cupyflash.expr import cos, erf, exp2, log, sigmoid, sin, sqrt
from cupyflash.problem import pack_gqa, validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options
from cupyflash.reference.cpu import philox
from cupyflash.rowwise import COMBINE
from cupyflash.testing import Precision, rho

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

# An example compiles its own kernels, which takes a second: so there are fewer than elsewhere, and
# none are shrunk.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
SOME = settings(max_examples=max(2, settings().max_examples // 3), phases=PHASES)
TWO = settings(max_examples=2, phases=PHASES)
FEW = settings(max_examples=max(2, settings().max_examples // 5), phases=PHASES)
F32 = np.dtype(np.float32)


PRECISIONS = [*((dtype, None) for dtype in DTYPES), (F32, "tf32x3")]
EACH_PRECISION = pytest.mark.parametrize(("dtype", "precision"), PRECISIONS, ids=str)
DENSE_AND_PACKED = pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])


@mostly_thorough(
    ("dtype", "precision", "packed"),
    [(*each, packed) for packed in (False, True) for each in PRECISIONS],
    quick=[(F32, None, False), (BFLOAT16, None, True)],
    why="each type has quick tests of its own kernels",
    ids=str,
)
@TWO
@given(data=st.data())
def test_every_output_is_within_the_bound(dtype, precision, packed, data):
    check_outputs(dtype, precision, packed, data)


@pytest.mark.thorough("a search; a few of its problems are quick")
@EACH_PRECISION
@DENSE_AND_PACKED
@SOME
@given(data=st.data())
def test_every_output_of_many_problems_is_within_the_bound(dtype, precision, packed, data):
    check_outputs(dtype, precision, packed, data)


def check_outputs(dtype, precision, packed, data):
    problem = data.draw(problems(dtype, packed=packed))
    if precision is not None:
        problem = dataclasses.replace(problem, options=problem.options | {"precision": precision})
    found = ratios(problem, emulator_of(problem))
    assert max(found.values()) <= 1, found


@FEW
@given(problems(F32) | problems(BFLOAT16, packed=True))
@pytest.mark.thorough("a search; the tests of each kernel have a problem of it")
def test_no_bit_depends_on_the_schedule(problem):
    results = []
    for schedule in (FORWARD, REVERSE, randomly(problem.seed + 1)):
        emulator = Emulator(emulator_of(problem).blocks, schedule, deterministic=True)
        out, lse = run_forward(problem, emulator)
        assume(np.isfinite(out).all())
        results.append((out, lse, *run_backward(problem, emulator, out, lse)))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a is b is None or same_bits(a, b)


def _with_options(dtype, options_of, seed=0):
    """A problem of 2 x 4 heads, 2 of them for keys, with what a function of its sizes adds."""
    rng = np.random.default_rng(seed)
    len_q, len_k, d = 37, 53, 24
    shapes = {"q": (2, 4, len_q, d), "k": (2, 2, len_k, d), "v": (2, 2, len_k, 16)}
    arrays = {
        name: rng.standard_normal(shape).astype(dtype)
        for name, shape in (shapes | {"do": (2, 4, len_q, 16)}).items()
    }
    options = options_of(Sizes((2,), 4, len_q, len_k, None, rng))
    return Problem(
        dtype, "normal", **arrays, dlse=None, options=options,
        offsets=None, tiles=(16, 16), layouts="plain", workspace=False, hard=False, seed=seed,
    )  # fmt: skip


KINDS = [("mask", name) for name in MASKS] + [("score_mod", name) for name in SCORES]


@mostly_thorough(
    ("kind", "dtype"),
    list(zip(KINDS, itertools.cycle(DTYPES), strict=False)),
    quick=list(zip(KINDS, itertools.cycle(DTYPES), strict=False))[::17],
    why="every kind is quick on the CPU",
    ids=str,
)
def test_every_kind_of_mask_and_score(kind, dtype):
    option, name = kind
    make = {"mask": MASKS, "score_mod": SCORES}[option][name]
    problem = _with_options(dtype, lambda z: {option: make(z)})
    found = ratios(problem, Emulator(Blocks(16, 16, 32)))
    assert max(found.values()) <= 1, found


FUNCTIONS = {
    "gate": lambda s, b, h, i, j: s + log(sigmoid(0.3 * (i - j) + h)) + 0.5 * sigmoid(s),
    "waves": lambda s, b, h, i, j: s * cos(0.4 * (i - j)) + sin(s) + erf(0.5 * s),
    "powers": lambda s, b, h, i, j: (1.0 + s * s) ** 0.75 + (i + 1) ** -0.5 - 1.5 ** (0.5 * s),
    "roots": lambda s, b, h, i, j: sqrt(1.0 + s * s) + exp2(-0.25 * (abs(i - j) >> 1)),
}


@mostly_thorough(
    ("name", "dtype"),
    [(name, dtype) for name in FUNCTIONS for dtype in DTYPES],
    quick=[*zip(FUNCTIONS, DTYPES, strict=True)],
    why="each function in one type is quick",
    ids=str,
)
def test_functions_of_expressions(name, dtype):
    change = scores.score(FUNCTIONS[name])
    mask = masks.mask(lambda b, h, i, j: (j >> 2 <= i) | ((1 << (i % 6)) * sqrt(i) > j))
    problem = _with_options(dtype, lambda z: {"score_mod": change, "mask": mask})
    found = ratios(problem, Emulator(Blocks(16, 16, 32)))
    assert max(found.values()) <= 1, found


@mostly_thorough(
    "blocks",
    [(16, 16, 32), (32, 16, 64), (16, 32, 128), (64, 64, 256)],
    quick=[(16, 32, 128)],
    why="drawn problems are quick, and have these and others",
)
def test_every_size_of_a_tile(blocks):
    options = {"mask": masks.causal(), "score_mod": scores.softcap(2.0)}
    problem = _with_options(F32, lambda z: options)
    found = ratios(problem, Emulator(Blocks(*blocks)))
    assert max(found.values()) <= 1, found


def _in_float32(sizes, options_of, seed=0):
    """A problem of sizes (B, H, Lq, Lk, D, Dv), with what a function of a generator adds."""
    b, h, len_q, len_k, d, d_v = sizes
    rng = np.random.default_rng(seed)
    shapes = (len_q, d), (len_k, d), (len_k, d_v), (len_q, d_v)
    q, k, v, do = (rng.standard_normal((b, h, *shape), np.float32) for shape in shapes)
    return Problem(
        F32, "normal", q, k, v, do, dlse=None, options=options_of(rng),
        offsets=None, tiles=(8, 8), layouts="plain", workspace=False, hard=False, seed=seed,
    )  # fmt: skip


def _bias_of_pairs(rng):
    bias = rng.standard_normal((1, 2, 150, 70), np.float32)
    bias[0, :, ::3, 1] = -np.inf
    return bias


# Heads up to 32, of which 8 threads share a row, and those of which a diagonal tile may be halved.
CHOSEN = {
    "bias": ((2, 2, 150, 70, 32, 32), lambda rng: {"bias": _bias_of_pairs(rng)}),
    "window": ((2, 1, 140, 130, 32, 20), lambda _: {"mask": masks.window(40, 10)}),
    "causal": ((1, 2, 130, 150, 16, 16), lambda _: {"mask": masks.causal()}),
    "ragged": ((1, 1, 65, 129, 9, 3), lambda _: {}),
    "dropout": ((1, 2, 70, 90, 32, 32), lambda _: {"dropout": 0.3, "seed": 7}),
    "halves": (
        (1, 2, 70, 130, 64, 64),
        lambda _: {"mask": masks.causal(offset=0), "score_mod": scores.softcap(2.0)},
    ),
}


@pytest.mark.parametrize("deterministic", [False, True])
@mostly_thorough(
    "name", list(CHOSEN), quick=["bias", "halves"], why="drawn problems are quick, of smaller tiles"
)
def test_the_largest_tiles_in_float32(name, deterministic):
    problem = _in_float32(*CHOSEN[name])
    found = ratios(problem, Emulator(Chosen(), deterministic=deterministic))
    assert max(found.values()) <= 1, found


def test_a_half_of_a_tile_that_no_query_sees_is_not_read():
    # Queries 0 to 63 see 64 keys of a tile of 128 keys.
    problem = _in_float32((1, 1, 64, 192, 64, 64), lambda _: {"mask": masks.causal(offset=0)})
    emulator = Emulator(Chosen())
    results = []
    for value in (0.0, np.nan):
        problem.k[..., 64:, :] = problem.v[..., 64:, :] = value
        results.append(run_forward(problem, emulator))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    assert np.isfinite(results[0][0]).all()


def test_more_heads_than_are_interleaved():
    problem = _in_float32((33, 2, 40, 40, 8, 8), lambda _: {"mask": masks.causal()})
    found = ratios(problem, Emulator(Blocks(16, 16, 32)))
    assert max(found.values()) <= 1, found


HEADS = [(64, 64), (128, 128), (257, 400), (48, 272), (400, 1), (512, 512)]


@pytest.mark.thorough("tiles of tensor cores are quick; the table of all tiles is, too")
@pytest.mark.parametrize(
    ("sizes", "dtype", "shared_memory"),
    [
        (sizes, dtype, (65536, 232448)[(n + m) % 2])
        for n, sizes in enumerate(HEADS)
        for m, dtype in enumerate(DTYPES)
    ],
    ids=str,
)
def test_the_tiles_that_gpus_get(sizes, dtype, shared_memory):
    rng = np.random.default_rng(sizes)
    d, d_v = sizes
    shapes = {"q": (2, 35, d), "k": (1, 70, d), "v": (1, 70, d_v), "do": (2, 35, d_v)}
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    problem = Problem(
        dtype, "normal", **arrays, dlse=None, options={"mask": masks.causal()},
        offsets=None, tiles=(8, 8), layouts="plain", workspace=False, hard=False, seed=1,
    )  # fmt: skip
    found = ratios(problem, Emulator(Chosen(shared_memory=shared_memory), randomly(1)))
    assert max(found.values()) <= 1, found


@mostly_thorough("dtype", DTYPES, quick=DTYPES[:1], why="other types of the same kernel", ids=str)
def test_what_no_query_sees_changes_no_bit(dtype):
    mask = masks.window(9, 0) & masks.lengths(53 - 7)
    problem = _with_options(dtype, lambda z: {"mask": mask})
    emulator = Emulator()
    results = []
    for value in (0.0, np.nan, np.inf):
        for x in (problem.k, problem.v):
            x[..., -7:, :] = value
        out, lse = run_forward(problem, emulator)
        results.append((out, lse, *run_backward(problem, emulator, out, lse)[:3]))
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))
    assert np.isfinite(results[0][0].astype(np.float32)).all()


def test_dropped_pairs_are_those_of_the_twin():
    # Equal scores and the unit matrix as values: an output is 0 where its pair was dropped.
    size, seed, p = 40, 2**63 + 12345, 0.37
    q = np.zeros((2, 3, size, 8), np.float32)
    v = np.broadcast_to(np.eye(size, dtype=np.float32), (2, 3, size, size))
    call = validate.call(q, q, v, Options(dropout=p, seed=seed))
    out, lse = np.empty((2, 3, size, size), np.float32), np.empty((2, 3, size), np.float32)
    Emulator().forward(call, out, lse)
    b_h = np.arange(6).reshape(2, 3, 1, 1)
    kept = philox.keep(seed, p, b_h, np.arange(size)[:, None], np.arange(size))
    np.testing.assert_array_equal(out != 0, kept)
    # dv[j] = sum over i of the weights of (i, j) times do[i]: here it is the weight itself.
    made = Gradients(*(np.empty_like(x) for x in (q, q, np.array(v))))
    Emulator().backward(call, np.array(v), out, lse, None, made)
    np.testing.assert_array_equal(made.dv != 0, kept.swapaxes(-2, -1))


@mostly_thorough(
    "deterministic", [False, True], quick=[True], why="one kernel of two has the same loop"
)
@mostly_thorough(
    "option",
    [{}, {"mask": masks.causal()}, {"mask": masks.window(9, 3)}],
    quick=lambda option: str(option) == str({"mask": masks.window(9, 3)}),
    why="a window has tiles of every class",
)
def test_as_many_tiles_are_visited_as_by_the_twin(monkeypatch, option, deterministic):
    monkeypatch.setattr(pack_gqa, "MOST_QUERIES", 0)  # the twin has no such rows
    problem = _with_options(F32, lambda z: option)
    arrays, call = (problem.q, problem.k, problem.v), call_of(problem)
    visited = np.zeros(1, np.uint64)
    out, lse = np.empty_like(problem.do), np.empty(problem.do.shape[:-1], np.float32)
    Emulator().forward(call, out, lse, visited)
    assert visited[0] == attend(*arrays, **option).visited
    made = Gradients(*(np.empty_like(x) for x in arrays))
    visited[:] = 0
    emulator = Emulator(deterministic=deterministic)
    emulator.backward(call, problem.do, out, lse, None, made, visited=visited)
    # Deterministic gradients of queries, and those of keys and values, come from a kernel each.
    kernels = 2 if deterministic else 1
    assert visited[0] == kernels * attend_backward(problem.do, *arrays, **option).visited


@pytest.mark.parametrize("wrong", [[0, 5, 4, 40, 41], [0, 3, 3, 40, 10**12], [-5, 3, 3, 40, 41]])
def test_offsets_that_are_wrong_lead_nowhere_else(wrong):
    # Nobody reads them before the launch, so kernels hold them in range.
    rng = np.random.default_rng(0)
    offsets = np.array([0, 3, 3, 40, 41])
    placed = [
        Placed((4, 41, 16), F32, random_layout(rng, 3, 4), rng.standard_normal((4, 41, 16)))
        for _ in "qkv"
    ]
    call = validate.varlen_call(*(x.view for x in placed), offsets, offsets, False)
    call = with_offsets(call, [offsets, np.array(wrong)])
    targets = Placed((4, 41, 16), F32), Placed((4, 41), F32)
    Emulator().forward(call, *(x.view for x in targets))
    for each in (*placed, *targets):
        each.check()
    assert np.isfinite(targets[0].view).all()


# -- combine --------------------------------------------------------------------------------------


@mostly_thorough("dtype", DTYPES, quick=DTYPES[:1], why="other types of the same kernel", ids=str)
@given(data=st.data())
def test_parts_are_joined_within_the_bound(dtype, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    number = data.draw(st.sampled_from([1, 2, 3, 16, 17, 35]))
    lead = data.draw(st.sampled_from([(), (3,), (2, 2)]))
    rows = (*lead, 2, data.draw(st.sampled_from([1, 7, 33])))
    columns = data.draw(st.sampled_from([1, 5, 32, 130]))
    accumulator = np.float64 if dtype == np.float64 else np.float32

    def place(values, kind, repeats):
        layout = random_layout(rng, values.ndim, np.dtype(kind).itemsize, repeats)
        return Placed(values.shape, kind, layout, values).view

    spread = data.draw(st.sampled_from([1.0, 30.0]))
    lses = [rng.standard_normal(rows) * spread for _ in range(number)]
    lses = [place(np.where(rng.random(rows) < 0.2, -np.inf, x), accumulator, True) for x in lses]
    # A part that saw nothing may hold anything.
    outs = [rng.standard_normal((*rows, columns)) for _ in lses]
    outs = [
        place(np.where(np.isinf(x)[..., None], np.nan, o), dtype, False)
        for o, x in zip(outs, lses, strict=True)
    ]
    copies = Copies(HostMemory())
    like = target(rng, (*rows, columns), dtype, True), target(rng, rows, accumulator, True)
    parts = [(copies.array(o), copies.array(x)) for o, x in zip(outs, lses, strict=True)]
    emulator = Emulator(schedule=randomly(int(rng.integers(100))))
    out, lse = (copies.array(x, True) for x in like)
    emulator.rowwise(COMBINE, parts, out=out, lse=lse)
    copies.check()
    out, lse = (copies.value(x) for x in like)

    bounds = combine_bounds(outs, lses, dtype)
    assert rho(out, *bounds["out"]).value <= 1
    assert rho(lse, *bounds["lse"]).value <= 1
    empty = np.isinf(np.stack(lses)).all(axis=0)
    assert (lse[empty] == -np.inf).all()


def test_a_log_sum_exp_of_infinity_counts_as_nan():
    value, lse = np.ones((1, 3, 5), np.float32), np.zeros((1, 3), np.float32)
    bad = np.array([[0, np.inf, 0]], np.float32)
    out, joined = np.zeros_like(value), np.zeros_like(lse)
    Emulator().rowwise(COMBINE, [(value, lse), (2 * value, bad)], out=out, lse=joined)
    assert np.array_equal(np.isnan(joined[0]), [False, True, False])
    assert np.array_equal(np.isnan(out[0]).all(axis=1), [False, True, False])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", [2, 3, 17])
def test_parts_of_the_largest_number_are_joined_to_it(dtype, number):
    largest = Precision.of(dtype).output.largest
    accumulator = np.float64 if dtype == np.float64 else np.float32
    value, lse = np.full((2, 3, 5), largest, dtype), np.full((2, 3), 100, accumulator)
    value[1] = -value[1]
    out, joined = np.zeros_like(value), np.zeros_like(lse)
    Emulator().rowwise(COMBINE, [(value, lse)] * number, out=out, lse=joined)
    assert np.isfinite(out).all()
    unit = 8 * number * Precision.of(accumulator).unit
    assert rho(out, value, np.abs(value.astype(float)) * unit).value <= 1
    np.testing.assert_allclose(joined, 100 + np.log(number), rtol=1e-6)
