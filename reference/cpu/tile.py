"""What happens to a tile of scores before the softmax: class, score changes, mask, dropout."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from . import philox
from .jit import helper
from .program import Program, run

EMPTY, PARTIAL, FULL = 0, 1, 2


class Shape(NamedTuple):
    """Sizes and scalars of a problem; lengths are by batch entry b."""

    heads: int
    group: int  # query heads that share one key-value head
    len_q: np.ndarray[Any, Any]  # (B,) int64
    len_k: np.ndarray[Any, Any]
    start_q: np.ndarray[Any, Any]  # first packed row, (B,) int64
    start_k: np.ndarray[Any, Any]
    d: int
    d_v: int
    block_q: int
    block_kv: int
    itemsize: int  # bytes of the accumulator's type
    lanes_per_vector: int
    scale: Any  # of the accumulator's type
    log2_e: Any
    drop_below: int  # a pair is dropped where its random word is smaller; 0 without dropout
    keep_scale: Any  # 1 / (1 - dropout)
    seed: int  # uint64 as int64


class Changes(NamedTuple):
    """The programs of a problem: score changes (with bias), their slope, mask and tile class."""

    score: Program
    slope: Program
    mask: Program
    tile: Program
    careful: bool  # an operand holds NaN or infinity: masked pairs must not meet it


@helper
def make_registers(program, lanes, like):
    """Return the registers of a program; the last row of integers is for addresses."""
    ri = np.zeros((program.int_registers + 1, lanes), np.int64)
    rf = np.zeros((max(program.float_registers, 1), lanes), like.dtype)
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


@helper
def classify_tile(program, symbols, ri, rf):
    """Return EMPTY, PARTIAL or FULL for the tile that `symbols` describes."""
    if program.code.shape[0] == 0:
        return FULL
    start = np.int64(0)  # a literal 0 would compile `run` once more
    run(program, start, program.code.shape[0], np.int64(1), symbols, start, rf[0], ri, rf)
    return ri[program.result, 0]


@helper
def apply_score(program, symbols, i0, ni, nj, lanes, s, changed, ri, rf):
    """Write the program's values for a tile of scores `s` to `changed`, which may be `s`."""
    run(program, np.int64(0), program.once_per_tile, ni, symbols, i0, s[:lanes], ri, rf)
    j0 = symbols[9]
    for j in range(nj):
        symbols[2] = j0 + j
        row = s[j * lanes : (j + 1) * lanes]
        run(program, program.once_per_tile, program.code.shape[0], ni, symbols, i0, row, ri, rf)
        value = rf[program.result]
        target = changed[j * lanes : (j + 1) * lanes]
        for i in range(ni):
            target[i] = value[i]


@helper
def apply_mask(program, symbols, i0, ni, nj, lanes, s, ri, rf):
    """Set the scores of pairs that may not attend to -inf."""
    run(program, np.int64(0), program.once_per_tile, ni, symbols, i0, rf[0], ri, rf)
    minus_infinity = s.dtype.type(-math.inf)
    j0 = symbols[9]
    for j in range(nj):
        symbols[2] = j0 + j
        run(program, program.once_per_tile, program.code.shape[0], ni, symbols, i0, rf[0], ri, rf)
        allowed = ri[program.result]
        row = s[j * lanes : (j + 1) * lanes]
        for i in range(ni):
            row[i] = row[i] if allowed[i] else minus_infinity


@helper
def note_seen(s, seen, count):
    """Remember which pairs take part: every score but -inf."""
    for n in range(count):
        seen[n] = s[n] != -math.inf


@helper
def dropout_factors(shape, b, h, i0, ni, j0, nj, lanes, z):
    """z[j, i] = 0 for a dropped pair, else 1 / (1 - dropout)."""
    b_h = b * shape.heads + h
    words = np.empty((4, lanes), np.uint32)
    known = -1
    for j in range(nj):
        if (j0 + j) >> 2 != known:
            known = (j0 + j) >> 2
            philox.words(shape.seed, known, i0, ni, b_h, words)
        word = words[(j0 + j) & 3]
        row = z[j * lanes : (j + 1) * lanes]
        for i in range(ni):
            row[i] = 0 if word[i] < shape.drop_below else shape.keep_scale


@helper
def scale_tile(s, z, count):
    """Multiply a tile by factors, element by element."""
    for n in range(count):
        s[n] *= z[n]
