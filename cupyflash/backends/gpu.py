"""Calls on CuPy arrays, by the kernels of `kernels_cu`; the first call imports CuPy."""

from __future__ import annotations

import numpy as np

from ..arrays import cuda_device, device_arrays
from ..gpu import launch, piece_launches, row_launches
from ..problem.append import Append
from ..problem.call import Array, Call, Gradients, Plan, Results
from ..problem.hadamard import Transform
from ..problem.quantize import Quantisation
from ..problem.rotary import Rotation
from ..problem.route import CallResult
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

    def combine(self, parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
        """Combine several (out, lse) into new arrays."""
        first_out, first_lse = parts[0]
        out = self.empty_like(first_out)
        with cuda_device.current(_device(first_out)):
            lse: Array = device_arrays.empty(first_lse.shape, first_lse.dtype)
        launch.combine(parts, out, lse)
        return out, lse

    def append(self, checked: Append, out: Array | None) -> CallResult:
        """Write new rows to a cache, and rotated queries to `out`."""
        return row_launches.append(checked, out)

    def rope(self, checked: Rotation, out: Array) -> CallResult:
        """Write rotated rows to `out`."""
        return row_launches.rope(checked, out)

    def quantize(self, checked: Quantisation) -> tuple[Array, Array]:
        """Return new codes and scales; CuPy has no float8, so these codes are bytes."""
        dtype = np.int8 if checked.form.name == "int8" else np.uint8
        codes: Array = device_arrays.empty_like(checked.x, checked.shape_of_codes, dtype)
        scale: Array = device_arrays.empty_like(checked.x, checked.shape_of_scale, np.float32)
        row_launches.quantize(checked, codes, scale)
        return codes, scale

    def hadamard(self, checked: Transform, out: Array) -> CallResult:
        """Write transformed rows to `out`."""
        return row_launches.hadamard(checked, out)

    def empty_like(self, array: Array) -> Array:
        """Return an uninitialised array of the same shape, dtype and memory order."""
        empty: Array = device_arrays.empty_like(array, array.shape)
        return empty

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
