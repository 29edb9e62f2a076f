"""Calls on a GPU that look like one before: recognised, and launched again without being checked.

A call's signature is all that checks, proofs and the choice of kernels depend on: shapes, strides,
dtypes, alignments and places of its arrays, the structure and the numbers of its mask and score
changes, and every other number. Of equal signatures only addresses (and an integer seed) differ.
Signatures hold no array, and what was longest unused is forgotten.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import target
from .launch import Addresses, Prepared, Served
from .masks import Mask
from .problem import Gradients
from .scores import Score
from .target import Form

MOST = 512  # signatures that are remembered


class Entry(NamedTuple):
    """What is kept of a call.

    Attributes
    ----------
    prepared : Prepared
        Its launches.
    forms : tuple of (Form or None)
        Of its results.
    tables : tuple of int
        Which of the signature's arrays its kernels look up.
    """

    prepared: Prepared
    forms: tuple[Form | None, ...]
    tables: tuple[int, ...]


class Signature(NamedTuple):
    """A call's key, and what stands apart from it: its arrays and the integer seed.

    Attributes
    ----------
    key : hashable
        Equal for calls that differ in addresses only.
    addresses : dict
        As kernels name them, without those of tables.
    read : tuple of array
        What masks, score changes and the bias read.
    """

    key: Hashable
    addresses: Addresses
    read: tuple[Any, ...]


class _UnlikeError(Exception):
    """An argument that is not to be recognised: the call is checked, and says what is wrong."""


class _Reader:
    """Reads the arguments of one call."""

    def __init__(self, call: str, q: Any) -> None:
        self._kind = type(q)
        self.key: list[Any] = [call]
        self.addresses: Addresses = {}
        self.arrays: list[Any] = []
        self.read: list[Any] = []

    def signature(self) -> Signature:
        """Return what was read."""
        return Signature(tuple(self.key), self.addresses, tuple(self.read))

    def array(self, name: str, array: Any) -> None:
        """Take an array, or None, by the name that kernels have for it."""
        if array is None:
            self.key.append(None)
            return
        if not isinstance(array, self._kind):
            raise _UnlikeError
        data = array.data
        place = data.ptr
        self.key.append((array.shape, array.strides, array.dtype, data.device_id, place & 15))
        self.addresses[name] = place
        self.arrays.append(array)

    def output(self, name: str, array: Any) -> None:
        """Take an array to write to, or None, and how it lies to what it may overlap."""
        if array is not None:
            before = list(self.arrays)
            self.array(name, array)
            low, high = _span(array)
            for n, other in enumerate(before):
                other_low, other_high = _span(other)
                if low < other_high and other_low < high:
                    self.key.append((n, other_low - low))
        self.key.append(None)

    def expression(self, made: Any) -> None:
        """Take a mask, score changes, or an array that stands for them, and what they read."""
        if made is None:
            self.key.append(None)
        elif isinstance(made, (Mask, Score)):
            structure, read = made.structure
            self.key.append((type(made), structure, *map(self._place, read)))
        elif isinstance(made, (list, tuple)):
            self.key.append(len(made))
            for each in made:
                self.expression(each)
        else:
            self.key.append(self._place(made))

    def _place(self, array: Any) -> int:
        for place, known in enumerate(self.read):
            if known is array:
                return place
        self.array(f"read {len(self.read)}", array)
        self.read.append(array)
        return len(self.read) - 1

    def number(self, value: Any) -> None:
        """Take a number that is part of the key."""
        if value is None or (type(value) is float and value):
            self.key.append(value)
        elif isinstance(value, (bool, int, float, np.generic)):
            self.key.append(repr(value))  # equal numbers differ: 0.0 and -0.0, 1 and True
        else:
            raise _UnlikeError

    def seed(self, value: Any) -> None:
        """Take a seed: a number is not part of the key."""
        if target.is_device_array(value):
            self.array("seed_gmem", value)
        elif value is None or (type(value) is int and 0 <= value < 2**64):
            self.key.append(value is None)
            self.addresses["seed"] = value or 0
        else:
            raise _UnlikeError

    def word(self, value: Any) -> None:
        """Take a word that is part of the key, or None."""
        if value is not None and type(value) is not str:
            raise _UnlikeError
        self.key.append(value)

    def options(self, options: Mapping[str, Any]) -> None:
        """Take the options of a call, all eight and no other."""
        if len(options) != _NUMBER_OF_OPTIONS:
            raise _UnlikeError
        for name in ("mask", "score_mod", "bias"):
            self.expression(options[name])
        self.array("sink", options["sink"])
        self.number(options["scale"])
        self.number(options["dropout"])
        self.seed(options["seed"])
        self.word(options["precision"])


_NUMBER_OF_OPTIONS = 8


def _span(array: Any) -> tuple[int, int]:
    """Return the first byte of an array and the one behind its last."""
    place = array.data.ptr
    low, high = _reach(array.shape, array.strides)
    return place + low, place + high + array.itemsize if array.size else place


@functools.lru_cache(maxsize=1024)
def _reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """Return how far before and behind an array's first element others begin, in bytes."""
    steps = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
    return sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps)


def signature(
    kind: str,
    read: Mapping[str, Any],
    options: Mapping[str, Any],
    written: Mapping[str, Any],
) -> Signature | None:
    """Return the signature of a call, or None of one that is checked every time.

    Parameters
    ----------
    kind : str
        Which function.
    read, written : mapping of str to (array or None)
        Arrays by the names that kernels have for them.
    options : mapping
        The options of `attention`.
    """
    if not target.is_device_array(read["q"]):
        return None
    reader = _Reader(kind, read["q"])
    try:
        for name, array in read.items():
            reader.array(name, array)
        reader.options(options)
        for name, array in written.items():
            reader.output(name, array)
    except _UnlikeError:
        return None
    return reader.signature()


_lock = threading.Lock()
_entries: OrderedDict[Hashable, Entry] = OrderedDict()


def find(seen: Signature) -> tuple[Entry, Addresses] | None:
    """Return what is kept of calls like this one, and the addresses of its arrays."""
    with _lock:
        entry = _entries.get(seen.key)
        if entry is None:
            return None
        _entries.move_to_end(seen.key)
    addresses = seen.addresses
    for n, place in enumerate(entry.tables):
        addresses[f"table {n}"] = addresses[f"read {place}"]
    return entry, addresses


def forward(entry: Entry, addresses: Addresses, out: Any, lse: Any) -> tuple[Any, Any]:
    """Compute a call that is kept, into the arrays given or into new ones."""
    prepared, (out_form, lse_form), _ = entry
    with target.current(prepared.device):
        if out is None and out_form is not None:
            out = out_form.empty()
            addresses["out"] = out.data.ptr
        if lse is None and lse_form is not None:
            lse = lse_form.empty()
            addresses["lse"] = lse.data.ptr
        prepared.forward(addresses)
    return out, lse


def backward(
    entry: Entry, addresses: Addresses, grads_out: Gradients | None, workspace: Any
) -> Gradients | None:
    """Compute the gradients of a call that is kept; None where it must be checked again."""
    prepared = entry.prepared
    with target.current(prepared.device):
        if workspace is None and target.is_capturing():
            return None  # which is an error, and is said there
        made = list(grads_out or Gradients(None, None, None))
        for n, (name, form) in enumerate(zip(Gradients._fields, entry.forms, strict=True)):
            if made[n] is None and form is not None:
                made[n] = form.empty()
                addresses[name] = made[n].data.ptr
        gradients = Gradients(*made)
        prepared.backward(addresses, gradients, workspace)
    return gradients


def keep(seen: Signature, served: Served, results: Sequence[Any]) -> None:
    """Keep a call that was checked and launched, with the results that it had."""
    if served.prepared is None:
        return
    places = []
    for table in served.tables:
        found = [place for place, array in enumerate(seen.read) if array is table]
        if not found:
            return  # a copy, made for this call
        places.append(found[0])
    forms = tuple(None if x is None else Form.of(x) for x in results)
    with _lock:
        _entries[seen.key] = Entry(served.prepared, forms, tuple(places))
        while len(_entries) > MOST:
            _entries.popitem(last=False)


def kept() -> int:
    """Return how many calls are kept."""
    return len(_entries)
