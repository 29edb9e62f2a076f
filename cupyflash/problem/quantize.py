"""Calls of `quantize`: what users pass, turned into a `Quantisation`, or into an error."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.interop import floats, one_home
from ..errors import ArgumentError, ArgumentTypeError
from .call import Array
from .formats import INT4_GROUP, Format, format_of


@dataclass(frozen=True, eq=False)
class Quantisation:
    """A checked call of `quantize`.

    Attributes
    ----------
    x : array
        (..., D).
    form : Format
        The format of the codes.
    columns : int
        Columns that share a scale.
    groups : int
        Scales of a row.
    device : int or None
        The device of the array.
    """

    x: Array
    form: Format
    columns: int
    groups: int
    device: int | None

    @property
    def shape_of_codes(self) -> tuple[int, ...]:
        """(..., D), or (..., D / 2) if two codes share a byte."""
        return (*self.x.shape[:-1], self.x.shape[-1] // self.form.packed)

    @property
    def shape_of_scale(self) -> tuple[int, ...]:
        """(..., groups)."""
        return (*self.x.shape[:-1], self.groups)


def quantisation(x: Any, dtype: Any, group: Any) -> Quantisation:
    """Validate a call of `quantize`."""
    x, form = floats(x, "x"), format_of(dtype, "dtype")
    if not x.ndim:
        raise ArgumentError(
            "x: got shape (); expected (..., D), rows of which each has a scale. Pass x[None]."
        )
    columns = x.shape[-1]
    if columns % form.packed:
        raise ArgumentError(
            f"x: got shape {x.shape} for {form.name}, of which two codes share a byte; expected "
            "an even number of columns. Pad the last axis with zeros."
        )
    groups = 1
    if group is not None or form.packed > 1:
        size = _group_of(group, columns, form)
        columns, groups = size, columns // max(size, 1)
    return Quantisation(x, form, columns, groups, one_home({"x": x}))


def _group_of(value: Any, columns: int, form: Format) -> int:
    """Return how many columns share a scale, if it is not all of a row."""
    group = INT4_GROUP
    if value is not None:
        if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
            raise ArgumentTypeError(
                f"group: got {value!r}; expected how many columns share a scale, an integer."
            )
        group = operator.index(value)
    has_groups = form.packed > 1 and columns % INT4_GROUP == 0
    if group == columns or (has_groups and group == INT4_GROUP):
        return group
    came = f"got {group}" if value is not None else f"got None, which means {group},"
    groups = f"{INT4_GROUP}, or " if has_groups and columns else ""
    raise ArgumentError(
        f"group: {came} for {form.name} with rows of {columns} columns; expected {groups}"
        f"{columns}, one scale for each row, because no function takes codes of other groups. "
        f"Pass group={columns}. Columns of different sizes may be divided by numbers of their own "
        "before, and queries multiplied by these."
    )
