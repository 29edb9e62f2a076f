"""Computes calls on NumPy arrays again that look like an earlier one (see `problem.replay`).

What an entry keeps is the call of `reference.cpu`, with its proofs, packed parameters and scratch;
only addresses are new, and the contents of small arrays that proofs have read are part of the key.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ..expr.key_range import KeyRange
from ..expr.structure import Structure
from ..masks import Mask
from ..problem import replay
from ..problem.cached import MOST_POSITIONS
from ..problem.call import Call, Gradients
from ..problem.options import Options
from ..problem.replay import Entry, Signature, UnlikeError
from .cpu_ranges import GrowingEnds, OtherNumbers
from .cpu_tiles import FEWEST_KEYS

MOST_CONTENTS = 1 << 12  # bytes of an array that is compared by its contents
MOST_CALLS = 4  # of an entry: as many threads may make the same call at once
_ALIGNED, _WRITEABLE = 0x100, 0x400  # of numpy.ndarray.flags.num

_ndarray = np.ndarray
_NOTHING: Mapping[str, Any] = {}


class HostSignature(Signature):
    """The signature of a call on NumPy arrays."""

    __slots__ = ("_form", "_mask_at", "grows", "named", "numbers", "rows")

    def __init__(
        self,
        call: Hashable,
        read: Mapping[str, Any],
        options: Options,
        written: Mapping[str, Any],
        grows: bool = False,
    ) -> None:
        self.grows = grows  # the number of keys is no part of it
        self.named: dict[str, Any] = {}  # all arrays, and None
        self.rows: Any = None
        self._form: Structure | None = None  # of the mask
        self._mask_at = 0
        self.numbers: tuple[int, ...] = ()  # of the mask, for which its form has symbols
        super().__init__(call, read, options, written)

    def _take_arrays(self, named: Mapping[str, Any]) -> None:
        """Take arrays, or None, by the names that kernels have for them."""
        if "seed_gmem" in named:
            raise UnlikeError  # kernels are told the number
        parts = self._parts
        self._taken.append(named)
        self.named.update(named)
        for name, array in named.items():
            if array is None:
                parts.append(None)
                continue
            if type(array) is not _ndarray:
                raise UnlikeError
            flags = array.flags.num & (_ALIGNED | _WRITEABLE)
            if self.grows and name in ("k", "v"):
                shape, is_long = array.shape, array.shape[-2] >= FEWEST_KEYS
                parts += (array.dtype, shape[:-2], shape[-1], array.strides[-1], is_long, flags)
                continue
            parts += (array.dtype, array.shape, array.strides, flags)

    def _take_read(self, name: str, array: Any) -> None:
        """Take an array that a mask, a score change or the bias reads.

        Proofs, and the ranges of keys that a mask gives, depend on the contents of some.
        """
        self._take_arrays({name: array})
        if self._option == "mask" or array.dtype.kind in "iub":
            self.take_contents(array)

    def _look_at(self, structure: Structure, read: Sequence[Any]) -> None:
        """Refuse an index that may depend on the contents of an array of floats."""
        if read and structure.has_floor and any(x.dtype.kind not in "iub" for x in read):
            raise UnlikeError
        if self._option == "mask" and not read and structure.form is not None:
            self._form, self.numbers = structure.form, structure.numbers
            self._mask_at = len(self._parts) + 1  # behind its name

    def hold(self, entry: Entry) -> None:
        """Keep nothing: an entry has scratch, and who has the signature may live long."""

    @property
    def form(self) -> Hashable:
        """The key of calls that differ in numbers of the mask; None if there are none."""
        if self._form is None:
            return None
        parts = list(self._parts)
        parts[self._mask_at] = self._form
        return tuple(parts)

    def take_contents(self, array: Any) -> None:
        """Make the contents of an array part of the key."""
        if type(array) is not _ndarray:
            raise UnlikeError
        if is_all_true(array):
            self._parts.append(True)
            return
        if array.nbytes > MOST_CONTENTS:
            raise UnlikeError
        self._parts.append(array.tobytes())

    @property
    def places(self) -> Mapping[str, int]:
        """Where the arrays are, by name."""
        from cupyflash.reference.cpu.addresses import address

        return {name: address(x) for name, x in self.named.items() if x is not None}

    def forward(self, out: Any, lse: Any, workspace: Any = None) -> Any:  # noqa: ARG002, a GPU's
        """Compute a forward again."""
        entry = replay.find(self)
        if entry is None or (call := entry.compiled.take()) is None:
            return None
        out_spec, lse_spec = entry.specs
        if out is None:
            out = out_spec.empty()
        if lse is None:
            lse = lse_spec.empty()
        is_done = call.forward(self, out, lse)
        entry.compiled.free.append(call)
        return (out, lse) if is_done else None

    def backward(self, grads_out: Gradients | None, workspace: Any) -> Any:
        """Compute the gradients of a call again."""
        entry = None if workspace is not None else replay.find(self)
        if entry is None or (call := entry.compiled.take()) is None:
            return None
        if grads_out is None:
            made = [None if spec is None else spec.empty() for spec in entry.specs]
        else:
            made = [
                spec.empty() if x is None and spec is not None else x
                for x, spec in zip(grads_out, entry.specs, strict=True)
            ]
        gradients = Gradients(*made)
        is_done = call.backward(self, gradients)
        entry.compiled.free.append(call)
        return gradients if is_done else None

    def keep(self, served: Any, results: Sequence[Any]) -> None:
        """Keep a call that was checked and computed."""
        call = served.compiled
        if call is None or call.nbytes > replay.MOST_BYTES // 4 or not call.bind(self):
            return
        key = self.form if call.serves_numbers else self.key
        before = replay.find_as(self, key)
        calls = _Calls() if before is None else before.compiled
        if count := calls.add(call):
            replay.keep_as(self, calls, (), results, count * call.nbytes, key)

    def spec(self, array: Any) -> Any:
        """Return how an array like a result is made."""
        return _Spec(array)


def is_all_true(array: Any) -> bool:
    """Return whether an array has conditions that all hold; most others are not read to the end."""
    if array.dtype.kind != "b":
        return False
    own = array[tuple(slice(None if stride else 1) for stride in array.strides)]
    return bool(own.all())


class _Spec:
    """Shape, dtype and memory order of an array to make, which has no gaps."""

    __slots__ = ("_dtype", "_order", "_shape")

    def __init__(self, array: Any) -> None:
        order = sorted(range(array.ndim), key=lambda axis: (-array.strides[axis], axis))
        self._shape, self._dtype = tuple(array.shape[axis] for axis in order), array.dtype
        self._order = None
        if order != list(range(array.ndim)):
            self._order = tuple(int(x) for x in np.argsort(order))

    def empty(self) -> Any:
        """Return such an array, uninitialised."""
        made = np.empty(self._shape, self._dtype)
        return made if self._order is None else made.transpose(self._order)


class Replayed:
    """A call of `reference.cpu` that can be made again.

    Parameters
    ----------
    call : Any
        The call, which has the attributes `nbytes`, `seed` and `release`.
    run : callable
        Makes it.
    tables : sequence of (array, array)
        Of each array that programs look up, its row in their tables, whose first element is its
        address, and the array.
    read : mapping of str to (array or None)
        The arrays that it read, by the kernels' names.
    of_mask : OtherNumbers, optional
        What serves other numbers of the mask.

    Attributes
    ----------
    serves_numbers : bool
        Whether it can be made again for other numbers of the mask.
    """

    __slots__ = (
        "__weakref__",
        "_call",
        "_of_mask",
        "_read",
        "_run",
        "_tables",
        "nbytes",
        "serves_numbers",
    )
    grows = False  # whether it serves any number of keys

    def __init__(
        self,
        call: Any,
        run: Callable[..., None],
        tables: Sequence[tuple[Any, Any]],
        read: Mapping[str, Any],
        of_mask: OtherNumbers | None = None,
    ) -> None:
        self._call, self._run, self._read = call, run, read
        self._of_mask, self.serves_numbers = of_mask, of_mask is not None
        self.nbytes = call.nbytes
        self._tables: Any = tables

    def bind(self, seen: HostSignature) -> bool:
        """Find each table's array among those of a signature; return whether all are there.

        The call must have read the arrays that came, and no copies of them.
        """
        from cupyflash.reference.cpu.addresses import address

        if seen.grows and not self.grows:
            return False  # it is looked for without its number of keys
        for name, x in self._read.items():
            came = seen.named.get(name)
            if came is None or x is None:
                if came is not x:
                    return False
            elif came.dtype != x.dtype or address(came) != address(x):
                return False
        self._read = {}
        found = []
        for row, array in self._tables:
            names = [
                name
                for name, x in seen.named.items()
                if x is not None and name.startswith("read ") and address(x) == int(row[0])
            ]
            same = [name for name in names if seen.named[name] is array]
            names = same or names
            if len(names) != 1:
                return False  # a copy, made for this call, or an array that is not known for sure
            found.append((row, names[0]))
        self._tables = tuple(found)
        self._call.release()
        return True

    def _load(self, seen: HostSignature) -> dict[str, Any]:
        named = seen.named
        if self._tables:
            from cupyflash.reference.cpu.addresses import address

            for row, name in self._tables:
                row[0] = address(named[name])
        self._call.seed(seen.addresses["seed"])
        return named

    def forward(self, seen: HostSignature, out: Any, lse: Any) -> bool:
        """Compute out and lse for the arrays of a signature; return whether it could be done."""
        if self._of_mask is not None and not self._of_mask(self._call, seen.numbers):
            return False
        named = self._load(seen)
        self._run(named["q"], named["k"], named["v"], named.get("sink"), out, lse)
        return True

    def backward(self, seen: HostSignature, gradients: Gradients) -> bool:
        """Compute gradients for the arrays of a signature; return whether it could be done."""
        if self._of_mask is not None and not self._of_mask(self._call, seen.numbers):
            return False
        named = self._load(seen)
        self._run(
            named["d_out"], named["q"], named["k"], named["v"], named["out"], named["lse"],
            named["dlse"], named.get("sink"), *gradients,
        )  # fmt: skip
        return True


class ReplayedCache(Replayed):
    """A call over a cache that can be made again, for any lengths that it has room for.

    Parameters
    ----------
    made : Any
        The call of `reference.cpu`.
    call : Call
        What it was made from.
    tables : sequence of (array, array)
        As in `Replayed`.
    found : KeyRange or None
        The keys that each query sees, if the mask says them so.
    numbers : tuple of int
        Those for which `found` has symbols.
    """

    __slots__ = ("_capacity", "_ends", "_is_checked", "_lengths", "_scales")

    def __init__(
        self,
        made: Any,
        call: Call,
        tables: Sequence[tuple[Any, Any]],
        found: KeyRange | None,
        numbers: tuple[int, ...],
    ) -> None:
        super().__init__(made, made, tables, {"q": call.q, "k": call.k, "v": call.v})
        cache: Any = call.cache
        self._capacity = cache.capacity
        self._lengths = np.zeros(call.problem.batch, np.int64)
        self._ends = None if found is None else GrowingEnds(call.problem, found, numbers)
        self.serves_numbers = bool(numbers)
        pages = None if cache.table is None else np.asarray(cache.table)
        in_range = pages is None or bool(((pages >= 0) & (pages < call.k.shape[0])).all())
        # With shared positions, which pages are used depends on lengths.
        self._is_checked = in_range and not cache.shared
        self._scales = cache.encoding.scales

    def bind(self, seen: HostSignature) -> bool:
        """Find each table's array; return whether the call can be made again.

        Of scales, those that are numbers are kept; the others come with each call.
        """
        from cupyflash.reference.cpu.addresses import address

        scales = {}
        for name, scale in self._scales.items():
            passed = seen.named.get(name)
            if passed is None:
                scales[name] = scale
            elif address(passed) != address(scale):
                return False
        self._scales = scales
        return self._is_checked and super().bind(seen)

    def _of_codes(self, named: Mapping[str, Any]) -> Any:
        """Return the scales of keys and of values, if there are any."""
        scales = [
            self._scales.get(name) if named.get(name) is None else named[name] for name in _SCALES
        ]
        return None if scales[0] is scales[1] is None else scales

    def forward(self, seen: HostSignature, out: Any, lse: Any) -> bool:
        """Compute out and lse, unless the lengths are wrong."""
        lengths, own = seen.rows.lengths, self._lengths
        if type(lengths) is int:
            if not 0 <= lengths <= self._capacity:
                return False
        elif (
            type(lengths) is not _ndarray
            or lengths.shape != own.shape
            or lengths.dtype not in _LENGTHS
            or not own.size
            or int(lengths.min()) < 0
            or int(lengths.max()) > self._capacity
        ):
            return False
        own[...] = lengths
        named = self._load(seen)
        self._call.grow(own, None if self._ends is None else self._ends(own, seen.numbers))
        of_cache = named.get("table"), self._of_codes(named)
        self._run(named["q"], named["k"], named["v"], named.get("sink"), out, lse, *of_cache)
        return True


class ReplayedGrowing(Replayed):
    """A call of one query on dense arrays that can be made again, with any number of keys.

    Parameters
    ----------
    made : Any
        The call of `reference.cpu`.
    call : Call
        What it was made from.
    found, numbers
        As in `ReplayedCache`.
    """

    __slots__ = ("_ends", "_lengths")
    grows = True

    def __init__(
        self, made: Any, call: Call, found: KeyRange | None, numbers: tuple[int, ...]
    ) -> None:
        super().__init__(made, made.grown, (), {"q": call.q, "k": call.k, "v": call.v})
        problem = call.problem
        self._lengths = np.zeros(problem.batch, np.int64)
        self._ends = None if found is None else GrowingEnds(problem, found, numbers)
        self.serves_numbers = bool(numbers)

    def forward(self, seen: HostSignature, out: Any, lse: Any) -> bool:
        """Compute out and lse, unless there are no keys, or not as many keys as values."""
        k, v = seen.named["k"], seen.named["v"]
        length, own = k.shape[-2], self._lengths
        if length != v.shape[-2] or not 0 < length <= MOST_POSITIONS:
            return False
        own.fill(length)
        named = self._load(seen)
        self._call.grow(own, None if self._ends is None else self._ends(own, seen.numbers))
        self._run(named["q"], k, v, named.get("sink"), out, lse)
        return True


def grows(options: Options | Call, dropout: Any) -> bool:
    """Return whether a call of one query can be made again with any number of keys.

    The call is dense and has a batch axis.
    """
    mask = options.mask
    plain = mask is None or (isinstance(mask, Mask) and not mask.structure[1])
    return plain and options.bias is None is options.score_mod and not dropout


_SCALES = "k_scale", "v_scale"
_LENGTHS = np.dtype(np.int32), np.dtype(np.int64)


class _Calls:
    """The calls of an entry: those that nobody makes at present, and all that there are."""

    __slots__ = ("_all", "free")

    def __init__(self) -> None:
        self.free: list[Replayed] = []
        self._all: weakref.WeakSet[Replayed] = weakref.WeakSet()  # without those that raised

    def add(self, call: Replayed) -> int:
        """Add a call unless there are enough; return how many there are then, 0 if it was not."""
        if len(self._all) >= MOST_CALLS:
            return 0
        self._all.add(call)
        self.free.append(call)
        return len(self._all)

    def take(self) -> Replayed | None:
        """Return one, which belongs to the caller until it is put back; None if there is none."""
        try:
            return self.free.pop()
        except IndexError:
            return None


def _is_growing(kind: Hashable, read: Mapping[str, Any], options: Options) -> bool:
    """Return whether the number of keys is no part of a call's signature."""
    if kind not in ("forward", "forward without lse"):
        return False
    q, k, v = read["q"], read["k"], read["v"]
    if q.ndim < 3 or q.shape[-2] != 1 or k.ndim < 3 or v.ndim < 3 or k.dtype != q.dtype:
        return False
    return grows(options, options.dropout)


def signature(
    kind: Hashable,
    read: Mapping[str, Any],
    options: Options,
    written: Mapping[str, Any],
    contents: Mapping[str, Any] = _NOTHING,
    rows: Any = None,
) -> HostSignature | None:
    """Return the signature of a call on NumPy arrays, or None if it must be checked every time.

    Parameters
    ----------
    kind : hashable
        Which function, and what else tells calls of it apart.
    read, written : mapping of str to (array or None)
        Arrays by the kernels' names.
    options : Options
        The options of the call.
    contents : mapping of str to array
        Arrays whose contents tell calls apart.
    rows : Any
        Where rows lie, as users pass it; of a cache, it has the lengths.
    """
    try:
        grows = _is_growing(kind, read, options)
        if read["q"].dtype.itemsize == 2:  # see `reference.cpu.amx`
            kind = kind, os.environ.get("CUPYFLASH_AMX")
        seen = HostSignature(kind, read, options, written, grows)
        if contents:
            seen._take_arrays(contents)
            for array in contents.values():
                seen.take_contents(array)
            seen.key = tuple(seen._parts)
        seen.rows = rows
        return seen
    except (UnlikeError, AttributeError):
        return None
