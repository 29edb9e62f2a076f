"""Shifts, powers and functions of expressions: values, proofs, derivatives and their ends."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from expressions import (
    by_numpy,
    class_by_machine,
    exactly,
    mask_by_machine,
    score_by_machine,
    tile_symbols,
)

import cupyflash
from cupyflash import lookup, masks, scores
from cupyflash.errors import ArgumentError, TraceError
from cupyflash.expr import cos, erf, exp, exp2, floor, log, sigmoid, sin, sqrt, where
from cupyflash.expr.bind import bind
from cupyflash.expr.derivative import derivative
from cupyflash.expr.evaluate import evaluate
from cupyflash.expr.functions import POSITIONS, SCORE
from cupyflash.expr.interval import EMPTY, FULL, PARTIAL, bounds, tile_class
from cupyflash.expr.nodes import as_expr, operation
from cupyflash.expr.special import erf as numpys_erf
from cupyflash.expr.special import sigmoid as numpys_sigmoid
from cupyflash.expr.tile_classes import tile_classes
from cupyflash.masks import flat_sizes
from cupyflash.reference.spec.naive import Sizes

B, H, I, J = POSITIONS
SIZES = Sizes((2,), 3, 4, 5)
TILE = (1, 2, 0, 4, 0, 5)
i_values, j_values = np.ix_(np.arange(4), np.arange(5))
apart = i_values - j_values


@pytest.mark.parametrize(
    ("tree", "expected", "type_"),
    [
        (I >> 1, i_values >> 1, "int"),
        ((I - J) >> 1, apart >> 1, "int"),
        ((I - J) >> 70, np.where(apart < 0, -1, 0), "int"),
        ((I - J) >> J, apart >> j_values, "int"),
        (17 >> J, 17 >> j_values, "int"),
        ((I - J) << 3, apart * 8, "int"),
        (1 << J, 2**j_values, "int"),
        ((I < J) << 2, (apart < 0) * 4, "int"),
        ((I < 0) << (J + 62), 0, "int"),
        ((I + 1) ** -1, 1 / (i_values + 1), "float"),
        (divmod(I - J, 3)[0], apart // 3, "int"),
        (divmod(I - J, 3)[1], apart % 3, "int"),
        (divmod(7, J + 1)[0], 7 // (j_values + 1), "int"),
        (divmod(7, J + 1)[1], 7 % (j_values + 1), "int"),
        (I**0.5, i_values**0.5, "float"),
        (I**2.0, i_values**2.0, "float"),
        (2**J, 2.0**j_values, "float"),
        (0.5 ** (I - J), 0.5**apart, "float"),
        (I**J, (1.0 * i_values) ** j_values, "float"),
        ((I - J) ** as_expr(2), apart**2, "float"),
        ((I - J) ** 0.5, np.where(apart < 0, np.nan, abs(apart) ** 0.5), "float"),
        (sqrt(I - J), np.where(apart < 0, np.nan, abs(apart) ** 0.5), "float"),
        (exp2(I - J), 2.0**apart, "float"),
        (sigmoid(I - J), 1 / (1 + np.exp(-apart)), "float"),
        (erf(I - J), np.vectorize(math.erf)(apart), "float"),
        (sin(I - J), np.sin(apart), "float"),
        (cos(I - J), np.cos(apart), "float"),
    ],
    ids=str,
)
def test_values(tree, expected, type_):
    assert tree.type == type_
    zero = np.zeros((4, 5))
    for found in (
        by_numpy(tree, SIZES, TILE),
        score_by_machine(scores.Score(tree).expr, SIZES, TILE, zero),
    ):
        np.testing.assert_allclose(found, np.broadcast_to(expected, (4, 5)), rtol=1e-6, atol=1e-7)
        if type_ == "int":
            np.testing.assert_array_equal(found, np.broadcast_to(expected, (4, 5)))


def test_a_tree_shows_itself():
    assert repr((I >> 1) ** 0.5 + (J << 2)) == "(((i >> 1) ** 0.5) + (j << 2))"
    assert repr(sigmoid(sqrt(I))) == "sigmoid(sqrt(i))"


@pytest.mark.parametrize(("name", "shown"), [("expit", "sigmoid(score)"), ("erf", "erf(score)")])
def test_functions_of_scipy(name, shown):
    """They are NumPy's kind of function, which asks the expression; it is known by its name."""
    function = SimpleNamespace(__name__=name)
    assert repr(SCORE.__array_ufunc__(function, "__call__", SCORE)) == shown
    if importlib.util.find_spec("scipy") is not None:
        assert repr(getattr(importlib.import_module("scipy.special"), name)(SCORE)) == shown


# -- proofs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (I << (J - 1), r"bits \(j - 1\) of a shift may be negative .*-1.*maximum\(\.\.\., 0\)"),
        (I >> -J, r"may be negative"),
        (I << 62, r"may leave the range of 64-bit integers.*between 0 and \d+.*clip"),
        (I << 2**40, r"64-bit"),
        ((I - 3) << J * 16, r"64-bit"),
        (lookup(np.zeros(5))[floor(3 + 3 * sin(J * 1.0))], r"clip"),
        (lookup(np.zeros(5))[floor(SCORE**0.5)], r"clip"),
        (lookup(np.zeros(5))[floor((J - 3) ** 0.5)], r"clip"),  # not for NaN
        (lookup(np.zeros(5))[floor(sqrt(J - 3))], r"clip"),
        (lookup(np.zeros(5))[floor(as_expr(0.0) ** (J - 1))], r"clip"),
        (lookup(np.zeros(5))[floor(sigmoid(SCORE))], r"clip"),
    ],
)
def test_what_cannot_be_proven_is_refused(tree, words):
    with pytest.raises(ArgumentError, match=words):
        bind(tree, flat_sizes(SIZES))


@pytest.mark.parametrize(
    "tree",
    [
        lookup(np.zeros(3))[J >> 1],
        lookup(np.zeros(17))[1 << J],
        lookup(np.zeros(3))[floor(sin(J * 1000.0) + 1.5)],
        lookup(np.zeros(2))[floor(sin(J * 0.01) * 20 + 0.5)],
        lookup(np.zeros(3))[floor(sqrt(J + 0.25))],
        lookup(np.zeros(3))[floor((J + 0.25) ** 0.5)],
        lookup(np.zeros(2))[floor(sigmoid(J * -9.0) + 0.1)],
        lookup(np.zeros(2))[floor(erf(J * 1.0) * 1.5 + 0.1)],
        lookup(np.zeros(18))[floor(exp2(J * 1.0) + 0.5)],
        I << 61,
        (I - J) << (60 - J),
    ],
    ids=str,
)
def test_what_is_obviously_fine_passes(tree):
    bind(tree, flat_sizes(SIZES))


LARGE = Sizes((1,), 1, 640, 640)
TILES = [(0, 0, i, 64, j, 64) for i, j in itertools.product((0, 64, 128, 448), repeat=2)]


@pytest.mark.parametrize(
    ("mask", "kinds"),
    [
        ((I >> 6) == (J >> 6), {EMPTY, FULL}),
        ((J >> 5) <= (I >> 5), {EMPTY, PARTIAL, FULL}),
        ((1 << (J >> 6)) <= 3, {EMPTY, FULL}),
        (sin(J * 0.01) > 0.0, {EMPTY, PARTIAL, FULL}),
        (cos((I - J) * 0.01) > 0.5, {EMPTY, PARTIAL, FULL}),
        (sqrt(J + 0.5) * 2 < 20, {EMPTY, PARTIAL, FULL}),
        ((J + 1) ** 0.5 * 2 < 20, {EMPTY, PARTIAL, FULL}),
        (2.0 ** (J * -0.01) > 0.5, {EMPTY, PARTIAL, FULL}),
        (exp2(J * -0.01) > 0.5, {EMPTY, PARTIAL, FULL}),
        (sigmoid((I - J) * 0.1) > 0.99, {EMPTY, PARTIAL, FULL}),
        (erf((J - 100) * 0.01) > 0.5, {EMPTY, PARTIAL, FULL}),
        (sin(J * 100.0) < 2, {FULL}),
    ],
    ids=str,
)
def test_classes_of_tiles_are_proofs_and_say_something(mask, kinds):
    bound = bind(mask, flat_sizes(LARGE))
    classes = tile_class(bound)
    found = set()
    for where_ in TILES:
        allowed = by_numpy(bound, LARGE, where_)
        np.testing.assert_array_equal(mask_by_machine(bound, LARGE, where_), allowed)
        corners = tile_symbols(LARGE, where_)[1]
        for of_tile in (
            exactly(classes, LARGE, where_),
            class_by_machine(classes, LARGE, where_),
            tile_classes(classes, corners, "gpu"),
        ):
            assert of_tile != EMPTY or not allowed.any()
            assert of_tile != FULL or allowed.all()
            found.add(int(of_tile))
    assert found == kinds


def test_no_wave_leaves_its_bounds():
    rng = np.random.default_rng(0)
    starts = rng.uniform(-1, 1, 400) * 10 ** rng.uniform(-3, 6, 400)
    lengths = 10 ** rng.uniform(-3, 1.2, 400)
    for operator, low, length in zip(("sin", "cos") * 200, starts, lengths, strict=True):
        x = np.linspace(low, low + length, 2000).astype(np.float32)
        low, high = (as_expr(float(end)) for end in (x[0], x[-1]))
        place = where(I < 1, low, high)
        ends = bounds(operation(operator, place), ["i"])
        symbols = {"i_low": np.int64(0), "i_high": np.int64(1)}
        least, most = (evaluate(end, symbols) for end in ends[[*ends][-1]])
        values = getattr(np, operator)(x)
        assert least <= values.min() <= values.max() <= most
        # They say something: no more than the last bits are lost.
        if abs(x).max() < 1000:
            assert most - values.max() < 1e-4
            assert values.min() - least < 1e-4


# -- derivatives ----------------------------------------------------------------------------------

S = SCORE


def value(tree, s):
    return evaluate(tree, {"score": np.asarray(s)}, np.asarray(s).dtype.type)


@pytest.mark.parametrize(
    ("change", "s", "expected"),
    [
        (exp2(S), 3.0, 8 * math.log(2)),
        (sigmoid(S), 0.0, 0.25),
        (sigmoid(-2 * S), 0.0, -0.5),
        (erf(S), 0.0, 2 / math.sqrt(math.pi)),
        (sqrt(S), 4.0, 0.25),
        (sqrt(S), 0.0, math.inf),
        (sin(S), 0.0, 1),
        (cos(S), math.pi / 2, -1),
        (S**2.0, 3.0, 6),
        (S**2.0, -3.0, -6),
        (S**0.5, 4.0, 0.25),
        (S**0.5, 0.0, math.inf),
        (S**-1, 2.0, -0.25),
        (S**1.0, 0.0, 1),
        (S**0.0, 0.0, 0),
        (S ** as_expr(0.0), 0.0, 0),
        (S ** (H * 0.0), 0.0, 0),
        (2.0**S, 3.0, 8 * math.log(2)),
        (0.0**S, 3.0, 0),
        (S**S, 2.0, 4 * (1 + math.log(2))),
        (S >= 0, 2.0, 0),
        (floor(S) >> 1, 2.0, 0),
    ],
    ids=str,
)
def test_derivative(change, s, expected):
    found = evaluate(derivative(change), {"score": np.float64(s), "h": np.int64(1)}, np.float64)
    assert found == pytest.approx(expected, rel=1e-14, abs=1e-15)


SMOOTH = {
    "exp2": (exp2(S), np.exp2, (-9, 9)),
    "sin": (sin(S), np.sin, (-9, 9)),
    "cos": (cos(S), np.cos, (-9, 9)),
    "sigmoid": (sigmoid(S), lambda z: 1 / (1 + np.exp(-z)), (-30, 30)),
    "sqrt": (sqrt(S), np.sqrt, (0.01, 50)),
    "power": (S**-0.5, lambda z: z**-0.5, (0.01, 50)),
    "exponent": (1.5**S, lambda z: 1.5**z, (-9, 9)),
    "both": (S ** (S * 0.5), lambda z: np.exp(0.5 * z * np.log(z)), (0.01, 9)),
    "gate": (S * sigmoid(S), lambda z: z / (1 + np.exp(-z)), (-30, 30)),
    "decay": (exp(-(S**2.0)), lambda z: np.exp(-z * z), (-3, 3)),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_are_those_of_a_complex_step(name):
    """f'(x) = Im f(x + i h) / h to all digits, as nothing is subtracted."""
    tree, of_complex, ends = SMOOTH[name]
    x = np.random.default_rng(0).uniform(*ends, 500)
    wanted = of_complex(x + 1e-30j).imag / 1e-30
    found = value(derivative(tree), x)
    np.testing.assert_allclose(found, wanted, rtol=2e-13, atol=1e-15)


def test_the_derivative_of_erf_is_the_limit_of_differences():
    x = np.linspace(-4, 4, 201).astype(np.longdouble)
    step = np.longdouble(2.0**-12)
    differences = (numpys_erf(x + step) - numpys_erf(x - step)) / (2 * step)
    found = value(derivative(erf(S)), x.astype(np.float64))
    np.testing.assert_allclose(found, differences.astype(np.float64), atol=1e-7)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_derivative_of_sigmoid_is_never_nan_and_keeps_its_digits(dtype):
    x = np.array([-np.inf, -1e38, -200, -80, -20, -1, 0, 1, 20, 80, 200, 1e38, np.inf], dtype)
    slope = derivative(sigmoid(S))
    exact = numpys_sigmoid(x.astype(np.longdouble)) * numpys_sigmoid(-x.astype(np.longdouble))
    where_ = (0, 0, 0, 1, 0, x.size)
    by_machine = score_by_machine(slope, Sizes((1,), 1, 1, x.size), where_, x[None])[0]
    for found in (value(slope, x), by_machine):
        assert not np.isnan(found).any()
        normal = exact > np.finfo(dtype).smallest_normal
        np.testing.assert_allclose(found[normal], exact[normal].astype(dtype), rtol=1e-6)
        assert (found[~normal] <= np.finfo(dtype).smallest_normal).all()


# -- ends -----------------------------------------------------------------------------------------

POWERS = [-np.inf, -2.5, -2, -1, -0.5, -0.0, 0.0, 0.5, 1, 2, 3, 2.5, np.inf, np.nan]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_powers_of_special_numbers_are_ieees(dtype):
    base, exponent = np.meshgrid(*[np.array(POWERS, dtype)] * 2, indexing="ij")
    table = lookup(np.array(POWERS))
    n = len(POWERS)
    found = score_by_machine(
        S ** table[J], Sizes((1,), 1, n, n), (0, 0, 0, n, 0, n), base.astype(dtype)
    )
    with np.errstate(all="ignore"):
        wanted = np.power(base, exponent)
    np.testing.assert_allclose(found, wanted, rtol=4 * np.finfo(dtype).eps)
    known = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(found)[known], np.signbit(wanted)[known])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_far_angles(dtype):
    x = np.array([2.0**20, 2.0**20 + 1, 1e7, -1e9, 1e22, -1e30, 3e38, np.inf, -np.inf], dtype)
    n = x.size
    for name in ("sin", "cos"):
        found = score_by_machine(
            operation(name, S), Sizes((1,), 1, 1, n), (0, 0, 0, 1, 0, n), x[None]
        )
        with np.errstate(invalid="ignore"):
            wanted = getattr(np, name)(x.astype(np.float64)).astype(dtype)
        np.testing.assert_allclose(found[0], wanted, rtol=4 * np.finfo(dtype).eps)


def problem(seed=0, length=7):
    return np.random.default_rng(seed).standard_normal((4, 1, 2, length, 8))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_infinite_slope_does_not_matter_where_the_weight_is_zero(dtype):
    """The slope of sqrt is infinite at 0, where the pair is hidden: no NaN comes of 0 * inf."""
    q, k, v, do = problem().astype(dtype)
    k[..., 3, :] = 0  # scores of exactly 0

    def change(s, b, h, i, j):
        return where(j == 3, float("-inf"), s) + 0 * sqrt(s * s)

    hidden = scores.score(change)
    by_mask = masks.mask(lambda b, h, i, j: j != 3)
    same = scores.score(lambda s, b, h, i, j: sqrt(s * s))
    for mask, score_mod in ((None, hidden), (by_mask, same)):
        _, vjp = cupyflash.attention_vjp(q, k, v, mask=mask, score_mod=score_mod)
        for gradient in vjp(do)[:3]:
            assert np.isfinite(gradient).all()


def test_an_infinite_slope_at_a_pair_that_counts_is_told_by_its_gradient():
    q, k, v, do = problem()
    k[..., 3, :] = 0
    change = scores.score(lambda s, b, h, i, j: sqrt(abs(s)))
    _, vjp = cupyflash.attention_vjp(q, k, v, score_mod=change)
    assert not np.isfinite(vjp(do).dk[..., 3, :]).any()
    held = scores.score(lambda s, b, h, i, j: sqrt(cupyflash.expr.maximum(abs(s), 1e-12)))
    _, vjp = cupyflash.attention_vjp(q, k, v, score_mod=held)
    assert all(np.isfinite(gradient).all() for gradient in vjp(do)[:3])


def test_scores_that_a_function_makes_minus_infinite_are_hidden():
    q, k, v, do = problem()
    gate = scores.score(lambda s, b, h, i, j: s + log(sigmoid(where(j == 2, -np.inf, 1.0 * i))))
    keep = masks.mask(lambda b, h, i, j: j != 2)
    change = scores.score(lambda s, b, h, i, j: s + log(sigmoid(1.0 * i)))
    out, vjp = cupyflash.attention_vjp(q, k, v, score_mod=gate)
    wanted, other = cupyflash.attention_vjp(q, k, v, mask=keep, score_mod=change)
    np.testing.assert_allclose(out, wanted, atol=1e-14)
    for found, gradient in zip(vjp(do)[:3], other(do)[:3], strict=True):
        np.testing.assert_allclose(found, gradient, atol=1e-14)
        assert np.isfinite(found).all()


# -- what NumPy lacks -----------------------------------------------------------------------------

# To 22 digits, from the series of Abramowitz & Stegun 7.1.5.
ERF = {
    "0.5": "0.5204998778130465376828",
    "1.0": "0.8427007929497148693412",
    "2.5": "0.9995930479825550410604",
    "4.0": "0.9999999845827420997199",
}


def test_numpys_erf():
    x = np.linspace(-8, 8, 4001)
    exact = np.vectorize(math.erf)(x)
    assert (abs(numpys_erf(x) - exact) <= 2 * np.spacing(abs(exact))).all()
    eps = np.finfo(np.longdouble).eps
    for place, wanted in ERF.items():
        found = numpys_erf(np.longdouble(place))
        assert abs(found - np.longdouble(wanted)) <= 4 * eps
    special = np.float32([0, -0.0, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(numpys_erf(special), np.float32([0, 0, 1, -1, np.nan]))
    assert np.signbit(numpys_erf(special))[1]
    assert numpys_erf(np.float32(0.5)).dtype == np.float32


def test_numpys_sigmoid():
    x = np.float64([-np.inf, -800, -40, 0, 40, 800, np.inf, np.nan])
    wanted = [0, 0, math.exp(-40), 0.5, 1, 1, 1, np.nan]
    with np.errstate(under="ignore"):
        np.testing.assert_allclose(numpys_sigmoid(x), wanted, rtol=1e-15)


def test_a_modulus_of_pow_has_a_remedy():
    with pytest.raises(TraceError, match=r"pow: .*Write x \*\* y % n\."):
        pow(I, 2, 3)
    assert repr(I**2 % 3) == repr(pow(I, 2) % 3)
