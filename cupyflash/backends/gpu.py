"""Calls on CuPy arrays, by the kernels of `kernels_cu`; the first call imports CuPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ..arrays import cuda_device, device_arrays
from ..expr.nodes import Expr
from ..gpu import (
    launch,
    lookups,
    piece_launches,
    reduction_launches,
    row_launches,
    second_launches,
)
from ..problem.call import Array, Call, Gradients, Plan, Results
from ..problem.reduction_form import Form
from ..problem.route import CallResult
from ..problem.tangents import SecondTangents, TangentResults, Tangents
from ..rowwise import Arrays, Operation
from .backend import output_shape


def _device(array: Array) -> int:
    device = device_arrays.device_of(array)
    assert device is not None
    return device


class Gpu:
    """The back end of CuPy arrays."""

    def forward(
        self, call: Call, out: Array, lse: Array | None, plan: Plan | None = None
    ) -> CallResult:
        """Compute `out` and, unless it is None, `lse`."""
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
        served = lookups.served(call, gradients.dlookups)
        return launch.backward(call, *arrays, plan, deterministic=deterministic, served=served)

    def check_lookups(self, call: Call) -> None:
        """Refuse learned look-ups whose gradients are not computed."""
        lookups.check(call)

    def forward_tangent(
        self, call: Call, tangents: Tangents, results: TangentResults, plan: Plan | None = None
    ) -> CallResult:
        """Compute out, lse, unless it is None, and their tangents."""
        return launch.forward_tangent(call, tangents, results, plan)

    def backward_tangent(
        self,
        call: Call,
        rows: Mapping[str, Array],
        tangents: SecondTangents,
        gradients: Gradients,
        results: Results,
        workspace: Array | None = None,
        deterministic: bool = False,
    ) -> CallResult:
        """Compute the tangents of gradients, of out and of lse."""
        arrays = rows, tangents, gradients, results, workspace
        return second_launches.backward(call, *arrays, deterministic=deterministic)

    def reduce(
        self, call: Call, form: Form, lse: Array | None, value: Expr | None = None
    ) -> tuple[Array, Array | None]:
        """Return what is taken of pairs, always in the same order."""
        return reduction_launches.reduce(call, form, lse, value)

    def reduction_gradients(
        self, call: Call, factor: Expr, lse: Array, dq: Array, dk: Array, dbias: Array | None
    ) -> None:
        """Write the gradients of a loss of weights, always in the same order."""
        reduction_launches.backward(call, factor, lse, dq, dk, dbias)

    def workspace_size(self, call: Call, second: bool = False) -> int:
        """Return the bytes of scratch that the call's backward needs, or its second derivatives."""
        return second_launches.workspace_size(call) if second else launch.workspace_size(call)

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
