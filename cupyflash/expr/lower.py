"""Turn an expression into a `reference.program.Program`, the form the CPU kernels run as data.

So a new mask or score needs no new machine code. Equal operations are computed once. Operations
that do not depend on the key position or the score are computed once per tile, and the others once
per key. Operations that do not depend on the query position are computed for one lane and spread.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash.reference.cpu.program import (
    NO_RESULT,
    OPCODES,
    SYMBOLS,
    Program,
)
from cupyflash.reference.cpu.tables import TABLE_WORDS, describe_table

from .nodes import READS, Expr, walk
from .strided import strided_bias, strided_condition

_PER_LANE = ("i", "score")
_PER_KEY = ("j", "score")


class _Lowering:
    def __init__(self) -> None:
        self.code: dict[bool, list[list[int]]] = {False: [], True: []}  # by "once per key"
        self.registers = {"int": 0, "float": 0}
        self.operands: list[int] = []
        self.ints: list[int] = []
        self.floats: list[float] = []
        self.tables: list[list[int]] = []
        self.places: dict[int, int] = {}  # of tables, by the array's id
        self.arrays: list[Any] = []  # of tables
        # key of an operation -> (register, varies over lanes, once per key)
        self.seen: dict[tuple[Any, ...], tuple[int, bool, bool]] = {}

    def emit(
        self, key: tuple[Any, ...], kind: str, lanes: bool, per_key: bool, a: int, b: int, c: int
    ) -> tuple[int, bool, bool]:
        if key not in self.seen:
            target = self.registers[kind]
            self.registers[kind] += 1
            opcode = OPCODES[key[0]]
            self.code[per_key].append([opcode, int(lanes), target, a, b, c])
            self.seen[key] = target, lanes, per_key
        return self.seen[key]

    def spread(self, kind: str, register: tuple[int, bool, bool]) -> tuple[int, bool, bool]:
        number, lanes, per_key = register
        if lanes:
            return register
        return self.emit((f"spread_{kind}", number), kind, True, per_key, number, 0, 0)

    def table(self, array: Any) -> int:
        place = self.places.setdefault(id(array), len(self.tables))
        if place == len(self.tables):
            self.tables.append(describe_table(array))
            self.arrays.append(array)
        return place


def _kind(node: Expr) -> str:
    return "float" if node.type == "float" else "int"


def lower(root: Expr) -> Program:
    """Return the program of a bound expression.

    The program holds addresses of the expression's arrays, which must be kept alive until it has
    run.
    """
    return lowered(root)[0]


def lowered(root: Expr) -> tuple[Program, list[Any]]:
    """Return the program of a bound expression, and the arrays of its tables, in their order."""
    state = _Lowering()
    found = strided_condition(root) if root.type == "bool" else strided_bias(root)
    other = root if found is None else found.other
    if found is not None and other is not None and other.op == "symbol" and other.value == "score":
        other = None
    known: dict[Expr, tuple[int, bool, bool]] = {}
    indices = () if found is None else found.indices
    for node in walk(*(() if other is None else (other,)), *indices):
        known[node] = _emit(state, node, [known[arg] for arg in node.args])
    result = NO_RESULT if other is None else state.spread(_kind(other), known[other])[0]
    words = []
    if found is not None:
        table, first = state.table(found.read.value[0]), len(state.operands)
        words = [table, first, found.query_step, found.key_step]
        state.operands += [known[index][0] for index in indices]
    once, each = state.code[False], state.code[True]
    program = Program(
        code=np.array(once + each, np.int64).reshape(-1, 6),
        once_per_tile=len(once),
        result=result,
        int_registers=state.registers["int"],
        float_registers=state.registers["float"],
        operands=np.array(state.operands, np.int64),
        ints=np.array(state.ints, np.int64),
        floats=np.array(state.floats, np.float64),
        tables=np.array(state.tables, np.int64).reshape(-1, TABLE_WORDS),
        strided=np.array(words, np.int64),
    )
    return program, state.arrays


def _emit(
    state: _Lowering, node: Expr, args: list[tuple[int, bool, bool]]
) -> tuple[int, bool, bool]:
    kind = _kind(node)
    if node.op == "constant":
        pool: list[Any] = state.floats if kind == "float" else state.ints
        key: tuple[Any, ...] = (f"constant_{kind}", repr(node.value))
        if key not in state.seen:
            pool.append(node.value)
        return state.emit(key, kind, False, False, len(pool) - 1, 0, 0)
    if node.op == "symbol":
        name = node.value
        if name in _PER_LANE:
            return state.emit((name,), kind, True, name in _PER_KEY, 0, 0, 0)
        index = SYMBOLS.index(name)
        return state.emit(("symbol", name), kind, False, name in _PER_KEY, index, 0, 0)
    lanes = any(register[1] for register in args)
    per_key = any(register[2] for register in args)
    if lanes:
        kinds = [_kind(arg) for arg in node.args]
        args = [state.spread(k, register) for k, register in zip(kinds, args, strict=True)]
    numbers = [register[0] for register in args]
    if node.op in READS:
        table = state.table(node.value[0])
        key = (f"{node.op}_{kind}", table, *numbers)
        if key not in state.seen:
            state.operands.extend(numbers)
        start = len(state.operands) - len(numbers)
        return state.emit(key, kind, lanes, per_key, table, start, 0)
    operand_kind = _kind(node.args[-1])
    name = node.op if node.op in OPCODES else f"{node.op}_{operand_kind}"
    a, b, c = (*numbers, 0, 0)[:3]
    return state.emit((name, *numbers), kind, lanes, per_key, a, b, c)
