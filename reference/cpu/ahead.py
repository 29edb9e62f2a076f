"""What a thread loads ahead while it multiplies: rows of the next head, a few with every block.

A core waits for about a dozen lines of memory at once. Whoever asks for all rows of a head together
waits for most of them; those that are asked for with a block of a product arrive meanwhile.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .jit import helper
from .memory import LINE, ask_for, load, row_address, store

BYTES = 16 * LINE  # that a block of a product asks for
_MOST, _BEGIN, _EACH = 32, 2, 4
_WORD, _ZERO = 8, np.int64(0)


def nothing() -> np.ndarray[Any, Any]:
    """Return the list of a thread, which is empty.

    Its first words are how many pieces were loaded and how many there are. A piece is an address,
    the bytes from a row to the next one, how many rows are left, and the bytes of a row.
    """
    return np.zeros(_BEGIN + _EACH * _MOST, np.int64)


@helper
def forget(ahead):
    """Make a list empty."""
    ahead[0] = 0
    ahead[1] = 0


@helper
def load_later(ahead, rows, b, h, i, count, columns):
    """Add rows of a head to a list, if there is room."""
    if ahead[0] == ahead[1]:
        forget(ahead)
    n = ahead[1]
    if n < _MOST and count > 0:
        at, size = _BEGIN + _EACH * n, rows.itemsize
        ahead[at] = row_address(rows, b, h, i)
        ahead[at + 1] = rows.row * size
        ahead[at + 2] = count
        ahead[at + 3] = columns * size
        ahead[1] = n + 1


@helper
def load_some(ahead):
    """Begin to load the next rows of the list at an address."""
    n = load(ahead, _ZERO)
    if n < load(ahead + _WORD, _ZERO):
        piece = ahead + (_BEGIN + _EACH * n) * _WORD
        place, step = load(piece, _ZERO), load(piece + _WORD, _ZERO)
        left, size = load(piece + 2 * _WORD, _ZERO), load(piece + 3 * _WORD, _ZERO)
        count = min(max(1, BYTES // max(size, 1)), left)
        ask_for(place, step, count, size)
        store(piece, place + count * step)
        store(piece + 2 * _WORD, left - count)
        if left == count:
            store(ahead, n + 1)
