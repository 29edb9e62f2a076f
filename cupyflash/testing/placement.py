"""Arrays placed in poisoned memory, with any strides: kernels must read and write nothing else."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

GUARD = 160  # bytes on either side: two vectors and a half
POISON = 0xFF  # bytes that are NaN in each of the four float types


class Layout(NamedTuple):
    """How an array lies in memory; the default is C order, contiguous and aligned.

    Attributes
    ----------
    order : tuple of int or None
        Axes from the slowest to the fastest.
    steps : tuple of int or None
        For each axis: 1, 2 for a gap between elements, -1 or -2 for backwards, 0 for one repeated
        element.
    shift : int
        Bytes by which the start is off a 64-byte boundary.
    """

    order: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None
    shift: int = 0


PLAIN = Layout()


def random_layout(
    rng: np.random.Generator, ndim: int, itemsize: int, repeats: bool = False
) -> Layout:
    """Draw a layout.

    Parameters
    ----------
    rng : numpy.random.Generator
        The source of random numbers.
    ndim, itemsize : int
        Number of axes, and bytes of an element.
    repeats : bool
        Whether an axis may have stride 0, which outputs must not have.

    Returns
    -------
    Layout
        A layout with any order of axes, gaps, axes that run backwards, and unaligned starts.
    """
    order = tuple(int(axis) for axis in rng.permutation(ndim))
    if ndim > 1 and rng.random() < 0.5:  # elements of a row are adjacent, as in users' arrays
        order = (*(axis for axis in order if axis != ndim - 1), ndim - 1)
    steps = [int(rng.choice([1, 1, 1, 2, -1, -2])) for _ in range(ndim)]
    if repeats and ndim and rng.random() < 0.2:
        steps[int(rng.integers(ndim))] = 0
    shift = int(rng.choice([0, 0, itemsize, 1]))
    return Layout(order, tuple(steps), shift)


class Placed:
    """An array in a poisoned buffer.

    Parameters
    ----------
    shape : tuple of int
        Its shape.
    dtype : dtype_like
        Its type.
    layout : Layout
        Where its elements lie.
    values : array_like, optional
        Its values, if it is an input; an output has none.

    Attributes
    ----------
    view : ndarray
        The array. An input is read-only; an output starts as NaN.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: Any, layout: Layout = PLAIN, values: Any = None
    ) -> None:
        dtype = np.dtype(dtype)
        order = layout.order or tuple(range(len(shape)))
        steps = layout.steps or (1,) * len(shape)
        strides, first, reach = [0] * len(shape), 0, dtype.itemsize
        for axis in reversed(order):
            length, step = max(shape[axis], 1), steps[axis]
            strides[axis] = reach * step
            if step < 0:
                first += reach * -step * (length - 1)
            reach *= 1 if step == 0 else 1 + abs(step) * (length - 1) if length > 1 else abs(step)
        self._bytes = np.full(reach + 2 * GUARD + 64, POISON, np.uint8)
        start = GUARD + -self._bytes.ctypes.data % 64 + layout.shift
        place: dict[str, Any] = {"buffer": self._bytes, "offset": start + first}
        place["strides"] = tuple(strides)
        self.view = np.ndarray(shape, dtype, **place)
        # Numbers move as integers, so that no bit of a NaN changes.
        self._raw = np.ndarray(shape, f"u{dtype.itemsize}", **place)
        if values is not None:
            values = np.asarray(values, dtype)
            for axis, step in enumerate(steps):
                if step == 0 and shape[axis] > 1:
                    values = np.repeat(values.take([0], axis), shape[axis], axis)
            self._raw[...] = values.view(self._raw.dtype)
            self.view.flags.writeable = False
        self._input = values is not None
        self._before = self._bytes.copy()

    def check(self) -> None:
        """Raise AssertionError if an input has changed, or anything beside an output."""
        if not self._input:
            mine = np.zeros(self._bytes.shape, bool)
            place = int(self.view.__array_interface__["data"][0]) - self._bytes.ctypes.data
            for n in range(self.view.itemsize if self.view.size else 0):
                np.ndarray(
                    self.view.shape, bool, buffer=mine, offset=place + n, strides=self.view.strides
                )[...] = True
            if not np.array_equal(self._bytes[~mine], self._before[~mine]):
                raise AssertionError("wrote outside an output")
        elif not np.array_equal(self._bytes, self._before):
            raise AssertionError("changed an input, or wrote outside it")


def bits(array: Array) -> Array:
    """Return an array's bits as one row of integers, so that NaN equals itself and -0 is not 0.

    Parameters
    ----------
    array : ndarray
        An array of any type whose elements have 1, 2, 4 or 8 bytes.

    Returns
    -------
    ndarray of unsigned integers
        In C order.
    """
    return np.array(array, order="C").reshape(-1).view(f"u{array.dtype.itemsize}")


def same_bits(a: Array, b: Array) -> bool:
    """Say whether two arrays are bitwise equal.

    Parameters
    ----------
    a, b : ndarray
        The arrays to compare.

    Returns
    -------
    bool
        True for equal types, shapes and bits.
    """
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(bits(a), bits(b))
