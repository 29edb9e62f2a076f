"""What moves between HBM and the chip, and the checks that all formulas share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays.dtypes import DTYPES
from ...errors import ArgumentError

# Arrays that are kept in the accumulator's type, whatever the type of q, k and v.
ACCUMULATED = {
    "global_max",
    "all_weights",
    "l",
    "m",
    "lse",
    "lse_parts",
    "o_parts",
    "chunk_values",
    "chunk_weights",
    "chunk_max",
}
FLAGS = {"padding", "layout"}  # booleans
STATE_BYTES = 8  # a generator's state, "rng", is a 64-bit seed


@dataclass(frozen=True)
class Traffic:
    """Elements that an algorithm moves for one head.

    Attributes
    ----------
    reads, writes : mapping of str to int
        Elements read from and written to HBM, by array, under the papers' names.
    peak : int
        The most elements that are on chip at once.
    """

    reads: Mapping[str, int]
    writes: Mapping[str, int]
    peak: int

    @property
    def total(self) -> int:
        """Elements read and written: the papers' HBM accesses."""
        return sum(self.reads.values()) + sum(self.writes.values())

    def bytes(self, dtype: str) -> int:
        """Return the bytes read and written.

        Parameters
        ----------
        dtype : str
            The dtype of q, k, v and matrices like them. Log-sum-exps, row sums, row maxima and
            partial outputs are float32, or float64 if the dtype is float64.

        Returns
        -------
        int
            Bytes of one head.
        """
        size = itemsize(dtype)
        sizes = dict.fromkeys(ACCUMULATED, max(size, 4)) | dict.fromkeys(FLAGS, 1)
        sizes["rng"] = STATE_BYTES
        moved = [*self.reads.items(), *self.writes.items()]
        return sum(sizes.get(name, size) * count for name, count in moved)

    def times(self, count: int) -> Traffic:
        """Return the traffic of several heads, one after the other.

        Parameters
        ----------
        count : int
            How many.

        Returns
        -------
        Traffic
            The traffic, with the same peak.
        """
        return made(
            self.peak,
            {name: count * n for name, n in self.reads.items()},
            {name: count * n for name, n in self.writes.items()},
        )


def itemsize(dtype: str) -> int:
    """Return the bytes of an element; raise for a dtype that attention does not know."""
    name = str(dtype)
    if name not in DTYPES:
        raise ArgumentError(f"dtype: got {dtype!r}; expected one of {', '.join(DTYPES)}")
    return DTYPES[name].itemsize


def made(peak: int, reads: Mapping[str, int], writes: Mapping[str, int]) -> Traffic:
    """Return a `Traffic` without the arrays that nothing moves."""
    return Traffic(
        {name: n for name, n in reads.items() if n},
        {name: n for name, n in writes.items() if n},
        peak,
    )


def check(**sizes: Any) -> None:
    """Raise unless every size is a positive integer."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ArgumentError(f"{name}: got {value!r}; expected a positive integer")


def given(value: int | None, default: int) -> int:
    """Return a size, or what stands for one that is not given."""
    return default if value is None else value


def parts(n: int, size: int) -> int:
    """Return the number of blocks, ceil(n / size)."""
    return -(-n // size)
