"""Calls CUDA's driver by one function of machine code, which Python calls as a builtin.

By ctypes, each launch would take Python's way to the driver: it makes objects of C's numbers and
looks for how each argument is passed. A thread that begins to run, such as that of an engine of
derivatives, has none of this in its caches. Here, a block of words says which functions are called
with which words, and what values are to be written where before, such as addresses in parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

# Words of a block: how many calls and values there are. Then come the calls, each the address of a
# function and its arguments; and the values, each the address where it is written, its number among
# those told, and what is added.
_CALLS, _VALUES, _FIRST = 0, 1, 2
ARGUMENTS = 4  # of a call; a function that takes fewer of them does not look at the others
_CALL, _VALUE = 1 + ARGUMENTS, 3
_ERROR_BITS = 32

Block = np.ndarray[Any, np.dtype[np.uint64]]
Launch = Callable[..., int]


def block(
    calls: Sequence[Sequence[int]],
    values: Iterable[tuple[int, int, int]],
    arguments: Iterable[tuple[int, int, int, int]] = (),
) -> Block:
    """Return a block.

    Parameters
    ----------
    calls : sequence of sequence of int
        The address of each function, and its arguments.
    values : iterable of (int, int, int)
        Where a value is written, its number, and what is added.
    arguments : iterable of (int, int, int, int)
        Likewise for an argument: the number of its call, and its own number.
    """
    values, arguments = list(values), list(arguments)
    made = np.zeros(_FIRST + _CALL * len(calls) + _VALUE * len(values + arguments), np.uint64)
    first = made.ctypes.data + 8 * _FIRST
    places = [
        (first + 8 * (call * _CALL + 1 + argument), number, added)
        for call, argument, number, added in arguments
    ]
    rows = [(*call, *(0,) * (_CALL - len(call))) for call in calls]
    head = len(calls), len(values + arguments)
    words = [word for row in (head, *rows, *values, *places) for word in row]
    made[:] = [word % 2**64 for word in words]
    return made


def _written(emit: Any, arguments: Any, count: Any) -> Any:
    """Emit the function."""
    from llvmlite import ir

    builder, word = emit.builder, emit.word
    told = emit.told(arguments, count)
    block = emit.load(told)
    calls, values = (emit.load(block, n) for n in (_CALLS, _VALUES))
    first = emit.at(block, _FIRST)
    rows = emit.at(first, builder.mul(calls, word(_CALL)))
    emit.write(emit.at(told, 1), rows, values)
    failed = builder.alloca(word)
    builder.store(word(0), failed)
    # A launch may wait until the device has room for it, and for another thread.
    thread = emit.python("PyEval_SaveThread", word)

    def call(n: Any) -> Any:
        function, *arguments = emit.row(first, n, _CALL)
        status = emit.call(function, emit.status, *arguments)
        fails = builder.icmp_unsigned("!=", status, emit.status(0))
        error = builder.or_(builder.shl(n, word(_ERROR_BITS)), builder.zext(status, word))
        builder.store(builder.select(fails, error, word(0)), failed)
        return fails

    emit.loop(calls, call)
    emit.python("PyEval_RestoreThread", ir.VoidType(), thread)
    return emit.python("PyLong_FromUnsignedLongLong", word, builder.load(failed))


@functools.cache
def launch() -> Launch:
    """Return the function: ``launch(block, *values)``.

    It takes the address of a block, writes the values, makes the calls, and returns 0; or what the
    first function returned that did not return 0, plus 2**32 times the call's number. Whoever calls
    it keeps others from the block until then.
    """
    from cupyflash.reference.cpu.c_function import builtin

    return builtin("cupyflash_launch", _written)
