"""Structures: equal for trees that compute alike, whatever arrays they read."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cupyflash import lookup, masks, scores
from cupyflash.expr import sqrt, where
from cupyflash.expr.bind import bind
from cupyflash.expr.structure import structure
from cupyflash.masks import flat_sizes
from cupyflash.reference.spec.naive import Sizes

F32 = np.dtype(np.float32)


def of(made):
    return structure(made.expr)[0]


DIFFERENT = {
    "causal": lambda: masks.causal(),
    "causal, another offset": lambda: masks.causal(3),
    "window": lambda: masks.window(3, 0),
    "either": lambda: masks.causal() | masks.prefix(3),
    "both": lambda: masks.causal() & masks.prefix(3),
    "an integer": lambda: masks.mask(lambda b, h, i, j: i - j < 1),
    "a float": lambda: masks.mask(lambda b, h, i, j: i - j < 1.0),
    "the other way round": lambda: masks.mask(lambda b, h, i, j: j - i < 1),
    "softcap": lambda: scores.softcap(2.0),
    "softcap, another cap": lambda: scores.softcap(2.5),
    "zero": lambda: scores.score(lambda s, b, h, i, j: s * 0.0),
    "minus zero": lambda: scores.score(lambda s, b, h, i, j: s * -0.0),
    "a choice": lambda: scores.score(lambda s, b, h, i, j: where(i < j, s, 0.0)),
    "a shift": lambda: masks.mask(lambda b, h, i, j: (i >> 1) < j),
    "the other shift": lambda: masks.mask(lambda b, h, i, j: (i << 1) < j),
    "a power": lambda: scores.score(lambda s, b, h, i, j: s**0.5),
    "another power": lambda: scores.score(lambda s, b, h, i, j: s**0.25),
    "a root": lambda: scores.score(lambda s, b, h, i, j: sqrt(s)),
    "slopes": lambda: scores.alibi(np.ones(4, F32)),
    "lengths": lambda: masks.lengths(np.ones(2, np.int64)),
    "segments": lambda: masks.segments(np.ones(4, np.int64)),
    "one array": lambda: _pair(np.ones(4, F32)),
    "two arrays": lambda: _pair(np.ones(4, F32), np.ones(4, F32)),
}


def _pair(first, second=None):
    tables = lookup(first), lookup(first if second is None else second)
    return scores.score(lambda s, b, h, i, j: s + tables[0][h] * tables[1][h])


@pytest.mark.parametrize("name", DIFFERENT)
def test_trees_made_alike_are_equal(name):
    first, second = of(DIFFERENT[name]()), of(DIFFERENT[name]())
    assert first == second
    assert hash(first) == hash(second)
    assert len({first, second}) == 1


def test_different_trees_differ():
    made = {name: of(make()) for name, make in DIFFERENT.items()}
    for one, other in itertools.combinations(made, 2):
        assert made[one] != made[other], (one, other)


def test_no_array_is_held():
    slopes = np.ones(4, np.float32)
    made, arrays = structure(scores.alibi(slopes).expr)
    assert len(arrays) == 1
    assert arrays[0] is slopes
    assert made == structure(scores.alibi(np.zeros(4, np.float32)).expr)[0]


def test_an_array_is_named_once():
    slopes, more = np.ones(4, np.float32), np.ones(4, np.float32)
    assert len(structure(_pair(slopes).expr)[1]) == 1
    assert list(map(id, structure(_pair(slopes, more).expr)[1])) == [id(slopes), id(more)]


def test_not_a_number_equals_itself():
    made = [scores.score(lambda s, b, h, i, j: s * float("nan")) for _ in range(2)]
    assert of(made[0]) == of(made[1])


def test_chosen_keys_that_are_bound_have_a_structure():
    """Calls over ranks are compared by trees whose arrays have their places already."""
    chosen = [np.array([[0, -1], [1, 0]]), np.array([[1, 1], [0, 0]])]
    sizes = flat_sizes(Sizes((1,), 1, 4, 4))
    made = [structure(bind(masks.chosen(x, 2).expr, sizes)) for x in chosen]
    assert made[0][0] == made[1][0]
    assert hash(made[0][0]) == hash(made[1][0])
    assert [arrays[0] is x for (_, arrays), x in zip(made, chosen, strict=True)] == [True, True]
