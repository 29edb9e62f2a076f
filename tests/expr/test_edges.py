"""Which masks have edges: those whose tiles are mostly FULL or EMPTY."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash import lookup, masks
from cupyflash.expr.edges import block_size, has_edges
from cupyflash.problem import validate
from cupyflash.problem.bound_exprs import trees
from cupyflash.problem.options import Options

POSITIONS = np.arange(96)
EACH = lookup(POSITIONS % 3 == 0)
NUMBERS = lookup(POSITIONS * 1.5)
WITH = {
    "causal": masks.causal(),
    "window": masks.window(3, 5),
    "a bound of the query's": masks.mask(lambda b, h, i, j: j < (i % 7) * 9),
    "the query's condition": masks.mask(lambda b, h, i, j: EACH[i] | (j < 4)),
    "documents": masks.segments(POSITIONS // 10) & masks.causal(),
    "prefix": masks.prefix(5) | masks.causal(),
    "lengths": masks.lengths(np.array([3])),
    "blocks": masks.blocks(np.eye(3, dtype=bool), 32, 32),
    "numbers": masks.mask(lambda b, h, i, j: NUMBERS[j] < 9.0),
    "no key": masks.mask(lambda b, h, i, j: i < 5),
}
WITHOUT = {
    "dilated": masks.dilated(3),
    "some": masks.dilated(3) & masks.causal(),
    "dense": masks.dense(np.ones((96, 96), bool)),
    "every key's condition": masks.mask(lambda b, h, i, j: EACH[j]),
    "the next key's": masks.mask(lambda b, h, i, j: EACH[(j + 1) // 2 + j // 2]),
}


@pytest.mark.parametrize("name", [*WITH, *WITHOUT])
def test_edges(name):
    q = np.zeros((1, 96, 8), np.float32)
    allowed = trees(validate.call(q, q, q, Options(mask=(WITH | WITHOUT)[name]))).allowed
    assert has_edges(allowed) == (name in WITH)


@pytest.mark.parametrize("name", [*WITH, *WITHOUT])
def test_edges_before_a_mask_is_bound(name):
    assert has_edges((WITH | WITHOUT)[name].expr) == (name in WITH)


def test_sizes_of_blocks():
    shifted = masks.mask(lambda b, h, i, j: i >> 5 >= j // 80)
    sizes = {
        96: masks.blocks(np.eye(3, dtype=bool), 96, 192) & masks.causal(),
        64: masks.chosen(np.zeros((2, 3), int), (128, 64)),
        16: shifted,
        0: masks.causal() & masks.segments(POSITIONS),
    }
    assert {size: block_size(mask.expr) for size, mask in sizes.items()} == {n: n for n in sizes}
