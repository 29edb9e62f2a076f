"""Makes the launches of a call by one function of machine code, which Python calls as a builtin.

By ctypes, each launch would take Python's way to the driver: it makes objects of C's numbers and
looks for how each argument is passed. A thread that begins to run, such as that of an engine of
derivatives, has none of this in its caches. Here, a block of words says what is launched, and what
values are to be written where before, such as addresses in parameters.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

# Words of a block: how many launches and values there are, and the driver's function. Then come the
# launches, each the addresses of its configuration, kernel and pointers to parameters; and the
# values, each the address where it is written, its number among those told, and what is added.
_LAUNCHES, _VALUES, _DRIVER, _FIRST, _EACH = 0, 1, 2, 3, 3
_FASTCALL = 0x80  # METH_FASTCALL of Python's methodobject.h
_ERROR_BITS = 32

Launch = Callable[..., int]


def block(
    function: int,
    launches: Sequence[tuple[int, int, int]],
    values: Iterable[tuple[int, int, int]],
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return a block for the driver's function at an address."""
    rows = [*launches, *values]
    head = len(launches), len(rows) - len(launches), function
    words = [word for row in (head, *rows) for word in row]
    return np.array([word % 2**64 for word in words], np.uint64)


class _Emitter:
    """Emits machine code. All values are words."""

    def __init__(self, builder: Any) -> None:
        from llvmlite import ir

        self.ir, self.builder = ir, builder
        self.word, self.status = ir.IntType(64), ir.IntType(32)

    def add(self, a: Any, b: Any) -> Any:
        """Return a sum."""
        return self.builder.add(a, b)

    def at(self, place: Any, n: Any) -> Any:
        """Return the address of a word behind another one."""
        return self.add(place, self.builder.mul(n, self.word(8)))

    def load(self, place: Any) -> Any:
        """Return the word at an address."""
        return self.builder.load(self.builder.inttoptr(place, self.word.as_pointer()))

    def store(self, value: Any, place: Any) -> None:
        """Write a word at an address."""
        self.builder.store(value, self.builder.inttoptr(place, self.word.as_pointer()))

    def row(self, rows: Any, n: Any) -> list[Any]:
        """Return the words of one of several rows."""
        first = self.at(rows, self.builder.mul(n, self.word(_EACH)))
        return [self.load(self.at(first, self.word(column))) for column in range(_EACH)]

    def call(self, place: Any, result: Any, *values: Any) -> Any:
        """Return what a function at an address returns for words."""
        kind = self.ir.FunctionType(result, [self.word] * len(values)).as_pointer()
        return self.builder.call(self.builder.inttoptr(place, kind), values)

    def python(self, name: str, result: Any, *values: Any) -> Any:
        """Return what a function of Python's C interface returns for words."""
        place = ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
        return self.call(self.word(place), result, *values)

    def loop(self, count: Any, body: Callable[[Any], Any]) -> None:
        """Emit a loop over the numbers below `count`, which ends if `body` returns what is true."""
        builder = self.builder
        before, head = builder.block, builder.append_basic_block()
        inner, end = builder.append_basic_block(), builder.append_basic_block()
        builder.branch(head)
        builder.position_at_end(head)
        n = builder.phi(self.word)
        n.add_incoming(self.word(0), before)
        builder.cbranch(builder.icmp_unsigned("<", n, count), inner, end)
        builder.position_at_end(inner)
        ends = body(n)
        following = self.add(n, self.word(1))
        n.add_incoming(following, builder.block)
        if ends is None:
            builder.branch(head)
        else:
            builder.cbranch(ends, end, head)
        builder.position_at_end(end)


def _module(triple: str) -> Any:
    """Return a module with the function, of the type of Python's `METH_FASTCALL`."""
    from llvmlite import ir

    module, word = ir.Module("cupyflash_launcher"), ir.IntType(64)
    module.triple = triple
    function = ir.Function(module, ir.FunctionType(word, [word] * 3), "cupyflash_launch")
    builder = ir.IRBuilder(function.append_basic_block())
    emit = _Emitter(builder)
    _, arguments, count = function.args
    told = builder.ptrtoint(builder.alloca(word, size=count), word)

    def take(n: Any) -> None:
        value = emit.load(emit.at(arguments, n))
        number = emit.python("PyLong_AsUnsignedLongLongMask", word, value)
        emit.store(number, emit.at(told, n))

    emit.loop(count, take)
    raised = emit.python("PyErr_Occurred", word)
    with builder.if_then(builder.icmp_unsigned("!=", raised, word(0))):
        builder.ret(word(0))
    block = emit.load(told)
    launches, values, driver = (
        emit.load(emit.at(block, word(n))) for n in (_LAUNCHES, _VALUES, _DRIVER)
    )
    first = emit.at(block, word(_FIRST))
    rows = emit.at(first, builder.mul(launches, word(_EACH)))

    def write(n: Any) -> None:
        place, number, added = emit.row(rows, n)
        value = emit.load(emit.at(told, emit.add(number, word(1))))  # behind the block
        emit.store(emit.add(value, added), place)

    emit.loop(values, write)
    failed = builder.alloca(word)
    builder.store(word(0), failed)
    # A launch may wait until the device has room for it, and for another thread.
    thread = emit.python("PyEval_SaveThread", word)

    def launch(n: Any) -> Any:
        status = emit.call(driver, emit.status, *emit.row(first, n), word(0))
        fails = builder.icmp_unsigned("!=", status, emit.status(0))
        error = builder.or_(builder.shl(n, word(_ERROR_BITS)), builder.zext(status, word))
        builder.store(builder.select(fails, error, word(0)), failed)
        return fails

    emit.loop(launches, launch)
    emit.python("PyEval_RestoreThread", ir.VoidType(), thread)
    builder.ret(emit.python("PyLong_FromUnsignedLongLong", word, builder.load(failed)))
    return module


class _Definition(ctypes.Structure):
    """PyMethodDef of Python's methodobject.h."""

    _fields_ = (
        ("name", ctypes.c_char_p), ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int), ("doc", ctypes.c_char_p),
    )  # fmt: skip


_kept: list[_Definition] = []  # as long as the process


@functools.cache
def launch() -> Launch:
    """Return the function: ``launch(block, *values)``.

    It takes the address of a block, writes the values, makes the launches, and returns 0; or the
    error's number of the first launch that failed, plus 2**32 times the launch's number. Whoever
    calls it keeps others from the block until then.
    """
    from cupyflash.reference.cpu.float_modes import compiled

    place = compiled(_module).get_function_address("cupyflash_launch")
    definition = _Definition(b"cupyflash_launch", place, _FASTCALL, None)
    _kept.append(definition)
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3
    made: Launch = new(ctypes.addressof(definition), None, None)
    return made
