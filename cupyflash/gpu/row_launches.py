"""Runs the launches of rowwise operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..arrays import cuda_device, device_arrays
from ..errors import ArgumentError
from ..problem.route import CallResult
from .launch import compiled_recipe, whole
from .params import MAX_PARTS
from .writer import Recipe


def run(
    recipe: Callable[[Any, Mapping[str, Any]], Recipe],
    checked: Any,
    arrays: Mapping[str, Any],
    contiguous: tuple[str, ...] = (),
) -> CallResult:
    """Launch an operation on the device of its first array.

    Parameters
    ----------
    recipe : function
        Returns the launches of a checked call on arrays.
    checked : object
        The checked call.
    arrays : mapping of str to (array or int)
        The arrays by the kernels' names; a number is passed instead of an address.
    contiguous : tuple of str
        The arrays that kernels read as int64 without strides.
    """
    device = device_arrays.device_of(next(iter(arrays.values())))
    assert device is not None
    with cuda_device.current(device):
        readable = {
            name: whole(x, name, np.dtype(np.int64)) if name in contiguous else x
            for name, x in arrays.items()
        }
        launched = recipe(checked, readable)
        if not launched.launches:
            return CallResult()
        if launched.scratch and cuda_device.is_capturing():
            name, count = launched.launches[0].special.spec.part, len(launched.launches)
            raise ArgumentError(
                f"{name}: got arrays for {count} launches while a CUDA graph is being captured, "
                "which has no memory for results between them; expected one launch, of at most "
                f"{MAX_PARTS} parts. Combine them in groups."
            )
        addresses = {
            name: x if isinstance(x, int) else device_arrays.address(x)
            for name, x in readable.items()
        }
        compiled = compiled_recipe(launched, device)
        compiled.forward(addresses)
    copied = any(readable[name] is not array for name, array in arrays.items())
    return CallResult(compiled=None if copied else compiled)
