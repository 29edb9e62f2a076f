"""Rows of results, written as they are stored."""

from __future__ import annotations

import numpy as np

from .jit import helper
from .memory import load, store
from .narrow import write_narrow
from .widen import NATIVE

_FLOAT = 4  # bytes of a float32


@helper
def store_rows(narrow, source, count, width, columns, rows, place):
    """Write rows of `width` numbers, or the first `columns`, to where `rows` has them."""
    if rows.kind != NATIVE:
        size = rows.row * rows.itemsize
        write_narrow(narrow, (source, width * _FLOAT, count, columns, place, size))
    else:
        like = np.float32(0)
        for j in range(count):
            for d in range(columns):
                value = load(source + (j * width + d) * _FLOAT, like)
                store(place + (j * rows.row + d) * _FLOAT, value)
