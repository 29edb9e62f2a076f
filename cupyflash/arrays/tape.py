"""What a call asks of a device, written down: to be asked again with other arrays.

A call by pieces makes the same launches, copies and exchanges every time, from other memory. While
it is made for the first time, they are written to a tape, with the places of their arrays: in which
array of the call, or in which memory that the call itself asks for. To play the tape takes a
fraction of the call's time on the host, as nothing is checked and planned.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol


class _Span(NamedTuple):
    """Addresses of one slot; the last one is `high` - 1."""

    low: int
    high: int
    slot: int


class _Bytes(NamedTuple):
    """A place in a slot's memory, so many bytes from its beginning."""

    slot: int
    offset: int


class _View(NamedTuple):
    """An array in a slot's memory."""

    slot: int
    offset: int
    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...]


class _State:
    """The memory of one playing of a tape.

    Attributes
    ----------
    memory : list
        Of each slot, as CuPy's arrays have it; None where it is not there yet, or not any more.
    addresses : list of int
        Where each slot's memory begins.
    marks : dict
        Events behind which something is to begin.
    transfers : dict
        What is under way.
    """

    __slots__ = ("addresses", "exchange", "made", "marks", "memory", "timeout", "transfers")

    def __init__(self, made: Memory, slots: int, exchange: Any, timeout: float) -> None:
        self.made = made
        self.memory: list[Any] = [None] * slots
        self.addresses = [0] * slots
        self.marks: dict[int, Any] = {}
        self.transfers: dict[int, Any] = {}
        self.exchange, self.timeout = exchange, timeout

    def array(self, view: _View) -> Any:
        slot, offset, shape, dtype, strides = view
        memory = self.memory[slot]
        return self.made.strided(shape, dtype, memory + offset if offset else memory, strides)


Step = Callable[[_State], None]
_Sent = tuple[int, int, int]  # a rank, an address, and bytes


class Kernels(Protocol):
    """Launches of kernels."""

    @property
    def names(self) -> frozenset[str]:
        """The names of the addresses that they take."""


class Launches(Protocol):
    """Launches that are made together, as `cupyflash.gpu.launch.CompiledRecipe` has them."""

    @property
    def launches(self) -> Kernels:
        """The launches."""

    @property
    def scratch(self) -> Sequence[tuple[str, int, Any]]:
        """The memory that they ask for themselves; names of gradients are those that are sums."""

    @property
    def all_zero(self) -> bool:
        """Whether all gradients are 0."""

    @property
    def adds_to_dq(self) -> bool:
        """Whether dq is filled with 0 before."""


class Memory(Protocol):
    """The functions that ask for memory, that make arrays of it, and that choose the stream."""

    def memory(self, size: int) -> Any:
        """Return so many bytes of memory."""

    def strided(
        self, shape: tuple[int, ...], dtype: Any, memory: Any, strides: tuple[int, ...]
    ) -> Any:
        """Return an array."""

    def mark(self) -> Any:
        """Return an event behind all that the current stream was asked for so far."""

    def beside(self, marked: Any, computes: bool) -> AbstractContextManager[None]:
        """Make another stream the current one; it begins when a mark is reached."""


class Tape:
    """A tape.

    Parameters
    ----------
    named : mapping of str to array
        The arrays of the call, by the names of their addresses. No two of them may lie in the same
        memory.
    numbers : mapping of str to int
        Numbers that launches are told by these names.
    reach : callable
        Returns where an array's memory begins and ends, in bytes from its first element.
    """

    def __init__(
        self,
        named: Mapping[str, Any],
        numbers: Mapping[str, int],
        reach: Callable[[Any], tuple[int, int]],
    ) -> None:
        self.names = [*named, *numbers]
        self._numbers = {name: n for n, name in enumerate(self.names) if name in numbers}
        self._steps: list[Step] = []
        self._used: list[set[int]] = []  # by each step
        self._travelling: list[set[int]] = []  # what each exchange uses until it is waited for
        self._marks: list[Any] = []
        self._spans: list[_Span] = []
        self._slots = len(self.names)
        self.travels = False  # whether there are messages
        self.why: str | None = None  # it cannot be played
        for slot, array in enumerate(named.values()):
            if array.size:
                low, high = reach(array)
                begin = int(array.data.ptr)
                self._spans.append(_Span(begin + low, begin + high, slot))
        self._origins = {slot: int(array.data.ptr) for slot, array in enumerate(named.values())}
        ordered = sorted(self._spans)
        if any(one.high > other.low for one, other in itertools.pairwise(ordered)):
            self.why = "arrays share memory"

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Write down what this thread asks of the device."""
        _current.tape = self
        try:
            yield
        finally:
            _current.tape = None

    def _place(self, address: int) -> _Bytes:
        for span in reversed(self._spans):  # what was asked for last may be where others were
            if span.low <= address < span.high:
                return _Bytes(span.slot, address - self._origins[span.slot])
        self.why = "an array is of other memory"
        return _Bytes(0, 0)

    def _view(self, array: Any) -> _View:
        place = self._place(int(array.data.ptr)) if array.size else _Bytes(0, 0)
        return _View(*place, array.shape, array.dtype, array.strides)

    def _add(self, step: Step, slots: Sequence[int]) -> None:
        self._steps.append(step)
        self._used.append(set(slots))

    def allocated(self, memory: Any, size: int) -> None:
        """Note memory that was asked for."""
        slot = self._slots
        self._slots += 1
        address = int(memory.ptr)
        self._origins[slot] = address
        self._spans.append(_Span(address, address + size, slot))

        def ask(state: _State) -> None:
            memory = state.made.memory(size)
            state.memory[slot], state.addresses[slot] = memory, memory.ptr

        self._add(ask, [slot])

    def elementwise(self, work: Callable[..., None], *arrays: Any) -> None:
        """Note that a function is called with arrays."""
        views = [self._view(array) for array in arrays]

        def call(state: _State) -> None:
            work(*map(state.array, views))

        if all(array.size for array in arrays):
            self._add(call, [view.slot for view in views])

    def addressed(self, work: Callable[[list[int]], None], *arrays: Any) -> None:
        """Note that a function is called with the addresses of arrays that have elements."""
        places = [self._place(int(array.data.ptr)) for array in arrays]

        def call(state: _State) -> None:
            at = state.addresses
            work([at[slot] + offset for slot, offset in places])

        self._add(call, [slot for slot, _ in places])

    def launch(
        self,
        compiled: Launches,
        start: Callable[..., Any],
        addresses: dict[str, int],
        gradients: Any = None,
    ) -> Any:
        """Launch kernels, and note that; return what `start` returns.

        `start` takes the addresses and, if there are `gradients`, these and no workspace.
        """
        wanted = compiled.launches.names
        places = [
            (name, *(self._place(place) if name not in self._numbers else (self._numbers[name], 0)))
            for name, place in addresses.items()
            if name in wanted
        ]
        views: list[_View | None] | None = None
        if gradients is not None:
            sums = {name for name, _, _ in compiled.scratch}
            sums |= {"dq"} if compiled.adds_to_dq else set()
            views = [
                self._view(x) if x is not None and (compiled.all_zero or name in sums) else None
                for name, x in zip(gradients._fields, gradients, strict=True)
            ]
        kind = type(gradients)

        def call(state: _State) -> None:
            at = state.addresses
            told = {name: at[slot] + offset for name, slot, offset in places}
            if views is None:
                start(told)
            else:
                start(told, kind(*(None if x is None else state.array(x) for x in views)), None)

        slots = [slot for _, slot, _ in places]
        self._add(call, slots + [x.slot for x in views or () if x is not None])
        with paused():
            return start(addresses) if views is None else start(addresses, gradients, None)

    def exchange(self, sends: Sequence[Any], receives: Sequence[Any]) -> int:
        """Note that messages travel; return a number by which they are waited for."""
        there, back = (
            [(rank, self._view(content)) for rank, content in each] for each in (sends, receives)
        )

        def call(state: _State) -> Any:
            return state.exchange(
                [(rank, state.array(view)) for rank, view in there],
                [(rank, state.array(view)) for rank, view in back],
            )

        return self._travels(call, [view.slot for _, view in (*there, *back) if view.shape[0]])

    def exchange_spans(self, sends: Sequence[_Sent], receives: Sequence[_Sent]) -> int:
        """Note that messages travel, of which addresses and numbers of bytes are given."""
        there, back = (
            [(rank, *self._place(place), size) for rank, place, size in each if size]
            for each in (sends, receives)
        )

        def call(state: _State) -> Any:
            at = state.addresses
            return state.exchange(
                [(rank, at[slot] + offset, size) for rank, slot, offset, size in there],
                [(rank, at[slot] + offset, size) for rank, slot, offset, size in back],
            )

        return self._travels(call, [slot for _, slot, *_ in (*there, *back)])

    def _travels(self, begin: Callable[[_State], Any], slots: Sequence[int]) -> int:
        number = len(self._travelling)
        self.travels = True

        def call(state: _State) -> None:
            state.transfers[number] = begin(state)

        self._add(call, slots)
        self._travelling.append(self._used[-1])
        return number

    def marked(self, mark: Any) -> None:
        """Note that a mark is set."""
        number = len(self._marks)
        self._marks.append(mark)

        def call(state: _State) -> None:
            state.marks[number] = state.made.mark()

        self._add(call, [])

    @contextmanager
    def beside(self, mark: Any, computes: bool = False) -> Iterator[None]:
        """Note that what follows is asked of another stream, which begins when a mark is reached.

        `computes` is as in `device_arrays.beside`.

        What it uses stays until its exchanges are waited for: only then is it done.
        """
        number = next(n for n, each in enumerate(self._marks) if each is mark)
        first = len(self._travelling)
        before, self._steps, self._used = (self._steps, self._used), [], []
        yield
        steps, used = self._steps, set().union(*self._used)
        self._steps, self._used = before
        for travelling in self._travelling[first:]:
            travelling.update(used)

        def call(state: _State) -> None:
            with state.made.beside(state.marks.pop(number), computes):
                for step in steps:
                    step(state)

        self._add(call, list(used))

    def wait(self, number: int, what: str) -> None:
        """Note that messages are waited for."""

        def call(state: _State) -> None:
            state.transfers.pop(number).wait(state.timeout, what)

        self._add(call, list(self._travelling[number]))

    def finish(self) -> None:
        """Let memory go behind what uses it last."""
        last: dict[int, int] = {}
        for n, slots in enumerate(self._used):
            last |= dict.fromkeys(slots, n)
        for slot, n in last.items():
            if slot >= len(self.names):
                self._steps[n] = _forgetting(self._steps[n], slot)
        self._spans.clear()
        self._used.clear()
        self._travelling.clear()
        self._marks.clear()

    def play(
        self,
        made: Memory,
        arrays: Mapping[str, Any],
        numbers: Mapping[str, int],
        exchange: Any,
        timeout: float,
    ) -> None:
        """Ask it all again, with other arrays and numbers of the same names.

        `made` makes arrays, and `exchange` starts to send and to receive, as it was written down:
        arrays, or what lies at addresses.
        """
        state = _State(made, self._slots, exchange, timeout)
        for slot, name in enumerate(self.names):
            if name in self._numbers:
                state.addresses[slot] = numbers[name]
            else:
                state.memory[slot] = memory = arrays[name].data
                state.addresses[slot] = memory.ptr
        for step in self._steps:
            step(state)


def _forgetting(step: Step, slot: int) -> Step:
    def call(state: _State) -> None:
        step(state)
        state.memory[slot] = None

    return call


class _Current(threading.local):
    """The tape that a thread writes."""

    def __init__(self) -> None:
        self.tape: Tape | None = None


_current = _Current()


@contextmanager
def paused() -> Iterator[Tape | None]:
    """Return the tape of this thread, and write nothing to it for a while."""
    tape, _current.tape = _current.tape, None
    try:
        yield tape
    finally:
        _current.tape = tape


def current() -> Tape | None:
    """Return the tape that this thread writes."""
    return _current.tape


def spoil(why: str) -> None:
    """Note that what follows cannot be repeated."""
    if _current.tape is not None:
        _current.tape.why = why
