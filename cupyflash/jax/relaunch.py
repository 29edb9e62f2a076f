"""The launches of a program's call on a GPU, made again by the addresses alone.

A call of a program has the same shapes, strides, types and constants whenever it runs; only the
addresses of its arrays differ. So a call that consisted of launches, and that was recognised by the
package itself (see `problem.replay`), is from then on no more than these launches with other
addresses: no arrays of CuPy are made for it. A call that asks for more, such as sums, is made by
its function each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..arrays import device_arrays
from ..arrays.tape import Step, Tape, paused
from ..problem.call import Gradients

_UNALIGNED = 15  # bits of addresses by which kernels are chosen


class Asked(NamedTuple):
    """What was asked of a device: launches, how they start, and what that is told."""

    compiled: Any
    start: Callable[..., Any]
    addresses: dict[str, int]
    gradients: Any


class LaunchTape(Tape):
    """A tape for a call of which only launches count.

    Attributes
    ----------
    asked : list of Asked
        The launches.
    kept : list of array
        What the launches may read besides the arrays of the call: it stays where it is.
    """

    def __init__(self) -> None:
        super().__init__({}, {}, lambda _: (0, 0))
        self.asked: list[Asked] = []
        self.kept: list[Any] = []

    def launch(
        self,
        compiled: Any,
        start: Callable[..., Any],
        addresses: dict[str, int],
        gradients: Any = None,
    ) -> Any:
        """Launch kernels, and note that."""
        self.asked.append(Asked(compiled, start, dict(addresses), gradients))
        with paused():
            return start(addresses) if gradients is None else start(addresses, gradients, None)

    def _add(self, step: Step, slots: Sequence[int]) -> None:
        del step, slots
        self.why = "more than launches was asked for"


class Relaunch:
    """Makes the launches of a call again.

    Parameters
    ----------
    asked : Asked
        The launches.
    places : sequence of (str, int, int)
        For each address that they take from an array of the call: its name, the number of the
        array, and how far it is from where that begins.
    fixed : mapping of str to int
        The other ones, and numbers.
    filled : int or None
        The number of the array to which launches add, so that it is filled with 0 before.
    """

    __slots__ = ("_fixed", "_places", "_start", "filled")

    def __init__(
        self,
        asked: Asked,
        places: Sequence[tuple[str, int, int]],
        fixed: Mapping[str, int],
        filled: int | None,
    ) -> None:
        self._start = asked.start, asked.gradients is not None
        self._places, self._fixed, self.filled = tuple(places), fixed, filled

    def __call__(self, addresses: Sequence[int], filled: Any = None) -> None:
        """Launch with the addresses of a call's arrays.

        The device and the stream are the current ones. `filled` is the array that has this number.
        """
        told = dict(self._fixed)
        for name, n, offset in self._places:
            told[name] = addresses[n] + offset
        start, has_gradients = self._start
        if has_gradients:
            start(told, _NO_GRADIENTS._replace(dq=filled), None)
        else:
            start(told)


_NO_GRADIENTS = Gradients(*(None,) * len(Gradients._fields))


class Relaunches:
    """The launches of a call, for each device and stream on which it runs.

    Parameters
    ----------
    sizes : sequence of int
        The bytes of the arrays of the call: operands, and then results.
    """

    _MOST_TRIES = 4  # the second call is recognised, if any is

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._found: dict[tuple[int, int], Relaunch] = {}
        self._tries: dict[tuple[int, int], int] = {}
        self._last: dict[tuple[int, int], Any] = {}

    def find(self, device: int, stream: int, addresses: Sequence[int]) -> Relaunch | None:
        """Return the launches if they serve arrays at these addresses."""
        found = self._found.get((device, stream))
        if found is not None:
            for address in addresses:
                if address & _UNALIGNED:
                    return None
        return found

    def tape(self, device: int, stream: int, addresses: Sequence[int]) -> LaunchTape | None:
        """Return a tape for a call that is to be made, or None if it would be of no use."""
        key = device, stream
        tries = self._tries.get(key, 0)
        if tries >= self._MOST_TRIES or any(address & _UNALIGNED for address in addresses):
            return None
        self._tries[key] = tries + 1
        return LaunchTape()

    def keep(self, device: int, stream: int, tape: LaunchTape, addresses: Sequence[int]) -> None:
        """Keep the launches of a call that was made, and all of whose results they wrote."""
        key = device, stream
        if len(tape.asked) != 1:
            return
        (asked,) = tape.asked
        before, self._last[key] = self._last.get(key), asked.compiled
        if before is asked.compiled and tape.why is None:  # it was recognised
            made = self._relaunch(asked, tape.kept, addresses)
            if made is not None:
                self._found[key] = made

    def _relaunch(
        self, asked: Asked, kept: Sequence[Any], addresses: Sequence[int]
    ) -> Relaunch | None:
        compiled = asked.compiled
        if compiled.all_zero:
            return None
        spans = [
            (begin, begin + size, n)
            for n, (begin, size) in enumerate(zip(addresses, self._sizes, strict=True))
            if size
        ]
        ordered = sorted(spans)
        if any(one[1] > other[0] for one, other in itertools.pairwise(ordered)):
            return None  # which array is meant is not known
        stays = [(begin, begin + x.nbytes) for x in kept for begin in [device_arrays.address(x)]]
        places: list[tuple[str, int, int]] = []
        fixed: dict[str, int] = {}
        for name, value in asked.addresses.items():
            if name not in compiled.launches.names or name in compiled.own_names:
                continue
            owner = next((span for span in spans if span[0] <= value < span[1]), None)
            if name == "seed" or any(low <= value < high for low, high in stays):
                fixed[name] = value
            elif owner is not None:
                places.append((name, owner[2], value - owner[0]))
            else:
                return None
        filled = None
        if asked.gradients is not None and compiled.adds_to_dq:
            at = device_arrays.address(asked.gradients.dq)
            filled = next((n for n, begin in enumerate(addresses) if begin == at), None)
            if filled is None:
                return None
        return Relaunch(asked, places, fixed, filled)
