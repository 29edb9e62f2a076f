"""Adding a tile's product to a block of results: the second product of attention, and gradients."""

from __future__ import annotations

from .jit import helper
from .microkernel import multiply
from .packing import pair_lanes


@helper
def accumulate(
    one, pointers, tile, across, along, ni, nj, pairs, pair, columns, itemsize, target, target_row,
    target_pair, careful, seen,
):  # fmt: skip
    """target[i] += sum over j < nj of tile[i * across + j * along] * row j, for i < ni.

    `tile`, `pairs` and `target` are addresses. Rows are at `pairs` as `load_pairs` leaves them,
    `pair` elements apart. Rows of the target begin `target_row` elements apart, and its pairs of
    columns `target_pair`, if this is not 0. With `careful`, masked pairs are left out instead of
    being multiplied by 0, because a NaN in their row must not spread.
    """
    width = pair_lanes(itemsize)
    if not careful:
        whole_tile = (
            one, tile, across, along, pairs, width, pair, target, target_row, target_pair, ni,
            columns, nj, itemsize, 1, 0,
        )  # fmt: skip
        multiply(pointers.product, whole_tile)
        return
    for i in range(ni):
        for j in range(nj):
            cell = i * across + j * along
            if seen[cell]:
                row = pairs + j * width * itemsize
                weight, result = tile + cell * itemsize, target + i * target_row * itemsize
                one_pair = (
                    one, weight, 1, 1, row, width, pair, result, target_row, target_pair, 1,
                    columns, 1, itemsize, 1, 0,
                )  # fmt: skip
                multiply(pointers.product, one_pair)
