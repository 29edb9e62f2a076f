"""What a kernel would take: the model by which a kernel and its tiles are chosen.

A block computes a work tile: in the forward a tile of queries with all keys of its head, in the
backward a tile of keys with all queries. The model has four numbers of a kernel: what a work tile
takes that no other one hides, what a tile of it takes, a pair, and a multiplication and addition.
All pairs of whole tiles count, padding included; and no work tile takes less than its bytes.

Nothing here depends on how many rows or heads there are: the choice decides bits, and no result may
depend on its batch. The numbers are those of an H200; `tests/frontend/test_cost.py` has the times
that they come from.
"""

from __future__ import annotations

from typing import NamedTuple

LONG = 1 << 14  # rows whose number is not known count as many
BYTES = 32.0  # that one SM moves to and from memory in a ns, where all of them do so


class Rates(NamedTuple):
    """What a kernel takes on an SM, in ns.

    Attributes
    ----------
    start : float
        Of a work tile: loads, barriers and stores that no other work hides.
    step : float
        Of a tile that it sees, whatever its size.
    pair : float
        Of a query and a key: what their weight takes.
    product : float
        Of a multiplication and an addition.
    """

    start: float
    step: float
    pair: float
    product: float


class Cost(NamedTuple):
    """What the rows of one head take.

    Attributes
    ----------
    work_tiles : int
        How many work tiles they fill.
    each : float
        What a work tile takes on an SM, in ns.
    """

    work_tiles: int
    each: float

    @property
    def time(self) -> float:
        """What all of them take on one SM, in ns."""
        return self.work_tiles * self.each

    def __str__(self) -> str:
        return f"{self.time / 1000:.1f} us of an SM"


def of(
    rates: Rates,
    rows: tuple[int, int],
    block: tuple[int, int],
    products: int,
    row_bytes: tuple[int, int],
    resident: int = 1,
) -> Cost:
    """Return what the rows of one head cost.

    Parameters
    ----------
    rates : Rates
        Of the kernel.
    rows : tuple of int
        Rows that are shared among work tiles, and rows that each of these sees.
    block : tuple of int
        Rows of a work tile, and of the tiles that it sees.
    products : int
        Multiplications of a pair, padding included.
    row_bytes : tuple of int
        Bytes of a row of a work tile, and of one that it sees, which is read from memory once.
    resident : int
        Blocks that share an SM.
    """
    own, seen = (max(n, 1) for n in rows)
    work_tiles = -(-own // block[0])
    tiles = -(-seen // block[1])
    pairs = block[0] * tiles * block[1]
    # Half of what a block waits for is hidden by others of its SM.
    waited = (rates.start + tiles * rates.step) * (1 + 1 / resident) / 2
    computed = waited + pairs * (rates.pair + products * rates.product)
    moved = (own * row_bytes[0] + seen * row_bytes[1]) / work_tiles
    return Cost(work_tiles, max(computed, moved / BYTES))
