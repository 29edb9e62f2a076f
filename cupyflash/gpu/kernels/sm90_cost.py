"""What Hopper's kernels take, by the model of cost: rates that were measured on an H200."""

from __future__ import annotations

from . import cost
from .cost import Cost, Rates
from .spec import Tiles


def product_columns(width: int) -> int:
    """Return the columns of a product with v: the twin of `warpgroup::product_columns`."""
    if width <= 96:
        return max(-(-width // 16) * 16, 32)
    return 128 if width <= 128 else 160 if width <= 160 else -(-width // 64) * 64


# What forward_sm90 takes by the queries of a tile: three consumers overlap more than two. With a
# bias that is part of the score change, loads wait for the L1 cache.
FORWARD_RATES = {
    64: Rates(1200.0, 200.0, 0.0280, 0.000318),
    128: Rates(1200.0, 200.0, 0.0280, 0.000318),
    192: Rates(1200.0, 200.0, 0.0233, 0.000265),
}
BIAS_RATES = {
    64: Rates(800.0, 200.0, 0.22, 0.0),
    128: Rates(2000.0, 200.0, 0.22, 0.0),
    192: Rates(600.0, 200.0, 0.28, 0.0),
}
# With tiles of a bias, keys have two stages, and pairs wait for them. Most work tiles have one tile
# with an edge of a mask, whose products nothing overlaps with.
BIAS_TILE_RATES = {
    64: Rates(725.0, 118.0, 0.0626, 0.000318),
    128: Rates(1460.0, 118.0, 0.0705, 0.000318),
    192: Rates(2900.0, 118.0, 0.0585, 0.000318),
}
EDGE = 1000.0  # ns of such a tile, in addition


def forward_cost(
    tiles: Tiles,
    d: int,
    d_v: int,
    has_bias: bool,
    len_q: int,
    len_k: int,
    masked: bool = False,
) -> Cost:
    """Return what the rows of a head take with tiles of forward_sm90.cu.

    With `masked` and tiles of a bias, queries see half of the keys: those before their own.
    """
    products = -(-d // 16) * 16 + product_columns(d_v)
    rates = (BIAS_RATES if has_bias else FORWARD_RATES)[tiles.block_q]
    if tiles.bias_stages:
        rates = BIAS_TILE_RATES[tiles.block_q]
        if masked:
            rates = rates._replace(start=rates.start + EDGE)
            len_k = (len_k + tiles.block_kv) // 2
    return cost.of(
        rates,
        (len_q, len_k),
        (tiles.block_q, tiles.block_kv),
        products,
        (2 * (d + d_v), 2 * (d + d_v)),
        tiles.resident_blocks,
    )


def _line(tiles: Tiles) -> int:
    """Columns that backward_sm90_dkdv computes at a time; where consumers share keys, of both."""
    return 128 if tiles.block_kv < (tiles.threads - 128) // 2 else 64


# What backward_sm90_dkdv takes.
DKDV_RATES = Rates(4400.0, 0.0, 0.076, 0.00031)


def dkdv_cost(tiles: Tiles, d: int, d_v: int, len_q: int, len_k: int) -> Cost:
    """Return what the rows of a head take with tiles of backward_sm90_dkdv.cu."""
    line = _line(tiles)
    whole, whole_v = (-(-n // 16) * 16 for n in (d, d_v))
    wide, wide_v = (-(-n // line) * line for n in (d, d_v))  # of dk and dq, and of dv
    products = whole + whole_v + 2 * wide + wide_v
    block = tiles.block_kv, tiles.block_q
    moved = 4 * (d + d_v), 2 * (d + d_v) + 8 * d
    lengths, resident = (len_k, len_q), tiles.resident_blocks
    return cost.of(DKDV_RATES, lengths, block, products, moved, resident)
