"""From a validated call to the kernels that serve it."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import config
from .expr.bind import Alignment, Axis, aligned, bind
from .expr.derivative import derivative
from .expr.functions import POSITIONS, SCORE, where
from .expr.interval import tile_class
from .expr.nodes import Expr, convert
from .problem import Array, Call, Gradients, Plan

_B, _H, _I, _J = POSITIONS


def _programs(call: Call) -> tuple[Any, list[Expr]]:
    """Lower a call's mask and score changes; the trees keep the arrays that programs read alive."""
    from cupyflash.reference.layout import Programs
    from cupyflash.reference.program import empty_program

    from .expr.lower import lower

    none = empty_program()
    score = slope = mask = tile = none
    trees: list[Expr] = []
    if call.score_mod is not None:
        changed = bind(call.score_mod.expr, call.problem)
        slope_tree = convert(derivative(changed), "float")
        slope = lower(slope_tree)
        trees += [changed, slope_tree]
    else:
        changed = SCORE
    if call.bias is not None:
        axes = (Axis(_H, "heads"), Axis(_I, "len_q"), Axis(_J, "len_k"))
        bias = bind(aligned(Alignment(call.bias, "bias", axes)), call.problem)
        hidden = float("-inf")
        changed = where(bias == hidden, hidden, changed + bias)  # hides even a NaN score
        trees.append(changed)
    if changed is not SCORE:
        score = lower(changed)
    if call.mask is not None:
        allowed = bind(call.mask.expr, call.problem)
        classes = tile_class(allowed)
        mask, tile = lower(allowed), lower(classes)
        trees += [allowed, classes]
    return Programs(score, slope, mask, tile), trees


def forward(call: Call, out: Array, lse: Array, plan: Plan | None = None) -> int:
    """Compute `out` and `lse`; return how many tiles were visited."""
    from cupyflash.reference import launch

    plan = plan or config.choose(call.problem)
    programs, trees = _programs(call)
    visited = launch.forward(
        call.problem,
        programs,
        call.q,
        call.k,
        call.v,
        call.sink,
        out,
        lse,
        plan.block_q,
        plan.block_kv,
    )
    del trees
    return visited


def backward(
    call: Call,
    do: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    gradients: Gradients,
    workspace: Array | None,
    plan: Plan | None = None,
) -> int:
    """Compute `gradients`; return how many tiles were visited."""
    from cupyflash.reference import launch

    plan = plan or config.choose(call.problem)
    programs, trees = _programs(call)
    visited = launch.backward(
        call.problem,
        programs,
        do,
        call.q,
        call.k,
        call.v,
        out,
        lse,
        dlse,
        call.sink,
        *gradients,
        plan.block_q,
        plan.block_kv,
        workspace,
    )
    del trees
    return visited


def workspace_size(call: Call) -> int:
    """Return the bytes of scratch that the call's backward needs."""
    from cupyflash.reference import launch

    return launch.backward_scratch_size(call.problem, config.choose(call.problem).block_q)


def combine(parts: list[tuple[Array, Array]], out: Array, lse: Array) -> None:
    """Combine several (out, lse)."""
    from cupyflash.reference import launch

    launch.combine(parts, out, lse)


def empty_output(
    call: Call, out: Array | None = None, lse: Array | None = None
) -> tuple[Array, Array]:
    """Return out and lse as given, or else uninitialised: out in the memory order of q."""
    problem, q = call.problem, call.q
    if problem.packed:
        shape: tuple[int, ...] = (*q.shape[:-1], problem.d_v)
    else:
        q = np.broadcast_to(q, (*problem.lead, *q.shape[-3:]))
        shape = (*q.shape[:-1], problem.d_v)
    if out is None:
        out = np.empty_like(q, shape=shape, subok=False)
    return out, np.empty(shape[:-1], problem.accumulator) if lse is None else lse
