"""The launches of a call that some program repeats, made again by the addresses alone.

A call of a compiled program has the same shapes, strides, types and constants whenever it runs;
only the addresses of its arrays differ. So a call that consisted of launches, and that the package
recognised itself (see `problem.replay`), is from then on no more than these launches with other
addresses: no array of CuPy is made for it, and CuPy's current stream is not asked for. A call that
asks for more, such as sums, is made by its function each time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..arrays import device_arrays, reports
from ..arrays.tape import Step, Tape, paused
from . import driver
from .launch import CompiledRecipe

_UNALIGNED = 15  # bits of addresses by which kernels are chosen
_WORD = 4  # bytes of what is filled with 0


class Asked(NamedTuple):
    """What was asked of a device: launches, what they were told, and the gradients they wrote."""

    compiled: CompiledRecipe
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
        self.asked.append(Asked(compiled, dict(addresses), gradients))
        with paused():
            return start(addresses) if gradients is None else start(addresses, gradients, None)

    def _add(self, step: Step, slots: Sequence[int]) -> None:
        del step, slots
        self.why = "more than launches was asked for"


class _Fill(NamedTuple):
    """Memory that is filled with 0 before: its place in what is told, an offset, and bytes."""

    told: int
    offset: int
    nbytes: int


class _Scratch:
    """Scratch memory of the launches on one stream: it is given out again in the stream's order.

    So what one call had serves the next one as soon as its launches have been asked for.
    """

    def __init__(self, device: int, stream: int) -> None:
        self._device, self._stream = device, stream
        self._unused: list[tuple[int, Any]] = []

    def take(self, size: int) -> tuple[int, Any]:
        """Return at least so many bytes: how many, and the memory."""
        try:
            found = self._unused.pop()
        except IndexError:
            found = 0, None
        if found[0] >= size:
            return found
        with device_arrays.on_stream(self._stream, self._device):
            return size, device_arrays.memory(size)

    def give_back(self, taken: tuple[int, Any]) -> None:
        """Let others have it."""
        self._unused.append(taken)


_scratch: dict[tuple[int, int], _Scratch] = {}


class Relaunch:
    """Makes the launches of a call again on one stream.

    Parameters
    ----------
    asked : Asked
        The launches.
    places : mapping of str to (int, int)
        For each address that they take from an array of the call: the number of the array, and how
        far it is from where that begins.
    fixed : mapping of str to int
        The other ones, and numbers.
    count : int
        How many arrays the call has.
    stream : int
        The stream.
    """

    __slots__ = ("_buffers", "_fills", "_parts")

    def __init__(
        self,
        asked: Asked,
        places: Mapping[str, tuple[int, int]],
        fixed: Mapping[str, int],
        count: int,
        stream: int,
    ) -> None:
        compiled = asked.compiled
        launches, queue, uploads = compiled.launches, compiled.queue, compiled.uploads
        upload = None if uploads is None else uploads.of(stream)
        nothing = count + 1  # after the arrays and scratch memory
        fixed = {**fixed, **(compiled.reports or {})}
        fixed |= {} if upload is None else upload.addresses
        numbers = {**places, **{name: (count, place) for name, place in compiled.places}}
        numbers |= {name: (nothing, value) for name, value in fixed.items()}
        self._buffers = launches.buffers(launches.told(numbers))
        self._fills: list[_Fill] = []
        if asked.gradients is not None and compiled.adds_to_dq:
            self._fills.append(_Fill(*places["dq"], asked.gradients.dq.nbytes))
        memory = _scratch.setdefault((queue.device, stream), _Scratch(queue.device, stream))
        size = compiled.scratch_size
        self._parts = queue, stream, size, memory, bool(compiled.reports), upload

    def __call__(self, addresses: Sequence[int]) -> bool:
        """Launch with the addresses of a call's arrays; return whether this thread can."""
        queue, stream, size, memory, has_reports, _ = self._parts
        if not queue.is_open():
            return False
        if has_reports:
            reports.refuse_offsets(queue.device)
        taken, at_scratch = None, 0
        if size:
            taken = memory.take(size)
            at_scratch = taken[1].ptr
        told = (*addresses, at_scratch, 0)
        for n, offset, nbytes in self._fills:
            if failed := queue.clear(told[n] + offset, 0, nbytes // _WORD, stream):
                raise driver.error(failed, driver.CLEAR)
        buffer = self._buffers.take()
        if failed := queue.launch(buffer.block, stream, *told):
            raise buffer.error(failed)
        self._buffers.unused.append(buffer)
        if taken is not None:
            memory.give_back(taken)
        return True


class Relaunches:
    """The launches of a call, for each stream on which it runs.

    Parameters
    ----------
    sizes : sequence of int
        The bytes of the arrays of the call: those that are read, and then those that are written.
    """

    _MOST_TRIES = 4  # the second call is recognised, if any is

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._found: dict[int, Relaunch] = {}
        self._tries: dict[int, int] = defaultdict(int)
        self._last: dict[int, CompiledRecipe] = {}

    def launch(self, stream: int, addresses: Sequence[int]) -> bool:
        """Make the call again; return whether that was done.

        It is not if the current device is not that of the call that was kept.
        """
        found = self._found.get(stream)
        if found is None:
            return False
        for address in addresses:
            if address & _UNALIGNED:
                return False
        return found(addresses)

    def tape(self, stream: int, addresses: Sequence[int]) -> LaunchTape | None:
        """Return a tape for a call that is to be made, or None if it would be of no use."""
        known = stream in self._found or self._tries[stream] >= self._MOST_TRIES
        if known or any(address & _UNALIGNED for address in addresses):
            return None
        self._tries[stream] += 1
        return LaunchTape()

    def keep(self, stream: int, tape: LaunchTape, addresses: Sequence[int]) -> None:
        """Keep the launches of a call that was made, and all of whose results they wrote."""
        if len(tape.asked) != 1:
            return
        (asked,) = tape.asked
        before, self._last[stream] = self._last.get(stream), asked.compiled
        if before is asked.compiled and tape.why is None:  # it was recognised
            made = self._relaunch(asked, tape.kept, addresses, stream)
            if made is not None:
                self._found[stream] = made

    def _relaunch(
        self, asked: Asked, kept: Sequence[Any], addresses: Sequence[int], stream: int
    ) -> Relaunch | None:
        compiled, gradients = asked.compiled, asked.gradients
        if compiled.all_zero or compiled.launches.waits or not compiled.queue.functions.launch:
            return None
        spans = [
            (begin, begin + size, n)
            for n, (begin, size) in enumerate(zip(addresses, self._sizes, strict=True))
            if size
        ]
        if any(one[1] > other[0] for one, other in itertools.pairwise(sorted(spans))):
            return None  # which array is meant is not known
        stays = [(begin, begin + x.nbytes) for x in kept for begin in [device_arrays.address(x)]]
        wanted = set(compiled.launches.names) - compiled.own_names
        if gradients is not None and compiled.adds_to_dq:
            wanted.add("dq")
            if gradients.dq.nbytes % _WORD:
                return None
        places: dict[str, tuple[int, int]] = {}
        fixed: dict[str, int] = {}
        for name in wanted:
            value = asked.addresses[name]
            owner = next((span for span in spans if span[0] <= value < span[1]), None)
            if name == "seed" or any(low <= value < high for low, high in stays):
                fixed[name] = value
            elif owner is not None:
                places[name] = owner[2], value - owner[0]
            else:
                return None
        return Relaunch(asked, places, fixed, len(addresses), stream)
