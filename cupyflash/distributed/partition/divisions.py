"""Divides the positions of a sequence among ranks, and says what that costs under a mask.

The mask's own proofs say for parts of queries and of keys whether a pair of them is computed at
all: that gives the pairs that each rank computes and the keys that it has to receive.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, SupportsIndex

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
from . import documents, layouts
from .intervals import Intervals
from .layouts import KINDS, Kind, Layout, Price

CHUNKS = 8  # of a rank: what proofs and transfers tell apart
# Pairs that an H100 computes while NVLink brings it one key and its value, per query head of the
# key's group. It weighs keys against pairs where layouts are compared.
PAIRS_PER_KEY = 2300
UNEVEN = 1 / CHUNKS  # of a rank's share: how many more positions whole documents may give to one


def layout(
    comm: Communicator,
    length: SupportsIndex,
    *,
    mask: Mask | DLPackArray | Sequence[Mask | DLPackArray | None] | None = None,
    kind: Literal["auto", "contiguous", "zigzag", "cyclic", "proofs", "documents"] = "auto",
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
    kind : {"auto", "contiguous", "zigzag", "cyclic", "proofs", "documents"}
        "contiguous": one run for each rank. "zigzag": two runs, from both ends. "cyclic": chunks
        in turn. "proofs": each chunk, those with most pairs first, goes to the rank that has the
        fewest pairs so far. "documents": runs of positions that see nothing of each other stay
        whole, as far as that leaves about as many positions and pairs to each rank. "auto": the
        cheapest of them under the mask, as `prices` says.
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
    {'contiguous': 1.75, 'zigzag': 1.0, 'cyclic': 1.09, 'proofs': 1.0, 'documents': 1.0}
    """
    offsets = offsets_q, offsets_k
    asked = _Asked(_number(ranks, "ranks", 1), length, mask, None, offsets, lead, heads)
    return {kind: asked.divided(kind)[1] for kind in KINDS}


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


class _Cells(NamedTuple):
    """Parts of a sequence of queries, and of one of keys, with the pairs that are computed.

    Attributes
    ----------
    rows : list of range
        The parts of queries.
    key_sizes : array of int
        The positions of the parts of keys.
    pairs : array
        Of each part of queries with each part of keys.
    """

    rows: list[range]
    key_sizes: Array
    pairs: Array

    @property
    def work(self) -> Array:
        """The pairs of each part of queries."""
        made: Array = self.pairs.sum(axis=1)
        return made

    def price(self, owners: Array, of_keys: Array, ranks: int) -> Price:
        """Return what it costs if these are the ranks of the parts."""
        work = np.bincount(owners, self.work, ranks)
        received = np.zeros(ranks)
        for rank in range(ranks):
            needed = (self.pairs[owners == rank] > 0).any(axis=0) & (of_keys != rank)
            received[rank] = self.key_sizes[needed].sum()
        mean = work.mean()
        total = self.key_sizes.sum()
        return Price(
            float(work.max() / mean) if mean else 1.0,
            float(received.max() / total) if total else 0.0,
            float((work + PAIRS_PER_KEY * received).max()),
        )

    def runs(self, owners: Array, ranks: int) -> tuple[Intervals, ...]:
        """Return what each rank holds."""
        return tuple(
            Intervals.of(self.rows[n] for n in np.flatnonzero(owners == rank))
            for rank in range(ranks)
        )


class _Asked:
    """A sequence that is to be divided."""

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
        blocks = -(-self.length // layouts.BLOCK)
        self.chunk = max(1, -(-blocks // (ranks * CHUNKS))) * layouts.BLOCK
        self._layout_k = layout_k
        len_k = self.length if layout_k is None else layout_k.length
        heads = _number(heads, "heads", 1)
        several = mask if isinstance(mask, (list, tuple)) else [mask]
        self._masks = [validate.mask(each) for each in several]
        self._dense = Dense(tuple(lead), heads, self.length, len_k)
        self._sequences: Packed | None = None
        if offsets[0] is not None or offsets[1] is not None:
            self._sequences = _packed(*offsets, self.length, len_k, heads)

    def _cells(self, rows: list[range]) -> _Cells:
        """Return parts of queries and their pairs. Parts of keys are those of their layout, if any.

        Else they are the same.
        """
        of_keys = rows if self._layout_k is None else self._layout_k.chunks[0]
        key_sizes = np.array([len(x) for x in of_keys], np.int64)
        found = np.zeros((len(rows), len(of_keys)))
        if self._sequences is None:
            area = np.array([len(x) for x in rows], np.int64)[:, None] * key_sizes
            for each in self._masks:
                found += _weights(classes(each, self._dense, rows, of_keys), area)
            return _Cells(rows, key_sizes, found)
        sizes = self._sequences
        cells = [
            Cells.of(x, starts) for x, starts in ((rows, sizes.start_q), (of_keys, sizes.start_k))
        ]
        for each in self._masks:
            at_rows, at_keys, kinds = pairs(each, sizes, *cells)
            area = cells[0].size[at_rows] * cells[1].size[at_keys]
            at = cells[0].chunk[at_rows], cells[1].chunk[at_keys]
            np.add.at(found, at, _weights(kinds, area))
        return _Cells(rows, key_sizes, found)

    @cached_property
    def _chunks(self) -> _Cells:
        """Chunks of blocks."""
        return self._cells(chunks(self.length, self.chunk))

    def cheapest(self, rank: int, kinds: Sequence[Kind]) -> Layout:
        """Return the cheapest layout of some kinds, as a rank sees it."""
        if len(kinds) > 1 and not self._begins.size:
            kinds = [kind for kind in kinds if kind != "documents"]  # there are none
        found = [(*self.divided(kind), kind) for kind in kinds]
        runs, price, chosen = min(found, key=lambda x: x[1].cost)
        return Layout(self.length, runs, rank, chosen, self.chunk, price)

    def divided(self, kind: Kind) -> tuple[tuple[Intervals, ...], Price]:
        """Return what each rank holds, and what that costs."""
        if kind == "documents":
            return self._by_documents()
        return self._dealt(self._chunks, self._owners(kind))

    def _dealt(self, cells: _Cells, owners: Array) -> tuple[tuple[Intervals, ...], Price]:
        of_keys = owners if self._layout_k is None else self._layout_k.chunks[1]
        return cells.runs(owners, self.ranks), cells.price(owners, of_keys, self.ranks)

    def _by_documents(self) -> tuple[tuple[Intervals, ...], Price]:
        """Divide whole documents, or cut those that are too long for a rank, or all long ones.

        The cheapest is taken, if it leaves positions about even: the rest of a model takes time by
        them. Where there are no documents, chunks take their place.
        """
        if not self._begins.size:
            return self._dealt(self._chunks, self._balanced())
        whole = documents.between(self.length, self._begins)
        sizes = np.array([len(x) for x in whole], np.int64)
        shares = documents.loads(sizes, self._cells(whole).work, self.ranks)
        too_long = shares.max(axis=0) > 1
        made = []
        ways = [np.zeros_like(too_long), too_long, np.ones_like(too_long)]
        for which in ways if too_long.any() else ways[::2]:
            parts = documents.cut(whole, which, self.chunk)
            cells = self._cells(parts)
            sizes = np.array([len(x) for x in parts], np.int64)
            owners = documents.deal(documents.loads(sizes, cells.work, self.ranks), self.ranks)
            held = np.bincount(owners, sizes, self.ranks)
            if which.all() or held.max() * self.ranks <= (1 + UNEVEN) * self.length:
                made.append(self._dealt(cells, owners))
        return min(made, key=lambda x: x[1].cost)

    @cached_property
    def _begins(self) -> Array:
        """Where documents begin under all masks."""
        if self._sequences is not None:
            begins = np.unique(self._sequences.start_q)
            return begins[(begins > 0) & (begins < self.length)]
        found = [documents.starts(each, self._dense) for each in self._masks]
        return functools.reduce(np.intersect1d, found)

    def _owners(self, kind: Kind) -> Array:
        """Return the rank of each chunk."""
        count, ranks = len(self._chunks.rows), self.ranks
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
        work = self._chunks.work
        room = [-(-len(work) // self.ranks)] * self.ranks
        queue: list[tuple[float, int]] = [(0.0, rank) for rank in range(self.ranks)]
        owners = np.zeros(len(work), np.int64)
        for n in np.argsort(-work, kind="stable"):
            load, rank = heapq.heappop(queue)
            owners[n] = rank
            room[rank] -= 1
            if room[rank]:
                heapq.heappush(queue, (load + float(work[n]), rank))
        return owners
