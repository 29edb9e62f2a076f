"""Calls of `reference.cpu` that can be made again: what `host_replay` keeps of a call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..expr.key_range import KeyRange
from ..expr.nodes import LookupTable
from ..masks import Mask
from ..problem import scalars
from ..problem.cached import MOST_POSITIONS
from ..problem.call import Call, Gradients, Problem
from . import host_recent
from .cpu_ranges import GrowingEnds, OtherNumbers
from .cpu_tiles import FEWEST_KEYS

if TYPE_CHECKING:
    from .host_replay import HostSignature

MOST_CALLS = 4  # of an entry: as many threads may make the same call at once
_ndarray = np.ndarray
_SCALES = "k_scale", "v_scale"
AXES = 4  # of arrays of calls that `host_recent` keeps
_LENGTHS = np.dtype(np.int32), np.dtype(np.int64)


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
        address, and the array; None and the array for those that ends of ranges depend on.
    read : mapping of str to (array or None)
        The arrays that it read, by the kernels' names.
    of_mask : OtherNumbers, optional
        What serves other numbers of the mask.
    learned : sequence of LookupTable
        The look-ups whose gradients it writes, in its order.

    Attributes
    ----------
    serves_numbers : bool
        Whether it can be made again for other numbers of the mask.
    quick : tuple or None
        What `Quick` needs to make it again from addresses alone, once that was asked for.
    placed_bytes, scratch_bytes : int
        Bytes that its entry counts for that, and for scratch that it made.
    """

    __slots__ = (
        "__weakref__",
        "_call",
        "_learned",
        "_of_mask",
        "_order",
        "_read",
        "_run",
        "_tables",
        "nbytes",
        "placed_bytes",
        "quick",
        "scratch_bytes",
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
        learned: Sequence[LookupTable] = (),
    ) -> None:
        self._learned = learned
        self._order: Sequence[int] = ()  # of the gradients of look-ups, among a signature's
        self._call, self._run, self._read = call, run, read
        self._of_mask, self.serves_numbers = of_mask, of_mask is not None
        self.nbytes = call.nbytes
        self._tables: Any = tables
        self.quick: tuple[Any, ...] | None = None
        self.placed_bytes = self.scratch_bytes = 0

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
        if set(self._learned) != set(seen.learned):
            return False
        number = {table: n for n, table in enumerate(seen.learned)}
        self._order, self._learned = [number[table] for table in self._learned], ()
        found = []
        for row, array in self._tables:
            if row is None:
                if not seen.has_contents(array):
                    return False
                continue
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

    def forward_tangent(self, seen: HostSignature, results: Sequence[Any]) -> bool:
        """Compute results and tangents for the arrays of a signature; return whether it was done.

        `results` are out, its tangent, lse and its tangent.
        """
        if self._of_mask is not None and not self._of_mask(self._call, seen.numbers):
            return False
        named = self._load(seen)
        self._run(
            named["q"], named["k"], named["v"], named["tq"], named["tk"], named["tv"],
            named.get("sink"), named["tsink"], *results,
        )  # fmt: skip
        return True

    @property
    def sums_inputs(self) -> bool:
        """Whether `backward` can sum the words of q, k, v and out."""
        return bool(self._call.sums_inputs)

    @property
    def found(self) -> dict[str, int]:
        """What it found when it did so last: see `reference.cpu.checksum`."""
        found: dict[str, int] = self._call.found
        return found

    def backward(
        self, seen: HostSignature, gradients: Gradients, *, sums_inputs: bool = False
    ) -> bool:
        """Compute gradients for the arrays of a signature; return whether it could be done."""
        if self._of_mask is not None and not self._of_mask(self._call, seen.numbers):
            return False
        named, of_lookups = self._load(seen), []
        if self._order:
            arrays = tuple(gradients.dlookups.values())
            of_lookups = [[arrays[n] for n in self._order]]
        self._run(
            named["d_out"], named["q"], named["k"], named["v"], named["out"], named["lse"],
            named["dlse"], named.get("sink"), *gradients, *of_lookups, sums_inputs=sums_inputs,
        )  # fmt: skip
        return True

    def place(self, wants_lse: bool, by_team: bool) -> int:
        """Let `host_quick` make it again, which belongs to the caller.

        Short calls are shared by the team of `reference.cpu`, or else by threads of OpenMP.

        Returns the bytes that are kept for it, or 0 if it cannot be.
        """
        from cupyflash.reference.cpu.addresses import address

        placed = self._placed(wants_lse, by_team)
        if placed is None:
            return 0
        own = None if wants_lse else self._call.empty_lse()
        self.quick = (
            placed.run, placed.block, placed.spares, placed.scratch, placed.threads,
            placed.by_team, 0 if own is None else address(own), placed.names, (placed, own),
        )  # fmt: skip
        return int(placed.nbytes) + (0 if own is None else own.nbytes)

    def _placed(self, wants_lse: bool, by_team: bool) -> Any:
        from cupyflash.reference.cpu.addresses import address
        from cupyflash.reference.cpu.placed import Value

        tables = [Value(address(row), name) for row, name in self._tables]
        return self._call.placed(tables, wants_lse, by_team)

    def numbered(self, numbers: tuple[int, ...]) -> bool:
        """Let it be for some numbers of the mask; return whether it can."""
        return self._of_mask is None or self._of_mask(self._call, numbers)


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

    __slots__ = ("_capacity", "_ends", "_has_usual_scale", "_is_checked", "_lengths", "_scales")

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
        self._has_usual_scale = _has_usual_scale(call.problem)

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

    def _placed(self, wants_lse: bool, by_team: bool) -> Any:  # noqa: ARG002, there is none
        return None  # `host_recent` has those that can be

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
        if (
            self._call.repeats
            and host_recent.only(lengths) is not None
            and _may_repeat(seen, self._has_usual_scale)
        ):
            arrays = named["q"], named["k"], named["v"]
            ends = _ends_of(self._ends, seen)
            made = self._call.repeat(*arrays, out, self._capacity, grows=False, ends=ends)
            if made is not None:
                host_recent.keep_cached(*arrays[:2], lengths, seen.mask, made)
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

    __slots__ = ("_ends", "_has_usual_scale", "_lengths")
    grows = True

    def __init__(
        self, made: Any, call: Call, found: KeyRange | None, numbers: tuple[int, ...]
    ) -> None:
        super().__init__(made, made.grown, (), {"q": call.q, "k": call.k, "v": call.v})
        problem = call.problem
        self._lengths = np.zeros(problem.batch, np.int64)
        self._ends = None if found is None else GrowingEnds(problem, found, numbers)
        self.serves_numbers = bool(numbers)
        self._has_usual_scale = _has_usual_scale(problem)

    def _placed(self, wants_lse: bool, by_team: bool) -> Any:  # noqa: ARG002, one thread does it
        return self._call.placed_growing(FEWEST_KEYS - 1, wants_lse)

    def forward(self, seen: HostSignature, out: Any, lse: Any) -> bool:
        """Compute out and lse, unless there are no keys, or not as many keys as values."""
        k, v = seen.named["k"], seen.named["v"]
        length, own = k.shape[-2], self._lengths
        if length != v.shape[-2] or not 0 < length <= MOST_POSITIONS:
            return False
        own.fill(length)
        named = self._load(seen)
        self._call.grow(own, None if self._ends is None else self._ends(own, seen.numbers))
        q = named["q"]
        self._run(q, k, v, named.get("sink"), out, lse)
        if (
            self._call.repeats
            # Fewer keys, of as many leaves, may be those of another kernel.
            and host_recent.least(length) >= FEWEST_KEYS
            and q.ndim == k.ndim == v.ndim == AXES
            and _may_repeat(seen, self._has_usual_scale)
        ):
            ends = _ends_of(self._ends, seen)
            made = self._call.repeat(q, k, v, out, MOST_POSITIONS, grows=True, ends=ends)
            if made is not None:
                host_recent.keep(q, length, seen.mask, made)
        return True


def _may_repeat(seen: HostSignature, has_usual_scale: bool) -> bool:
    """Return whether `host_recent` may recognise a call: nothing but a mask was said.

    That is recognised by itself, so it must look up no array.
    """
    mask = seen.mask
    if seen.written or not has_usual_scale:
        return False
    return mask is None or (isinstance(mask, Mask) and not mask.structure[1])


def _ends_of(ends: GrowingEnds | None, seen: HostSignature) -> Any:
    """Return what gives the keys that one query sees for some lengths, if a mask hides others."""
    return None if ends is None else lambda lengths: ends.of_lengths(lengths, seen.numbers)


def _has_usual_scale(problem: Problem) -> bool:
    """Return whether a call has the scale of a call that has said nothing of it."""
    return problem.scale == scalars.scale(None, problem.d, problem.accumulator)


class Calls:
    """The calls of an entry: those that nobody makes at present, and all that there are.

    Attributes
    ----------
    of_quick : int
        Bytes that they keep for `host_quick`.
    """

    __slots__ = ("_all", "free", "of_quick")

    def __init__(self) -> None:
        self.of_quick = 0
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
