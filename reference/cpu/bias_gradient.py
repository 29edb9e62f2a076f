"""The gradient of a bias, summed over the axes along which it was broadcast.

`backward_dkdv` adds every tile of dS to sums in memory. Heads of keys that share an element of the
bias are divided into parts, a number that does not depend on the threads: each part has sums of its
own, to which one thread adds, and `sum_bias_parts` adds them up in order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import intrinsic

from .jit import INT, INTS, helper, kernel, takes, vector
from .memory import first_address
from .microkernel import VECTOR_BYTES
from .packing import transpose_square
from .structs import Struct
from .tile import FIRST, LAST
from .vectors import Emitter, emit_loop


class BiasSums(NamedTuple):
    """Sums of dS, as (slot, vector of queries, key, lane).

    An axis along which the bias was broadcast is short: all vectors of queries add to one, and all
    keys of a block. The vectors of a block of queries do not reach into the next block.
    """

    sums: np.ndarray[Any, Any]
    places: np.ndarray[Any, Any]  # where the slot of b * heads + h begins, int64; none: no sums
    vectors_of_block: int  # of queries
    query_step: int  # elements from a vector of queries to the next one, or 0
    block_step: int  # elements from a block of keys to the next one
    key_step: int  # elements from a key to the next one, or 0


def bias_sums_of(number: types.Type) -> Struct:
    """Return the type of `BiasSums`, given the accumulator's."""
    return Struct(BiasSums, (vector(number), INTS, INT, INT, INT, INT))


def no_bias_sums(number: np.dtype[Any]) -> BiasSums:
    """Return what stands for no gradient of a bias."""
    return BiasSums(np.empty(0, number), np.empty(0, np.int64), 0, 0, 0, 0)


@intrinsic
def _add_vectors(typingctx, source, row_size, keys, target, step, count, like):
    """Add a vector of every key's row to a target, `step` bytes apart; only its first lanes."""

    def codegen(context, builder, sig, args):
        source, row_size, keys, target, step, count, _ = args
        emit = Emitter(builder, context.get_value_type(sig.args[6]))
        mask = emit.first_lanes(count)

        def add(j, values):
            value = emit.load(builder.add(source, builder.mul(row_size, j)))
            place = builder.add(target, builder.mul(step, j))
            value = builder.select(mask, value, emit.zero)
            emit.store(builder.fadd(emit.load(place), value), place)
            return []

        emit_loop(builder, keys, [], add)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, like), codegen


@helper
def add_to_bias(bias, shape, scratch, b, h, i, ni, j0, lanes):
    """Add the gradient of a tile's scores, `scratch.ds`, to the sums of its head."""
    # 6 accumulate dbias
    ds, begin = scratch.ds, scratch.edges[FIRST]
    itemsize, keys, zero = ds.itemsize, scratch.edges[LAST] - begin, ds.dtype.type(0)
    width = VECTOR_BYTES // itemsize
    first = i // shape.block_q * bias.vectors_of_block + i % shape.block_q // width
    place = bias.places[b * shape.heads + h] + first * bias.query_step
    place += j0 // shape.block_kv * bias.block_step + begin * bias.key_step
    target, source = first_address(bias.sums), first_address(ds) + begin * lanes * itemsize
    for x in range(0, ni, width):
        _add_vectors(
            source + x * itemsize, lanes * itemsize, keys, target + place * itemsize,
            bias.key_step * itemsize, ni - x, zero,
        )  # fmt: skip
        place += bias.query_step


@takes(
    lambda number: (
        INT, INT, INT, INTS, INTS, INT, bias_sums_of(number), types.Array(number, 4, "C")
    )
)  # fmt: skip
@kernel
def sum_bias_parts(first, last, columns, starts, slots, block_q, bias, dbias):
    """Add up the parts of some vectors of queries, and write them to `dbias`.

    Item n is vector ``n % columns`` of head ``n // columns`` of those of all entries of the bias.
    The parts of head m begin at ``slots[starts[m] : starts[m + 1]]``, in order. `dbias` has axes
    (entries, heads or 1, queries or 1, keys or 1).
    """
    heads, queries, keys = dbias.shape[1:]
    sums, zero, itemsize = bias.sums, dbias.dtype.type(0), dbias.itemsize
    width = VECTOR_BYTES // itemsize
    one_query, one_key = bias.query_step == 0, bias.key_step == 0
    for item in range(first, last):
        head, column = item // columns, item % columns
        target = dbias[head // heads, head % heads]
        size = sums.shape[0] // max(slots.shape[0], 1) // columns
        begin = slots[starts[head]] + column * size
        total = sums[begin : begin + size]
        for part in range(starts[head] + 1, starts[head + 1]):
            other = sums[slots[part] + column * size : slots[part] + (column + 1) * size]
            for n in range(size):
                total[n] += other[n]
        if one_key:
            for n in range(width, size):
                total[n % width] += total[n]
        within = column % bias.vectors_of_block * width
        i0 = column // bias.vectors_of_block * block_q + within
        count = min(width, block_q - within, queries - i0)
        for j in range(0, keys, width):
            if one_query:
                for n in range(j, min(j + width, keys)):
                    of_key = zero
                    for lane in range(width):
                        of_key += total[n * width + lane]
                    target[0, n] = of_key
            elif count == width and j + width <= keys:
                source = first_address(total) + j * VECTOR_BYTES
                place = first_address(target) + (i0 * keys + j) * itemsize
                transpose_square(source, VECTOR_BYTES, place, keys * itemsize, zero)
            else:
                for n in range(j, min(j + width, keys)):
                    for lane in range(count):
                        target[i0 + lane, n] = total[n * width + lane]
