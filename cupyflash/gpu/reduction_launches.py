"""Launches of reductions, and of their gradients: see `launch`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import cuda_device, device_arrays, elementwise
from ..expr.nodes import Expr, convert
from ..problem.bound_exprs import of_logit, slope_of
from ..problem.call import Array, Call, Gradients
from ..problem.reduction_form import Form
from . import launch, reduction_route
from .lookups import Served


def reduce(
    call: Call, form: Form, lse: Array | None, value: Expr | None = None
) -> tuple[Array, Array | None]:
    """Return what is taken of a call's pairs, (B, Hq, ...), and with "top" positions of keys.

    `lse` is (..., Hq, Lq), or None for values that do not depend on it. In `value`, the score
    stands for the logit; a form of it has "program".
    """
    device, number = call.device, call.problem.accumulator
    assert device is not None
    shape = reduction_route.shape_of(call, form)
    with cuda_device.current(device):
        found = device_arrays.empty(shape, number)
        keys = device_arrays.empty(shape, np.dtype(np.int64)) if form.by == "top" else None
        if form.along == "distance":  # no tile has some distances
            elementwise.fill(found, 0 if form.by == "sum" else -math.inf)
        made = reduction_route.of(call, cuda_device.of(device), form, lse, value, found)
        compiled = launch.compiled_recipe(made.recipe, device)
        addresses, copies = launch.read_in_place(call, made.recipe)
        addresses |= launch.addresses_of({"found": found, "keys": keys, "lse": lse})
        compiled.forward(addresses)
        del copies  # of kernels that have been queued
        if form.along == "distance":
            found = _joined(found, form.by, reduction_route.parts(made))
        flat = (call.problem.batch, *found.shape[len(call.problem.lead) :])
        return found.reshape(flat), None if keys is None else keys.reshape(flat)


def backward(
    call: Call, factor: Expr, lse: Array, dq: Array, dk: Array, dbias: Array | None
) -> None:
    """Write the gradients of a loss of weights: see `Backend.reduction_gradients`.

    They are those of a backward, of which values and do are one column of zeros, and dLSE is 1.
    Its kernels compute ``P (dP - delta)``, which is P then, and multiply it by a derivative of
    scores, of which the factor becomes a part; for the bias, by the factor alone.
    """
    device, problem = call.device, replace(call.problem, d_v=1)
    assert device is not None
    with cuda_device.current(device):
        keys, queries = (*call.k.shape[:-1], 1), (*lse.shape, 1)
        v, dv = (device_arrays.empty(keys, problem.dtype) for _ in range(2))
        out = device_arrays.empty(queries, problem.dtype)
        dlse = device_arrays.empty(lse.shape, problem.accumulator)
        for array, value in ((v, 0), (out, 0), (dlse, 1)):
            elementwise.fill(array, value)
        made, read = replace(call, v=v, problem=problem), (out, out, lse, dlse)
        gradients: Gradients = Gradients(dq, dk, dv)
        served = []
        if dbias is not None:
            of_pairs = dbias[(None,) * (3 - dbias.ndim)]
            served.append(Served(of_pairs, convert(of_logit(factor, call), "float")))
        how: dict[str, Any] = {"slope": slope_of(factor, call), "served": served}
        launch.backward(made, *read, gradients, None, deterministic=True, **how)


def _joined(found: Array, by: str, parts: int) -> Array:
    """Return what is taken of the first rows, in their order."""
    taken = found[..., 0, :]
    for n in range(1, parts):
        row = found[..., n, :]
        taken = taken + row if by == "sum" else np.maximum(taken, row)
    return taken
