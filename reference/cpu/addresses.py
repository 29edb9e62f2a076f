"""Where NumPy's arrays are in memory."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

# NumPy's C interface has an array's address behind the header that all objects have. To read it
# there takes a tenth of the time of `__array_interface__`, and a small call asks for many.
HEADER = object.__basicsize__
_SAMPLE = np.empty(1)
KNOWN = (
    sys.implementation.name == "cpython"
    and ctypes.c_size_t.from_address(id(_SAMPLE) + HEADER).value
    == _SAMPLE.__array_interface__["data"][0]
)


def address(array: np.ndarray[Any, Any]) -> int:
    """Return the address of the array's first element."""
    if KNOWN:
        return _word_at(id(array) + HEADER).value
    return int(array.__array_interface__["data"][0])


_word_at = ctypes.c_size_t.from_address
