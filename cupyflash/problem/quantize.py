"""Calls of `quantize`: what users pass, turned into a `Quantisation`, or into an error."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.interop import floats, one_home
from ..errors import ArgumentError, ArgumentTypeError
from .call import Array
from .formats import INT4_GROUP, Format, format_of

_PER = "row", "head", "tensor"


@dataclass(frozen=True, eq=False)
class Quantisation:
    """A checked call of `quantize`.

    Attributes
    ----------
    x : array
        (..., D).
    form : Format
        The format of the codes.
    per : {"row", "head", "tensor"}
        What has a scale of its own, or for a row one for each group.
    columns : int
        Columns that share a scale.
    groups : int
        Scales of a row.
    device : int or None
        The device of the array.
    """

    x: Array
    form: Format
    per: str
    columns: int
    groups: int
    device: int | None

    @property
    def shape_of_codes(self) -> tuple[int, ...]:
        """(..., D), or (..., D / 2) if two codes share a byte."""
        return (*self.x.shape[:-1], self.x.shape[-1] // self.form.packed)

    @property
    def shape_of_scale(self) -> tuple[int, ...]:
        """(..., groups); axes whose rows share a scale have the length 1."""
        own = self._own_axes
        return (*self.x.shape[:own], *(1,) * (self.x.ndim - 1 - own), self.groups)

    @property
    def rows(self) -> int:
        """Rows that share a scale, which are neighbours in C order."""
        return math.prod(self.x.shape[self._own_axes : -1])

    @property
    def _own_axes(self) -> int:
        """The leading axes along which scales differ."""
        axes = self.x.ndim - 1
        return {"row": axes, "head": max(axes - 1, 0), "tensor": 0}[self.per]


def quantisation(x: Any, dtype: Any, group: Any = None, per: Any = "row") -> Quantisation:
    """Validate a call of `quantize`."""
    x, form = floats(x, "x"), format_of(dtype, "dtype")
    _check_per(per)
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
    if per != "row":
        _check_whole_rows(group, columns, per)
    elif group is not None or form.packed > 1:
        size = _group_of(group, columns, form)
        columns, groups = size, columns // max(size, 1)
    return Quantisation(x, form, per, columns, groups, one_home({"x": x}))


def _check_per(per: Any) -> None:
    """Refuse what scales cannot belong to."""
    words = ", ".join(map(repr, _PER))
    if not isinstance(per, str):
        raise ArgumentTypeError(
            f"per: got {per!r}; expected what has a scale of its own: {words}. Say per='head' for "
            "one scale for each head."
        )
    if per == "block":
        raise ArgumentError(
            "per: got 'block'; expected 'row', 'head' or 'tensor': no function takes scales of "
            "blocks of rows. Scales of rows follow the numbers more closely: say per='row'."
        )
    if per not in _PER:
        raise ArgumentError(
            f"per: got {per!r}; expected what has a scale of its own: {words}. Say per='row'."
        )


def _check_whole_rows(group: Any, columns: int, per: str) -> None:
    """Refuse groups of columns where many rows share a scale."""
    if group is None or (not isinstance(group, (bool, np.bool_)) and group == columns):
        return
    raise ArgumentError(
        f"group: got {group!r} with per={per!r}, where all columns share a scale; expected None. "
        "Leave group out, or say per='row'."
    )


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
