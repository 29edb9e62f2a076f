"""Launches of reductions: see `launch`."""

from __future__ import annotations

import math

import numpy as np

from ..arrays import cuda_device, device_arrays
from ..expr.nodes import Expr
from ..problem.call import Array, Call
from ..problem.reduction_form import Form
from . import launch, reduction_route


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
            device_arrays.fill(found, 0 if form.by == "sum" else -math.inf)
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


def _joined(found: Array, by: str, parts: int) -> Array:
    """Return what is taken of the first rows, in their order."""
    taken = found[..., 0, :]
    for n in range(1, parts):
        row = found[..., n, :]
        taken = taken + row if by == "sum" else np.maximum(taken, row)
    return taken
