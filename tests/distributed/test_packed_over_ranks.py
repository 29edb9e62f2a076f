"""Packed sequences over ranks: whatever ranks and layouts, the results are those of one rank."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from halves import mostly_thorough
from hypothesis import given, settings
from hypothesis import strategies as st
from placement import same_bits
from ranks import OF_CODES, OverRanks, blocks_of, judge, served
from strategies import DTYPES, MASKS, problems

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, distributed, masks, scores
from cupyflash.distributed import DistributedError
from cupyflash.distributed.partition import schemes
from cupyflash.distributed.partition.layouts import KINDS
from cupyflash.problem import validate
from cupyflash.problem.options import Options
from cupyflash.testing import problem

SCHEMES = ("rounds", "gather", "nodes", "heads", "heads x rounds")


@mostly_thorough(
    "dtype",
    DTYPES,
    quick=DTYPES[2:3],
    why="the same steps; bfloat16 is quick where rows are not",
    ids=str,
)
def test_all_ranks_together_are_within_the_bound(dtype):
    kinds, schemes, blocks = (st.sampled_from(x) for x in (KINDS, SCHEMES, [1, 4, 8, 16]))

    @settings(max_examples=settings().max_examples // 5)
    @given(problems(dtype, packed=True), st.integers(1, 6), kinds, kinds, schemes, blocks)
    def check(p, size, kind, kind_k, scheme, block):
        size, scheme = served(p, size, scheme)
        longest = max(p.q.shape[-2], p.k.shape[-2])
        judge(p, OverRanks(size, kind, kind_k, scheme=scheme), max(block, longest // 16))

    check()


OFFSETS = [0, 3, 3, 20, 41, 45], [0, 7, 19, 30, 30, 61]


@mostly_thorough(
    "mask", [*MASKS, *(f"~{name}" for name in MASKS)],
    quick=["causal", "segments", "lengths", "user"], why="the same steps under other masks",
)  # fmt: skip
def test_masks_see_the_positions_of_their_sequence(mask):
    for bias in ("float32", None):
        p = problem(
            "float32", (4, 45, 8), (2, 61, 8), mask=mask, scores=("alibi", "relative_bias"),
            bias=bias, sink="float32", dlse=True, tiles=(8, 8), seed=len(mask), offsets=OFFSETS,
        )  # fmt: skip
        judge(p, OverRanks(3, "proofs", "zigzag", scheme="rounds"), 4)


LENGTHS = (
    [0, 30, 5, 2, 0, 7, 9, 1, 0, 6, 8, 4, 4, 5, 3],
    [0, 30, 6, 3, 2, 0, 8, 1, 0, 6, 5, 4, 5, 4, 2],
)
ENDS = np.cumsum(LENGTHS, axis=1).tolist()


@pytest.mark.parametrize("mask", ["segments", "dense", "causal", None])
def test_sequences_that_are_whole_are_computed_together(mask):
    p = problem(
        "float32", (4, ENDS[0][-1], 8), (2, ENDS[1][-1], 8), mask=mask, bias="float32",
        scores=("alibi",), dropout=0.3, tiles=(8, 8), seed=5, offsets=ENDS,
    )  # fmt: skip
    over = OverRanks(3, "contiguous", "contiguous")
    judge(p, over, 16)
    with blocks_of(16):
        comm = over.threads.ranks[1]
        layouts = over.layouts(comm, p.q, p.k, p.v, None, ENDS)
        arrays = layouts[0].take(p.q), layouts[1].take(p.k), layouts[1].take(p.v)
        totals = tuple(each.length for each in layouts)
        call = validate.varlen_call(*arrays, *ENDS, True, totals=totals)
        pieces = schemes.plan(call, *layouts, "rounds", comm.nodes).steps[0].pieces
    assert any(len(piece.sequences) > 1 and piece.sequences.start > 1 for piece in pieces)


@pytest.mark.parametrize(("size", "kind"), list(zip([2, 5, 3, 4, 2], KINDS, strict=True)))
def test_the_same_pairs_are_dropped(size, kind):
    (rows, keys), heads = (ends[-1] for ends in OFFSETS), 3
    q, k, v = np.zeros((heads, rows, 4)), np.zeros((1, keys, 4)), np.eye(keys)[None]
    options = {"dropout": 0.5, "seed": 9}
    whole, vjp = cupyflash.attention_varlen_vjp(q, k, v, *OFFSETS, **options)
    over = OverRanks(size, kind, kind)
    with blocks_of(4):
        out, lse = over.attention(q, k, v, *OFFSETS, return_lse=True, **options)
        assert np.array_equal(out != 0, whole != 0)
        do = np.random.default_rng(0).standard_normal(out.shape)
        ours = over.attention_backward(do, q, k, v, out, lse, *OFFSETS, **options)
    for mine, theirs in zip(ours[:3], vjp(do)[:3], strict=True):
        assert np.allclose(mine, theirs, rtol=1e-12, atol=1e-12)


def against_one_rank(over, offsets, block, **options):
    """Compare with the calls of one rank, in float64."""
    rng, (rows, keys) = np.random.default_rng(0), (ends[-1] for ends in offsets)
    q, k, v, do = (rng.standard_normal((3, n, 8)) for n in (rows, keys, keys, rows))
    expected, vjp = cupyflash.attention_varlen_vjp(q, k, v, *offsets, **options)
    with blocks_of(block):
        out, lse = over.attention(q, k, v, *offsets, return_lse=True, **options)
        ours = over.attention_backward(do, q, k, v, out, lse, *offsets, **options)
    np.testing.assert_allclose(out, expected, atol=1e-12)
    for mine, theirs in zip(ours, vjp(do), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            np.testing.assert_allclose(mine, theirs, atol=1e-12)


@pytest.mark.parametrize(("offsets", "block"), [(OFFSETS, 4), (ENDS, 16)], ids=["few", "many"])
@pytest.mark.parametrize("axes", ["nhqk", "hqk", "n11k", "q1", "k", ""])
def test_gradients_of_any_bias(axes, offsets, block):
    """Every rank has all of it, and the same sums over ranks."""
    rows, keys = (int(np.diff(ends).max()) for ends in offsets)
    sizes = {"n": len(offsets[0]) - 1, "h": 3, "q": rows, "k": keys, "1": 1}
    bias = np.random.default_rng(1).standard_normal([sizes[axis] for axis in axes])
    against_one_rank(OverRanks(3, "cyclic", "contiguous"), offsets, block, bias=bias)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_arrays_of_packed_rows_and_of_sequences_are_read_at_their_places(kind):
    rng, count = np.random.default_rng(1), len(ENDS[0]) - 1
    ids = [rng.integers(0, 2, ends[-1]) for ends in ENDS]
    mask = masks.segments(*ids) & masks.lengths(rng.integers(0, 9, count))
    slopes = rng.standard_normal((count, 3))
    against_one_rank(
        OverRanks(3, kind, kind), ENDS, 16, mask=mask, score_mod=scores.alibi(slopes)
    )  # fmt: skip


def steps_of_all(offsets, mask, size, kind):
    """The layout and the steps of each rank."""
    total, made = offsets[-1], []
    for comm in distributed.Threads(size).ranks:
        layout = distributed.layout(comm, total, kind=kind, offsets_q=offsets)
        x = np.zeros((1, layout.count, 4), np.float32)
        call = validate.varlen_call(
            x, x, x, offsets, offsets, True, Options(mask=mask), totals=(total, total)
        )
        made.append((layout, schemes.plan(call, layout, layout, "rounds", comm.nodes).steps))
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        (None, None),
        (masks.causal(), lambda i, j: j <= i),
        (masks.window(2, 1), lambda i, j: (i - 2 <= j) & (j <= i + 1)),
    ],
    ids=["none", "causal", "window"],
)
def test_every_pair_of_a_sequence_is_computed_once_and_no_other(mask, seen, kind):
    rng = np.random.default_rng(1)
    offsets = np.append(0, np.cumsum(rng.integers(0, 12, 30)))
    total = int(offsets[-1])
    with blocks_of(4, chunks=3):
        made = steps_of_all(offsets, mask, 4, kind)
    ids = np.repeat(np.arange(30), np.diff(offsets))
    same = ids[:, None] == ids
    allowed = same & (seen(np.arange(total)[:, None], np.arange(total)) if seen else True)
    count = np.zeros((total, total), int)
    for rank, (layout, steps) in enumerate(made):
        rows = [piece.rows for step in steps for piece in step.pieces if piece.first]
        assert sorted(n for run in rows for n in run) == sorted(layout.positions)
        for number, step in enumerate(steps):
            for peer, runs in step.receives.items():
                assert made[peer][1][number].sends[rank] == runs
            for piece in step.pieces:
                if not piece.keys:
                    continue
                step.keys.rows(piece.keys)  # they are there
                at = np.ix_(piece.rows, piece.keys)
                count[at] += same[at] & (np.isin(ids[at[0]], piece.sequences))
    assert count.max() == 1
    assert np.all(count[allowed] == 1)
    assert not count[~same].any()


def test_many_sequences_are_few_pieces_and_stay_where_they_are():
    """Only those that a boundary between ranks cuts are sent, and computed on their own."""
    length, each = 4096, 10
    offsets = [*range(0, length, each), length]
    with blocks_of(128):
        made = steps_of_all(offsets, masks.causal(), 4, "contiguous")
    for _, steps in made:
        assert sum(len(step.pieces) for step in steps) <= 5
        assert sum(runs.count for step in steps for runs in step.receives.values()) < 2 * each


def test_layouts_weigh_pairs_of_one_sequence_only():
    """All rows are as many, but those of the long sequence have most of the pairs."""
    offsets = [0, 1024, *range(1024 + 16, 2049, 16)]
    for kinds in (distributed.prices(4, 2048, offsets_q=offsets),
                  distributed.prices(4, 2048, offsets_q=offsets, offsets_k=offsets)):  # fmt: skip
        assert kinds["contiguous"].imbalance > 1.9
        assert kinds["proofs"].imbalance < 1.1
    joined = masks.segments(np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)))
    theirs = distributed.prices(4, 2048, mask=joined)
    assert theirs["cyclic"].received == kinds["cyclic"].received


def test_gradients_by_the_function_of_the_forward_are_the_same():
    rng = np.random.default_rng(0)
    q, k, do = (rng.standard_normal((2, n, 8), dtype=np.float32) for n in (45, 61, 45))
    over = OverRanks(2)

    def work(comm):
        layout, layout_k = over.layouts(comm, q, k, k, None, OFFSETS)
        own, keys, dout = layout.take(q), layout_k.take(k), layout.take(do)
        more = {"comm": comm, "layout": layout, "layout_k": layout_k}
        arrays = own, keys, keys
        out, lse, vjp = distributed.attention_varlen_vjp(*arrays, *OFFSETS, return_lse=True, **more)
        ours = distributed.attention_varlen_backward(dout, *arrays, out, lse, *OFFSETS, **more)
        for mine, theirs in zip(ours[:3], vjp(dout)[:3], strict=True):
            assert same_bits(mine, theirs)
        assert "attention_varlen_backward" in str(vjp._request.backward_name)

    with blocks_of(8):
        distributed.Threads(2).run(work)


@pytest.mark.parametrize("backward", ["", "_backward", "_vjp"])
def test_options_are_those_of_one_rank(backward):
    ours, theirs, dense = (
        inspect.signature(function).parameters
        for function in (
            getattr(distributed, f"attention_varlen{backward}"),
            getattr(cupyflash, f"attention_varlen{backward}"),
            getattr(distributed, f"attention{backward}"),
        )
    )
    assert set(ours) == (set(theirs) - {"workspace", *OF_CODES}) | set(dense)
    for name in ours:
        assert ours[name] == (dense[name] if name in dense else theirs[name])


def call(comm, offsets_q=(0, 100, 300), offsets_k=None, cut=None):
    x = np.zeros((2, 300, 8), np.float32)
    layout = distributed.layout(comm, 300)
    own = layout.take(x)[:, :cut]
    ends = offsets_q, offsets_q if offsets_k is None else offsets_k
    return distributed.attention_varlen(own, own, own, *ends, comm=comm, layout=layout)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"offsets_q": (0, 100, 299)}, r"offsets_q: runs from 0 to 299; expected 0 to 300"),
        ({"offsets_q": (0, 200, 100, 300)}, "offsets_q: entry 2 is 100, smaller than 200"),
        ({"offsets_k": (0, 300)}, "offsets_k: got 1 sequences, but there are 2 in offsets_q"),
        ({"cut": 100}, "q: got 100 positions; expected 172, those that the layout"),
    ],
)
def test_a_rank_with_a_wrong_argument_stops_all(wrong, words):
    threads = distributed.Threads(2)
    with pytest.raises(DistributedError, match=f"rank 1 raised Argument.*{words}"):
        threads.run(lambda comm: call(comm, **(wrong if comm.rank else {})))


def test_ranks_with_other_offsets_stop_before_anything_is_sent():
    threads = distributed.Threads(2)
    with pytest.raises(DistributedError, match=r"offsets_q: \(3,\) of int64 \[\w+\] on rank 0; "):
        threads.run(lambda comm: call(comm, (0, 100 + comm.rank, 300)))


def test_offsets_of_a_layout_are_checked():
    comm = distributed.Threads(2).ranks[0]
    with pytest.raises(ArgumentError, match="offsets_q: runs from 0 to 9; expected 0 to 10"):
        distributed.layout(comm, 10, offsets_q=[0, 9])
    with pytest.raises(ArgumentError, match="got 1 sequences, but there are 2 in offsets_q"):
        distributed.prices(2, 10, offsets_q=[0, 9, 10], offsets_k=[0, 10])
    with pytest.raises(ArgumentError, match="offsets_k: it needs offsets_q"):
        distributed.layout(comm, 10, offsets_k=[0, 10])
    with pytest.raises(ArgumentTypeError, match="offsets_q: got shape"):
        distributed.layout(comm, 10, offsets_q=[0.5, 10])
