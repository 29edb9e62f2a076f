"""Arrays of a CuPy that is nowhere, and what kernels were told of them."""

from __future__ import annotations

import numpy as np

from cupyflash.arrays import device_arrays
from cupyflash.problem import cached, validate

# Words of launches from this number on are addresses: where Python lies at fixed ones, its memory
# begins behind its own types, and elsewhere much higher.
LEAST_ADDRESS = min(2**32, id(object))


def draw(cupy, shape=(2, 4, 40, 16), dtype=np.float32, count=3):
    return [cupy.asarray(np.zeros(shape, dtype)) for _ in range(count)]


def fields(launch, layout):
    """Return what a kernel that is no part of attention was told, by its fields."""
    return np.frombuffer(launch.words.tobytes()[: layout.size], layout.dtype)[0]


def told(launches):
    """Return all words that kernels were told."""
    return {int(word) for launch in launches for word in launch.words}


def unchecked(monkeypatch, kind="dense"):
    """Make every check, and every array that is made of a tensor, an error."""

    def refuse(*_, **__):
        raise AssertionError("the call was checked, or made arrays, again")

    monkeypatch.setattr(cached if kind == "cached" else validate, "call", refuse)
    monkeypatch.setattr(device_arrays, "borrowed", refuse)
