"""Recognises calls on a GPU that look like an earlier one, and launches it again without checks.

A call's signature has everything on which checks, proofs and the choice of kernels depend: shapes,
strides, dtypes, alignments and devices of its arrays, the structure and the numbers of its mask and
score changes, and every other number. Calls with equal signatures differ only in addresses (and an
integer seed). Signatures hold no array, and the least recently used ones are forgotten.

For most calls, this is all the work of the host. It reads every attribute of an array once.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import cuda_device
from ..arrays.device_arrays import OutputSpec
from ..masks import Mask
from ..problem.call import Gradients
from ..problem.options import Options
from ..problem.route import CallResult
from ..scores import Score
from .launch import Addresses

MOST = 512  # signatures that are remembered


class Entry:
    """What is kept about a call.

    Attributes
    ----------
    compiled : CompiledRecipe, or what else is kept
        Its launches.
    specs : tuple of (OutputSpec or None)
        The specs of its results.
    tables : tuple of (str, str)
        Names of the arrays that its kernels look up: in the kernels, and in the signature.
    pairs : tuple of Pair
        The arrays that must not overlap.
    used : int
        A counter: larger for entries that were used later.
    """

    __slots__ = ("compiled", "pairs", "specs", "tables", "used")

    def __init__(
        self,
        compiled: Any,
        specs: tuple[OutputSpec | None, ...],
        tables: tuple[tuple[str, str], ...],
        pairs: tuple[Pair, ...],
    ) -> None:
        self.compiled, self.specs, self.tables, self.pairs = compiled, specs, tables, pairs
        self.used = next(_clock)


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
    """An argument that is not to be recognised: the call is checked, and says what is wrong."""


class Signature:
    """A call's key, and what is not part of it: its arrays and the integer seed.

    Attributes
    ----------
    key : hashable
        Equal for calls that differ only in addresses.
    addresses : dict
        Addresses by the kernels' names, without those of tables.
    read : list of array
        The arrays that masks, score changes and the bias read.
    written : list of str
        Names of arrays that are written.
    """

    __slots__ = ("_kind", "_parts", "_taken", "addresses", "key", "read", "written")

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
        self.addresses: Addresses = {"seed": 0}
        self.read: Sequence[Any] = ()
        self.written: Sequence[str] = ()
        self._take_arrays(read)
        for name, value in vars(options).items():
            if value is not None:
                self._parts += (name, _TAKE[name](self, value))
        if written:
            self._take_arrays(written)
            self.written = [name for name, array in written.items() if array is not None]
        self.key: Hashable = tuple(self._parts)

    def _take_arrays(self, named: Mapping[str, Any]) -> None:
        """Take arrays, or None, by the names that kernels have for them."""
        kind, parts, addresses = self._kind, self._parts, self.addresses
        self._taken.append(named)
        for name, array in named.items():
            if array is None:
                parts.append(None)
                continue
            if not isinstance(array, kind):
                raise UnlikeError
            data = array.data
            addresses[name] = place = data.ptr
            parts += (array.dtype, array.shape, array.strides, data.device_id, place & 15)

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
        self._take_arrays({f"read {len(self.read)}": array})
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


def signature(
    kind: Hashable,
    read: Mapping[str, Any],
    options: Options,
    written: Mapping[str, Any],
) -> Signature | None:
    """Return the signature of a call on a GPU, or None if it must be checked every time.

    Parameters
    ----------
    kind : hashable
        Which function, and what else tells calls of it apart.
    read, written : mapping of str to (array or None)
        Arrays by the kernels' names.
    options : Options
        The options of the call.
    """
    try:
        return Signature(kind, read, options, written)
    except UnlikeError:
        return None


_lock = threading.Lock()  # for writing; look-ups need no lock
_entries: dict[Hashable, Entry] = {}
_clock = itertools.count()


def find(seen: Signature) -> Entry | None:
    """Return what is kept of calls like this one, and note the addresses that its kernels want."""
    entry = _entries.get(seen.key)
    if entry is None:
        return None
    addresses = seen.addresses
    for written, other, low, high, checked in entry.pairs:
        if low < addresses[other] - addresses[written] < high and (
            addresses[other] - addresses[written] not in checked
        ):
            return None
    for name, place in entry.tables:
        addresses[name] = addresses[place]
    entry.used = next(_clock)
    return entry


def forward(
    entry: Entry, addresses: Addresses, out: Any, lse: Any, workspace: Any = None
) -> tuple[Any, Any] | None:
    """Compute a call with a kept entry, into the given arrays or into new ones.

    Returns None if the call must be checked again.
    """
    compiled = entry.compiled
    if not compiled.queue.is_here():
        with cuda_device.current(compiled.queue.device):
            return forward(entry, addresses, out, lse, workspace)
    own_scratch = compiled.scratch and workspace is None
    if own_scratch and compiled.queue.current_stream().is_capturing():
        return None  # scratch memory must live as long as the graph
    out_spec, lse_spec = entry.specs
    if out is None and out_spec is not None:
        out = out_spec.empty()
        addresses["out"] = out.data.ptr
    if lse is None and lse_spec is not None:
        lse = lse_spec.empty()
        addresses["lse"] = lse.data.ptr
    compiled.forward(addresses, workspace)
    return out, lse


def backward(
    entry: Entry, addresses: Addresses, grads_out: Gradients | None, workspace: Any
) -> Gradients | None:
    """Compute the gradients of a call with a kept entry; None if it must be checked again."""
    compiled = entry.compiled
    if not compiled.queue.is_here():
        with cuda_device.current(compiled.queue.device):
            return backward(entry, addresses, grads_out, workspace)
    if workspace is None and compiled.queue.current_stream().is_capturing():
        return None  # this is an error, which the full check reports
    made = [None] * len(entry.specs) if grads_out is None else list(grads_out)
    for n, spec in enumerate(entry.specs):
        if spec is not None and made[n] is None:
            made[n] = array = spec.empty()
            addresses[_GRADIENTS[n]] = array.data.ptr
    gradients = Gradients(*made)
    compiled.backward(addresses, gradients, workspace)
    return gradients


_GRADIENTS = Gradients._fields


def keep(seen: Signature, result: CallResult, results: Sequence[Any]) -> None:
    """Keep a call that was checked and launched, with the results that it had."""
    if result.compiled is None:
        return
    tables = []
    for n, table in enumerate(result.tables):
        found = [place for place, array in enumerate(seen.read) if array is table]
        if not found:
            return  # a copy, made for this call
        tables.append((f"table {n}", f"read {found[0]}"))
    keep_as(seen, result.compiled, tables, results)


def keep_as(
    seen: Signature, kept: Any, tables: Sequence[tuple[str, str]], results: Sequence[Any]
) -> None:
    """Keep something of a call that was checked, with the results that it had."""
    specs = tuple(None if x is None else OutputSpec(x) for x in results)
    with _lock:
        before = _entries.get(seen.key)
        pairs = _pairs(seen, () if before is None else before.pairs)
        _entries[seen.key] = Entry(kept, specs, tuple(tables), pairs)
        while len(_entries) > MOST:
            del _entries[min(_entries, key=lambda key: _entries[key].used)]


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
            distance = seen.addresses[other] - seen.addresses[written]
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
    return len(_entries)
