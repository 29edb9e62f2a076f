"""Statistics of weights on NumPy arrays, and gradients of those that are sums of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..expr.functions import SCORE, exp
from ..expr.nodes import Expr, convert
from ..problem.bound_exprs import bound, by_query, slope_of
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
    assert call.sink is not None, "the caller has looked"
    sink = call.sink.astype(lse.dtype)[:, None]
    with np.errstate(invalid="ignore"):  # without a sink and keys, -inf less -inf
        gap = lse - sink
        made: Array = np.where(sink == -np.inf, 0, np.exp(-gap) * function(gap))
    return made


def _of_keys(problem: Problem) -> Problem:
    return replace(problem, d_v=1)


def backward(
    call: Call, factor: Expr, lse: Array, dq: Array, dk: Array, dbias: Array | None
) -> None:
    """Write the gradients of a loss: see `Backend.reduction_gradients`.

    The kernels of the backward compute ``P (dP - delta)``, which is P where values are 0 and dLSE
    is 1, and multiply it by the derivative of the score changes, of which the factor becomes a
    part.
    """
    from cupyflash.reference.cpu import launch

    from ..expr.lower import lowered

    problem = call.problem
    assert problem.d_v == 1, "values are one column of zeros"
    if dbias is not None:
        _bias_gradient(call, factor, lse, dbias)
    program, held = lowered(slope_of(factor, call))
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


def _bias_gradient(call: Call, factor: Expr, lse: Array, dbias: Array) -> None:
    """Write sums of p times the factor over the axes that the bias does not have."""
    _check_bias(call)
    problem = call.problem
    len_q, len_k = int(problem.len_q), int(problem.len_k)
    shape = (1,) * (len(problem.lead) + 3 - dbias.ndim) + dbias.shape
    by_rows, by_keys = shape[-2] == len_q, shape[-1] == len_k
    block = (1 if by_rows else max(len_q, 1), 1 if by_keys else max(len_k, 1))
    form = Form("program", "blocks" if by_keys else "keys", "sum", rows=(0, len_q), block=block)
    weight = exp(SCORE - by_query(lse, "lse"))
    found = reduce(call, form, None, weight * factor)[0]
    full = found.reshape(*problem.lead, problem.heads, *found.shape[2:])
    axes = tuple(n for n, size in enumerate(shape) if size == 1)  # keys may be summed already
    dbias[...] = full.sum(axis=axes, keepdims=True).reshape(dbias.shape)


def _check_bias(call: Call) -> None:
    """Refuse a bias whose gradient would take more memory than the bias."""
    problem, bias = call.problem, call.bias
    assert bias is not None, "the caller has looked"
    shape = (1,) * (len(problem.lead) + 3 - bias.ndim) + bias.shape
    len_q, len_k = int(problem.len_q), int(problem.len_k)
    shared = shape[:-2] != (*problem.lead, problem.heads)
    if shared and shape[-2] == len_q > 1 and shape[-1] == len_k > 1:
        full = (*problem.lead, problem.heads, len_q, len_k)
        raise ArgumentError(
            f"bias: got shape {bias.shape}, with an element for each pair that heads or entries "
            "share; the gradients of reductions sum those of one, or of rows or columns, alone. "
            f"Pass np.broadcast_to(bias, {full}), whose gradient is not summed, or "
            "bias_gradient=False."
        )
