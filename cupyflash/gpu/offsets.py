"""Offsets of packed sequences in device memory: the launch that checks and converts them.

It comes before the other launches of a route, which read int64 without gaps. Nothing here touches
CuPy or an array's elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import device_arrays
from ..arrays.reports import OF_OFFSETS
from ..problem.call import Array, Call
from . import params
from .kernels import rowwise as specs
from .kernels.spec import Extent
from .params import KINDS
from .specialisation import Specialisation
from .workspace import ArraySpec
from .writer import KernelRoute, Launch, step_of, with_names

_INT64 = np.dtype(np.int64)
_LENGTHS_ALONE = 2  # what is reported, and `limited` of the kernel
REPORT = "report "  # before the name of offsets: a word of `arrays.reports`


def read_first(route: KernelRoute, call: Call) -> KernelRoute:
    """Return a route that begins with what its call's offsets in device memory need.

    Offsets that are the same array have the name of the first one.
    """
    held = _in_device_memory(call)
    if not held or not route.recipe.launches:
        return route
    copies = scratch(call)
    names = {name: _first(name, held) for name in held}
    names = {name: _copied(first) if first in copies else first for name, first in names.items()}
    arrays = {**route.recipe.scratch, **{_copied(name): spec for name, spec in copies.items()}}
    steps = [
        replace(step, launch=with_names(step.launch, names), arrays=arrays) for step in route.steps
    ]
    if copies or _reported(call, held):
        made = _launch(call, held, copies)
        steps.insert(0, step_of(made, arrays, lambda: specs.OFFSETS.method))
    launches = tuple(step.launch for step in steps if step.grid)
    recipe = replace(route.recipe, launches=launches, scratch=arrays)
    return replace(route, steps=tuple(steps), recipe=recipe)


def scratch(call: Call) -> dict[str, ArraySpec]:
    """Return the copies of offsets that kernels need, by the names of the offsets."""
    held = _in_device_memory(call)
    limited = _is_limited(call, held)
    return {
        name: ArraySpec(x.shape, _INT64)
        for name, x in held.items()
        if _first(name, held) == name and (limited or not _is_read_in_place(x))
    }


def _totals(call: Call) -> dict[str, int]:
    """Return the rows of the packed arrays, by the names of their offsets."""
    return {"offsets_q": call.q.shape[-2], "offsets_k": call.k.shape[-2]}


def _limits(call: Call) -> dict[str, int]:
    """Return the most rows of a sequence, by the names of offsets."""
    lengths = {"offsets_q": call.problem.len_q, "offsets_k": call.problem.len_k}
    return {name: int(np.max(x, initial=0)) for name, x in lengths.items()}


def _is_limited(call: Call, held: Mapping[str, Array]) -> bool:
    """Whether kernels rely on the length of sequences that nobody has looked at.

    Their look-ups in bias and mask are proven to be within these arrays.
    """
    totals, limits = _totals(call), _limits(call)
    return call.rows.unread and any(limits[name] < totals[name] for name in held)


def _reported(call: Call, held: Mapping[str, Array]) -> int:
    """Return what is reported: nothing, 0; all that is wrong, 1; longer sequences alone, 2."""
    if call.rows.reports:
        return 1
    return _LENGTHS_ALONE if call.rows.bounded and _is_limited(call, held) else 0


def _is_read_in_place(x: Array) -> bool:
    return x.dtype == _INT64 and bool(x.flags.c_contiguous)


def _in_device_memory(call: Call) -> dict[str, Array]:
    return {x: y for x, y in call.rows.offsets.items() if device_arrays.is_device_array(y)}


def _first(name: str, held: Mapping[str, Array]) -> str:
    """Return the first name of offsets that are the same array."""
    return next(other for other, x in held.items() if x is held[name])


def _copied(name: str) -> str:
    return f"{name} int64"


def _launch(call: Call, held: Mapping[str, Array], copies: Mapping[str, Any]) -> Launch:
    """Return the launch that checks offsets, if they are to be checked, and writes copies."""
    layout, slots = params.rowwise("offsets"), []
    columns: dict[str, list[int]] = {name: [] for name in ("steps", "totals", "limits", "kinds")}
    totals, limits, reported = _totals(call), _limits(call), _reported(call, held)
    for n, (name, x) in enumerate(held.items()):
        slots.append((layout.place(f"input {n}"), _first(name, held)))
        if name in copies:
            slots.append((layout.place(f"result {n}"), _copied(name)))
        if reported:
            slots.append((layout.place(f"report {n}"), REPORT + name))
        columns["steps"].append(x.strides[0] // x.itemsize)
        columns["totals"].append(totals[name])
        columns["limits"].append(limits[name])
        columns["kinds"].append(KINDS["int64" if x.dtype == np.uint64 else x.dtype.name])
    count = next(iter(held.values())).size
    limited = _is_limited(call, held)
    tiles = specs.ALL_ENTRIES if limited else specs.ENTRIES
    grid = specs.OFFSETS.grid(Extent(count, 0, 1, len(held)), tiles)
    values = {**columns, "arrays": len(held), "count": count}
    values |= {"blocks": grid.blocks, "limited": int(limited)}
    if reported == _LENGTHS_ALONE:
        values["limited"] = _LENGTHS_ALONE
    special = Specialisation(specs.OFFSETS, "float32", 0, 0, tiles)
    return Launch(special, 1 if limited else grid.size, layout.pack(values), tuple(slots))


def words_of(names: set[str]) -> dict[str, int]:
    """Return the words of `arrays.reports` among the names of addresses."""
    return {REPORT + name: word for name, word in OF_OFFSETS.items() if REPORT + name in names}
