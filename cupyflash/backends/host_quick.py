"""Makes calls on the CPU again from the addresses of their arrays, before a request is made.

What computes them is a call that `host_replay` keeps, laid out as a block of words
(`reference.cpu.placed`). Who recognises a call by other means than a signature, such as the
attributes of tensors, tells the addresses.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..masks import Mask
from ..problem import replay
from ..problem.replay import Entry
from .cpu_tiles import FEWEST_KEYS

if TYPE_CHECKING:
    from .host_calls import Replayed
    from .host_replay import HostSignature

_ndarray, _ONE, _AXES = np.ndarray, (1,), 4
MOST = 256  # calls on arrays that are kept
MOST_CONTENTS = 1 << 12  # bytes of an array of offsets that are part of a key
_known: dict[Hashable, tuple[Quick, Callable[[], Any]]] = {}


def again(q: Any, k: Any, v: Any, mask: Any, offsets: Sequence[Any] | None = None) -> Any:
    """Compute a call on NumPy arrays, which says nothing but a mask, like an earlier one.

    Of packed sequences, there are offsets. Returns the output, or None if there was none, or if the
    call must be checked again.
    """
    seen = _seen(q, k, v, mask, offsets)
    if seen is None:
        return None
    found = _known.get(seen[0])
    if found is None:
        return None
    quick, empty = found
    out = empty()
    return out if quick.run((q, k, v, out, *seen[1])) else None


def keep(
    host: HostSignature, q: Any, k: Any, v: Any, mask: Any, offsets: Sequence[Any] | None = None
) -> None:
    """Keep a call that was checked, whose signature was `host`; the others are as in `again`."""
    if not (mask is None or type(mask) is Mask) or type(q) is not _ndarray or q.itemsize == 2:
        return  # of 16 bits, an environment variable is part of the signature
    seen = _seen(q, k, v, mask, offsets)
    entry = None if seen is None or host.written else replay.find(host)
    quick = None if entry is None else Quick.of(entry, host.numbers, False, by_team=True)
    if seen is None or entry is None or quick is None or not _takes_arrays():
        return
    if quick.names != (*_ARRAYS, *(NUMBERS_OF_KEYS if seen[1] else ())):
        return
    if len(_known) >= MOST:
        for oldest in list(_known)[: MOST // 4]:  # a copy: other threads keep calls, too
            _known.pop(oldest, None)
    _known[seen[0]] = quick, entry.specs[0].empty


def _contents(offsets: Sequence[Any]) -> Hashable | None:
    """Return what tells offsets from others, or None if they are not recognised."""
    first, second = offsets
    for x in offsets:
        if type(x) is not _ndarray or x.nbytes > MOST_CONTENTS:
            return None
    of_first = first.dtype, first.shape, first.tobytes()
    if second is first:
        return of_first, None
    return of_first, (second.dtype, second.shape, second.tobytes())


def _seen(
    q: Any, k: Any, v: Any, mask: Mask | None, offsets: Sequence[Any] | None
) -> tuple[Hashable, tuple[int, ...]] | None:
    """Return the key of a call, and the numbers that it is told; None if it has no key."""
    if type(k) is not _ndarray or type(v) is not _ndarray:
        return None
    shape, of_k, of_v = q.shape, k.shape, v.shape
    contents = None
    if offsets is not None:
        contents = _contents(offsets)
        if contents is None:
            return None
    elif (
        mask is None
        and shape[-2:-1] == _ONE
        and len(shape) == len(of_k) == len(of_v) == _AXES
        and of_k[:-1] == of_v[:-1]
        and of_k[0] == shape[0]
        and 0 < of_k[2] < FEWEST_KEYS
    ):
        size = q.itemsize
        steps = *k.strides, *v.strides
        a, b, c, of_column, d, e, f, of_other = steps
        if of_column == size == of_other and not (a | b | c | d | e | f) % size:
            key = q.dtype, shape, q.strides, k.dtype, of_k[:2], of_k[3], v.dtype, of_v[3]
            told = of_k[2], a // size, b // size, c // size, d // size, e // size, f // size
            return key, told
    form = None
    if mask is not None:
        form, read = mask.structure
        if read:
            return None
    return (
        q.dtype, shape, q.strides, k.dtype, of_k, k.strides, v.dtype, of_v, v.strides, form,
        contents,
    ), ()  # fmt: skip


_ARRAYS = "q", "k", "v", "out"
# What a call of one query is told besides: how many keys there are, and how far entries, heads and
# rows of keys and of values are apart, in elements.
NUMBERS_OF_KEYS = "len_k", "k 0", "k 1", "k 2", "v 0", "v 1", "v 2"


class Quick:
    """Makes calls of an entry again from the addresses of their arrays alone.

    It keeps no call: once `replay` has forgotten the entry, there is none.

    Parameters
    ----------
    entry : Entry
        The entry, which has `Calls`.
    numbers : tuple of int
        Those of the mask.
    names : tuple of str
        The order in which addresses are told, by the kernels' names.
    wants_lse, by_team : bool
        Whether lse is computed, and whether by our own threads (`reference.cpu.team`), or else by
        another library's (`reference.cpu.openmp`).
    """

    __slots__ = ("_by_team", "_entry", "_numbers", "_wants_lse", "names")

    def __init__(
        self, entry: Entry, numbers: tuple[int, ...], names: tuple[str, ...], wants_lse: bool,
        by_team: bool,
    ) -> None:  # fmt: skip
        self._entry, self._numbers, self.names = weakref.ref(entry), numbers, names
        self._wants_lse, self._by_team = wants_lse, by_team

    @staticmethod
    def of(
        entry: Entry, numbers: tuple[int, ...], wants_lse: bool, *, by_team: bool
    ) -> Quick | None:
        """Return what makes calls of an entry again, if something does."""
        call = entry.compiled.take()
        if call is None:
            return None
        is_placed = _place(entry, call, wants_lse, by_team)
        made = Quick(entry, numbers, call.quick[7], wants_lse, by_team) if is_placed else None
        entry.compiled.free.append(call)
        return made

    def run(self, told: Sequence[Any], may_share: bool = True) -> bool:
        """Compute a call; return whether it could be done.

        It is given addresses and numbers, or arrays instead of their addresses. `may_share` says
        whether other threads than the caller's may compute it.
        """
        entry = self._entry()
        if entry is None:
            return False
        free: list[Replayed] = entry.compiled.free
        try:
            call = free.pop()
        except IndexError:
            return False
        quick = call.quick
        by_team = self._by_team
        if (
            quick is None
            or quick[5] is (not by_team)
            or (quick[4] and quick[4] != _num_threads()())
        ):
            quick = call.quick if _place(entry, call, self._wants_lse, by_team) else None
        if quick is None:
            free.append(call)
            return False
        run, block, spares, new, _, shared_by_team, own, names, _ = quick
        if (
            (shared_by_team is not None and not may_share)
            or names != self.names
            or (self._numbers and not call.numbered(self._numbers))
        ):
            free.append(call)
            return False
        try:
            scratch = spares.pop()
        except IndexError:
            scratch = new()
            call.scratch_bytes += scratch.nbytes
            _count(entry, scratch.nbytes)
        failed = run(block, scratch.address, own, *told)
        spares.append(scratch)
        free.append(call)
        entry.used = next(replay.clock)
        if failed > 1:
            raise RuntimeError(f"a CPU kernel stopped with status {failed >> 8}")
        return not failed


def _place(entry: Entry, call: Replayed, wants_lse: bool, by_team: bool) -> bool:
    """Let a call of an entry be made again from addresses; return whether it can be."""
    before = call.quick
    kept = call.place(wants_lse, by_team)
    if not kept:
        return False
    # What it had before is given back, and its scratch, if that was for other threads.
    _count(entry, kept - call.placed_bytes)
    call.placed_bytes = kept
    if before is not None and call.quick is not None and before[2] is not call.quick[2]:
        _count(entry, -call.scratch_bytes)
        call.scratch_bytes = 0
    return True


def _count(entry: Entry, nbytes: int) -> None:
    entry.nbytes += nbytes
    entry.compiled.of_quick += nbytes


@functools.cache
def _takes_arrays() -> bool:
    """Return whether the function that runs calls finds the addresses of arrays itself."""
    from cupyflash.reference.cpu.repeat import IS_POSSIBLE

    return IS_POSSIBLE


@functools.cache
def _num_threads() -> Callable[[], int]:
    from cupyflash.reference.cpu.thread_limits import num_threads

    return num_threads
