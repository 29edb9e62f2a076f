"""The arguments of the kernel for few queries, in one structure: a call has one address to pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from .arguments import CHANGES, Changes, Shape, shape_of
from .cache import CACHE, K_PLACE, V_PLACE, Cache
from .jit import INT, INTS, TABLE, vector
from .memory import ROWS, Rows
from .structs import WORD, Packed, Struct, form_for

Array = np.ndarray[Any, Any]


class DecodeWork(NamedTuple):
    """A call over a cache; `tasks`, `parts`, `units`, `members` and `top` are of its `Schedule`."""

    most_leaves: int  # after so many for each of its items, a call of the kernel returns
    counters: Array  # the units that were taken, and for each task its finished parts
    tasks: Array
    parts: Array
    units: Array
    members: Array
    top: int
    shape: Shape
    changes: Changes
    merge: int  # addresses of kernels
    multiply_keys: int
    multiply_values: int
    cache: Cache
    q: Rows
    sink: Array  # a logit for each head, of the accumulator's type
    kept: Array  # a place for the result of each part
    out: Rows
    lse: Rows
    visited: Array  # for each unit, the leaves that were not EMPTY for each of its tasks


class PackedWork:
    """A call as the kernel takes it, for any arrays like those that `work` describes."""

    def __init__(self, work: DecodeWork, number: np.dtype[Any]) -> None:
        kind = form_for(decode_work_of, number)
        self.packed = Packed(kind, work)
        self._q, self._cache, self._out, self._lse = (
            kind.offsets[name] // WORD for name in ("q", "cache", "out", "lse")
        )

    def move_to(self, q: Packed, cache: Packed, out: Packed, lse: Packed) -> None:
        """Set where the arrays are: as these say, which have been moved there."""
        words, begin = self.packed.words, self._cache
        words[self._q], words[self._out], words[self._lse] = q.words[0], out.words[0], lse.words[0]
        words[begin : begin + CACHE.word_count] = cache.words[:]

    @property
    def places(self) -> list[int]:
        """The addresses of the words that hold those of q, k, v and out."""
        words = self._q, self._cache + K_PLACE, self._cache + V_PLACE, self._out
        return [self.packed.address + WORD * word for word in words]


def decode_work_of(number: types.Type) -> Struct:
    """Return the type of `DecodeWork`, given the accumulator's."""
    members = {
        "counters": INTS, "tasks": TABLE, "parts": INTS, "units": TABLE, "members": TABLE,
        "shape": shape_of(number), "changes": CHANGES, "cache": CACHE, "q": ROWS,
        "sink": vector(number), "kept": vector(number), "out": ROWS, "lse": ROWS, "visited": INTS,
    }  # fmt: skip
    return Struct(DecodeWork, tuple(members.get(name, INT) for name in DecodeWork._fields))
