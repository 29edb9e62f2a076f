"""What the papers' family moves: worked by hand, and counted against the closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from family import BACKWARD, FORWARD, Case, arrays, cases, layout
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import analysis
from cupyflash.reference.algorithms import (
    block_sparse,
    causal_tiles,
    online_softmax,
    packed_qkv,
    safe_softmax,
)
from cupyflash.reference.algorithms.blocks import tiles_for
from cupyflash.reference.algorithms.hbm import Memory

# -- the counter ----------------------------------------------------------------------------------


def test_the_memory_counts_what_passes():
    hbm = Memory()
    hbm.place(a=np.arange(12.0).reshape(4, 3))
    hbm.make("b", (4,), float, 0)  # 4 zeros written
    block = hbm.load("a", slice(1, 3))  # 2 x 3 read
    hbm.store("b", hbm.hold("sums", block.sum(axis=1)), slice(1, 3))  # 2 written
    assert hbm.reads == {"a": 6}
    assert hbm.writes == {"b": 6}
    assert hbm.total == 12
    assert hbm.on_chip == {"a": 6, "sums": 2}
    assert hbm.peak == 8
    hbm.load("a", slice(0, 1))  # in the place of the 6
    assert hbm.on_chip == {"a": 3, "sums": 2}
    hbm.release("a")
    hbm.hold("sums", np.zeros(7))
    assert (sum(hbm.on_chip.values()), hbm.peak) == (7, 8)
    hbm.release()
    assert hbm.on_chip == {}
    assert hbm.result("b").tolist() == [0, 12, 21, 0]


def test_blocks_on_chip_are_not_the_arrays_in_hbm():
    hbm = Memory()
    a = np.zeros(3)
    hbm.place(a=a)
    hbm.load("a", slice(0, 2))[:] = 1
    assert not a.any()


def test_a_block_must_fit_its_place():
    hbm = Memory()
    hbm.make("o", (4, 2), float)
    with pytest.raises(ValueError, match=r"of shape \(2,\) does not fit o"):
        hbm.store("o", np.zeros(2), slice(0, 2))


# -- worked by hand -------------------------------------------------------------------------------


def counted(run: Callable[[Memory], Any]) -> analysis.Traffic:
    hbm = Memory()
    run(hbm)
    assert hbm.on_chip == {}, "left on chip"
    return analysis.Traffic(dict(hbm.reads), dict(hbm.writes), hbm.peak)


# A case, and what its algorithm moves: reads, writes, peak.
BY_HAND = {
    "standard": (
        # S and P are 2 x 3, each written and read once. On chip at most Q, K and S: 4 + 6 + 6.
        Case(2, 3, 2, 1, 2, 3),
        {"q": 4, "k": 6, "s": 6, "p": 6, "v": 3},
        {"s": 6, "p": 6, "o": 2},
        16,
    ),
    "standard_backward": (
        # p and ds twice, dp once, do in lines 1 and 2. On chip in line 1: dv 3, p 6, do 2; in line
        # 4: dq 4, ds 6, k 6.
        Case(2, 3, 2, 1, 2, 3),
        {"p": 12, "dp": 6, "ds": 12, "do": 4, "v": 3, "k": 6, "q": 4},
        {"dp": 6, "ds": 6, "dq": 4, "dk": 6, "dv": 3},
        16,
    ),
    "one_pass": (
        # Query 0 sees 2 of 3 keys, query 1 all: 5 keys of 2, 5 values of 1. On chip: q 2, o 1, l,
        # m, k 2, v 1, s, m_new.
        Case(2, 3, 2, 1, 1, 1, causal=True),
        {"q": 4, "k": 10, "v": 5},
        {"o": 2},
        10,
    ),
    "flash_attention": (
        # 2 blocks of keys, so 2 passes over q (3 x 2), o (3 x 1), l and m (3); o, l and m are also
        # initialised. On chip: k 6, v 3, q 4, o 2, six vectors of 2, s 6.
        Case(3, 5, 2, 1, 2, 3),
        {"k": 10, "v": 5, "q": 12, "o": 6, "l": 6, "m": 6},
        {"o": 9, "l": 9, "m": 9},
        33,
    ),
    "flash_attention_backward": (
        # 2 passes over q, dq (2 x 2), o, do (2 x 1), l and m. On chip: k, dk 8, v, dv 4, q, dq 8,
        # o, do 4, l, m, delta 6, p, dp 8.
        Case(2, 3, 2, 1, 2, 2),
        {"k": 6, "v": 3, "q": 8, "dq": 8, "o": 4, "do": 4, "l": 4, "m": 4},
        {"dq": 12, "dk": 12, "dv": 6},
        38,
    ),
    "flash_attention_2": (
        # Queries 0 and 1 visit the first of two tiles, 2 and 3 both: 2 + 4 keys. On chip: q 4,
        # o 4, m, l and the new m 6, k 4, v 4, s 4.
        Case(4, 4, 2, 2, 2, 2, causal=True),
        {"q": 8, "k": 12, "v": 12},
        {"o": 8, "lse": 4},
        26,
    ),
    "flash_attention_3": (
        # While tile 1's softmax runs: q, o, l, m and the old m of 2 each, k 2, v 2, two tiles of 4.
        Case(2, 4, 1, 1, 2, 2),
        {"q": 2, "k": 4, "v": 4},
        {"o": 2, "lse": 2},
        22,
    ),
    "rabe_staats": (
        # 2 chunks of keys leave 2 outputs, sums and maxima for each of 2 queries. On chip: q 2,
        # k 2, v 2, s 4, and values, weights and maxima of 2 each; later chunks' weights and maxima
        # 8, those of all 4, values of a chunk and of all 4.
        Case(2, 3, 1, 1, 2, 2),
        {"q": 2, "k": 3, "v": 3, "chunk_values": 4, "chunk_weights": 4, "chunk_max": 4},
        {"chunk_values": 4, "chunk_weights": 4, "chunk_max": 4}
        | {"o": 2, "global_max": 2, "all_weights": 2},
        16,
    ),
    "rabe_staats_backward": (
        # One chunk of queries: dk and dv are zeroed, then read and written once. On chip: q, do,
        # o, dq 8, delta, both maxima and weights 8, k, v, dk, dv 8, s 4, ds 4.
        Case(2, 3, 1, 1, 2, 2),
        {"q": 2, "do": 2, "o": 2, "global_max": 2, "all_weights": 2}
        | {"k": 3, "v": 3, "dk": 3, "dv": 3},
        {"dq": 2, "dk": 6, "dv": 6},
        32,
    ),
    "split_kv": (
        # One query, read by both parts of 2 keys. On chip: q 2, o 1, m, l and the new m, k 4, v 2,
        # s 2.
        Case(1, 4, 2, 1, 1, 2, splits=2),
        {"q": 4, "k": 8, "v": 4, "o_parts": 2, "lse_parts": 2},
        {"o_parts": 2, "lse_parts": 2, "o": 1, "lse": 1},
        14,
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_worked_by_hand(name):
    case, reads, writes, peak = BY_HAND[name]
    member = (FORWARD | BACKWARD)[name]
    wanted = analysis.Traffic(reads, writes, peak)
    assert counted(lambda hbm: member.run(case, hbm)) == wanted
    assert member.traffic(case) == wanted
    assert wanted.total == sum(reads.values()) + sum(writes.values())


def test_block_sparse_by_hand():
    # Blocks (0, 0) and (1, 1) of 2 x 2: every row passes once, and o, l, m are initialised. On chip
    # with a tile: k 2, v 2, q 2, o 2, six vectors of 2, s 4, and the layout's entry.
    q, k, v, _ = arrays(Case(4, 4, 1, 1, 2, 2))
    diagonal = np.eye(2, dtype=bool)
    made = counted(
        lambda hbm: block_sparse.forward(q, k, v, diagonal, block_q=2, block_kv=2, hbm=hbm)
    )
    wanted = analysis.Traffic(
        {"k": 4, "v": 4, "layout": 4, "q": 4, "o": 4, "l": 4, "m": 4},
        {"o": 8, "l": 8, "m": 8},
        25,
    )
    assert made == wanted
    assert analysis.block_sparse_attention(diagonal, 4, 4, 1, block_q=2, block_kv=2) == wanted


@pytest.mark.parametrize(
    ("run", "closed", "accesses"),
    [
        (safe_softmax.softmax, analysis.safe_softmax, 4),
        (online_softmax.softmax, analysis.online_softmax, 3),
    ],
)
def test_softmax_accesses_per_element(run, closed, accesses):
    x = np.random.default_rng(0).standard_normal((3, 7))
    made = counted(lambda hbm: run(x, hbm))
    assert made == closed(3, 7)
    assert made.total == accesses * x.size  # Milakov & Gimelshein, sections 2 and 3


# -- counted = closed form ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
@given(data=st.data())
def test_counted_is_closed_form(name, data):
    member = (FORWARD | BACKWARD)[name]
    case = data.draw(cases(member.knows))
    assert counted(lambda hbm: member.run(case, hbm)) == member.traffic(case)


@given(
    n=st.integers(1, 10),
    heads=st.integers(1, 3),
    blocks=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    causal=st.booleans(),
)
def test_packed_heads_counted(n, heads, blocks, causal):
    qkv = np.random.default_rng(0).standard_normal((n, 3, heads, 4))
    given_options = {"block_q": blocks[0], "block_kv": blocks[1], "causal": causal}
    made = counted(lambda hbm: packed_qkv.forward(qkv, **given_options, hbm=hbm))
    assert made == analysis.packed_qkv(n, heads, 4, **given_options)


@given(
    sizes=st.tuples(*[st.integers(1, 40)] * 2),
    blocks=st.tuples(*[st.integers(1, 9)] * 2),
)
def test_tiles_counted(sizes, blocks):
    classes = causal_tiles.table(*sizes, *blocks)
    made = analysis.causal_tiles(*sizes, *blocks)
    assert list(made) == [int((classes == c).sum()) for c in range(3)]
    assert made.total == classes.size


@given(d=st.integers(1, 300), rows=st.integers(4, 4000))
def test_block_sizes_are_the_algorithms(d, rows):
    sram = rows * d - (rows > 4)
    assert tuple(tiles_for(sram, d)) == analysis.block_sizes(sram, d)


@given(data=st.data())
def test_the_layout_alone_sets_what_block_sparse_attention_moves(data):
    case = data.draw(cases(set()))
    tiles = layout(case)
    sparse = analysis.block_sparse_attention(tiles, *case.shape, **case.blocks)
    full = analysis.block_sparse_attention(np.ones_like(tiles), *case.shape, **case.blocks)
    dense = analysis.flash_attention(*case.shape, **case.blocks)
    assert full.reads == {**dense.reads, "layout": tiles.size}
    assert full.writes == dense.writes
    assert sparse.total <= full.total
    empty = analysis.block_sparse_attention(np.zeros_like(tiles), *case.shape, **case.blocks)
    assert "q" not in empty.reads


class Moved(Memory):
    """HBM that takes its own copies, and spoils the arrays that were given."""

    def place(self, **given: Any) -> None:
        super().place(**{name: x.copy() for name, x in given.items()})
        for x in given.values():
            x.fill(np.nan if x.dtype.kind == "f" else 0)


# The package's own kernels read arrays in place: their tiles are walked afterwards.
KERNELS = {"flash_attention_2", "split_kv"}


@pytest.mark.parametrize("name", sorted({*FORWARD, *BACKWARD} - KERNELS))
@given(data=st.data())
@settings(max_examples=10)
def test_only_the_memory_reaches_the_arrays(name, data):
    member = (FORWARD | BACKWARD)[name]
    case = data.draw(cases(member.knows))
    plain, moved = member.run(case, Memory()), member.run(case, Moved())
    plain, moved = (x if isinstance(x, tuple) else (x,) for x in (plain, moved))
    for a, b in zip(plain, moved, strict=True):
        assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
def test_inputs_stay_as_they_are(name, monkeypatch):
    case = Case(7, 8, 3, 2, 3, 3)
    held = arrays(case)
    monkeypatch.setattr("family.arrays", lambda case: held)
    (FORWARD | BACKWARD)[name].run(case, Memory())
    for after, before in zip(held, arrays(case), strict=True):
        assert np.array_equal(after, before)


# -- nothing of N^2 in HBM ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flash_attention", "flash_attention_backward"])
def test_flash_attention_needs_memory_of_order_n(name):
    case = Case(64, 64, 2, 2, 8, 8, dropout=0.5)
    hbm = Memory()
    (FORWARD | BACKWARD)[name].run(case, hbm)
    sizes = [hbm.result(name).size for name in (*hbm.reads, *hbm.writes)]
    assert max(sizes) <= 64 * 2


def test_gradients_of_standard_attention_move_more():
    # With the paper's blocks for an SRAM of 16384 elements, and standard attention's at their best.
    block_q, block_kv = analysis.block_sizes(16384, 64)
    flash = analysis.flash_attention_backward(4096, 4096, 64, block_q=block_q, block_kv=block_kv)
    assert analysis.standard_attention_backward(4096, 4096, 64).total > 1.3 * flash.total
