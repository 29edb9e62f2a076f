"""Makes a call again by one function of machine code, which is told where its arrays are.

A model makes short calls between its own products, which use the CPU's caches: what Python then
reads anew takes longer than the kernels run. So a call whose kernels reach all arrays in place is
laid out once, as a block of words: what is written where, and which kernels run on how many
threads. These are OpenMP's of another library (see `openmp`), which then run no Python, or the
caller alone.

A call takes a few hundredths of a second at most, so that Ctrl-C soon takes effect.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from . import openmp
from .addresses import HEADER
from .c_function import STATUS, WORD, Emitter, builtin
from .calls import FIRST, Bound
from .repeat import ALIGNED, DATA, FLAGS, IS_POSSIBLE
from .structs import Packed
from .thread_limits import num_threads
from .threads import chunks, may_share, workers_for

OWN = ""  # the name of an address in memory of the call's own
DONE, NOT_NOW = 0, 1  # what `run` returns; more if a kernel has failed


class _Block(NamedTuple):
    """What `run` is told of a call, as places of words."""

    values: int = 0  # how many numbers are written, arrays set to 0, and steps
    zeros: int = 1
    steps: int = 2
    workers: int = 3  # the fewest of a step that several threads share; 0 if there is none
    process: int = 4  # the one whose threads may be used
    getpid: int = 5  # addresses of functions
    size: int = 6
    level: int = 7
    region: int = 8
    rows: int = 9  # four words a number, two an array to set to 0, one a step


class _Step(NamedTuple):
    """What the threads of a step share, as places of words."""

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


_AT, _OF = _Block(), _Step()
_MEMSET = ctypes.cast(ctypes.memset, ctypes.c_void_p).value


class Step(NamedTuple):
    """A part of a call.

    Attributes
    ----------
    kernel : Bound
        A kernel with its arguments.
    items : int
        How many items it computes.
    work : float
        About how many seconds one thread takes for them.
    last : str or None
        The name of the address of its last argument, an array, if that differs from call to call.
    """

    kernel: Bound
    items: int
    work: float
    last: str | None = None


class Value(NamedTuple):
    """A word to write: where, which of the numbers told it is, what is added, and a factor."""

    place: int
    name: str
    added: int = 0
    factor: int = 1


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

    def __init__(self, steps: Sequence[tuple[Bound, int]]) -> None:
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


class _Spares(list[Scratch]):
    """Scratch that no call uses, for all calls of some sizes."""

    __slots__ = ("__weakref__",)


_spares: weakref.WeakValueDictionary[Hashable, _Spares] = weakref.WeakValueDictionary()


class Placed:
    """A call that can be made again at other addresses.

    Parameters
    ----------
    steps : sequence of Step
        What computes it, in order.
    values : sequence of Value
        The addresses that are written before.
    zeros : sequence of array
        Arrays that are set to 0 before.
    names : sequence of str
        The order in which addresses and other numbers are told.
    held : object
        What addresses in `values` belong to.

    Attributes
    ----------
    run, block : callable, int
        ``run(block, scratch.address, own, *addresses)`` returns `DONE`, or `NOT_NOW` if it has
        computed nothing, because the threads cannot be used here. `own` is the address of memory
        for a result that nobody wants. Instead of an address, it takes an array of NumPy's, if
        `repeat.IS_POSSIBLE`; it returns `NOT_NOW` if that is not aligned.
    spares : list of Scratch
        Scratch for it. Who takes one puts it back.
    is_shared : bool
        Whether OpenMP's threads of another library compute it, too.
    threads : int
        For how many threads it was made; 0 if it does not depend on that.
    names : tuple of str
        As above.
    nbytes : int
        Memory that it keeps.
    """

    __slots__ = (
        "_held", "_steps", "block", "is_shared", "names", "nbytes", "run", "spares", "threads",
    )  # fmt: skip

    def __init__(
        self,
        steps: Sequence[Step],
        values: Sequence[Value],
        zeros: Sequence[Any],
        names: Sequence[str],
        held: object = None,
    ) -> None:
        self.names = tuple(names)
        steps = [step for step in steps if step.items]
        workers = [workers_for(step.items, step.work) for step in steps]
        self.threads = num_threads() if any(may_share(step.work) for step in steps) else 0
        shared = [count for count in workers if count > 1]
        head = [0] * _AT.rows
        head[_AT.workers] = min(shared, default=0)
        self.is_shared = bool(shared)
        if shared:
            head[_AT.process : _AT.rows] = openmp.functions() or ()
        number = {name: n for n, name in enumerate((OWN, *names), 1)}  # first comes scratch's
        rows = [(place, number[name], *rest) for place, name, *rest in values]
        kept: list[object] = [steps, zeros, held]
        places = []
        offset = 0
        for step, count in zip(steps, workers, strict=True):
            caller, own, begin, blocks = step.kernel.blocks(count)
            chunk = step.items if count == 1 else chunks(step.items, count, step.work)[0]
            of_blocks = [ctypes.addressof(x) for x in blocks]
            nothing = [0] * (_OF.blocks - _OF.scratch)
            words = [step.items, chunk, count, caller, own, begin, *nothing, *of_blocks]
            shares = (ctypes.c_int64 * len(words))(*words)
            if step.last is not None:
                last = 8 * step.kernel.place_of_last
                rows += [(place + last, number[step.last], 0, 1) for place in of_blocks]
            places.append(ctypes.addressof(shares))
            rows.append((places[-1] + 8 * _OF.scratch, 0, 8 * offset, 1))
            offset += own * count
            kept += [shares, blocks]
        of_zeros = [(x.ctypes.data, x.nbytes) for x in zeros]
        head[: _AT.workers] = len(rows), len(of_zeros), len(places)
        flat = [*head, *_flat(rows), *_flat(of_zeros), *places]
        block = (ctypes.c_int64 * len(flat))(*flat)
        key = tuple((step.kernel.scratch_key, n) for step, n in zip(steps, workers, strict=True))
        spares = _spares.get(key)
        if spares is None:
            spares = _spares[key] = _Spares()
        self.run, self.block, self.spares = _function(), ctypes.addressof(block), spares
        self._steps = [(step.kernel, n) for step, n in zip(steps, workers, strict=True)]
        self._held = kept, block
        self.nbytes = 8 * len(flat)

    def scratch(self) -> Scratch:
        """Return scratch for the call."""
        return Scratch(self._steps)


def _nbytes(held: Any) -> int:
    """Return the bytes of all arrays in lists, tuples and structures."""
    if isinstance(held, np.ndarray):
        return held.nbytes
    if isinstance(held, Packed):
        held = held.values
    return sum(map(_nbytes, held)) if isinstance(held, (list, tuple)) else 0


def _flat(rows: Sequence[Sequence[int]]) -> list[int]:
    return [word for row in rows for word in row]


@functools.cache
def _function() -> Callable[..., int]:
    """Return ``run(block, scratch, *addresses)``: see `Placed`."""
    return builtin("cupyflash_run", _written)


def _written(emit: Emitter, arguments: Any, count: Any) -> Any:
    """Emit the function. It has the GIL until the first kernel begins."""
    builder = emit.builder
    work, serve = _emit_threads(builder.module)
    aligned = builder.alloca(WORD)
    builder.store(WORD(ALIGNED), aligned)

    def of_array(array: Any, place: Any) -> None:
        emit.store(emit.load(emit.add(array, WORD(HEADER + DATA))), place)
        flags = builder.zext(emit.status_at(emit.add(array, WORD(HEADER + FLAGS))), WORD)
        builder.store(builder.and_(builder.load(aligned), flags), aligned)

    told = emit.told(arguments, count, of_array if IS_POSSIBLE else None)
    is_unlike = builder.icmp_unsigned("==", builder.load(aligned), WORD(0))
    with builder.if_then(is_unlike):
        builder.ret(emit.python("PyLong_FromUnsignedLongLong", WORD, WORD(NOT_NOW)))
    block = emit.load(told)

    def known(place: int) -> Any:
        return emit.load(block, place)

    workers = known(_AT.workers)
    size = builder.alloca(WORD)
    builder.store(WORD(0), size)
    with builder.if_then(builder.icmp_unsigned("!=", workers, WORD(0))):
        _emit_conditions(emit, known, workers, size)
    values, zeros, steps = (known(place) for place in (_AT.values, _AT.zeros, _AT.steps))
    rows = emit.at(block, _AT.rows)
    emit.write(emit.at(told, 1), rows, values, has_factors=True)
    rows = emit.at(rows, builder.mul(values, WORD(4)))

    def clear(n: Any) -> None:
        place, nbytes = emit.row(rows, n, 2)
        emit.call(WORD(_MEMSET), WORD, place, STATUS(0), nbytes)

    emit.loop(zeros, clear)
    first = emit.at(rows, builder.mul(zeros, WORD(2)))
    status = builder.alloca(WORD)
    builder.store(WORD(DONE), status)
    thread = emit.python("PyEval_SaveThread", WORD)

    def compute(n: Any) -> Any:
        step = emit.load(emit.at(first, n))
        for place in (_OF.next, _OF.entered, _OF.failed):
            emit.store(WORD(0), step, place)
        is_alone = builder.icmp_unsigned("==", emit.load(step, _OF.workers), WORD(1))
        with builder.if_else(is_alone) as (alone, together):
            with alone:
                builder.call(work, [step, WORD(0)])
            with together:
                flags, threads = STATUS(0), builder.trunc(builder.load(size), STATUS)
                served = builder.ptrtoint(serve, WORD)
                emit.call(known(_AT.region), ir.VoidType(), served, step, threads, flags)
        failed = emit.load(step, _OF.failed)
        builder.store(builder.shl(failed, WORD(8)), status)
        return builder.icmp_unsigned("!=", failed, WORD(0))

    emit.loop(steps, compute)
    emit.python("PyEval_RestoreThread", ir.VoidType(), thread)
    return emit.python("PyLong_FromUnsignedLongLong", WORD, builder.load(status))


def _emit_conditions(emit: Emitter, known: Callable[[int], Any], workers: Any, size: Any) -> None:
    """Emit what returns `NOT_NOW` where `openmp.is_worth` is false, and stores a region's size."""
    builder = emit.builder
    process = emit.call(known(_AT.getpid), STATUS)
    threads = emit.call(known(_AT.size), STATUS)
    level = emit.call(known(_AT.level), STATUS)
    is_own = builder.icmp_unsigned("==", builder.zext(process, WORD), known(_AT.process))
    is_outside = builder.icmp_signed("==", level, STATUS(0))
    wide = builder.sext(threads, WORD)
    several = builder.icmp_signed(">", wide, WORD(1))
    few = builder.icmp_signed("<=", wide, builder.shl(workers, WORD(1)))
    may = builder.and_(builder.and_(is_own, is_outside), builder.and_(several, few))
    with builder.if_then(builder.not_(may)):
        builder.ret(emit.python("PyLong_FromUnsignedLongLong", WORD, WORD(NOT_NOW)))
    builder.store(wide, size)


def _emit_threads(module: ir.Module) -> tuple[ir.Function, ir.Function]:
    """Emit what a thread does, given a step and its number, and what OpenMP's threads call."""
    void = ir.VoidType()
    work = ir.Function(module, ir.FunctionType(void, [WORD, WORD]), "cupyflash_work")
    emit = Emitter(ir.IRBuilder(work.append_basic_block()))
    builder = emit.builder
    step, n = work.args
    block = emit.load(emit.at(step, _OF.blocks), n)
    own, begin, scratch = (emit.load(step, place) for place in (_OF.own, _OF.begin, _OF.scratch))
    mine, to = emit.at(scratch, builder.mul(n, own)), emit.at(block, begin)
    emit.loop(own, lambda m: emit.store(emit.load(emit.at(mine, m)), emit.at(to, m)))
    items, chunk, caller = (emit.load(step, place) for place in (_OF.items, _OF.chunk, _OF.caller))
    head, body = builder.append_basic_block(), builder.append_basic_block()
    failing, end = builder.append_basic_block(), builder.append_basic_block()
    builder.branch(head)
    builder.position_at_end(head)
    first = emit.add_alone(step, _OF.next, chunk)
    goes_on = builder.icmp_unsigned("==", emit.load(step, _OF.failed), WORD(0))
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
    emit.store(builder.zext(status, WORD), step, _OF.failed)
    builder.branch(end)
    builder.position_at_end(end)
    builder.ret_void()

    serve = ir.Function(module, ir.FunctionType(void, [WORD]), "cupyflash_serve")
    emit = Emitter(ir.IRBuilder(serve.append_basic_block()))
    (step,) = serve.args
    n = emit.add_alone(step, _OF.entered, WORD(1))
    helps = emit.builder.icmp_signed("<", n, emit.load(step, _OF.workers))
    with emit.builder.if_then(helps):
        emit.builder.call(work, [step, n])
    emit.builder.ret_void()
    return work, serve
