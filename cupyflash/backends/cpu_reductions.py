"""Statistics of weights on NumPy arrays, and gradients of those that are sums of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..expr.derivative import derivative
from ..expr.functions import SCORE
from ..expr.nodes import Expr, convert, rebuild
from ..problem.bound_exprs import bound, trees
from ..problem.call import Array, Call, Problem
from ..problem.reduction_form import Form
from . import cpu_programs, cpu_tiles


def reduce(
    call: Call, form: Form, lse: Array | None, value: Expr | None = None
) -> tuple[Array, Array | None]:
    """Return what is taken of pairs: see `Backend.reduce`."""
    from cupyflash.reference.cpu import launch, reduce_call

    from ..expr.lower import lowered

    made: Any = reduce_call.Form(*form)
    programs = cpu_programs.programs(call)
    program, held = None, None
    if value is not None:
        program, held = lowered(convert(bound(value, call.problem), "float"))
    plan = cpu_tiles.tiled(_of_keys(call.problem))
    found = launch.reduce(
        call.problem, programs, program, made, call.q, call.k, lse, plan.block_q, plan.block_kv
    )
    del held  # programs have read its arrays
    taken, indices = found
    if form.of == "entropy" and call.sink is not None:
        assert lse is not None, "entropies depend on it"
        rows = lse.reshape(taken.shape[:-1])
        taken += of_sink(call, rows, lambda gap: gap)[..., None]
    return taken, indices.reshape(taken.shape) if form.by == "top" else None


def of_sink(call: Call, lse: Array, function: Callable[[Array], Array]) -> Array:
    """Return the sink's weights times a function of LSE - sink, (..., Hq, Lq)."""
    sink = np.asarray(call.sink).astype(lse.dtype)[:, None]
    with np.errstate(invalid="ignore"):  # without a sink and keys, -inf less -inf
        gap = lse - sink
        made: Array = np.where(sink == -np.inf, 0, np.exp(-gap) * function(gap))
    return made


def _of_keys(problem: Problem) -> Problem:
    return replace(problem, d_v=1)


def backward(call: Call, factor: Expr, lse: Array, dq: Array, dk: Array) -> None:
    """Write the gradients of a loss whose derivative by the logit of a pair is p times `factor`.

    `factor` is an expression of the score, which stands for the logit. The kernels of the backward
    compute ``P (dP - delta)``, which is P where values are 0 and dLSE is 1, and multiply it by the
    derivative of the score changes, of which the factor becomes a part.
    """
    from cupyflash.reference.cpu import launch

    from ..expr.lower import lowered

    problem, made = call.problem, trees(call)
    assert problem.d_v == 1, "values are one column of zeros"
    logit = SCORE if made.changed is None else made.changed
    known = bound(factor, problem)
    slope = rebuild(
        known, lambda node: logit if node.op == "symbol" and node.value == "score" else None
    )
    if call.score_mod is not None:
        slope = convert(derivative(bound(call.score_mod.expr, problem)), "float") * slope
    program, held = lowered(convert(slope, "float"))
    programs = replace(cpu_programs.programs(call), slope=program)
    number, shape = problem.accumulator, lse.shape
    out = np.zeros((*shape, 1), problem.dtype)
    plan = cpu_tiles.tiled(problem)
    launch.backward(
        problem,
        programs,
        out,
        call.q,
        call.k,
        call.v,
        out,
        lse,
        np.ones(shape, number),
        None,
        dq,
        dk,
        np.empty_like(call.v, shape=call.v.shape),
        None,
        None,
        plan.block_q,
        plan.block_kv,
        None,
    )
    del held  # programs have read its arrays
