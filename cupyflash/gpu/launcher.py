"""Makes the launches of a call by one function of machine code, which Python calls as a builtin.

By ctypes, each launch would take Python's way to the driver: it makes objects of C's numbers and
looks for how each argument is passed. A thread that begins to run, such as that of an engine of
derivatives, has none of this in its caches. Here, a block of words says what is launched, and what
values are to be written where before, such as addresses in parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

# Words of a block: how many launches and values there are, and the driver's function. Then come the
# launches, each the addresses of its configuration, kernel and pointers to parameters; and the
# values, each the address where it is written, its number among those told, and what is added.
_LAUNCHES, _VALUES, _DRIVER, _FIRST, _EACH = 0, 1, 2, 3, 3
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


def _written(emit: Any, arguments: Any, count: Any) -> Any:
    """Emit the function."""
    from llvmlite import ir

    builder, word = emit.builder, emit.word
    told = emit.told(arguments, count)
    block = emit.load(told)
    launches, values, driver = (emit.load(block, n) for n in (_LAUNCHES, _VALUES, _DRIVER))
    first = emit.at(block, _FIRST)
    rows = emit.at(first, builder.mul(launches, word(_EACH)))
    emit.write(emit.at(told, 1), rows, values)
    failed = builder.alloca(word)
    builder.store(word(0), failed)
    # A launch may wait until the device has room for it, and for another thread.
    thread = emit.python("PyEval_SaveThread", word)

    def launch(n: Any) -> Any:
        status = emit.call(driver, emit.status, *emit.row(first, n, _EACH), word(0))
        fails = builder.icmp_unsigned("!=", status, emit.status(0))
        error = builder.or_(builder.shl(n, word(_ERROR_BITS)), builder.zext(status, word))
        builder.store(builder.select(fails, error, word(0)), failed)
        return fails

    emit.loop(launches, launch)
    emit.python("PyEval_RestoreThread", ir.VoidType(), thread)
    return emit.python("PyLong_FromUnsignedLongLong", word, builder.load(failed))


@functools.cache
def launch() -> Launch:
    """Return the function: ``launch(block, *values)``.

    It takes the address of a block, writes the values, makes the launches, and returns 0; or the
    error's number of the first launch that failed, plus 2**32 times the launch's number. Whoever
    calls it keeps others from the block until then.
    """
    from cupyflash.reference.cpu.c_function import builtin

    return builtin("cupyflash_launch", _written)
