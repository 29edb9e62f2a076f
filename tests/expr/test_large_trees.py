"""Large trees: what reads one visits its nodes a number of times that does not grow with it."""

# ruff: noqa: SIM300 (upper-case names are symbols)

from __future__ import annotations

import functools
import operator

import numpy as np
import pytest

import cupyflash
from cupyflash import lookup, masks, scores
from cupyflash.expr import minimum, tanh, where
from cupyflash.expr.bind import Dense, bind, in_host_memory
from cupyflash.expr.cuda import generate
from cupyflash.expr.derivative import derivative
from cupyflash.expr.evaluate import evaluate
from cupyflash.expr.functions import POSITIONS, SCORE
from cupyflash.expr.interval import tile_class
from cupyflash.expr.key_range import key_range
from cupyflash.expr.lower import lower
from cupyflash.expr.nodes import Expr, convert
from cupyflash.expr.rounding import evaluate_with_error
from cupyflash.expr.shift import unchanged
from cupyflash.expr.structure import structure
from cupyflash.expr.tile_classes import tile_classes

B, H, I, J = POSITIONS
SIZES = Dense((1,), 1, 20, 20)
PAIRS = {name: np.int64(0) for name in ("b", "h", "start_q", "start_k")} | {
    "i": np.arange(4),
    "j": np.arange(4),
    "len_q": np.int64(20),
    "len_k": np.int64(20),
}
CORNERS = PAIRS | {name: np.int64(3) for name in ("i_low", "i_high", "j_low", "j_high")}


def _chain(step, start):
    def make(size):
        made = start
        for n in range(size):
            made = step(made, n)
        return made

    return make


def _joined(join, term):
    return lambda size: functools.reduce(join, [term(n) for n in range(size)])


def _factors(size):
    factor, made = H * 0.5, SCORE
    for _ in range(size):
        factor = factor + 0.5  # each number of a head is made of the one before it
        made = made + factor * SCORE
    return made


NUMBERS = lookup(np.arange(20))
TREES = {
    "chosen pairs": _joined(operator.or_, lambda n: (I == n % 20) & (J == 7 * n % 20)),
    "counted": lambda n: _joined(operator.add, lambda m: (J <= I + m) * 1)(n) > 2,
    "lines": _joined(operator.or_, lambda n: J <= I + n),
    "many arrays": _joined(operator.or_, lambda n: lookup(np.arange(20))[J] < I),
    "nested look-ups": lambda n: _chain(lambda x, _: NUMBERS[x], J)(n) <= I,
    "shared integers": lambda n: _chain(lambda x, m: minimum(x + x, 5 + m), I + 1)(n) > J,
    "choices": _chain(lambda x, n: where(x, J < n, I < n), J <= I),
    "sums": _joined(operator.add, lambda n: SCORE * 0.5 + n * (I - J)),
    "functions": _chain(lambda x, _: tanh(x) * 0.9 + 0.1, SCORE),
    "shared floats": _chain(lambda x, _: x * x + 0.5, SCORE),
    "numbers of a head": _factors,
}


def readers(root):
    """Everything that reads a tree, each as a function without arguments."""
    bound = bind(root, SIZES)
    yield "bind", lambda: bind(root, SIZES)
    yield "structure", lambda: structure(root)
    yield "in_host_memory", lambda: in_host_memory(root)
    yield "repr", lambda: repr(root)
    yield "unchanged", lambda: unchanged(root, {"i": 1, "j": 1})
    yield "lower", lambda: lower(bound)
    if root.type == "bool":
        classes, keys = tile_class(bound), key_range(bound, SIZES)
        yield "tile_class", lambda: tile_class(bound)
        yield "key_range", lambda: key_range(bound, SIZES)
        yield "lower a class", lambda: lower(classes)
        yield "tile_classes", lambda: tile_classes(classes, CORNERS, "gpu")
        yield "generate", lambda: generate(bound, classes, keys=keys)
        yield "generate for 32 bits", lambda: generate(bound, classes, keys=keys, short=True)
    else:
        score = PAIRS | {"score": np.ones(4)}
        slope = convert(derivative(bound), "float")
        yield "derivative", lambda: derivative(bound)
        yield "lower a slope", lambda: lower(slope)
        yield "generate", lambda: generate(changed=bound, slope=slope)
        yield "generate for 32 bits", lambda: generate(changed=bound, slope=slope, short=True)
        yield "evaluate", lambda: evaluate(bound, score, np.float64)
        errors = np.zeros(4)
        yield "errors", lambda: evaluate_with_error((bound, slope), score, errors, 2.0**-24)


@pytest.fixture
def visits(monkeypatch):
    """How often a function asks for the operands of any node."""
    slot, asked = Expr.args, [0]

    def args(self):
        asked[0] += 1
        return slot.__get__(self)

    monkeypatch.setattr(Expr, "args", property(args, slot.__set__))

    def count(function):
        asked[0] = 0
        function()
        return asked[0]

    return count


@pytest.mark.parametrize("name", TREES)
def test_visits_are_linear_in_the_size(visits, name):
    small, large = (dict(readers(TREES[name](size))) for size in (40, 160))
    for reader, read in small.items():
        few, many = visits(read), visits(large[reader])
        assert 0 < few < 2_000_000, reader
        assert many <= 4.2 * few, f"{reader}: {few} visits, and {many} of a tree 4 times as large"


@pytest.mark.parametrize("name", TREES)
def test_generated_text_is_linear_in_the_size(name):
    def length(size):
        bound = bind(TREES[name](size), SIZES)
        made = generate(bound) if bound.type == "bool" else generate(changed=bound)
        return len(made.functions.source)

    # Longer names, and comments that are abbreviated.
    assert length(640) <= 4.6 * length(160)


def test_a_mask_of_three_thousand_terms_is_no_problem():
    wanted = np.zeros((20, 20), bool)
    pairs = [(n * n % 20, n * 7 % 20) for n in range(3000)]
    wanted[tuple(np.transpose(pairs))] = True
    mask = functools.reduce(operator.or_, [(I == i) & (J == j) for i, j in pairs])
    mask = masks.mask(lambda b, h, i, j: mask)
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 20, 4), dtype=np.float32)
    found = cupyflash.attention(q, k, v, mask=mask)
    np.testing.assert_array_equal(mask.to_array(1, 1, 20, 20)[0, 0], wanted)
    np.testing.assert_allclose(found, cupyflash.attention(q, k, v, mask=wanted), atol=1e-6)


def test_a_score_of_three_thousand_terms_is_no_problem():
    change = scores.score(lambda s, b, h, i, j: _chain(lambda x, n: x + 0.001 * (i - j), s)(3000))
    q, k, v, do = np.random.default_rng(0).standard_normal((4, 1, 1, 20, 4), dtype=np.float32)
    _, vjp = cupyflash.attention_vjp(q, k, v, score_mod=change)
    three = scores.score(lambda s, b, h, i, j: s + 3.0 * (i - j))
    _, other = cupyflash.attention_vjp(q, k, v, score_mod=three)
    for found, wanted in zip(vjp(do)[:3], other(do)[:3], strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-3)
