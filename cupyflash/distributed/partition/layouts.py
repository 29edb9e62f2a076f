"""Which rank holds which positions of a sequence: runs of whole blocks, or of whole documents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeAlias, TypeVar, cast, get_args

import numpy as np

from ...errors import ArgumentError
from ...lazy import cached_property
from ...problem.call import Array
from .intervals import Intervals

D = TypeVar("D", bound=np.dtype[Any])
Kind: TypeAlias = Literal["contiguous", "zigzag", "cyclic", "proofs", "documents"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BLOCK = 128  # positions that stay together


class Price(NamedTuple):
    """What a layout costs under a mask.

    Attributes
    ----------
    imbalance : float
        The pairs that the heaviest rank computes, divided by the mean of all ranks. A tile that
        the mask hides in part counts half.
    received : float
        The keys that the rank with the most of them receives, divided by all keys.
    cost : float
        What is compared: pairs of the heaviest rank, including those that it could compute while
        keys arrive.
    """

    imbalance: float
    received: float
    cost: float


@dataclass(frozen=True)
class Layout:
    """Who holds which positions of a sequence.

    Attributes
    ----------
    length : int
        Positions of the sequence.
    runs : tuple of Intervals
        What each rank holds.
    rank : int
        The rank of this process.
    kind : str
        How positions were divided: "contiguous", "zigzag", "cyclic", "proofs" or "documents".
    chunk : int
        Positions that proofs and transfers treat alike.
    price : Price or None
        What it costs under the mask for which it was made.
    remembered : dict
        What each call on this rank sends, receives and computes, as far as it is known.
    """

    length: int
    runs: tuple[Intervals, ...]
    rank: int
    kind: str
    chunk: int
    price: Price | None = None
    remembered: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.runs)

    @property
    def own(self) -> Intervals:
        """What this rank holds."""
        return self.runs[self.rank]

    @property
    def count(self) -> int:
        """The number of positions that this rank holds."""
        return self.own.count

    @property
    def positions(self) -> Array:
        """The positions that this rank holds, int64; rotary embeddings need them."""
        found = [np.arange(run.start, run.stop) for run in self.own]
        return np.concatenate([np.empty(0, np.int64), *found])

    def take(
        self, x: np.ndarray[Any, D], axis: SupportsIndex = -2
    ) -> np.ndarray[tuple[Any, ...], D]:
        """Return what this rank holds of a whole array.

        Parameters
        ----------
        x : array
            An array with all positions, maybe a `numpy.memmap`.
        axis : int
            The axis of positions.

        Returns
        -------
        array
            A copy, or a view if the rank holds one run.
        """
        places = [self._place(x, axis, run) for run in self.own]
        if len(places) == 1:
            return x[places[0]]
        none = x[self._place(x, axis, range(0))]
        joined: Any = np.concatenate([none, *(x[at] for at in places)], axis)
        return cast(np.ndarray[tuple[Any, ...], D], joined)

    def put(self, x: Array, whole: Array, axis: SupportsIndex = -2) -> None:
        """Write what this rank holds to its places in a whole array.

        Parameters
        ----------
        x : array
            What `take` returns, or an array of results that belongs to it.
        whole : array
            Where it is written, maybe a `numpy.memmap`.
        axis : int
            The axis of positions.
        """
        if x.shape[axis] != self.count:
            raise ArgumentError(
                f"put: got {x.shape[axis]} positions on axis {axis}; expected {self.count}, those "
                "that this rank holds."
            )
        before = (slice(None),) * (int(axis) % x.ndim)
        for run in self.own:
            rows = self.own.rows(run)
            whole[self._place(whole, axis, run)] = x[(*before, slice(rows.start, rows.stop))]

    def _place(self, x: Any, axis: SupportsIndex, run: range) -> tuple[slice, ...]:
        if x.shape[axis] != self.length:
            raise ArgumentError(
                f"layout: got {x.shape[axis]} positions on axis {axis}; expected {self.length}, "
                "all of the sequence. Name another axis of positions by axis=."
            )
        return *(slice(None),) * (int(axis) % x.ndim), slice(run.start, run.stop)

    def of_groups(self, size: int) -> Layout:
        """Return who holds what if so many ranks in a row count as one."""
        firsts = range(0, self.size, size)
        runs = [Intervals.of(run for x in self.runs[n : n + size] for run in x) for n in firsts]
        return Layout(self.length, tuple(runs), self.rank // size, self.kind, self.chunk)

    @cached_property
    def chunks(self) -> tuple[list[range], Array]:
        """The chunks of all ranks, one rank after the other, and the rank of each."""
        of_ranks = [runs.cut(self.chunk) for runs in self.runs]
        owners = np.repeat(np.arange(self.size), [len(x) for x in of_ranks])
        return [chunk for each in of_ranks for chunk in each], owners
