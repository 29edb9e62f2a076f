"""What threads share of a kernel's call: its items, and memory of each thread.

Threads take chunks of items in order, by an atomic addition, until none is left. They run no
Python: what they share lies in words, and what they run is machine code. Whose threads these are,
is up to the caller: see `team` and `openmp`.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from .c_function import STATUS, WORD, Emitter
from .calls import FIRST, Bound
from .chain import Chain
from .float_modes import compiled
from .structs import Packed


class _Words(NamedTuple):
    """What threads share, as places of words."""

    items: int = 0
    chunk: int = 1  # items that a thread takes at once
    workers: int = 2
    caller: int = 3  # the address of a function that calls a kernel, given a block of a thread
    own: int = 4  # how many words of a thread's block its scratch takes, and where they begin
    begin: int = 5
    scratch: int = 6  # where those of all threads are
    next: int = 7  # the first item that nobody has taken
    entered: int = 8  # how many threads have come
    failed: int = 9
    blocks: int = 10  # of each thread


OF = _Words()


class Scratch:
    """Memory for the scratch of a call's threads: one call uses it at a time.

    Attributes
    ----------
    address : int
        Where its words are.
    nbytes : int
        How much it is.
    """

    __slots__ = ("_held", "address", "nbytes")

    def __init__(self, steps: Sequence[tuple[Bound | Chain, int]]) -> None:
        words: list[int] = []
        held: list[object] = []
        for kernel, workers in steps:
            for _ in range(workers):
                own, memory = kernel.scratch()
                words += own
                held.append(memory)
        block = (ctypes.c_int64 * max(1, len(words)))(*words)
        self.address, self._held = ctypes.addressof(block), (block, held)
        self.nbytes = _nbytes(held)


def _nbytes(held: Any) -> int:
    """Return the bytes of all arrays in lists, tuples and structures."""
    if isinstance(held, np.ndarray):
        return held.nbytes
    if isinstance(held, Packed):
        held = held.values
    return sum(map(_nbytes, held)) if isinstance(held, (list, tuple)) else 0


class Spares(list[Scratch]):
    """Scratch that no call uses, for all calls of some sizes."""

    __slots__ = ("__weakref__",)


_spares: weakref.WeakValueDictionary[Hashable, Spares] = weakref.WeakValueDictionary()


def spares_of(steps: Sequence[tuple[Bound | Chain, int]]) -> Spares:
    """Return the list of scratch for kernels, and how many threads share each."""
    key = tuple((kernel.scratch_key, workers) for kernel, workers in steps)
    found = _spares.get(key)
    if found is None:
        found = _spares[key] = Spares()
    return found


class Share:
    """A kernel's call that threads share, as a block of words.

    Attributes
    ----------
    words : array of ctypes
        The words; those of items are 0 yet.
    address : int
        Where they are.
    blocks : list
        Blocks of all threads: arguments of the kernel.
    workers, own : int
        How many threads there are, and how many words of scratch each has.
    spares : list of Scratch
        Scratch for it alone, that no call uses.
    """

    __slots__ = ("address", "blocks", "own", "spares", "words", "workers")

    def __init__(self, kernel: Bound | Chain, workers: int) -> None:
        caller, self.own, begin, self.blocks = kernel.blocks(workers)
        nothing = [0] * (OF.blocks - OF.scratch)
        of_blocks = [ctypes.addressof(block) for block in self.blocks]
        words = [0, 0, workers, caller, self.own, begin, *nothing, *of_blocks]
        self.words = (ctypes.c_int64 * len(words))(*words)
        self.address, self.workers = ctypes.addressof(self.words), workers
        self.spares: list[Scratch] = []


def _written(triple: str) -> ir.Module:
    """Return a module with `cupyflash_work` and `cupyflash_serve`."""
    module = ir.Module("cupyflash_shares")
    module.triple = triple
    void = ir.VoidType()
    work = ir.Function(module, ir.FunctionType(void, [WORD, WORD]), "cupyflash_work")
    emit = Emitter(ir.IRBuilder(work.append_basic_block()))
    builder = emit.builder
    step, n = work.args
    block = emit.load(emit.at(step, OF.blocks), n)
    own, begin, scratch = (emit.load(step, place) for place in (OF.own, OF.begin, OF.scratch))
    mine, to = emit.at(scratch, builder.mul(n, own)), emit.at(block, begin)
    emit.loop(own, lambda m: emit.store(emit.load(emit.at(mine, m)), emit.at(to, m)))
    items, chunk, caller = (emit.load(step, place) for place in (OF.items, OF.chunk, OF.caller))
    head, body = builder.append_basic_block(), builder.append_basic_block()
    failing, end = builder.append_basic_block(), builder.append_basic_block()
    builder.branch(head)
    builder.position_at_end(head)
    first = emit.add_alone(step, OF.next, chunk)
    goes_on = builder.icmp_unsigned("==", emit.load(step, OF.failed), WORD(0))
    goes_on = builder.and_(goes_on, builder.icmp_signed("<", first, items))
    builder.cbranch(goes_on, body, end)
    builder.position_at_end(body)
    last = emit.add(first, chunk)
    last = builder.select(builder.icmp_signed("<", last, items), last, items)
    emit.store(first, block, FIRST)
    emit.store(last, block, FIRST + 1)
    status = emit.call(caller, STATUS, block)
    builder.cbranch(builder.icmp_unsigned("!=", status, STATUS(0)), failing, head)
    builder.position_at_end(failing)
    emit.store(builder.zext(status, WORD), step, OF.failed)
    builder.branch(end)
    builder.position_at_end(end)
    builder.ret_void()

    serve = ir.Function(module, ir.FunctionType(void, [WORD]), "cupyflash_serve")
    emit = Emitter(ir.IRBuilder(serve.append_basic_block()))
    (step,) = serve.args
    n = emit.add_alone(step, OF.entered, WORD(1))
    helps = emit.builder.icmp_signed("<", n, emit.load(step, OF.workers))
    with emit.builder.if_then(helps):
        emit.builder.call(work, [step, n])
    emit.builder.ret_void()
    return module


@functools.cache
def functions() -> tuple[int, int]:
    """Return the addresses of what a thread does.

    The first is given a call's words and the thread's number. The second is given the words alone,
    takes the next number, and does nothing if all have been taken.
    """
    engine = compiled(_written)
    work, serve = (engine.get_function_address(f"cupyflash_{x}") for x in ("work", "serve"))
    return work, serve


def emit_begin(emit: Emitter, step: Any) -> None:
    """Emit what is done before threads come."""
    for place in (OF.next, OF.entered, OF.failed):
        emit.store(WORD(0), step, place)
