"""Arrays of a CuPy that is nowhere, and what kernels were told of them."""

from __future__ import annotations

import numpy as np


def draw(cupy, shape=(2, 4, 40, 16), dtype=np.float32, count=3):
    return [cupy.asarray(np.zeros(shape, dtype)) for _ in range(count)]


def fields(launch, layout):
    """Return what a kernel that is no part of attention was told, by its fields."""
    return np.frombuffer(launch.words.tobytes()[: layout.size], layout.dtype)[0]
