"""Where results go: memory order, out= and grads_out=, aliasing, workspace, what a call keeps."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from placement import Layout, Placed, same_bits

from cupyflash import (
    ArgumentError,
    Gradients,
    Plan,
    attention,
    attention_backward,
    attention_varlen,
    attention_vjp,
    masks,
    plan,
    scores,
    workspace_size,
)
from cupyflash.arrays.interop import repeats_an_address, share_memory
from cupyflash.backends import cpu_tiles
from cupyflash.problem import validate

F32 = np.float32
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)


def filled(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


def random_problem(lead: Any = (2,), heads: int = 4, heads_kv: int = 2, dtype: Any = F32) -> Any:
    """Return do, q, k, v for 37 queries and 53 keys, leading axes by operand."""
    leads = lead if isinstance(lead, dict) else dict.fromkeys("qkv", lead)
    q = filled(*leads["q"], heads, 37, 16, dtype=dtype)
    k = filled(*leads["k"], heads_kv, 53, 16, dtype=dtype)
    v = filled(*leads["v"], heads_kv, 53, 9, dtype=dtype)
    full = np.broadcast_shapes(*leads.values())
    return filled(*full, heads, 37, 9, dtype=dtype), q, k, v


# Memory order


@pytest.mark.parametrize(
    "order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3), (3, 2, 1, 0)]
)
@BY_DTYPE
def test_out_has_the_memory_order_of_q(order, dtype):
    _, q, k, v = random_problem(dtype=dtype)
    expected = attention(q, k, v)
    inverse = np.argsort(order)
    placed = np.ascontiguousarray(q.transpose(order)).transpose(inverse)
    out = attention(placed, k, v)
    assert out.transpose(order).flags.c_contiguous
    assert same_bits(out, expected)


def test_a_swapped_view_comes_back_as_one():
    x = filled(2, 37, 4, 16)  # (B, L, H, D)
    out = attention(*(x.swapaxes(-3, -2),) * 3)
    assert out.shape == (2, 4, 37, 16)
    assert out.swapaxes(-3, -2).flags.c_contiguous
    packed = filled(37, 4, 16)
    out = attention_varlen(*(packed.swapaxes(0, 1),) * 3, [0, 10, 37], [0, 10, 37])
    assert out.swapaxes(0, 1).flags.c_contiguous


def test_gradients_have_the_memory_order_of_their_inputs():
    do, q, k, v = random_problem()
    q, k = (np.ascontiguousarray(x.swapaxes(-3, -2)).swapaxes(-3, -2) for x in (q, k))
    grads = attention_vjp(q, k, v)[1](do)
    assert grads.dq.swapaxes(-3, -2).flags.c_contiguous
    assert grads.dk.swapaxes(-3, -2).flags.c_contiguous
    assert grads.dv.flags.c_contiguous


# out=, lse_out=, grads_out=


def outcome(problem: Any, **options: Any) -> tuple[np.ndarray, np.ndarray, Gradients]:
    do, q, k, v = problem
    out, lse = attention(q, k, v, return_lse=True, **options)
    return out, lse, attention_backward(do, q, k, v, out, lse, **options)


@BY_DTYPE
def test_results_are_written_where_told_and_returned_as_the_same_objects(dtype):
    problem = random_problem(dtype=dtype)
    do, q, k, v = problem
    options = {"bias": filled(4, 1, 53, dtype=np.float16), "sink": filled(4)}
    expected_out, expected_lse, expected = outcome(problem, **options)
    # Every second element of a row, rows from the last to the first, off alignment: any view does.
    layout = Layout(steps=(1, 2, -1, 2), shift=1)
    accumulator = expected_lse.dtype
    out, lse = Placed(expected_out.shape, dtype, layout), Placed(expected_lse.shape, accumulator)
    returned = attention(q, k, v, return_lse=True, out=out.view, lse_out=lse.view, **options)
    assert returned[0] is out.view
    assert returned[1] is lse.view
    assert same_bits(out.view, expected_out)
    assert same_bits(lse.view, expected_lse)
    owners = (q, k, v, options["bias"], options["sink"])
    targets = [
        Placed(x.shape, x.dtype, Layout(steps=layout.steps[-x.ndim :], shift=1)) for x in owners
    ]
    views = Gradients(*(target.view for target in targets))
    grads = attention_backward(do, q, k, v, expected_out, expected_lse, grads_out=views, **options)
    for name, mine, theirs, wanted in zip(grads._fields, views, grads, expected, strict=True):
        assert mine is theirs, name
        assert same_bits(theirs, wanted), name
    for target in (out, lse, *targets):
        target.check()


def test_lse_out_is_written_though_only_out_is_returned():
    _, q, k, v = random_problem()
    lse_out = np.empty((2, 4, 37), F32)
    out = attention(q, k, v, lse_out=lse_out)
    assert isinstance(out, np.ndarray)
    assert same_bits(lse_out, attention(q, k, v, return_lse=True)[1])


def test_some_gradients_may_be_given():
    problem = random_problem()
    do, q, k, v = problem
    out, lse, expected = outcome(problem)
    dk = np.empty_like(k)
    grads = attention_backward(do, q, k, v, out, lse, grads_out=(None, dk, None))
    assert grads.dk is dk
    for mine, wanted in zip(grads[:3], expected[:3], strict=True):
        assert same_bits(mine, wanted)


def test_two_dimensional_results():
    do, q, k, v = (x[0, 0] for x in random_problem())
    out, lse = np.empty((37, 9), F32), np.empty(37, F32)
    assert attention(q, k, v, out=out, lse_out=lse) is out
    dq = np.empty_like(q)
    grads = attention_backward(do, q, k, v, out, lse, grads_out=(dq, None, None))
    assert grads.dq is dq
    expected = outcome(tuple(x[None] for x in (do, q, k, v)))
    assert same_bits(out, expected[0][0])
    assert same_bits(lse, expected[1][0])
    for mine, wanted in zip(grads[:3], expected[2][:3], strict=True):
        assert same_bits(mine, wanted[0])


# Packed QKV


@BY_DTYPE
@pytest.mark.parametrize("axis", [0, 1, 2, 3, 4])
def test_packed_qkv_is_served_by_views(dtype, axis):
    shape = [2, 37, 4, 16]
    shape.insert(axis, 3)
    qkv, grad = filled(*shape, dtype=dtype), np.empty(shape, dtype)
    q, k, v = (np.moveaxis(qkv, axis, 0)[n].swapaxes(-3, -2) for n in range(3))
    views = [np.moveaxis(grad, axis, 0)[n].swapaxes(-3, -2) for n in range(3)]
    do = filled(2, 4, 37, 16, dtype=dtype)
    out, lse, expected = outcome((do, *(np.ascontiguousarray(x) for x in (q, k, v))))
    grads = attention_backward(do, q, k, v, out, lse, grads_out=views)
    for mine, theirs, wanted in zip(views, grads[:3], expected[:3], strict=True):
        assert mine is theirs
        assert same_bits(theirs, wanted)
    assert same_bits(attention(q, k, v), out)


# Aliasing


def test_interleaved_views_share_nothing():
    rng = np.random.default_rng(0)
    for _ in range(200):
        shape = [int(rng.choice([1, 2, 3, 7, 64, 129])) for _ in range(4)]
        axis = int(rng.integers(5))
        shape.insert(axis, 3)
        whole = np.moveaxis(np.empty(shape, rng.choice(["u1", "f2", "f8"])), axis, 0)
        first, second = (whole[n].transpose(rng.permutation(4)) for n in (0, 2))
        assert not share_memory(first, second)
        assert not repeats_an_address(first)
        flipped = first[::-1, :, ::-1]
        assert share_memory(first, flipped)


def exact_overlap(view: np.ndarray) -> bool:
    """Whether two elements share a byte, by counting."""
    places = np.zeros(view.shape, np.int64)
    for axis, stride in enumerate(view.strides):
        steps = np.arange(view.shape[axis]) * stride
        places += steps.reshape((-1,) + (1,) * (view.ndim - axis - 1))
    touched = (places.reshape(-1, 1) + np.arange(view.itemsize)).reshape(-1)
    return len(np.unique(touched)) < touched.size


def test_internal_overlap_is_seen_exactly():
    rng = np.random.default_rng(1)
    seen = {True: 0, False: 0}
    memory = np.zeros(4096, np.uint8)
    for _ in range(2000):
        ndim = int(rng.integers(1, 4))
        shape = tuple(int(n) for n in rng.integers(0, 5, ndim))
        strides = tuple(int(n) for n in rng.integers(-24, 25, ndim))
        view = np.ndarray(shape, "f4", memory, 2048, strides)
        expected = exact_overlap(view)
        assert repeats_an_address(view) == expected, (shape, strides)
        seen[expected] += 1
    assert min(seen.values()) > 200


def test_a_sliding_window_view_cannot_be_written():
    _, q, k, v = random_problem(lead=(), heads=1, heads_kv=1)
    out = np.ndarray((1, 37, 9), F32, np.zeros(99, F32), strides=(4, 4, 4))
    with pytest.raises(
        ArgumentError, match="out: got an array with several elements at one address"
    ):
        attention(q, k, v, out=out)


# Inputs


def test_inputs_are_read_only_and_unmodified():
    layout = Layout(order=(2, 0, 1, 3), steps=(1, -2, 1, 2), shift=2)
    do, q, k, v = (Placed(x.shape, F32, layout, x) for x in random_problem())
    bias = Placed((4, 37, 53), F32, Layout(), filled(4, 37, 53))
    sink = Placed((4,), np.float64, Layout(), filled(4))
    allowed = Placed((37, 53), np.bool_, Layout(), filled(37, 53) > -1)
    slopes = Placed((4,), np.float16, Layout(), filled(4))
    options = {
        "bias": bias.view,
        "sink": sink.view,
        "mask": allowed.view,
        "score_mod": scores.alibi(slopes.view),
    }
    out, lse = attention(q.view, k.view, v.view, return_lse=True, **options)
    kept = [Placed(x.shape, x.dtype, Layout(), x) for x in (out, lse, filled(*lse.shape))]
    attention_backward(
        do.view, q.view, k.view, v.view, kept[0].view, kept[1].view, dlse=kept[2].view, **options
    )
    for array in (do, q, k, v, bias, sink, allowed, slopes, *kept):
        assert not array.view.flags.writeable
        array.check()


# Shapes of gradients

LEADS = {
    "none": {"q": (), "k": (), "v": ()},
    "q alone": {"q": (3,), "k": (), "v": ()},
    "k of one": {"q": (3,), "k": (1,), "v": (3,)},
    "v alone": {"q": (), "k": (), "v": (3,)},
    "q of one": {"q": (1, 1), "k": (2, 1), "v": (1, 3)},
    "crossed": {"q": (2, 1), "k": (3,), "v": (2, 3)},
    "empty": {"q": (0,), "k": (1,), "v": ()},
}


@BY_DTYPE
@pytest.mark.parametrize("name", LEADS)
def test_gradients_have_their_inputs_shape_and_dtype(name, dtype):
    leads = LEADS[name]
    problem = random_problem(leads, dtype=dtype)
    do, q, k, v = problem
    bias, sink = filled(1, 53, dtype=np.float64), filled(4, dtype=np.float16)
    out, lse, grads = outcome(problem, bias=bias, sink=sink)
    for gradient, owner in zip(grads, (q, k, v, bias, sink), strict=True):
        assert (gradient.shape, gradient.dtype) == (owner.shape, owner.dtype)
    # The same in one workspace of the size asked for, and nothing is written around it.
    size = workspace_size(q, k, v, bias=bias, sink=sink)
    scratch = Placed((size,), np.uint8, Layout(shift=1))
    again = attention_backward(do, q, k, v, out, lse, bias=bias, sink=sink, workspace=scratch.view)
    scratch.check()
    for mine, wanted in zip(again, grads, strict=True):
        assert same_bits(mine, wanted)


def test_matrices_beside_stacks():
    do, q, k, v = random_problem({"q": (2,), "k": (), "v": ()}, heads=3, heads_kv=1)
    out, _, grads = outcome((do, q, k[0], v[0]))
    expected = outcome((do, q, k, v))
    assert same_bits(out, expected[0])
    assert (grads.dk.shape, grads.dv.shape) == ((53, 16), (53, 9))
    assert same_bits(grads.dk, expected[2].dk[0])


# What is returned


def test_return_types():
    do, q, k, v = random_problem()
    out = attention(q, k, v)
    assert type(out) is np.ndarray
    pair = attention(q, k, v, return_lse=True)
    assert type(pair) is tuple
    assert [type(x) for x in pair] == [np.ndarray, np.ndarray]
    assert len(attention_vjp(q, k, v)) == 2
    assert len(attention_vjp(q, k, v, return_lse=True)) == 3
    grads = attention_vjp(q, k, v)[1](do)
    assert type(grads) is Gradients
    assert grads._fields == ("dq", "dk", "dv", "dbias", "dsink")
    assert grads.dbias is None
    assert grads.dsink is None

    class Subclass(np.ndarray):
        pass

    assert type(attention(q.view(Subclass), k, v)) is np.ndarray


@BY_DTYPE
def test_dtypes_of_results(dtype):
    out, lse, grads = outcome(random_problem(dtype=dtype))
    assert out.dtype == dtype
    assert lse.dtype == (np.float64 if dtype is np.float64 else np.float32)
    assert {x.dtype for x in grads[:3]} == {np.dtype(dtype)}


# The plan


def test_a_plan_says_what_and_why():
    _, q, k, v = random_problem()
    made = plan(q, k, v, mask=masks.causal())
    assert isinstance(made, Plan)
    assert made.kernel == "reference.forward"
    assert made.block_q >= 1
    assert made.block_kv >= 1
    for word in ("NumPy", "Numba", "float32", f"{made.block_q} x {made.block_kv}", "16"):
        assert word in made.reason
    assert "float64" in plan(*(x.astype(float) for x in (q, k, v))).reason
    with pytest.raises(FrozenInstanceError):
        made.block_q = 1


def test_a_plan_does_not_hang_on_the_batch():
    class NoBatch:
        """A problem whose batch cannot be read."""

        def __init__(self, problem: Any) -> None:
            self._problem = problem

        def __getattr__(self, name: str) -> Any:
            assert name not in {"lead", "batch", "start_q", "start_k"}
            return getattr(self._problem, name)

    for d in (1, 64, 128, 129, 512):
        x = filled(2, 4, 9, d)
        problem = validate.call(x, x, x).problem
        assert cpu_tiles.choose(NoBatch(problem)) == plan(x, x, x)
        assert plan(x, x, x) == plan(x[:0], x[:0], x[:0]) == plan(x[0], x[0], x[0])
        assert plan(x, x, x) == plan(*(x[0],) * 3, offsets_q=[0, 1, 9], offsets_k=[0, 9, 9])


def test_a_plan_computes_nothing():
    x = np.broadcast_to(F32(0), (64, 1 << 20, 128))  # 32 GiB, were it there
    assert plan(x, x, x).block_q
    assert inspect.signature(plan).return_annotation in (Plan, "Plan")
