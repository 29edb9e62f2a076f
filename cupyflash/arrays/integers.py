"""Integers as users pass them: of Python, of NumPy, or arrays of any library that hold one."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np


def integer(value: Any) -> int | None:
    """Return an integer of any kind as one of Python, and None for anything else.

    A Boolean is none, and neither is an array with axes.
    """
    if type(value) is int:
        return value
    if getattr(value, "ndim", 0) or not hasattr(value, "__index__"):
        return None
    if isinstance(value, (bool, np.bool_)) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
