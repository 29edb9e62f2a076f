"""Adding a tile's product to a block of results: the second product of attention, and gradients."""

from __future__ import annotations

from .jit import helper
from .memory import row_address
from .microkernel import multiply_add


@helper
def padded(count, lanes):
    """Return `count` rounded up to whole vectors."""
    return (count + lanes - 1) // lanes * lanes


@helper
def accumulate(
    one, tile, across, along, ni, nj, rows, b, h, first, columns, itemsize, acc, careful, seen
):
    """acc[i] += sum over j < nj of tile[i * across + j * along] * row (first + j), for i < ni.

    With `careful`, pairs that take no part are left out instead of being multiplied by 0: a NaN in
    their row must not spread.
    """
    place, target = tile.ctypes.data, acc.ctypes.data
    if not careful:
        row = row_address(rows, b, h, first, itemsize)
        multiply_add(
            one, place, across, along, row, rows.row, target, columns, ni, columns, nj, itemsize
        )
        return
    for i in range(ni):
        for j in range(nj):
            cell = i * across + j * along
            if seen[cell]:
                row = row_address(rows, b, h, first + j, itemsize)
                weight, result = place + cell * itemsize, target + i * columns * itemsize
                multiply_add(
                    one, weight, 1, 1, row, rows.row, result, columns, 1, columns, 1, itemsize
                )
