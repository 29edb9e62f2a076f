"""Sums over ranks, in the order of ranks: every rank gets the same bits in every run."""

from __future__ import annotations

from ..pieces.place import Place
from ..problem.call import Array
from .messages import bytes_of
from .transport.communication import Exchanger


def all_reduce(comm: Exchanger, place: Place, total: Array, timeout: float) -> None:
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
        [(rank, bytes_of(at(rank))) for rank in others],
        [(rank, bytes_of(array)) for rank, array in came.items()],
    ).wait(timeout, "a sum over ranks")
    if comm.rank:
        own = place.empty(mine.shape, mine.dtype)
        place.store(mine, own)
        place.store(came[0], mine)
        came[comm.rank] = own
    for rank in range(1, comm.size):
        place.add(came[rank], mine)
    comm.exchange(
        [(rank, bytes_of(mine)) for rank in others],
        [(rank, bytes_of(at(rank))) for rank in others],
    ).wait(timeout, "a sum over ranks")
