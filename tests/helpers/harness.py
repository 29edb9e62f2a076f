"""Run a drawn problem as users would, or with small tiles, and measure it against the bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import cupyflash
from cupyflash.backends import cpu_tiles
from cupyflash.dispatch import CPU
from cupyflash.problem import replay, validate
from cupyflash.problem.call import Call, Gradients, Plan, changed
from cupyflash.problem.options import Options
from cupyflash.reference.cpu import backward_call
from cupyflash.testing import (
    BackwardBound,
    ForwardBound,
    Precision,
    Subject,
    backward_bound,
    backward_bound_varlen,
    forward_bound,
    forward_bound_varlen,
    rho,
)
from cupyflash.testing.cases import Problem
from cupyflash.testing.placement import Layout, Placed, random_layout

Array = np.ndarray[Any, Any]
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink")


def call_of(problem: Problem) -> Call:
    arrays = problem.q, problem.k, problem.v
    if problem.offsets is None:
        return validate.call(*arrays, Options(**problem.options))
    return validate.varlen_call(*arrays, *problem.offsets, True, Options(**problem.options))


def with_offsets(call: Call, offsets: Iterable[Array]) -> Call:
    """Return a call on packed sequences with other offsets, which nobody checks."""
    named = dict(zip(("offsets_q", "offsets_k"), offsets, strict=True))
    rows = dataclasses.replace(call.rows, offsets=named)
    return changed(call, problem=changed(call.problem, rows=rows))


def plan_of(block_q: int, block_kv: int) -> Plan:
    return Plan("reference.forward", block_q, block_kv, "small tiles, for a test")


@contextmanager
def small_tiles(problem: Problem) -> Iterator[Subject]:
    """The package's public functions on the CPU, with the tiles that a problem says, to judge."""
    tiled, has_few_queries = cpu_tiles.tiled, cpu_tiles.has_few_queries

    def chosen(of: Any, mask: Any = None) -> Plan:
        return tiled(of, mask) if problem.tiles is None else plan_of(*problem.tiles)

    def few(of: Any) -> bool:
        return problem.tiles is None and has_few_queries(of)

    with (
        mock.patch.multiple(cpu_tiles, tiled=chosen, has_few_queries=few),
        mock.patch.object(replay, "_entries", {}),  # calls with other tiles are other calls
    ):
        yield Subject(
            cupyflash.attention,
            cupyflash.attention_backward,
            varlen=cupyflash.attention_varlen,
            varlen_backward=cupyflash.attention_varlen_backward,
            combine=cupyflash.combine,
            cached=cupyflash.attention_cached,
            append=cupyflash.append,
            rope=cupyflash.rope,
            jvp=cupyflash.attention_jvp,
            varlen_jvp=cupyflash.attention_varlen_jvp,
            backward_jvp=cupyflash.attention_backward_jvp,
            tiles=problem.tiles or (64, block_kv(problem)),
        )


def block_kv(problem: Problem) -> int:
    if problem.tiles:
        return problem.tiles[1]
    call = call_of(problem)
    return cpu_tiles.choose(call.problem, call.mask).plan.block_kv


def _target(problem: Problem, rng: np.random.Generator, shape: Any, dtype: Any) -> Placed:
    layout = Layout()
    if problem.layouts == "random":
        layout = random_layout(rng, len(shape), np.dtype(dtype).itemsize)
    return Placed(shape, dtype, layout)


def _full(array: Array | None, matrix: bool) -> Array | None:
    return array[None] if matrix and array is not None else array


def run_forward(problem: Problem) -> tuple[Array, Array]:
    """Compute out and lse into poisoned memory, and check that nothing else changed."""
    rng = np.random.default_rng([problem.seed, 1])
    out = _target(problem, rng, problem.do.shape, problem.dtype)
    lse = _target(problem, rng, problem.do.shape[:-1], problem.accumulator)
    if problem.tiles:
        call = call_of(problem)
        targets = [_full(x.view, call.matrices) for x in (out, lse)]
        CPU.forward(call, *targets, plan=plan_of(*problem.tiles))
    else:
        arrays = problem.q, problem.k, problem.v
        options = problem.options | {"return_lse": True, "out": out.view, "lse_out": lse.view}
        if problem.offsets is None:
            results = cupyflash.attention(*arrays, **options)
        else:
            results = cupyflash.attention_varlen(*arrays, *problem.offsets, **options)
        assert results[0] is out.view
        assert results[1] is lse.view
    for placed in (out, lse, *problem.placed):
        placed.check()
    return out.view, lse.view


def run_backward(problem: Problem, out: Array, lse: Array) -> Gradients:
    """Compute every gradient into poisoned memory, and check that nothing else changed."""
    rng = np.random.default_rng([problem.seed, 2])
    call = call_of(problem)
    owners = [problem.q, problem.k, problem.v]
    owners += [problem.options.get("bias"), problem.options.get("sink")]
    made = [None if x is None else _target(problem, rng, x.shape, x.dtype) for x in owners]
    views = [None if x is None else x.view for x in made]
    plan = plan_of(*problem.tiles) if problem.tiles else cpu_tiles.tiled(call.problem, call.mask)
    scratch = None
    if problem.workspace:
        size = backward_call.backward_scratch_size(call.problem, plan.block_q)
        scratch = Placed((size,), np.uint8)
    workspace = None if scratch is None else scratch.view
    if problem.tiles:
        rows = [_full(x, call.matrices) for x in (problem.do, out, lse, problem.dlse)]
        targets = [
            _full(x, matrix)
            for x, matrix in zip(views, (*call.were_matrices, False, False), strict=True)
        ]
        CPU.backward(call, *rows, Gradients(*targets), workspace, plan=plan_of(*problem.tiles))
        results = Gradients(*views)
    else:
        arrays = problem.do, problem.q, problem.k, problem.v, out, lse
        options = problem.options | {"dlse": problem.dlse, "workspace": workspace}
        options["grads_out"] = Gradients(*views)
        if problem.offsets is None:
            results = cupyflash.attention_backward(*arrays, **options)
        else:
            results = cupyflash.attention_varlen_backward(*arrays, *problem.offsets, **options)
        for ours, target in zip(results, views, strict=True):
            assert ours is target
    for placed in (*made, scratch, *problem.placed):
        if placed is not None:
            placed.check()
    return results


def precision_of(problem: Problem, tensor_cores: bool) -> Precision:
    return Precision.of(problem.dtype, tensor_cores, problem.options.get("precision"))


def bound_forward(problem: Problem, tensor_cores: bool = False) -> ForwardBound:
    arrays = problem.q, problem.k, problem.v
    options = problem.options | {
        "precision": precision_of(problem, tensor_cores), "block_kv": block_kv(problem)
    }  # fmt: skip
    if problem.offsets is None:
        return forward_bound(*arrays, **options)
    return forward_bound_varlen(*arrays, *problem.offsets, **options)


def bound_backward(problem: Problem, tensor_cores: bool = False) -> BackwardBound:
    arrays = problem.do, problem.q, problem.k, problem.v
    options = problem.options | {
        "precision": precision_of(problem, tensor_cores), "block_kv": block_kv(problem),
        "dlse": problem.dlse,
    }  # fmt: skip
    if problem.offsets is None:
        return backward_bound(*arrays, **options)
    return backward_bound_varlen(*arrays, *problem.offsets, **options)


def forward_ratios(
    problem: Problem, out: Array, lse: Array, tensor_cores: bool = False
) -> dict[str, float]:
    """Return rho of out and lse. Only problems that say so may have ill-conditioned rows."""
    bound = bound_forward(problem, tensor_cores)
    assert problem.hard or not bound.ill_conditioned
    return {"out": rho(out, *bound.out).value, "lse": rho(lse, *bound.lse).value}


def backward_ratios(
    problem: Problem, gradients: Gradients, tensor_cores: bool = False
) -> dict[str, float]:
    """Return rho of every gradient; `tensor_cores` may be those of the forward alone."""
    bound = bound_backward(problem, tensor_cores)
    assert problem.hard or not bound.ill_conditioned
    ratios = {}
    for name, ours in zip(GRADIENTS, gradients, strict=True):
        expected = getattr(bound, name)
        assert (ours is None) == (expected is None)
        if ours is not None:
            ratios[name] = rho(ours, *expected).value
    return ratios


# Calls with small tiles and fresh outputs, for properties


class Result(NamedTuple):
    out: Array
    lse: Array
    visited: int  # tiles that were not EMPTY


def _call(q: Array, k: Array, v: Array, offsets: Any, options: dict[str, Any]) -> Call:
    if offsets is None:
        return validate.call(q, k, v, Options(**options))
    return validate.varlen_call(q, k, v, *offsets, True, Options(**options))


def attend(
    q: Array,
    k: Array,
    v: Array,
    tiles: tuple[int, int] = (16, 16),
    offsets: Any = None,
    **options: Any,
) -> Result:
    """`attention` on arrays with a head axis, with tiles of this size."""
    call = _call(q, k, v, offsets, options)
    out, lse = CPU.empty_output(call)
    out.fill(np.nan)
    lse.fill(np.nan)
    visited = CPU.forward(call, out, lse, plan=plan_of(*tiles)).visited
    return Result(out, lse, visited)


class BackwardResult(NamedTuple):
    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dsink: Array | None
    visited: int


def attend_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    tiles: tuple[int, int] = (16, 16),
    offsets: Any = None,
    dlse: Array | None = None,
    **options: Any,
) -> BackwardResult:
    """`attention_backward` of what `attend` gives for the same arguments."""
    out, lse, _ = attend(q, k, v, tiles, offsets, **options)
    call = _call(q, k, v, offsets, options)
    owners = (q, k, v, options.get("bias"), options.get("sink"))
    made = Gradients(*(None if x is None else np.full(x.shape, np.nan, x.dtype) for x in owners))
    served = CPU.backward(call, do, out, lse, dlse, made, None, plan=plan_of(*tiles))
    return BackwardResult(*made, served.visited)


def bound_of(
    q: Array, k: Array, v: Array, tiles: tuple[int, int] = (16, 16), **options: Any
) -> ForwardBound:
    """`forward_bound` for what `attend` computes, all of it well-conditioned."""
    bound = forward_bound(q, k, v, precision=Precision.of(q.dtype), block_kv=tiles[1], **options)
    assert not bound.ill_conditioned
    return bound


def backward_bound_of(
    do: Array, q: Array, k: Array, v: Array, tiles: tuple[int, int] = (16, 16), **options: Any
) -> BackwardBound:
    """`backward_bound` for what `attend_backward` computes, all of it well-conditioned."""
    precision = Precision.of(q.dtype)
    bound = backward_bound(do, q, k, v, precision=precision, block_kv=tiles[1], **options)
    assert not bound.ill_conditioned
    return bound


def assert_near(a: Any, b: Any, *bounds: Any) -> None:
    """Assert ``|a - b|`` at most the sum of the bounds of the two."""
    a, b = (np.asarray(x).astype(np.longdouble) for x in (a, b))
    limit = sum(np.asarray(x, np.float64) for x in bounds)
    worst = rho(a, b, np.broadcast_to(limit, a.shape))
    assert worst.value <= 1, worst
