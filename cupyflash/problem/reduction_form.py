"""What a reduction takes of the pairs of a call, as kernels are told."""

from __future__ import annotations

from typing import NamedTuple


class Form(NamedTuple):
    """What is taken of values, and over which pairs: see `reference.cpu.reduce_call.Form`."""

    of: str
    along: str
    by: str
    raw: bool = False
    most: int = 1
    rows: tuple[int, int] = (0, 0)
    block: tuple[int, int] = (1, 1)
