"""Calls that work on rows alone: combine, quantize and hadamard."""

from __future__ import annotations

from typing import Any

import numpy as np

from .addresses import address
from .calls import Bound
from .combine import combine as combine_kernel
from .float_modes import own_arithmetic
from .hadamard import LANES, signs_of
from .hadamard import hadamard as hadamard_kernel
from .jit import prepare
from .layout import Array
from .quantize import quantize as quantize_kernel
from .threads import parallel


@own_arithmetic
def combine(parts: list[tuple[Array, Array]], out: Array, lse: Array) -> None:
    """Write the combination of several (out, lse) to `out` and `lse`."""
    accumulator = lse.dtype
    prepare([(combine_kernel, accumulator)])
    columns = out.shape[-1]
    shape = (*lse.shape, columns)
    outs = [np.ascontiguousarray(np.broadcast_to(o, shape), accumulator) for o, _ in parts]
    lses = [np.ascontiguousarray(np.broadcast_to(x, lse.shape), accumulator) for _, x in parts]
    result, result_lse = np.empty((lse.size, columns), accumulator), np.empty(lse.size, accumulator)
    out_places = np.array([address(o) for o in outs], np.int64)
    lse_places = np.array([address(x) for x in lses], np.int64)
    parallel(
        Bound(
            combine_kernel,
            accumulator,
            out_places,
            lse_places,
            columns,
            accumulator.itemsize,
            result,
            result_lse,
            scratch=lambda: (np.empty(columns, accumulator),),
        ),
        lse.size,
        (outs, lses),
    )
    out[...] = result.reshape(shape).astype(out.dtype)
    lse[...] = result_lse.reshape(lse.shape)


@own_arithmetic
def quantize(x: Array, columns: int, form: int, codes: Array, scale: Array) -> None:
    """Write the codes of rows (..., D), as bytes, and the scale of every group.

    A group has `columns` numbers, a part of a row or several rows. `form` is the number of a
    format.
    """
    number = _accumulator(x)
    prepare([(quantize_kernel, number)])
    groups = _whole(x, number).reshape(scale.size, columns)
    result = np.empty((scale.size, columns * codes.shape[-1] // max(x.shape[-1], 1)), np.uint8)
    scales = np.empty(scale.size, np.float32)
    run = Bound(quantize_kernel, number, groups, form, result, scales)
    parallel(run, scale.size, (groups, result, scales))
    codes[...] = result.reshape(codes.shape)
    scale[...] = scales.reshape(scale.shape)


@own_arithmetic
def hadamard(
    x: Array, seed: int, power: int, factor: tuple[int, ...], inverse: bool, out: Array
) -> None:
    """Write transformed rows (..., D) to `out`."""
    number, columns = _accumulator(x), x.shape[-1]
    prepare([(hadamard_kernel, number)])
    rows = _whole(x, number).reshape(-1, columns)
    flags = out.flags
    in_place = out.dtype == number and flags.c_contiguous and flags.aligned
    target = out if in_place else np.empty(out.shape, number)
    result = target.reshape(rows.shape)
    signs = signs_of(seed, columns, number)
    scale = np.array([1.0 / np.sqrt(np.float64(columns))]).astype(number)
    run = Bound(
        hadamard_kernel,
        number,
        rows,
        power,
        np.array(factor, np.int64),
        int(inverse),
        signs,
        scale,
        result,
        scratch=lambda: (np.empty(2 * columns * LANES, number),),
    )
    parallel(run, -(-len(rows) // LANES), (rows, result))
    if not in_place:
        out[...] = target


def _whole(x: Array, number: np.dtype[Any]) -> Array:
    """Return an array in C order whose elements lie at multiples of their size."""
    return np.require(x, number, ["C", "A"])


def _accumulator(x: Array) -> np.dtype[Any]:
    return np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
