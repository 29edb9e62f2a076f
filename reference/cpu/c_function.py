"""Functions of machine code that Python calls as builtins, with numbers or addresses as arguments.

By ctypes, each call would make objects of C's numbers and look for how each argument is passed. A
program that uses the caches between two calls waits for all that is read for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from .addresses import HEADER
from .float_modes import compiled

WORD, STATUS = ir.IntType(64), ir.IntType(32)
TYPE = HEADER - 8  # bytes from an object to its type
_FASTCALL = 0x80  # METH_FASTCALL of Python's methodobject.h


class Emitter:
    """Emits machine code. All values are words, and statuses."""

    def __init__(self, builder: Any) -> None:
        self.builder, self.word, self.status = builder, WORD, STATUS

    def add(self, a: Any, b: Any) -> Any:
        """Return a sum."""
        return self.builder.add(a, b)

    def at(self, place: Any, n: Any) -> Any:
        """Return the address of a word behind another one."""
        number = n if isinstance(n, ir.Value) else WORD(n)
        return self.add(place, self.builder.mul(number, WORD(8)))

    def pointer(self, place: Any) -> Any:
        """Return a pointer to the word at an address."""
        return self.builder.inttoptr(place, WORD.as_pointer())

    def load(self, place: Any, n: Any = 0) -> Any:
        """Return the word at an address, or the one so many words behind it."""
        return self.builder.load(self.pointer(self.at(place, n) if n else place))

    def status_at(self, place: Any) -> Any:
        """Return the half of a word at an address."""
        return self.builder.load(self.builder.inttoptr(place, STATUS.as_pointer()))

    def store(self, value: Any, place: Any, n: Any = 0) -> None:
        """Write a word there."""
        self.builder.store(value, self.pointer(self.at(place, n) if n else place))

    def add_alone(self, place: Any, n: int, value: Any) -> Any:
        """Add to a word that other threads add to, too; return what it was."""
        return self.builder.atomic_rmw("add", self.pointer(self.at(place, n)), value, "seq_cst")

    def row(self, rows: Any, n: Any, count: int) -> list[Any]:
        """Return the words of one of several rows of so many words."""
        first = self.at(rows, self.builder.mul(n, WORD(count)))
        return [self.load(first, column) for column in range(count)]

    def call(self, place: Any, result: Any, *values: Any) -> Any:
        """Return what a function at an address returns for words and statuses."""
        kind = ir.FunctionType(result, [value.type for value in values]).as_pointer()
        return self.builder.call(self.builder.inttoptr(place, kind), values)

    def python(self, name: str, result: Any, *values: Any) -> Any:
        """Return what a function of Python's C interface returns for words."""
        place = ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
        return self.call(WORD(place), result, *values)

    def loop(self, count: Any, body: Callable[[Any], Any]) -> None:
        """Emit a loop over the numbers below `count`, which ends if `body` returns what is true."""
        builder = self.builder
        before, head = builder.block, builder.append_basic_block()
        inner, end = builder.append_basic_block(), builder.append_basic_block()
        builder.branch(head)
        builder.position_at_end(head)
        n = builder.phi(WORD)
        n.add_incoming(WORD(0), before)
        builder.cbranch(builder.icmp_unsigned("<", n, count), inner, end)
        builder.position_at_end(inner)
        ends = body(n)
        following = self.add(n, WORD(1))
        n.add_incoming(following, builder.block)
        if ends is None:
            builder.branch(head)
        else:
            builder.cbranch(ends, end, head)
        builder.position_at_end(end)

    def told(
        self, arguments: Any, count: Any, of_array: Callable[[Any, Any], None] | None = None
    ) -> Any:
        """Return the address of the numbers that a builtin got; it ends if one is none.

        `of_array` emits what stores a number for an array, at an address.
        """
        builder = self.builder
        told = builder.ptrtoint(builder.alloca(WORD, size=count), WORD)

        def take(n: Any) -> None:
            value, place = self.load(self.at(arguments, n)), self.at(told, n)
            if of_array is None:
                take_number(value, place)
                return
            kind = self.load(self.add(value, WORD(TYPE)))
            is_array = builder.icmp_unsigned("==", kind, WORD(id(np.ndarray)))
            with builder.if_else(is_array) as (array, other):
                with array:
                    of_array(value, place)
                with other:
                    take_number(value, place)

        def take_number(value: Any, place: Any) -> None:
            self.store(self.python("PyLong_AsUnsignedLongLongMask", WORD, value), place)

        self.loop(count, take)
        raised = self.python("PyErr_Occurred", WORD)
        with builder.if_then(builder.icmp_unsigned("!=", raised, WORD(0))):
            builder.ret(WORD(0))
        return told

    def write(self, told: Any, rows: Any, count: Any, has_factors: bool = False) -> None:
        """Write numbers as rows say: where to, which of those told, and what is added to it.

        With factors, each row has a fourth word, by which the number is multiplied before.
        """

        def write(n: Any) -> None:
            place, number, added, *factors = self.row(rows, n, 4 if has_factors else 3)
            value = self.load(self.at(told, number))
            for factor in factors:
                value = self.builder.mul(value, factor)
            self.store(self.add(value, added), place)

        self.loop(count, write)


class _Definition(ctypes.Structure):
    """PyMethodDef of Python's methodobject.h."""

    _fields_ = (
        ("name", ctypes.c_char_p), ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int), ("doc", ctypes.c_char_p),
    )  # fmt: skip


_kept: list[_Definition] = []  # as long as the process


def builtin(name: str, written: Callable[[Emitter, Any, Any], Any]) -> Callable[..., Any]:
    """Return a builtin.

    `written` emits its body, given where its arguments are and how many, and returns the address of
    the object that the builtin returns.
    """

    def module_of(triple: str) -> ir.Module:
        module = ir.Module(name)
        module.triple = triple
        function = ir.Function(module, ir.FunctionType(WORD, [WORD] * 3), name)
        emit = Emitter(ir.IRBuilder(function.append_basic_block()))
        _, arguments, count = function.args
        emit.builder.ret(written(emit, arguments, count))
        return module

    place = compiled(module_of).get_function_address(name)
    definition = _Definition(name.encode(), place, _FASTCALL, None)
    _kept.append(definition)
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3
    made: Callable[..., Any] = new(ctypes.addressof(definition), None, None)
    return made
