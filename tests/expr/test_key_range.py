"""The range of keys that a mask was solved for: the same pairs as the mask itself."""

from __future__ import annotations

import operator

import numpy as np
import pytest
from expressions import bound_or_none, by_numpy, expressions, problems, tile_symbols, tiles
from hypothesis import event, given
from hypothesis import strategies as st

from cupyflash import lookup, masks
from cupyflash.expr import clip, where
from cupyflash.expr.bind import bind
from cupyflash.expr.evaluate import evaluate
from cupyflash.expr.functions import POSITIONS
from cupyflash.expr.key_range import key_range
from cupyflash.expr.nodes import rebuild
from cupyflash.masks import flat_sizes
from cupyflash.reference.spec.naive import Sizes

QUERY, KEY = POSITIONS[2:]
LENGTHS = np.array([3, 7])
BOUNDED = {
    "causal": masks.causal(),
    "causal, an offset each": masks.causal(LENGTHS),
    "window": masks.window(3, 2),
    "half a window": masks.window(3, None),
    "lengths": masks.lengths(LENGTHS, LENGTHS),
    "prefix": masks.prefix(4) | masks.causal(),
    "sink of attention": ~(masks.prefix(4) | masks.causal()),
    "chunks": masks.mask(lambda b, h, i, j: (j < (i // 4 + 1) * 4) & (j >= i // 4 * 4)),
    "one key": masks.mask(lambda b, h, i, j: 2 - j == i - 7),
    "queries with a choice": masks.mask(lambda b, h, i, j: (i < 5) | (j >= i)),
    "queries without keys": masks.mask(lambda b, h, i, j: (i < 5) & (j >= i)),
    "a bound of its own": masks.mask(
        lambda b, h, i, j: j <= where(i % 2 == 0, i, lookup(LENGTHS)[clip(h, 0, 1)])
    ),
}
UNBOUNDED = {
    "segments": masks.segments(np.arange(11) // 4, np.arange(9) // 3),
    "dilated": masks.dilated(3),
    "two ranges": masks.window(1, 1) | masks.prefix(2),
    "not a range": ~masks.window(1, 1),
    "all but one": masks.mask(lambda b, h, i, j: i != j),
    "twice j": masks.mask(lambda b, h, i, j: i >= j + j),
    "floats": masks.mask(lambda b, h, i, j: i * 0.5 >= j),
    "queries only": masks.mask(lambda b, h, i, j: i > 3),
}


def allowed(found, sizes, where_):
    """The pairs of a tile within a range, (ni, nj)."""
    symbols, _ = tile_symbols(sizes, where_)
    low, high = (None if end is None else evaluate(end, symbols) for end in found)
    seen = np.ones((where_[3], where_[5]), bool)
    if low is not None:
        seen &= symbols["j"] >= low
    if high is not None:
        seen &= symbols["j"] <= high
    return seen


@pytest.mark.parametrize("name", BOUNDED)
def test_masks_of_neighbouring_keys_have_a_range(name):
    sizes = Sizes((2,), 2, 11, 9)
    bound = bind(BOUNDED[name].expr, flat_sizes(sizes))
    found = key_range(bound, flat_sizes(sizes))
    assert found is not None
    for b in range(2):
        for h in range(2):
            where_ = (b, h, 0, 11, 0, 9)
            np.testing.assert_array_equal(
                allowed(found, sizes, where_), by_numpy(bound, sizes, where_)
            )


@pytest.mark.parametrize("name", UNBOUNDED)
def test_other_masks_have_none(name):
    sizes = flat_sizes(Sizes((2,), 2, 11, 9))
    assert key_range(bind(UNBOUNDED[name].expr, sizes), sizes) is None


def test_no_range_where_its_ends_may_leave_64_bits():
    far = 2**63 - 20
    sizes = flat_sizes(Sizes((1,), 1, 4, 4))
    mask = masks.mask(lambda b, h, i, j: j + far > i - far)
    bound = bind(mask.expr, sizes)
    assert key_range(bound, sizes) is None


def without_key(tree):
    return rebuild(tree, lambda node: QUERY if node.value == "j" else None)


@st.composite
def comparisons(draw):
    """A comparison in which j stands alone, or a condition without it."""
    side = without_key(draw(expressions("int", 1, functions=False)))
    others = [KEY, -KEY, KEY + side, 3 - (KEY - side), QUERY]
    other = others[draw(st.integers(0, len(others) - 1))]
    compare = draw(st.sampled_from([operator.lt, operator.le, operator.eq, operator.ge]))
    return compare(side, other) if draw(st.booleans()) else compare(other, side)


CONDITIONS = st.recursive(
    comparisons(),
    lambda inner: st.one_of(
        st.builds(operator.and_, inner, inner),
        st.builds(operator.or_, inner, inner),
        st.builds(operator.invert, inner),
    ),
    max_leaves=4,
)


@given(CONDITIONS, st.data())
def test_a_range_holds_the_masks_pairs(tree, data):
    sizes = data.draw(problems())
    bound = bound_or_none(tree, sizes)
    found = None if bound is None else key_range(bound, flat_sizes(sizes))
    event("has a range" if found else "has none")
    if found is not None:
        where_ = data.draw(tiles(sizes))
        np.testing.assert_array_equal(allowed(found, sizes, where_), by_numpy(bound, sizes, where_))
