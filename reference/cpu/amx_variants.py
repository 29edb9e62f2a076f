"""Kernels by tiles, for every unit that multiplies them and every type of numbers."""

from __future__ import annotations

from collections.abc import Callable

from .amx import EMULATED, NATIVE
from .amx_code import EmulatedUnit, MatrixUnit
from .amx_pack import PACKINGS, Packing
from .jit import Kernel
from .widen import BFLOAT16, FLOAT16

Variant = tuple[str, int]  # the unit, and how elements are stored
Maker = Callable[[str, type[MatrixUnit], Packing], Kernel]

_UNITS = {NATIVE: ("amx", MatrixUnit), EMULATED: ("emulated", EmulatedUnit)}
_SUFFIXES = {BFLOAT16: "", FLOAT16: "_float16"}


def variants(make: Maker) -> dict[Variant, Kernel]:
    """Make a kernel for every unit and type, given its name, the unit and the packing."""
    return {
        (unit, kind): make(name + suffix, emitter, PACKINGS[kind])
        for unit, (name, emitter) in _UNITS.items()
        for kind, suffix in _SUFFIXES.items()
    }
