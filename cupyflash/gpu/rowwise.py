"""The launches of the rowwise operations, as data: a recipe for each, and what widens codes.

Nothing here touches CuPy or an array's elements. Arrays are those of
`rowwise.Operation.arrays` with the results, by the names that kernels have for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..arrays.dtypes import accumulator
from ..problem.append import Append
from ..problem.call import Array, scale_steps
from ..problem.formats import Format
from ..problem.hadamard import Transform
from ..problem.quantize import Quantisation
from ..problem.rotary import Rotary, Rotation
from . import params, strides
from .kernels import rowwise as specs
from .kernels.spec import Extent, KernelSpec, Tiles
from .params import KINDS, MAX_LEAD, MAX_PARTS, Operand
from .specialisation import Specialisation
from .workspace import ArraySpec
from .writer import Launch, Recipe, check_grid

Arrays = Mapping[str, Any]


def append(checked: Append, arrays: Arrays) -> Recipe:
    """Write new rows to a cache, and rotated queries to ``out``."""
    cache, q = checked.cache, checked.q
    rows, heads = checked.k_new.shape[-2], 0 if q is None else q.shape[-3]
    if not checked.k_new.size or not checked.batch:
        return Recipe()
    heads_kv = checked.k.shape[1]
    values: dict[str, Any] = {
        name: _rows(arrays[name])
        for name in ("k_new", "v_new", "k", "v", "q", "out")
        if name in arrays
    }
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
    integers = {"positions": _entries_and_rows, "table": _table, "lengths": _list}
    for name, operand in integers.items():
        if name in arrays:
            values |= {name: operand(arrays[name]), f"kind_{name}": KINDS[arrays[name].dtype.name]}
    if checked.rotary is not None:
        values |= _angles(checked.rotary)
    encoding = cache.encoding
    values |= {name: _scales(x) for name, x in encoding.scales.items()}
    formats: dict[str, Any] = {"k_codes": encoding.k_form, "v_codes": encoding.v_form}
    warps = (1 if checked.offsets is not None else checked.batch) * rows * (2 * heads_kv + heads)
    dtype = checked.k_new.dtype.name
    return _recipe(_launch(specs.APPEND, dtype, warps, values, _slots(arrays), **formats))


def rope(checked: Rotation, arrays: Arrays) -> Recipe:
    """Rotate rows into ``out``."""
    x, positions = checked.x, checked.positions
    values = {
        "x": _rows(x),
        "out": _rows(arrays["out"]),
        "positions": _entries_and_rows(positions),
        "batch": x.shape[0] if x.ndim == 4 else 1,
        "rows": x.shape[-2],
        "heads": x.shape[-3],
        "columns": x.shape[-1],
        "inverse": int(checked.inverse),
        "kind_positions": KINDS[positions.dtype.name],
        **_angles(checked.rotary),
    }
    warps = x.size // x.shape[-1]
    return _recipe(_launch(specs.ROPE, x.dtype.name, warps, values, _slots(arrays)))


_RAISE, _SHARE = 1, 2  # as in kernels_cu/rowwise/quantize.cu


def quantize(checked: Quantisation, arrays: Arrays) -> Recipe:
    """Write codes, as bytes, and scales.

    Rows that share a scale raise it before they are converted. It begins as the scale of a group
    without columns, which is also that of no rows.
    """
    if checked.per == "row":
        launches = [_quantize(checked, arrays, checked.columns)]
    else:
        places = dict.fromkeys(("x", "codes", "scale"), arrays["scale"])
        launches = [_quantize(checked, places, 0)]
        launches += [_quantize(checked, arrays, checked.columns, way) for way in (_RAISE, _SHARE)]
    return Recipe(tuple(launch for launch in launches if launch.grid))


def _quantize(checked: Quantisation, arrays: Arrays, columns: int, sharing: int = 0) -> Launch:
    """Return a launch of `quantize` for groups of so many columns, of the rows of these arrays."""
    groups, lanes = math.prod(arrays["x"].shape[:-1]) * checked.groups, _lanes(columns)
    values = _leading(arrays)
    values |= {
        "rows": groups,
        "groups": checked.groups,
        "columns": columns,
        "lanes": lanes,
        "format": checked.form.code,
        "sharing": sharing,
    }
    dtype, warps = checked.x.dtype.name, -(-groups * lanes // 32)
    return _launch(specs.QUANTIZE, dtype, warps, values, _slots(arrays))


def hadamard(checked: Transform, arrays: Arrays) -> Recipe:
    """Write transformed rows to ``out``."""
    x = checked.x
    columns = x.shape[-1]
    rows = x.size // columns
    values = _leading({"x": x, "out": arrays["out"]})
    values |= {
        "rows": rows,
        "factor": checked.rows,
        "scale": 1.0 / math.sqrt(columns),
        "inverse": int(checked.inverse),
    }
    tiles = specs.hadamard_tiles(columns, accumulator(x.dtype).itemsize)
    spec, dtype = specs.HADAMARD, x.dtype.name
    return _recipe(_launch(spec, dtype, rows, values, _slots(arrays), tiles=tiles, d=columns))


def combine(parts: list[tuple[Array, Array]], arrays: Arrays) -> Recipe:
    """Write the combination of several (out, lse).

    A launch joins at most `MAX_PARTS`. What it leaves in scratch, in the accumulator's type, is the
    first part of the next launch.
    """
    if not arrays["lse"].size:
        return Recipe()
    dtype = arrays["out"].dtype.name
    # Arrays without heads have one.
    with_heads = {
        name: x[(None,) * (2 + name.startswith("out") - x.ndim)] for name, x in arrays.items()
    }
    left = [(f"out {n}", f"lse {n}") for n in range(len(parts))]
    launches: list[Launch] = []
    scratch: dict[str, ArraySpec] = {}
    while len(left) > MAX_PARTS:
        sums = f"out of {MAX_PARTS}, {len(launches)}", f"lse of {MAX_PARTS}, {len(launches)}"
        for name, result in zip(sums, ("out", "lse"), strict=True):
            scratch[name] = ArraySpec(with_heads[result].shape, with_heads["lse"].dtype)
        launches.append(_combine(left[:MAX_PARTS], sums, with_heads | scratch, dtype))
        left[:MAX_PARTS] = [sums]
    launches.append(_combine(left, ("out", "lse"), with_heads | scratch, dtype))
    return Recipe(tuple(launches), scratch)


def _combine(
    parts: list[tuple[str, str]], sums: tuple[str, str], arrays: Arrays, dtype: str
) -> Launch:
    """Return the launch that joins arrays with these names."""
    outs, lses = ([pair[n] for pair in (*parts, sums)] for n in (0, 1))
    shape = arrays[sums[0]].shape
    axes = {name: (arrays[name], 3) for name in outs} | {name: (arrays[name], 2) for name in lses}
    lead = strides.lead_of(shape[:-3], axes)
    out_operands, lse_operands = (
        [strides.operand(arrays[name], lead.strides[name], columns) for name in names]
        for names, columns in ((outs, True), (lses, False))
    )
    kinds = [KINDS[arrays[name].dtype.name] for name in outs]
    values = {
        "outs": out_operands[:-1],
        "lses": lse_operands[:-1],
        "out": out_operands[-1],
        "lse": lse_operands[-1],
        "lead_size": lead.sizes,
        "rows": shape[-2],
        "columns": shape[-1],
        "heads": shape[-3],
        "kinds": kinds[:-1],
        "kind_out": kinds[-1],
        "parts": len(parts),
    }
    warps = math.prod(shape[:-2]) * -(-shape[-2] // specs.COMBINE_ROWS)
    fields = [(f"out {n}", f"lse {n}") for n in range(len(parts))] + [("out", "lse")]
    slots = {
        field: name
        for pair, names in zip(fields, (*parts, sums), strict=True)
        for field, name in zip(pair, names, strict=True)
    }
    return _launch(specs.COMBINE, dtype, warps, values, slots)


def widen(codes: Array, scale: Array, form: Format, x: Array) -> Launch:
    """Return the launch that writes ``scale * code`` to `x`."""
    columns = x.shape[-1]
    rows = math.prod(x.shape[:-1])
    lanes = _lanes(columns)
    arrays = {"x": x, "codes": codes, "scale": scale}
    values = _leading(arrays)
    values |= {"rows": rows, "columns": columns, "lanes": lanes, "format": form.code}
    warps = -(-rows * lanes // 32)
    return _launch(specs.DEQUANTIZE, x.dtype.name, warps, values, _slots(arrays), layout="quantize")


def sums(pairs: Mapping[str, tuple[str, ArraySpec, Array]], dtype: str) -> Launch:
    """Return the launch that writes gradients that are sums of their parts.

    `pairs` maps the name of each gradient to that of its parts, the parts (..., H, L, D), and the
    gradient, which has length 1 along the leading axes along which they are summed, or not these
    axes.
    """
    columns: dict[str, list[Any]] = {name: [] for name, _, _ in params.ROWWISE["sums"]}
    slots: dict[str, str] = {}
    end = 0
    for n, (name, (name_of_parts, parts, gradient)) in enumerate(pairs.items()):
        arrays = {"parts": (parts, 3), "gradients": (gradient, 3)}
        lead = strides.lead_of(parts.shape[:-3], arrays, "grads_out")
        width = specs.SUMMED_BYTES // parts.itemsize
        width = 1 if parts.shape[-1] % width else width
        end += -(-math.prod(gradient.shape) // (width * specs.ROWS.threads))
        for field, (array, _) in arrays.items():
            columns[field].append(strides.operand(array, lead.strides[field]))
        columns["lead_sizes"] += lead.sizes
        for field, size in zip(("heads", "rows", "columns"), parts.shape[-3:], strict=True):
            columns[field].append(size)
        columns["widths"].append(width)
        columns["kinds"].append(KINDS[gradient.dtype.name])
        columns["ends"].append(end)
        slots |= {f"part {n}": name_of_parts, f"gradient {n}": name}
    return _launch(specs.SUMS, dtype, end, columns, slots)


def _lanes(columns: int) -> int:
    """Return how many lanes share columns, of which each has 8 at a time."""
    return min(32, 1 << max(0, -(-columns // 8) - 1).bit_length())


def _recipe(launch: Launch) -> Recipe:
    """Return the recipe of one launch, or of none if it has no blocks."""
    return Recipe((launch,) if launch.grid else ())


def _launch(
    spec: KernelSpec,
    dtype: str,
    rows: int,
    values: dict[str, Any],
    slots: Mapping[str, str],
    *,
    tiles: Tiles = specs.ROWS,
    d: int = 0,
    layout: str = "",
    **compiled: Any,
) -> Launch:
    """Return the launch of a kernel.

    `rows` are its pieces of work, `values` its parameters, and `slots` the fields that have
    addresses, with the names of these. `layout` is the kernel with the same parameters, if another
    one has them. The arguments in `compiled` are fields of `Specialisation`.
    """
    fields = params.rowwise(layout or spec.part)
    grid = spec.grid(Extent(rows, 0, 1), tiles)
    check_grid(spec.name, grid.work_tiles)
    places = tuple((fields.place(field), name) for field, name in slots.items())
    special = Specialisation(spec, dtype, d, 0, tiles, **compiled)
    return Launch(special, grid.size, fields.pack(values), places)


def _slots(names: Iterable[str]) -> dict[str, str]:
    """Return fields that have the names of their arrays."""
    return {name: name for name in names}


def _leading(arrays: Arrays) -> dict[str, Any]:
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
    values: dict[str, Any] = {
        name: Operand(row=x.strides[0] // x.itemsize, col=x.strides[1] // x.itemsize)
        for name, x in rotary.arrays.items()
    }
    return values | {
        "rotary_rows": rotary.rows,
        "pairs": rotary.pairs,
        "interleaved": int(rotary.interleaved),
        "kind_angles": KINDS[rotary.arrays["cos"].dtype.name],
    }
