"""Launches of calls on codes of float8: as they are, or of the numbers that they become first."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ..arrays import cuda_device, device_arrays
from ..problem.call import Array, Call, Plan
from . import launch, row_launches, rowwise
from .kernels import registry
from .kernels.spec import Request
from .launch import CallResult
from .workspace import ArraySpec


class _Planned(ArraySpec):
    """An array that is not there yet, and will begin where memory begins."""

    @property
    def ctypes(self) -> SimpleNamespace:
        """Its address."""
        return SimpleNamespace(data=0)


def of_numbers(call: Call) -> Call:
    """Return a call on numbers of the output's type, which are not there yet, instead of codes."""
    dtype = call.problem.dtype
    made: dict[str, Any] = {name: _Planned(getattr(call, name).shape, dtype) for name in "qkv"}
    return replace(call, codes=None, **made)


def forward(
    call: Call,
    out: Array,
    lse: Array | None,
    plan: Plan | None = None,
    visited: Array | None = None,
) -> CallResult:
    """Write out and lse, as `launch.forward` does."""
    assert call.codes is not None
    assert call.device is not None
    with cuda_device.current(call.device):
        if registry.widens(Request.of(call, cuda_device.of(call.device))) is None:
            return launch.forward(call, out, lse, plan, visited)
        made: dict[str, Any] = {}
        for name in "qkv":
            codes, scale = getattr(call, name), call.codes.scales[f"{name}_scale"]
            x = device_arrays.empty_like(codes, codes.shape, call.problem.dtype)
            widened = rowwise.widen(codes, scale, call.codes.form, x)
            addresses = launch.addresses_of({"x": x, "codes": codes, "scale": scale})
            row_launches.launch_one(widened, addresses, call.device)
            made[name] = x
        launch.forward(replace(call, codes=None, **made), out, lse, plan, visited)
        if cuda_device.is_capturing():
            device_arrays.keep_with(out, list(made.values()))
    return CallResult()
