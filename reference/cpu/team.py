"""Threads of our own for short calls, which wait for the next call awake for a while.

To wake a thread that sleeps takes from 20 us to some hundreds on a virtual machine, and a call of
few queries takes no longer. So these threads look for the next call for `AWAKE` after one, and give
their cores to any other thread that is ready to run. Then they sleep. They run no Python.

The caller works, too, and waits for no thread that has not come: if one wakes up late, others have
done its part. One call uses the team at a time; other callers are told that they cannot.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import sys
import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from llvmlite import ir

from .c_function import STATUS, WORD, Emitter, builtin
from .calls import Bound
from .chain import Chain
from .float_modes import compiled
from .shares import OF, Scratch, Share, emit_begin, functions

AWAKE = 300_000  # nanoseconds
_POLLS = 16  # looks between two offers of the core to other threads
_PATIENCE = 4096  # looks of the caller for helpers that have come, before it offers its core

_MACHINE = platform.machine().lower()
# The number of Linux's system call, and what it does: wait, or wake, among threads of a process.
_FUTEX = {"x86_64": 202, "amd64": 202, "aarch64": 98, "arm64": 98}.get(_MACHINE)
_WAIT, _WAKE = 128, 129
_MONOTONIC = 1
IS_POSSIBLE = sys.platform == "linux" and _FUTEX is not None

DONE, NOT_NOW = 0, 1


class _Block(NamedTuple):
    """What the team shares, as places of words; each is written by others, so has its own line."""

    turn: int = 0  # how many calls there have been; threads sleep on it
    taken: int = 8  # 1 while a call uses the team
    open: int = 16  # how many more helpers may come
    left: int = 24  # how many helpers have come and gone
    asleep: int = 32
    helpers: int = 40  # how many there are
    serve: int = 48  # the address of what helpers call, and what they give it
    data: int = 49
    words: int = 56


AT = _Block()


class _Emitter(Emitter):
    """Emits what threads do with words that others write at the same time."""

    def seen(self, block: Any, place: int) -> Any:
        """Return a word as it is now."""
        return self.builder.load_atomic(self.pointer(self.at(block, place)), "seq_cst", 8)

    def show(self, value: Any, block: Any, place: int) -> None:
        """Write a word that others see, after all that was written before."""
        self.builder.store_atomic(value, self.pointer(self.at(block, place)), "seq_cst", 8)

    def took(self, block: Any, place: int, before: Any, after: Any) -> Any:
        """Return whether a word was still `before`; then it is `after`."""
        pointer = self.pointer(self.at(block, place))
        found = self.builder.cmpxchg(pointer, before, after, "seq_cst", "seq_cst")
        return self.builder.extract_value(found, 1)

    def pause(self) -> None:
        """Let the core's other thread go first, where processors have a hint for that."""
        if _MACHINE in ("x86_64", "amd64"):
            name, module = "llvm.x86.sse2.pause", self.builder.module
            kind = ir.FunctionType(ir.VoidType(), [])
            self.builder.call(module.globals.get(name) or ir.Function(module, kind, name), [])

    def of_libc(self, name: str, result: Any, *values: Any) -> Any:
        """Return what a function of the C library returns."""
        return self.call(WORD(_address_in_libc(name)), result, *values)

    def now(self, pair: Any) -> Any:
        """Return the time, in nanoseconds, given the address of two words for it."""
        self.of_libc("clock_gettime", STATUS, STATUS(_MONOTONIC), pair)
        seconds = self.builder.mul(self.load(pair), WORD(1_000_000_000))
        return self.add(seconds, self.load(pair, 1))

    def offer(self) -> None:
        """Offer the core to other threads that are ready to run."""
        self.of_libc("sched_yield", STATUS)

    def futex(self, block: Any, what: int, number: Any) -> None:
        """Sleep as long as `turn` has a number, or wake so many threads."""
        word = WORD(_FUTEX or 0), self.at(block, AT.turn), WORD(what), number
        self.of_libc("syscall", WORD, *word, WORD(0), WORD(0), WORD(0))

    def blocks(self, count: int) -> list[Any]:
        """Return blocks of instructions that are yet empty."""
        return [self.builder.append_basic_block() for _ in range(count)]


@functools.cache
def _address_in_libc(name: str) -> int:
    found = ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value
    assert found is not None, "Linux has this function"
    return found


def _emit_region(module: ir.Module) -> None:
    """Emit what a caller calls, who has the team: its words, a function, its data, and threads."""
    kind = ir.FunctionType(ir.VoidType(), [WORD] * 4)
    function = ir.Function(module, kind, "cupyflash_region")
    emit = _Emitter(ir.IRBuilder(function.append_basic_block()))
    builder = emit.builder
    team, serve, data, threads = function.args
    wanted = builder.sub(threads, WORD(1))
    emit.store(serve, team, AT.serve)
    emit.store(data, team, AT.data)
    emit.store(WORD(0), team, AT.left)
    emit.show(wanted, team, AT.open)
    emit.add_alone(team, AT.turn, WORD(1))
    asleep = emit.seen(team, AT.asleep)
    with builder.if_then(builder.icmp_signed(">", asleep, WORD(0))):
        emit.futex(team, _WAKE, wanted)
    emit.call(serve, ir.VoidType(), data)

    pointer = emit.pointer(emit.at(team, AT.open))
    came = builder.sub(wanted, builder.atomic_rmw("xchg", pointer, WORD(0), "seq_cst"))
    before, head, looks, offers, end = builder.block, *emit.blocks(4)
    builder.branch(head)
    builder.position_at_end(head)
    n = builder.phi(WORD)
    n.add_incoming(WORD(0), before)
    gone = builder.icmp_unsigned("==", emit.seen(team, AT.left), came)
    builder.cbranch(gone, end, looks)
    builder.position_at_end(looks)
    emit.pause()
    following = emit.add(n, WORD(1))
    n.add_incoming(following, looks)
    is_patient = builder.icmp_unsigned("<", n, WORD(_PATIENCE))
    builder.cbranch(is_patient, head, offers)
    builder.position_at_end(offers)
    emit.offer()
    n.add_incoming(following, offers)
    builder.branch(head)
    builder.position_at_end(end)
    emit.show(WORD(0), team, AT.taken)
    builder.ret_void()


def _emit_help(module: ir.Module) -> None:
    """Emit what a helper does for ever, given the team's words."""
    kind = ir.FunctionType(ir.VoidType(), [WORD])
    function = ir.Function(module, kind, "cupyflash_help")
    emit = _Emitter(ir.IRBuilder(function.append_basic_block()))
    builder = emit.builder
    (team,) = function.args
    last, begin, looks = (builder.alloca(WORD) for _ in range(3))
    pair = builder.ptrtoint(builder.alloca(WORD, size=2), WORD)
    builder.store(WORD(0), last)
    wakes, polls, waits, offers, sleeps, comes, enters, works = emit.blocks(8)
    builder.branch(wakes)

    builder.position_at_end(wakes)
    builder.store(emit.now(pair), begin)
    builder.store(WORD(0), looks)
    builder.branch(polls)

    builder.position_at_end(polls)
    turn = emit.seen(team, AT.turn)
    is_old = builder.icmp_unsigned("==", turn, builder.load(last))
    builder.cbranch(is_old, waits, comes)

    builder.position_at_end(waits)
    emit.pause()
    looked = emit.add(builder.load(looks), WORD(1))
    builder.store(looked, looks)
    few = builder.icmp_unsigned("!=", builder.urem(looked, WORD(_POLLS)), WORD(0))
    builder.cbranch(few, polls, offers)

    builder.position_at_end(offers)
    emit.offer()
    waited = builder.sub(emit.now(pair), builder.load(begin))
    builder.cbranch(builder.icmp_unsigned("<", waited, WORD(AWAKE)), polls, sleeps)

    builder.position_at_end(sleeps)
    emit.add_alone(team, AT.asleep, WORD(1))
    emit.futex(team, _WAIT, builder.load(last))  # it returns at once if there is a new turn
    emit.add_alone(team, AT.asleep, WORD(-1))
    builder.branch(wakes)

    builder.position_at_end(comes)
    builder.store(turn, last)
    builder.branch(enters)

    builder.position_at_end(enters)
    places = emit.seen(team, AT.open)
    may = builder.icmp_signed(">", places, WORD(0))
    tries = builder.append_basic_block()
    builder.cbranch(may, tries, wakes)
    builder.position_at_end(tries)
    took = emit.took(team, AT.open, places, builder.sub(places, WORD(1)))
    builder.cbranch(took, works, enters)

    builder.position_at_end(works)
    serve, data = emit.load(team, AT.serve), emit.load(team, AT.data)
    emit.call(serve, ir.VoidType(), data)
    emit.add_alone(team, AT.left, WORD(1))
    builder.branch(wakes)


def _written(triple: str) -> ir.Module:
    """Return a module with the functions of helpers and of callers."""
    module = ir.Module("cupyflash_team")
    module.triple = triple
    _emit_region(module)
    _emit_help(module)
    return module


class _Team:
    """The team of this process.

    Attributes
    ----------
    block : int
        The address of its words.
    region : int
        That of a function, ``region(block, serve, data, threads)``, for who has taken the team.
    """

    def __init__(self) -> None:
        engine = compiled(_written)
        words = (ctypes.c_int64 * (AT.words + 8))()
        for each in (engine, words):  # helpers use them until the process ends
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        self.block = (ctypes.addressof(words) + 63) // 64 * 64  # a cache line
        self.region = engine.get_function_address("cupyflash_region")
        helps = engine.get_function_address("cupyflash_help")
        self._help = ctypes.CFUNCTYPE(None, ctypes.c_int64)(helps)
        self._helpers = ctypes.c_int64.from_address(self.block + 8 * AT.helpers)
        self._growing = threading.RLock()  # a signal's handler may make calls, too

    def grow(self, size: int) -> None:
        """Have so many helpers, or as many as can be started."""
        if self._helpers.value >= size:
            return
        with self._growing, contextlib.suppress(RuntimeError):
            while self._helpers.value < size:
                name = f"cupyflash-team-{self._helpers.value}"
                helper = threading.Thread(
                    target=self._help, args=(self.block,), name=name, daemon=True
                )
                helper.start()
                self._helpers.value += 1

    def forget(self) -> None:
        """Have no helpers: a forked child has none of its parent's."""
        self._growing = threading.RLock()
        ctypes.memset(self.block, 0, 8 * AT.words)


_making = threading.RLock()


@functools.cache
def _made() -> _Team | None:
    return _Team() if IS_POSSIBLE else None


def of_process() -> _Team | None:
    """Return the team of this process, or None where there can be none."""
    if _made.cache_info().currsize:
        return _made()
    with _making:  # two threads at once would make two teams
        return _made()


def grow(size: int) -> None:
    """Let the team have so many helpers."""
    team = of_process()
    if team is not None:
        team.grow(size)


def _forget() -> None:
    global _making
    _making = threading.RLock()
    team = _made() if _made.cache_info().currsize else None
    if team is not None:
        team.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def emit_take(emit: Emitter) -> Any:
    """Emit what takes the team, unless it has no helpers, or another call has it."""
    own, builder, found = _Emitter(emit.builder), emit.builder, of_process()
    assert found is not None
    team = WORD(found.block)
    has_helpers = builder.icmp_signed(">", own.seen(team, AT.helpers), WORD(0))
    never = WORD(-1)
    return own.took(team, AT.taken, builder.select(has_helpers, WORD(0), never), WORD(1))


def emit_is_free(emit: Emitter) -> Any:
    """Emit what looks whether the team has helpers, and no call has it; return that."""
    own, builder, found = _Emitter(emit.builder), emit.builder, of_process()
    if found is None:
        return ir.IntType(1)(0)
    has_helpers = builder.icmp_signed(">", own.seen(WORD(found.block), AT.helpers), WORD(0))
    is_free = builder.icmp_unsigned("==", own.seen(WORD(found.block), AT.taken), WORD(0))
    return builder.and_(has_helpers, is_free)


def emit_region(emit: Emitter, share: Any) -> Any:
    """Emit what computes a share, for who has taken the team; return what has failed, or 0."""
    team = of_process()
    assert team is not None
    emit_begin(emit, share)
    _, serve = functions()
    workers = emit.load(share, OF.workers)
    emit.call(WORD(team.region), ir.VoidType(), WORD(team.block), WORD(serve), share, workers)
    return emit.load(share, OF.failed)


def _written_together(emit: Emitter, arguments: Any, count: Any) -> Any:
    """Emit ``together(share, scratch)``. It has the GIL until the kernel begins."""
    builder = emit.builder
    told = emit.told(arguments, count)
    share, scratch = emit.load(told), emit.load(told, 1)
    with builder.if_then(builder.not_(emit_take(emit))):
        builder.ret(emit.python("PyLong_FromUnsignedLongLong", WORD, WORD(NOT_NOW)))
    emit.store(scratch, share, OF.scratch)
    thread = emit.python("PyEval_SaveThread", WORD)
    failed = emit_region(emit, share)
    emit.python("PyEval_RestoreThread", ir.VoidType(), thread)
    status = builder.shl(failed, WORD(8))
    return emit.python("PyLong_FromUnsignedLongLong", WORD, status)


@functools.cache
def _together() -> Callable[..., int]:
    return builtin("cupyflash_together", _written_together)


@functools.lru_cache(maxsize=12)
def _spares(key: Hashable) -> list[Scratch]:
    """Return the scratch that no call uses, for calls of some sizes."""
    return []


def compute(kernel: Bound | Chain, items: int, workers: int, chunk: int) -> bool:
    """Compute a kernel's items by this thread and the team's; return whether it could be done.

    No signal interrupts it.
    """
    team = of_process()
    if team is None:
        return False
    team.grow(workers - 1)
    try:
        share = kernel.shares.pop()
    except IndexError:
        share = None
    if share is None or share.workers != workers:
        share = Share(kernel, workers)
    share.words[OF.items], share.words[OF.chunk] = items, chunk
    key = kernel.scratch_key
    spares = _spares((key, workers)) if isinstance(key, tuple) else share.spares
    try:
        scratch = spares.pop()
    except IndexError:
        scratch = Scratch([(kernel, workers)])
    status = _together()(share.address, scratch.address)
    spares.append(scratch)
    kernel.shares.append(share)
    if status > NOT_NOW:
        raise kernel.failed(status >> 8)
    return status == DONE


def shared(
    kernel: Bound | Chain, items: int, workers: int, chunk: int
) -> tuple[int, object] | None:
    """Return the address of a share with scratch of its own, and what holds both.

    None if there is no team.
    """
    team = of_process()
    if team is None:
        return None
    team.grow(workers - 1)
    share, scratch = Share(kernel, workers), Scratch([(kernel, workers)])
    share.words[OF.items], share.words[OF.chunk] = items, chunk
    share.words[OF.scratch] = scratch.address
    return share.address, (share, scratch)
