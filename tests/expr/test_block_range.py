"""What a mask leaves of a block of keys, as one range: the same pairs as the mask itself."""

from __future__ import annotations

import numpy as np
import pytest
from expressions import by_numpy, tile_symbols
from hypothesis import event, given
from hypothesis import strategies as st

from cupyflash import lookup, masks
from cupyflash.expr import absolute
from cupyflash.expr.bind import bind
from cupyflash.expr.block_range import WHOLE, block_range
from cupyflash.expr.evaluate import evaluate
from cupyflash.expr.functions import POSITIONS
from cupyflash.expr.nodes import walk
from cupyflash.expr.width import narrow
from cupyflash.masks import flat_sizes
from cupyflash.reference.spec.naive import Sizes

QUERY, KEY = POSITIONS[2:]
SIZES = Sizes((2,), 2, 50, 200)


def image(width, reach):
    """Neighbours in an image, up to `reach` pixels away."""
    return masks.mask(
        lambda b, h, i, j: (
            (abs(i // width - j // width) <= reach) & (abs(i % width - j % width) <= reach)
        )
    )


RANGES = {
    "image": (image(8, 2), 8),
    "image of 12 columns": (image(12, 3), 12),
    "shifts": (masks.mask(lambda b, h, i, j: (i >> 4 == j >> 4) & (j % 24 >= i % 7)), 8),
    "chunks": (masks.mask(lambda b, h, i, j: (i // 16 == j // 16) & (j <= i) & (h == 0)), 16),
    "strips": (masks.mask(lambda b, h, i, j: (j % 32 == i % 32) & (abs(i - j) < 90)), 32),
    "a band": (masks.mask(lambda b, h, i, j: abs(i - j) < 9), WHOLE),
}
OTHERS = {
    "one of two": image(8, 1) | masks.causal(),
    "twice j": masks.mask(lambda b, h, i, j: i >= j + j),
    "all but one": masks.mask(lambda b, h, i, j: i % 8 != j % 8),
    "far away": masks.mask(lambda b, h, i, j: abs(i - j) > 9),
    "divided by a query": masks.mask(lambda b, h, i, j: j % (i + 1) == 0),
    "divided after a shift": masks.mask(lambda b, h, i, j: (j + i) // 8 == 3),
    "an array": masks.mask(lambda b, h, i, j: j // 8 <= lookup(np.arange(50))[i]),
    "floats": masks.mask(lambda b, h, i, j: (j // 8) * 0.5 <= i),
    "64 bits": masks.mask(lambda b, h, i, j: j // 8 <= i * i),
    "queries only": masks.mask(lambda b, h, i, j: i % 8 > 3),
}


def seen_by_ranges(found, size, where_):
    """The pairs of a tile within the ranges of its blocks of so many keys, (ni, nj)."""
    keys = where_[4] + np.arange(where_[5])
    seen = np.zeros((where_[3], where_[5]), bool)
    for start in np.unique(keys // size * size):
        symbols, _ = tile_symbols(SIZES, where_)
        symbols["j"] = np.full_like(symbols["j"], start)
        some, low, high = (None if x is None else evaluate(x, symbols) for x in found[1:])
        of_block = (keys // size * size == start) & np.broadcast_to(some, seen.shape)
        if low is not None:
            of_block = of_block & (keys >= low)
        if high is not None:
            of_block = of_block & (keys <= high)
        seen |= of_block
    return seen


def check(mask, sizes_of_blocks):
    bound = bind(mask.expr, flat_sizes(SIZES))
    found = block_range(bound)
    assert found is not None
    roots = [x for x in found[1:] if x is not None]
    words = narrow(*roots)
    assert all(node in words for node in walk(*roots) if node.type == "int")
    for size in sizes_of_blocks(found.size):
        assert found.size % size == 0
        for b, h in np.ndindex(2, 2):
            where_ = b, h, 0, 50, 0, 200
            np.testing.assert_array_equal(
                seen_by_ranges(found, size, where_), by_numpy(bound, SIZES, where_)
            )
    return found


@pytest.mark.parametrize("name", RANGES)
def test_masks_of_which_a_query_sees_a_range_of_each_block(name):
    mask, size = RANGES[name]
    assert check(mask, lambda size: {size, max(size // 2, 1), min(size, 4)}).size == size


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_have_none(name):
    assert block_range(bind(OTHERS[name].expr, flat_sizes(SIZES))) is None


@st.composite
def conditions(draw):
    """A comparison whose sides are lines of a key, of its quotient or of its remainder."""
    number = st.integers(-20, 60)
    divisor = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 30, 32, 48])

    def term(position):
        by = draw(divisor)
        return draw(st.sampled_from([position, position // by, position % by]))

    left, right = term(KEY), draw(st.sampled_from([term(QUERY), draw(number) + 0 * QUERY]))
    if draw(st.booleans()):
        left = -left
    left = left + draw(number)
    op = draw(st.sampled_from(["<", "<=", "==", ">", ">=", "near"]))
    if op == "near":
        return absolute(left - right) <= draw(number)
    return {
        "<": left < right, "<=": left <= right, "==": left == right, ">": left > right,
        ">=": left >= right,
    }[op]  # fmt: skip


@given(st.lists(conditions(), min_size=1, max_size=3), st.integers(1, 3))
def test_ranges_are_those_of_the_mask(parts, factor):
    expr = parts[0]
    for part in parts[1:]:
        expr = expr & part
    mask = masks.mask(lambda b, h, i, j: expr)
    if block_range(bind(mask.expr, flat_sizes(SIZES))) is None:
        event("no range")
        return
    check(mask, lambda size: {size, size // factor if size % factor == 0 else size})
