"""The memory of a GPU for tests, which are skipped where there is none."""

from __future__ import annotations

import os
from typing import Any

import pytest

from cupyflash.testing.copies import Copies, CuPyMemory

__all__ = ["Copies", "memory"]


def memory() -> Any:
    """Return the memory of a GPU, or skip the test that asks for it."""
    try:
        import cupy
    except ImportError:
        pytest.skip("CuPy is not installed")
    if not cupy.is_available():
        pytest.skip("CuPy finds no usable NVIDIA GPU")
    if os.environ.get("CUPYFLASH_TEST_NO_POOL"):
        # Every array is an allocation of its own, so that a sanitizer sees where it ends.
        cupy.cuda.set_allocator(None)
    return CuPyMemory()
