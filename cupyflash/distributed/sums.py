"""Sums over ranks, in the order of ranks: every rank gets the same bits in every run."""

from __future__ import annotations

import numpy as np

from ..pieces.place import Place
from ..problem.call import Array
from .communication import Exchanger


def add_over_ranks(comm: Exchanger, place: Place, total: Array, timeout: float) -> None:
    """Replace a contiguous array by the sum of those of all ranks.

    Each rank adds one part of the elements, and sends the sum to all.
    """
    flat = total.reshape(-1)
    ends = [flat.size * n // comm.size for n in range(comm.size + 1)]
    others = [rank for rank in range(comm.size) if rank != comm.rank]

    def at(rank: int) -> Array:
        part: Array = flat[ends[rank] : ends[rank + 1]]
        return part

    mine = at(comm.rank)
    came = {rank: place.empty(mine.shape, mine.dtype) for rank in others}
    comm.exchange(
        [(rank, _bytes(at(rank))) for rank in others],
        [(rank, _bytes(array)) for rank, array in came.items()],
    ).wait(timeout, "a sum over ranks")
    summands = [mine.copy() if rank == comm.rank else came[rank] for rank in range(comm.size)]
    mine[...] = summands[0]
    for summand in summands[1:]:
        place.add(summand, mine)
    comm.exchange(
        [(rank, _bytes(mine)) for rank in others],
        [(rank, _bytes(at(rank))) for rank in others],
    ).wait(timeout, "a sum over ranks")


def _bytes(array: Array) -> Array:
    return array.view(np.uint8)
