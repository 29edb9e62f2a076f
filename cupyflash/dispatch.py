"""From a validated call to the kernels that serve it."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import cpu_tiles
from .arrays import cuda_device, device_arrays
from .gpu import launch
from .gpu.kernels import registry
from .gpu.kernels.spec import Request
from .gpu.launch import Served
from .problem import pack_gqa
from .problem.bound_exprs import Trees, trees
from .problem.call import Array, Call, Gradients, Plan


def _programs(call: Call) -> tuple[Any, Trees]:
    """Lower a call's mask and score changes; the trees keep the arrays that programs read alive."""
    from cupyflash.reference.cpu.layout import Programs
    from cupyflash.reference.cpu.program import empty_program

    from .expr.lower import lower

    made = trees(call)
    score, slope, mask, tile = (empty_program() if tree is None else lower(tree) for tree in made)
    return Programs(score, slope, mask, tile, made), made


def plan(call: Call) -> Plan:
    """Return which kernel serves a call, with which tiles."""
    if call.device is None:
        return cpu_tiles.choose(call.problem)
    return plan_on(call, cuda_device.of(call.device))


def plan_on(call: Call, facts: cuda_device.Target) -> Plan:
    """Return which kernel would serve a call on a GPU that need not be there."""
    call, _ = pack_gqa.joined(call)
    return registry.plan(Request.of(call, facts))


def forward(call: Call, out: Array, lse: Array | None, plan: Plan | None = None) -> Served:
    """Compute `out` and `lse`, which may be None on a GPU."""
    if call.device is not None:
        return launch.forward(call, out, lse, plan)
    from cupyflash.reference.cpu import launch as cpu

    assert lse is not None
    plan = plan or cpu_tiles.choose(call.problem)
    programs, held = _programs(call)
    visited = cpu.forward(
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
    del held
    return Served(visited)


def backward(
    call: Call,
    do: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    gradients: Gradients,
    workspace: Array | None,
    plan: Plan | None = None,
    deterministic: bool = False,
) -> Served:
    """Compute `gradients`."""
    if call.device is not None:
        arrays = do, out, lse, dlse, gradients, workspace
        return launch.backward(call, *arrays, plan, deterministic=deterministic)
    from cupyflash.reference.cpu import launch as cpu

    plan = plan or cpu_tiles.choose(call.problem)
    programs, held = _programs(call)
    visited = cpu.backward(
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
    del held
    return Served(visited)


def workspace_size(call: Call) -> int:
    """Return the bytes of scratch that the call's backward needs."""
    if call.device is not None:
        return launch.workspace_size(call)
    from cupyflash.reference.cpu import launch as cpu

    return cpu.backward_scratch_size(call.problem, cpu_tiles.choose(call.problem).block_q)


def combine(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Combine several (out, lse)."""
    first_out, first_lse = parts[0]
    out, device = empty_like(first_out), device_arrays.device_of(first_out)
    if device is not None:
        with cuda_device.current(device):
            lse: Array = device_arrays.empty(first_lse.shape, first_lse.dtype)
        launch.combine(parts, out, lse)
        return out, lse
    from cupyflash.reference.cpu import launch as cpu

    lse = np.empty(first_lse.shape, first_lse.dtype)
    cpu.combine(parts, out, lse)
    return out, lse


def empty_like(array: Array) -> Array:
    """Return an uninitialised array of the same kind, shape, dtype and memory order."""
    if device_arrays.is_device_array(array):
        made: Array = device_arrays.empty_like(array, array.shape)
        return made
    return np.empty_like(array, subok=False)


def empty_output(
    call: Call, out: Array | None = None, lse: Array | None = None, want_lse: bool = True
) -> tuple[Array, Array | None]:
    """Return out and lse as given, or else uninitialised: out in the memory order of q.

    On a GPU there is no lse that nobody wants.
    """
    problem, q = call.problem, call.q
    lead = () if problem.packed else problem.lead
    shape = (*lead, *q.shape[-3:-1], problem.d_v)
    if call.device is not None:
        if out is None:
            out = device_arrays.empty_like(q, shape)
        if lse is None and want_lse:
            with cuda_device.current(call.device):
                lse = device_arrays.empty(shape[:-1], problem.accumulator)
        return out, lse
    if not problem.packed:
        q = np.broadcast_to(q, (*lead, *q.shape[-3:]))
    if out is None:
        out = np.empty_like(q, shape=shape, subok=False)
    return out, np.empty(shape[:-1], problem.accumulator) if lse is None else lse
