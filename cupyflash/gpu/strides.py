"""The layout of a launch's arrays in memory: strides in elements, and few leading axes.

Pure functions of shapes and strides: nothing here touches CuPy or an array's elements.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ..arrays import device_arrays
from ..errors import ArgumentError
from ..problem.call import Call, scale_steps
from ..problem.encoding import Encoding
from .params import MAX_AXES, MAX_LEAD, Operand, Table

Strides = tuple[int, ...]


class Lead(NamedTuple):
    """The leading axes of a launch, after neighbours have been joined where possible.

    Attributes
    ----------
    sizes : tuple of int
        `MAX_LEAD` lengths, the slowest axis first; unused ones are 1.
    strides : dict of str to tuple of int
        The strides of every array, in elements; 0 along broadcast axes.
    by_offsets : bool
        Whether offsets say where the rows of entries are.
    """

    sizes: tuple[int, ...]
    strides: dict[str, Strides]
    by_offsets: bool = False

    def own(self, *names: str, rows: bool = True) -> tuple[int, ...]:
        """Return the sizes, with 1 along the axes to which every array named was broadcast.

        `rows` says whether these have rows, so that offsets say where those of entries are.
        """
        if rows and self.by_offsets:
            return self.sizes
        return tuple(
            size if any(self.strides[name][axis] for name in names) else 1
            for axis, size in enumerate(self.sizes)
        )


def lead_of(
    lead: tuple[int, ...],
    arrays: Mapping[str, tuple[Any, int]],
    names: str = "q, k, v",
    apart: Collection[str] = (),
    by_offsets: bool = False,
    optional: Mapping[str, tuple[Any, int]] | None = None,
) -> Lead:
    """Broadcast the leading axes of arrays to `lead`, and join neighbours if all arrays allow it.

    Parameters
    ----------
    lead : tuple of int
        The broadcast leading axes.
    arrays : mapping of str to (array, int)
        Every array of the launch, and how many axes follow its leading ones.
    names : str
        Their names for users.
    apart : collection of str
        Arrays that have other leading axes, for which kernels have other strides: pages.
    by_offsets : bool
        Whether offsets say where the rows of entries are.
    optional : mapping of str to (array, int), optional
        More arrays, which are left out if there would be more than `MAX_LEAD` axes with them.

    Raises
    ------
    ArgumentError
        If more than `MAX_LEAD` axes remain.
    """
    if optional:
        try:
            return lead_of(lead, {**arrays, **optional}, names, apart, by_offsets)
        except ArgumentError:
            pass
    keys = list(arrays)
    strides = [
        [0] * len(lead) if name in apart else _broadcast(*arrays[name], len(lead)) for name in keys
    ]
    joined: list[tuple[int, list[int]]] = []  # fastest axis first
    for axis in reversed(range(len(lead))):
        size, own = lead[axis], [each[axis] for each in strides]
        if size == 1:
            continue
        if joined:
            inner, steps = joined[-1]
            if all(mine == step * inner for mine, step in zip(own, steps, strict=True)):
                joined[-1] = size * inner, steps
                continue
        joined.append((size, own))
    if len(joined) > MAX_LEAD:
        sizes = tuple(size for size, _ in reversed(joined))
        raise ArgumentError(
            f"{names}: got leading axes {lead}, which leave {len(joined)}, {sizes}, after "
            f"neighbours are joined; expected at most {MAX_LEAD}. Make the arrays contiguous."
        )
    joined += [(1, [0] * len(keys))] * (MAX_LEAD - len(joined))
    return Lead(
        tuple(size for size, _ in reversed(joined)),
        {name: tuple(own[n] for _, own in reversed(joined)) for n, name in enumerate(keys)},
        by_offsets,
    )


def _broadcast(array: Any, trailing: int, axes: int) -> list[int]:
    own = array.ndim - trailing
    steps = [
        0 if size == 1 else stride // array.itemsize
        for size, stride in zip(array.shape[:own], array.strides[:own], strict=True)
    ]
    return [0] * (axes - own) + steps


def operand(array: Any, lead: Strides = (0,) * MAX_LEAD, columns: bool = True) -> Operand:
    """Return how an array (..., H, L, D), or without `columns` (..., H, L), lies in memory."""
    steps = [stride // array.itemsize for stride in array.strides[-3 if columns else -2 :]]
    return Operand(0, lead, steps[0], steps[1], steps[2] if columns else 0)


def rows_of_scale(scale: Any, lead: Strides) -> Operand:
    """Return how scales (..., H, L, 1) lie in memory, with 0 along axes for which there is one."""
    steps = [
        0 if size == 1 else stride // scale.itemsize
        for size, stride in zip(scale.shape, scale.strides, strict=True)
    ]
    return Operand(0, lead, steps[-3], steps[-2], 0)


def table(array: Any) -> Table:
    """Return how a looked-up array lies in memory."""
    padding = (0,) * (MAX_AXES - array.ndim)
    return Table(
        data=0,
        shape=(*array.shape, *padding),
        strides=(*array.strides, *padding),
    )


ROW_ALIGNMENT = 16  # bytes, that a thread copies at once


def are_aligned(call: Call) -> bool:
    """Return whether rows of q, k and v are contiguous and begin at multiples of 16 bytes."""
    return all(
        x.strides[-1] == x.itemsize
        and not any(step % ROW_ALIGNMENT for step in x.strides[:-1])
        and not device_arrays.address(x) % ROW_ALIGNMENT
        for x in (call.q, call.k, call.v)
    )


def scales(encoding: Encoding, paged: bool) -> dict[str, Any]:
    """Return how the scales of a cache lie in memory, by the names of kernels."""
    told: dict[str, Any] = {}
    for name, scale in encoding.scales.items():
        page, head, row, group = (step // scale.itemsize for step in scale_steps(scale))
        entry = 0 if paged else page
        lead = (*(0,) * (MAX_LEAD - 1), entry)
        told[name] = Operand(lead=lead, head=head, row=row, col=group)
        told[f"{name}_page"] = page if paged else 0
    return told
