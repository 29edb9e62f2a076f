"""Arrays of a call as its kernels reach them: in place, or by a copy that each call fills anew.

Which of these it is depends on an array's shape, strides, type and alignment, so it is decided
once. What a kernel knows of the array is packed once, too: for another array like it, only its
address changes. None of this keeps an array of the caller.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .addresses import address
from .layout import Array, Layout, Scratch
from .memory import ROWS, Rows
from .microkernel import round_up
from .structs import Packed
from .sums import store
from .widen import NATIVE, kind_of


class Operand:
    """An array that kernels read.

    Parameters
    ----------
    layout : Layout
        The layout of the call.
    array : array, shape (..., rows, columns)
        An array like those that `load` will get.
    scratch : Scratch
        Memory for a copy.
    whole_vectors : bool
        Whether kernels read rows in whole vectors.
    widened : bool
        Whether kernels widen rows of 16-bit floats themselves.
    keys : bool
        Whether its rows are those of keys.

    Attributes
    ----------
    rows : Packed
        Where its rows lie, as kernels take it.
    """

    def __init__(
        self, layout: Layout, array: Array, scratch: Scratch, whole_vectors: bool,
        widened: bool = False, keys: bool = False,
    ) -> None:  # fmt: skip
        self._layout, self._scratch, self._keys = layout, scratch, keys
        self._whole_vectors, self._widened = whole_vectors, widened
        self.rows = Packed(ROWS, self._reached(array))

    def _reached(self, array: Array) -> Rows:
        """Decide how kernels reach an array, and return where its rows are."""
        layout, scratch = self._layout, self._scratch
        self._ndim = array.ndim
        self._form: Any = (array.shape, array.strides)
        in_place = layout.readable(array, self._whole_vectors)
        if self._widened and kind_of(array.dtype) != NATIVE:
            in_place |= layout.has_whole_rows(array)
        self._copy: Array | None = None
        seen = array
        if not in_place:
            # Rows that are repeated by strides of 0 are copied once.
            self._once = tuple(slice(1 if stride == 0 else None) for stride in array.strides[:-1])
            self._width = array.shape[-1]
            columns = round_up(self._width, layout.lanes)
            distinct = array[self._once]
            stays = self._widened and kind_of(array.dtype) != NATIVE
            number = array.dtype if stays else layout.number
            self._copy = scratch.empty((*distinct.shape[:-1], columns), number)
            self._copy[..., self._width :] = 0
            seen = np.broadcast_to(self._copy, (*array.shape[:-1], columns))
        return layout.rows(seen, self._keys)

    def reach(self, array: Array) -> None:
        """Let kernels read an array that may have other lengths or strides."""
        if (array.shape, array.strides) != self._form:
            self.rows.replace(self._reached(array))

    def forget(self) -> None:
        """Let the next `reach` look at its array, whatever that is."""
        self._form = None

    @property
    def is_in_place(self) -> bool:
        """Whether kernels read the array itself."""
        return self._copy is None

    def load(self, array: Array) -> None:
        """Let kernels read another array like the first one."""
        if self._copy is None:
            self.rows.move_to(address(array))
            return
        missing = self._ndim - array.ndim  # a matrix is one head
        whole = array.reshape((1,) * missing + array.shape) if missing else array
        store(whole[self._once], self._copy[..., : self._width])


class Result:
    """An array that kernels write; or, if they cannot, one that is copied to it, rounded.

    Parameters
    ----------
    layout, array, scratch, whole_vectors, keys
        As in `Operand`.
    narrow : int
        The address of the kernel with which others write rows of 16 bits themselves; else 0.

    Attributes
    ----------
    rows : Packed
        Where its rows lie, as kernels take it.
    """

    def __init__(
        self, layout: Layout, array: Array, scratch: Scratch, whole_vectors: bool = False,
        narrow: int = 0, keys: bool = False,
    ) -> None:  # fmt: skip
        in_place = layout.readable(array, whole_vectors)
        if narrow and kind_of(array.dtype) != NATIVE:
            in_place |= layout.has_whole_rows(array)
        self._columns = array.shape[-1]
        self._made: Array | None = None
        if not in_place:
            columns = round_up(self._columns, layout.lanes) if whole_vectors else self._columns
            self._made = scratch.empty((*array.shape[:-1], columns), layout.number)
        self.rows = Packed(ROWS, layout.rows(array if self._made is None else self._made, keys))

    @property
    def is_in_place(self) -> bool:
        """Whether kernels write the array itself."""
        return self._made is None

    def place(self, array: Array) -> None:
        """Let kernels write another array like the first one."""
        if self._made is None:
            self.rows.move_to(address(array))

    def finish(self, array: Array) -> None:
        """Write to the array what kernels have computed."""
        if self._made is not None:
            store(self._made[..., : self._columns], array)
