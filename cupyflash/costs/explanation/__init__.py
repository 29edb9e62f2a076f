"""What a call would run, worked out from its sizes: kernels, tiles, memory, traffic, time."""

from .cached import explain_cached
from .dense import explain
from .results import (
    Bytes,
    Explanation,
    KernelUse,
    Occupancy,
    Registers,
    Standard,
)

__all__ = [
    "Bytes",
    "Explanation",
    "KernelUse",
    "Occupancy",
    "Registers",
    "Standard",
    "explain",
    "explain_cached",
]
