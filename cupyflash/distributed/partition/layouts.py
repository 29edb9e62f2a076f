"""Which rank holds which positions of a sequence, and what that costs under a mask.

A rank holds runs of whole blocks, so that the tiles of kernels and the draws of dropout are those
of one rank. The mask's own proofs say for chunks of queries and of keys whether a pair of them is
computed at all: that gives the pairs that each rank computes and the keys that it has to receive.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeAlias, TypeVar, cast, get_args

import numpy as np

from ...arrays.integers import integer
from ...arrays.interop import DLPackArray
from ...errors import ArgumentError, ArgumentTypeError
from ...expr.bind import Dense
from ...expr.evaluate import host
from ...lazy import cached_property
from ...masks import Mask
from ...pieces.packed import Cells, Packed, pairs
from ...pieces.schedule import chunks, classes
from ...problem import validate
from ...problem.call import Array
from ..transport.communication import Communicator
from .intervals import Intervals

D = TypeVar("D", bound=np.dtype[Any])
Kind: TypeAlias = Literal["contiguous", "zigzag", "cyclic", "proofs"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BLOCK = 128  # positions that stay together
CHUNKS = 8  # of a rank: what proofs and transfers tell apart
# Pairs that an H100 computes while NVLink brings it one key and its value, per query head of the
# key's group. It weighs keys against pairs where layouts are compared.
PAIRS_PER_KEY = 2300


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
        How positions were divided: "contiguous", "zigzag", "cyclic" or "proofs".
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


def layout(
    comm: Communicator,
    length: SupportsIndex,
    *,
    mask: Mask | DLPackArray | Sequence[Mask | DLPackArray | None] | None = None,
    kind: Literal["auto", "contiguous", "zigzag", "cyclic", "proofs"] = "auto",
    layout_k: Layout | None = None,
    offsets_q: DLPackArray | Sequence[int] | None = None,
    offsets_k: DLPackArray | Sequence[int] | None = None,
    lead: tuple[int, ...] = (),
    heads: SupportsIndex = 1,
) -> Layout:
    """Divide the positions of a sequence among the ranks.

    Parameters
    ----------
    comm : Communicator
        The ranks.
    length : int
        Positions of the sequence.
    mask : Mask or array or sequence of them, optional
        The mask of the calls, or the masks of calls that share the layout, equally often.
    kind : {"auto", "contiguous", "zigzag", "cyclic", "proofs"}
        "contiguous": one run for each rank. "zigzag": two runs, from both ends. "cyclic": chunks
        in turn. "proofs": each chunk, those with most pairs first, goes to the rank that has the
        fewest pairs so far. "auto": the cheapest of them under the mask, as `prices` says.
    layout_k : Layout, optional
        The layout of the keys, if it is another one (cross attention).
    offsets_q, offsets_k : array of int, optional
        The offsets of packed sequences, as in `attention_varlen`; only pairs of one sequence count.
        By default those of the keys are those of the queries.
    lead : tuple of int
        Leading axes of the calls, if the mask depends on them.
    heads : int
        Query heads of the calls, if the mask depends on them.

    Returns
    -------
    Layout
        The same on every rank, but for its `rank`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An argument is wrong.

    Examples
    --------
    >>> from cupyflash import distributed, masks
    >>> comm = distributed.Threads(2).ranks[1]
    >>> made = distributed.layout(comm, 1000, mask=masks.causal(), kind="zigzag")
    >>> made.runs[1].ranges, made.count
    ((range(256, 768),), 512)
    """
    if kind not in ("auto", *KINDS):
        raise ArgumentError(f'layout: got kind={kind!r}; expected "auto" or one of {KINDS}.')
    if layout_k is not None and layout_k.size != comm.size:
        raise ArgumentError(
            f"layout_k: got a layout of {layout_k.size} ranks; expected one of {comm.size}."
        )
    offsets = offsets_q, offsets_k
    asked = _Asked(comm.size, length, mask, layout_k, offsets, lead, heads)
    return asked.cheapest(comm.rank, KINDS if kind == "auto" else (kind,))


def cheapest_layout(
    ranks: int,
    length: int,
    mask: Mask | None,
    layout_k: Layout | None,
    lead: tuple[int, ...],
    heads: int,
) -> Layout:
    """Return what the first of so many ranks would get from `layout`, without the others."""
    return _Asked(ranks, length, mask, layout_k, (None, None), lead, heads).cheapest(0, KINDS)


def prices(
    ranks: SupportsIndex,
    length: SupportsIndex,
    *,
    mask: Mask | DLPackArray | Sequence[Mask | DLPackArray | None] | None = None,
    offsets_q: DLPackArray | Sequence[int] | None = None,
    offsets_k: DLPackArray | Sequence[int] | None = None,
    lead: tuple[int, ...] = (),
    heads: SupportsIndex = 1,
) -> dict[Kind, Price]:
    """Return what each kind of layout costs, for any number of ranks and without them.

    Parameters
    ----------
    ranks : int
        The number of ranks.
    length, mask, offsets_q, offsets_k, lead, heads
        As in `layout`.

    Returns
    -------
    dict of str to Price
        For each kind of layout.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An argument is wrong.

    Examples
    --------
    >>> from cupyflash import distributed, masks
    >>> found = distributed.prices(4, 2**16, mask=masks.causal())
    >>> {kind: round(price.imbalance, 2) for kind, price in found.items()}
    {'contiguous': 1.75, 'zigzag': 1.0, 'cyclic': 1.09, 'proofs': 1.0}
    """
    offsets = offsets_q, offsets_k
    asked = _Asked(_number(ranks, "ranks", 1), length, mask, None, offsets, lead, heads)
    return {kind: asked.price(asked.divided(kind)) for kind in KINDS}


def _number(value: Any, name: str, least: int) -> int:
    number = integer(value)
    if number is None:
        raise ArgumentTypeError(f"{name}: got {value!r}; expected an integer.")
    if number < least:
        raise ArgumentError(f"{name}: got {value}; expected {least} or more.")
    return number


def _weights(found: Array, area: Array) -> Array:
    """Return the pairs that are computed; what is PARTIAL counts half."""
    weights: Array = np.array([0.0, 0.5, 1.0])[found] * area
    return weights


def _packed(offsets_q: Any, offsets_k: Any, len_q: int, len_k: int, heads: int) -> Packed:
    """Return the sizes of packed sequences."""
    if offsets_q is None:
        raise ArgumentError("offsets_k: it needs offsets_q, which is missing; pass both.")
    ends = []
    given = {"offsets_q": offsets_q, "offsets_k": offsets_q if offsets_k is None else offsets_k}
    for (name, value), total in zip(given.items(), (len_q, len_k), strict=True):
        held = host(validate.offsets_array(value, name))
        ends.append(validate.checked_offsets(held, name, total))
    if len(ends[0]) != len(ends[1]):
        raise ArgumentError(
            f"offsets_k: got {len(ends[1]) - 1} sequences, but there are {len(ends[0]) - 1} in "
            "offsets_q; expected equal numbers."
        )
    lengths, starts = [np.diff(each) for each in ends], [each[:-1] for each in ends]
    return Packed((len(ends[0]) - 1,), heads, lengths[0], lengths[1], starts[0], starts[1])


class _Asked:
    """A sequence that is to be divided, with the pairs of its chunks."""

    def __init__(
        self,
        ranks: int,
        length: Any,
        mask: Any,
        layout_k: Layout | None,
        offsets: tuple[Any, Any],
        lead: tuple[int, ...],
        heads: Any,
    ) -> None:
        self.ranks, self.length = ranks, _number(length, "length", 0)
        blocks = -(-self.length // BLOCK)
        self.chunk = max(1, -(-blocks // (ranks * CHUNKS))) * BLOCK
        self.chunks = chunks(self.length, self.chunk)
        of_keys = self.chunks
        self._key_ranks: Array | None = None
        if layout_k is not None:
            of_keys, self._key_ranks = layout_k.chunks
        self._key_sizes = np.array([len(x) for x in of_keys], np.int64)
        len_k = self.length if layout_k is None else layout_k.length
        heads = _number(heads, "heads", 1)
        several = mask if isinstance(mask, (list, tuple)) else [mask]
        rows = np.array([len(x) for x in self.chunks], np.int64)
        # Of each chunk of queries with each chunk of keys.
        self.pairs = np.zeros((len(rows), len(of_keys)))
        if offsets[0] is None and offsets[1] is None:
            sizes = Dense(tuple(lead), heads, self.length, len_k)
            area = rows[:, None] * self._key_sizes
            for each in several:
                found = classes(validate.mask(each), sizes, self.chunks, of_keys)
                self.pairs += _weights(found, area)
        else:
            packed = _packed(*offsets, self.length, len_k, heads)
            cells = [
                Cells.of(x, starts)
                for x, starts in ((self.chunks, packed.start_q), (of_keys, packed.start_k))
            ]
            for each in several:
                at_rows, at_keys, found = pairs(validate.mask(each), packed, *cells)
                area = cells[0].size[at_rows] * cells[1].size[at_keys]
                at = cells[0].chunk[at_rows], cells[1].chunk[at_keys]
                np.add.at(self.pairs, at, _weights(found, area))
        self.work = self.pairs.sum(axis=1)

    def cheapest(self, rank: int, kinds: Sequence[Kind]) -> Layout:
        """Return the cheapest layout of some kinds, as a rank sees it."""
        found = [(self.divided(kind), kind) for kind in kinds]
        priced = [(self.price(runs), runs, kind) for runs, kind in found]
        price, runs, chosen = min(priced, key=lambda x: x[0].cost)
        return Layout(self.length, runs, rank, chosen, self.chunk, price)

    def divided(self, kind: Kind) -> tuple[Intervals, ...]:
        """Return what each rank holds."""
        owners = self._owners(kind)
        return tuple(
            Intervals.of(self.chunks[n] for n in np.flatnonzero(owners == rank))
            for rank in range(self.ranks)
        )

    def _owners(self, kind: Kind) -> Array:
        """Return the rank of each chunk."""
        count, ranks = len(self.chunks), self.ranks
        numbers = np.arange(count)
        if kind == "contiguous":
            return numbers * ranks // max(count, 1)
        if kind == "zigzag":
            stripe = numbers * 2 * ranks // max(count, 1)
            return np.minimum(stripe, 2 * ranks - 1 - stripe)
        if kind == "cyclic":
            return numbers % ranks
        return self._balanced()

    def _balanced(self) -> Array:
        """Return the rank of each chunk so that all have as many chunks and pairs alike."""
        room = [-(-len(self.chunks) // self.ranks)] * self.ranks
        queue: list[tuple[float, int]] = [(0.0, rank) for rank in range(self.ranks)]
        owners = np.zeros(len(self.chunks), np.int64)
        for n in np.argsort(-self.work, kind="stable"):
            load, rank = heapq.heappop(queue)
            owners[n] = rank
            room[rank] -= 1
            if room[rank]:
                heapq.heappush(queue, (load + float(self.work[n]), rank))
        return owners

    def price(self, runs: tuple[Intervals, ...]) -> Price:
        """Return what a layout costs."""
        count = len(self.chunks)
        owners = np.empty(count, np.int64)
        for rank, own in enumerate(runs):
            for run in own:
                owners[run.start // self.chunk : -(-run.stop // self.chunk)] = rank
        of_keys = owners if self._key_ranks is None else self._key_ranks
        work = np.bincount(owners, self.work, self.ranks)
        received = np.zeros(self.ranks)
        for rank in range(self.ranks):
            needed = (self.pairs[owners == rank] > 0).any(axis=0) & (of_keys != rank)
            received[rank] = self._key_sizes[needed].sum()
        mean = work.mean()
        total = self._key_sizes.sum()
        return Price(
            float(work.max() / mean) if mean else 1.0,
            float(received.max() / total) if total else 0.0,
            float((work + PAIRS_PER_KEY * received).max()),
        )
