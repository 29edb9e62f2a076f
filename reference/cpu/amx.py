"""AMX: what it takes to use the matrix unit of a CPU.

A tile is 16 rows of 64 bytes. A process asks its operating system once for the state that tiles
add to every thread.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

from . import vectors
from .target import features

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux on x86-64

# Which unit multiplies tiles: that of the CPU, the vector units in the same order of operations
# (for tests on any machine), or none.
NATIVE, EMULATED, NONE = "native", "emulated", "none"
VARIABLE = "CUPYFLASH_AMX"
_LEAST_VECTOR = 32  # bytes: panels of queries are as wide as tiles are


@functools.cache
def is_available() -> bool:
    """Return whether this process may use tiles of bfloat16; asks for permission."""
    found = features()
    if sys.platform != "linux" or not (found.get("amx-tile") and found.get("amx-bf16")):
        return False
    if not found.get("avx512f"):
        return False
    try:
        syscall = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return False
    syscall.restype = ctypes.c_long
    asked = syscall(*map(ctypes.c_long, (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)))
    return bool(asked == 0)


def tile_unit() -> str:
    """Return which unit multiplies tiles: ``CUPYFLASH_AMX`` if set, else AMX or none."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen in ("", NATIVE):
        if is_available():
            return NATIVE
        if not chosen:
            return NONE
        raise ValueError(
            f"{VARIABLE} is {NATIVE!r}, but this CPU has no AMX for bfloat16, or its operating "
            "system does not let this process use it. Unset this environment variable."
        )
    if chosen not in (EMULATED, NONE):
        raise ValueError(
            f"{VARIABLE} is {chosen!r}; expected {NATIVE!r}, {EMULATED!r} or {NONE!r}. Correct "
            "this environment variable, or unset it for what the CPU has."
        )
    if chosen == EMULATED and vectors.HOST.vector_bytes < _LEAST_VECTOR:
        raise ValueError(
            f"{VARIABLE} is {EMULATED!r}, whose tiles need vectors of {_LEAST_VECTOR} bytes or "
            f"more; this CPU has {vectors.HOST.vector_bytes}. Unset this environment variable."
        )
    return chosen
