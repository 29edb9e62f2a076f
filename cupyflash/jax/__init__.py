"""Attention on JAX arrays on the CPU, under jit, grad, jvp and vmap.

XLA calls the kernels for NumPy arrays by its typed FFI, and they write to its memory. Arrays on a
GPU are an error, because CuPy can take them by DLPack, outside jit, without a copy.
"""

from __future__ import annotations

from .cached import attention_cached
from .functions import attention, attention_varlen
from .rows import Appended, append, rope

__all__ = ["Appended", "append", "attention", "attention_cached", "attention_varlen", "rope"]


def __dir__() -> list[str]:
    return sorted(__all__)
