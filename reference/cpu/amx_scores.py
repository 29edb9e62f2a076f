"""Products of rows of keys, where they lie, and packed queries; and of values and gradients."""

from __future__ import annotations

from typing import Any

from .amx_code import MatrixUnit, helper_for, multiplier
from .amx_memory import DEPTH, ROW, SIDE, TILE
from .amx_pack import SIZE, Packing

_FLOAT = 4  # bytes of a float32


def score_mender(packing: Packing) -> Any:
    """Make the helper that computes the scores of special queries and keys again."""
    load = packing.load

    @helper_for(packing.name)
    def score_of(k, q, depth, scale):
        """Return the score of a row of keys and one of queries, by the vector units."""
        total = scale - scale
        for d in range(depth):
            total += load(k + SIZE * d) * load(q + SIZE * d)
        return total * scale

    @helper_for(packing.name)
    def mend_scores(k, k_size, q, q_size, depth, scale, begin, end, n, lanes, q_flags, k_flags, s):
        for j in range(begin, end):
            for i in range(n):
                if k_flags[j] | q_flags[i]:
                    s[j * lanes + i] = score_of(k + j * k_size, q + i * q_size, depth, scale)

    return mend_scores


def scores_filler(unit: type[MatrixUnit], packing: Packing) -> Any:
    """Make the helper that multiplies keys by a panel of queries, by the tiles of some unit.

    The keys begin with `begin`, a multiple of a step.
    """
    parts = packing.parts
    multiply_scores = multiplier(unit, parts, parts, False)

    @helper_for(unit.__name__, packing.name)
    def fill_from_rows(k, k_size, in_place, copies, q, begin, end, lanes, steps, s):
        size, copied = steps * TILE, steps * ROW
        for j in range(begin, end, DEPTH):
            below = j + SIDE
            first = k + j * k_size if below <= in_place else copies + j * copied
            is_second = below + SIDE <= in_place
            second = k + below * k_size if is_second else copies + below * copied
            first_size = k_size if below <= in_place else copied
            second_size = k_size if is_second else copied
            for i in range(0, lanes, 2 * SIDE):
                panel = q + i // SIDE * size
                multiply_scores(
                    first, first_size, second, second_size, ROW, panel, panel + size, TILE, steps,
                    s + (j * lanes + i) * _FLOAT, lanes * _FLOAT, end - j, lanes - i,
                )  # fmt: skip

    @helper_for(unit.__name__, packing.name)
    def fill_from_tiles(k, k_size, in_place, copies, q, begin, end, lanes, steps, s):
        step_size = parts * TILE
        size = steps * step_size
        for j in range(begin, end, DEPTH):
            keys = copies + j // SIDE * size
            for i in range(0, lanes, 2 * SIDE):
                panel = q + i // SIDE * size
                multiply_scores(
                    keys, ROW, keys + size, ROW, step_size, panel, panel + size, step_size, steps,
                    s + (j * lanes + i) * _FLOAT, lanes * _FLOAT, end - j, lanes - i,
                )  # fmt: skip

    return fill_from_rows if parts == 1 else fill_from_tiles
