"""Formats of other libraries, converted bit by bit: angles, columns, codes, and pages of a cache.

Functions take and return NumPy arrays; pages may be arrays on a GPU. What a format here cannot hold
is an error that names the convention.
"""

from __future__ import annotations

from .angles import interleave, rotary
from .blocks import gguf, gguf_numbers, int4
from .eight_bits import float8, fnuz
from .layouts import pages
from .quantised import torchao

__all__ = [
    "float8",
    "fnuz",
    "gguf",
    "gguf_numbers",
    "int4",
    "interleave",
    "pages",
    "rotary",
    "torchao",
]
