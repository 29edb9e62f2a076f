"""The steps of a call that works on rows: append, rope, quantize and hadamard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import dispatch
from .arrays.device_arrays import is_device_array
from .gpu import launch_cache
from .problem import cached as cached_calls
from .problem.append import Append
from .problem.call import Array
from .problem.hadamard import Transform
from .problem.options import Options
from .problem.quantize import Quantisation
from .problem.rotary import Rotary, Rotation


def _rows_signature(
    kind: str, read: Mapping[str, Any], rotary: Any, written: Mapping[str, Any]
) -> launch_cache.Signature | None:
    """Return what tells a call that writes rows from others, if it is one that is recognised."""
    if cached_calls.CHECKS_ALL or not is_device_array(next(iter(read.values()))):
        return None
    if isinstance(rotary, Rotary):
        read = {**read, **rotary.arrays}
        kind += " of neighbours" if rotary.interleaved else " of halves"
    elif rotary is not None:
        return None
    return launch_cache.signature(kind, read, Options(), written)


def append(
    check: Callable[[], Append],
    read: Mapping[str, Any],
    rotary: Any,
    codes: str,
    written: Mapping[str, Any],
    shared: Any,
) -> Array | None:
    """Write new rows to a cache; return queries, if there are any, rotated.

    `read` and `written` have the arrays of the call by the names that kernels have for them, as
    they came, and `codes` is the type of codes that it names; `check` validates the call where it
    is not recognised. Kernels are not told `shared`, so a call that has it is checked every time.
    """
    signature = None
    if (
        type(shared) is int and not shared and is_device_array(read["lengths"])
    ):  # a number is part of what kernels are told
        signature = _rows_signature("append" + codes, read, rotary, written)
    if signature is not None and (entry := launch_cache.find(signature)) is not None:
        results = launch_cache.forward(entry, signature.addresses, written["out"], None)
        if results is not None:
            rotated: Array | None = results[0]
            return rotated
    checked = check()
    backend = dispatch.backend_of(checked.k)
    out = checked.out
    if checked.q is not None and out is None:
        out = backend.empty_like(checked.q)
    served = backend.append(checked, out)
    if signature is not None:
        signature.keep(served, (out, None))
    return out


def rope(
    check: Callable[[], Rotation], x: Any, positions: Any, rotary: Any, inverse: Any, out: Any
) -> Array:
    """Rotate rows, into the array given or into a new one; the rest is as in `append`."""
    signature = None
    if is_device_array(positions):
        kind = "rope back" if inverse is True else "rope" if inverse is False else None
        if kind is not None:
            read = {"x": x, "positions": positions}
            signature = _rows_signature(kind, read, rotary, {"out": out})
    if signature is not None and (entry := launch_cache.find(signature)) is not None:
        results = launch_cache.forward(entry, signature.addresses, out, None)
        if results is not None:
            rotated: Array = results[0]
            return rotated
    checked = check()
    backend = dispatch.backend_of(checked.x)
    made = backend.empty_like(checked.x) if checked.out is None else checked.out
    served = backend.rope(checked, made)
    if signature is not None:
        signature.keep(served, (made, None))
    return made


def quantize(checked: Quantisation) -> tuple[Array, Array]:
    """Return codes and scales."""
    return dispatch.backend_of(checked.x).quantize(checked)


def hadamard(check: Callable[[], Transform], x: Any, seed: Any, inverse: Any, out: Any) -> Array:
    """Transform rows, into the array given or into a new one; the rest is as in `append`."""
    signature = None
    if is_device_array(x) and isinstance(inverse, bool) and isinstance(seed, int):
        kind = "hadamard back" if inverse else "hadamard"
        signature = launch_cache.signature(kind, {"x": x}, Options(seed=seed), {"out": out})
    if signature is not None and (entry := launch_cache.find(signature)) is not None:
        results = launch_cache.forward(entry, signature.addresses, out, None)
        if results is not None:
            transformed: Array = results[0]
            return transformed
    checked = check()
    backend = dispatch.backend_of(checked.x)
    made = backend.empty_like(checked.x) if checked.out is None else checked.out
    served = backend.hadamard(checked, made)
    if signature is not None:
        signature.keep(served, (made, None))
    return made
