"""What the elements of a call's arrays mean: themselves, or ``scale * code``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from ..arrays.typed import Array
from ..errors import ArgumentError, ArgumentTypeError
from .formats import Format

QUERIES = "float16", "bfloat16", "float32"  # types of queries beside a cache of codes


@dataclass(frozen=True, eq=False)
class Encoding:
    """What the elements of queries, keys and values mean: here, themselves, for they are numbers.

    Attributes
    ----------
    k_form, v_form : Format or None
        The formats of keys and of values; None of those that are numbers. If queries are codes,
        too, all three have one format.
    k_scale, v_scale : array of float32 or None
        They broadcast to the rows of keys and of values, with a last axis of 1, or one scale for
        each group of columns; None where there are no codes.
    q_scale : array of float32 or None
        The same of queries; None if these are numbers.
    """

    k_form: Format | None = None
    v_form: Format | None = None
    k_scale: Array | None = None
    v_scale: Array | None = None
    q_scale: Array | None = None
    # Names of the operands that are codes whose scales have the operands' leading axes.
    operands: ClassVar[tuple[str, ...]] = ()
    # Units of a device that multiply them besides those for numbers.
    units: ClassVar[tuple[Literal["float8"], ...]] = ()
    # Whether values that are the first columns of keys are read as keys, once.
    views_are_read_once: ClassVar[bool] = True

    @property
    def scales(self) -> dict[str, Array]:
        """The scales that there are, by name."""
        named = {"q_scale": self.q_scale, "k_scale": self.k_scale, "v_scale": self.v_scale}
        return {name: scale for name, scale in named.items() if scale is not None}

    @property
    def form(self) -> Format:
        """The one format of queries, keys and values that are all codes."""
        assert self.k_form is not None
        assert self.k_form == self.v_form
        return self.k_form

    @property
    def words(self) -> str:
        """The formats in words."""
        if self.k_form == self.v_form and self.k_form is not None:
            return self.k_form.name
        sides = {"keys": self.k_form, "values": self.v_form}
        return " and ".join(f"{form.name} {side}" for side, form in sides.items() if form)

    @property
    def words_of_rows(self) -> list[str]:
        """What each row of a cache has besides numbers, in words."""
        return []

    def type_words(self, dtype: np.dtype[Any]) -> tuple[str, str]:
        """Return the type of a call whose results have a dtype: short, and in more words."""
        return dtype.name, dtype.name

    def row_bytes(self, name: str, x: Array) -> int:
        """Return the bytes of a row of keys or values, with those of its scales."""
        scale = self.scales.get(f"{name}_scale")
        of_scales = 0 if scale is None else scale.shape[-1] * scale.itemsize
        return int(x.shape[-1] * x.itemsize + of_scales)

    def check_numbers(self, named: str) -> None:
        """Refuse codes where something else, which is named, needs numbers in q, k and v."""

    def check_queries(self, dtype: np.dtype[Any], name: str) -> None:
        """Refuse a dtype of the arrays that come with these."""


NUMBERS = Encoding()


class Fp8Encoding(Encoding):
    """Queries, keys and values are codes of float8."""

    operands = "q", "k", "v"
    units = ("float8",)

    def check_numbers(self, named: str) -> None:
        """Refuse all calls: q, k and v are codes."""
        raise ArgumentError(
            f"{named} beside codes in q, k and v; expected arrays of numbers, which dequantize "
            "makes of codes."
        )

    def type_words(self, dtype: np.dtype[Any]) -> tuple[str, str]:
        """Return the type of a call whose results have a dtype: short, and in more words."""
        return self.form.name, f"{self.form.name}, results in {dtype.name}"


class CacheEncoding(Encoding):
    """Keys, values or both are codes in a cache."""

    views_are_read_once = False

    @property
    def words_of_rows(self) -> list[str]:
        """The formats and the numbers of scales, in words."""
        groups = [scale.shape[-1] for scale in self.scales.values()]
        if self.k_form == self.v_form:
            several = "s" * (groups[0] > 1)
            return [f"{self.words} with {groups[0]} scale{several} for each row of keys"]
        several, numbers = "s" * (max(groups) > 1), " and ".join(map(str, groups))
        return [f"{self.words} with {numbers} scale{several} for each row"]

    def check_queries(self, dtype: np.dtype[Any], name: str) -> None:
        """Refuse a dtype of the arrays that come with codes."""
        if dtype.name not in QUERIES:
            raise ArgumentTypeError(
                f"{name}: got {dtype} with a cache of {self.words}; expected "
                f"{', '.join(QUERIES[:-1])} or {QUERIES[-1]}. Convert it with "
                ".astype(np.float32), or keep the cache in float64."
            )


def scale_steps(scale: Array) -> tuple[int, int, int, int]:
    """Return the bytes between scales along pages or entries, heads, rows and groups of columns.

    They are 0 where there is one scale for all.
    """
    steps = [0 if n == 1 else step for n, step in zip(scale.shape, scale.strides, strict=True)]
    page, head, row, group = [0] * (4 - len(steps)) + steps
    return page, head, row, group
