"""The tiles of backward_sm90_dkdv.cu, and which of them a call has."""

from __future__ import annotations

import functools

from . import cost
from .sm90_cost import dkdv_cost
from .spec import Request, Tiles, at_head, row_bytes

STAGES = 2  # of tiles of queries, and of do
# Largest head -> queries and keys of a tile of backward_sm90_dkdv.cu.
DKDV_TILES: dict[int, tuple[int, int]] = {128: (64, 128), 256: (64, 64)}
# Slabs of 64 columns of dk and dv together, for which a consumer has registers beside the scores of
# all queries of a tile, and beside those of half of them: for heads up to this one.
WHOLE_SLABS, MOST_SLABS, LARGEST_IN_PARTS = 4, 5, 192
# Keys of a block of one consumer, largest head that it has the registers for, and such blocks that
# share an SM.
FEW_KEYS_DKDV, FEW_KEYS_HEAD, FEW_KEYS_BLOCKS = 64, 128, 2
DKDV_STORAGE_BYTES = 576  # in addition to operands, lse and delta
DKDV_CONSUMER_BYTES = 160  # of these for each consumer
PART_BYTES = 128  # of these for a second part of a tile's queries


def dkdv_tiles(block_q: int, block_kv: int, d: int, d_v: int, consumers: int = 2) -> Tiles:
    """Return tiles of backward_sm90_dkdv.cu: consumer warpgroups, and a producer."""
    columns, alone = row_bytes(d) + row_bytes(d_v), consumers == 1
    shares = block_kv < 64 * consumers  # keys: then P goes through shared memory like dS
    in_parts = not shares and columns > WHOLE_SLABS * row_bytes(64)
    held = 1 if alone else STAGES  # tiles of dS
    weights = held * (2 if shares else 1) * block_kv * row_bytes(block_q)
    # of keys, made finite
    copied = row_bytes(d) if not shares and not alone and not in_parts and d > 64 else 0
    operands = block_kv * (columns + copied) + STAGES * block_q * columns
    little = 16 * block_q + DKDV_STORAGE_BYTES + consumers * DKDV_CONSUMER_BYTES
    little += PART_BYTES if in_parts else 0
    threads, resident = 128 * (consumers + 1), FEW_KEYS_BLOCKS if alone else 1
    return Tiles(block_q, block_kv, threads, operands + weights + little, resident, stages=STAGES)


def is_plain(request: Request) -> bool:
    """Whether nothing but a mask comes between the scores and the weights of a call."""
    call = request.call
    return (
        call is not None
        and call.score_mod is None
        and call.bias is None
        and not call.problem.dropout
    )


def _has_sums(d: int, d_v: int) -> bool:
    """Whether a consumer has the registers for dk and dv of 64 keys, if nothing else takes any.

    It pays where most of what is added up is dq, so not where values are wider than keys.
    """
    slabs = (row_bytes(d) + row_bytes(d_v)) // row_bytes(64)
    return d > 64 and d_v <= d <= LARGEST_IN_PARTS and slabs <= MOST_SLABS


def fit_dkdv(d: int, d_v: int, plain: bool = False) -> Tiles:
    """Return the tiles of backward_sm90_dkdv.cu; `plain` is what `is_plain` says of the call."""
    narrow = DKDV_TILES[min(DKDV_TILES)]
    tile = narrow if plain and _has_sums(d, d_v) else at_head(DKDV_TILES, d, d_v)
    return dkdv_tiles(*tile, d, d_v)


def fit_few_keys(d: int, d_v: int) -> Tiles:
    """Return the tiles of backward_sm90_dkdv.cu for rows of few keys: blocks of one consumer."""
    return dkdv_tiles(64, FEW_KEYS_DKDV, d, d_v, consumers=1)


def fit_rows(request: Request, len_k: int) -> Tiles:
    """Return the tiles for rows of at most so many keys, in blocks of two consumers.

    Both have keys of wide heads, too, where rows have few: they share these. In float16 such tiles
    find other scales of dS. There a sequence of few keys has the tiles of a longer one, because it
    may be packed beside one.
    """
    problem = request.problem
    few = 0 < len_k <= FEW_KEYS_DKDV and max(problem.d, problem.d_v) > FEW_KEYS_HEAD
    shares = few and problem.dtype.name != "float16"
    return fit_dkdv(problem.d, problem.d_v, is_plain(request) and not shares)


@functools.lru_cache(maxsize=256)
def choose_dkdv(usual: Tiles, d: int, d_v: int, len_q: int, len_k: int) -> Tiles:
    """Return the tiles of backward_sm90_dkdv.cu for rows of at most so many queries and keys.

    `usual` are those of two consumers. A block of one consumer has all keys of a row, and sums up
    as the first one of two would, to whose sums missing keys add zeros. So packed sequences may
    have these tiles as others do.
    """
    if not 0 < len_k <= FEW_KEYS_DKDV or max(d, d_v) > FEW_KEYS_HEAD:
        return usual
    few, lengths = fit_few_keys(d, d_v), (min(len_q, cost.LONG), len_k)
    return min((few, usual), key=lambda tiles: dkdv_cost(tiles, d, d_v, *lengths).time)
