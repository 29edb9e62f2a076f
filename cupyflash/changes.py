"""Notices changes of arrays that a function of gradients keeps, between its call and that before.

Short arrays are copied, and of others, a sum over their bits is kept: it costs a hundredth of a
backward. Arrays in device memory would have to be waited for, so here they are compared only with
the environment variable ``CUPYFLASH_DEBUG=1``. Otherwise `gpu.checksum_launches` does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .arrays.device_arrays import address, is_device_array
from .backends.cpu import checksums
from .errors import ArgumentError
from .gpu import checksum_launches, launch_cache
from .problem import cached, validate
from .problem.call import Array, Call
from .problem.options import Options
from .request import Request

SHORT = 1 << 14  # bytes of an array that is copied
RESULTS = "out", "lse"


def looks_at(array: Any) -> bool:
    """Whether changes of arrays like this one are noticed."""
    return not is_device_array(array) or cached.CHECKS_ALL


class Snapshot:
    """What arrays contained when this was made.

    Parameters
    ----------
    named : mapping of str to array
        The arrays, by the names that users have for them.
    """

    __slots__ = ("_named", "_seen")

    def __init__(self, named: Mapping[str, Array]) -> None:
        self._named = {name: array for name, array in named.items() if looks_at(array)}
        self._seen = _contents(self._named.values())

    def changed(self) -> list[str]:
        """Return the names of arrays whose bits are not what they were."""
        now = _contents(self._named.values())
        pairs = zip(self._named, self._seen, now, strict=True)
        return [name for name, a, b in pairs if a is not None and b is not None and a != b]

    def check(self) -> list[str]:
        """Return which of `RESULTS` have changed; refuse changes of what a call read."""
        changed = self.changed()
        inputs = [name for name in changed if name not in RESULTS]
        if inputs:
            raise refused(inputs)
        return changed

    def replace(self, arrays: Mapping[str, Array]) -> None:
        """Take other arrays with the same contents in place of some."""
        self._named |= {name: x for name, x in arrays.items() if name in self._named}


def refused(names: Iterable[str]) -> ArgumentError:
    """Return the error for arrays whose change would make gradients wrong."""
    listed = ", ".join(names)
    return ArgumentError(
        f"vjp: got arrays that were changed in place after the forward call: {listed}; expected "
        "what that call read, because gradients are computed from it. Write x = x + y instead of "
        "x += y, or pass copies to the forward call."
    )


def sums(request: Request, results: Mapping[str, Array]) -> checksum_launches.Sums | None:
    """Return what tells whether arrays in device memory have changed, without waiting for it.

    Parameters
    ----------
    request : Request
        The call, whose arrays are CuPy's.
    results : mapping of str to array
        Its `RESULTS`.
    """
    seen = request.signature("sums", results, {})
    if seen is None:  # then the call has been checked
        named = dict(results) | {x: y for x, y in _read(request.call).items() if is_device_array(y)}
        seen = launch_cache.signature(("sums", *named), named, Options(), {})
    if seen is None:
        return None

    def shown(arrays: Mapping[str, Array]) -> list[str]:
        places = {address(x): name for name, x in results.items()}
        for name, x in _read(request.call).items():
            if is_device_array(x):
                places.setdefault(address(x), name)
        return [places.get(address(x), name) for name, x in arrays.items()]

    return checksum_launches.Sums(seen, shown)


def _read(call: Call) -> dict[str, Array]:
    """Return the arrays that a call reads, by the names that users have for them."""
    named = validate.read_arrays(call)
    return named | dict(call.rows.offsets)


def refuse_reported(array: Array) -> None:
    """Raise an error if kernels on an array's device found changes that nobody was told of yet."""
    names = checksum_launches.reported(array)
    if names:
        raise ArgumentError(
            "vjp: an earlier call on this device got arrays that were changed in place after the "
            f"forward call: {', '.join(names)}; expected what the forward call read and returned, "
            "because gradients are computed from it. The gradients of that call are NaN. Write "
            "x = x + y instead of x += y, or pass copies to the forward call."
        )


def _contents(arrays: Iterable[Array]) -> list[Any]:
    """Return for each array what tells whether its bits have changed; None if it is not known."""
    found: list[Any] = []
    longer: dict[int, Array] = {}
    for array in arrays:
        held: Any = cached.readable(array)
        if held is None:
            found.append(None)  # a graph is being captured
        elif held.nbytes <= SHORT:
            found.append(held.tobytes())
        else:
            longer[len(found)] = held
            found.append(0)
    if longer:
        sums = checksums(list(longer.values()))
        for n, number in zip(longer, sums, strict=True):
            found[n] = number
    return found
