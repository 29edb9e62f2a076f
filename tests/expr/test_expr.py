"""The expression tree: what operators record, what types they give, and how errors help."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from expressions import by_numpy, mask_by_machine, score_by_machine

from cupyflash import expr as ops
from cupyflash import lookup, masks, scores
from cupyflash.errors import ArgumentError, ArgumentTypeError, TraceError
from cupyflash.expr import (
    clip,
    exp,
    floor,
    len_k,
    len_q,
    log,
    maximum,
    minimum,
    tanh,
    where,
)
from cupyflash.expr.bind import bind
from cupyflash.expr.evaluate import evaluate
from cupyflash.expr.functions import POSITIONS, SCORE
from cupyflash.expr.lower import lower
from cupyflash.expr.nodes import OPERATIONS, as_expr, operation, rebuild, walk
from cupyflash.masks import flat_sizes
from cupyflash.reference.spec.naive import Sizes

B, H, I, J = POSITIONS
SIZES = Sizes((2,), 3, 4, 5)
TILE = (1, 2, 0, 4, 0, 5)
i_values, j_values = np.ix_(np.arange(4), np.arange(5))


def full(tree, score=None, float_type=np.float32):
    return by_numpy(tree, SIZES, TILE, score, float_type)


@pytest.mark.parametrize(
    ("tree", "expected", "type_"),
    [
        (I + J, i_values + j_values, "int"),
        (I - 3, i_values - 3, "int"),
        (3 - I, 3 - i_values, "int"),
        (2 * I * J, 2 * i_values * j_values, "int"),
        ((I - J) // 2, (i_values - j_values) // 2, "int"),
        ((I - J) // -2, (i_values - j_values) // -2, "int"),
        ((I - J) % 3, (i_values - j_values) % 3, "int"),
        ((I - J) % -3, (i_values - j_values) % -3, "int"),
        (7 // (I + 1), 7 // (i_values + 1), "int"),
        (7 % (I + 1), 7 % (i_values + 1), "int"),
        (I / 2, (i_values / 2), "float"),
        (3 / (J + 1), np.float32(3) / (j_values + 1).astype(np.float32), "float"),
        (I * 0.1, i_values.astype(np.float32) * np.float32(0.1), "float"),
        (-(I - J), j_values - i_values, "int"),
        (+I, i_values, "int"),
        (abs(I - J), abs(i_values - j_values), "int"),
        (I**2, i_values**2, "int"),
        ((I + 1) ** 5, (i_values + 1) ** 5, "int"),
        (I**0, 1, "int"),
        (as_expr(2) ** 3, 8, "int"),
        (as_expr(3) ** 5, 243, "int"),
        (I < J, i_values < j_values, "bool"),
        (I <= J, i_values <= j_values, "bool"),
        (I > J, i_values > j_values, "bool"),
        (I >= J, i_values >= j_values, "bool"),
        (I == J, i_values == j_values, "bool"),
        (I != J, i_values != j_values, "bool"),
        (I > 2, i_values > 2, "bool"),
        (I < 1.5, i_values < 1.5, "bool"),
        ((I < 2) & (J < 3), (i_values < 2) & (j_values < 3), "bool"),
        ((I < 2) | (J < 3), (i_values < 2) | (j_values < 3), "bool"),
        ((I < 2) ^ (J < 3), (i_values < 2) ^ (j_values < 3), "bool"),
        (True & (I < 2), i_values < 2, "bool"),
        (~(I < 2), i_values >= 2, "bool"),
        ((I < 2) == (J < 2), (i_values < 2) == (j_values < 2), "bool"),
        ((I < 2) + (J < 2), (i_values < 2) * 1 + (j_values < 2), "int"),
        ((I < 2) * 0.5, (i_values < 2) * np.float32(0.5), "float"),
        (where(I < J, I, -1), np.where(i_values < j_values, i_values, -1), "int"),
        (where(I < J, I, 0.5), np.where(i_values < j_values, i_values, 0.5), "float"),
        (where(I < J, I < 1, True), np.where(i_values < j_values, i_values < 1, True), "bool"),
        (minimum(I, J), np.minimum(i_values, j_values), "int"),
        (maximum(I, 2.5), np.maximum(i_values, 2.5), "float"),
        (clip(I - J, -1, 2), np.clip(i_values - j_values, -1, 2), "int"),
        (floor(I / 2 - J), np.floor(i_values / 2 - j_values), "int"),
        (floor(I), i_values, "int"),
        (B + 0, 1, "int"),
        (H + 0, 2, "int"),
        (len_q * 10 + len_k, 45, "int"),
    ],
)
def test_operators(tree, expected, type_):
    assert tree.type == type_
    found = full(tree)
    assert found.dtype == {"bool": np.bool_, "int": np.int64, "float": np.float32}[type_]
    np.testing.assert_array_equal(found, np.broadcast_to(expected, (4, 5)))
    if type_ == "bool":
        np.testing.assert_array_equal(mask_by_machine(tree, SIZES, TILE), found)
    else:
        score = np.zeros((4, 5))
        changed = score_by_machine(scores.Score(tree).expr, SIZES, TILE, score)
        np.testing.assert_allclose(changed, found, rtol=1e-6)


@pytest.mark.parametrize(
    "name", "exp exp2 log tanh sqrt sin cos floor absolute fabs negative".split()
)
def test_numpys_functions_of_one_operand(name):
    given = np.linspace(0.5, 3, 20).reshape(4, 5)
    found = full(getattr(np, name)(SCORE), given, np.float64)
    np.testing.assert_allclose(found, getattr(np, name)(given), rtol=1e-15)


@pytest.mark.parametrize(
    "name",
    """add subtract multiply true_divide floor_divide remainder mod minimum maximum less less_equal
    left_shift right_shift greater greater_equal equal not_equal""".split(),
)
def test_numpys_functions_of_two_operands(name):
    function = getattr(np, name)
    found, expected = full(function(I, J + 1)), function(i_values, j_values + 1)
    np.testing.assert_array_equal(found, expected.astype(found.dtype))
    found, expected = full(function(np.int32(3), J + 1)), function(3, j_values + 1)
    np.testing.assert_array_equal(found, np.broadcast_to(expected, (4, 5)).astype(found.dtype))


@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_xor", "bitwise_and"])
def test_numpys_logic(name):
    function = getattr(np, name)
    expected = function(i_values < 2, j_values < 3)
    np.testing.assert_array_equal(full(function(I < 2, J < 3)), expected)
    np.testing.assert_array_equal(full(np.invert(I < 2)), np.broadcast_to(i_values >= 2, (4, 5)))
    np.testing.assert_array_equal(full(np.power(I, 3)), np.broadcast_to(i_values**3, (4, 5)))


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.float16(0.5)])
def test_numpys_numbers_are_numbers(number):
    for tree in (number * I, I * number, number + I, number / (I + 1), number < I):
        assert tree.type in ("float", "bool")
    assert (np.int8(3) * I).type == "int"
    assert (ml_dtypes.bfloat16(0.5) * as_expr(1.0)).type == "float"
    assert as_expr(np.bool_(True)).type == "bool"


def test_symbols_take_one_value_of_each_name():
    assert full(I).shape == (4, 5)
    assert evaluate(I + J, {"i": np.arange(3), "j": np.arange(3)}).tolist() == [0, 2, 4]


def test_floats_are_of_the_asked_type():
    third = full(as_expr(1.0) / 3)
    assert third.dtype == np.float32
    assert full(as_expr(1.0) / 3, None, np.longdouble).dtype == np.longdouble
    assert third[0, 0] == np.float32(1) / np.float32(3)


def test_minimum_and_maximum_keep_nan():
    score = np.full((4, 5), np.nan)
    for tree in (minimum(SCORE, 1), minimum(1, SCORE), maximum(SCORE, 1), maximum(1, SCORE)):
        assert np.isnan(full(tree, score, np.float64)).all()
        assert np.isnan(score_by_machine(tree, SIZES, TILE, score)).all()


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (2.7, 2),
        (-2.7, -3),
        (2.0**62, 2**62),
        (-(2.0**63), -(2**63)),
        (1e30, 2**63 - 1),
        (-1e30, -(2**63)),
        (np.inf, 2**63 - 1),
        (-np.inf, -(2**63)),
        (np.nan, -(2**63)),
    ],
)
@pytest.mark.parametrize("float_type", [np.float32, np.float64])
def test_floor_ends_at_64_bits(number, expected, float_type):
    score = np.full((4, 5), number, float_type)
    assert (full(floor(SCORE), score, float_type) == expected).all()
    for part in (floor(SCORE) // 2**32, floor(SCORE) % 2**32):
        found = score_by_machine(scores.Score(part).expr, SIZES, TILE, score.astype(np.float64))
        with np.errstate(invalid="ignore"):
            assert (found == full(part, score, float_type)).all()


# -- look-ups -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    "bool int8 int16 int32 int64 uint8 uint16 uint32 float16 float32 float64 bfloat16".split(),
)
def test_lookups_of_every_dtype(dtype):
    array = np.array([[0, 1, 2, 3, 100], [5, 0, 7, 8, 9]]).astype(np.dtype(dtype)).T[:, ::-1]
    tree = lookup(array)[J, I % 2]
    expected = array[j_values, i_values % 2].astype(np.float64)
    np.testing.assert_array_equal(full(tree), expected)
    found = score_by_machine(scores.Score(tree + 0).expr, SIZES, TILE, np.zeros((4, 5)))
    np.testing.assert_array_equal(found, expected)


def test_a_lookup_of_an_array_without_axes():
    assert (full(lookup(np.array(7))[()] + I) == i_values + 7).all()


def test_16_bit_floats_are_read_exactly():
    bits = np.arange(2**16, dtype=np.uint16)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        array = bits.view(dtype)
        sizes, where_ = Sizes((1,), 1, 1, 2**16), (0, 0, 0, 1, 0, 2**16)
        found = score_by_machine(lookup(array)[J], sizes, where_, np.zeros((1, 2**16), np.float32))
        np.testing.assert_array_equal(found[0], array.astype(np.float32))


def test_conditions_that_hold_other_bytes_than_0_and_1():
    odd = np.array([0, 1, 2, 255, 0], np.uint8).view(np.bool_)
    found = mask_by_machine(~lookup(odd)[J], SIZES, TILE)
    np.testing.assert_array_equal(found[0], [True, False, False, False, True])


def test_a_lookup_reads_in_place():
    array = np.zeros(5)
    tree = lookup(array)[J]
    array[2] = 3
    assert full(tree)[0].tolist() == [0, 0, 3, 0, 0]


@pytest.mark.parametrize("array", [np.zeros(5, np.uint64), np.zeros(5, complex), np.array(["a"])])
def test_dtypes_that_expressions_do_not_know(array):
    with pytest.raises(ArgumentTypeError, match=r"lookup: .*dtype .*expected bool.*astype"):
        _ = lookup(array)[J]


def test_foreign_byte_order():
    with pytest.raises(ArgumentTypeError, match=r"foreign byte order.*astype"):
        _ = lookup(np.zeros(5, ">f4"))[J]


def test_a_lookup_wants_one_index_per_axis():
    with pytest.raises(ArgumentError, match=r"shape \(2, 3\).*1 expressions.*each of its 2 axes"):
        _ = lookup(np.zeros((2, 3)))[J]
    with pytest.raises(TraceError, match="index must be an integer expression"):
        _ = lookup(np.zeros(5))[J * 0.5]
    with pytest.raises(TraceError, match="got slice in a mask or score"):
        _ = lookup(np.zeros(5))[0:2]


@pytest.mark.parametrize(
    "use",
    [lambda t: t + 1, lambda t: 2 * t, lambda t: t == 3, lambda t: t != 3, lambda t: t < J,
     lambda t: J + t, lambda t: -t, lambda t: t & (I < J), lambda t: t // 2, lambda t: t == J,
     list, bool],
)  # fmt: skip
def test_a_lookup_is_no_number(use):
    with pytest.raises(TraceError, match=r"read by indexing|lookup"):
        use(lookup(np.zeros(5)))


# -- what cannot be recorded ----------------------------------------------------------------------


def _if(i, j):
    return i if i < j else j


@pytest.mark.parametrize(
    ("use", "remedy"),
    [
        (_if, "where"),
        (lambda i, j: (i < j) and (j < 3), "&"),
        (lambda i, j: (i < j) or (j < 3), r"\|"),
        (lambda i, j: not (i < j), "~"),
        (lambda i, j: 0 < i < j, "&"),
        (min, "minimum"),
        (max, "maximum"),
        (lambda i, j: sorted([i, j]), "where"),
        (lambda i, j: math.exp(i), "expr's functions"),
        (lambda i, j: math.floor(i / 2), "floor"),
        (lambda i, j: round(i / 2), "floor"),
        (lambda i, j: int(i), "lookup"),
        (lambda i, j: float(i), "exp, log"),
        (lambda i, j: [1, 2, 3][i], "lookup"),
        (lambda i, j: np.arange(3)[i], "lookup"),
        (lambda i, j: np.zeros((3, 3))[i, j], "lookup"),
        (lambda i, j: range(i), "lookup"),
        (lambda i, j: list(i), "lookup"),
        (lambda i, j: np.where(i < j, 1, 0), "where"),
        (lambda i, j: np.clip(i, 0, 3), "clip"),
        (lambda i, j: np.arcsin(i), "cannot be recorded"),
        (lambda i, j: np.add.reduce(i), "cannot be recorded"),
        (lambda i, j: np.add(i, j, dtype=float), "cannot be recorded"),
        (lambda i, j: i + np.arange(3), "lookup"),
        (lambda i, j: np.arange(3) + i, "lookup"),
        (lambda i, j: i + "a", "expected a number"),
        (lambda i, j: i + None, "expected a number"),
        (lambda i, j: i & 3, "Compare it first"),
        (lambda i, j: i < j & j < 3, "parentheses"),
        (lambda i, j: ~i, "Compare it first"),
        (lambda i, j: (i / 2) // 2, r"floor\(x / y\)"),
        (lambda i, j: (i / 2) % 2, r"floor\(x / y\)"),
        (lambda i, j: where(i, 1, 2), "expected a condition"),
        (lambda i, j: i**True, "got a bool as exponent"),
        (lambda i, j: (i / 2) << 1, r"floor\(x\)"),
        (lambda i, j: i >> 0.5, r"floor\(x\)"),
    ],
)
def test_what_cannot_be_recorded_says_what_to_use(use, remedy):
    with pytest.raises(TraceError, match=remedy):
        use(I, J)


def test_integers_beyond_64_bits():
    with pytest.raises(ArgumentError, match="does not fit into 64 bits"):
        _ = I + 2**63
    assert full(I * 0 + -(2**63))[0, 0] == -(2**63)


# -- what cannot be proven ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (lookup(np.zeros(4))[J], r"axis 0 .*shape \(4,\).*at j, .*between 0 and 4.*clip"),
        (lookup(np.zeros(5))[J - 1], r"between -1 and 3 here; expected 0 to 4.*clip"),
        (lookup(np.zeros((4, 4)))[I, J], r"axis 1 .*clip"),
        (lookup(np.zeros(9))[lookup(np.array([1, 9]))[B]], r"between 1 and 9.*clip"),
        (lookup(np.zeros(0))[J * 0], r"clip"),
        (lookup(np.zeros(5))[floor(SCORE)], r"clip"),
        (lookup(np.zeros(5))[where(np.inf >= SCORE, 0, 7)], r"clip"),  # not for NaN
        (lookup(np.zeros(5))[floor(lookup(np.array([np.nan]))[B * 0])], r"clip"),
        (I // J, r"divisor j may be 0.*between 0 and 4.*maximum\(\.\.\., 1\)"),
        (I % (J - 2), r"divisor .*may be 0"),
        (I * 2**62, r"may leave the range of 64-bit integers.*clip"),
        (I + (2**63 - 3), r"64-bit"),
        (-lookup(np.array([-(2**63)]))[B * 0], r"64-bit"),
        (abs(lookup(np.array([-(2**63)]))[B * 0]), r"64-bit"),
        (lookup(np.array([-(2**63)]))[B * 0] // -1, r"64-bit"),
        (lookup(np.array([-(2**63)]))[B * 0] % (J - 5), r"64-bit"),
        (floor(SCORE) + 1, r"64-bit"),
    ],
)
def test_what_cannot_be_proven_is_refused(tree, words):
    with pytest.raises(ArgumentError, match=words):
        bind(tree, flat_sizes(SIZES))


@pytest.mark.parametrize(
    "tree",
    [
        lookup(np.zeros(5))[J],
        lookup(np.zeros(5))[4 - J],
        lookup(np.zeros((4, 5)))[I, len_k - 1 - J],
        lookup(np.zeros(8))[I - J + len_k - 1],
        lookup(np.zeros(3))[(I * 7 - J) % 3],
        lookup(np.zeros(3))[J // 2],
        lookup(np.zeros(5))[minimum(maximum(J - 3, 0), 4)],
        lookup(np.zeros(5))[where(J < 3, J, 0)],
        lookup(np.zeros(3))[H],
        lookup(np.zeros(2))[lookup(np.array([1, 0]))[B]],
        lookup(np.zeros(6))[abs(I - J) + 1],
        lookup(np.zeros(5))[clip(floor(SCORE), 0, 4)],
        lookup(np.zeros(3))[floor(tanh(J * 0.1) + 1)],
        lookup(np.zeros(2))[(I < J) + 0],
        I // (J + 1),
        I % maximum(J, 1),
        I // lookup(np.array([-2, -3]))[B],
        (I + 2**62) // 2,
        floor(SCORE * 8) / 8,
    ],
)
def test_what_is_obviously_fine_passes(tree):
    bind(tree, flat_sizes(SIZES))


def test_an_index_is_proven_for_both_types_of_floats():
    scale = 0.1 + 2.0**-40  # 10 * scale is 1 in float32, above 1 in float64
    sizes = Sizes((1,), 1, 1, 11)
    for table, number in ((np.zeros(2), scale), (np.zeros(1), 0.1 - 2.0**-40)):
        tree = lookup(table)[floor(J * number)]
        most = [np.floor(np.arange(11).astype(t) * t(number)).max() for t in (np.float32, float)]
        if max(most) < table.size:
            bind(tree, flat_sizes(sizes))
        else:
            with pytest.raises(ArgumentError, match="clip"):
                bind(tree, flat_sizes(sizes))


def test_nothing_is_proven_where_nothing_is_evaluated():
    for sizes in (Sizes((0,), 1, 4, 4), Sizes((2,), 1, 0, 4), Sizes((2,), 1, 4, 0)):
        bind(lookup(np.zeros(0))[J] + I // J, flat_sizes(sizes))


# -- the tree -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "line"),
    [
        (I + 2 * J, "(i + (2 * j))"),
        ((I < J) & ~(J == 3), "((i < j) & ~(j == 3))"),
        (where(I > J, exp(SCORE), 0.5), "where((j < i), exp(score), 0.5)"),
        (-I // 2, "(-i // 2)"),
        (lookup(np.zeros((2, 3)))[B, 1], "lookup(<(2, 3)>)[b, 1]"),
        (SCORE - float("inf"), "(score - float('inf'))"),
        (I * 0.5, "(i * 0.5)"),
        (clip(I, 0, len_k), "minimum(maximum(i, 0), len_k)"),
    ],
)
def test_a_tree_shows_itself(tree, line):
    assert repr(tree) == line


def test_a_long_tree_is_abbreviated():
    tree = SCORE
    for _ in range(100):
        tree = tree * tree
    assert len(repr(tree)) < 1000
    assert " ... " in repr(tree)
    assert len(walk(tree)) == 101


def test_a_deep_tree_is_no_problem():
    tree = SCORE
    for _ in range(3000):
        tree = tree + 1.0
    assert (full(tree, np.zeros((4, 5)), np.float64) == 3000).all()
    assert len(repr(tree)) < 1000
    assert rebuild(tree, lambda node: None) is tree


def test_equal_operations_are_computed_once():
    tree = (I - J) * (I - J) + abs(I - J)
    shared = I - J
    assert len(lower(tree).code) == len(lower(shared * shared + abs(shared)).code)
    # What does not depend on the key runs once per tile.
    assert lower((I * 2 + 3) * 5 - J).once_per_tile >= 5


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_check_their_operands(name):
    arity, _ = OPERATIONS[name]
    with pytest.raises(TraceError, match=f"{name}: got {arity + 1} operands; expected {arity}"):
        operation(name, *[True] * (arity + 1))


def test_expr_exports():
    for name in ops.__all__:
        assert getattr(ops, name).__doc__ or name.startswith("len_")
    assert log(as_expr(1.0)).type == "float"


def test_masks_and_scores_use_the_same_functions():
    np.testing.assert_array_equal(
        masks.mask(lambda b, h, i, j: floor(exp(i * 0.5)) >= j).to_array(1, 1, 3, 4)[0, 0],
        np.floor(np.exp(np.arange(3) * 0.5))[:, None] >= np.arange(4),
    )
