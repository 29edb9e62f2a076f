"""What happens to a tile of scores before the softmax: class, score changes, mask, dropout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from . import philox
from .arguments import CHANGES, Registers, shape_of
from .bias import TAG_WORDS, run_bias
from .jit import INT, INTS, TABLE, caller, helper, kernel, takes, vector, whole_rows
from .memory import first_address
from .program import NO_RESULT, PROGRAM, SYMBOLS, Program, run

Array = np.ndarray[Any, Any]

EMPTY, PARTIAL, FULL = 0, 1, 2
SYMBOL_COUNT = len(SYMBOLS)

WORDS = whole_rows(types.uint32)  # four words of the generator for every lane

_run = caller(run)


def make_registers(
    program: Program | Registers, lanes: int, number: np.dtype[Any], keeps: bool = False
) -> tuple[Array, Array]:
    """Return the registers of a program; the row of integers behind them is for addresses.

    With `keeps`, tiles of a bias that a thread keeps follow; see `bias`.
    """
    kept = cells = 0
    if keeps and isinstance(program, Registers):
        kept, cells = program.kept, program.cells
    ri = np.empty((program.int_registers + 1 + kept, max(lanes, TAG_WORDS)), np.int64)
    rf = np.empty((max(program.float_registers, 1) - (-kept * cells // lanes), lanes), number)
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


# Where a tile's keys begin that any query sees, those that all see, those behind these, and those
# that no query sees.
FIRST, WHOLE_FIRST, WHOLE_LAST, LAST = range(4)
PART, MOST_PARTS = 48, 8  # keys of a part of a tile that a program looks at alone


@helper
def _class_by_ranges(changes, symbols, ni, nj, edges):
    """Return the class of a tile by its rows' ranges, and fill `edges`."""
    ranges, j0 = changes.ranges, symbols[9]
    begin = ranges.batch[symbols[0]] + symbols[1] * ranges.head + symbols[7]
    first, whole_first, whole_last, last = nj, 0, nj, 0
    for n in range(begin, begin + ni):
        low, high = max(ranges.low[n] - j0, 0), min(ranges.high[n] - j0 + 1, nj)
        first = min(first, low if low < high else nj)
        last = max(last, high if low < high else 0)
        whole_first, whole_last = max(whole_first, low), min(whole_last, high)
    if whole_first >= whole_last:
        whole_first = whole_last = last
    edges[FIRST], edges[LAST] = first, last
    edges[WHOLE_FIRST], edges[WHOLE_LAST] = whole_first, whole_last
    if first >= last:
        return EMPTY
    return FULL if whole_last - whole_first == nj else PARTIAL


@helper
def _run_classes(changes, symbols, ri, rf):
    """Return the class of a tile, or of a part of one, by the program of a mask."""
    program, pointer = changes.tile, changes.pointers.run_float32
    _run(pointer, (program, 0, program.code.shape[0], 1, symbols, 0, rf[0], ri, rf))
    return ri[program.result, 0]


@helper
def _class_by_program(changes, symbols, ri, rf):
    """Return the class of a tile by the program of a mask, or by what a thread has found before."""
    lists = changes.lists
    if not lists.classes.shape[0]:
        return _run_classes(changes, symbols, ri, rf)
    place = symbols[0] * lists.entry + symbols[7] // lists.queries * lists.row
    place += symbols[9] // lists.keys
    known = lists.classes[place]
    if known:
        return np.int64(known) - 1
    found = _run_classes(changes, symbols, ri, rf)
    lists.classes[place] = found + 1
    return found


@helper
def _look_at_parts(changes, symbols, edges, ri, rf):
    """Narrow the edges of a PARTIAL tile by a program's classes of its parts; return its class.

    Parts at the ends in which it hides all are left out, and the first ones that it leaves as they
    are, side by side, are those that all queries see.
    """
    j0, last = symbols[9], symbols[10]
    begin, end = edges[FIRST], edges[LAST]
    if last - j0 >= MOST_PARTS * PART:  # of a cache, where nobody asks for the edges
        return PARTIAL
    first, behind, whole_first, whole_last = end, begin, end, begin
    for part in range(begin, end, PART):
        following = min(part + PART, end)
        symbols[9], symbols[10] = j0 + part, j0 + following - 1
        found = _run_classes(changes, symbols, ri, rf)
        if found != EMPTY:
            first, behind = min(first, part), following
        if found == FULL and (whole_first == end or whole_last == part):
            whole_first, whole_last = min(whole_first, part), following
    symbols[9], symbols[10] = j0, last
    whole_first = max(whole_first, edges[WHOLE_FIRST])
    whole_last = min(whole_last, edges[WHOLE_LAST])
    if whole_first >= whole_last:
        whole_first = whole_last = behind
    edges[FIRST], edges[LAST] = first, behind
    edges[WHOLE_FIRST], edges[WHOLE_LAST] = whole_first, whole_last
    return PARTIAL if first < behind else EMPTY


def _class_arguments(number: types.Type) -> tuple[types.Type, ...]:
    return CHANGES, INTS, INT, INT, INTS, TABLE, whole_rows(types.float32)


@takes(_class_arguments)
@kernel
def classify_by_ranges(changes, symbols, ni, nj, edges, ri, rf):
    """Return EMPTY, PARTIAL or FULL for the tile that `symbols` describes, by its rows' ranges."""
    return _class_by_ranges(changes, symbols, ni, nj, edges)


@takes(_class_arguments)
@kernel
def classify_by_program(changes, symbols, ni, nj, edges, ri, rf):
    """Return the class of a tile by the program of a mask."""
    found = _class_by_program(changes, symbols, ri, rf)
    edges[FIRST], edges[LAST] = 0, nj
    edges[WHOLE_FIRST], edges[WHOLE_LAST] = 0, nj
    if found == PARTIAL:
        return _look_at_parts(changes, symbols, edges, ri, rf)
    return found


@takes(_class_arguments)
@kernel
def classify_by_both(changes, symbols, ni, nj, edges, ri, rf):
    """Return the class of a tile whose pairs both ranges and a program must let attend."""
    of_ranges = _class_by_ranges(changes, symbols, ni, nj, edges)
    if of_ranges == EMPTY:
        return EMPTY
    found = _class_by_program(changes, symbols, ri, rf)
    if found == FULL:
        return of_ranges
    if found == PARTIAL:
        return _look_at_parts(changes, symbols, edges, ri, rf)
    return found


_classify = caller(classify_by_program, INT)


@helper
def class_of_tile(changes, symbols, ni, nj, edges, ri, rf):
    """Return EMPTY, PARTIAL or FULL for the tile that `symbols` describes, and fill `edges`."""
    if changes.pointers.classify == 0:
        edges[FIRST] = edges[WHOLE_FIRST] = 0
        edges[LAST] = edges[WHOLE_LAST] = nj
        return FULL
    return _classify(changes.pointers.classify, (changes, symbols, ni, nj, edges, ri, rf))


@takes(
    lambda number: (
        INT, INT, PROGRAM, INTS, INT, INT, INT, INT, INT, vector(number), vector(number), TABLE,
        whole_rows(number), number, INT,
    )
)  # fmt: skip
@kernel
def score_by_program(
    pointer, bias, program, symbols, i0, ni, begin, end, lanes, s, changed, ri, rf, factor, maxima
):
    """Write the program's values for some keys of a tile of scores to `changed`, maybe `s`.

    `pointer` and `bias` are the addresses of `run` and of `add_bias`, which takes the last two.
    """
    _run(pointer, (program, 0, program.once_per_tile, ni, symbols, i0, s[:lanes], ri, rf))
    first, last = program.once_per_tile, program.code.shape[0]
    if program.result != NO_RESULT:
        j0 = symbols[9]
        for j in range(begin, end):
            symbols[2] = j0 + j
            row = s[j * lanes : (j + 1) * lanes]
            _run(pointer, (program, first, last, ni, symbols, i0, row, ri, rf))
            value = rf[program.result]
            target = changed[j * lanes : (j + 1) * lanes]
            for i in range(ni):
                target[i] = value[i]
    elif first_address(changed) != first_address(s):
        for n in range(begin * lanes, end * lanes):
            changed[n] = s[n]
    if program.strided.shape[0]:
        run_bias(bias, (program, ri, rf, ni, begin, end, lanes, changed, factor, maxima))


_score_by_program = caller(score_by_program)


@helper
def apply_score(pointers, program, symbols, ni, edges, lanes, s, changed, ri, rf):
    """Write the program's values for a tile of scores `s` to `changed`, which may be `s`."""
    i0, begin, end, one = symbols[7], edges[FIRST], edges[LAST], s.dtype.type(1)
    arguments = (
        pointers.run_number, pointers.bias, program, symbols, i0, ni, begin, end, lanes, s,
        changed, ri, rf, one, 0,
    )  # fmt: skip
    _score_by_program(pointers.score, arguments)


@helper
def is_bias(program):
    """Return whether a program does nothing but add a bias."""
    return program.result == NO_RESULT and program.strided.shape[0] > 0


@helper
def apply_bias(pointers, program, symbols, ni, edges, lanes, s, factor, m_new, ri, rf):
    """Add a bias to a factor times a tile of scores; m_new = max(m_new, maxima of the sums)."""
    i0, begin, end = symbols[7], edges[FIRST], edges[LAST]
    arguments = (
        pointers.run_number, pointers.bias, program, symbols, i0, ni, begin, end, lanes, s, s, ri,
        rf, factor, first_address(m_new),
    )  # fmt: skip
    _score_by_program(pointers.score, arguments)


def mask_arguments(number: types.Type) -> tuple[types.Type, ...]:
    """Return the types that a kernel of masks takes, given the accumulator's."""
    return CHANGES, INTS, INT, INT, INT, INT, vector(number), TABLE, whole_rows(types.float32)


@helper
def hide_by_ranges(changes, symbols, ni, begin, end, lanes, s):
    """Set the scores of keys outside of their row's range to -inf."""
    ranges, j0 = changes.ranges, symbols[9]
    first = ranges.batch[symbols[0]] + symbols[1] * ranges.head + symbols[7]
    low, high = ranges.low[first : first + ni], ranges.high[first : first + ni]
    minus_infinity = s.dtype.type(-math.inf)
    for j in range(begin, end):
        row = s[j * lanes : (j + 1) * lanes]
        for i in range(ni):
            row[i] = row[i] if low[i] <= j0 + j <= high[i] else minus_infinity


@takes(mask_arguments)
@kernel
def mask_by_ranges(changes, symbols, ni, begin, end, lanes, s, ri, rf):
    """Set the scores of keys outside of their row's range to -inf."""
    hide_by_ranges(changes, symbols, ni, begin, end, lanes, s)


@helper
def begin_mask(changes, symbols, ni, ri, rf):
    """Run what a mask's program does once for a tile."""
    program, pointer, i0 = changes.mask, changes.pointers.run_float32, symbols[7]
    _run(pointer, (program, 0, program.once_per_tile, ni, symbols, i0, rf[0], ri, rf))


@helper
def hide_by_program(changes, symbols, ni, begin, end, lanes, s, ri, rf):
    """Run a mask's program for keys; set the scores of pairs that its result hides to -inf."""
    program, pointer, i0 = changes.mask, changes.pointers.run_float32, symbols[7]
    first, last = program.once_per_tile, program.code.shape[0]
    minus_infinity = s.dtype.type(-math.inf)
    j0 = symbols[9]
    for j in range(begin, end):
        symbols[2] = j0 + j
        _run(pointer, (program, first, last, ni, symbols, i0, rf[0], ri, rf))
        allowed = ri[program.result]
        row = s[j * lanes : (j + 1) * lanes]
        for i in range(ni):
            row[i] = row[i] if allowed[i] else minus_infinity


@takes(mask_arguments)
@kernel
def mask_by_program(changes, symbols, ni, begin, end, lanes, s, ri, rf):
    """Set the scores of pairs that the program hides to -inf."""
    begin_mask(changes, symbols, ni, ri, rf)
    hide_by_program(changes, symbols, ni, begin, end, lanes, s, ri, rf)


_mask = caller(mask_by_program)


@helper
def apply_mask(changes, symbols, ni, edges, lanes, s, ri, rf):
    """Set the scores of pairs that may not attend to -inf: of keys that not all queries see."""
    for side in (FIRST, WHOLE_LAST):
        first, last = edges[side], edges[side + 1]
        if first < last:
            _mask(changes.pointers.mask, (changes, symbols, ni, first, last, lanes, s, ri, rf))


@helper
def look_at_all(edges, nj):
    """Make all of a tile's keys such that not all queries see them."""
    edges[FIRST] = 0
    edges[WHOLE_FIRST] = edges[WHOLE_LAST] = edges[LAST] = nj


@helper
def include_all(edges, nj):
    """Make all of a tile's keys such that a query may see them."""
    edges[FIRST], edges[LAST] = 0, nj


@helper
def note_seen(s, seen, count):
    """Remember which pairs take part: every score but -inf."""
    for n in range(count):
        seen[n] = s[n] != -math.inf


@takes(lambda number: (shape_of(number), *(INT,) * 7, vector(number), WORDS))
@kernel
def draw_dropout(shape, b, h, i0, ni, j0, nj, lanes, z, words):
    """Set z[j, i] = 0 for a dropped pair, else 1 / (1 - dropout); `words` is scratch."""
    b_h = shape.origin_b_h + b * shape.heads_of_entry + h
    i0, j0 = shape.origin_q + i0, shape.origin_k + j0
    for keys in range(j0 >> 4 << 2, (j0 + nj + 15) >> 4 << 2):
        philox.words(shape.seed, keys, i0, ni, b_h, words)
        for n in range(4):
            j = (keys >> 2 << 4) + (n >> 1 << 3) + ((keys & 3) << 1) + (n & 1) - j0
            if j < 0 or j >= nj:
                continue
            word, shift = words[n >> 1], 16 * (n & 1)
            row = z[j * lanes : (j + 1) * lanes]
            for i in range(ni):
                drawn = word[i] >> shift & (philox.DRAWS - 1)
                row[i] = 0 if drawn < shape.drop_below else shape.keep_scale


_draw_dropout = caller(draw_dropout)


@helper
def dropout_factors(shape, changes, b, h, i0, ni, j0, nj, lanes, z, words):
    """Set z[j, i] = 0 for a dropped pair, else 1 / (1 - dropout); `words` is scratch."""
    _draw_dropout(changes.pointers.dropout, (shape, b, h, i0, ni, j0, nj, lanes, z, words))


@helper
def scale_tile(s, z, first, last):
    """Multiply some elements of a tile by factors."""
    for n in range(first, last):
        s[n] *= z[n]
