"""Orders in which the axes of arrays lie in XLA's memory.

Kernels take any strides. So an array whose axes a program has swapped, from (batch, length, heads,
dim) say, is taken as it was before: a call swaps them back, and XLA drops what cancels out. The
same goes for results. Orders change no bit: what is not recognised here is in C order.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.interpreters import mlir

_MOST_STEPS = 16  # from a call back to what swapped the axes of an operand


def in_c(aval: Any) -> tuple[int, ...]:
    """Return the axes of an array in C order."""
    return tuple(range(len(aval.shape)))


def like(order: tuple[int, ...], axes: int) -> tuple[int, ...]:
    """Return the axes of an array that has another one's order, or C order if it has other axes."""
    return order if len(order) == axes else tuple(range(axes))


def order_of(value: Any, aval: Any) -> tuple[int, ...]:
    """Return the axes of an array of a program, the slowest one in memory first.

    Those of arrays that are divided over a mesh by their types stay where they are.

    Parameters
    ----------
    value : ir.Value
        The array, as it is lowered: transposes are looked through, and what computes arrays from
        those of the same shape, which is elementwise.
    """
    swaps = []  # for each transpose on the way, which axis of its operand each axis is
    order = in_c(aval)
    if any(aval.sharding.spec):
        return order
    for _ in range(_MOST_STEPS):
        made_by = getattr(value.owner, "name", "")  # a block, which has arguments, has no name
        if made_by == "stablehlo.transpose":
            swaps.append([int(axis) for axis in value.owner.attributes["permutation"]])
            value = value.owner.operands[0]
        else:
            same = [x for x in _operands(value) if _shape(x) == _shape(value)]
            if not same:
                break
            value = same[0]
    for swap in reversed(swaps):
        order = tuple(swap.index(axis) for axis in order)
    return order


def transposed(ctx: Any, value: Any, aval: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """Return a transpose of an array of a program, and its aval."""
    if axes == in_c(aval):
        return value, aval
    to = aval.update(shape=tuple(aval.shape[axis] for axis in axes))
    how = mlir.lower_fun(lambda x: jax.lax.transpose(x, axes), multiple_results=False)
    (made,) = how(ctx.replace(avals_in=[aval], avals_out=[to]), value)
    return made, to


def inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the transpose that undoes another one."""
    return tuple(axes.index(axis) for axis in range(len(axes)))


def _operands(value: Any) -> list[Any]:
    return list(getattr(value.owner, "operands", ()))


def _shape(value: Any) -> list[int]:
    """Return the shape of an array; [] of what is none."""
    return list(getattr(value.type, "shape", ()))
