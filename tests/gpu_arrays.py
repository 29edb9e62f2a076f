"""The memory of a GPU for tests, which are skipped where there is none."""

from __future__ import annotations

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
    return CuPyMemory()
