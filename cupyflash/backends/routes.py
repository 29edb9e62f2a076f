"""The one place that says who serves a call: its route, on either back end."""

from __future__ import annotations

from ..arrays import cuda_device
from ..arrays.cuda_device import Target
from ..gpu import route as gpu_route
from ..gpu import second_route
from ..problem.call import Call
from ..problem.route import Route
from . import cpu_route


def target_of(call: Call) -> Target | None:
    """Return the device that has the arrays of a call; None is the CPU."""
    return None if call.device is None else cuda_device.of(call.device)


def route(
    call: Call,
    target: Target | None,
    backward: bool = False,
    deterministic: bool = False,
    tangents: bool = False,
) -> Route:
    """Return the kernels that serve a call, in order, as its arrays and sizes decide.

    Parameters
    ----------
    call : Call
        The call.
    target : Target or None
        The device, which need not be there; None is the CPU.
    backward : bool
        Whether it is about the gradients.
    deterministic : bool
        Whether gradients are summed in one order.
    tangents : bool
        Whether all arrays have tangents, along which the forward or the gradients are
        differentiated.
    """
    if tangents and backward:
        if target is None:
            return cpu_route.of_second(call)
        return second_route.of_second(call, target, deterministic)
    if tangents:
        return (
            cpu_route.of_tangents(call) if target is None else gpu_route.of_tangents(call, target)
        )
    if target is None:
        return cpu_route.of_gradients(call) if backward else cpu_route.of(call)
    if backward:
        return gpu_route.of_gradients(call, target, deterministic)
    return gpu_route.of(call, target)
