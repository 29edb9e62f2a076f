"""The derivative of a score change, and the bound on the errors of computing both."""

from __future__ import annotations

import numpy as np
import pytest
from expressions import (
    bound_or_none,
    by_numpy,
    expressions,
    problems,
    score_by_machine,
    tile_symbols,
    tiles,
)
from halves import mostly_thorough
from hypothesis import assume, given
from hypothesis import strategies as st

from cupyflash import lookup, scores
from cupyflash.expr import (
    absolute,
    clip,
    exp,
    exp2,
    floor,
    log,
    maximum,
    minimum,
    tanh,
    where,
)
from cupyflash.expr.derivative import derivative
from cupyflash.expr.evaluate import evaluate
from cupyflash.expr.functions import POSITIONS, SCORE
from cupyflash.expr.nodes import as_expr, operation
from cupyflash.expr.rounding import evaluate_with_error
from cupyflash.reference.spec.naive import Sizes

UNIT = 2.0**-24
S = SCORE


# -- derivative -----------------------------------------------------------------------------------


def value(tree, s):
    return evaluate(tree, {"score": np.asarray(s, np.float64), "h": np.int64(0)}, np.float64)


@pytest.mark.parametrize(
    ("change", "s", "expected"),
    [
        (S * 3 + 1, 2.0, 3),
        (S * S, 2.0, 4),
        (2 - S, 2.0, -1),
        (S - S, 2.0, 0),
        (1 / S, 2.0, -0.25),
        (S / 4, 2.0, 0.25),
        (S / (S + 1), 1.0, 0.25),
        (-S, 2.0, -1),
        (exp(S), 0.0, 1),
        (log(S), 4.0, 0.25),
        (tanh(S), 0.0, 1),
        (S**3, 2.0, 12),
        (S**0, 2.0, 0),
        (absolute(S), -2.0, -1),
        (absolute(S), 0.0, 1),  # documented: 1 at 0
        (minimum(S, 1), 1.0, 1),  # a tie: the first operand
        (minimum(1, S), 1.0, 0),
        (maximum(S, 1), 1.0, 1),
        (maximum(1, S), 1.0, 0),
        (maximum(S, 3), 1.0, 0),
        (clip(S, -1, 1), 0.5, 1),
        (clip(S, -1, 1), 1.5, 0),
        (where(S > 0, S * 2, 0.5 * S), -1.0, 0.5),
        (where(S > 0, S * 2, 0.5 * S), 1.0, 2),
        (where(S > 0, S, 7), -1.0, 0),
        (floor(S * 4) / 4, 0.3, 0),
        (floor(S) + S, 0.3, 1),
        (S * lookup(np.array([5.0]))[0], 0.3, 5),
        (lookup(np.arange(4.0))[clip(floor(S), 0, 3)], 2.5, 0),
        (as_expr(3.0), 1.0, 0),
    ],
)
def test_derivative(change, s, expected):
    assert value(derivative(change), s) == pytest.approx(expected, rel=1e-14)


WAVES = ("sin", "cos", "sigmoid", "erf")


def smooth(depth):
    """Continuous changes; kinks are allowed."""
    if depth == 0:
        return st.one_of(st.just(S), st.floats(-2, 2, width=16).map(as_expr))
    part = smooth(depth - 1)
    return st.one_of(
        st.builds(lambda a, b: a + b, part, part),
        st.builds(lambda a, b: a - b, part, part),
        st.builds(lambda a, b: a * b, part, part),
        st.builds(lambda a, b: a / (1.0 + absolute(b)), part, part),
        st.builds(minimum, part, part),
        st.builds(maximum, part, part),
        st.builds(absolute, part),
        st.builds(tanh, part),
        st.builds(lambda a: exp(minimum(a, 3.0)), part),
        st.builds(lambda a: log(1.0 + absolute(a)), part),
        st.builds(lambda a: operation("sqrt", 1.0 + a * a), part),
        st.builds(lambda name, a: operation(name, a), st.sampled_from(WAVES), part),
        st.builds(lambda a: exp2(minimum(a, 4.0)), part),
        st.builds(lambda a, b: (0.5 + absolute(a)) ** clip(b, -2.0, 2.0), part, part),
        st.builds(lambda a, b: where(a < 0.0, a * b, a + a), part, part),  # continuous at a = 0
    )


@given(smooth(4), st.floats(-3, 3))
def test_derivative_is_the_limit_of_differences(change, s):
    step = 2.0**-14
    change, slope = change + 0.0 * S, derivative(change)
    slopes = [float(value(slope, s + part * step)) for part in np.linspace(-1, 1, 9)]
    # Away from kinks, which show as a jump of the slope.
    assume(np.ptp(slopes) <= 1e-2 * (1 + max(map(abs, slopes))))
    assume(max(map(abs, slopes)) < 1e6)
    difference = float(value(change, s + step) - value(change, s - step)) / (2 * step)
    size = 1 + max(map(abs, slopes)) + abs(float(value(change, s))) * 2e-3
    # By the mean value theorem, up to kinks between the nine points that jump back.
    assert min(slopes) - 1e-2 * size <= difference <= max(slopes) + 1e-2 * size


# -- errors ---------------------------------------------------------------------------------------


@st.composite
def perturbed(draw, where_, scale=8.0):
    """Exact scores (long double), computed scores (float32), and a bound on their distance."""
    _, _, _, ni, _, nj = where_
    count = ni * nj
    numbers = st.one_of(
        st.floats(-scale, scale, width=32), st.sampled_from([0.0, 1.0, -1.0, 0.5, 1e-30, 3e4])
    )
    computed = np.array(draw(st.lists(numbers, min_size=count, max_size=count)), np.float32)
    relative = draw(st.sampled_from([0.0, 2.0**-24, 1e-6, 1e-3, 0.1]))
    moves = draw(st.lists(st.floats(-1, 1), min_size=count, max_size=count))
    exact = computed + relative * np.array(moves, np.longdouble) * (1 + abs(computed))
    error = np.array(abs(exact - computed), np.float64) * (1 + 1e-12)
    error += np.where(exact == computed, 0, 1e-300)  # 0 means equal
    return exact.reshape(ni, nj), computed.reshape(ni, nj), error.reshape(ni, nj)


def within(found, exact, error):
    found, exact = np.asarray(found, np.longdouble), np.broadcast_to(exact, found.shape)
    with np.errstate(invalid="ignore"):
        distance = np.where(found == exact, 0, abs(found - exact))
    limit = np.broadcast_to(error, found.shape) * (1 + 1e-9)
    assert not np.isnan(limit).any()
    return np.isinf(limit) | (distance <= limit)


ONE_OPERATION = {
    "floor": lambda a, b: floor(a * 4) * 1.0,
    "remainder": lambda a, b: floor(a) % (clip(floor(b), 1, 5)) * 1.0,
    "remainder, negative": lambda a, b: floor(a) % -(clip(floor(b), 1, 5)) * 1.0,
    "floor_divide": lambda a, b: floor(a * 8) // (clip(floor(b), 1, 5)) * 1.0,
    "multiply integers": lambda a, b: floor(a) * clip(floor(b), -9, 9) * 1.0,
    "where": lambda a, b: where(a < b, a, b + 1),
    "where of integers": lambda a, b: where(a <= b, floor(a), 7) * 1.0,
    "where of conditions": lambda a, b: where(where(a < b, a < 1, b < 1), 0.0, 5.0),
    "equal": lambda a, b: where(a == b, 1.0, 2.0) + where(a != b, 1.0, 4.0),
    "and, or, xor": lambda a, b: where((a < b) & (a < 1) | (b < 1) ^ (a < 0), 1.0, 2.0),
    "condition": lambda a, b: ((a < b) + (b < 1)) * 0.5,
    "lookup": lambda a, b: lookup(np.array([1.0, 0.1, -4]))[clip(floor(a), 0, 2)],
    "lookup of integers": lambda a, b: lookup(np.array([1, 7, -4]))[clip(floor(a), 0, 2)] * 1.0,
    "lookup of conditions": lambda a, b: where(
        lookup(np.array([True, False]))[clip(floor(a), 0, 1)], a, b
    ),
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "minimum": minimum,
    "maximum": maximum,
    "absolute": lambda a, b: absolute(a - b),
    "exp": lambda a, b: exp(a),
    "log": lambda a, b: log(a),
    "tanh": lambda a, b: tanh(a) + tanh(0.1 * b),
    "exp2": lambda a, b: exp2(a),
    "sigmoid": lambda a, b: operation("sigmoid", a) + operation("sigmoid", 9.0 * b),
    "erf": lambda a, b: operation("erf", a) + operation("erf", 0.1 * b),
    "sqrt": lambda a, b: operation("sqrt", absolute(a)),
    "sqrt of what may be negative": lambda a, b: operation("sqrt", a),
    "sin": lambda a, b: operation("sin", a) + operation("sin", 20.0 * b),
    "cos": lambda a, b: operation("cos", a) + operation("cos", 20.0 * b),
    "power": lambda a, b: absolute(a) ** b,
    "power of any base": lambda a, b: a**-2.0 + a ** as_expr(3) + a**0.5,
    "left_shift": lambda a, b: (floor(a * 4) << clip(floor(b), 0, 5)) * 1.0,
    "right_shift": lambda a, b: (floor(a * 99) >> clip(floor(b), 0, 5)) * 1.0,
}


@mostly_thorough(
    "name", ONE_OPERATION, quick=list(ONE_OPERATION)[::3], why="random trees have all of them"
)
@given(data=st.data())
def test_errors_of_one_operation_are_bounded(name, data):
    tree = ONE_OPERATION[name](S, data.draw(st.sampled_from([0.7 * S, 2.0 - S, S * S])))
    sizes, where_ = Sizes((1,), 1, 4, 4), (0, 0, 0, 4, 0, 4)
    exact, computed, error = data.draw(perturbed(where_, 3.0))
    # Near integers, where floors and comparisons flip.
    near = data.draw(st.lists(st.booleans(), min_size=16, max_size=16))
    near = np.array(near).reshape(4, 4)
    computed = np.where(near, np.round(computed), computed)
    exact = np.where(near, computed + np.sign(exact) * error, exact)
    error = np.array(abs(exact - computed) * (1 + 1e-12) + (exact != computed) * 1e-300, float)
    ((value_, bound_),) = evaluate_with_error((tree,), {"score": exact}, error, UNIT)
    assert within(by_numpy(tree, sizes, where_, computed), value_, bound_).all()


@given(st.data())
def test_errors_are_bounded(data):
    sizes = data.draw(problems())
    bound = bound_or_none(data.draw(expressions("float", score=True)), sizes)
    assume(bound is not None)
    where_ = data.draw(tiles(sizes))
    exact, computed, error = data.draw(perturbed(where_))
    symbols, _ = tile_symbols(sizes, where_)
    roots = (bound, derivative(bound))
    found = evaluate_with_error(roots, symbols | {"score": exact}, error, UNIT)
    for root, (value_, bound_) in zip(roots, found, strict=True):
        assert within(by_numpy(root, sizes, where_, computed), value_, bound_).all()
        assert within(score_by_machine(root, sizes, where_, computed), value_, bound_).all()


@given(st.data())
def test_errors_of_usual_changes_are_bounded_tightly(data):
    change = data.draw(
        st.sampled_from(
            [
                scores.alibi(np.array([0.3, 0.7])),
                scores.softcap(5.0),
                scores.relative_bias(np.linspace(-1, 1, 7)),
                scores.alibi(np.array([0.3, 0.7], np.float32)).then(scores.softcap(30.0)),
                scores.score(lambda s, b, h, i, j: where(j % 2 == 0, s * 0.5, s + 0.1)),
            ]
        )
    )
    sizes = Sizes((1,), 2, 6, 9)
    where_ = (0, 1, 0, 6, 0, 9)
    exact, computed, error = data.draw(perturbed(where_))
    symbols, _ = tile_symbols(sizes, where_)
    b, h, i, j = (symbols[name] for name in "bhij")
    t, t_error, d, d_error = change.evaluate_with_error(exact, error, b, h, i, j, sizes, UNIT)
    for x in (t, t_error, d, d_error):
        assert x.shape == exact.shape
    t32, d32 = change.evaluate(computed, b, h, i, j, sizes)
    assert within(t32, t, t_error).all()
    assert within(d32, d, d_error).all()
    size = 12 + abs(exact)  # of every intermediate result
    assert (t_error <= 1.5 * error + 30 * UNIT * size).all()
    assert (d_error <= 1.5 * error + 30 * UNIT * size).all()


def bound_of(tree, s, s_error, unit=UNIT):
    symbols = {"score": np.float64(s), "i": np.int64(2**24 + 1), "j": np.int64(5)}
    ((found, error),) = evaluate_with_error((tree,), symbols, s_error, unit)
    return float(found), float(error)


def test_a_branch_that_may_flip_counts_with_its_jump():
    jump = where(S < 1.0, 0.0, 100.0)
    assert bound_of(jump, 0.5, 0.1) == (0, 0)
    assert bound_of(jump, 0.95, 0.1) == (0, pytest.approx(100))
    assert bound_of(where(S < 1.0, S, float("inf")), 0.95, 0.1)[1] == np.inf
    assert bound_of(floor(S) * 2.0, 0.95, 0.1)[1] == pytest.approx(2, rel=1e-6)
    assert bound_of(floor(S) * 2.0, 0.5, 0.1) == (0, 0)
    assert bound_of(floor(S), 1.0, 0.0) == (1, 0)
    assert bound_of(floor(S), 1.0, 1e-40) == (1, 1)
    assert bound_of(absolute(S), 0.05, 0.1)[1] == pytest.approx(0.1)
    assert bound_of(derivative(absolute(S)), 0.05, 0.1)[1] == pytest.approx(2)
    assert bound_of(derivative(absolute(S)), 0.5, 0.1)[1] == 0
    assert bound_of(minimum(S, 1.0), 0.95, 0.1)[1] == pytest.approx(0.1)
    table = lookup(np.array([1.0, 4.0, 9.0]))
    assert bound_of(table[clip(floor(S), 0, 2)], 0.95, 0.1)[1] == pytest.approx(8, rel=1e-6)
    assert bound_of(table[clip(floor(S), 0, 2)], 0.5, 0.1) == (1, 0)


def test_conditions_flip_only_where_their_outcome_may():
    near = S < 1.0
    assert bound_of(where(near & (S < -5.0), 1.0, 0.0), 1.0, 0.1) == (0, 0)
    assert bound_of(where(near | (S > -5.0), 1.0, 0.0), 1.0, 0.1) == (1, 0)
    assert bound_of(where(near & (S > -5.0), 1.0, 0.0), 1.0, 0.1) == (0, pytest.approx(1))
    assert bound_of(where(near ^ (S > -5.0), 1.0, 0.0), 1.0, 0.1)[1] == pytest.approx(1)
    assert bound_of(where(~near, 1.0, 0.0), 1.0, 0.1)[1] == pytest.approx(1)
    equal = where(as_expr(2) == 2, S == 1.0, S == 2.0)
    assert bound_of(where(equal, 1.0, 0.0), 1.05, 0.1) == (0, pytest.approx(1))
    assert bound_of(where(equal, 1.0, 0.0), 1.5, 0.1) == (0, 0)


def test_conversions_round_where_they_are_not_exact():
    i, j = POSITIONS[2:]
    assert bound_of(j * 1.0 + 0.0 * S, 0.0, 0.0)[1] <= 6 * UNIT * 5
    assert bound_of(where(S < 0, 0.0, j), 0.0, 0.0) == (5, 0)
    assert bound_of(where(S < 0, 0.0, i), 0.0, 0.0)[1] >= 1  # 2**24 + 1 is no float32
    assert bound_of(where(S < 0, 0.0, i), 0.0, 0.0, 2.0**-53) == (2**24 + 1, 0)
    off = abs(float(np.float32(0.1)) - 0.1)
    assert bound_of(where(S < 0, 0.0, 0.1), 0.0, 0.0) == (0.1, off)
    assert bound_of(where(S < 0, 0.0, 0.5), 0.0, 0.0) == (0.5, 0)
    assert bound_of(where(S < 0, 0.0, 1e300), 0.0, 0.0)[1] == np.inf
    assert bound_of(where(S < 0, 0.0, float("-inf")), 0.0, 0.0) == (-np.inf, 0)
    for dtype, error in ((np.float64, off), (np.float32, 0)):
        assert bound_of(lookup(np.array([0.1], dtype))[0] + 0 * S, 0, 0)[1] <= off + 2 * UNIT * 0.1
        assert bound_of(where(S < 0, S, lookup(np.array([0.1], dtype))[0]), 0, 0)[1] == error


def test_what_may_overflow_or_divide_by_zero_has_no_bound():
    assert bound_of(1.0 / S, 0.05, 0.1)[1] == np.inf
    assert bound_of(log(S), 0.05, 0.1)[1] == np.inf
    assert bound_of(exp(S), 100.0, 0.0)[1] == np.inf
    assert bound_of(exp(S), 100.0, 0.0, 2.0**-53)[1] < np.inf
    assert bound_of(S * S, 1e20, 0.0)[1] == np.inf
    assert bound_of(S * 2.0, 1.0, np.inf)[1] == np.inf
    assert bound_of(tanh(S), 1.0, np.inf)[1] == np.inf  # it may be NaN
    assert bound_of(tanh(S), 1.0, 1e30)[1] <= 2.001
    assert bound_of(tanh(S), float("inf"), 0.0)[1] <= 10 * UNIT
    assert bound_of(S - float("inf"), 1.0, 0.1) == (-np.inf, 0)
