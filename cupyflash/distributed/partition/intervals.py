"""Sets of positions: some runs of them, whose rows lie one after the other in an array."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...errors import ArgumentError
from ...lazy import cached_property


@dataclass(frozen=True)
class Intervals:
    """Intervals of positions in ascending order. No two of them touch.

    Attributes
    ----------
    ranges : tuple of range
        The runs.
    """

    ranges: tuple[range, ...]

    @staticmethod
    def of(ranges: Iterable[range]) -> Intervals:
        """Return the runs that cover some ranges of positions, in any order."""
        merged: list[range] = []
        for each in sorted((x for x in ranges if x), key=lambda x: x.start):
            if merged and merged[-1].stop > each.start:
                raise ArgumentError(
                    f"runs: got {merged[-1]} and {each}; expected every position once."
                )
            if merged and merged[-1].stop == each.start:
                merged[-1] = range(merged[-1].start, each.stop)
            else:
                merged.append(range(each.start, each.stop))
        return Intervals(tuple(merged))

    def __iter__(self) -> Iterator[range]:
        return iter(self.ranges)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    @cached_property
    def count(self) -> int:
        """The positions of all runs."""
        return sum(map(len, self.ranges))

    @cached_property
    def _starts(self) -> tuple[list[int], list[int]]:
        """The first position of each run, and the row that has it."""
        first, rows = [], [0]
        for each in self.ranges:
            first.append(each.start)
            rows.append(rows[-1] + len(each))
        return first, rows

    def rows(self, positions: range) -> range:
        """Return the rows that have some positions of one run."""
        if not positions:
            return range(0)
        first, rows = self._starts
        run = bisect.bisect_right(first, positions.start) - 1
        assert run >= 0
        assert positions.stop <= self.ranges[run].stop
        start = rows[run] + positions.start - first[run]
        return range(start, start + len(positions))

    def without(self, others: Iterable[range]) -> Intervals:
        """Return the positions that are in none of some ranges, each of which lies in a run."""
        ends = sorted((each.start, each.stop) for each in others)
        left, n = [], 0
        for run in self.ranges:
            first = run.start
            while n < len(ends) and ends[n][0] < run.stop:
                left.append(range(first, ends[n][0]))
                first = ends[n][1]
                n += 1
            left.append(range(first, run.stop))
        return Intervals(tuple(each for each in left if each))

    def cut(self, size: int) -> list[range]:
        """Return the runs, cut at the multiples of a size."""
        return [
            range(max(first, run.start), min(first + size, run.stop))
            for run in self.ranges
            for first in range(run.start // size * size, run.stop, size)
        ]
