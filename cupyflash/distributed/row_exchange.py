"""Rows of several arrays that travel between ranks in one exchange, each to where it belongs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ..pieces.parts import part
from ..pieces.place import Place
from ..problem.call import Array
from .messages import bytes_of, viewed
from .partition.intervals import Intervals
from .transport.communication import Some, Transfer
from .transport.peers import in_blocks


class Rows(NamedTuple):
    """Rows of an array.

    Attributes
    ----------
    array : array, shape (..., positions, columns)
        The array.
    held, wanted : Intervals
        The positions that it has, and some of them.
    """

    array: Array
    held: Intervals
    wanted: Intervals

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an array with the wanted positions only."""
        return *self.array.shape[:-2], self.wanted.count, self.array.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the wanted positions."""
        return int(math.prod(self.shape) * self.array.itemsize)

    @property
    def is_message(self) -> bool:
        """Whether the array is its message."""
        return self.wanted == self.held and bool(self.array.flags.c_contiguous)

    def blocks(self) -> list[Array]:
        """Return parts of the array that are its message in a row, in long blocks; else none."""
        runs = [self.held.rows(run) for run in self.wanted]
        several = [self.array]
        if len(runs) > 1:  # C order: the runs of one head, then those of the next
            several = [self.array[index] for index in np.ndindex(self.array.shape[:-2])]
        found = [part(x, rows) for x in several for rows in runs]
        return found if all(map(in_blocks, found)) else []

    def beside(self, other: Array) -> list[tuple[Array, Array]]:
        """Return the rows of each run, and the same ones of an array with the wanted positions."""
        return [
            (part(self.array, self.held.rows(run)), part(other, self.wanted.rows(run)))
            for run in self.wanted
        ]


class RowExchange:
    """Rows that are sent to other ranks and received from them.

    Parameters
    ----------
    place : Place
        Where the arrays are.
    ranks : Some
        This rank and those that it exchanges messages with.
    apart : bool
        Whether each array is a message, so that it may be sent from where it is, and received
        there. Else what is for one rank is one message.
    copies : bool
        Whether messages are copied, so that they may be rows of the arrays themselves.
    sends, receives : mapping of int to iterable of Rows
        The rows for, or from, each of these ranks. Both sides name them in the same order.
    """

    def __init__(
        self,
        place: Place,
        ranks: Some,
        apart: bool,
        copies: bool,
        sends: Mapping[int, Iterable[Rows]],
        receives: Mapping[int, Iterable[Rows]],
    ) -> None:
        self._place, self._ranks, self._apart = place, ranks, apart
        self._copies = apart and copies
        self._packed: list[tuple[Array, Array]] = []  # rows, and their places in messages
        self._unpacked: list[tuple[Array, Array]] = []
        self._sends = self._messages(sends, self._packed)
        self._receives = self._messages(receives, self._unpacked)
        self._transfer: Transfer | None = None

    def _messages(
        self, of_ranks: Mapping[int, Iterable[Rows]], copied: list[tuple[Array, Array]]
    ) -> list[tuple[int, Array]]:
        """Return the messages; rows that are none themselves join `copied`, with their places."""
        made = []
        for rank, several in of_ranks.items():
            # In this order all elements of a message are aligned.
            rows = sorted((x for x in several if x.nbytes), key=lambda x: -x.array.itemsize)
            here = [self._in_place(x) for x in rows]
            sizes = [0 if parts else x.nbytes for x, parts in zip(rows, here, strict=True)]
            parcel = None
            if not self._apart or any(sizes):
                parcel = self._place.empty((sum(sizes),), np.dtype(np.uint8))
            begin = 0
            for x, parts, size in zip(rows, here, sizes, strict=True):
                made += [(rank, each) for each in parts]
                if parts:
                    continue
                assert parcel is not None
                array = viewed(parcel, begin, x.shape, x.array.dtype)
                begin += size
                copied += x.beside(array)
                if self._apart:
                    made.append((rank, bytes_of(array)))
            if not self._apart:
                assert parcel is not None
                made.append((rank, parcel))
        return made

    def _in_place(self, rows: Rows) -> list[Array]:
        """Return the message of an array where it is sent from its place, and received there."""
        if self._apart and rows.is_message:
            return [bytes_of(rows.array)]
        return rows.blocks() if self._copies else []

    def post(self) -> None:
        """Send what is to be sent, and begin to receive."""
        self._place.store_all(self._packed)
        self._transfer = self._ranks.exchange(self._sends, self._receives)

    def wait(self, timeout: float, what: str) -> None:
        """Wait until all has arrived where it belongs."""
        assert self._transfer is not None
        self._transfer.wait(timeout, what)
        self._place.store_all([(copy, array) for array, copy in self._unpacked])
        self._transfer = None

    def let_go(self) -> None:
        """Let the memory of the messages go.

        It was asked for on the caller's stream, which has to come behind `wait` before it may use
        that memory again.
        """
        for each in (self._sends, self._receives, self._packed, self._unpacked):
            each.clear()
