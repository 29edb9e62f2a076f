"""Masks and scores as data: a register machine that evaluates an expression over a tile.

An instruction is six integers, ``opcode, lanes, target, a, b, c``. Registers hold one row of a
tile, one value per query (``lanes`` = 1) or a single value (``lanes`` = 0). Integers and conditions
are in int64 registers, and floats in registers of the accumulator's type (float32 for masks); each
register is written once. Every operation rounds separately, as in NumPy: nothing is contracted.
"""

from __future__ import annotations

import enum
import math
from typing import Any, NamedTuple

import numpy as np
from numba import types

from .elementary import exp, power_of_2, sigmoid, tanh
from .jit import INT, INTS, TABLE, helper, kernel, takes, vector, whole_rows
from .structs import Struct
from .tables import (
    TABLE_WORDS,
    find_places,
    is_true,
    load_as_float,
    load_as_int,
    load_float32,
    range_extremes,
    row_contains,
    rows_contain,
)
from .waves import FAR, cos, erf, sin

# The groups matter: `run` sends an instruction to its group's function by the group's last member.
Op = enum.IntEnum(
    "Op",
    """SYMBOL I SCORE CONSTANT_INT CONSTANT_FLOAT TO_FLOAT LOOKUP_INT LOOKUP_FLOAT
    CONTAINS_INT CONTAINS_ALL_INT CONTAINS_ANY_INT
    RANGE_MINIMUM_INT RANGE_MAXIMUM_INT RANGE_MINIMUM_FLOAT RANGE_MAXIMUM_FLOAT
    ADD_INT SUBTRACT_INT MULTIPLY_INT MINIMUM_INT MAXIMUM_INT NEGATIVE_INT ABSOLUTE_INT
    FLOOR_DIVIDE_INT REMAINDER_INT LEFT_SHIFT_INT RIGHT_SHIFT_INT TO_INT SPREAD_INT WHERE_INT
    LOGICAL_AND LOGICAL_OR LOGICAL_XOR LOGICAL_NOT
    LESS_INT LESS_EQUAL_INT EQUAL_INT NOT_EQUAL_INT
    LESS_FLOAT LESS_EQUAL_FLOAT EQUAL_FLOAT NOT_EQUAL_FLOAT FLOOR
    ADD_FLOAT SUBTRACT_FLOAT MULTIPLY_FLOAT DIVIDE_FLOAT MINIMUM_FLOAT MAXIMUM_FLOAT
    NEGATIVE_FLOAT ABSOLUTE_FLOAT SPREAD_FLOAT WHERE_FLOAT
    EXP EXP2 LOG TANH SIGMOID ERF SQRT SIN COS POWER""",
)
OPCODES: dict[str, int] = {op.name.lower(): int(op) for op in Op}
SYMBOLS = tuple("b h j len_q len_k start_q start_k i_low i_high j_low j_high".split())

_NONE = np.empty(0, np.int64)


class Program(NamedTuple):
    """An expression, lowered. Without instructions it stands for "no mask" or "no score change"."""

    code: np.ndarray[Any, Any]  # (instructions, 6) int64
    once_per_tile: int  # instructions that do not depend on the key; the others run for each key
    result: int  # register of the result
    int_registers: int
    float_registers: int
    operands: np.ndarray[Any, Any]  # index registers of look-ups, int64
    ints: np.ndarray[Any, Any]  # constants, int64
    floats: np.ndarray[Any, Any]  # constants, float64
    tables: np.ndarray[Any, Any]  # (tables, TABLE_WORDS) int64
    # The elements of a bias, added to the result where they are not -inf, and hiding the pair where
    # they are; of a mask, Booleans that hide a pair where they are false. `STRIDED_WORDS` int64, or
    # none.
    strided: np.ndarray[Any, Any] = _NONE


# A table's elements at equal strides: the table, the first operand of those that are the indices of
# a tile's first pair, the bytes from a query to the next one, and those from a key to the next one.
STRIDED_WORDS = 4
NO_RESULT = -1  # of a program that has nothing but such elements

# The type for kernels.
PROGRAM = Struct(
    Program, (TABLE, INT, INT, INT, INT, INTS, INTS, vector(types.float64), TABLE, INTS)
)

NO_PROGRAM = PROGRAM.keep(
    Program(
        _NONE.reshape(0, 6),
        0,
        0,
        0,
        0,
        _NONE,
        _NONE,
        _NONE.astype(np.float64),
        _NONE.reshape(0, TABLE_WORDS),
    )
)  # changes nothing


@helper
def _int_step(op, n, ri, to, a, b, c):
    """One operation on integers and conditions."""
    if op == Op.ADD_INT:
        for l in range(n):
            ri[to, l] = ri[a, l] + ri[b, l]
    elif op == Op.SUBTRACT_INT:
        for l in range(n):
            ri[to, l] = ri[a, l] - ri[b, l]
    elif op == Op.MULTIPLY_INT:
        for l in range(n):
            ri[to, l] = ri[a, l] * ri[b, l]
    elif op == Op.MINIMUM_INT:
        for l in range(n):
            ri[to, l] = min(ri[a, l], ri[b, l])
    elif op == Op.MAXIMUM_INT:
        for l in range(n):
            ri[to, l] = max(ri[a, l], ri[b, l])
    elif op == Op.NEGATIVE_INT:
        for l in range(n):
            ri[to, l] = -ri[a, l]
    elif op == Op.ABSOLUTE_INT:
        for l in range(n):
            ri[to, l] = abs(ri[a, l])
    elif op == Op.FLOOR_DIVIDE_INT:
        for l in range(n):
            ri[to, l] = ri[a, l] // ri[b, l]
    elif op == Op.REMAINDER_INT:
        for l in range(n):
            ri[to, l] = ri[a, l] % ri[b, l]
    elif op == Op.LEFT_SHIFT_INT:  # by other numbers than 0 to 63 as in NumPy
        for l in range(n):
            ri[to, l] = ri[a, l] << (ri[b, l] & 63) if 0 <= ri[b, l] < 64 else 0
    elif op == Op.RIGHT_SHIFT_INT:
        for l in range(n):
            ri[to, l] = ri[a, l] >> (ri[b, l] if 0 <= ri[b, l] < 64 else 63)
    elif op == Op.TO_INT:
        for l in range(n):
            ri[to, l] = ri[a, l]
    elif op == Op.SPREAD_INT:
        for l in range(n):
            ri[to, l] = ri[a, 0]
    elif op == Op.WHERE_INT:
        for l in range(n):
            ri[to, l] = ri[b, l] if ri[a, l] else ri[c, l]
    elif op == Op.LOGICAL_AND:
        for l in range(n):
            ri[to, l] = ri[a, l] & ri[b, l]
    elif op == Op.LOGICAL_OR:
        for l in range(n):
            ri[to, l] = ri[a, l] | ri[b, l]
    elif op == Op.LOGICAL_XOR:
        for l in range(n):
            ri[to, l] = ri[a, l] ^ ri[b, l]
    elif op == Op.LOGICAL_NOT:
        for l in range(n):
            ri[to, l] = 1 - ri[a, l]
    elif op == Op.LESS_INT:
        for l in range(n):
            ri[to, l] = ri[a, l] < ri[b, l]
    elif op == Op.LESS_EQUAL_INT:
        for l in range(n):
            ri[to, l] = ri[a, l] <= ri[b, l]
    elif op == Op.EQUAL_INT:
        for l in range(n):
            ri[to, l] = ri[a, l] == ri[b, l]
    elif op == Op.NOT_EQUAL_INT:
        for l in range(n):
            ri[to, l] = ri[a, l] != ri[b, l]


@helper
def _float_step(op, n, ri, rf, to, a, b, c):
    """One operation on floats."""
    if op == Op.ADD_FLOAT:
        for l in range(n):
            rf[to, l] = rf[a, l] + rf[b, l]
    elif op == Op.SUBTRACT_FLOAT:
        for l in range(n):
            rf[to, l] = rf[a, l] - rf[b, l]
    elif op == Op.MULTIPLY_FLOAT:
        for l in range(n):
            rf[to, l] = rf[a, l] * rf[b, l]
    elif op == Op.DIVIDE_FLOAT:
        for l in range(n):
            rf[to, l] = rf[a, l] / rf[b, l]
    elif op == Op.MINIMUM_FLOAT:
        for l in range(n):
            rf[to, l] = rf[a, l] if rf[a, l] < rf[b, l] or rf[a, l] != rf[a, l] else rf[b, l]
    elif op == Op.MAXIMUM_FLOAT:
        for l in range(n):
            rf[to, l] = rf[a, l] if rf[a, l] > rf[b, l] or rf[a, l] != rf[a, l] else rf[b, l]
    elif op == Op.NEGATIVE_FLOAT:
        for l in range(n):
            rf[to, l] = -rf[a, l]
    elif op == Op.ABSOLUTE_FLOAT:
        for l in range(n):
            rf[to, l] = abs(rf[a, l])
    elif op == Op.SPREAD_FLOAT:
        for l in range(n):
            rf[to, l] = rf[a, 0]
    elif op == Op.WHERE_FLOAT:
        for l in range(n):
            rf[to, l] = rf[b, l] if ri[a, l] else rf[c, l]


@helper
def _function_step(op, n, rf, to, a, b):
    """One function of floats."""
    if op == Op.EXP:
        for l in range(n):
            rf[to, l] = exp(rf[a, l])
    elif op == Op.EXP2:
        for l in range(n):
            rf[to, l] = power_of_2(rf[a, l])
    elif op == Op.LOG:
        for l in range(n):
            rf[to, l] = math.log(rf[a, l])
    elif op == Op.TANH:
        for l in range(n):
            rf[to, l] = tanh(rf[a, l])
    elif op == Op.SIGMOID:
        for l in range(n):
            rf[to, l] = sigmoid(rf[a, l])
    elif op == Op.ERF:
        for l in range(n):
            rf[to, l] = erf(rf[a, l])
    elif op == Op.SQRT:
        for l in range(n):
            rf[to, l] = math.sqrt(rf[a, l])
    elif op == Op.SIN:
        for l in range(n):
            rf[to, l] = sin(rf[a, l])
        for l in range(n):  # apart, so that the first loop works on several numbers at once
            if abs(rf[a, l]) > FAR:
                rf[to, l] = math.sin(rf[a, l])
    elif op == Op.COS:
        for l in range(n):
            rf[to, l] = cos(rf[a, l])
        for l in range(n):
            if abs(rf[a, l]) > FAR:
                rf[to, l] = math.cos(rf[a, l])
    elif op == Op.POWER:
        for l in range(n):
            rf[to, l] = math.pow(rf[a, l], rf[b, l])


@helper
def _floor_to_int(x):
    """Return the nearest int64 to the floor of `x`; the smallest for NaN."""
    if -(2.0**63) <= x < 2.0**63:
        return np.int64(math.floor(x))
    return np.int64(2**63 - 1) if x > 0 else np.int64(-(2**63))


@helper
def _compare_step(op, n, ri, rf, to, a, b):
    """One operation from floats to integers or conditions."""
    if op == Op.LESS_FLOAT:
        for l in range(n):
            ri[to, l] = rf[a, l] < rf[b, l]
    elif op == Op.LESS_EQUAL_FLOAT:
        for l in range(n):
            ri[to, l] = rf[a, l] <= rf[b, l]
    elif op == Op.EQUAL_FLOAT:
        for l in range(n):
            ri[to, l] = rf[a, l] == rf[b, l]
    elif op == Op.NOT_EQUAL_FLOAT:
        for l in range(n):
            ri[to, l] = rf[a, l] != rf[b, l]
    elif op == Op.FLOOR:
        for l in range(n):
            ri[to, l] = _floor_to_int(rf[a, l])


@helper
def _lookup_step(op, n, program, ri, rf, to, a, b):
    """One operation that reads an array."""
    table = program.tables[a]
    if op == Op.LOOKUP_INT:
        places = ri[program.int_registers]
        find_places(table, program.operands, b, table[2], ri, n, places)
        if table[1] == 0:
            for l in range(n):
                ri[to, l] = is_true(places[l])
        else:
            for l in range(n):
                ri[to, l] = load_as_int(places[l], table[1])
    elif op == Op.LOOKUP_FLOAT:
        places = ri[program.int_registers]
        find_places(table, program.operands, b, table[2], ri, n, places)
        if table[1] == 10:
            for l in range(n):
                rf[to, l] = load_float32(places[l])
        else:
            for l in range(n):
                rf[to, l] = load_as_float(places[l], table[1])
    elif op == Op.CONTAINS_INT:
        axes, places = table[2], ri[program.int_registers]
        find_places(table, program.operands, b, axes - 1, ri, n, places)
        number = ri[program.operands[b + axes - 1]]
        for l in range(n):
            alike = l > 0 and places[l] == places[l - 1] and number[l] == number[l - 1]
            ri[to, l] = ri[to, l - 1] if alike else row_contains(table, places[l], number[l])
    elif op == Op.CONTAINS_ALL_INT or op == Op.CONTAINS_ANY_INT:
        every, some = rows_contain(table, program.operands, b, ri, op == Op.CONTAINS_ANY_INT)
        ri[to, 0] = some if op == Op.CONTAINS_ANY_INT else every
    elif op == Op.RANGE_MINIMUM_INT or op == Op.RANGE_MAXIMUM_INT:
        is_minimum = op == Op.RANGE_MINIMUM_INT
        low, high, _, _ = range_extremes(table, program.operands, b, ri, False, is_minimum)
        ri[to, 0] = low if is_minimum else high
    else:
        _, _, smallest, largest = range_extremes(table, program.operands, b, ri, True, False)
        rf[to, 0] = smallest if op == Op.RANGE_MINIMUM_FLOAT else largest


@takes(
    lambda number: (
        PROGRAM, INT, INT, INT, INTS, INT, vector(number), TABLE, whole_rows(number)
    )
)  # fmt: skip
@kernel
def run(program, first, last, lanes, symbols, i0, score, ri, rf):
    """Run the instructions from `first` to `last` for `lanes` queries from `i0` on.

    `symbols` holds the values of `SYMBOLS`, `score` a row of scores, `ri` and `rf` the registers.
    """
    code, ints, floats = program.code, program.ints, program.floats
    for step in range(first, last):
        op, n = code[step, 0], lanes if code[step, 1] else 1
        # Unsigned, because otherwise each lane would check for negative indices, which count from
        # the end.
        to, a = np.uint64(code[step, 2]), np.uint64(code[step, 3])
        b, c = np.uint64(code[step, 4]), np.uint64(code[step, 5])
        # Here and not in a function, which would need too many arguments.
        if op == Op.SYMBOL:
            ri[to, 0] = symbols[a]
        elif op == Op.I:
            for l in range(n):
                ri[to, l] = i0 + l
        elif op == Op.SCORE:
            for l in range(n):
                rf[to, l] = score[l]
        elif op == Op.CONSTANT_INT:
            ri[to, 0] = ints[a]
        elif op == Op.CONSTANT_FLOAT:
            rf[to, 0] = floats[a]
        elif op == Op.TO_FLOAT:
            for l in range(n):
                rf[to, l] = ri[a, l]
        elif op <= Op.RANGE_MAXIMUM_FLOAT:
            _lookup_step(op, n, program, ri, rf, to, a, code[step, 4])
        elif op <= Op.NOT_EQUAL_INT:
            _int_step(op, n, ri, to, a, b, c)
        elif op <= Op.FLOOR:
            _compare_step(op, n, ri, rf, to, a, b)
        elif op <= Op.WHERE_FLOAT:
            _float_step(op, n, ri, rf, to, a, b, c)
        else:
            _function_step(op, n, rf, to, a, b)
