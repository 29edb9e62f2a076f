"""Tensor maps, which describe to TMA how arrays are laid out in memory.

A map is data, a function of shapes and strides. `encode` turns it and an address into what a kernel
takes: 128 bytes, which the driver writes. It also writes another address into them.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from .params import MAX_LEAD, Operand

AXES = 5  # the most that a map has: columns, rows, heads and two leading ones
LINE = 64  # columns of a TMA tile: elements of 16 bits in 128 bytes
BYTES = 128  # of an encoded map
_ALIGNMENT = 16  # bytes, of addresses and strides
_LONGEST, _FARTHEST = 2**31, 2**40  # an axis, whose coordinates have 32 bits; a stride in bytes
_ITEMSIZE = 2
ANYWHERE = 1 << 32  # an address for maps that are told theirs later


class TensorMap(NamedTuple):
    """An array that TMA copies; elements outside it count as 0.

    Attributes
    ----------
    name : str
        The name of the array whose address belongs to it.
    dtype : str
        float16 or bfloat16.
    shape, strides : tuple of int
        Lengths and strides of `AXES` axes, the fastest first; strides are in bytes, without that of
        the fastest axis. An axis along which the array repeats itself has length 1.
    rows : int
        Rows of a TMA tile, which is `LINE` columns wide.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rows: int


def obstacle(operand: Operand, address: int, sizes: tuple[int, ...]) -> str | None:
    """Return in words why TMA cannot copy an array, or None.

    Parameters
    ----------
    operand : Operand
        Its strides.
    address : int
        Address of its first element, or that modulo 16.
    sizes : tuple of int
        The lengths of its leading axes (those of the launch), heads, rows and columns.
    """
    *lead, _, rows, columns = sizes
    if any(size > 1 for size in lead[: MAX_LEAD - 2]):
        return "more than two leading axes stay apart when neighbours are joined"
    if not rows or not columns:
        return "an axis is empty"
    if columns > 1 and operand.col != 1:
        return "its columns lie apart"
    if rows > 1 and not operand.row:
        return "its rows repeat"
    steps = _steps(operand, sizes)
    if address % _ALIGNMENT or any(step % _ALIGNMENT for step in steps):
        return f"rows do not begin at multiples of {_ALIGNMENT} bytes"
    if any(step < 0 for step in steps):
        return "an axis runs backwards"
    if max(steps) >= _FARTHEST or max(sizes) >= _LONGEST:
        return "it is too large"
    return None


def of(name: str, dtype: str, operand: Operand, sizes: tuple[int, ...], rows: int) -> TensorMap:
    """Return the map of an array for which there is no obstacle; `rows` are those of a TMA tile."""
    lengths = sizes[:1:-1]
    steps = _steps(operand, sizes)
    moves = (operand.row, operand.head, *operand.lead[:1:-1])
    shape = tuple(length if move else 1 for length, move in zip(lengths[1:], moves, strict=True))
    return TensorMap(name, dtype, (lengths[0], *shape), steps, rows)


def _steps(operand: Operand, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides in bytes of all axes but the columns; of axes without a step, any."""
    moves = (operand.row, operand.head, *operand.lead[:1:-1])
    lengths = sizes[-2:1:-1]
    return tuple(
        step * _ITEMSIZE if step and length > 1 else _ALIGNMENT
        for step, length in zip(moves, lengths, strict=True)
    )


def encode(made: TensorMap, address: int) -> bytes:
    """Return the bytes of a map.

    Raises
    ------
    RuntimeError
        If the driver refuses the map; `obstacle` should have found the reason.
    """
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    size, box = driver.cuuint64_t, driver.cuuint32_t
    error, encoded = driver.cuTensorMapEncodeTiled(
        types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
        if made.dtype == "float16"
        else types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        AXES,
        address,
        [size(length) for length in made.shape],
        [size(step) for step in made.strides],
        [box(length) for length in (LINE, made.rows, 1, 1, 1)],
        [box(1)] * AXES,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuTensorMapEncodeTiled: {error} for {made} at {address:#x}")
    return ctypes.string_at(encoded.getPtr(), BYTES)
