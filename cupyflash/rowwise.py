"""The rowwise operations: one row of a table for each, which drivers and back ends read.

A rowwise operation computes rows of its results from rows of its arrays, without attention. Its row
says which arrays a checked call has, which results it needs memory for, and what computes them on a
CPU and on a GPU. Public functions, which name a row, have the signature and the documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from .arrays.device_arrays import is_device_array
from .gpu import rowwise as launches
from .gpu.writer import Recipe
from .problem import formats
from .problem.append import Append
from .problem.call import Array, scale_steps
from .problem.encoding import Encoding
from .problem.hadamard import Transform
from .problem.quantize import Quantisation
from .problem.rotary import Rotary, Rotation

Checked = TypeVar("Checked")  # what the check of an operation returns
Arrays = Mapping[str, Any]  # the arrays of a call, by the names that GPU kernels have for them


class NewArray(NamedTuple):
    """A result for which the caller gave no array.

    Attributes
    ----------
    like : array
        An array on the same device, whose memory order the result has.
    shape : tuple of int
        Its shape.
    dtype : dtype
        Its type.
    in_c_order : bool
        Whether the result is in C order instead.
    """

    like: Array
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    in_c_order: bool = False


def _always(_: Any) -> bool:
    return True


@dataclass(frozen=True, eq=False)
class Operation(Generic[Checked]):
    """A rowwise operation.

    Attributes
    ----------
    name : str
        The name of its public function.
    arrays : function
        Returns what a checked call reads, and what it writes in place: arrays, None where it has
        none, and an integer seed. The first one is an array, and the others are on its device.
    results : function
        Returns the results of a checked call: arrays of the caller, or a `NewArray` for each other.
    on_cpu : function
        Computes a checked call, whose arrays and results are NumPy arrays.
    recipe : function
        Returns the launches of such a call on a GPU.
    contiguous : tuple of str
        The arrays that GPU kernels read as int64 without strides: others are copied.
    is_repeatable : function
        Returns whether the launches of a checked call are right for every call with arrays of the
        same shapes, types and strides.
    """

    name: str
    arrays: Callable[[Checked], Arrays]
    results: Callable[[Checked], dict[str, Array | NewArray]]
    on_cpu: Callable[[Checked, Arrays], None]
    recipe: Callable[[Checked, Arrays], Recipe]
    contiguous: tuple[str, ...] = ()
    is_repeatable: Callable[[Checked], bool] = _always

    def arrays_of(self, checked: Checked) -> dict[str, Any]:
        """Return the arrays that a checked call has."""
        return {name: x for name, x in self.arrays(checked).items() if x is not None}


def _one_like(like: Array, out: Array | None) -> dict[str, Array | NewArray]:
    """Return the result of a call that has one, with the shape and the type of an array."""
    return {"out": NewArray(like, like.shape, like.dtype) if out is None else out}


# -- append ---------------------------------------------------------------------------------------


def _arrays_of_append(checked: Append) -> Arrays:
    cache = checked.cache
    arrays: dict[str, Any] = {name: getattr(checked, name) for name in ("k_new", "v_new", "k", "v")}
    arrays |= {"q": checked.q, "positions": checked.positions, "offsets": checked.offsets}
    arrays |= {"length" if isinstance(cache.lengths, int) else "lengths": cache.lengths}
    arrays["table"] = cache.table
    arrays |= cache.encoding.scales
    if checked.rotary is not None:
        arrays |= checked.rotary.arrays
    return arrays


def _append_on_cpu(checked: Append, arrays: Arrays) -> None:
    from cupyflash.reference.cpu import append

    cache, rotary = checked.cache, checked.rotary
    append.append(
        checked.k_new,
        checked.v_new,
        checked.k,
        checked.v,
        np.broadcast_to(cache.lengths, (checked.batch,)),
        cache.table,
        checked.offsets,
        cache.page_size,
        checked.q,
        arrays.get("out"),
        None if rotary is None else _angles(rotary),
        checked.positions,
        scales_on_cpu(cache.encoding),
    )


def scales_on_cpu(encoding: Encoding) -> Any:
    """Return what the codes of keys and of values mean, as kernels of the CPU take it."""
    from cupyflash.reference.cpu.cache import Scales

    sides = (encoding.k_form, encoding.k_scale), (encoding.v_form, encoding.v_scale)
    scales = tuple(
        None if form is None or scale is None else Scales(form.code, scale, scale_steps(scale))
        for form, scale in sides
    )
    return scales if any(scales) else None


APPEND = Operation[Append](
    name="append",
    arrays=_arrays_of_append,
    results=lambda checked: {} if checked.q is None else _one_like(checked.q, checked.out),
    on_cpu=_append_on_cpu,
    recipe=launches.append,
    contiguous=("offsets",),
    # Without columns of values, these lie in the memory of the keys: the place of v decides that.
    is_repeatable=lambda checked: checked.v.size > 0,
)

# -- rope -----------------------------------------------------------------------------------------


def _angles(rotary: Rotary) -> tuple[Array, Array, bool]:
    arrays = rotary.arrays
    return arrays["cos"], arrays["sin"], rotary.interleaved


def _rope_on_cpu(checked: Rotation, arrays: Arrays) -> None:
    from cupyflash.reference.cpu import rope

    angles = _angles(checked.rotary)
    rope.rope(checked.x, checked.positions, *angles, checked.inverse, arrays["out"])


ROPE = Operation[Rotation](
    name="rope",
    arrays=lambda checked: {"x": checked.x, "positions": checked.positions} | checked.rotary.arrays,
    results=lambda checked: _one_like(checked.x, checked.out),
    on_cpu=_rope_on_cpu,
    recipe=launches.rope,
)

# -- quantize -------------------------------------------------------------------------------------


def _codes_and_scale(checked: Quantisation) -> dict[str, Array | NewArray]:
    x = checked.x
    of_codes = formats.dtype_of(checked.form)
    if is_device_array(x) and of_codes.kind not in "iu":  # CuPy has no float8
        of_codes = np.dtype(np.uint8)
    return {
        "codes": NewArray(x, checked.shape_of_codes, of_codes),
        "scale": NewArray(x, checked.shape_of_scale, np.dtype(np.float32)),
    }


def _quantize_on_cpu(checked: Quantisation, arrays: Arrays) -> None:
    from cupyflash.reference.cpu import rows_launch

    codes, form = arrays["codes"].view(np.uint8), checked.form.code
    together = checked.rows * checked.columns  # numbers that share a scale
    rows_launch.quantize(checked.x, together, form, codes, arrays["scale"])


QUANTIZE = Operation[Quantisation](
    name="quantize",
    arrays=lambda checked: {"x": checked.x},
    results=_codes_and_scale,
    on_cpu=_quantize_on_cpu,
    recipe=launches.quantize,
)

# -- hadamard -------------------------------------------------------------------------------------


def _hadamard_on_cpu(checked: Transform, arrays: Arrays) -> None:
    from cupyflash.reference.cpu import rows_launch

    rows_launch.hadamard(
        checked.x, checked.seed, checked.power, checked.rows, checked.inverse, arrays["out"]
    )


HADAMARD = Operation[Transform](
    name="hadamard",
    arrays=lambda checked: {"x": checked.x, "seed": checked.seed},
    results=lambda checked: _one_like(checked.x, checked.out),
    on_cpu=_hadamard_on_cpu,
    recipe=launches.hadamard,
)

# -- combine --------------------------------------------------------------------------------------

Parts = list[tuple[Array, Array]]  # (out, lse) of each set of keys


def arrays_of_parts(parts: Any) -> Arrays:
    """Return the arrays of parts; none if these, which need not be checked yet, are no pairs."""
    try:
        return {
            f"{name} {n}": x
            for n, pair in enumerate(parts)
            for name, x in zip(("out", "lse"), pair, strict=True)
        }
    except (TypeError, ValueError):
        return {}


def _out_and_lse(parts: Parts) -> dict[str, Array | NewArray]:
    out, lse = parts[0]
    return {
        "out": NewArray(out, out.shape, out.dtype),
        "lse": NewArray(lse, lse.shape, lse.dtype, in_c_order=True),
    }


def _combine_on_cpu(parts: Parts, arrays: Arrays) -> None:
    from cupyflash.reference.cpu import rows_launch

    rows_launch.combine(parts, arrays["out"], arrays["lse"])


COMBINE = Operation[Parts](
    name="combine",
    arrays=arrays_of_parts,
    results=_out_and_lse,
    on_cpu=_combine_on_cpu,
    recipe=launches.combine,
)

OPERATIONS = APPEND, ROPE, QUANTIZE, HADAMARD, COMBINE
