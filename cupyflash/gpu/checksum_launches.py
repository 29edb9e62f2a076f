"""Notices changes of arrays in device memory, without waiting for the device.

Arrays are summed by one launch when a call is made. Another one behind the call's backward sums
them again, and compares: if the sums differ, it fills the gradients with NaN, and leaves word in
host memory, which later calls read.

Of short calls, these two launches are a large part. So of calls with equal signatures, the first
`FIRST` are checked, and then one of as many as it takes to keep the time within `SHARE`; or every
one, if the caller asks for it.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays import cuda_device, device_arrays, reports
from ..expr.evaluate import evaluate
from ..expr.key_range import key_range
from ..expr.nodes import Expr, walk
from ..problem.bound_exprs import trees
from ..problem.call import Array, Call, Gradients
from . import driver, params
from .kernels import rowwise
from .launch import Addresses, CompiledRecipe, compiled_recipe
from .params import MAX_AXES, MAX_SUMMED, REPORTS, Summed
from .specialisation import Specialisation
from .writer import Launch, Recipe

WORD = 8  # bytes
WARPS = rowwise.ROWS.threads // 32
BLOCK = 1 << 14  # bytes that a block loads at once
MOST_BLOCKS = 512  # of an array
OTHERS = "another array"

FIRST = 8  # calls with equal signatures that are checked in any case
SHARE = 0.02  # of a backward's time
COUNTING = 0.1e-6  # seconds that a call takes which is not checked
COLD, RARELY = 2.5, 16  # what the host does once in so many calls, or less, is in no cache
# What that time is guessed from: seconds of host or device for each launch and the least that a
# backward takes; bytes that an SM loads in a second, and operations of 16-bit numbers.
LAUNCH, LEAST = 25e-6, 40e-6
BANDWIDTH, OPERATIONS = 30e9, 4e12
UNKNOWN = 0.25  # share of the pairs that take part, if a mask does not tell


class Kind:
    """What is kept of calls with equal signatures.

    Parameters
    ----------
    named : mapping of str to array
        The arrays, by the names of their addresses.
    shown : sequence of str
        The names that users have for them.
    every : int
        One of how many calls is checked, behind the first ones.

    Attributes
    ----------
    every : int
        As it was given.
    is_due : callable
        Counts a call, and returns whether it is to be checked. No call takes less time for that.
    """

    def __init__(self, named: Mapping[str, Array], shown: Sequence[str], every: int) -> None:
        device = device_arrays.device_of(next(iter(named.values())))
        assert device is not None
        self.every = every
        self.queue = driver.queue(device)
        self._rows = _rows(named, [word_of(name) for name in shown])
        self.size = WORD * (1 + WARPS * (self._rows[-1][1].end if self._rows else 0))
        with cuda_device.current(device):
            self.sums = compiled_recipe(Recipe(tuple(launches(self._rows))), device)
        self._comparisons: dict[Hashable, CompiledRecipe] = {}
        first = range(1, every * -(-FIRST // every) + 1)  # one has been made
        turn = itertools.cycle([False] * (every - 1) + [True])
        due = itertools.chain([n % every == 0 or n < FIRST for n in first], turn)
        self.is_due: Callable[[], bool] = due.__next__

    def comparison(self, gradients: Mapping[str, Array]) -> CompiledRecipe:
        """Return the launches that sum again and compare, for gradients of these names.

        Their shapes are those of arrays that are summed.
        """
        key = tuple(gradients)
        found = self._comparisons.get(key)
        if found is None:
            made = Recipe(tuple(launches(self._rows, gradients)))
            found = self._comparisons[key] = compiled_recipe(made, self.queue.device)
        return found


def calls_between(call: Call, nbytes: int, multiprocessors: int) -> int:
    """Return of how many calls one is to be checked, so that this takes `SHARE` of the time.

    Parameters
    ----------
    call : Call
        One of them.
    nbytes : int
        The size of the arrays that are summed.
    multiprocessors : int
        Of the device.
    """
    problem = call.problem
    pairs: float
    if call.rows.unread:  # sequences may have any lengths: as if these were equal
        pairs = float(call.q.shape[-2]) * call.k.shape[-2] / max(1, problem.batch)
    else:
        pairs = float(np.sum(np.multiply(problem.len_q, problem.len_k, dtype=float)))
        if np.ndim(problem.len_q) == np.ndim(problem.len_k) == 0:
            pairs *= problem.batch
    pairs *= problem.heads * seen_share(call)
    operations = 5.0 * pairs * (problem.d + problem.d_v) * problem.dtype.itemsize / 2
    backward = max(LEAST, operations / (OPERATIONS * multiprocessors))
    summing = nbytes / (BANDWIDTH * multiprocessors)
    time = SHARE * backward - COUNTING
    every = 2 * (LAUNCH + summing) / time
    if every > RARELY:
        every = 2 * (COLD * LAUNCH + summing) / time
    return max(1, math.ceil(every))


def seen_share(call: Call) -> float:
    """Return about which share of the pairs of queries and keys a mask lets take part."""
    allowed = trees(call).allowed
    if allowed is None:
        return 1.0
    problem = call.problem
    found = key_range(allowed, problem)
    if found is None or any(end is not None and _reads(end) for end in found):
        return UNKNOWN
    queries, keys = (int(np.max(n, initial=0)) for n in (problem.len_q, problem.len_k))
    if not queries or not keys:
        return 1.0
    symbols: dict[str, Any] = {name: np.int64(0) for name in ("b", "h")}
    symbols |= {"i": np.linspace(0, queries - 1, 33).astype(np.int64)}
    symbols |= {"len_q": np.int64(queries), "len_k": np.int64(keys)}
    low, high = found
    first = 0 if low is None else np.maximum(evaluate(low, symbols), 0)
    last = keys - 1 if high is None else np.minimum(evaluate(high, symbols), keys - 1)
    return float(np.mean(np.clip((last - first + 1) / keys, 0, 1)))


def _reads(end: Expr) -> bool:
    return any(node.op == "lookup" for node in walk(end))


def _rows(named: Mapping[str, Array], words: Sequence[int]) -> list[tuple[str, Summed]]:
    """Return how arrays with elements are divided into blocks, numbered one after the other."""
    rows, end = [], 0
    for (name, array), word in zip(named.items(), words, strict=True):
        if array.size:
            begin, size, axes = layout_of(array)
            end += max(1, min(MOST_BLOCKS, -(-size * _units(axes) // BLOCK)))
            rows.append((name, _summed(begin, size, axes, end, word)))
    return rows


def launches(
    rows: Sequence[tuple[str, Summed]], gradients: Mapping[str, Array] | None = None
) -> list[Launch]:
    """Return the launches that sum arrays, each warp into a word at the address "kept".

    With `gradients`, they compare with what lies there instead.

    Parameters
    ----------
    rows : sequence of (str, Summed)
        The arrays, by the names of their addresses.
    gradients : mapping of str to array, optional
        What NaN is written to if any sum differs, by the names of its addresses; they have no gaps.
        Then there are also a "turn", larger in each of several comparisons with the same sums, and
        the address "report".
    """
    layout = params.rowwise("checksum")
    common = [(layout.place("kept"), "kept")]
    values: dict[str, Any] = {}
    if gradients is not None:
        common += [(layout.place(name), name) for name in ("report", "turn")]
        common += [(layout.place(f"gradient {n}"), name) for n, name in enumerate(gradients)]
        values["gradient_bytes"] = [array.nbytes for array in gradients.values()]
    made, first = [], 0
    for begin in range(0, len(rows), MAX_SUMMED):
        group = rows[begin : begin + MAX_SUMMED]
        slots = [(layout.place(f"array {n}"), name) for n, (name, _) in enumerate(group)]
        values["arrays"] = [row._replace(end=row.end - first) for _, row in group]
        values["first_block"] = first
        end = group[-1][1].end
        made.append(Launch(_special(), end - first, layout.pack(values), (*common, *slots)))
        first = end
    return made


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


class Sums:
    """What arrays in device memory contained when this was made.

    Parameters
    ----------
    kind : Kind
        What is known of such calls.
    addresses : dict of str to int
        Where the arrays are; it is changed.
    out : array
        One of them, which the call has made.
    """

    __slots__ = ("_addresses", "_kind", "_memory", "_turns")

    def __init__(self, kind: Kind, addresses: Addresses, out: Array) -> None:
        self._kind, self._addresses = kind, addresses
        self._turns = itertools.count(1)
        if kind.queue.is_here():
            self._sum(out)
        else:
            with cuda_device.current(kind.queue.device):
                self._sum(out)

    def _sum(self, out: Array) -> None:
        self._memory = memory = device_arrays.memory(self._kind.size)
        self._addresses["kept"] = memory.ptr
        self._kind.sums.forward(self._addresses)
        if self._kind.queue.current_stream().is_capturing():
            device_arrays.keep_with(out, memory)  # the graph writes to it as long as it exists

    def compare(self, gradients: Gradients) -> None:
        """Write NaN to gradients without gaps, if the arrays have changed."""
        if self._kind.queue.is_here():
            self._compare(gradients)
        else:
            with cuda_device.current(self._kind.queue.device):
                self._compare(gradients)

    def _compare(self, gradients: Gradients) -> None:
        named = {
            name: array
            for name, array in zip(Gradients._fields, gradients, strict=True)
            if array is not None
        }
        addresses = self._addresses.copy()
        for name, array in named.items():
            addresses[name] = array.data.ptr
        addresses["turn"] = next(self._turns)
        addresses["report"] = reports.address(self._kind.queue.device, reports.CHANGED)
        self._kind.comparison(named).forward(addresses)


_lock = threading.Lock()
_names: dict[str, int] = {}
_MOST_NAMES = 63


def word_of(name: str) -> int:
    """Return which word of a report stands for a name; the last one stands for several."""
    with _lock:
        if name not in _names and len(_names) == _MOST_NAMES:
            return _MOST_NAMES
        return _names.setdefault(name, len(_names))


def names_of(words: Sequence[int]) -> list[str]:
    """Return the names that a report is about."""
    found = [name for name, bit in _names.items() if words[bit]]
    return found + [OTHERS] * bool(words[_MOST_NAMES])


def reported(array: Any) -> list[str]:
    """Return the names of arrays of which kernels on an array's device have reported changes.

    It returns each report once.
    """
    words = reports.words(array.data.device_id)
    if words is None or not words[REPORTS - 1]:
        return []
    words[REPORTS - 1] = 0  # first: a kernel writes it last
    names = names_of(words)
    for n in range(REPORTS - 1):
        words[n] = 0
    return names
