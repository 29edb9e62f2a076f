"""What happens to a tile of scores before the softmax: class, score changes, mask, dropout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from . import philox
from .arguments import CHANGES, shape_of
from .jit import INT, INTS, TABLE, caller, helper, kernel, takes, vector, whole_rows
from .program import PROGRAM, SYMBOLS, Program, run

Array = np.ndarray[Any, Any]

EMPTY, PARTIAL, FULL = 0, 1, 2
SYMBOL_COUNT = len(SYMBOLS)

WORDS = whole_rows(types.uint32)  # four words of the generator for every lane

_run = caller(run)


def make_registers(program: Program, lanes: int, number: np.dtype[Any]) -> tuple[Array, Array]:
    """Return the registers of a program; the last row of integers is for addresses."""
    ri = np.empty((program.int_registers + 1, lanes), np.int64)
    rf = np.empty((max(program.float_registers, 1), lanes), number)
    return ri, rf


@helper
def describe_tile(symbols, shape, b, h, i0, ni, j0, nj):
    """Write the symbols' values of a tile; the key position j is set key by key."""
    symbols[0] = b
    symbols[1] = h
    symbols[2] = j0
    symbols[3] = shape.len_q[b]
    symbols[4] = shape.len_k[b]
    symbols[5] = shape.start_q[b]
    symbols[6] = shape.start_k[b]
    symbols[7] = i0
    symbols[8] = i0 + ni - 1
    symbols[9] = j0
    symbols[10] = j0 + nj - 1


@takes(lambda number: (CHANGES, INTS, INT, INT, TABLE, whole_rows(types.float32)))
@kernel
def classify_by_ranges(changes, symbols, ni, nj, ri, rf):
    """Return EMPTY, PARTIAL or FULL for the tile that `symbols` describes, by its rows' ranges."""
    ranges, j0 = changes.ranges, symbols[9]
    first = ranges.batch[symbols[0]] + symbols[1] * ranges.head + symbols[7]
    some, every = False, True
    for n in range(first, first + ni):
        low, high = max(ranges.low[n], j0), min(ranges.high[n], j0 + nj - 1)
        some |= low <= high
        every &= high - low == nj - 1
    return FULL if every else (PARTIAL if some else EMPTY)


@takes(lambda number: (CHANGES, INTS, INT, INT, TABLE, whole_rows(types.float32)))
@kernel
def classify_by_program(changes, symbols, ni, nj, ri, rf):
    """Return the class of a tile by the program of a mask."""
    program, pointer = changes.tile, changes.pointers.run_float32
    _run(pointer, (program, 0, program.code.shape[0], 1, symbols, 0, rf[0], ri, rf))
    return ri[program.result, 0]


_classify = caller(classify_by_program, INT)


@helper
def class_of_tile(changes, symbols, ni, nj, ri, rf):
    """Return EMPTY, PARTIAL or FULL for the tile that `symbols` describes."""
    if changes.pointers.classify == 0:
        return FULL
    return _classify(changes.pointers.classify, (changes, symbols, ni, nj, ri, rf))


@takes(
    lambda number: (
        INT, PROGRAM, INTS, INT, INT, INT, INT, vector(number), vector(number), TABLE,
        whole_rows(number),
    )
)  # fmt: skip
@kernel
def score_by_program(pointer, program, symbols, i0, ni, nj, lanes, s, changed, ri, rf):
    """Write the program's values for a tile of scores `s` to `changed`, which may be `s`."""
    _run(pointer, (program, 0, program.once_per_tile, ni, symbols, i0, s[:lanes], ri, rf))
    first, last = program.once_per_tile, program.code.shape[0]
    j0 = symbols[9]
    for j in range(nj):
        symbols[2] = j0 + j
        row = s[j * lanes : (j + 1) * lanes]
        _run(pointer, (program, first, last, ni, symbols, i0, row, ri, rf))
        value = rf[program.result]
        target = changed[j * lanes : (j + 1) * lanes]
        for i in range(ni):
            target[i] = value[i]


_score_by_program = caller(score_by_program)


@helper
def apply_score(pointers, program, symbols, i0, ni, nj, lanes, s, changed, ri, rf):
    """Write the program's values for a tile of scores `s` to `changed`, which may be `s`."""
    _score_by_program(
        pointers.score,
        (pointers.run_number, program, symbols, i0, ni, nj, lanes, s, changed, ri, rf),
    )


def _mask_arguments(number: types.Type) -> tuple[types.Type, ...]:
    return CHANGES, INTS, INT, INT, INT, vector(number), TABLE, whole_rows(types.float32)


@takes(_mask_arguments)
@kernel
def mask_by_ranges(changes, symbols, ni, nj, lanes, s, ri, rf):
    """Set the scores of keys outside of their row's range to -inf."""
    ranges, j0 = changes.ranges, symbols[9]
    first = ranges.batch[symbols[0]] + symbols[1] * ranges.head + symbols[7]
    low, high = ranges.low[first : first + ni], ranges.high[first : first + ni]
    minus_infinity = s.dtype.type(-math.inf)
    for j in range(nj):
        row = s[j * lanes : (j + 1) * lanes]
        for i in range(ni):
            row[i] = row[i] if low[i] <= j0 + j <= high[i] else minus_infinity


@takes(_mask_arguments)
@kernel
def mask_by_program(changes, symbols, ni, nj, lanes, s, ri, rf):
    """Set the scores of pairs that the program hides to -inf."""
    program, pointer, i0 = changes.mask, changes.pointers.run_float32, symbols[7]
    _run(pointer, (program, 0, program.once_per_tile, ni, symbols, i0, rf[0], ri, rf))
    first, last = program.once_per_tile, program.code.shape[0]
    minus_infinity = s.dtype.type(-math.inf)
    j0 = symbols[9]
    for j in range(nj):
        symbols[2] = j0 + j
        _run(pointer, (program, first, last, ni, symbols, i0, rf[0], ri, rf))
        allowed = ri[program.result]
        row = s[j * lanes : (j + 1) * lanes]
        for i in range(ni):
            row[i] = row[i] if allowed[i] else minus_infinity


_mask = caller(mask_by_program)


@helper
def apply_mask(changes, symbols, ni, nj, lanes, s, ri, rf):
    """Set the scores of pairs that may not attend to -inf."""
    _mask(changes.pointers.mask, (changes, symbols, ni, nj, lanes, s, ri, rf))


@helper
def note_seen(s, seen, count):
    """Remember which pairs take part: every score but -inf."""
    for n in range(count):
        seen[n] = s[n] != -math.inf


@takes(lambda number: (shape_of(number), *(INT,) * 7, vector(number), WORDS))
@kernel
def draw_dropout(shape, b, h, i0, ni, j0, nj, lanes, z, words):
    """Set z[j, i] = 0 for a dropped pair, else 1 / (1 - dropout); `words` is scratch."""
    b_h = b * shape.heads + h
    known = -1
    for j in range(nj):
        if (j0 + j) >> 2 != known:
            known = (j0 + j) >> 2
            philox.words(shape.seed, known, i0, ni, b_h, words)
        word = words[(j0 + j) & 3]
        row = z[j * lanes : (j + 1) * lanes]
        for i in range(ni):
            row[i] = 0 if word[i] < shape.drop_below else shape.keep_scale


_draw_dropout = caller(draw_dropout)


@helper
def dropout_factors(shape, changes, b, h, i0, ni, j0, nj, lanes, z, words):
    """Set z[j, i] = 0 for a dropped pair, else 1 / (1 - dropout); `words` is scratch."""
    _draw_dropout(changes.pointers.dropout, (shape, b, h, i0, ni, j0, nj, lanes, z, words))


@helper
def scale_tile(s, z, count):
    """Multiply a tile by factors, element by element."""
    for n in range(count):
        s[n] *= z[n]
