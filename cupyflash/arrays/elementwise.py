"""What is done to each element of arrays of CuPy: to fill, to convert, to copy, to add.

CuPy is imported when one of these functions is called.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import tape
from .cuda_device import current


def fill(array: Any, value: float) -> None:
    """Write one number to every element."""
    if (written := tape.current()) is not None:
        written.elementwise(lambda x: fill(x, value), array)
    with array.device:
        array.fill(value)


MOST_SUMMANDS = 4
_AT_ONCE = 4  # elements that a thread loads, adds and stores


@functools.cache
def _converter(summands: int = 1) -> Any:
    import cupy

    names = [f"x{n}" for n in range(summands)]
    inputs = ", ".join(f"T {name}" for name in names)
    return cupy.ElementwiseKernel(
        inputs, "U y", f"y = {' + '.join(names)}", f"cupyflash_convert{summands}"
    )


@functools.cache
def _converter_of_rows(summands: int) -> Any:
    """Return a kernel for rows whose elements lie side by side, in half the time of the other."""
    import cupy

    numbers = range(summands)
    loads = "".join(
        f"const From of{n} = *reinterpret_cast<const From*>(&x{n}[0] + row * pitch{n} + at);"
        for n in numbers
    )
    total = " + ".join(f"of{n}.x[c]" for n in numbers)
    body = f"""
        struct alignas(sizeof(T) < 4 ? 8 : 16) From {{ T x[{_AT_ONCE}]; }};
        struct alignas(sizeof(U) < 4 ? 8 : 16) To {{ U x[{_AT_ONCE}]; }};
        const long long row = i / width, at = {_AT_ONCE} * (i % width);
        {loads}
        To sum;
        #pragma unroll
        for (int c = 0; c < {_AT_ONCE}; ++c) sum.x[c] = {total};
        *reinterpret_cast<To*>(&y[0] + row * pitch + at) = sum;
    """
    inputs = [f"raw T x{n}" for n in numbers] + [f"int64 pitch{n}" for n in numbers]
    inputs += ["int64 pitch", "int64 width"]
    return cupy.ElementwiseKernel(
        ", ".join(inputs), "raw U y", body, f"cupyflash_convert_rows{summands}"
    )


def _sum(arrays: Sequence[Any]) -> None:
    """Write the sum of all arrays but the last one to that."""
    *summands, to = arrays
    rows = _rows(*arrays)
    if rows is None or not _are_aligned(arrays, rows):
        _converter(len(summands))(*arrays)  # in half the host time of an assignment
        return
    count, width, *pitches = rows
    quads = width // _AT_ONCE
    _converter_of_rows(len(summands))(*summands, *pitches, quads, to, size=count * quads)


def _are_aligned(arrays: Sequence[Any], rows: Sequence[int]) -> bool:
    """Return whether all elements of rows can be loaded and stored several at a time."""
    count, width, *pitches = rows
    return not width % _AT_ONCE and all(
        x.itemsize > 1
        and not x.data.ptr % min(16, _AT_ONCE * x.itemsize)
        and (count == 1 or not pitch * x.itemsize % min(16, _AT_ONCE * x.itemsize))
        for x, pitch in zip(arrays, pitches, strict=True)
    )


def convert(array: Any, to: Any) -> None:
    """Write the elements of an array, rounded, to another one on the current device."""
    if (written := tape.current()) is not None:
        written.elementwise(convert, array, to)
    _sum((array, to))


_MOST_INDICES = 16  # that are kept


@functools.lru_cache(_MOST_INDICES)
def _indices(positions: tuple[range, ...], device: int) -> Any:  # noqa: ARG001, it is the current one
    import cupy

    with tape.paused():
        made = cupy.asarray(np.concatenate([*map(np.array, positions)]))
        cupy.cuda.get_current_stream().synchronize()  # others may read it
    return made


def take(array: Any, positions: tuple[range, ...], to: Any) -> None:
    """Write the elements at some positions of the last axis to an array on the current device."""
    import cupy

    indices = _indices(positions, int(to.device.id))
    if (written := tape.current()) is not None:
        written.elementwise(lambda x, y: cupy.take(x, indices, -1, y), array, to)
    cupy.take(array, indices, -1, to)


_IN_DEVICE = 3  # cudaMemcpyKind
_LONGEST_PITCH = 2**31 - 1


def copy(array: Any, to: Any) -> None:
    """Write the elements of an array, rounded, to another one on the current device.

    Rows of one dtype that are not aligned are copied by the driver.
    """
    rows = _rows(array, to) if array.dtype == to.dtype else None
    if rows is None or _are_aligned((array, to), rows):
        convert(array, to)
        return
    import cupy

    if (written := tape.current()) is not None:
        written.elementwise(copy, array, to)
    item = array.itemsize
    count, width, pitch, pitch_to = rows[0], *(item * x for x in rows[1:])
    stream = cupy.cuda.get_current_stream().ptr
    place, place_to = array.data.ptr, to.data.ptr
    cupy.cuda.runtime.memcpy2DAsync(
        place_to, pitch_to, place, pitch, width, count, _IN_DEVICE, stream
    )


def _rows(*arrays: Any) -> tuple[int, ...] | None:
    """Return how many rows arrays have, their width, and how far apart those of each are.

    All in elements; None if they are no rows at equal distances.
    """
    if any(x.shape != arrays[0].shape for x in arrays):
        return None
    axes: list[tuple[int, ...]] = []  # size and strides, the fastest axis first
    of_axes = zip(arrays[0].shape, *(x.strides for x in arrays), strict=True)
    for size, *steps in reversed(list(of_axes)):
        if axes and all(
            step == axes[-1][0] * x for step, x in zip(steps, axes[-1][1:], strict=True)
        ):
            axes[-1] = axes[-1][0] * size, *axes[-1][1:]
        elif size != 1:
            axes.append((size, *steps))
    items = tuple(x.itemsize for x in arrays)
    axes = axes or [(1, *items)]
    if not arrays[0].size or len(axes) > 2 or axes[0][1:] != items:
        return None
    width = axes[0][0]
    count, *steps = axes[1] if len(axes) > 1 else (1, *(width * item for item in items))
    pitches = [step // item for step, item in zip(steps, items, strict=True)]
    exact = all(x * item == step for x, item, step in zip(pitches, items, steps, strict=True))
    if not exact or min(pitches) < width or max(steps) > _LONGEST_PITCH:
        return None
    return count, width, *pitches


def add_up(*arrays: Any) -> None:
    """Write the sum of arrays of one dtype, added in their order and rounded, to the last one.

    There are `MOST_SUMMANDS` of them and the last one at most, on the current device.
    """
    if (written := tape.current()) is not None:
        written.elementwise(add_up, *arrays)
    _sum(arrays)


def add(array: Any, to: Any) -> None:
    """Add the elements of an array to another one of the same dtype."""
    if (written := tape.current()) is not None:
        written.elementwise(add, array, to)
    with current(int(to.device.id)):
        _sum((to, array, to))
