"""Notices changes of arrays in device memory, without waiting for the device.

Arrays are summed by one launch when a call is made, and by another one when its gradients are
computed. Then a third launch compares the sums. If they differ, it fills the gradients with NaN,
and leaves word in host memory, which later calls read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays import cuda_device, device_arrays
from ..problem.call import Array, Gradients
from . import launch_cache, params
from .kernels import rowwise
from .launch import CompiledRecipe, compiled_recipe
from .params import MAX_AXES, MAX_SUMMED, MAX_SUMS, Summed
from .specialisation import Specialisation
from .writer import Launch, Recipe

WORD = 8  # bytes
BLOCK = 1 << 14  # bytes that a block loads at once
MOST_BLOCKS = 512  # of an array
OTHERS = "another array"


class _Kind:
    """What is kept of calls with equal signatures.

    Parameters
    ----------
    named : mapping of str to array
        The arrays, by the names of their addresses.
    shown : sequence of str
        The names that users have for them.
    device : int
        Where they are.
    """

    def __init__(self, named: Mapping[str, Array], shown: Sequence[str], device: int) -> None:
        self.device = device
        self.words = min(len(named), MAX_SUMS)
        names = [*shown[: self.words - 1], OTHERS] if len(shown) > MAX_SUMS else shown
        self._bits = [1 << bit_of(name) for name in names]
        self.sums = compiled_recipe(Recipe(tuple(sums(named))), device)
        self._comparisons: dict[Hashable, CompiledRecipe] = {}

    def comparison(self, gradients: Mapping[str, Array]) -> CompiledRecipe:
        """Return the launch that compares sums, for gradients of these names.

        Their shapes are those of arrays that are summed.
        """
        key = tuple(gradients)
        found = self._comparisons.get(key)
        if found is None:
            made = Recipe((comparison(gradients, self._bits),))
            found = self._comparisons[key] = compiled_recipe(made, self.device)
        return found


def sums(named: Mapping[str, Array]) -> list[Launch]:
    """Return the launches that sum arrays, each into a word of its own as long as there are some.

    The words, which must be 0 before, are at the address "sums".
    """
    numbered = [
        (name, array, min(n, MAX_SUMS - 1)) for n, (name, array) in enumerate(named.items())
    ]
    held = [row for row in numbered if row[1].size]
    layout, made = params.rowwise("checksum"), []
    for group in _batches(held, MAX_SUMMED):
        rows, slots, end = [], [(layout.place("sums"), "sums")], 0
        for n, (name, array, word) in enumerate(group):
            begin, size, axes = layout_of(array)
            end += max(1, min(MOST_BLOCKS, -(-size * _units(axes) // BLOCK)))
            rows.append(_summed(begin, size, axes, end, word))
            slots.append((layout.place(f"array {n}"), name))
        values = {"arrays": rows, "count": len(rows), "blocks": end}
        made.append(Launch(_special(), end, layout.pack(values), tuple(slots)))
    return made


def comparison(gradients: Mapping[str, Array], bits: Sequence[int]) -> Launch:
    """Return the launch that compares sums, and writes NaN to gradients if they differ.

    Parameters
    ----------
    gradients : mapping of str to array
        By the names of their addresses; they have no gaps.
    bits : sequence of int
        What it adds to its report for each sum that differs.
    """
    layout = params.rowwise("checksum")
    fields = {name: layout.place(name) for name in ("sums", "before", "report")}
    slots = [(place, name) for name, place in fields.items()]
    rows = []
    for n, (name, array) in enumerate(gradients.items()):
        rows.append(_summed(0, array.nbytes, [], 0, 0))
        slots.append((layout.place(f"array {n}"), name))
    most = max((array.nbytes for array in gradients.values()), default=0)
    blocks = max(1, min(MOST_BLOCKS, -(-most // BLOCK)))
    values = {"arrays": rows, "bits": list(bits), "count": len(rows), "blocks": blocks}
    values["words"] = len(bits)
    return Launch(_special(), blocks, layout.pack(values), tuple(slots))


def layout_of(array: Array) -> tuple[int, int, list[tuple[int, int]]]:
    """Return where an array's memory begins, the bytes of a unit without gaps, and its axes.

    Axes are (length, stride) of units, the fastest first. Those along which elements repeat are
    left out. The order is that of reference/cpu/checksum.py.
    """
    begin, size, axes = 0, int(array.itemsize), []
    for count, step in zip(array.shape, array.strides, strict=True):
        if count > 1 and step:
            begin += (count - 1) * min(step, 0)
            axes.append((abs(step), count))
    axes.sort()
    while axes and axes[0][0] == size:
        size *= axes.pop(0)[1]
    joined: list[tuple[int, int]] = []
    for step, count in axes:
        if joined and joined[-1][0] * joined[-1][1] == step:
            joined[-1] = joined[-1][0] * count, joined[-1][1]
        else:
            joined.append((count, step))
    return begin, size, joined


def _units(axes: Iterable[tuple[int, int]]) -> int:
    return int(np.prod([count for count, _ in axes], dtype=np.int64))


def _summed(begin: int, size: int, axes: list[tuple[int, int]], end: int, word: int) -> Summed:
    missing = MAX_AXES - len(axes)
    shape = (*(count for count, _ in axes), *(1,) * missing)
    strides = (*(step for _, step in axes), *(0,) * missing)
    return Summed(0, begin, size, shape, strides, end, word)


def _special() -> Specialisation:
    return Specialisation(rowwise.CHECKSUM, "float32", 0, 0, rowwise.ROWS)


def _batches(rows: list[Any], size: int) -> list[list[Any]]:
    return [rows[n : n + size] for n in range(0, len(rows), size)]


class Sums:
    """What arrays in device memory contained when this was made.

    Parameters
    ----------
    seen : launch_cache.Signature
        The arrays, with the signature of calls that have such arrays.
    shown : callable
        Returns the names that users have for these arrays, by the names of their addresses. It is
        called if there was no such call yet.
    """

    __slots__ = ("_addresses", "_before", "_kind", "_unused")

    def __init__(
        self, seen: launch_cache.Signature, shown: Callable[[Mapping[str, Array]], Sequence[str]]
    ) -> None:
        entry = launch_cache.find(seen)
        if entry is None:
            named = seen.arrays
            device = device_arrays.device_of(next(iter(named.values())))
            assert device is not None
            with cuda_device.current(device):
                self._kind = _Kind(named, shown(named), device)
            launch_cache.keep_as(seen, self._kind, (), ())
        else:
            self._kind = entry.compiled
        self._addresses = seen.addresses
        size = WORD * self._kind.words
        with cuda_device.current(self._kind.device):
            self._before = memory = device_arrays.memory(2 * size)
            memory.memset_async(0, 2 * size)
            self._kind.sums.forward(self._addresses | {"sums": memory.ptr})
            if cuda_device.is_capturing():
                # A graph writes to the sums as long as it exists.
                device_arrays.keep_with(seen.arrays["out"], memory)
        self._unused = [memory + size]  # words for the first comparison, which are 0

    def again(self) -> Any:
        """Sum the arrays again; return the memory of these sums."""
        with cuda_device.current(self._kind.device):
            try:
                memory = self._unused.pop()
            except IndexError:
                size = WORD * self._kind.words
                memory = device_arrays.memory(size)
                memory.memset_async(0, size)
            self._kind.sums.forward(self._addresses | {"sums": memory.ptr})
        return memory

    def compare(self, memory: Any, gradients: Gradients) -> None:
        """Write NaN to gradients without gaps, if the arrays have changed when summed again."""
        device = self._kind.device
        named = {
            name: array
            for name, array in zip(Gradients._fields, gradients, strict=True)
            if array is not None
        }
        with cuda_device.current(device):
            addresses = {name: array.data.ptr for name, array in named.items()}
            addresses |= {"sums": memory.ptr, "before": self._before.ptr}
            addresses["report"] = _report(device)[1]
            self._kind.comparison(named).forward(addresses)


_lock = threading.Lock()
_names: dict[str, int] = {}
_reports: dict[int, tuple[memoryview, int, Any]] = {}
_MOST_NAMES = 63


def bit_of(name: str) -> int:
    """Return the bit of a report that stands for a name; the last one stands for several."""
    with _lock:
        if name not in _names and len(_names) == _MOST_NAMES:
            return _MOST_NAMES
        return _names.setdefault(name, len(_names))


def names_of(report: int) -> list[str]:
    """Return the names that a report is about."""
    found = [name for name, bit in _names.items() if report >> bit & 1]
    return found + [OTHERS] * (report >> _MOST_NAMES)


def _report(device: int) -> tuple[memoryview, int, Any]:
    """Return a word in host memory to which kernels of the current device write, and its address.

    It is there as long as the process.
    """
    found = _reports.get(device)
    if found is None:
        with _lock:
            found = _reports.get(device)
            if found is None:
                words, address, owner = device_arrays.pinned_words(1)
                found = _reports[device] = words, address, owner
    return found


def reported(array: Any) -> list[str]:
    """Return the names of arrays of which kernels on an array's device have reported changes.

    It returns each report once.
    """
    if not _reports:
        return []
    found = _reports.get(array.data.device_id)
    if found is None or not found[0][0]:
        return []
    report, found[0][0] = found[0][0], 0
    return names_of(report)
