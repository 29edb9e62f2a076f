"""The papers' family computes attention: every member against the specification."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from family import BACKWARD, FORWARD, Case, arrays, cases, expected, layout, options
from harness import attend
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import masks
from cupyflash.reference.algorithms import (
    block_sparse,
    causal_tiles,
    flash_attention,
    flash_attention_2,
    flash_attention_3,
    flash_attention_backward,
    one_pass,
    online_softmax,
    packed_qkv,
    rabe_staats,
    safe_softmax,
    split_kv,
    standard,
)
from cupyflash.reference.algorithms.blocks import Dropout, tiles_for
from cupyflash.reference.algorithms.hbm import Memory
from cupyflash.reference.cpu import philox
from cupyflash.reference.spec import naive

FOLDER = Path(__file__).resolve().parents[2] / "reference" / "algorithms"
# Numbers of order 1 to 10 and sums of some tens of them: a few hundred roundings of 1.1e-16.
NEAR = {"rtol": 1e-12, "atol": 1e-13}
SINGLE = {"rtol": 1e-4, "atol": 1e-5}  # the same with roundings of 6e-8


@pytest.mark.parametrize("name", FORWARD)
@given(data=st.data())
def test_forward_is_attention(name, data):
    member = FORWARD[name]
    case = data.draw(cases(member.knows))
    made = member.run(case, Memory())
    wanted = expected(case, blocks=name == "block_sparse")[0]
    o = made if isinstance(made, np.ndarray) else made.o
    np.testing.assert_allclose(o, wanted.out, **NEAR)
    if hasattr(made, "lse"):
        np.testing.assert_allclose(made.lse, wanted.lse, **NEAR)
    if hasattr(made, "l"):
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(made.m + np.log(made.l), wanted.lse, **NEAR)


@pytest.mark.parametrize("name", BACKWARD)
@given(data=st.data())
def test_backward_is_the_gradient(name, data):
    member = BACKWARD[name]
    case = data.draw(cases(member.knows))
    made = member.run(case, Memory())
    for ours, wanted in zip(made, expected(case)[1], strict=False):
        np.testing.assert_allclose(ours, wanted, **NEAR)


@pytest.mark.parametrize("softmax", [safe_softmax.softmax, online_softmax.softmax])
@given(rows=st.integers(1, 4), n=st.integers(1, 9), seed=st.integers(0, 99))
@settings(max_examples=10)
def test_softmax(softmax, rows, n, seed):
    x = 300 * np.random.default_rng(seed).standard_normal((rows, n))  # exp(x) would overflow
    p = np.exp(x - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(softmax(x), p / p.sum(axis=1, keepdims=True), **NEAR)


@pytest.mark.parametrize("name", sorted({*FORWARD, *BACKWARD} - {"block_sparse"}))
def test_float32_stays_float32(name, monkeypatch):
    case = Case(7, 9, 4, 3, 3, 4, seed=5)
    q, k, v, do = single = tuple(x.astype(np.float32) for x in arrays(case))
    monkeypatch.setattr("family.arrays", lambda case: single)
    if name in BACKWARD:
        results, wanted = BACKWARD[name].run(case, Memory()), naive.attention_backward(do, q, k, v)
    else:
        made = FORWARD[name].run(case, Memory())
        results = (made if isinstance(made, np.ndarray) else made.o,)
        wanted = (naive.attention(q, k, v).out,)
    for ours, theirs in zip(results, wanted, strict=False):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, **SINGLE)


@pytest.mark.parametrize("scale", [0.0, -1.5, 1.0])
def test_every_scale_is_taken(scale):
    q, k, v, do = arrays(Case(5, 7, 3, 2, 2, 3))
    wanted = naive.attention(q, k, v, scale=scale).out
    tiles = {"scale": scale, "block_q": 2, "block_kv": 3}
    for made in (
        standard.forward(q, k, v, **tiles).o,
        one_pass.forward(q, k, v, scale=scale),
        flash_attention.forward(q, k, v, **tiles).o,
        flash_attention_2.forward(q, k, v, **tiles).o,
        flash_attention_3.forward(q, k, v, **tiles).o,
        rabe_staats.forward(q, k, v, **tiles).o,
        split_kv.forward(q, k, v, splits=2, **tiles).o,
    ):
        np.testing.assert_allclose(made, wanted, **NEAR)
    gradients = naive.attention_backward(do, q, k, v, scale=scale)
    saved = flash_attention.forward(q, k, v, **tiles)
    chunks = rabe_staats.forward(q, k, v, **tiles)
    p = standard.forward(q, k, v, **tiles).p
    for made in (
        flash_attention_backward.backward(do, q, k, v, saved, **tiles),
        rabe_staats.backward(do, q, k, v, chunks, **tiles),
        standard.backward(do, q, k, v, p, **tiles),
    ):
        for ours, wanted in zip(made, gradients, strict=False):
            np.testing.assert_allclose(ours, wanted, **NEAR)


# -- masks and dropout ----------------------------------------------------------------------------


def test_rows_without_a_key_are_zero():
    q, k, v, do = arrays(Case(6, 4, 3, 2, 2, 2))
    hidden = np.zeros(4, bool)
    made = flash_attention.forward(q, k, v, padding=hidden, block_q=2, block_kv=2)
    assert not made.o.any()
    assert not made.l.any()
    assert (made.m == -np.inf).all()
    gradients = flash_attention_backward.backward(
        do, q, k, v, made, padding=hidden, block_q=2, block_kv=2
    )
    assert not any(x.any() for x in gradients)
    # Queries 0 and 1 of 6 come before the first of 4 keys.
    for module in (flash_attention_2, flash_attention_3):
        made = module.forward(q, k, v, causal=True, block_q=2, block_kv=2)
        assert not made.o[:2].any()
        assert (made.lse[:2] == -np.inf).all()
        assert made.o[2:].any()


@pytest.mark.parametrize(("n_q", "n_k"), [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize(
    "name", sorted({*FORWARD, *BACKWARD} - {"rabe_staats", "rabe_staats_backward"})
)
def test_no_queries_and_no_keys(name, n_q, n_k):
    case = Case(n_q, n_k, 2, 3, 2, 2)
    made = (FORWARD | BACKWARD)[name].run(case, Memory())
    if name in BACKWARD:
        assert [x.shape for x in made] == [(n_q, 2), (n_k, 2), (n_k, 3)]
        assert not any(x.any() for x in made)
    else:
        o = made if isinstance(made, np.ndarray) else made.o
        assert o.shape == (n_q, 3)
        assert not o.any()


@given(
    seed=st.integers(0, 2**64 - 1),
    p=st.sampled_from([0.1, 0.5, 0.999]),
    row=st.integers(0, 9),
    col=st.integers(0, 9),
)
def test_dropout_has_the_bits_of_philox(seed, p, row, col):
    rows, cols = slice(row, row + 3), slice(col, col + 5)
    z = Dropout(p, seed).factors(rows, cols, np.zeros(0))
    i, j = np.ogrid[rows, cols]
    assert np.array_equal(z != 0, philox.keep(seed, p, 0, i, j))
    assert set(np.unique(z)) <= {0.0, 1 / philox.keep_probability(p)}


def test_dropout_does_not_depend_on_the_tiles():
    q, k, v, _ = arrays(Case(9, 8, 3, 2, 1, 1))
    made = [
        flash_attention.forward(q, k, v, dropout=0.4, seed=7, block_q=n, block_kv=m).o
        for n, m in ((1, 1), (4, 3), (9, 8))
    ]
    for o in made[1:]:
        np.testing.assert_allclose(o, made[0], **NEAR)


def test_block_sparse_with_a_causal_layout_is_causal_attention():
    case = Case(12, 12, 4, 4, 3, 3, causal=True)
    q, k, v, _ = arrays(case)
    tiles = causal_tiles.table(12, 12, 3, 3) != causal_tiles.EMPTY
    made = block_sparse.forward(q, k, v, tiles, causal=True, block_q=3, block_kv=3)
    np.testing.assert_allclose(made.o, expected(case)[0].out, **NEAR)


# -- FlashAttention-2 is the package's own kernel -------------------------------------------------


@given(data=st.data())
@settings(max_examples=15)
def test_flash_attention_2_is_the_packages_kernel(data):
    case = data.draw(cases({"causal", "dropout"}))
    q, k, v, _ = arrays(case)
    chosen = {"dropout": case.dropout, "seed": case.seed} if case.dropout else {}
    if case.causal:
        chosen["mask"] = masks.causal()
    tiles = case.block_q, case.block_kv
    wanted = attend(q[None], k[None], v[None], tiles, **chosen)
    given_options = options(case)
    del given_options["padding"]
    made = flash_attention_2.forward(q, k, v, **given_options)
    assert np.array_equal(made.o, wanted.out[0])
    assert np.array_equal(made.lse, wanted.lse[0])
    assert made.visited == wanted.visited


def test_each_block_of_queries_visits_the_tiles_that_are_counted():
    q, k, v, _ = arrays(Case(23, 19, 4, 4, 4, 4))
    for rows in (slice(n, min(n + 4, 23)) for n in range(0, 23, 4)):
        offset = 19 - 23 + rows.start  # of this block alone, whose first query is query 0
        tiles = (4, 5)
        made = flash_attention_2.kernel(q[rows], k, v, 1.0, offset, Dropout(), tiles)
        assert made.visited == len(causal_tiles.seen(rows, 19, 5, 19 - 23))


def test_a_wrong_count_of_tiles_is_an_error():
    q, k, v, _ = arrays(Case(4, 4, 2, 2, 2, 2))
    made = flash_attention_2.kernel(q, k, v, 1.0, None, Dropout(), (2, 2))
    hbm = Memory()
    hbm.place(q=q, k=k, v=v)
    with pytest.raises(RuntimeError, match="visited 4 tiles, and 2 were counted"):
        flash_attention_2.walk(hbm, made, 2, lambda rows: [slice(0, 2)], lambda *_: None)


def test_causal_skipping_visits_528_of_1024_tiles():
    q, k, v, _ = arrays(Case(1024, 1024, 2, 2, 32, 32))
    made = flash_attention_2.forward(q, k, v, causal=True, block_q=32, block_kv=32)
    assert made.visited == 528
    assert flash_attention_2.forward(q, k, v, block_q=32, block_kv=32).visited == 1024
    classes = causal_tiles.table(1024, 1024, 32, 32)
    assert [int((classes == c).sum()) for c in range(3)] == [496, 32, 496]


@given(
    n_q=st.integers(1, 12),
    n_k=st.integers(1, 12),
    block_q=st.integers(1, 5),
    block_kv=st.integers(1, 5),
)
def test_classes_of_tiles_are_those_of_their_pairs(n_q, n_k, block_q, block_kv):
    pairs = np.tri(n_q, n_k, n_k - n_q, dtype=bool)
    for (i, j), found in np.ndenumerate(causal_tiles.table(n_q, n_k, block_q, block_kv)):
        tile = pairs[i * block_q : (i + 1) * block_q, j * block_kv : (j + 1) * block_kv]
        assert found == int(tile.any()) + int(tile.all())


# -- FlashAttention-3, split keys, packed heads ---------------------------------------------------


def test_the_two_stage_schedule():
    q, k, v, _ = arrays(Case(4, 9, 2, 2, 4, 3))
    schedule = flash_attention_3.forward(q, k, v, block_q=4, block_kv=3).schedule
    assert schedule == [
        (0, "issue q k", 0),
        (0, "wait q k", 0),
        (0, "softmax", 0),
        (0, "issue q k", 1),
        (0, "issue p v", 0),
        (0, "wait q k", 1),
        (0, "softmax", 1),  # while p v of tile 0 runs
        (0, "wait p v", 0),
        (0, "issue q k", 2),
        (0, "issue p v", 1),
        (0, "wait q k", 2),
        (0, "softmax", 2),
        (0, "wait p v", 1),
        (0, "issue p v", 2),
        (0, "wait p v", 2),
    ]


def test_split_keys_change_nothing():
    q, k, v, _ = arrays(Case(1, 50, 4, 3, 1, 8))
    whole = flash_attention_2.forward(q, k, v, block_q=1, block_kv=8)
    for splits in (1, 2, 7, 50, 80):
        made = split_kv.forward(q, k, v, splits=splits, block_q=1, block_kv=8)
        np.testing.assert_allclose(made.o, whole.o, **NEAR)
        np.testing.assert_allclose(made.lse, whole.lse, **NEAR)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_heads_are_heads(causal):
    qkv = np.random.default_rng(0).standard_normal((10, 3, 2, 4))
    made = packed_qkv.forward(qkv, causal=causal, block_q=4, block_kv=3)
    q, k, v = (qkv[:, n].swapaxes(0, 1) for n in range(3))
    mask = np.tri(10, dtype=bool) if causal else None
    wanted = naive.attention(q, k, v, mask=mask)
    np.testing.assert_allclose(made.o, wanted.out.swapaxes(0, 1), **NEAR)
    np.testing.assert_allclose(made.lse, wanted.lse, **NEAR)
    assert all(np.shares_memory(x, qkv) for x in packed_qkv.unpack(qkv, 1))


# -- bad input ------------------------------------------------------------------------------------


def test_bad_input_is_told():
    q, k, v, do = arrays(Case(4, 4, 2, 2, 2, 2))
    with pytest.raises(ValueError, match=r"\(Lq, D\), \(Lk, D\), \(Lk, Dv\), not"):
        one_pass.forward(q, k[:3], v)
    with pytest.raises(ValueError, match="all float32 or all float64 here, not int64"):
        flash_attention.forward(q.astype(int), k, v)
    with pytest.raises(ValueError, match="dropout needs a seed"):
        flash_attention.forward(q, k, v, dropout=0.5)
    with pytest.raises(ValueError, match="from 0 to below 1, not 1"):
        standard.forward(q, k, v, dropout=1.0, seed=0)
    with pytest.raises(ValueError, match=r"the key-padding mask is \(4,\) bool"):
        flash_attention.forward(q, k, v, padding=np.ones(3, bool))
    with pytest.raises(ValueError, match=r"an entry per block, \(2, 2\), not \(2, 1\)"):
        block_sparse.forward(q, k, v, np.ones((2, 1), bool), block_q=2, block_kv=2)
    with pytest.raises(ValueError, match="got 0 rows; expected at least one"):
        flash_attention.forward(q, k, v, block_q=0)
    with pytest.raises(ValueError, match="at least one row, not -1"):
        flash_attention_2.forward(q, k, v, block_kv=-1)
    with pytest.raises(ValueError, match="expected at least 4 d = 8"):
        flash_attention.forward(q, k, v, sram=7)
    saved = flash_attention.forward(q, k, v)
    with pytest.raises(ValueError, match=r"had no dropout, .* the backward has dropout=0.5"):
        flash_attention_backward.backward(do, q, k, v, saved, dropout=0.5)
    dropped = flash_attention.forward(q, k, v, dropout=0.5, seed=1)
    with pytest.raises(ValueError, match=r"had dropout, and the backward has dropout=0\.0"):
        flash_attention_backward.backward(do, q, k, v, dropped)
    with pytest.raises(ValueError, match=r"like the output, \(4, 2\) float64, not \(3, 2\)"):
        flash_attention_backward.backward(do[:3], q, k, v, saved)
    with pytest.raises(ValueError, match=r"p is \(4, 4\), not \(4, 3\)"):
        standard.backward(do, q, k, v, np.zeros((4, 3)))
    with pytest.raises(ValueError, match="k has no rows"):
        rabe_staats.forward(q, k[:0], v[:0])
    with pytest.raises(ValueError, match="at least one part of the keys, not 0"):
        split_kv.forward(q, k, v, splits=0)
    with pytest.raises(ValueError, match=r"are \(L, 3, H, D\)"):
        packed_qkv.unpack(q, 0)


def test_sram_sets_the_blocks():
    q, k, v, do = arrays(Case(20, 20, 4, 4, 1, 1))
    assert tiles_for(100, 4) == (4, 7)  # ceil(100 / 16) = 7, min(7, 4) = 4
    made, by_blocks = Memory(), Memory()
    saved = flash_attention.forward(q, k, v, sram=100, hbm=made)
    flash_attention.forward(q, k, v, block_q=4, block_kv=7, hbm=by_blocks)
    assert made.reads == by_blocks.reads
    assert made.writes == by_blocks.writes
    gradients = flash_attention_backward.backward(do, q, k, v, saved, sram=100)
    for ours, wanted in zip(gradients, naive.attention_backward(do, q, k, v), strict=False):
        np.testing.assert_allclose(ours, wanted, **NEAR)


# -- the table ------------------------------------------------------------------------------------


def test_the_table_names_every_module():
    readme = (FOLDER / "README.md").read_text()
    named = set(re.findall(r"^\| \[?`(\w+\.py)`", readme, re.MULTILINE))
    assert named == {path.name for path in FOLDER.glob("*.py")} - {"__init__.py"}


@pytest.mark.parametrize("name", sorted(p.name for p in FOLDER.glob("*.py")))
def test_every_algorithm_names_its_paper(name):
    if name not in {"__init__.py", "hbm.py", "blocks.py", "packed_qkv.py"}:
        head = (FOLDER / name).read_text().partition('"""\n')[0]
        assert re.search(r"20(18|21|22|23|24)", head), "the paper's year"
        assert re.search(r"Algorithm|section|Steps?", head)


def test_layouts_of_cases_are_not_all_alike():
    drawn = [layout(Case(6, 6, 2, 2, 2, 2, seed=seed)) for seed in range(20)]
    assert any(not x.any(axis=0).all() for x in drawn)  # a column of blocks without any
    assert any(not x.any(axis=1).all() for x in drawn)  # a row of blocks without any
