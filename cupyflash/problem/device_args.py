"""Checks that only calls on a GPU need: offsets and seeds in device memory, graph capture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..arrays import cuda_device, device_arrays
from ..arrays.interop import array, one_home
from ..errors import ArgumentError, ArgumentTypeError
from ..expr.nodes import Expr, walk
from .call import Array


def taken(value: Any, name: str, q: Any, reads: bool) -> Any:
    """Return offsets as they are if they are in device memory and not read, or else a copy.

    What is no array comes back as it is: the checks say what is wrong with it.
    """
    if device_arrays.is_device_array(value):
        reads &= device_arrays.is_device_array(q)
        return read_offsets(value, name, q) if reads else value
    if not isinstance(value, (list, tuple)) and type(value) is not np.ndarray:
        value = array(value, name)  # of another library
        if device_arrays.is_device_array(value):
            return taken(value, name, q, reads)
    try:
        return np.array(value)
    except ValueError:
        return value


def offsets_to_check(value: Array, name: str, q: Array, check: bool) -> tuple[Array, Array | None]:
    """Return offsets for the kernels, and a copy in host memory, or None if they are not read.

    Checked offsets are a copy, so nobody can change them before the kernels read them.
    """
    if not device_arrays.is_device_array(value):
        copy = np.array(value)
        return copy, copy
    if not check:
        one_home({"q": q, name: value})
        return value, None
    copy = read_offsets(value, name, q)
    return copy, copy


def read_offsets(value: Array, name: str, q: Array) -> Array:
    """Return a copy in host memory of offsets in device memory, for which it waits.

    Raises
    ------
    ArgumentError
        If a graph is being captured, or the offsets are not where q is.
    """
    device = one_home({"q": q, name: value})
    assert device is not None
    with cuda_device.current(device):
        if cuda_device.is_capturing():
            raise ArgumentError(
                f"check: got True while a CUDA graph is being captured, when {name} cannot be "
                "read back; expected None, with which kernels check the offsets."
            )
        return device_arrays.read_back(value)


def unread(total: int, longest: int) -> tuple[Array, Array]:
    """Return lengths and starts to use if the offsets of sequences are not read.

    Their extremes are the most extreme ones that the sequences may have.
    """
    return np.array([0, longest]), np.array([0, max(total - longest, 0)])


def longest(size: str, most: int, aligned: Iterable[Array], exprs: Iterable[Expr]) -> int:
    """Return the length of the longest sequence that the given arrays fit; at most `most`.

    Parameters
    ----------
    size : {"len_q", "len_k"}
        Queries or keys.
    most : int
        Rows that no sequence exceeds.
    aligned : iterable of array
        Arrays (..., Lq, Lk): bias and mask.
    exprs : iterable of Expr
        Mask and score changes.
    """
    axis = -2 if size == "len_q" else -1
    lengths: list[int] = [x.shape[axis] for x in aligned if x.ndim >= -axis]
    for expr in exprs:
        for node in walk(expr):
            if node.op != "aligned" or node.value.packed:
                continue
            axes, shape = node.value.axes, node.value.array.shape
            for own, length in zip(reversed(axes), reversed(shape), strict=False):
                base, _, divisor = own.size.partition("/")
                if base == size and own.exact is None and length != 1:
                    lengths.append(length * int(divisor or 1))
    return min([most, *(length for length in lengths if length != 1)])


def refuse_longer(name: str, offsets: Array, most: int) -> None:
    """Refuse offsets in host memory of a sequence with more rows than a caller says."""
    rows = np.diff(offsets.astype(np.int64))
    n = int(np.argmax(rows)) if rows.size else 0
    if rows.size and rows[n] > most:
        raise ArgumentError(
            f"{name}: entry {n + 1} ends a sequence of {rows[n]} rows; expected at most {most}, "
            "which is max_seqlen as a multiple of 16 or, of more than 128 queries, as a power of "
            "two. Pass the largest length."
        )


def seed(value: Any) -> Any:
    """Return a seed in device memory: a 0-d array of uint64, which kernels read."""
    if value.ndim or value.dtype != np.uint64:
        raise ArgumentTypeError(
            f"seed: got shape {value.shape}, dtype {value.dtype}; expected an integer, or a 0-d "
            "array of uint64."
        )
    return value
