"""The first and last key of every query, for masks that let each query see one range of keys.

Causal masks, windows, lengths, prefixes and many combinations of them are such masks. For these the
CPU kernels compare keys with two numbers, and interpret nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..expr.bind import NO_NUMBERS
from ..expr.evaluate import NUMPY, evaluate, node_value
from ..expr.key_range import KeyRange
from ..expr.nodes import Expr, walk
from ..expr.sizes import position_symbols
from ..expr.structure import named
from ..problem.call import Array, Problem

_FIRST, _LAST = 0, 2**62


def ends(
    problem: Problem,
    found: KeyRange,
    len_k: Array | None = None,
    numbers: Mapping[str, int] = NO_NUMBERS,
) -> tuple[Array, Array]:
    """Return the ends of each query's keys.

    Parameters
    ----------
    problem : Problem
        The problem.
    found : KeyRange
        Both ends as expressions.
    len_k : numpy.ndarray, optional
        The number of keys of each batch entry, (B,), if the problem has only its range.
    numbers : mapping of str to int, optional
        Those of the expressions' other symbols.

    Returns
    -------
    tuple of (numpy.ndarray, numpy.ndarray)
        The first and the last key, int64, (B or 1, H or 1, L), or (H or 1, total) for packed
        sequences. If a query has no keys, its last key is before its first.
    """
    low, high = _evaluated(problem, found, problem.len_k if len_k is None else len_k, numbers)
    first, last = problem.rows.by_row((low, high), problem.batch)
    return first, last


def ends_if_any(
    problem: Problem, found: KeyRange, numbers: Mapping[str, int] = NO_NUMBERS
) -> tuple[Array, Array] | None:
    """Return the ends of each query's keys; None if every query sees all keys of its entry."""
    low, high = _evaluated(problem, found, problem.len_k, numbers)
    last = _by_query(problem, problem.len_k) - 1
    if low.size and (low <= _FIRST).all() and (high >= last).all():
        return None
    first, last = problem.rows.by_row((low, high), problem.batch)
    return first, last


def _by_query(problem: Problem, value: Any) -> Array:
    """Return a number of each entry for each of its queries."""
    array = np.asarray(value, np.int64)
    if array.ndim == 0:
        return array
    made: Array = np.broadcast_to(array, (problem.batch,))[problem.rows.queries(problem.batch)[0]]
    return made


def _symbols(problem: Problem, len_k: Any, numbers: Mapping[str, int]) -> dict[str, Any]:
    """Return the values of all symbols for each query."""
    batch = problem.batch
    b, i = problem.rows.queries(batch)
    h = np.arange(problem.heads)[:, None]
    of_rows = {
        name: value if np.ndim(value) == 0 else np.broadcast_to(value, (batch,))[b]
        for name, value in (
            ("len_q", problem.len_q),
            ("len_k", len_k),
            ("start_q", problem.start_q),
            ("start_k", problem.start_k),
        )
    }
    return position_symbols(b, h, i, 0, SimpleNamespace(**of_rows)) | dict(numbers)


def _evaluated(
    problem: Problem, found: KeyRange, len_k: Any, numbers: Mapping[str, int]
) -> tuple[Array, Array]:
    """Return both ends of each query, in the order of entries."""
    symbols = _symbols(problem, len_k, numbers)
    low, high = (
        np.asarray(unbounded if end is None else evaluate(end, symbols), np.int64)
        for end, unbounded in zip(found, (_FIRST, _LAST), strict=True)
    )
    i = symbols["i"]
    shape = np.broadcast_shapes(low.shape, high.shape, (1,) * (i.ndim == 1) + i.shape)
    return np.broadcast_to(low, shape), np.broadcast_to(high, shape)


MOST_NUMBERS, MOST_ENDS = 8, 1 << 14  # of a mask, for which ends are kept if they are so few


class OtherNumbers:
    """Gives a call the keys that each query sees for other numbers of its mask.

    Parameters
    ----------
    problem : Problem
        The problem of the call.
    found : KeyRange
        The keys that each query sees.
    numbers : tuple of int
        The numbers for which the call was made.
    """

    __slots__ = ("_found", "_kept", "_numbers", "_problem")

    def __init__(self, problem: Problem, found: KeyRange, numbers: tuple[int, ...]) -> None:
        self._problem, self._found, self._numbers = problem, found, numbers
        self._kept: dict[tuple[int, ...], tuple[Array, Array]] = {}

    @classmethod
    def of(
        cls, problem: Problem, found: KeyRange | None, numbers: tuple[int, ...]
    ) -> OtherNumbers | None:
        """Return one, or None for a mask without such numbers."""
        return None if found is None or not numbers else cls(problem, found, numbers)

    def __call__(self, call: Any, numbers: tuple[int, ...]) -> bool:
        """Set a call's ends; return False if no key is hidden, so that it needs none."""
        if numbers == self._numbers:
            return True
        ends = self._kept.get(numbers)
        if ends is None:
            ends = ends_if_any(self._problem, self._found, named(numbers))
            if ends is None:
                return False
            if ends[0].size <= MOST_ENDS:
                _keep(self._kept, numbers, ends)
        self._numbers = ()  # those of no mask, if this is interrupted
        call.set_ends(ends)
        self._numbers = numbers
        return True


def _keep(kept: dict[tuple[int, ...], Any], numbers: tuple[int, ...], made: Any) -> None:
    """Keep something for some numbers of a mask, and forget what was kept for the oldest ones."""
    while len(kept) >= MOST_NUMBERS:
        del kept[next(iter(kept))]
    kept[numbers] = made


class GrowingEnds:
    """The ends of each query's keys in a cache, for any lengths and numbers of a mask.

    Parameters
    ----------
    problem : Problem
        The problem.
    found : KeyRange
        Both ends as expressions.
    numbers : tuple of int
        Those of the mask for which the expressions have symbols; none if they have no symbols.
    """

    def __init__(self, problem: Problem, found: KeyRange, numbers: tuple[int, ...]) -> None:
        self._problem, self._found, self._has_numbers = problem, found, bool(numbers)
        self._made: dict[tuple[int, ...], _EndsOfNumbers] = {}
        self._of(numbers)

    def _of(self, numbers: tuple[int, ...]) -> _EndsOfNumbers:
        made = self._made.get(numbers)
        if made is None:
            made = _EndsOfNumbers(self._problem, self._found, named(numbers))
            _keep(self._made, numbers, made)
        return made

    def __call__(self, len_k: Array, numbers: tuple[int, ...]) -> tuple[Array, Array]:
        """Return both ends, as `ends` does, or of shapes that broadcast to that."""
        return self._of(numbers if self._has_numbers else ())(len_k)

    def of_lengths(self, lengths: Array, numbers: tuple[int, ...]) -> tuple[Array, Array]:
        """Return both ends of the only query of one entry for each of some lengths."""
        return self._of(numbers if self._has_numbers else ()).of_lengths(lengths)


class _EndsOfNumbers:
    """The ends of each query's keys in a cache, for any lengths of its entries.

    What does not depend on these is computed once, when this is made.

    Parameters
    ----------
    problem : Problem
        The problem.
    found : KeyRange
        Both ends as expressions.
    numbers : mapping of str to int
        Those of the expressions' other symbols.
    """

    def __init__(self, problem: Problem, found: KeyRange, numbers: Mapping[str, int]) -> None:
        self._problem, self._found, self._numbers = problem, found, numbers
        self._entries = problem.rows.queries(problem.batch)[0]
        self._steps: list[tuple[int, Any, list[int]]] = []
        self._is_simple = not problem.rows.adjoin
        symbols = _symbols(problem, np.zeros(problem.batch, np.int64), numbers)
        slots: dict[Expr, int] = {}
        self._values: list[Any] = [None]  # the lengths, and those of all nodes
        self._varies: list[bool] = [True]
        self._ends = [self._slot(end, slots, symbols) for end in found]

    def _slot(self, end: Expr | None, slots: dict[Expr, int], symbols: dict[str, Array]) -> Any:
        """Return the place of an end among the values; None if nothing bounds it."""
        if end is None:
            return None
        with np.errstate(all="ignore"):
            for node in walk(end, known=slots):
                if node.op == "symbol" and node.value == "len_k":
                    slots[node] = 0
                    continue
                args = [slots[arg] for arg in node.args]
                slots[node] = len(self._values)
                varies = any(self._varies[arg] for arg in args)
                self._varies.append(varies)
                value = None
                if varies:
                    self._is_simple &= node.op in _QUIET
                    self._steps.append((slots[node], NUMPY.get(node.op), args))
                else:
                    value = node_value(node, [self._values[x] for x in args], symbols, np.float32)
                self._values.append(value)
        return slots[end]

    def __call__(self, len_k: Array) -> tuple[Array, Array]:
        """Return both ends, as `ends` does, or of shapes that broadcast to that."""
        if not self._is_simple:
            return ends(self._problem, self._found, len_k, self._numbers)
        return self._evaluated(len_k[self._entries])

    def of_lengths(self, lengths: Array) -> tuple[Array, Array]:
        """Return both ends of the only query of one entry for each of some lengths."""
        if self._is_simple:
            low, high = self._evaluated(lengths.reshape(-1, *(1,) * self._entries.ndim))
        else:
            each = [self(lengths[n : n + 1]) for n in range(len(lengths))]
            low, high = (np.stack(end) for end in zip(*each, strict=True))
        first, last = (np.broadcast_to(end.reshape(-1), lengths.shape) for end in (low, high))
        return first, last

    def _evaluated(self, len_k: Array) -> tuple[Array, Array]:
        """Return both ends, given the keys of each query's entry."""
        values = self._values
        values[0] = len_k
        for slot, function, args in self._steps:
            values[slot] = function(*[values[arg] for arg in args])
        low, high = (
            unbounded if end is None else values[end]
            for end, unbounded in zip(self._ends, _UNBOUNDED, strict=True)
        )
        return low, high


_UNBOUNDED = np.array([_FIRST]), np.array([_LAST])

# Operations on integers and conditions in which nothing can be out of range.
_QUIET = frozenset(
    "add subtract multiply minimum maximum negative less less_equal equal not_equal logical_and "
    "logical_or logical_xor logical_not where".split()
)
