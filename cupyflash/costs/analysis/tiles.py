"""Which tiles a causal mask leaves, from a formula for each block of queries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .traffic import check, parts


class TileCount(NamedTuple):
    """Tiles of a score matrix by class.

    Attributes
    ----------
    empty, partial, full : int
        Tiles in which no pair attends, some pairs do, and all pairs do.
    """

    empty: int
    partial: int
    full: int

    @property
    def visited(self) -> int:
        """Tiles that are not skipped."""
        return self.partial + self.full

    @property
    def total(self) -> int:
        """All tiles."""
        return self.empty + self.visited


class Row(NamedTuple):
    """A block of queries: its rows, the tiles that it visits and the keys in them."""

    rows: int
    tiles: int
    keys: int
    full: int


def rows_of(n_q: int, n_k: int, block_q: int, block_kv: int, offset: int | None) -> Iterator[Row]:
    """Go through the blocks of queries, where query i sees keys j <= i + offset; None: all."""
    most = parts(n_k, block_kv)
    for first in range(0, n_q, block_q):
        rows = min(block_q, n_q - first)
        if offset is None:
            yield Row(rows, most, n_k, most)
            continue
        sees = min(max(first + rows + offset, 0), n_k)  # keys that the last query sees
        all_see = min(max(first + 1 + offset, 0), n_k)  # keys that the first one sees
        tiles = parts(sees, block_kv)
        full = most if all_see == n_k else all_see // block_kv
        yield Row(rows, tiles, min(tiles * block_kv, n_k), full)


def causal_tiles(n_q: int, n_k: int, block_q: int, block_kv: int) -> TileCount:
    """Count the tiles of a causal mask that lets the last query see every key.

    Parameters
    ----------
    n_q, n_k : int
        Queries and keys.
    block_q, block_kv : int
        Numbers of queries and of keys in a tile.

    Returns
    -------
    TileCount
        With n x n square tiles, n (n - 1) / 2 are empty, n are partial and the rest are full; so
        528 of 32 x 32 tiles are visited.

    References
    ----------
    T. Dao, "FlashAttention-2", 2023, section 3.1, "Causal masking".
    """
    check(n_q=n_q, n_k=n_k, block_q=block_q, block_kv=block_kv)
    rows = list(rows_of(n_q, n_k, block_q, block_kv, n_k - n_q))
    visited, full = sum(row.tiles for row in rows), sum(row.full for row in rows)
    return TileCount(len(rows) * parts(n_k, block_kv) - visited, visited - full, full)
