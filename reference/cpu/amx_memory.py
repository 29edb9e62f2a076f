"""Sizes of tiles, and of what is multiplied by them."""

from __future__ import annotations

SIDE, DEPTH, ROW = 16, 32, 64  # rows and columns of C; numbers of a contraction; bytes of a row
TILE = SIDE * ROW  # bytes
PANEL = 32  # queries whose scores lie side by side, where nothing wants a whole block's
PARTS = 2  # of a weight, and of a gradient of a score; the last one is rounded
# Steps of a contraction over keys that are done at once: with the scores, weights and values of so
# many, all that is read lies in the L1 cache.
CHUNK = 3


def whole(count: int, step: int) -> int:
    """Return `count` rounded up to a multiple of `step`."""
    return (count + step - 1) // step * step
