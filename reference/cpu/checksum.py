"""Numbers that tell whether arrays have changed: sums over their words, in which places count.

A backward computes those of q, k, v and out itself, for some heads just after their gradients.

A word w of eight bytes at place n adds x + low * high, where x = w xor n * PLACE, and low and high
are its halves. Sums are taken modulo 2**64, so their order is free. The products see what plain
sums do not: two elements that changed places, or an even number of changed signs.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .addresses import address
from .arguments import shape_of
from .calls import Bound
from .jit import INT, INTS, TABLE, helper, kernel, prepare, takes
from .memory import ROWS, load, row_address
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


@helper
def _sum_of_head(rows, b, h, count, columns):
    """Return the sum over the words of a head; all heads are one after the other in memory."""
    place = row_address(rows, b, h, 0)
    words = count * columns * rows.itemsize // WORD
    return sum_of_words(place, words, (place - rows.address) // WORD)


@takes(lambda number: (INT, INT, INTS, TABLE, INTS, shape_of(number), *(ROWS,) * 4, TABLE))
@kernel
def head_checksums(first, last, runs, work, members, shape, q, k, v, out, sums):
    """Sum the words of the heads of some work items from `first` to `last`.

    Items are those of `backward.backward_dkdv`; of rows of work for one head of keys, the one with
    its first block counts. ``sums[item]`` receives what the item adds for q, k, v and out, whose
    heads are whole words.
    """
    for item in range(first, last):
        of_q, of_k, of_v, of_out = 0, 0, 0, 0
        for place in range(runs[item], runs[item + 1]):
            if work[place, 3] != 0:
                continue
            h_kv, keys = work[place, 2], members[work[place, 0]]
            for member in range(work[place, 0], work[place, 1]):
                b = members[member]
                for h in range(h_kv * shape.group, (h_kv + 1) * shape.group):
                    of_q += _sum_of_head(q, b, h, shape.len_q[b], shape.d)
                    of_out += _sum_of_head(out, b, h, shape.len_q[b], shape.d_v)
            of_k += _sum_of_head(k, keys, h_kv, shape.len_k[keys], shape.d)
            of_v += _sum_of_head(v, keys, h_kv, shape.len_k[keys], shape.d_v)
        sums[item, 0], sums[item, 1] = of_q, of_k
        sums[item, 2], sums[item, 3] = of_v, of_out


def is_whole(array: Array, heads: int, rows: int, columns: int) -> bool:
    """Return whether an array has so many heads of its own, in a row, of whole words each."""
    of_head = rows * columns * array.itemsize
    return array.flags.c_contiguous and array.nbytes == heads * of_head and not of_head % WORD


class Checksums:
    """A number for each of some arrays, which depends on its elements' bits and their order.

    Arrays may have any type and strides. Axes along which an array repeats its elements count once.

    Parameters
    ----------
    arrays : sequence of array
        The arrays, which are read each time.
    """

    __slots__ = ("_arrays", "_nbytes", "_pieces", "_places", "_run", "_sums")

    def __init__(self, arrays: Sequence[Array]) -> None:
        prepare([(checksum, NUMBER)])
        tables = [_pieces(array) for array in arrays]
        self._arrays, self._places = arrays, [*map(address, arrays)]
        self._pieces = [0, *itertools.accumulate(map(len, tables))]
        self._nbytes = [0, *itertools.accumulate(array.nbytes for array in arrays)]
        self._sums = np.empty(self._pieces[-1], np.int64)
        self._run = Bound(checksum, NUMBER, np.concatenate(tables), self._sums)

    def begins_with(self, arrays: Sequence[Array]) -> bool:
        """Return whether these are its first arrays, and lie where they did."""
        known = self._arrays[: len(arrays)]
        return (
            len(arrays) == len(known)
            and all(map(operator.is_, arrays, known))
            and [*map(address, arrays)] == self._places[: len(arrays)]
        )

    def of_first(self, count: int) -> list[int]:
        """Return the numbers of the first arrays; one thread at a time asks for them."""
        last, nbytes = self._pieces[count], self._nbytes[count]
        if nbytes < SHORT:
            self._run(0, last)
        else:
            parallel(self._run, last, self._arrays, nbytes / BYTES_PER_SECOND)
        pairs = itertools.pairwise(self._pieces[: count + 1])
        return [int(self._sums[a:b].sum()) for a, b in pairs]


def checksums(arrays: Sequence[Array]) -> list[int]:
    """Return a number for each array: see `Checksums`."""
    return Checksums(arrays).of_first(len(arrays))


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
