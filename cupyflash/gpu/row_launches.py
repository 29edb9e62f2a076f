"""Launches of the kernels that work on rows: append, rope, quantize and hadamard."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import cuda_device
from ..problem.append import Append
from ..problem.call import Array
from ..problem.hadamard import Transform
from ..problem.quantize import Quantisation
from ..problem.rotary import Rotation
from ..problem.route import CallResult
from . import rows_recipe
from .launch import Addresses, addresses_of, compiled_recipe, whole
from .writer import Launch, Recipe


def append(checked: Append, out: Array | None) -> CallResult:
    """Write new rows to a cache, and rotated queries to `out`."""
    if not checked.k_new.size or not checked.batch:
        return CallResult()
    assert checked.device is not None
    names = "k_new", "v_new", "k", "v", "q", "positions"
    read: dict[str, Any] = {"out": out} | {name: getattr(checked, name) for name in names}
    read |= {"lengths": checked.cache.lengths, "table": checked.cache.table}
    read |= checked.cache.encoding.scales
    if checked.rotary is not None:
        read |= checked.rotary.arrays
    with cuda_device.current(checked.device):
        offsets = checked.offsets
        if offsets is not None:
            read["offsets"] = whole(offsets, "offsets", np.dtype(np.int64))
        compiled = compiled_recipe(Recipe((rows_recipe.append(checked, out),)), checked.device)
        compiled.forward(addresses_of(read))
    # Without columns of values, the memory of the keys has them: which memory decides that.
    was_copied = offsets is not None and read["offsets"] is not offsets
    return CallResult(compiled=None if was_copied or not checked.v.size else compiled)


def rope(checked: Rotation, out: Array) -> CallResult:
    """Write rotated rows to `out`."""
    read = {"x": checked.x, "out": out, "positions": checked.positions, **checked.rotary.arrays}
    return on_rows(rows_recipe.rope(checked, out), addresses_of(read), checked.device)


def quantize(checked: Quantisation, codes: Array, scale: Array) -> CallResult:
    """Write codes, as bytes, and scales."""
    addresses = addresses_of({"x": checked.x, "codes": codes, "scale": scale})
    return on_rows(rows_recipe.quantize(checked, codes, scale), addresses, checked.device)


def hadamard(checked: Transform, out: Array) -> CallResult:
    """Write transformed rows to `out`."""
    addresses = addresses_of({"x": checked.x, "out": out}) | {"seed": checked.seed}
    return on_rows(rows_recipe.hadamard(checked, out), addresses, checked.device)


def on_rows(launch: Launch, addresses: Addresses, device: int | None) -> CallResult:
    """Launch a kernel, if there are rows, on the device that has them."""
    if not launch.grid:
        return CallResult()
    assert device is not None
    with cuda_device.current(device):
        compiled = compiled_recipe(Recipe((launch,)), device)
        compiled.forward(addresses)
    return CallResult(compiled=compiled)
