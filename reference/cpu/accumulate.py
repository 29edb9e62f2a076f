"""Adding a tile's product to a block of results: the second product of attention, and gradients."""

from __future__ import annotations

from numba import types

from .arguments import FUNCTION_POINTERS
from .jit import INT, caller, kernel, takes, vector
from .memory import clear, load, store
from .microkernel import multiply
from .packing import add_transposed, pair_lanes

takes_accumulate = takes(lambda number: (number, *(INT,) * 15, vector(types.boolean), INT))


@takes_accumulate
@kernel
def accumulate_product(
    one, product, tile, across, along, ni, nj, ahead, pairs, pair, columns, itemsize, target,
    target_row, target_pair, careful, seen, memory,
):  # fmt: skip
    """target[i] += sum over j < nj of tile[i * across + j * along] * row j, for i < ni.

    `product` is the address of a kernel; `tile`, `pairs` and `target` are addresses. Rows are at
    `pairs` as `load_pairs` leaves them, `pair` elements apart. Rows of the target begin
    `target_row` elements apart, and its pairs of columns `target_pair`, if this is not 0. With
    `careful`, masked pairs are left out instead of being multiplied by 0, because a NaN in their
    row must not spread. Only sums by tiles need `memory`, and `ahead`: how many rows before the
    first one are taken to be 0, so that sums do not depend on where a tile's rows begin.
    """
    width = pair_lanes(itemsize)
    if not careful:
        whole_tile = (
            one, tile, across, along, pairs, width, pair, target, target_row, target_pair, ni,
            columns, nj, itemsize, 1, 0, 0, 0,
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
                    columns, 1, itemsize, 1, 0, 0, 0,
                )  # fmt: skip
                multiply(product, one_pair)


accumulate = caller(accumulate_product)


takes_columns = takes(
    lambda number: (FUNCTION_POINTERS, number, *(INT,) * 14, vector(types.boolean), INT, INT)
)


@takes_columns
@kernel
def accumulate_columns(
    pointers, one, tile, lanes, ni, nj, ahead, rows, row, pairs, pair, depth, columns, itemsize,
    target, careful, seen, spare, memory,
):  # fmt: skip
    """target[d, i] += sum over j < nj of rows[j, d] * tile[j, i], for i < ni and d < depth.

    Rows of the tile and of the target have `lanes` elements. The other rows are read where they
    lie, `row` elements apart. With `careful`, masked pairs are left out. What is not read here is
    for `columns_by_tiles`.
    """
    if not careful:
        whole = (
            one, rows, 1, row, tile, lanes, 0, target, lanes, 0, depth, lanes, nj, itemsize, 1, 0,
            0, 0,
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


@takes_columns
@kernel
def columns_by_tiles(
    pointers, one, tile, lanes, ni, nj, ahead, rows, row, pairs, pair, depth, columns, itemsize,
    target, careful, seen, spare, memory,
):  # fmt: skip
    """Do what `accumulate_columns` does, where tiles of a unit add up rows of results.

    They take the rows from `pairs`, where `load_pairs` has left them, `pair` elements apart, and
    need `spare`, memory for `ni` rows of so many `columns`.
    """
    clear(spare, ni * columns * itemsize)
    weighted = (
        one, pointers.product, tile, 1, lanes, ni, nj, ahead, pairs, pair, columns, itemsize, spare,
        columns, 0, careful, seen, memory,
    )  # fmt: skip
    accumulate(pointers.accumulate, weighted)
    add_transposed(spare, columns * itemsize, ni, lanes, depth, itemsize, target, one - one)


add_columns = caller(accumulate_columns)
