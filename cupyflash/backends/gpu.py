"""Calls on CuPy arrays, by the kernels of `kernels_cu`; the first call imports CuPy."""

from __future__ import annotations

from typing import Any, cast

from ..arrays import cuda_device, device_arrays
from ..gpu import code_launches, decode_recipe, launch, piece_launches, row_launches
from ..gpu.kernels import registry
from ..gpu.kernels.spec import Request
from ..gpu.launch import CallResult
from ..problem import pack_gqa
from ..problem.call import Array, Call, Gradients, Plan, Results
from ..rowwise import Arrays, Operation
from .backend import output_shape


def plan_on(call: Call, facts: cuda_device.Target) -> Plan:
    """Return which kernel would serve a call on a GPU that need not be there."""
    if call.cache is not None:
        return decode_recipe.plan(call, facts)
    before = ""
    if call.codes is not None:
        why = registry.widens(Request.of(call, facts))
        if why is None:
            return registry.plan(Request.of(call, facts))
        form, dtype = call.codes.form.name, call.problem.dtype
        call = code_launches.of_numbers(call)
        before = f"turns codes of {form} into {dtype} first, because {why}; then it "
    if not registry.decodes(call.problem, facts):
        call, _ = pack_gqa.joined(call)
    return registry.plan(Request.of(call, facts), before=before)


def _device(array: Array) -> int:
    device = device_arrays.device_of(array)
    assert device is not None
    return device


class Gpu:
    """The back end of CuPy arrays."""

    def plan(self, call: Call) -> Plan:
        """Return which kernel serves a call, with which tiles."""
        return plan_on(call, cuda_device.of(_device(call.q)))

    def forward(
        self, call: Call, out: Array, lse: Array | None, plan: Plan | None = None
    ) -> CallResult:
        """Compute `out` and, unless it is None, `lse`."""
        if call.codes is not None:
            return code_launches.forward(call, out, lse, plan)
        return launch.forward(call, out, lse, plan)

    def forward_piece(
        self, call: Call, partial: Results, first: bool, results: Results | None = None
    ) -> None:
        """Compute a piece's out and lse, or join its keys to them."""
        piece_launches.forward(call, partial, first, results)

    def backward_piece(
        self,
        call: Call,
        do: Array,
        out: Array,
        lse: Array,
        dlse: Array | None,
        gradients: Gradients,
        deterministic: bool,
    ) -> None:
        """Compute the gradients of a piece."""
        piece_launches.backward(call, do, out, lse, dlse, gradients, deterministic)

    def backward(
        self,
        call: Call,
        do: Array,
        out: Array,
        lse: Array,
        dlse: Array | None,
        gradients: Gradients,
        workspace: Array | None,
        plan: Plan | None = None,
        deterministic: bool = False,
    ) -> CallResult:
        """Compute `gradients`; unless `deterministic`, dq may be summed in any order."""
        arrays = do, out, lse, dlse, gradients, workspace
        return launch.backward(call, *arrays, plan, deterministic=deterministic)

    def workspace_size(self, call: Call) -> int:
        """Return the bytes of scratch that the call's backward needs."""
        return launch.workspace_size(call)

    def cached(
        self, call: Call, out: Array, lse: Array | None, workspace: Array | None
    ) -> CallResult:
        """Compute `out` and, unless it is None, `lse` of a call over a cache."""
        return launch.forward(call, out, lse, workspace=workspace)

    def workspace_size_cached(self, call: Call) -> int:
        """Return the bytes of scratch that a call over a cache needs."""
        return launch.workspace_size_cached(call)

    def rowwise(self, operation: Operation[Any], checked: Any, arrays: Arrays) -> CallResult:
        """Compute a checked call of a rowwise operation on its arrays and results, by name."""
        result = row_launches.run(operation.recipe, checked, arrays, operation.contiguous)
        return result if operation.is_repeatable(checked) else CallResult()

    def empty_like(
        self,
        array: Array,
        shape: tuple[int, ...] | None = None,
        dtype: Any = None,
        in_c_order: bool = False,
    ) -> Array:
        """Return an uninitialised array of the same shape, dtype and memory order, or of these."""
        shape = array.shape if shape is None else shape
        if not in_c_order:
            return cast(Array, device_arrays.empty_like(array, shape, dtype))
        with cuda_device.current(_device(array)):
            return cast(Array, device_arrays.empty(shape, array.dtype if dtype is None else dtype))

    def empty_output(
        self,
        call: Call,
        out: Array | None = None,
        lse: Array | None = None,
        want_lse: bool = True,
    ) -> tuple[Array, Array | None]:
        """Return out and lse as they are, or uninitialised; no LSE that nobody wants."""
        shape = output_shape(call)
        if out is None:
            out = device_arrays.empty_like(call.q, shape, call.problem.dtype)
        if lse is None and want_lse:
            with cuda_device.current(_device(call.q)):
                lse = device_arrays.empty(shape[:-1], call.problem.accumulator)
        return out, lse
