"""Random expressions: every reader of a tree gives the same answer, and every proof holds."""

from __future__ import annotations

import numpy as np
import pytest
from expressions import (
    FUNCTIONS,
    HARD_FLOATS,
    bound_or_none,
    by_numpy,
    class_by_machine,
    exactly,
    expressions,
    mask_by_machine,
    problems,
    score_by_machine,
    tile_symbols,
    tiles,
)
from halves import mostly_thorough
from hypothesis import assume, given
from hypothesis import strategies as st

from cupyflash import lookup
from cupyflash.errors import ArgumentError
from cupyflash.expr import clip, floor
from cupyflash.expr.bind import bind
from cupyflash.expr.evaluate import NUMPY, evaluate_exactly
from cupyflash.expr.functions import SCORE
from cupyflash.expr.interval import (
    EMPTY,
    FULL,
    PARTIAL,
    TILE,
    bounds,
    tile_class,
)
from cupyflash.expr.nodes import OPERATIONS, convert, operation, walk
from cupyflash.expr.rounding import FUNCTION_ULPS
from cupyflash.masks import flat_sizes
from cupyflash.reference.spec.naive import Sizes

ARITHMETIC = ("number", "int")
float_types = st.sampled_from([np.float32, np.float64])


def scores(data, where_, float_type, values=HARD_FLOATS):
    _, _, _, ni, _, nj = where_
    numbers = st.one_of(st.sampled_from(values), st.floats(-8, 8, width=32))
    drawn = data.draw(st.lists(numbers, min_size=ni * nj, max_size=ni * nj))
    with np.errstate(over="ignore"):
        return np.array(drawn).astype(float_type).reshape(ni, nj)


def problem(data, expr):
    sizes = data.draw(problems())
    bound = bound_or_none(expr, sizes)
    assume(bound is not None)
    return bound, sizes, data.draw(tiles(sizes))


@given(st.data())
def test_the_machine_gives_numpys_mask(data):
    bound, sizes, where_ = problem(data, data.draw(expressions("bool", functions=False)))
    expected = by_numpy(bound, sizes, where_)
    np.testing.assert_array_equal(mask_by_machine(bound, sizes, where_), expected)


@given(st.data(), float_types)
def test_the_machine_gives_numpys_score_bit_for_bit(data, float_type):
    tree = data.draw(expressions("float", score=True, functions=False))
    bound, sizes, where_ = problem(data, tree)
    score = scores(data, where_, float_type)
    expected = by_numpy(bound, sizes, where_, score, float_type)
    assert expected.dtype == float_type
    found = score_by_machine(bound, sizes, where_, score)
    np.testing.assert_array_equal(found, expected)
    signs = np.isnan(expected) | (np.signbit(found) == np.signbit(expected))
    assert signs.all()


@given(st.data())
def test_the_machine_gives_numpys_integers(data):
    bound, sizes, where_ = problem(data, data.draw(expressions("int", functions=False)))
    expected = by_numpy(bound, sizes, where_)
    score = np.zeros(expected.shape)
    high = score_by_machine(convert(bound // 2**32, "float"), sizes, where_, score)
    low = score_by_machine(convert(bound % 2**32, "float"), sizes, where_, score)
    np.testing.assert_array_equal(high.astype(np.int64) * 2**32 + low.astype(np.int64), expected)


@pytest.mark.parametrize("float_type", [np.float32, np.float64])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "power"])
def test_functions_are_within_their_units_in_the_last_place(name, float_type):
    rng = np.random.default_rng(0)
    score = np.concatenate(
        [rng.uniform(-90, 90, 400), 2.0 ** rng.uniform(-30, 30, 400), rng.uniform(-1, 1, 200)]
    ).astype(float_type)[None]
    if name == "log":
        score = abs(score)
    tree, sizes = operation(name, SCORE), Sizes((1,), 1, 1, 1000)
    where_ = (0, 0, 0, 1, 0, 1000)
    with np.errstate(over="ignore"):
        exact = NUMPY[name](score.astype(np.longdouble))
        rounded = exact.astype(float_type)
        fine = np.isfinite(rounded) & (abs(rounded) >= np.finfo(float_type).smallest_normal)
        allowed = FUNCTION_ULPS * np.spacing(abs(rounded))
    for found in (
        by_numpy(tree, sizes, where_, score, float_type),
        score_by_machine(tree, sizes, where_, score),
    ):
        assert (abs(found[fine] - exact[fine]) <= allowed[fine]).all()
        assert (found == rounded)[np.isinf(rounded)].all()


@given(st.data())
def test_a_tile_class_is_a_proof(data):
    bound, sizes, where_ = problem(data, data.draw(expressions("bool")))
    classes = tile_class(bound)
    by_exact, by_machine = exactly(classes, sizes, where_), class_by_machine(classes, sizes, where_)
    assert by_exact in (EMPTY, PARTIAL, FULL)
    if not any(node.op in FUNCTIONS for node in walk(bound)):
        assert by_exact == by_machine
    for values in (by_numpy(bound, sizes, where_), mask_by_machine(bound, sizes, where_)):
        for found in (by_exact, by_machine):
            assert found != EMPTY or not values.any()
            assert found != FULL or values.all()


@given(st.data())
def test_bounds_hold(data):
    kind = data.draw(st.sampled_from(["int", "float"]))
    bound, sizes, where_ = problem(data, data.draw(expressions(kind)))
    float_type = data.draw(float_types)
    check_bounds(bound, sizes, where_, float_type)


@mostly_thorough(
    "name", [*OPERATIONS, "clip"], quick=[*OPERATIONS][::3], why="random trees have all of them"
)
@given(data=st.data())
def test_one_operation_over_a_tile(name, data):
    """The bounds of each operation by itself, of operands that move over a large tile."""
    arity, rule = OPERATIONS.get(name, (3, "number"))
    kinds = {"logic": ["bool"], "int": ["int"], "float": ["float"], "floor": ["float"]}
    kind = data.draw(st.sampled_from(kinds.get(rule, ["int", "float"])))
    parts = [data.draw(expressions(kind, 0)) for _ in range(arity)]
    if rule == "convert":
        parts[0] = parts[0] if kind == "int" and name == "to_float" else parts[0] < 0
    if name == "where":
        parts[0] = data.draw(expressions("bool", 0))
    tree = clip(*parts) if name == "clip" else operation(name, *parts)
    sizes = Sizes((1,), 1, 7, 8)
    bound = bound_or_none(tree, sizes)
    assume(bound is not None)
    check_bounds(bound, sizes, data.draw(tiles(sizes)), np.float32)


def check_bounds(bound, sizes, where_, float_type):
    low, high = (exactly(end, sizes, where_, float_type) for end in bounds(bound, TILE)[bound])
    values = by_numpy(bound, sizes, where_, None, float_type)
    if bound.type == "bool":  # low: holds everywhere; high: may hold somewhere
        assert not low or values.all()
        assert high or not values.any()
    elif bound.type == "float" and np.isnan(low):
        assert np.isnan(high)  # nothing is known
    else:
        assert not np.isnan(values.astype(float)).any()
        assert (low <= values).all()
        assert (values <= high).all()


@given(st.data())
def test_integers_that_bind_lets_pass_are_exact(data):
    bound, sizes, where_ = problem(data, data.draw(expressions("int", functions=False)))
    check_exact(bound, sizes, where_)


@mostly_thorough(
    "name",
    [n for n, (_, rule) in OPERATIONS.items() if rule in ARITHMETIC],
    quick=("add", "multiply"),
    why="other operations by the same rule",
)
@given(data=st.data())
def test_one_operation_on_large_integers_is_refused_or_exact(name, data):
    arity, _ = OPERATIONS[name]
    ends = np.array([-(2**63), -(2**62), -1, 0, 1, 3037000500, 2**62, 2**63 - 1])
    parts = []
    for _ in range(arity):
        low, high = sorted(data.draw(st.lists(st.integers(0, 7), min_size=2, max_size=2)))
        number = lookup(ends)[clip(data.draw(expressions("int", 0)), low, high)]
        parts.append(data.draw(st.sampled_from([number, data.draw(expressions("int", 0))])))
    bound, sizes, where_ = problem(data, operation(name, *parts))
    check_exact(bound, sizes, where_)


def check_exact(bound, sizes, where_):
    values = by_numpy(bound, sizes, where_)
    _, _, i0, ni, j0, nj = where_
    for i, j in np.ndindex(ni, nj):
        symbols = tile_symbols(sizes, where_)[1] | {"i": i0 + i, "j": j0 + j}
        assert evaluate_exactly(bound, symbols, {}) == values[i, j]


@given(st.data(), st.integers(1, 12), float_types)
def test_a_lookup_is_refused_or_never_out_of_range(data, size, float_type):
    index = data.draw(expressions("int", depth=3, score=True))
    table = lookup(np.zeros(size))
    sizes = data.draw(problems())
    bound = bound_or_none(table[index], sizes)
    if bound is None:
        with pytest.raises(ArgumentError, match=r"clip|maximum\(\.\.\., 1\)"):
            bind(table[index], flat_sizes(sizes))
        return
    where_ = data.draw(tiles(sizes))
    score = scores(data, where_, float_type)
    found = by_numpy(bound.args[0], sizes, where_, score, float_type)
    assert (found >= 0).all()
    assert (found < size).all()
    score_by_machine(bound, sizes, where_, score)


@given(st.data(), float_types)
def test_no_score_makes_a_lookup_read_elsewhere(data, float_type):
    # The index goes through the machine's own floor, for scores that are NaN, infinite or huge.
    table = np.arange(1.0, 8.0)
    scale = data.draw(st.sampled_from([1.0, 1e30, -4.0, 0.5]))
    tree = lookup(table)[clip(floor(SCORE * scale), 0, 6)]
    bound, sizes, where_ = problem(data, tree)
    score = scores(data, where_, float_type)
    found = score_by_machine(bound, sizes, where_, score)
    np.testing.assert_array_equal(found, by_numpy(bound, sizes, where_, score, float_type))
    assert np.isin(found, table).all()
