"""Masks: every constructor against a formula, their algebra, and their errors."""

from __future__ import annotations

import numpy as np
import pytest
from expressions import mask_by_machine, of_batch
from hypothesis import given
from hypothesis import strategies as st

from cupyflash import lookup, masks
from cupyflash.errors import ArgumentError, ArgumentTypeError, TraceError
from cupyflash.expr import len_k, len_q
from cupyflash.expr.bind import bind
from cupyflash.masks import flat_sizes
from cupyflash.reference.spec.naive import Sizes

rng = np.random.default_rng(5)
lengths_st = st.tuples(st.integers(1, 7), st.integers(1, 7))
some = st.integers(-3, 8)
count = st.integers(0, 8)


def grid(Lq, Lk):
    return np.ix_(np.arange(Lq), np.arange(Lk))


def same(mask, lead, H, Lq, Lk, expected):
    """Compare a mask with (*lead, H, Lq, Lk): by NumPy, and by the CPU kernels' machine."""
    expected = np.broadcast_to(expected, (*lead, H, Lq, Lk))
    found = mask.to_array(lead, H, Lq, Lk)
    assert found.dtype == np.bool_
    np.testing.assert_array_equal(found, expected)
    sizes = Sizes(lead, H, Lq, Lk)
    bound = bind(mask.expr, flat_sizes(sizes))
    flat = expected.reshape(-1, H, Lq, Lk)
    b, h = len(flat) - 1, H - 1
    whole = (b, h, 0, Lq, 0, Lk)
    np.testing.assert_array_equal(mask_by_machine(bound, sizes, whole), flat[b, h])


# -- constructors ---------------------------------------------------------------------------------


@given(lengths_st, st.one_of(st.none(), some))
def test_causal(lengths, offset):
    i, j = grid(*lengths)
    off = lengths[1] - lengths[0] if offset is None else offset
    same(masks.causal(offset), (2,), 2, *lengths, j <= i + off)


def test_causal_lets_the_last_query_see_every_key():
    assert masks.causal().to_array(1, 1, 2, 4)[0, 0].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert masks.causal().to_array(1, 1, 3, 1)[0, 0].tolist() == [[0], [0], [1]]


@given(
    lengths_st, st.one_of(st.none(), count), st.one_of(st.none(), count), st.one_of(st.none(), some)
)
def test_window(lengths, left, right, offset):
    i, j = grid(*lengths)
    center = i + (lengths[1] - lengths[0] if offset is None else offset)
    expected = np.ones(lengths, bool)
    if left is not None:
        expected &= j >= center - left
    if right is not None:
        expected &= j <= center + right
    same(masks.window(left, right, offset), (1,), 1, *lengths, expected)


def test_window_without_a_left_end_is_causal():
    found = masks.window(None, 0).to_array(1, 1, 5, 7)
    np.testing.assert_array_equal(found, masks.causal().to_array(1, 1, 5, 7))


@given(lengths_st, count, st.one_of(st.none(), count))
def test_lengths_and_prefix(lengths, k, q):
    i, j = grid(*lengths)
    expected = (j < k) & (True if q is None else i < q)
    same(masks.lengths(k, q), (3,), 1, *lengths, expected)
    same(masks.prefix(k), (3,), 1, *lengths, j < k)


PER_BATCH = [
    ("causal: offset", masks.causal, lambda i, j, n: j <= i + n),
    (
        "window: offset",
        lambda n: masks.window(1, 2, n),
        lambda i, j, n: abs(2 * (j - i - n) - 1) <= 3,
    ),
    ("lengths: k_lengths", masks.lengths, lambda i, j, n: j < n),
    ("lengths: q_lengths", lambda n: masks.lengths(4, n), lambda i, j, n: (j < 4) & (i < n)),
    ("prefix: n", masks.prefix, lambda i, j, n: j < n),
]


@pytest.mark.parametrize(("argument", "make", "formula"), PER_BATCH, ids=lambda x: str(x)[:18])
@pytest.mark.parametrize(
    ("lead", "shape"),
    [((4,), (4,)), ((4,), (1,)), ((), ()), ((), (1,))]
    + [((2, 3), shape) for shape in ((2, 3), (3,), (2, 1), (1, 3), (6,), ())],
)
def test_one_number_per_batch_entry(argument, make, formula, lead, shape):
    numbers = rng.integers(-2 if "offset" in argument else 0, 6, shape)
    i, j = grid(5, 6)
    if shape == (6,) and lead == (2, 3):
        wide = numbers.reshape(lead)
    else:
        wide = np.broadcast_to(numbers.reshape(()) if lead == () else numbers, lead)
    same(make(numbers), lead, 2, 5, 6, formula(i, j, wide[..., None, None, None]))
    with pytest.raises(ArgumentError, match=rf"{argument}: got an array of shape \(5,\); expected"):
        make(np.arange(5)).to_array(lead, 1, 2, 2)


@pytest.mark.parametrize("dtype", "int8 int16 int32 int64 uint8 uint16 uint32".split())
def test_per_batch_numbers_of_every_integer_type(dtype):
    numbers = np.array([0, 3, 5], dtype)
    expected = np.arange(6) < np.array([0, 3, 5])[:, None, None, None]
    same(masks.prefix(numbers), (3,), 1, 2, 6, expected)
    same(masks.prefix([0, 3, 5]), (3,), 1, 2, 6, expected)
    same(masks.prefix(lookup(numbers)), (3,), 1, 2, 6, expected)
    same(masks.prefix(numbers.dtype.type(3)), (3,), 1, 2, 6, np.arange(6) < 3)


@pytest.mark.parametrize(
    ("lead", "shape"),
    [((2, 3), ()), ((2, 3), (3,)), ((2, 3), (2, 1)), ((2, 3), (2, 3)), ((), ()), ((4,), (1,))],
)
def test_segments(lead, shape):
    q_ids, k_ids = rng.integers(0, 3, (*shape, 5)), rng.integers(0, 3, (*shape, 7))
    expected = np.broadcast_to(q_ids[..., :, None] == k_ids[..., None, :], (*lead, 5, 7))
    same(masks.segments(q_ids, k_ids), lead, 2, 5, 7, expected[..., None, :, :])
    own = np.broadcast_to(q_ids[..., :, None] == q_ids[..., None, :], (*lead, 5, 5))
    same(masks.segments(q_ids), lead, 2, 5, 5, own[..., None, :, :])


@given(lengths_st, st.integers(1, 5))
def test_dilated(lengths, step):
    i, j = grid(*lengths)
    distance = i + lengths[1] - lengths[0] - j
    same(masks.dilated(step), (1,), 1, *lengths, distance % step == 0)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (1, 3, 4), (4,), (2, 1, 1, 4), (3, 2, 3, 1)])
def test_blocks(shape):
    layout = rng.random(shape) < 0.5
    lead, H, Lq, Lk, block_q, block_k = (3,), 2, 8, 19, 3, 5
    if len(shape) == 4 and shape[0] == 2:
        lead = (2,)
    wide = np.broadcast_to(layout, (*lead, H, 3, 4))
    expected = wide.repeat(block_q, axis=-2).repeat(block_k, axis=-1)[..., :Lq, :Lk]
    same(masks.blocks(layout, block_q, block_k), lead, H, Lq, Lk, expected)
    same(masks.blocks(layout.tolist(), block_q, block_k), lead, H, Lq, Lk, expected)


def allowed_by(indices, block_q, block_k, length_q, length_k):
    """Chosen blocks of keys as Booleans of pairs: (..., Lq, Lk)."""
    layout = (indices[..., None] == np.arange(-(-length_k // block_k))).any(-2)
    return layout.repeat(block_q, -2).repeat(block_k, -1)[..., :length_q, :length_k]


@given(
    lengths_st, st.tuples(*[st.integers(1, 5)] * 2), st.integers(0, 4), st.integers(0, 2**32 - 1)
)
def test_chosen(lengths, block, count, seed):
    draws = np.random.default_rng(seed)
    blocks = -(-np.array(lengths) // block)
    lead = [(), (1,), (4,), (3, 1), (3, 2)][seed % 5]
    shape = (*lead, blocks[0] if seed % 3 else 1, count)
    # Out of order, repeated, none, and numbers of blocks that do not exist.
    indices = draws.integers(-2, blocks[1] + 2, shape).astype(draws.choice(["i1", "u4", "i8"]))
    wide = indices.repeat(2, -3) if len(lead) == 2 and lead[1] == 2 else indices  # of 4 heads
    expected = allowed_by(np.broadcast_to(wide, (3, 4, blocks[0], count)), *block, *lengths)
    same(masks.chosen(indices, block), (3,), 4, *lengths, expected)
    joined = masks.chosen(indices.tolist() if indices.size else indices, block) & masks.causal()
    i, j = grid(*lengths)
    same(joined, (3,), 4, *lengths, expected & (j <= i + lengths[1] - lengths[0]))


@pytest.mark.parametrize("lengths", [(3, 7), (4, 4), (5, 2), (1, 6)])
@pytest.mark.parametrize("lead", [(), (3,), (1,)])
def test_tree(lengths, lead):
    queries, keys = lengths
    ancestors = rng.random((*lead, queries, queries)) < 0.5
    expected = np.ones((*lead, 1, queries, keys), bool)
    for n in range(queries):
        if keys - queries + n >= 0:
            expected[..., 0, :, keys - queries + n] = ancestors[..., n]
    same(masks.tree(ancestors), (3,), 2, *lengths, expected)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_dense(lead):
    full = (*lead, 2, 4, 5)
    for cut in range(len(full) + 1):
        for ones in range(len(full) - cut):
            shape = list(full[cut:])
            shape[ones] = 1
            array = rng.random(shape) < 0.5
            same(masks.dense(array), lead, 2, 4, 5, array)
    strided = (rng.random((5, 4)) < 0.5).T[::-1]
    same(masks.dense(strided), lead, 2, 4, 5, strided)


def test_dense_reads_in_place():
    array = np.zeros((2, 3), bool)
    mask = masks.dense(array)
    array[1, 2] = True
    assert mask.to_array(1, 1, 2, 3)[0, 0].tolist() == [[0, 0, 0], [0, 0, 1]]


def test_a_function():
    i, j = grid(4, 5)
    seen = []

    def rule(b, h, i, j):
        seen.append((b, h, i, j))
        return (j <= i + len_k - len_q) & ((h == 1) | (i - j < 2)) & (b < 1)

    mask = masks.mask(rule)
    expected = np.zeros((2, 2, 4, 5), bool)
    expected[0] = (j <= i + 1) & ((np.arange(2) == 1)[:, None, None] | (i - j < 2))
    same(mask, (2,), 2, 4, 5, expected)
    assert len(seen) == 1
    same(masks.mask(lambda b, h, i, j: True), (2,), 1, 2, 2, True)
    same(masks.mask(lambda *symbols: symbols[2] == symbols[3]), (1,), 1, 4, 5, i == j)


# -- algebra and views ----------------------------------------------------------------------------


def test_algebra():
    i, j = grid(6, 6)
    a, b = masks.causal(), masks.window(1, 1)
    in_a, in_b = j <= i, abs(i - j) <= 1
    same(a & b, (1,), 1, 6, 6, in_a & in_b)
    same(a | b, (1,), 1, 6, 6, in_a | in_b)
    same(a ^ b, (1,), 1, 6, 6, in_a ^ in_b)
    same(~a, (1,), 1, 6, 6, ~in_a)
    same(~(a & ~b) | masks.prefix(2), (1,), 1, 6, 6, ~(in_a & ~in_b) | (j < 2))


@pytest.mark.parametrize("lengths", [9, np.array([9, 5])])
def test_lengths_beyond_the_keys_hide_none(lengths):
    assert masks.lengths(lengths, lengths).to_array(2, 1, 4, 5).all()


def test_causal_by_true_lengths():
    k_lengths, q_lengths = np.array([3, 6]), np.array([2, 5])
    mask = masks.lengths(k_lengths, q_lengths) & masks.causal(offset=k_lengths - q_lengths)
    for b in range(2):
        n, m = q_lengths[b], k_lengths[b]
        found = mask.to_array(2, 1, 6, 7)[b, 0]
        np.testing.assert_array_equal(found[:n, :m], masks.causal().to_array(1, 1, n, m)[0, 0])
        assert not found[n:].any()
        assert not found[:, m:].any()


def test_to_array_shapes():
    assert masks.causal().to_array(2, 3, 4, 5).shape == (2, 3, 4, 5)
    assert masks.causal().to_array((2, 6), 3, 4, 5).shape == (2, 6, 3, 4, 5)
    assert masks.causal().to_array((), 3, 4, 5).shape == (3, 4, 5)
    for empty in ((0, 1, 2, 3), (1, 1, 0, 3), (1, 1, 3, 0), ((2, 0), 1, 2, 3)):
        found = masks.causal([1, 2][: empty[0] if isinstance(empty[0], int) else 0] or None)
        assert found.to_array(*empty).size == 0
    found = masks.causal().to_array(1, 1, 2, 2)
    found[...] = True  # it is the caller's


def test_a_mask_shows_itself():
    assert repr(masks.causal(3)) == "<mask (j <= (i + 3))>"
    assert repr(masks.window(None, None)) == "<mask True>"
    assert repr(masks.dense(np.ones((2, 2), bool))) == "<mask mask[h, i, j]>"
    assert "lengths: k_lengths[]" in repr(masks.lengths([1, 2]))


# -- packed sequences -----------------------------------------------------------------------------

OFFSETS_Q, OFFSETS_K = np.array([0, 2, 2, 7]), np.array([0, 4, 5, 11])
IDS_Q, IDS_K = rng.integers(0, 2, 7), rng.integers(0, 2, 11)
DENSE = rng.random((3, 1, 5, 6)) < 0.5
LAYOUT = rng.random((1, 3, 3)) < 0.5
CHOSEN = rng.integers(-1, 3, (3, 1, 3, 2))
DRAFTS = rng.random((3, 5, 5)) < 0.5

PACKED = {
    "causal": (masks.causal(), lambda n, i, j, lq, lk: j <= i + lk - lq),
    "offsets": (masks.causal([1, 0, -1]), lambda n, i, j, lq, lk: j <= i + 1 - n),
    "window": (masks.window(1, 0), lambda n, i, j, lq, lk: abs(2 * (j - i - lk + lq) + 1) <= 1),
    "lengths": (masks.lengths([3, 1, 2]), lambda n, i, j, lq, lk: j < [3, 1, 2][n]),
    "dilated": (masks.dilated(2), lambda n, i, j, lq, lk: (i + lk - lq - j) % 2 == 0),
    "segments": (
        masks.segments(IDS_Q, IDS_K),
        lambda n, i, j, lq, lk: IDS_Q[OFFSETS_Q[n] + i] == IDS_K[OFFSETS_K[n] + j],
    ),
    "dense": (masks.dense(DENSE), lambda n, i, j, lq, lk: DENSE[n, 0, i, j]),
    "tree": (
        masks.tree(DRAFTS),
        lambda n, i, j, lq, lk: (
            (j < lk - lq) | DRAFTS[n, i, np.clip(j - (lk - lq), 0, max(lq - 1, 0))]
        ),
    ),
    "blocks": (masks.blocks(LAYOUT, 2, 2), lambda n, i, j, lq, lk: LAYOUT[0, i // 2, j // 2]),
    "chosen": (
        masks.chosen(CHOSEN, (2, 3)),
        lambda n, i, j, lq, lk: (CHOSEN[n, 0, i // 2] == j[..., None] // 3).any(-1),
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(name):
    mask, formula = PACKED[name]
    len_q, len_k = np.diff(OFFSETS_Q), np.diff(OFFSETS_K)
    whole = Sizes((3,), 2, len_q, len_k, OFFSETS_Q[:-1], OFFSETS_K[:-1])
    bound = bind(mask.expr, flat_sizes(whole))
    for n in range(3):
        # as the specification asks: one sequence at a time
        b = np.full((1, 1, 1, 1), n)
        one = of_batch(whole, n)
        sizes = Sizes((3,), 2, *(b * 0 + one[x] for x in ("len_q", "len_k", "start_q", "start_k")))
        i, j = grid(one["len_q"], one["len_k"])
        expected = formula(n, i, j, one["len_q"], one["len_k"])
        h = np.arange(2)[:, None, None]
        found = mask.evaluate(b, h, i, j, sizes)
        assert found.shape == (1, 2, one["len_q"], one["len_k"])
        np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))
        if one["len_q"]:
            tile = (n, 1, 0, one["len_q"], 0, one["len_k"])
            by_machine = mask_by_machine(bound, whole, tile)
            np.testing.assert_array_equal(by_machine, np.broadcast_to(expected, by_machine.shape))


def test_packed_arrays_of_wrong_size():
    whole = Sizes((3,), 2, np.diff(OFFSETS_Q), np.diff(OFFSETS_K), OFFSETS_Q[:-1], OFFSETS_K[:-1])
    for mask, words in (
        (masks.segments(IDS_Q[:-1], IDS_K), r"segments: q_ids: got .*\(6,\); expected .*\(7,\)"),
        (masks.segments(IDS_Q), r"segments: k_ids: got .*\(7,\); expected .*\(11,\)"),
        (masks.dense(DENSE[..., :-1]), r"mask: got .*\(3, 1, 5, 5\); expected .*\(3, 2, 5, 6\)"),
        (masks.lengths([1, 2]), r"lengths: k_lengths: got .*\(2,\); expected .*\(3,\)"),
    ):
        with pytest.raises(ArgumentError, match=words):
            bind(mask.expr, flat_sizes(whole))


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: masks.causal(True),
            ArgumentTypeError,
            "causal: offset: got a bool; expected an int",
        ),
        (
            lambda: masks.causal(1.5),
            ArgumentTypeError,
            "causal: offset: got float; expected an int",
        ),
        (
            lambda: masks.causal([1.5]),
            ArgumentTypeError,
            "offset: got float64.*one entry per batch",
        ),
        (lambda: masks.causal("a"), ArgumentTypeError, "causal: offset: got str"),
        (lambda: masks.causal(2**63), ArgumentError, "does not fit into 64 bits"),
        (
            lambda: masks.window(1.0, 2),
            ArgumentTypeError,
            "window: left is 1.0; expected an integer, or",
        ),
        (
            lambda: masks.window(1, True),
            ArgumentTypeError,
            "window: right is True.*None for unbound",
        ),
        (
            lambda: masks.window(-1, 0),
            ArgumentError,
            "window: left is -1; expected 0 or more keys, or None for unbounded",
        ),
        (
            lambda: masks.window(0, np.int64(-3)),
            ArgumentError,
            "window: right is .*-3.*; expected 0",
        ),
        (lambda: masks.lengths(-1), ArgumentError, "lengths: k_lengths: got -1; expected int"),
        (
            lambda: masks.prefix([3, -1]),
            ArgumentError,
            "prefix: n: got -1; expected integers of 0 ",
        ),
        (
            lambda: masks.lengths(3, np.array([2, -5])),
            ArgumentError,
            "lengths: q_lengths: got -5; expected integers of 0 or more",
        ),
        (lambda: masks.window(1, 1, 0.5), ArgumentTypeError, "window: offset: got float"),
        (lambda: masks.lengths(None), ArgumentTypeError, "lengths: k_lengths: got NoneType"),
        (lambda: masks.lengths(3, 0.5), ArgumentTypeError, "lengths: q_lengths: got float"),
        (lambda: masks.prefix(np.ones(3)), ArgumentTypeError, "prefix: n: got float64; expected"),
        (lambda: masks.prefix(np.ones(3, np.uint64)), ArgumentTypeError, "prefix: n: .*uint64"),
        (lambda: masks.segments(3), ArgumentTypeError, "segments: q_ids: got int; expected a"),
        (lambda: masks.segments([0.5]), ArgumentTypeError, "segments: q_ids: got dtype float64"),
        (
            lambda: masks.segments([1], [0.5]),
            ArgumentTypeError,
            "segments: k_ids: got dtype float64",
        ),
        (
            lambda: masks.dilated(0),
            ArgumentError,
            "dilated: step is 0; expected an integer of 1 or",
        ),
        (lambda: masks.dilated(2.0), ArgumentError, "dilated: step is 2.0; expected an integer"),
        (lambda: masks.dilated(True), ArgumentError, "dilated: step is True"),
        (lambda: masks.blocks([[True]], 0, 1), ArgumentError, "blocks: block_q is 0; expected"),
        (lambda: masks.blocks([[True]], 1, 2.5), ArgumentError, "blocks: block_k is 2.5; expected"),
        (
            lambda: masks.blocks([[1]], 1, 1),
            ArgumentTypeError,
            "blocks: layout: .*int64.*expected bool",
        ),
        (lambda: masks.chosen([[0]], 0), ArgumentError, "chosen: block is 0; expected"),
        (lambda: masks.chosen([[0]], (1, 2, 3)), ArgumentError, r"block is \(1, 2, 3\); expected"),
        (lambda: masks.chosen([[0.0]], 1), ArgumentTypeError, "chosen: indices: .*float64.*integ"),
        (lambda: masks.chosen(np.array(1), 1), ArgumentTypeError, r"indices: .*shape \(\); exp"),
        (lambda: masks.chosen(np.ones((2, 2), "u8"), 1), ArgumentTypeError, "chosen: .*uint64"),
        (
            lambda: masks.tree(np.ones((2, 3), bool)),
            ArgumentError,
            r"tree: .*\(2, 3\); .*\(Lq, Lq\)",
        ),
        (lambda: masks.tree(np.ones(2, bool)), ArgumentError, r"tree: got .*\(2,\); expected"),
        (lambda: masks.tree(np.eye(2)), ArgumentTypeError, "tree: ancestors: .*float64.*bool"),
        (lambda: masks.dense(np.ones((2, 2))), ArgumentTypeError, "mask: .*float64.*bool.*bias="),
        (lambda: masks.dense(None), ArgumentTypeError, "mask: got NoneType; expected a"),
        (
            lambda: masks.mask(3),
            ArgumentTypeError,
            r"mask: got int; expected a function of \(b, h, i",
        ),
        (lambda: masks.mask(lambda i, j: i < j), ArgumentTypeError, r"must take \(b, h, i, j\)"),
        (lambda: masks.mask(lambda b, h, i, j: None), TraceError, "returned None"),
        (lambda: masks.mask(lambda b, h, i, j: i - j), TraceError, r"returned \(i - j\) \(int\)"),
        (lambda: masks.mask(lambda b, h, i, j: 1), TraceError, "expected a condition"),
        (lambda: masks.mask(lambda b, h, i, j: "no"), TraceError, "got str in a mask"),
        (lambda: masks.mask(lambda b, h, i, j: i < j or j < 3), TraceError, "where"),
        (lambda: masks.mask(lambda b, h, i, j: np.ones(3)[i] > 0), TraceError, "lookup"),
        (lambda: masks.causal() & np.ones((2, 2), bool), ArgumentTypeError, "masks.dense"),
        (lambda: np.ones((2, 2), bool) & masks.causal(), ArgumentTypeError, "masks.dense"),
        (lambda: True | masks.causal(), ArgumentTypeError, "got bool joined"),
        (
            lambda: masks.causal() ^ 3,
            ArgumentTypeError,
            "got int joined with a mask; expected another mask",
        ),
        (lambda: masks.causal() and masks.prefix(3), TraceError, r"join masks with &, \| and ~"),
        (lambda: not masks.causal(), TraceError, "no truth value"),
    ],
)
def test_errors(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (
            masks.dense(np.ones((2, 3), bool)),
            r"mask: got an array of shape \(2, 3\); expected one that "
            r"broadcasts to \(2, 3, 4, 5\) \(the leading axes, heads, len_q, len_k\)",
        ),
        (masks.dense(np.ones((1, 2, 3, 4, 5), bool)), r"\(1, 2, 3, 4, 5\); expected"),
        (masks.blocks(np.ones((3, 3), bool), 2, 2), r"blocks: layout: .*\(2, 3, 2, 3\)"),
        (masks.chosen(np.ones((4, 1), int), 2), r"chosen: indices: .*\(4, 1\).*\(2, 3, 2, 1\)"),
        (masks.segments(np.arange(4)), r"segments: k_ids: got .*shape \(4,\); expected .*\(2, 5\)"),
        (masks.mask(lambda b, h, i, j: lookup(np.arange(4))[j] > 0), "clip"),
        (masks.mask(lambda b, h, i, j: i % j == 0), r"maximum\(\.\.\., 1\)"),
        (masks.causal(2**62) & masks.mask(lambda b, h, i, j: (i + 2**62) * 2 > 0), "64-bit"),
    ],
)
def test_errors_that_need_the_sizes(mask, words):
    with pytest.raises(ArgumentError, match=words):
        mask.to_array(2, 3, 4, 5)


def test_plain_numbers_make_a_mask_once_and_nothing_else_is_confused_with_them():
    assert masks.causal() is masks.causal()
    assert masks.window(1, None) is masks.window(1, None)
    assert masks.causal(2) is not masks.causal(3)
    assert masks.causal(np.array([2])) is not masks.causal(np.array([2]))
    masks.causal(1)
    with pytest.raises(ArgumentTypeError):
        masks.causal(True)
    with pytest.raises(ArgumentTypeError):
        masks.causal(1.0)
