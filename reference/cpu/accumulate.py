"""Adding a tile's product to a block of results: the second product of attention, and gradients."""

from __future__ import annotations

from .jit import helper
from .memory import first_address, row_address
from .microkernel import multiply


@helper
def accumulate(
    pointers, tile, across, along, ni, nj, rows, b, h, first, columns, itemsize, acc, careful, seen
):
    """acc[i] += sum over j < nj of tile[i * across + j * along] * row (first + j), for i < ni.

    With `careful`, masked pairs are left out instead of being multiplied by 0, because a NaN in
    their row must not spread.
    """
    one = acc.dtype.type(1)
    place, target = first_address(tile), first_address(acc)
    if not careful:
        row = row_address(rows, b, h, first, itemsize)
        whole_tile = (
            one, place, across, along, row, rows.row, target, columns, ni, columns, nj, itemsize, 1
        )  # fmt: skip
        multiply(pointers.product, whole_tile)
        return
    for i in range(ni):
        for j in range(nj):
            cell = i * across + j * along
            if seen[cell]:
                row = row_address(rows, b, h, first + j, itemsize)
                weight, result = place + cell * itemsize, target + i * columns * itemsize
                one_pair = (
                    one, weight, 1, 1, row, rows.row, result, columns, 1, columns, 1, itemsize, 1
                )  # fmt: skip
                multiply(pointers.product, one_pair)
