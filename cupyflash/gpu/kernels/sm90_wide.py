"""Tiles of forward_sm90 for heads whose output is more than a warpgroup has registers for.

Of wide values, several work tiles have the same queries. Each computes all of their scores, with
equal bits, and a part of the columns of the output. The products with the keys are then computed
more than once, and no score has to pass from one warpgroup to another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .spec import Request, Tiles

LARGEST = 512  # head of q, k and v
LARGEST_PART = 256  # columns of v: sums of 64 rows take half of a warpgroup's registers
BLOCK_Q = 128
WIDTHS = (80, 64, 48, 32)  # keys of a tile, the best first
_NUMBER_BYTES = 3 * 8  # in which the work tiles of a block say which part they have


def parts_of(d_v: int) -> tuple[int, int]:
    """Return how many parts the columns of v have, and the columns of each; the last has the rest.

    This is the twin of `V_COLUMNS` in tile_scheduler.cuh.
    """
    parts = -(-d_v // LARGEST_PART)
    each = -(-d_v // parts)
    return parts, each if parts == 1 else -(-each // 8) * 8


def obstacle(request: Request) -> str | None:
    """Return None, or in words why work tiles cannot share the queries of a request."""
    if parts_of(request.problem.d_v)[0] == 1 or "lse_before" not in request.arrays:
        return None
    # Both may lie where the results go.
    return "one work tile would write the log-sum-exp over other keys that another one reads"


def fit(d: int, d_v: int, limit: int, tiles_of: Callable[..., Tiles]) -> Tiles:
    """Return the tiles with the most keys that fit into `limit` bytes.

    Parameters
    ----------
    d, d_v : int
        Head sizes.
    limit : int
        Bytes of shared memory that a block may have.
    tiles_of : function
        Returns tiles of so many queries and keys for these head sizes; the last argument says
        whether results have room.
    """
    parts, columns = parts_of(d_v)
    more = _NUMBER_BYTES if parts > 1 else 0
    for block_kv in WIDTHS:
        tiles = tiles_of(BLOCK_Q, block_kv, d, columns, False)
        shared = tiles.shared_memory + more
        if shared <= limit:
            break
    return replace(tiles, shared_memory=shared, v_parts=parts)
