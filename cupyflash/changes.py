"""Notices changes of arrays that a function of gradients keeps, between its call and that before.

Short arrays are copied, and of others, a sum over their bits is kept: it costs a hundredth of a
backward. Arrays in device memory would have to be waited for, so they are compared only with the
environment variable ``CUPYFLASH_DEBUG=1``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from . import dispatch
from .arrays.device_arrays import is_device_array
from .errors import ArgumentError
from .problem import cached
from .problem.call import Array

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
        sums = dispatch.CPU.checksums(list(longer.values()))
        for n, number in zip(longer, sums, strict=True):
            found[n] = number
    return found
