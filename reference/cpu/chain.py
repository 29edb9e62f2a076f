"""Kernels that compute the same items, one after the other.

A thread that takes items runs all kernels for a few of them, then for the next few, so that each
kernel finds in the caches what the one before has read. To `threads`, `team` and `placed`, a chain
is like one kernel.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Hashable
from typing import Any

from llvmlite import ir

from .c_function import STATUS, WORD, Emitter
from .calls import FIRST, Bound
from .float_modes import compiled

# Words of a chain's block: its own, and so many of each kernel.
_EVERY, _COUNT, _HEAD, _OF_KERNEL = FIRST + 2, FIRST + 3, FIRST + 4, 4


class Chain:
    """Some kernels with their arguments: ``chain(first, last)`` computes items with each of them.

    Parameters
    ----------
    *kernels : Bound
        The kernels, in their order.
    every : int
        For how many items a kernel runs before the next one does.
    """

    def __init__(self, *kernels: Bound, every: int) -> None:
        self._kernels, self._every = kernels, every
        self.shares: list[Any] = []  # as those of `Bound`

    def __call__(self, first: int, last: int) -> None:
        """Compute the items from `first` to `last`, without the latter."""
        for begin in range(first, last, self._every):
            for kernel in self._kernels:
                kernel(begin, min(begin + self._every, last))

    def failed(self, status: int) -> RuntimeError:
        """Return the error of one of the kernels, which returned what is not 0."""
        names = ", ".join(kernel.name for kernel in self._kernels)
        return RuntimeError(f"one of the CPU kernels {names} stopped with status {status}")

    def blocks(self, count: int) -> tuple[int, int, int, list[Any]]:
        """Return blocks of threads and what to know of them: see `Bound.blocks`."""
        made = [kernel.blocks(count) for kernel in self._kernels]
        begin, own = _HEAD + _OF_KERNEL * len(made), sum(x[1] for x in made)
        blocks = []
        for n in range(count):
            rows = [(caller, size, at, inner[n]) for caller, size, at, inner in made]
            words = [
                word
                for caller, size, at, inner in rows
                for word in (caller, size, at, ctypes.addressof(inner))
            ]
            head = *[0] * _EVERY, self._every, len(made)
            block: Any = (ctypes.c_int64 * (begin + own))(*head, *words)
            block.inner = [inner for *_, inner in rows]  # whose addresses it has
            blocks.append(block)
        return _function(), own, begin, blocks

    def scratch(self) -> tuple[list[int], object]:
        """Return scratch of a thread for all kernels, one after the other."""
        made = [kernel.scratch() for kernel in self._kernels]
        return [word for words, _ in made for word in words], [held for _, held in made]

    @property
    def scratch_key(self) -> Hashable:
        """Equal for chains that can use the same scratch."""
        keys = [key for kernel in self._kernels if (key := kernel.scratch_key) is not None]
        return id(self) if any(isinstance(key, int) for key in keys) else tuple(keys)


def _written(triple: str) -> ir.Module:
    """Return a module with a function that is given a block, and returns a status."""
    module = ir.Module("cupyflash_chain")
    module.triple = triple
    function = ir.Function(module, ir.FunctionType(STATUS, [WORD]), "cupyflash_chain")
    emit = Emitter(ir.IRBuilder(function.append_basic_block()))
    builder, (block,) = emit.builder, function.args
    count, rows = emit.load(block, _COUNT), emit.at(block, _HEAD)
    first, last, every = (emit.load(block, place) for place in (FIRST, FIRST + 1, _EVERY))
    scratch, status = builder.alloca(WORD), builder.alloca(STATUS)
    builder.store(emit.at(rows, builder.mul(count, WORD(_OF_KERNEL))), scratch)
    builder.store(STATUS(0), status)

    def give(n: Any) -> None:
        _, own, begin, inner = emit.row(rows, n, _OF_KERNEL)
        mine, to = builder.load(scratch), emit.at(inner, begin)
        emit.loop(own, lambda m: emit.store(emit.load(emit.at(mine, m)), emit.at(to, m)))
        builder.store(emit.at(mine, own), scratch)

    emit.loop(count, give)

    def run_all(turn: Any) -> Any:
        begin = emit.add(first, builder.mul(turn, every))
        end = emit.add(begin, every)
        end = builder.select(builder.icmp_signed("<", end, last), end, last)

        def run(n: Any) -> Any:
            caller, _, _, inner = emit.row(rows, n, _OF_KERNEL)
            emit.store(begin, inner, FIRST)
            emit.store(end, inner, FIRST + 1)
            found = emit.call(caller, STATUS, inner)
            builder.store(found, status)
            return builder.icmp_unsigned("!=", found, STATUS(0))

        emit.loop(count, run)
        return builder.icmp_unsigned("!=", builder.load(status), STATUS(0))

    items = emit.add(builder.sub(last, first), builder.sub(every, WORD(1)))
    emit.loop(builder.udiv(items, every), run_all)
    builder.ret(builder.load(status))
    return module


@functools.cache
def _function() -> int:
    """Return the address of what runs the kernels of a block."""
    return int(compiled(_written).get_function_address("cupyflash_chain"))
