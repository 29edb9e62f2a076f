"""Notices changes of arrays that a function of gradients keeps, between its call and that before.

Short arrays are copied, and of others, a sum over their bits is kept. A backward that is made again
finds those of q, k, v and out itself, while they are in the caches. Arrays in device memory would
have to be waited for, so here they are compared only with the environment variable
``CUPYFLASH_DEBUG=1``. Otherwise `gpu.checksum_launches` does it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from .arrays import cuda_device, reports
from .arrays.device_arrays import address, device_of, is_device_array
from .backends.cpu import checksums
from .errors import ArgumentError
from .executor import Executor
from .gpu import checksum_launches, launch_cache
from .problem import cached, replay, validate
from .problem.call import Array, Call
from .problem.options import Options

SHORT = 1 << 14  # bytes of an array that is copied
RESULTS = "out", "lse"
SUMMED = "q", "k", "v", "out"  # a backward can sum their words itself


def looks_at(array: Any) -> bool:
    """Whether changes of arrays like this one are noticed."""
    return not is_device_array(array) or cached.CHECKS_ALL


class Snapshot:
    """What arrays contained when this was made.

    Parameters
    ----------
    named : mapping of str to array
        The arrays, by name.
    request : Executor, optional
        The call that knows the names that users have for them, where these are others.
    """

    __slots__ = ("_keeps_sums", "_named", "_request", "_seen", "_sums")

    def __init__(self, named: Mapping[str, Array], request: Executor | None = None) -> None:
        self._request = request
        watched = {name: array for name, array in named.items() if looks_at(array)}
        # What a backward may sum comes last.
        self._named = dict(sorted(watched.items(), key=lambda item: item[0] in SUMMED))
        self._keeps_sums = not any(map(is_device_array, watched.values()))
        self._sums: list[Any] = []  # of longer arrays; no thread uses them
        self._seen = self._contents(len(self._named))

    def changed(self) -> list[str]:
        """Return the names of arrays whose bits are not what they were."""
        now = self._contents(len(self._named))
        pairs = zip(self._named, self._seen, now, strict=True)
        return [name for name, a, b in pairs if a is not None and b is not None and a != b]

    def is_unchanged_apart_from_summed(self) -> bool:
        """Return whether all but `SUMMED` are as they were, and the sums of these are known."""
        count = sum(name not in SUMMED for name in self._named)
        seen = self._seen[:count]
        return all(type(x) is int for x in self._seen[count:]) and self._contents(count) == seen

    def has(self, sums: Mapping[str, int]) -> bool:
        """Return whether arrays had these sums of their bits."""
        seen = dict(zip(self._named, self._seen, strict=True))
        return all(seen.get(name) == x for name, x in sums.items())

    def _contents(self, count: int) -> list[Any]:
        """Return what tells whether the bits of the first arrays have changed.

        It is None for an array in device memory while a graph is being captured.
        """
        arrays: list[Any] = [*map(cached.readable, itertools.islice(self._named.values(), count))]
        sums = iter(self._sums_of([x for x in arrays if x is not None and x.nbytes > SHORT]))
        return [
            None if x is None else x.tobytes() if x.nbytes <= SHORT else next(sums) for x in arrays
        ]

    def _sums_of(self, arrays: list[Array]) -> list[int]:
        if not arrays:
            return []
        try:
            sums = self._sums.pop()
        except IndexError:
            sums = None
        if sums is None or not sums.begins_with(arrays):
            sums = checksums(arrays)
        found: list[int] = sums.of_first(len(arrays))
        if self._keeps_sums:
            self._sums.append(sums)
        return found

    def check(self) -> list[str]:
        """Return which of `RESULTS` have changed; refuse changes of what a call read."""
        changed = self.changed()
        inputs = [name for name in changed if name not in RESULTS]
        if inputs:
            raise refused(map(self._shown, inputs))
        return changed

    def _shown(self, name: str) -> str:
        """Return the name that users have for an array."""
        read = {} if self._request is None else validate.read_arrays(self._request.call)
        found = [each for each, array in read.items() if array is self._named[name]]
        return found[0] if found and name not in read else name

    def replace(self, arrays: Mapping[str, Array]) -> None:
        """Take other arrays with the same contents in place of some."""
        self._named |= {name: x for name, x in arrays.items() if name in self._named}
        self._sums.clear()


def refused(names: Iterable[str]) -> ArgumentError:
    """Return the error for arrays whose change would make gradients wrong."""
    listed = ", ".join(names)
    return ArgumentError(
        f"vjp: got arrays that were changed in place after the forward call: {listed}; expected "
        "what that call read, because gradients are computed from it. Write x = x + y instead of "
        "x += y, or pass copies to the forward call."
    )


def passes_over(request: Executor) -> bool:
    """Whether a call is a short one on a GPU that is not among those that are checked.

    It counts the call. Its forward has been computed.
    """
    try:  # it takes every call's time
        return not request.seen.entry.is_due()
    except AttributeError:
        return False  # nothing is kept


def sums(request: Executor, out: Array, lse: Array) -> checksum_launches.Sums | None:
    """Return what tells whether arrays in device memory have changed, without waiting for it.

    Reports of earlier calls are raised. It returns None if an array is of no kind that is summed.

    Parameters
    ----------
    request : Executor
        The call, whose arrays are CuPy's, and whose forward has been computed.
    out, lse : array
        Its results.
    """
    refuse_reported(out)
    seen = request.seen
    if seen is None or (entry := seen.entry) is None:
        return _of_unlike(request, {"out": out, "lse": lse})
    kind = entry.watch
    if kind is None:
        named = {**seen.arrays, "out": out, "lse": lse}
        kind = entry.watch = _kind(request.call, named)
        entry.is_due = kind.is_due
    seen.addresses["out"], seen.addresses["lse"] = address(out), address(lse)
    return checksum_launches.Sums(kind, seen.addresses, out)


def _of_unlike(request: Executor, results: Mapping[str, Array]) -> checksum_launches.Sums | None:
    """Return the sums of a call that is checked and planned each time: beside that, they are cheap.

    Of such calls, each is summed.
    """
    named = dict(results) | {x: y for x, y in _read(request.call).items() if is_device_array(y)}
    seen = launch_cache.signature(("sums", *named), named, Options(), {})
    if seen is None:
        return None
    if replay.find(seen) is None:
        replay.keep_as(seen, None, (), ())
    entry = seen.entry
    assert entry is not None
    if entry.watch is None:
        entry.watch = checksum_launches.Kind(named, list(named), 1)
    return checksum_launches.Sums(entry.watch, seen.addresses, named["out"])


def _kind(call: Call, named: Mapping[str, Array]) -> checksum_launches.Kind:
    """Return what is kept of calls like this one, whose arrays have these names in kernels."""
    places = {address(named[name]): name for name in RESULTS}
    for name, x in _read(call).items():
        if is_device_array(x):
            places.setdefault(address(x), name)
    shown = [places.get(address(x), name) for name, x in named.items()]
    device = device_of(named["out"])
    assert device is not None
    nbytes = sum(x.nbytes for x in named.values())
    multiprocessors = cuda_device.of(device).multiprocessors
    every = checksum_launches.calls_between(call, nbytes, multiprocessors)
    return checksum_launches.Kind(named, shown, every)


def _read(call: Call) -> dict[str, Array]:
    """Return the arrays that a call reads, by the names that users have for them."""
    named = validate.read_arrays(call)
    return named | dict(call.rows.offsets)


def refuse_reported(array: Any) -> None:
    """Raise an error if kernels on an array's device found changes that nobody was told of yet.

    The same goes for wrong offsets.
    """
    reports.refuse_offsets(array.data.device_id)
    names = checksum_launches.reported(array)
    if names:
        raise ArgumentError(
            "vjp: an earlier call on this device got arrays that were changed in place after the "
            f"forward call: {', '.join(names)}; expected what the forward call read and returned, "
            "because gradients are computed from it. The gradients of that call are NaN. Write "
            "x = x + y instead of x += y, or pass copies to the forward call."
        )
