"""How Python calls kernels: by their addresses, with words as arguments."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from .float_modes import compiled, emit_in_usual_modes
from .jit import Kernel, pointer_of, signature
from .structs import ArrayForm, Packed, Struct


@functools.cache
def _caller(words: int) -> Any:
    """Return a function of C that calls a kernel with so many arguments.

    It takes a block: the kernel's address, and then its arguments. It releases the GIL, and the
    kernel runs in the usual floating-point modes. To convert thirty numbers would take ctypes
    longer than a small kernel runs.
    """
    name, word = f"cupyflash_call_{words}", ir.IntType(64)

    def written(triple: str) -> ir.Module:
        module = ir.Module(name)
        module.triple = triple
        kind = ir.FunctionType(ir.IntType(32), [word] * words).as_pointer()
        function = ir.Function(module, ir.FunctionType(ir.IntType(32), [word.as_pointer()]), name)
        builder = ir.IRBuilder(function.append_basic_block())
        kernel, *values = (
            builder.load(builder.gep(function.args[0], [word(n)])) for n in range(1 + words)
        )
        builder.ret(
            emit_in_usual_modes(
                module, builder, lambda: builder.call(builder.inttoptr(kernel, kind), values)
            )
        )
        return module

    engine = compiled(written)
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
    return kind(engine.get_function_address(name))


@functools.cache
def _forms(compiled: Kernel, number: np.dtype[Any]) -> list[Struct | ArrayForm | None]:
    """Return how a kernel's arguments after `first` and `last` become words."""
    forms: list[Struct | ArrayForm | None] = []
    for kind in signature(compiled, number)[2:]:
        array = ArrayForm(kind) if isinstance(kind, types.Array) else None
        forms.append(kind if isinstance(kind, Struct) else array)
    return forms


def _in_words(forms: list[Struct | ArrayForm | None], values: Any) -> tuple[list[int], object]:
    """Return arguments as the words that a kernel takes for them, and what those belong to."""
    words: list[int] = []
    held: list[object] = []
    for form, value in zip(forms, values, strict=True):
        if form is None:
            words.append(value)
        elif isinstance(form, ArrayForm):
            place, *lengths = form.words(value)
            # Owner, parent, size, bytes of an element, address, lengths, strides.
            words += [0, 0, value.size, value.itemsize, place, *lengths, *value.strides]
            held.append(value)
        else:
            packed = value if isinstance(value, Packed) else Packed(form, value)
            words.append(packed.address)
            held.append(packed)
    return words, held


@functools.lru_cache(maxsize=12)
def _shared_spares(
    compiled: Kernel,
    number: np.dtype[Any],
    sizes: Hashable,
) -> list[tuple[list[int], object]]:
    """Return a list for the scratch of threads that have finished, for calls of some sizes."""
    return []


def no_scratch() -> tuple[Any, ...]:
    """Return the scratch of a kernel that needs none."""
    return ()


_RESULTS, FIRST = 1, 3  # places in a block: of the addresses for results, of the first item


class Bound:
    """A kernel with its arguments: ``bound(first, last)`` computes items `first` to `last`.

    It holds the arrays whose addresses the kernel gets. When a thread has finished a chunk, its
    scratch memory is kept for the next chunk, and with `sizes` for the next call.

    Parameters
    ----------
    compiled : Kernel
        A kernel that `prepare` has compiled.
    number : dtype
        The accumulator that it computes in.
    *arguments
        Its arguments after `first` and `last`. Structures may be named tuples, or `Packed`, which
        may be changed between calls.
    scratch : callable
        Makes its last arguments, separately for each thread.
    sizes : hashable, optional
        All that the scratch depends on, besides the kernel and the number. Where it is given, later
        calls of the same sizes use the same memory: making it takes longer than a small call.
    """

    def __init__(
        self,
        compiled: Kernel,
        number: np.dtype[Any],
        *arguments: Any,
        scratch: Callable[[], tuple[Any, ...]] = no_scratch,
        sizes: Hashable = None,
    ) -> None:
        forms = _forms(compiled, number)
        self._own_forms, self._last = forms[len(arguments) :], forms[len(arguments) - 1]
        words, self._held = _in_words(forms[: len(arguments)], arguments)
        self.name = compiled.__name__
        # The kernel's address; those for a value and an error; the first and the last item.
        self._words = [pointer_of(compiled, number), 0, 0, 0, 0, *words]
        self._blocks: list[Any] = []  # that no thread uses
        self.shares: list[Any] = []  # what threads share of a call, for `team`; no call uses them
        self._call: Any = None
        self._new_scratch = scratch
        # Made anew for a call of other sizes, so that a call that is kept holds none.
        self._spares = None if sizes is None else (compiled, number, sizes)
        self._spare: list[tuple[list[int], object]] = []

    def __call__(self, first: int, last: int) -> None:
        """Compute the items from `first` to `last`, without the latter."""
        spare = self._spare if self._spares is None else _shared_spares(*self._spares)
        try:
            own = spare.pop()
        except IndexError:
            own = self.scratch()
        try:
            block = self._blocks.pop()
        except IndexError:
            block = self._new_block(len(own[0]))
        block[FIRST], block[FIRST + 1] = first, last
        begin = len(self._words)
        block[begin : begin + len(own[0])] = own[0]
        status = self._call(block)
        if status:
            raise self.failed(status)
        self._blocks.append(block)
        spare.append(own)

    def failed(self, status: int) -> RuntimeError:
        """Return the error of a kernel that returned what is not 0."""
        return RuntimeError(f"the CPU kernel {self.name} stopped with status {status}")

    def blocks(self, count: int) -> tuple[int, int, int, list[Any]]:
        """Return blocks of threads, for which scratch is to come, and what to know of them.

        That is the address of a function that takes a block, how many words of it scratch takes,
        and where these begin.
        """
        # As `_in_words` has them.
        arrays = [form for form in self._own_forms if isinstance(form, ArrayForm)]
        own = len(self._own_forms) + sum(4 + 2 * form.ndim for form in arrays)
        blocks = [self._new_block(own) for _ in range(count)]
        caller = ctypes.cast(self._call, ctypes.c_void_p).value or 0
        return caller, own, len(self._words), blocks

    def scratch(self) -> tuple[list[int], object]:
        """Return scratch of a thread as the words that the kernel takes, and what holds it."""
        return _in_words(self._own_forms, self._new_scratch())

    @property
    def place_of_last(self) -> int:
        """Where a block has the address of the last argument before scratch, an array."""
        form = self._last
        assert isinstance(form, ArrayForm), "there is one"
        return len(self._words) - 2 * int(form.ndim) - 1

    @property
    def scratch_key(self) -> Hashable:
        """Equal for kernels that can use the same scratch."""
        return id(self) if self._spares is None and self._own_forms else self._spares

    def words_of(self, first: int, last: int) -> tuple[list[int], object]:
        """Return the kernel's address and all that it takes for some items, with scratch for it.

        The second object holds what the words are addresses of.
        """
        own, held = self.scratch()
        results = (ctypes.c_int64 * 2)()
        place = ctypes.addressof(results)
        kernel, *words = self._words
        words[:4] = place, place + 8, first, last
        return [kernel, *words, *own], (results, held, self)

    def _new_block(self, own: int) -> Any:
        count = len(self._words) + own
        block = (ctypes.c_int64 * (count + 2))(*self._words)  # with room for the results
        place = ctypes.addressof(block) + 8 * count
        block[_RESULTS], block[_RESULTS + 1] = place, place + 8
        self._call = _caller(count - 1)
        return block
