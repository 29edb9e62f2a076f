"""Recognises calls that look like an earlier one, so that they are computed without checks.

A call's signature has everything on which checks, proofs and the choice of kernels depend: shapes,
strides, dtypes and alignments of its arrays, the structure and the numbers of its mask and score
changes, and every other number. Calls with equal signatures differ only in their arrays (and an
integer seed). Entries hold no array, and the least recently used ones are forgotten.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..expr.nodes import LookupTable
from ..expr.structure import Structure
from ..masks import Mask
from ..scores import Score
from .call import Gradients
from .options import Options


def _always() -> bool:
    return True


class Entry:
    """What is kept about a call.

    Attributes
    ----------
    compiled : Any
        Its launches, or what else is kept.
    specs : tuple
        How each of its results is made; None for those that it does not have.
    tables : tuple of (str, str)
        Names of the arrays that its kernels look up: in the kernels, and in the signature.
    pairs : tuple of Pair
        The arrays that must not overlap.
    nbytes : int
        Host memory that it keeps.
    used : int
        A counter: larger for entries that were used later.
    watch : Any
        What is kept to notice changes of the arrays between a forward and its backward.
    is_due : callable
        Counts a call, and returns whether changes between it and its backward are to be noticed.
    quick : Any
        What makes the call again if it is found by another key.
    """

    __slots__ = (
        "__weakref__", "compiled", "is_due", "nbytes", "pairs", "quick", "specs", "tables", "used",
        "watch",
    )  # fmt: skip

    def __init__(
        self,
        compiled: Any,
        specs: tuple[Any, ...],
        tables: tuple[tuple[str, str], ...],
        pairs: tuple[Pair, ...],
        nbytes: int = 0,
    ) -> None:
        self.compiled, self.specs, self.tables, self.pairs = compiled, specs, tables, pairs
        self.nbytes = nbytes
        self.used = next(clock)
        self.watch: Any = None
        self.is_due: Callable[[], bool] = _always
        self.quick: Any = None


class Pair(NamedTuple):
    """An array that is written, and another one.

    Attributes
    ----------
    written, other : str
        Their names.
    low, high : int
        If the distance of their first elements, in bytes, is between these, their memory overlaps.
    checked : frozenset of int
        Distances between these at which they are known to share no element, such as columns of one
        array.
    """

    written: str
    other: str
    low: int
    high: int
    checked: frozenset[int]


class UnlikeError(Exception):
    """Raised for an argument without a signature; the call then takes the validated path."""


class Signature(ABC):
    """A call's key, and what is not part of it: its arrays and the integer seed.

    There is one class for each kind of arrays, which knows what kernels depend on, and how a call
    is made again. One that only recognises calls has none of the latter.

    Attributes
    ----------
    key : hashable
        Equal for calls that differ only in addresses.
    addresses : dict
        Addresses by the kernels' names, without those of tables; the seed is one of them.
    read : list of array
        The arrays that masks, score changes and the bias read.
    written : list of str
        Names of arrays that are written.
    entry : Entry or None
        What is kept of such calls, as far as it was asked for.
    learned : tuple of LookupTable
        The look-ups that have gradients, besides those of arrays.
    """

    __slots__ = (
        "_kind",
        "_option",
        "_parts",
        "_taken",
        "addresses",
        "entry",
        "key",
        "learned",
        "read",
        "written",
    )

    def __init__(
        self,
        call: Hashable,
        read: Mapping[str, Any],
        options: Options,
        written: Mapping[str, Any],
    ) -> None:
        self._kind = type(next(iter(read.values())))  # of all arrays
        self._parts: list[Any] = [call]
        self._taken: list[Mapping[str, Any]] = []
        self.addresses: dict[str, int] = {"seed": 0}
        self.read: Sequence[Any] = ()
        self.written: Sequence[str] = ()
        self.entry: Entry | None = None
        self.learned: tuple[LookupTable, ...] = ()
        self._take_arrays(read)
        for name, value in vars(options).items():
            if value is not None:
                self._option = name
                self._parts += (name, _TAKE[name](self, value))
        if written:
            self._take_arrays(written)
            self.written = [name for name, array in written.items() if array is not None]
        self.key: Hashable = tuple(self._parts)

    @abstractmethod
    def _take_arrays(self, named: Mapping[str, Any]) -> None:
        """Take arrays, or None, by the names that kernels have for them."""

    def _take_read(self, name: str, array: Any) -> None:
        """Take an array that a mask or a score change reads, whose contents may differ."""
        self._take_arrays({name: array})

    def _look_at(self, structure: Structure, read: Sequence[Any]) -> None:  # noqa: B027, most have none
        """Refuse an expression whose proofs depend on more than the signature has."""

    def hold(self, entry: Entry) -> None:
        """Know what is kept of the call."""
        self.entry = entry

    @property
    def form(self) -> Hashable:
        """The key of calls that look like this one but for numbers that `forward` is told."""
        return None

    @property
    def places(self) -> Mapping[str, int]:
        """Where the arrays are, by name."""
        return self.addresses

    def forward(self, out: Any, lse: Any, workspace: Any = None) -> Any:
        """Compute a call as an earlier one, into the given arrays or into new ones.

        Returns out and lse, or None if there is none, or if the call must be checked again.
        """
        del out, lse, workspace

    def forward_tangent(self, results: Sequence[Any]) -> Any:
        """Compute a forward with tangents likewise: out, its tangent, lse, its tangent."""
        del results

    def backward(self, grads_out: Gradients | None, workspace: Any) -> Any:
        """Compute the gradients of a call likewise."""
        del grads_out, workspace

    def backward_of_unchanged(self, before: Any) -> Any:
        """Compute them likewise, if arrays are as a `changes.Snapshot` has seen them.

        Only a call that finds that out itself does so.
        """
        del before

    def backward_tangent(
        self, grads_out: Gradients | None, results: tuple[Any, Any], workspace: Any
    ) -> Any:
        """Compute the tangents of a call's gradients, of out and of lse likewise."""
        del grads_out, results, workspace

    def keep(self, served: Any, results: Sequence[Any]) -> None:
        """Keep a call that was checked and computed: what a back end returned, and its results."""
        del served, results

    def given(self, grads_out: Gradients | None) -> list[Any]:
        """Return the arrays given for gradients, or None, those of look-ups at the end."""
        if grads_out is None:
            return [None] * (len(Gradients._fields) + len(self.learned))
        return [*grads_out, *map(grads_out.dlookups.get, self.learned)]

    def gradients(self, made: Sequence[Any]) -> Gradients:
        """Return gradients in this order as users get them."""
        count = len(Gradients._fields)
        gradients: Gradients = Gradients(*made[:count])
        if self.learned:
            gradients.dlookups = dict(zip(self.learned, made[count:], strict=True))
        return gradients

    def every(self, results: Any) -> Sequence[Any]:
        """Return the results of a call in this order, if they are gradients."""
        more = (results.dlookups[table] for table in self.learned)
        return (*results, *more)

    def spec(self, array: Any) -> Any:
        """Return how an array like a result is made."""
        return array

    @property
    def arrays(self) -> dict[str, Any]:
        """All arrays, by the names of their addresses."""
        return {
            name: array
            for named in self._taken
            for name, array in named.items()
            if array is not None
        }

    def _expression(self, made: Any) -> Hashable:
        """Take a mask, score changes, or an array that stands for them, and what they read."""
        if isinstance(made, (Mask, Score)):
            structure, read = made.structure
            self._look_at(structure, read)
            return type(made), structure, *map(self._place, read)
        if isinstance(made, (list, tuple)):
            return tuple(map(self._expression, made))
        return self._place(made)

    def _sink(self, value: Any) -> Hashable:
        self._take_arrays({"sink": value})
        return "array"

    def _number(self, value: Any) -> Hashable:
        """Take what tells a number from others, also from equal ones: 0.0 and -0.0, 1 and True."""
        if type(value) is float and value:
            return value
        if isinstance(value, (bool, int, float, np.generic)):
            return repr(value)
        raise UnlikeError

    def _probability(self, value: Any) -> Hashable:
        # 0.0 and -0.0 are the same probability; types other than float have other checks
        return value if type(value) is float else self._number(value)

    def _word(self, value: Any) -> Hashable:
        if type(value) is not str:
            raise UnlikeError
        return value

    def _place(self, array: Any) -> int:
        for place, known in enumerate(self.read):
            if known is array:
                return place
        if array is None:
            raise UnlikeError
        self._take_read(f"read {len(self.read)}", array)
        self.read = [*self.read, array]
        return len(self.read) - 1

    def _seed(self, value: Any) -> Hashable:
        """Take a seed: a number is not part of the key."""
        if type(value) is int and 0 <= value < 2**64:
            self.addresses["seed"] = value
            return False
        self._take_arrays({"seed_gmem": value})
        return "array"


# Field of `Options` -> its part of a signature.
_TAKE: dict[str, Callable[[Signature, Any], Hashable]] = {
    "mask": Signature._expression,
    "score_mod": Signature._expression,
    "bias": Signature._expression,
    "sink": Signature._sink,
    "scale": Signature._number,
    "dropout": Signature._probability,
    "seed": Signature._seed,
    "precision": Signature._word,
}


_lock = threading.Lock()  # for writing; look-ups need no lock
_entries: dict[Hashable, Entry] = {}
clock = itertools.count()
MOST = 512  # signatures that are remembered
MOST_BYTES = 1 << 26  # host memory that entries keep, all of them


def find(seen: Signature) -> Entry | None:
    """Return what is kept of calls like this one, and note the addresses that its kernels want."""
    entry = find_as(seen, seen.key)
    if entry is None and (form := seen.form) is not None:
        return find_as(seen, form)
    return entry


def find_as(seen: Signature, key: Hashable) -> Entry | None:
    """Return what is kept of calls like this one by a key of it, as `find` does."""
    entry = _entries.get(key)
    if entry is None:
        return None
    if entry.pairs:
        places = seen.places
        for written, other, low, high, checked in entry.pairs:
            if low < places[other] - places[written] < high and (
                places[other] - places[written] not in checked
            ):
                return None
    for name, place in entry.tables:
        seen.addresses[name] = seen.addresses[place]
    entry.used = next(clock)
    seen.hold(entry)
    return entry


def find_quick(key: Hashable) -> Any:
    """Return what makes a call again that was kept by `keep_quick`, or None."""
    entry = _entries.get(key)
    if entry is None:
        return None
    entry.used = next(clock)
    return entry.quick


def keep_quick(entry: Entry, quick: Any, key: Hashable) -> None:
    """Keep what makes a call again that has an entry already, under another key."""
    with _lock:
        entry.quick = quick
        _entries[key] = entry
        _forget()


def keep(
    seen: Signature, compiled: Any, read: Sequence[Any], results: Sequence[Any], nbytes: int = 0
) -> None:
    """Keep a call that was checked and launched, with the results that it had.

    Parameters
    ----------
    seen : Signature
        Its signature.
    compiled : Any
        What makes it again; None if nothing does.
    read : sequence of array
        The arrays that its kernels look up, in their order.
    results : sequence of (array or None)
        Its results.
    nbytes : int
        Host memory that `compiled` keeps.
    """
    if compiled is None:
        return
    tables = []
    known = {name: x for name, x in seen.arrays.items() if name.startswith("read ")}
    for n, table in enumerate(read):
        found = [name for name, x in known.items() if x is table]
        if not found:
            return  # a copy, made for this call
        tables.append((f"table {n}", found[0]))
    keep_as(seen, compiled, tables, results, nbytes)


def keep_as(
    seen: Signature,
    kept: Any,
    tables: Sequence[tuple[str, str]],
    results: Sequence[Any],
    nbytes: int = 0,
    key: Hashable = None,
) -> None:
    """Keep something of a call that was checked, with the results that it had.

    `key` is the one by which it is found, if that is not the whole one.
    """
    key = seen.key if key is None else key
    specs = tuple(None if x is None else seen.spec(x) for x in results)
    with _lock:
        before = _entries.get(key)
        pairs = _pairs(seen, () if before is None else before.pairs)
        if before is not None and before.compiled is kept:  # it is known to others
            before.pairs, before.nbytes = pairs, nbytes
            seen.hold(before)
            _forget()
            return
        entry = _entries[key] = Entry(kept, specs, tuple(tables), pairs, nbytes)
        if before is not None:
            entry.watch, entry.is_due = before.watch, before.is_due
        seen.hold(entry)
        _forget()


def _forget() -> None:
    """Forget the calls that were made least recently, if there are too many."""
    while len(_entries) > MOST or sum(x.nbytes for x in _entries.values()) > MOST_BYTES:
        del _entries[min(_entries, key=lambda each: _entries[each].used)]


def _pairs(seen: Signature, before: Sequence[Pair]) -> tuple[Pair, ...]:
    """Return the pairs of each written array with every other array of a checked call.

    `before` are the pairs of a call with the same key, whose distances were checked, too.
    """
    pairs: list[Pair] = []
    arrays = seen.arrays
    others = [name for name in arrays if name not in seen.written]
    for written in seen.written:
        low, high = reach(arrays[written])
        for other in others:
            other_low, other_high = reach(arrays[other])
            least, most = low - other_high, high - other_low
            distance = seen.places[other] - seen.places[written]
            checked = {distance} if least < distance < most else set()
            if before and len(before[len(pairs)].checked) < MOST:
                checked |= before[len(pairs)].checked
            pairs.append(Pair(written, other, least, most, frozenset(checked)))
        others.append(written)
    return tuple(pairs)


def reach(array: Any) -> tuple[int, int]:
    """Return where an array's memory begins and ends, in bytes from its first element."""
    steps = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    if not array.size:
        return 0, 0
    low = sum(min(step, 0) for step in steps)
    return low, low + sum(map(abs, steps)) + array.itemsize


def kept() -> int:
    """Return how many calls are kept."""
    return len(set(_entries.values()))
