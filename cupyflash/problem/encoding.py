"""What the elements of a call's arrays mean if they are codes of 8 or 4 bits."""

from __future__ import annotations

from dataclasses import dataclass

from ..arrays.typed import Array
from .formats import Format


@dataclass(frozen=True, eq=False)
class Codes:
    """What codes mean: attention is that of ``scale * code``.

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

    k_form: Format | None
    v_form: Format | None
    k_scale: Array | None
    v_scale: Array | None
    q_scale: Array | None = None

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


def scale_steps(scale: Array) -> tuple[int, int, int, int]:
    """Return the bytes between scales along pages or entries, heads, rows and groups of columns.

    They are 0 where there is one scale for all.
    """
    steps = [0 if n == 1 else step for n, step in zip(scale.shape, scale.strides, strict=True)]
    page, head, row, group = [0] * (4 - len(steps)) + steps
    return page, head, row, group
