"""How much memory the operands of products by tiles need."""

from __future__ import annotations

from .arguments import TileSizes

SIDE, DEPTH, ROW = 16, 32, 64  # rows and columns of C; numbers of a contraction; bytes of a row
TILE = SIDE * ROW  # bytes
PANEL = 64  # queries whose scores lie side by side, where nothing wants a whole block's
PARTS = 3  # of a float32, at most
FLAG = 8  # bytes that say whether a row or some columns are special
# Before the operands: a row of zeros, what is left of a row, maxima that nobody wants, four tiles
# of C.
ZEROS, REST, UNUSED, RESULT, OPERANDS = 0, ROW, 3 * ROW, 4 * ROW, 4 * ROW + 4 * TILE


def whole(count: int, step: int) -> int:
    """Return `count` rounded up to a multiple of `step`."""
    return (count + step - 1) // step * step


def size_of_packed(sizes: TileSizes, panel: int) -> int:
    """Return the float32 of memory for the products of panels and blocks of keys."""
    if not sizes.uses_tiles:
        return 0
    rows = whole(max(sizes.block_kv, panel), 2 * SIDE)
    widest = whole(max(rows, sizes.d, sizes.d_v), 2 * SIDE)
    deep = widest + DEPTH  # rows of zeros before the first one
    operands = (2 * SIDE + widest) * deep * 2 * PARTS
    flags = (rows + widest) * FLAG
    spare = 4 * max(widest * (rows + DEPTH), rows * SIDE)
    return (OPERANDS + operands + flags + spare) // 4
