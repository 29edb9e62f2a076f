"""Adding a tile's product to a block of results: the second product of attention, and gradients."""

from __future__ import annotations

from numba import types

from .arguments import FUNCTION_POINTERS
from .jit import INT, caller, kernel, takes, vector
from .memory import load, store
from .microkernel import multiply
from .packing import pair_lanes

takes_accumulate = takes(lambda number: (number, *(INT,) * 15, vector(types.boolean)))


@takes_accumulate
@kernel
def accumulate_product(
    one, product, tile, across, along, ni, nj, pairs, pair, columns, itemsize, target, target_row,
    target_pair, careful, ahead, seen,
):  # fmt: skip
    """target[i] += sum over j < nj of tile[i * across + j * along] * row j, for i < ni.

    `product` is the address of a kernel; `tile`, `pairs` and `target` are addresses. Rows are at
    `pairs` as `load_pairs` leaves them, `pair` elements apart. Rows of the target begin
    `target_row` elements apart, and its pairs of columns `target_pair`, if this is not 0. With
    `careful`, masked pairs are left out instead of being multiplied by 0, because a NaN in their
    row must not spread. `ahead` is that of `product`.
    """
    width = pair_lanes(itemsize)
    if not careful:
        whole_tile = (
            one, tile, across, along, pairs, width, pair, target, target_row, target_pair, ni,
            columns, nj, itemsize, 1, 0, ahead,
        )  # fmt: skip
        multiply(product, whole_tile)
        return
    for i in range(ni):
        for j in range(nj):
            cell = i * across + j * along
            if seen[cell]:
                row = pairs + j * width * itemsize
                weight, result = tile + cell * itemsize, target + i * target_row * itemsize
                one_pair = (
                    one, weight, 1, 1, row, width, pair, result, target_row, target_pair, 1,
                    columns, 1, itemsize, 1, 0, ahead,
                )  # fmt: skip
                multiply(product, one_pair)


accumulate = caller(accumulate_product)


takes_columns = takes(
    lambda number: (FUNCTION_POINTERS, number, *(INT,) * 11, vector(types.boolean))
)


@takes_columns
@kernel
def accumulate_columns(
    pointers, one, tile, lanes, ni, nj, rows, row, depth, itemsize, target, careful, ahead, seen,
):  # fmt: skip
    """target[d, i] += sum over j < nj of rows[j, d] * tile[j, i], for i < ni and d < depth.

    Rows of the tile and of the target have `lanes` elements. The other rows are read where they
    lie, `row` elements apart. With `careful`, masked pairs are left out. `ahead` is that of
    `product`.
    """
    if not careful:
        whole = (
            one, rows, 1, row, tile, lanes, 0, target, lanes, 0, depth, lanes, nj, itemsize, 1, 0,
            ahead,
        )  # fmt: skip
        multiply(pointers.product, whole)
        return
    for j in range(nj):
        for d in range(depth):
            element = load(rows + (j * row + d) * itemsize, one)
            for i in range(ni):
                if seen[j * lanes + i]:
                    place = target + (d * lanes + i) * itemsize
                    weight = load(tile + (j * lanes + i) * itemsize, one)
                    store(place, load(place, one) + weight * element)


add_columns = caller(accumulate_columns)
