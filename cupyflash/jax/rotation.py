"""Rotations of rows, which are linear: derivatives in both modes are rotations, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.interpreters import ad

from .. import cache_update
from ..problem.rotary import Rotary
from . import host, target
from .constants import Constants


def rotated(x: jax.Array, positions: jax.Array, rotary: Rotary, inverse: bool) -> jax.Array:
    """Return rows turned by the angles of their positions."""
    return _Rotation(Constants({"rotary": rotary}), inverse, x.ndim, positions.ndim).bind(
        x, positions, x.shape
    )


@dataclass(frozen=True, eq=False)
class _Rotation:
    """A rotation of arrays with so many axes, and more of vmap before these."""

    constants: Constants
    inverse: bool
    axes: int
    axes_of_positions: int

    def bind(self, x: Any, positions: Any, shape: tuple[int, ...]) -> Any:
        """Rotate rows in a program; `shape` is that of the result."""
        function = target.Function(self.run, rules=self, like=(0,))
        result = jax.ShapeDtypeStruct(shape, x.dtype)
        return target.bind(function, [result], "expand_dims", [x, positions])[0]

    def run(
        self, operands: Sequence[Any], into: tuple[Any, ...], shapes: Sequence[tuple[int, ...]]
    ) -> list[Any]:
        """Return rotated rows, summed over axes of vmap that the result does not have."""
        x, positions = operands
        rotary = self.constants.beside(x)["rotary"]
        extra = x.ndim - self.axes
        if not extra:
            out = into[0] if into else None
            return [cache_update.rope(x, positions, rotary, inverse=self.inverse, out=out)]
        mapped = np.broadcast_shapes(x.shape[:extra], positions.shape[:extra])
        own = x.shape[extra:]
        x, positions = host.with_axes(x, mapped), host.with_axes(positions, mapped)
        # One entry for each row of positions, of which an array may have more.
        x = x.reshape(*mapped, *(1,) * (4 - self.axes), *own)
        if self.axes_of_positions == 1:
            positions = positions[..., None, :]
        rows = np.broadcast_to(positions, (*x.shape[:-3], x.shape[-2]))
        made = cache_update.rope(
            x.reshape(-1, *x.shape[-3:]),
            rows.reshape(-1, x.shape[-2]),
            rotary,
            inverse=self.inverse,
        )
        made = made.reshape(*mapped, *own)
        return [host.summed(made, shapes[0], np.promote_types(made.dtype, np.float32))]

    def jvp(
        self, primals: Sequence[Any], tangents: Sequence[Any], results: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return rotated rows and their tangents."""
        (x, positions), (moved, _), (result,) = primals, tangents, results
        made = self.bind(x, positions, result.shape)
        if type(moved) is ad.Zero:
            return [made], [ad.Zero(jax.typeof(made).to_tangent_aval())]
        return [made], [self.bind(moved, positions, result.shape)]

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """Return the cotangent of the rows: they are turned back."""
        (cotangent,), (x, positions) = cotangents, operands
        if type(cotangent) is ad.Zero:
            return [ad.Zero(x.aval), None]
        back = _Rotation(self.constants, not self.inverse, self.axes, self.axes_of_positions)
        return [back.bind(cotangent, positions, x.aval.shape), None]
