"""Attention on JAX arrays, on the CPU and on NVIDIA GPUs, under jit, grad, jvp and vmap.

XLA calls the kernels for NumPy and for CuPy arrays by its typed FFI, and they read and write its
memory. On a GPU they run on its stream.
"""

from __future__ import annotations

from .cached import attention_cached
from .functions import attention, attention_varlen
from .rows import Appended, append, rope

__all__ = ["Appended", "append", "attention", "attention_cached", "attention_varlen", "rope"]


def __dir__() -> list[str]:
    return sorted(__all__)
