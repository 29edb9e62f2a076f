"""Generated CUDA code, compiled for the CPU, against NumPy's evaluation of the same trees."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_on_cpu import Compiled
from expressions import (
    arrays,
    bound_or_none,
    by_numpy,
    exactly,
    expressions,
    problems,
    tile_symbols,
    tiles,
)
from halves import mostly_thorough
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from cupyflash import lookup, masks
from cupyflash.errors import ArgumentError
from cupyflash.expr import (
    absolute,
    clip,
    cos,
    erf,
    exp,
    exp2,
    floor,
    len_k,
    len_q,
    log,
    maximum,
    sigmoid,
    sin,
    sqrt,
    tanh,
    where,
)
from cupyflash.expr.bind import bind
from cupyflash.expr.cuda import generate
from cupyflash.expr.derivative import derivative
from cupyflash.expr.functions import POSITIONS, SCORE
from cupyflash.expr.interval import EMPTY, FULL, PARTIAL, tile_class
from cupyflash.expr.nodes import APPROXIMATE, convert, walk
from cupyflash.expr.tile_classes import tile_classes
from cupyflash.masks import flat_sizes
from cupyflash.reference.spec.naive import Sizes

# An example is a batch of expressions: the compiler runs once for all of them.
BATCH = 25
# Shrinking would run it hundreds of times; the message names the one expression that is wrong.
batches = settings(
    max_examples=8,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


@st.composite
def bound_expressions(draw, kind, score=False, functions=True):
    """A bound expression, its problem and one of its tiles; None where there is no proof."""
    sizes = draw(problems())
    root = bound_or_none(draw(expressions(kind, 3, score, functions)), sizes)
    return None if root is None else (root, sizes, draw(tiles(sizes)))


@pytest.fixture
def compiled(tmp_path_factory):
    def compile_all(made, double=False, scores=False):
        folder = tmp_path_factory.mktemp("expressions")
        return Compiled(made, double, folder, scores)

    return compile_all


INT32 = np.array([-(2**31), 2**31 - 1], np.int32)
BEYOND_32_BITS = {
    "square": lambda i, j: i * i > 40000 * j,
    "product of positions": lambda i, j: i * j > 2**31,
    "product with a constant": lambda i, j: 70000 * i > 60000 * j,
    "sum": lambda i, j: lookup(INT32)[i % 2] + lookup(INT32)[j % 2] > 0,
    "difference": lambda i, j: lookup(INT32)[i % 2] - lookup(INT32)[j % 2] > 0,
    "negative": lambda i, j: -lookup(INT32)[i % 2] > j,
    "absolute": lambda i, j: absolute(lookup(INT32)[j % 2]) > i,
    "quotient": lambda i, j: lookup(INT32)[i % 2] // -1 > 0,
}


def test_operands_of_32_bits_may_have_a_result_of_64(compiled):
    """C++ computes in the type of the operands: the product of two int wraps around."""
    sizes, where_ = Sizes((1,), 1, 60000, 60000), (0, 0, 50000, 3, 49990, 4)
    symbols, _ = tile_symbols(sizes, where_)
    _, _, i, j = POSITIONS
    roots = [bind(make(i, j), flat_sizes(sizes)) for make in BEYOND_32_BITS.values()]
    code = compiled([generate(root, tile_class(root), short=True) for root in roots])
    for n, (name, root) in enumerate(zip(BEYOND_32_BITS, roots, strict=True)):
        wanted = by_numpy(root, sizes, where_)
        np.testing.assert_array_equal(code.mask(n, symbols, wanted.shape), wanted, name)


@pytest.mark.thorough("random masks; those by hand are quick")
@batches
@given(st.lists(bound_expressions("bool", functions=False), min_size=BATCH, max_size=BATCH))
def test_masks_are_numpys(compiled, drawn):
    cases = [case for case in drawn if case is not None]
    assume(cases)
    classes = [tile_class(root) for root, _, _ in cases]
    pairs = enumerate(zip(cases, classes, strict=True))
    code = compiled([generate(case[0], bound, short=n % 2 == 0) for n, (case, bound) in pairs])
    for n, ((root, sizes, where_), bound) in enumerate(zip(cases, classes, strict=True)):
        symbols, corners = tile_symbols(sizes, where_)
        wanted = by_numpy(root, sizes, where_)
        np.testing.assert_array_equal(code.mask(n, symbols, wanted.shape), wanted, str(root))
        found = code.tile_class(n, corners)
        assert found in (EMPTY, PARTIAL, FULL)
        assert found != EMPTY or not wanted.any(), root
        assert found != FULL or wanted.all(), root
        assert found == exactly(bound, sizes, where_), root
        assert found == tile_classes(bound, corners, "gpu"), root


@mostly_thorough(
    ("double", "number"),
    [(False, 3), (False, 8), (True, 8)],
    quick=[(False, 3)],
    why="more batches, and the other type; those by hand are quick",
    ids=["float32", "float32, more", "float64"],
)
def test_scores_and_slopes_are_numpys(compiled, double, number):
    kind = np.float64 if double else np.float32

    @settings(batches, max_examples=number)
    @given(st.lists(bound_expressions("float", score=True), min_size=BATCH, max_size=BATCH))
    def check(drawn):
        cases = [case for case in drawn if case is not None]
        assume(cases)
        trees = [(root, convert(derivative(root), "float")) for root, _, _ in cases]
        made = [
            generate(changed=root, slope=slope, short=n % 2 == 0)
            for n, (root, slope) in enumerate(trees)
        ]
        code = compiled(made, double, scores=True)
        rng = np.random.default_rng(0)
        for n, (roots, (_, sizes, where_)) in enumerate(zip(trees, cases, strict=True)):
            symbols, _ = tile_symbols(sizes, where_)
            score = rng.standard_normal((where_[3], where_[5])).astype(kind)
            for found, root in zip(code.score(n, symbols, score), roots, strict=True):
                wanted = by_numpy(root, sizes, where_, score, kind)
                assert_same_numbers(found, wanted, root)

    check()


def assert_same_numbers(found, wanted, root):
    """Equal, but for the last bits of functions, and what they lead to."""
    if not any(node.op in APPROXIMATE for node in walk(root)):
        np.testing.assert_array_equal(found, wanted, str(root))


# -- by hand --------------------------------------------------------------------------------------

B, H, I, J = POSITIONS
SIZES = Sizes((2,), 2, 40, 50)
TILE = (1, 1, 3, 20, 7, 30)
TABLE = np.array([[3, -1, 4], [1, -5, 9]], np.int8)[:, ::-1]
CHOSEN = np.array([[[3, -1, 2], [2, 0, 99], [5, 1, 1]]] * 2, np.int16)[:, :, ::-1]
REALS = np.array([0.5, -2.0, np.nan, np.inf], np.float16)

MASKS = {
    "causal": I + len_k - len_q >= J,
    "python's division": (I - J) // 7 - (J - I) % -5 > 1,
    "look-ups": lookup(TABLE)[B % 2, clip(J - I, 0, 2)] * 3 > I - 20,
    "reals": lookup(REALS)[I % 4] * 0.1 + J * 0.3 < 4.0,
    "floor": floor(I / 3.0) == J // 3,
    "NaN": maximum(lookup(REALS)[J % 4], 0.25) >= 0.5,
    "shifts": ((I - J) >> 1) + (J << 2) + ((I - J) >> (J + 40)) > (I << (J % 9)) % 77,
    "short shifts": (I >> (J >> 1)) + ((J - I) >> 40) > ((I - J) >> J),
    "roots": sqrt(J - 3) * 2.0 < sqrt(I + 0.5),
    "chosen": masks.chosen(CHOSEN, (16, 8)).expr & (I + 3 >= J),
    "chosen for each query": masks.chosen(CHOSEN[:, :1].repeat(40, 1), (1, 1)).expr,
    "constants": where(J > 3, True, False) ^ (I == 4),
}


either = pytest.mark.parametrize("short", [False, True], ids=["64 bits", "32 bits"])


@either
def test_masks_by_hand(compiled, short):
    roots = [bind(mask, flat_sizes(SIZES)) for mask in MASKS.values()]
    code = compiled([generate(root, tile_class(root), short=short) for root in roots])
    symbols, corners = tile_symbols(SIZES, TILE)
    for n, (name, root) in enumerate(zip(MASKS, roots, strict=True)):
        wanted = by_numpy(root, SIZES, TILE)
        np.testing.assert_array_equal(code.mask(n, symbols, wanted.shape), wanted, name)
        assert code.tile_class(n, corners) == tile_classes(tile_class(root), corners, "gpu"), name


SCORES = {
    "softcap": 3.0 * tanh(SCORE / 3.0),
    "alibi": SCORE - 0.25 * absolute(I + len_k - len_q - J),
    "all": where(SCORE > 0.5, exp(-SCORE), log(maximum(SCORE * SCORE, 0.125))),
    "functions": erf(SCORE) + 0.5 * sigmoid(3.0 * SCORE) + exp2(SCORE * 0.5) * (I + 1) ** -0.5,
    "waves": sin(SCORE * 3.0) * cos(I * 0.125 - J) + sqrt(1.0 + SCORE * SCORE),
    "powers": (absolute(SCORE) + 0.25) ** (SCORE * 0.5) + (SCORE + 4.0) ** -1.5,
    "hidden": where(J % 3 == 0, float("-inf"), SCORE),
}


@either
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_scores_by_hand(compiled, kind, short):
    roots = [bind(score, flat_sizes(SIZES)) for score in SCORES.values()]
    trees = [(root, convert(derivative(root), "float")) for root in roots]
    made = [generate(changed=root, slope=slope, short=short) for root, slope in trees]
    code = compiled(made, kind == np.float64, scores=True)
    symbols, _ = tile_symbols(SIZES, TILE)
    score = np.random.default_rng(1).standard_normal((TILE[3], TILE[5])).astype(kind)
    for n, (name, both) in enumerate(zip(SCORES, trees, strict=True)):
        for found, tree in zip(code.score(n, symbols, score), both, strict=True):
            wanted = by_numpy(tree, SIZES, TILE, score, kind)
            eps = np.finfo(kind).eps  # a sum may cancel
            np.testing.assert_allclose(found, wanted, rtol=8 * eps, atol=16 * eps, err_msg=name)


@given(data=st.data())
@settings(max_examples=5, suppress_health_check=list(HealthCheck))
def test_ranges_of_large_arrays_are_not_looked_at(compiled, data):
    array = data.draw(arrays("int"))
    wide = np.resize(array, 4000)
    root = bind(lookup(wide)[(I * 100 + J) % 4000] > J - 9, flat_sizes(SIZES))
    code = compiled([generate(root, tile_class(root))])
    symbols, corners = tile_symbols(SIZES, TILE)
    wanted = by_numpy(root, SIZES, TILE)
    np.testing.assert_array_equal(code.mask(0, symbols, wanted.shape), wanted)
    assert code.tile_class(0, corners) == PARTIAL
    assert tile_classes(tile_class(root), corners, "gpu") == PARTIAL


def test_an_array_with_too_many_axes_is_an_error():
    many = np.zeros((1,) * 9, np.int32)
    root = bind(lookup(many)[(0,) * 9] > J, flat_sizes(SIZES))
    with pytest.raises(ArgumentError, match="at most 8"):
        generate(root)
