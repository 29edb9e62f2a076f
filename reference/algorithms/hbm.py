"""HBM and the chip: counts elements that are read, written and kept, by array name.

An algorithm accesses arrays in HBM only through `Memory.load` and `Memory.store`, so every access
is counted. What `load` returns stays on chip under the array's name until something else takes that
name or `release` frees it; `hold` does the same for results made on chip. Results that have a name
in an algorithm's lines count; factors and temporaries inside a line, loop variables and scalar
arguments do not.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Where = int | slice


class Memory:
    """HBM that holds arrays by name, and a chip that holds blocks of them.

    Attributes
    ----------
    reads, writes : Counter
        Elements moved from HBM to the chip and back, by array name.
    peak : int
        The most elements that were on chip at once.
    """

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        self.writes: Counter[str] = Counter()
        self.peak = 0
        self._arrays: dict[str, Array] = {}
        self._chip: dict[str, int] = {}

    @property
    def on_chip(self) -> dict[str, int]:
        """Elements on chip now, by name."""
        return dict(self._chip)

    @property
    def total(self) -> int:
        """Elements read and written."""
        return self.reads.total() + self.writes.total()

    def place(self, **arrays: Array) -> None:
        """Put inputs into HBM. They lie there before the algorithm begins: nothing is counted."""
        self._arrays.update(arrays)

    def make(self, name: str, shape: tuple[int, ...], dtype: Any, value: Any = None) -> None:
        """Make room for a result in HBM; a `value` given is written to all of it, and counted."""
        self._arrays[name] = np.empty(shape, dtype)
        if value is not None:
            self._arrays[name][...] = value
            self.writes[name] += math.prod(shape)

    def result(self, name: str) -> Array:
        """Return a whole array in HBM, when the algorithm has ended: nothing is counted."""
        return self._arrays[name]

    def load(self, name: str, *where: Where) -> Array:
        """Read a block from HBM; it is on chip under the array's name."""
        block = self._arrays[name][where].copy()
        self.reads[name] += block.size
        return self.hold(name, block)

    def store(self, name: str, block: Array, *where: Where) -> None:
        """Write a block to HBM; it stays on chip, too."""
        target = self._arrays[name][where]
        if target.shape != block.shape:
            raise ValueError(f"a block of shape {block.shape} does not fit {name}{list(where)}")
        self._arrays[name][where] = block
        self.writes[name] += block.size

    def hold(self, name: str, block: Array) -> Array:
        """Keep a block on chip, in the place of what had that name; return the block."""
        self.reserve(name, block.size)
        return block

    def reserve(self, name: str, elements: int) -> None:
        """Keep room for so many elements on chip, in the place of what had that name."""
        self._chip[name] = elements
        self.peak = max(self.peak, sum(self._chip.values()))

    def release(self, *names: str) -> None:
        """Free blocks on chip; without names, all of them."""
        for name in names or tuple(self._chip):
            self._chip.pop(name, None)
