"""Numbers that tell whether arrays have changed: sums over their words, in which places count.

A word w of eight bytes at place n adds x + low * high, where x = w xor n * PLACE, and low and high
are its halves. Sums are taken modulo 2**64, so their order is free. The products see what plain
sums do not: two elements that changed places, or an even number of changed signs.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .addresses import address
from .calls import Bound
from .jit import INTS, TABLE, helper, kernel, prepare, takes
from .memory import load
from .threads import parallel
from .vectors import HOST

Array = np.ndarray[Any, Any]

PLACE = 0x9E3779B97F4A7C15  # an odd number whose multiples are spread evenly
WORD = 8  # bytes
PIECE = 1 << 17  # bytes of a piece of work
BYTES_PER_SECOND = 1e10  # that a thread reads
SHORT = 1 << 20  # bytes that one thread sums sooner than several
NUMBER = np.dtype(np.float32)  # the kernel computes in integers alone: it is compiled once
UNROLLED = 4  # vectors of sums, so that additions do not wait for each other


@intrinsic
def sum_of_words(typingctx, place, count, first):
    """Return the sum over `count` words at an address, of which the first is at place `first`."""

    def codegen(context, builder, sig, args):
        place, count, first = args
        word = ir.IntType(64)
        lanes = HOST.vector_bytes // WORD
        vector = ir.VectorType(word, lanes)
        every = lanes * UNROLLED

        def constant(kind, value):
            return ir.Constant(kind, [value] * lanes if kind is vector else value)

        def summand(kind, at, key):
            pointer = builder.inttoptr(at, kind.as_pointer())
            x = builder.xor(builder.load(pointer, align=1), key)
            low = builder.and_(x, constant(kind, 2**32 - 1))
            return builder.add(x, builder.mul(low, builder.lshr(x, constant(kind, 32))))

        def at(index, step):
            return builder.add(place, builder.mul(index, word(step)))

        begin = builder.mul(first, word(PLACE))
        keys, sums = [], []
        for n in range(UNROLLED):
            key = ir.Constant(vector, [(n * lanes + i) * PLACE % 2**64 for i in range(lanes)])
            spread = ir.Constant(vector, ir.Undefined)
            for i in range(lanes):
                spread = builder.insert_element(spread, begin, ir.IntType(32)(i))
            keys.append(cgutils.alloca_once_value(builder, builder.add(key, spread)))
            sums.append(cgutils.alloca_once_value(builder, constant(vector, 0)))
        blocks = builder.udiv(count, word(every))
        with cgutils.for_range(builder, blocks) as loop:
            for n in range(UNROLLED):
                key = builder.load(keys[n])
                here = builder.add(at(loop.index, every * WORD), word(n * lanes * WORD))
                added = summand(vector, here, key)
                builder.store(builder.add(builder.load(sums[n]), added), sums[n])
                step = constant(vector, every * PLACE % 2**64)
                builder.store(builder.add(key, step), keys[n])
        total = cgutils.alloca_once_value(builder, word(0))
        for each in sums:
            value = builder.load(each)
            for i in range(lanes):
                lane = builder.extract_element(value, ir.IntType(32)(i))
                builder.store(builder.add(builder.load(total), lane), total)
        done = builder.mul(blocks, word(every))
        with cgutils.for_range(builder, builder.sub(count, done)) as loop:
            index = builder.add(done, loop.index)
            key = builder.add(begin, builder.mul(index, word(PLACE)))
            added = summand(word, at(index, WORD), key)
            builder.store(builder.add(builder.load(total), added), total)
        return builder.load(total)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def summand_of(typingctx, word, place):
    """Return what one word adds."""

    def codegen(context, builder, sig, args):
        bits = ir.IntType(64)
        x = builder.xor(args[0], builder.mul(args[1], bits(PLACE)))
        low = builder.and_(x, bits(2**32 - 1))
        return builder.add(x, builder.mul(low, builder.lshr(x, bits(32))))

    return types.int64(types.int64, types.int64), codegen


@helper
def sum_of_bytes(place, count, first):
    """Return the sum over bytes at an address; the last word is filled with zeros."""
    words = count // WORD
    total = sum_of_words(place, words, first)
    if count % WORD:
        word = 0
        for n in range(count % WORD):
            word |= (load(place + words * WORD + n, types.int8(0)) & 0xFF) << (8 * n)
        total += summand_of(word, first + words)
    return total


@takes(lambda number: (types.int64, types.int64, TABLE, INTS))
@kernel
def checksum(first, last, pieces, sums):
    """Sum the pieces from `first` to `last`: an address, units, their distance, bytes, a place."""
    for item in range(first, last):
        place, units, step, size = (
            pieces[item, 0],
            pieces[item, 1],
            pieces[item, 2],
            pieces[item, 3],
        )
        word, words = pieces[item, 4], (size + WORD - 1) // WORD
        total = 0
        for unit in range(units):
            total += sum_of_bytes(place + unit * step, size, word + unit * words)
        sums[item] = total


def checksums(arrays: list[Array]) -> list[int]:
    """Return a number for each array, which depends on its elements' bits and their order.

    Arrays may have any type and strides. Axes along which an array repeats its elements count once.
    """
    prepare([(checksum, NUMBER)])
    tables = [_pieces(array) for array in arrays]
    pieces = np.concatenate(tables)
    sums = np.empty(len(pieces), np.int64)
    run = Bound(checksum, NUMBER, pieces, sums)
    nbytes = sum(array.nbytes for array in arrays)
    if nbytes < SHORT:
        run(0, len(pieces))
    else:
        parallel(run, len(pieces), arrays, nbytes / BYTES_PER_SECOND)
    ends = np.cumsum([0, *map(len, tables)])
    return [int(sums[a:b].sum()) for a, b in itertools.pairwise(ends)]


def _pieces(array: Array) -> Array:
    """Return the pieces of an array, as `checksum` takes them: (n, 5) of int64."""
    if not array.size:
        return np.empty((0, 5), np.int64)
    place, size, axes = address(array), array.itemsize, []
    for count, step in zip(array.shape, array.strides, strict=True):
        if count > 1 and step:
            place += (count - 1) * min(step, 0)
            axes.append((abs(step), count))
    axes.sort()
    while axes and axes[0][0] == size:  # units are as long as memory is contiguous
        size *= axes.pop(0)[1]
    if not axes:  # one run of bytes, which is cut
        begin = np.arange(0, size, PIECE)
        pieces = np.empty((len(begin), 5), np.int64)
        pieces[:, 0], pieces[:, 1], pieces[:, 2] = place + begin, 1, 0
        pieces[:, 3], pieces[:, 4] = np.minimum(PIECE, size - begin), begin // WORD
        return pieces
    step, units = axes.pop(0)
    while axes and axes[0][0] == units * step:
        units *= axes.pop(0)[1]
    each = max(1, PIECE // size)
    begin = np.arange(0, units, each)
    rows = np.zeros(1, np.int64)
    for distance, count in reversed(axes):
        rows = np.add.outer(rows, np.arange(count) * distance).ravel()
    pieces = np.empty((len(rows), len(begin), 5), np.int64)
    pieces[..., 0], pieces[..., 1] = (
        place + rows[:, None] + begin * step,
        np.minimum(each, units - begin),
    )
    pieces[..., 2], pieces[..., 3] = step, size
    pieces[..., 4] = (np.arange(len(rows))[:, None] * units + begin) * -(-size // WORD)
    return pieces.reshape(-1, 5)
