"""The launches that work on rows, as data: of append, rope, quantize and its inverse, hadamard.

As in `route`, nothing here touches CuPy or an array's elements.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ..arrays.dtypes import accumulator
from ..problem.append import Append
from ..problem.call import Array, scale_steps
from ..problem.formats import Format
from ..problem.hadamard import Transform
from ..problem.quantize import Quantisation
from ..problem.rotary import Rotary, Rotation
from . import params, strides
from .kernels import any as all_hardware
from .kernels.spec import Extent, KernelSpec, Tiles
from .params import KINDS, MAX_LEAD, Layout, Operand
from .source import Specialisation
from .writer import Launch, check_grid


def append(checked: Append, out: Array | None) -> Launch:
    """Return the launch that writes new rows, and rotates queries into `out`."""
    cache, q, positions = checked.cache, checked.q, checked.positions
    arrays = {"k_new": checked.k_new, "v_new": checked.v_new, "k": checked.k, "v": checked.v}
    if q is not None and out is not None:
        arrays |= {"q": q, "out": out}
    packed = checked.offsets is not None
    rows, heads = checked.k_new.shape[-2], 0 if q is None else q.shape[-3]
    heads_kv = checked.k.shape[1]
    values: dict[str, Any] = {name: _rows(x) for name, x in arrays.items()}
    values |= {
        "batch": checked.batch,
        "rows": rows,
        "capacity": cache.capacity,
        "pages": checked.k.shape[0],
        "page_size": cache.page_size,
        "heads": heads,
        "heads_kv": heads_kv,
        "columns": checked.k_new.shape[-1],
        "columns_v": checked.v_new.shape[-1],
    }
    integers = {"positions": (positions, _entries_and_rows)}
    integers["table"] = (cache.table, _table)
    if isinstance(cache.lengths, int):
        values["length"] = cache.lengths
    else:
        integers["lengths"] = (cache.lengths, _list)
    names = list(arrays)
    for name, (array, operand) in integers.items():
        if array is not None:
            values |= {name: operand(array), f"kind_{name}": KINDS[array.dtype.name]}
            names.append(name)
    if checked.rotary is not None:
        values |= _angles(checked.rotary)
        names += checked.rotary.arrays
    if packed:
        names.append("offsets")
    codes = cache.encoding
    values |= {name: _scales(x) for name, x in codes.scales.items()}
    names += codes.scales
    warps = (1 if packed else checked.batch) * rows * (2 * heads_kv + heads)
    dtype = checked.k_new.dtype.name
    made = _launch(all_hardware.APPEND, params.append(), dtype, warps, values, names)
    special = replace(made.special, k_codes=codes.k_form, v_codes=codes.v_form)
    return replace(made, special=special)


def rope(checked: Rotation, out: Array) -> Launch:
    """Return the launch that rotates rows into `out`."""
    x, positions, rotary = checked.x, checked.positions, checked.rotary
    values = {
        "x": _rows(x),
        "out": _rows(out),
        "positions": _entries_and_rows(positions),
        "batch": x.shape[0] if x.ndim == 4 else 1,
        "rows": x.shape[-2],
        "heads": x.shape[-3],
        "columns": x.shape[-1],
        "inverse": int(checked.inverse),
        "kind_positions": KINDS[positions.dtype.name],
        **_angles(rotary),
    }
    warps = x.size // x.shape[-1]
    names = ["x", "out", "positions", *rotary.arrays]
    return _launch(all_hardware.ROPE, params.rope(), x.dtype.name, warps, values, names)


def numbers(codes: Array, scale: Array, form: Format, x: Array) -> Launch:
    """Return the launch that writes ``scale * code`` to `x`."""
    columns = x.shape[-1]
    rows = math.prod(x.shape[:-1])
    lanes = _lanes(columns)
    arrays = {"x": x, "codes": codes, "scale": scale}
    values = _leading(arrays)
    values |= {"rows": rows, "columns": columns, "lanes": lanes, "format": form.code}
    spec, layout = all_hardware.DEQUANTIZE, params.quantize()
    return _launch(spec, layout, x.dtype.name, -(-rows * lanes // 32), values, list(arrays))


def _lanes(columns: int) -> int:
    """Return how many lanes share columns, of which each has 8 at a time."""
    return min(32, 1 << max(0, -(-columns // 8) - 1).bit_length())


def quantize(checked: Quantisation, codes: Array, scale: Array) -> Launch:
    """Return the launch that writes codes, as bytes, and scales."""
    x, columns = checked.x, checked.columns
    groups = scale.size
    lanes = _lanes(columns)
    arrays = {"x": x, "codes": codes, "scale": scale}
    values = _leading(arrays)
    values |= {
        "rows": groups,
        "groups": checked.groups,
        "columns": columns,
        "lanes": lanes,
        "format": checked.form.code,
    }
    warps = -(-groups * lanes // 32)
    spec, layout = all_hardware.QUANTIZE, params.quantize()
    return _launch(spec, layout, x.dtype.name, warps, values, list(arrays))


def hadamard(checked: Transform, out: Array) -> Launch:
    """Return the launch that writes transformed rows to `out`."""
    x = checked.x
    columns = x.shape[-1]
    rows = x.size // columns
    values = _leading({"x": x, "out": out})
    values |= {
        "rows": rows,
        "factor": checked.rows,
        "scale": 1.0 / math.sqrt(columns),
        "inverse": int(checked.inverse),
    }
    tiles = all_hardware.hadamard_tiles(columns, accumulator(x.dtype).itemsize)
    names = ["x", "out", "seed"]
    spec, layout = all_hardware.HADAMARD, params.hadamard()
    return _launch(spec, layout, x.dtype.name, rows, values, names, tiles, columns)


def _launch(
    spec: KernelSpec,
    layout: Layout,
    dtype: str,
    rows: int,
    values: dict[str, Any],
    names: list[str],
    tiles: Tiles = all_hardware.ROWS,
    d: int = 0,
) -> Launch:
    grid = spec.grid(Extent(rows, 0, 1), tiles)
    check_grid(spec.name, grid.work_tiles)
    slots = tuple((layout.place(name), name) for name in names)
    return Launch(Specialisation(spec, dtype, d, 0, tiles), grid.size, layout.pack(values), slots)


def _leading(arrays: dict[str, Array]) -> dict[str, Any]:
    """Return how arrays (..., columns) of equal leading axes lie in memory, and these axes."""
    shape = next(iter(arrays.values())).shape[:-1]
    lead = strides.lead_of(shape, {name: (x, 1) for name, x in arrays.items()}, "x")
    values: dict[str, Any] = {
        name: Operand(lead=lead.strides[name], col=x.strides[-1] // x.itemsize)
        for name, x in arrays.items()
    }
    return values | {"lead_size": lead.sizes}


def _rows(array: Array) -> Operand:
    """Return how an array (B, H, L, D), or packed (H, total, D), lies in memory."""
    step = array.strides[0] // array.itemsize if array.ndim == 4 else 0
    return strides.operand(array, _of_entries(step))


def _scales(scale: Array) -> Operand:
    """Return how the scales of a cache lie in memory."""
    page, head, row, group = (step // scale.itemsize for step in scale_steps(scale))
    return Operand(lead=_of_entries(page), head=head, row=row, col=group)


def _entries_and_rows(array: Array) -> Operand:
    """Return how integers (B, L), or (L,) of all entries, lie in memory."""
    steps = [stride // array.itemsize for stride in array.strides]
    return Operand(lead=_of_entries(steps[0] if len(steps) == 2 else 0), row=steps[-1])


def _table(array: Array) -> Operand:
    row, col = (stride // array.itemsize for stride in array.strides)
    return Operand(row=row, col=col)


def _list(array: Array) -> Operand:
    return Operand(row=array.strides[0] // array.itemsize)


def _of_entries(step: int) -> tuple[int, ...]:
    return (*(0,) * (MAX_LEAD - 1), step)


def _angles(rotary: Rotary) -> dict[str, Any]:
    made: dict[str, Any] = {
        name: Operand(row=x.strides[0] // x.itemsize, col=x.strides[1] // x.itemsize)
        for name, x in rotary.arrays.items()
    }
    return made | {
        "rotary_rows": rotary.rows,
        "pairs": rotary.pairs,
        "interleaved": int(rotary.interleaved),
        "kind_angles": KINDS[rotary.arrays["cos"].dtype.name],
    }
