"""Makes a call over a cache again by one call of C, which looks at the arrays itself.

A small model in NumPy makes a call for every layer of every token, and between two of them its own
products use the CPU's caches: what Python then reads anew takes longer than the kernel runs. Here,
all that is done for a call that is like an earlier one is in a few cache lines.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from . import team
from .addresses import HEADER, KNOWN, address
from .c_function import TYPE, Emitter
from .decode_tasks import LEAF, LOG_LEAF
from .float_modes import compiled, emit_in_usual_modes
from .thread_limits import num_threads

Array = np.ndarray[Any, Any]

# Bytes from an object's header to what NumPy's C interface has of an array. Extensions that were
# compiled for it read these there, too.
DATA, _NDIM, _SHAPE, _STRIDES, _DTYPE, FLAGS = 0, 8, 16, 24, 40, 48
AXES = 4  # of queries, keys and values
ALIGNED = 0x100  # a flag
_WATCHED = ALIGNED | 0x400  # and writeable


class _Block(NamedTuple):
    """What the function of C is told of a call, as places of words."""

    taken: int = 0  # while a thread computes: the address of the output, as an object
    kind: int = 1  # the type of arrays
    leaves: int = 2  # of each entry
    capacity: int = 3  # positions
    lengths: int = 4  # the address of those of entries, and how many there are
    counters: int = 6  # words to set to 0: address and number
    visited: int = 8
    places: int = 10  # the addresses of the words for those of q, k, v and the output
    kernel: int = 14  # its address and its arguments
    grows: int = 21  # -1 if keys and values have as many rows as there are positions, else 0
    # The address of a first and a last key for each length with so many leaves, `NEVER` for a
    # length that this call is not for; 0 without a mask. Then the addresses of where they belong.
    ends: int = 22
    shared: int = 25  # what threads share of the kernel; 0 if the caller's runs it alone
    arrays: int = 26  # of q, k and v: dtype, flags, shape, strides


_AT = _Block()
_ARGUMENTS = _AT.grows - _AT.kernel - 1
_OF_ARRAY, _ROWS = 2 + 2 * AXES, 2 + AXES - 2  # words of an array, and the place of its rows there
_WORDS = _AT.arrays + 3 * _OF_ARRAY

_WORD, _HALF = ir.IntType(64), ir.IntType(32)
NEVER = -(2**63)
DONE = 1  # what the function returns if it has computed the call
READY = 2  # if it has told the kernel of the arrays; the block is taken
OTHERS = 1  # in place of the address of a share, for a call that the team never shares


def _word(place: int) -> int:
    return ctypes.c_int64.from_address(place).value


def _is_as_known() -> bool:
    """Return whether arrays are in memory as is said above, and no thread runs without the GIL."""
    if not KNOWN or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False
    sample = np.empty((2, 3), np.float32)
    place = id(sample) + HEADER
    shape, strides = (
        [_word(_word(place + at) + 8 * axis) for axis in range(2)] for at in (_SHAPE, _STRIDES)
    )
    return (
        _word(id(sample) + TYPE) == id(np.ndarray)
        and ctypes.c_int32.from_address(place + _NDIM).value == sample.ndim
        and (*shape, *strides) == (*sample.shape, *sample.strides)
        and _word(place + _DTYPE) == id(sample.dtype)
        and ctypes.c_int32.from_address(place + FLAGS).value == sample.flags.num
    )


IS_POSSIBLE = _is_as_known()


class _Emitter:
    """Emits the function. All values are words."""

    def __init__(self, builder: Any, otherwise: Any) -> None:
        self.builder, self._otherwise = builder, otherwise

    def load(self, place: Any, offset: int = 0, kind: Any = _WORD) -> Any:
        """Return what is at an address."""
        if offset:
            place = self.builder.add(place, _WORD(offset))
        return self.builder.load(self.builder.inttoptr(place, kind.as_pointer()))

    def store(self, value: Any, place: Any) -> None:
        """Write a word at an address."""
        self.builder.store(value, self.builder.inttoptr(place, _WORD.as_pointer()))

    def goes_on_if(self, condition: Any) -> None:
        """Go to `otherwise` unless a condition holds."""
        following = self.builder.append_basic_block()
        self.builder.cbranch(condition, following, self._otherwise)
        self.builder.position_at_end(following)

    def fill(self, place: Any, count: Any, value: Any) -> None:
        """Write a word so many times, once at least."""
        builder = self.builder
        before, body = builder.block, builder.append_basic_block()
        following = builder.append_basic_block()
        builder.branch(body)
        builder.position_at_end(body)
        n = builder.phi(_WORD)
        n.add_incoming(_WORD(0), before)
        self.store(value, builder.add(place, builder.shl(n, _WORD(3))))
        after = builder.add(n, _WORD(1))
        n.add_incoming(after, body)
        builder.cbranch(builder.icmp_signed("<", after, count), body, following)
        builder.position_at_end(following)


def _check_array(
    emit: _Emitter, block: Any, place: int, array: Any, kind: Any, rows: Any = None
) -> None:
    """Go on only for an array like the one that a block describes from a word on.

    `rows` returns how many rows it has, given those of the one that is described.
    """
    builder = emit.builder
    emit.goes_on_if(builder.icmp_unsigned("==", emit.load(array, TYPE), kind))
    ndim = emit.load(array, HEADER + _NDIM, _HALF)
    emit.goes_on_if(builder.icmp_unsigned("==", ndim, _HALF(AXES)))
    flags = builder.zext(emit.load(array, HEADER + FLAGS, _HALF), _WORD)
    came = [emit.load(array, HEADER + _DTYPE), builder.and_(flags, _WORD(_WATCHED))]
    for of in (_SHAPE, _STRIDES):
        first = emit.load(array, HEADER + of)
        came += [emit.load(first, 8 * axis) for axis in range(AXES)]
    differ = _WORD(0)
    for n, value in enumerate(came):
        known = emit.load(block, 8 * (place + n))
        if rows is not None and n == _ROWS:
            known = rows(known)
        differ = builder.or_(differ, builder.xor(value, known))
    emit.goes_on_if(builder.icmp_unsigned("==", differ, _WORD(0)))


def _written(triple: str) -> ir.Module:
    """Return a module with the function.

    It takes the address of a block, q, k and v, the length of all entries, and the output, which is
    new. It has the GIL until the kernel begins.
    """
    name = "cupyflash_repeat"
    module = ir.Module(name)
    module.triple = triple
    function = ir.Function(module, ir.FunctionType(_HALF, [_WORD] * 6), name)
    builder = ir.IRBuilder(function.append_basic_block())
    otherwise = function.append_basic_block()
    emit = _Emitter(builder, otherwise)
    block, *arrays, length, out = function.args

    def known(place: int) -> Any:
        return emit.load(block, 8 * place)

    kind, grows = known(_AT.kind), known(_AT.grows)

    def rows(described: Any) -> Any:
        differ = builder.and_(builder.xor(described, length), grows)
        return builder.xor(described, differ)

    for n, array in enumerate(arrays):
        place = _AT.arrays + n * _OF_ARRAY
        _check_array(emit, block, place, array, kind, rows if n else None)
    leaves = builder.ashr(builder.add(length, _WORD(LEAF - 1)), _WORD(LOG_LEAF))
    emit.goes_on_if(builder.icmp_signed("==", leaves, known(_AT.leaves)))
    emit.goes_on_if(builder.icmp_signed("<=", length, known(_AT.capacity)))
    ends, pair = known(_AT.ends), [builder.alloca(_WORD) for _ in range(2)]
    has_ends = builder.icmp_unsigned("!=", ends, _WORD(0))
    with builder.if_then(has_ends):
        number = builder.and_(builder.sub(length, _WORD(1)), _WORD(LEAF - 1))
        of_length = builder.add(ends, builder.shl(number, _WORD(4)))
        for n, place in enumerate(pair):
            builder.store(emit.load(of_length, 8 * n), place)
        emit.goes_on_if(builder.icmp_signed("!=", builder.load(pair[0]), _WORD(NEVER)))
    taken = builder.inttoptr(builder.add(block, _WORD(8 * _AT.taken)), _WORD.as_pointer())
    before = builder.cmpxchg(taken, _WORD(0), out, "seq_cst", "seq_cst")
    emit.goes_on_if(builder.extract_value(before, 1))
    for n, array in enumerate((*arrays, out)):
        emit.store(emit.load(array, HEADER + DATA), known(_AT.places + n))
    for place, value in ((_AT.lengths, length), (_AT.counters, 0), (_AT.visited, 0)):
        word = value if isinstance(value, ir.Value) else _WORD(value)
        emit.fill(known(place), known(place + 1), word)
    with builder.if_then(has_ends):
        for n, place in enumerate(pair):
            emit.store(builder.load(place), known(_AT.ends + 1 + n))
    share = known(_AT.shared)
    with builder.if_then(builder.icmp_unsigned("!=", share, _WORD(0))):
        _emit_shared(builder, share, taken)
    called, *values = (known(_AT.kernel + n) for n in range(1 + _ARGUMENTS))
    of_kernel = ir.FunctionType(_HALF, [_WORD] * _ARGUMENTS).as_pointer()
    python = Emitter(builder).python
    thread = python("PyEval_SaveThread", _WORD)
    status = emit_in_usual_modes(
        module, builder, lambda: builder.call(builder.inttoptr(called, of_kernel), values)
    )
    python("PyEval_RestoreThread", ir.VoidType(), thread)
    builder.fence("seq_cst")
    builder.store(_WORD(0), taken)
    builder.ret(builder.add(status, _HALF(DONE)))
    builder.position_at_end(otherwise)
    builder.ret(_HALF(0))
    return module


def _emit_shared(builder: Any, share: Any, taken: Any) -> None:
    """Emit what computes a call by the team, or returns `READY` if another call has that."""
    emit = Emitter(builder)
    if not team.IS_POSSIBLE:
        builder.ret(_HALF(READY))
        return
    for is_other in (
        lambda: builder.icmp_unsigned("==", share, _WORD(OTHERS)),
        lambda: builder.not_(team.emit_take(emit)),
    ):
        with builder.if_then(is_other()):
            builder.ret(_HALF(READY))
    thread = emit.python("PyEval_SaveThread", _WORD)
    failed = team.emit_region(emit, share)
    emit.python("PyEval_RestoreThread", ir.VoidType(), thread)
    builder.fence("seq_cst")
    builder.store(_WORD(0), taken)
    builder.ret(builder.add(builder.trunc(failed, _HALF), _HALF(DONE)))


@functools.cache
def _function() -> Callable[..., int]:
    """Return the function, which holds the GIL while it looks at arrays."""
    array = ctypes.py_object
    kind = ctypes.PYFUNCTYPE(
        ctypes.c_int32, ctypes.c_int64, array, array, array, ctypes.c_int64, array
    )
    return kind(compiled(_written).get_function_address("cupyflash_repeat"))


class Repeat(NamedTuple):
    """A call that can be made again: ``run(block, q, k, v, length, out)``.

    `run` returns `DONE`, or something else if it has computed nothing, or not everything: the
    arrays or the length differ from those that it was made for, or another thread uses it. A length
    is that of all entries, and has as many leaves as the one that it was made for.

    Attributes
    ----------
    run : callable
        The function of C, which takes arrays as they are, or what calls it.
    block : int
        Its first argument.
    shape, dtype
        Of the output, which is new and contiguous.
    held : object
        What addresses in the block belong to.
    """

    run: Callable[..., int]
    block: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    held: object


def repeat(
    arrays: Sequence[Array],
    out: Array,
    lengths: Array,
    capacity: int,
    zeros: Sequence[Array],
    places: Sequence[int],
    kernel: Sequence[int],
    held: object,
    grows: bool,
    ends: tuple[Array, Array, Array] | None = None,
    share: Callable[[object], None] | None = None,
    shared: int = OTHERS,
    may_share: bool = False,
) -> Repeat:
    """Return a call that can be made again.

    Parameters
    ----------
    arrays : sequence of array
        Queries, keys and values as they came.
    out : array
        An output for them.
    lengths : array of int64
        Where the kernel reads how many keys entries have; now those that the call is made for.
    capacity : int
        The largest number of them.
    zeros : (array, array)
        What the kernel expects to be 0, of int64.
    places : sequence of int
        The addresses of the words that the addresses of q, k, v and the output belong in.
    kernel : sequence of int
        The address of the kernel, and the words that it takes.
    held : object
        What addresses belong to, apart from those of the arrays above.
    grows : bool
        Whether keys and values have as many rows as there are positions.
    ends : (array, array, array), optional
        Of int64: the first and the last key of the query for each length, (LEAF, 2), in which the
        first is `NEVER` for a length that the call is not for; and where the kernel reads both.
    share : callable, optional
        Runs the kernel by several threads, where the team does not; gets what holds the arrays.
    shared : int
        The address of what the team's threads share otherwise.
    may_share : bool
        Whether it depends on the number of threads that it is made for.
    """
    block = (ctypes.c_int64 * _WORDS)()
    block[_AT.kind], block[_AT.shared] = id(np.ndarray), 0 if share is None else shared
    block[_AT.grows] = -1 if grows else 0
    if ends is not None:
        block[_AT.ends : _AT.ends + 3] = [address(x) for x in ends]
    block[_AT.leaves], block[_AT.capacity] = (int(lengths[0]) + LEAF - 1) >> LOG_LEAF, capacity
    for place, array in zip(
        (_AT.lengths, _AT.counters, _AT.visited), (lengths, *zeros), strict=True
    ):
        block[place], block[place + 1] = address(array), array.size
    block[_AT.places : _AT.places + len(places)] = list(places)
    block[_AT.kernel : _AT.kernel + len(kernel)] = list(kernel)
    for n, array in enumerate(arrays):
        begin = _AT.arrays + n * _OF_ARRAY
        words = [
            _word(id(array) + HEADER + _DTYPE), array.flags.num & _WATCHED, *array.shape,
            *array.strides,
        ]  # fmt: skip
        block[begin : begin + len(words)] = words
    dtypes = [array.dtype for array in arrays]
    kept = held, block, lengths, zeros, dtypes, ends
    run = _shared(block, share) if may_share else _function()
    return Repeat(run, ctypes.addressof(block), out.shape, out.dtype, kept)


def _shared(block: Any, share: Callable[[object], None] | None) -> Callable[..., int]:
    """Return the function for a call whose kernel several threads run, where there are several."""
    begin, taken, threads = _function(), _AT.taken, num_threads()

    def run(place: int, *arrays: Any) -> int:
        if num_threads() != threads:
            return 0
        out = id(arrays[-1])
        try:
            status = begin(place, *arrays)  # a signal may come before the status is known
            if status == READY:
                assert share is not None
                share(arrays)
                status = DONE
        finally:
            if block[taken] == out:
                block[taken] = 0
        return status

    return run
