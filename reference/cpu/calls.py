"""How Python calls kernels: by their addresses, with words as arguments."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from numba import types

from .jit import Kernel, pointer_of, signature
from .structs import ArrayForm, Packed, Struct


@functools.cache
def _entry(pointer: int, words: int) -> Any:
    """Return the function at an address, which takes two results and then `words` words.

    Numba's functions return a status; their first arguments are the addresses for a value and an
    error. ctypes releases the GIL while they run.
    """
    results = ctypes.c_void_p, ctypes.c_void_p
    return ctypes.CFUNCTYPE(ctypes.c_int32, *results, *(ctypes.c_int64,) * words)(pointer)


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
            packed = Packed(form, value)
            words.append(packed.address)
            held.append(packed)
    return words, held


@functools.lru_cache(maxsize=4)
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
        Its arguments after `first` and `last`. Structures may be named tuples.
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
        self._own_forms = forms[len(arguments) :]
        self._words, self._held = _in_words(forms[: len(arguments)], arguments)
        self._name, self._pointer = compiled.__name__, pointer_of(compiled, number)
        self._scratch = scratch
        self._spare = [] if sizes is None else _shared_spares(compiled, number, sizes)

    def __call__(self, first: int, last: int) -> None:
        """Compute the items from `first` to `last`, without the latter."""
        try:
            own = self._spare.pop()
        except IndexError:
            own = _in_words(self._own_forms, self._scratch())
        results = (ctypes.c_int64 * 2)()
        value = ctypes.addressof(results)
        entry = _entry(self._pointer, 2 + len(self._words) + len(own[0]))
        status = entry(value, value + 8, first, last, *self._words, *own[0])
        if status:
            raise RuntimeError(f"the CPU kernel {self._name} stopped with status {status}")
        self._spare.append(own)
