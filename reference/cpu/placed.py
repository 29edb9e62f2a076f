"""Makes a call again by one function of machine code, which is told where its arrays are.

A model makes short calls between its own products, which use the CPU's caches: what Python then
reads anew takes longer than the kernels run. So a call whose kernels reach all arrays in place is
laid out once, as a block of words: what is written where, and which kernels run on how many
threads. These are the team's, or OpenMP's of another library (see `openmp`), or the caller alone.

A call takes a few hundredths of a second at most, so that Ctrl-C soon takes effect.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from . import openmp, team
from .addresses import HEADER
from .c_function import STATUS, WORD, Emitter, builtin
from .calls import Bound
from .chain import Chain
from .repeat import ALIGNED, DATA, FLAGS, IS_POSSIBLE
from .shares import OF, Scratch, Share, emit_begin, functions, spares_of
from .thread_limits import num_threads
from .threads import chunks, may_share, workers_for

OWN = ""  # the name of an address in memory of the call's own
DONE, NOT_NOW = 0, 1  # what `run` returns; more if a kernel has failed


class _Block(NamedTuple):
    """What `run` is told of a call, as places of words."""

    values: int = 0  # how many numbers are written, arrays set to 0, and steps
    zeros: int = 1
    steps: int = 2
    workers: int = 3  # the fewest of a step that OpenMP's threads share; 0 if there is none
    process: int = 4  # the one whose threads may be used
    getpid: int = 5  # addresses of functions
    size: int = 6
    level: int = 7
    region: int = 8
    by_team: int = 9  # 1 if the team shares a step
    rows: int = 10  # four words a number, two an array to set to 0, one a step


_AT = _Block()
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

    kernel: Bound | Chain
    items: int
    work: float
    last: str | None = None


class Value(NamedTuple):
    """A word to write: where, which of the numbers told it is, what is added, and a factor."""

    place: int
    name: str
    added: int = 0
    factor: int = 1


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
    by_team : bool
        Whether the team shares steps, or else threads of OpenMP.

    Attributes
    ----------
    run, block : callable, int
        ``run(block, scratch.address, own, *addresses)`` returns `DONE`, or `NOT_NOW` if it has
        computed nothing, because the threads cannot be used here. `own` is the address of memory
        for a result that nobody wants. Instead of an address, it takes an array of NumPy's, if
        `repeat.IS_POSSIBLE`; it returns `NOT_NOW` if that is not aligned.
    spares : list of Scratch
        Scratch for it. Who takes one puts it back.
    by_team : bool or None
        As above, None if the caller computes it alone.
    threads : int
        For how many threads it was made; 0 if it does not depend on that.
    names : tuple of str
        As above.
    nbytes : int
        Memory that it keeps.
    """

    __slots__ = (
        "_held", "_steps", "block", "by_team", "names", "nbytes", "run", "spares", "threads",
    )  # fmt: skip

    def __init__(
        self,
        steps: Sequence[Step],
        values: Sequence[Value],
        zeros: Sequence[Any],
        names: Sequence[str],
        held: object = None,
        by_team: bool = True,
    ) -> None:
        self.names = tuple(names)
        steps = [step for step in steps if step.items]
        workers = [workers_for(step.items, step.work) for step in steps]
        self.threads = num_threads() if any(may_share(step.work) for step in steps) else 0
        shared = [count for count in workers if count > 1]
        head = [0] * _AT.rows
        self.by_team = by_team if shared else None
        if self.by_team:
            head[_AT.by_team] = 1
            team.grow(max(shared) - 1)
        elif shared:
            head[_AT.workers] = min(shared)
            head[_AT.process : _AT.by_team] = openmp.functions() or ()
        number = {name: n for n, name in enumerate((OWN, *names), 1)}  # first comes scratch's
        rows = [(place, number[name], *rest) for place, name, *rest in values]
        kept: list[object] = [steps, zeros, held]
        places = []
        offset = 0
        for step, count in zip(steps, workers, strict=True):
            share = Share(step.kernel, count)
            chunk = step.items if count == 1 else chunks(step.items, count, step.work)[0]
            share.words[OF.items], share.words[OF.chunk] = step.items, chunk
            if step.last is not None:
                assert isinstance(step.kernel, Bound)
                last = 8 * step.kernel.place_of_last
                of_blocks = map(ctypes.addressof, share.blocks)
                rows += [(place + last, number[step.last], 0, 1) for place in of_blocks]
            places.append(share.address)
            rows.append((share.address + 8 * OF.scratch, 0, 8 * offset, 1))
            offset += share.own * count
            kept.append(share)
        of_zeros = [(x.ctypes.data, x.nbytes) for x in zeros]
        head[: _AT.workers] = len(rows), len(of_zeros), len(places)
        flat = [*head, *_flat(rows), *_flat(of_zeros), *places]
        block = (ctypes.c_int64 * len(flat))(*flat)
        self._steps = [(step.kernel, n) for step, n in zip(steps, workers, strict=True)]
        self.run, self.block = _function(), ctypes.addressof(block)
        self.spares = spares_of(self._steps)
        self._held = kept, block
        self.nbytes = 8 * len(flat)

    def scratch(self) -> Scratch:
        """Return scratch for the call."""
        return Scratch(self._steps)


def _flat(rows: Sequence[Sequence[int]]) -> list[int]:
    return [word for row in rows for word in row]


@functools.cache
def _function() -> Callable[..., int]:
    """Return ``run(block, scratch, *addresses)``: see `Placed`."""
    return builtin("cupyflash_run", _written)


def _written(emit: Emitter, arguments: Any, count: Any) -> Any:
    """Emit the function. It has the GIL until the first kernel begins."""
    builder = emit.builder
    work, serve = map(WORD, functions())
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
    by_team = builder.icmp_unsigned("!=", known(_AT.by_team), WORD(0))
    with builder.if_then(by_team), builder.if_then(builder.not_(team.emit_is_free(emit))):
        builder.ret(emit.python("PyLong_FromUnsignedLongLong", WORD, WORD(NOT_NOW)))
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
        emit_begin(emit, step)
        is_alone = builder.icmp_unsigned("==", emit.load(step, OF.workers), WORD(1))
        with builder.if_else(is_alone) as (alone, together):
            with alone:
                emit.call(work, ir.VoidType(), step, WORD(0))
            with together, builder.if_else(by_team) as (ours, theirs):
                with ours:
                    _emit_by_team(emit, work, step)
                with theirs:
                    flags, threads = STATUS(0), builder.trunc(builder.load(size), STATUS)
                    emit.call(known(_AT.region), ir.VoidType(), serve, step, threads, flags)
        failed = emit.load(step, OF.failed)
        builder.store(builder.shl(failed, WORD(8)), status)
        return builder.icmp_unsigned("!=", failed, WORD(0))

    emit.loop(steps, compute)
    emit.python("PyEval_RestoreThread", ir.VoidType(), thread)
    return emit.python("PyLong_FromUnsignedLongLong", WORD, builder.load(status))


def _emit_by_team(emit: Emitter, work: Any, step: Any) -> None:
    """Emit what computes a step by the team, or alone if another call has just taken that."""
    if not team.IS_POSSIBLE:
        return
    with emit.builder.if_else(team.emit_take(emit)) as (took, alone):
        with took:
            team.emit_region(emit, step)
        with alone:
            emit.call(work, ir.VoidType(), step, WORD(0))


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
