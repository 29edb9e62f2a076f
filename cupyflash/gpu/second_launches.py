"""Launches of a backward with tangents: see `launch`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..arrays import cuda_device, device_arrays
from ..problem.call import Array, Call, Gradients, Plan, Results
from ..problem.route import CallResult
from ..problem.tangents import SecondTangents
from . import launch, second_route


def backward(
    call: Call,
    rows: Mapping[str, Array],
    tangents: SecondTangents,
    gradients: Gradients,
    results: Results,
    workspace: Array | None = None,
    plan: Plan | None = None,
    visited: Array | None = None,
    deterministic: bool = False,
) -> CallResult:
    """Write the tangents of `gradients`, and of out and lse, which are `results`.

    `rows` are do, out, lse and, if it is given, dlse; `plan` and `visited` are as in
    `launch.forward`, `deterministic` as in `second_route.backward`.
    """
    device = call.device
    assert device is not None
    with cuda_device.current(device):
        if workspace is None and cuda_device.is_capturing():
            raise launch.no_workspace(workspace_size(call))
        counts, target = visited is not None, cuda_device.of(device)
        arrays = rows, tangents, gradients, results
        made = second_route.backward(call, target, *arrays, plan, counts, deterministic).recipe
        compiled = launch.compiled_recipe(made, device, launch.host_offsets(call))
        addresses, copies = launch.read_in_place(call, made)
        given = {"d_out": rows["do"], "tdo": tangents.tdo, "tdlse": tangents.tdlse, **rows}
        del given["do"]
        held: Any = tangents.arrays.tsink
        if held is not None:
            held = launch.whole(held, "tsink", held.dtype)
            if held is not tangents.arrays.tsink:
                copies.append(held)
        given |= {**tangents.arrays._asdict(), "tsink": held, "tbias": None}
        given |= {"tout": results[0], "tlse": results[1], **gradients._asdict()}
        addresses |= launch.addresses_of(given)
        if visited is not None:
            addresses["tiles_visited"] = device_arrays.address(visited)
        compiled.backward(addresses, gradients, workspace)
    return CallResult(compiled=None if copies or made.all_zero else compiled, tables=made.tables)


def workspace_size(call: Call) -> int:
    """Return the bytes of workspace that `backward` needs at most."""
    assert call.device is not None
    target = cuda_device.of(call.device)
    return launch.ALIGNMENT + launch.size_of(second_route.most_scratch(call, target))
