"""Calls over ranks: whatever ranks, layouts and schemes, the results are those of one rank."""

from __future__ import annotations

import copy
import inspect
import pickle
import tracemalloc
from dataclasses import fields

import numpy as np
import pytest
from halves import mostly_thorough
from hypothesis import given, settings
from hypothesis import strategies as st
from placement import same_bits
from ranks import OF_CODES, OverRanks, blocks_of, judge, served
from strategies import DTYPES, MASKS, problems

import cupyflash
from cupyflash import ArgumentTypeError, distributed, masks, scores
from cupyflash.distributed.partition.layouts import KINDS
from cupyflash.problem.options import Options
from cupyflash.testing import problem

KEYS_TRAVEL = ("rounds", "gather")
SCHEMES = (*KEYS_TRAVEL, "nodes", "heads", "heads x rounds")
BY_DTYPE = mostly_thorough(
    "dtype",
    DTYPES,
    quick=DTYPES[1:2],
    why="the same steps; float32 is quick where rows are packed",
    ids=str,
)


@BY_DTYPE
def test_all_ranks_together_are_within_the_bound(dtype):
    @settings(max_examples=settings().max_examples // 4)
    @given(problems(dtype), st.integers(1, 7), st.sampled_from(KINDS), st.sampled_from(KINDS),
           st.sampled_from(SCHEMES), st.sampled_from([1, 4, 8, 16]))  # fmt: skip
    def check(p, size, kind, kind_k, scheme, block):
        size, scheme = served(p, size, scheme)
        longest = max(p.q.shape[-2], p.k.shape[-2])
        judge(p, OverRanks(size, kind, kind_k, scheme=scheme), max(block, longest // 16))

    check()


@mostly_thorough(
    "mask", [*MASKS, *(f"~{name}" for name in MASKS)],
    quick=["causal with offset", "segments", "user", "~prefix"],
    why="the same steps under other masks",
)  # fmt: skip
def test_masks_see_the_positions_of_the_whole_sequence(mask):
    p = problem(
        "float32", (2, 4, 45, 8), (2, 2, 61, 8), mask=mask, scores=("alibi", "relative_bias"),
        bias="float32", sink="float32", dlse=True, tiles=(8, 8), seed=len(mask),
    )  # fmt: skip
    judge(p, OverRanks(3, "proofs", "zigzag", scheme="rounds"), 4)


@BY_DTYPE
def test_documents_of_any_lengths_are_within_the_bound(dtype):
    """Masks and scores read arrays with an element for each position, or for each eight."""
    lists = st.lists(st.integers(1, 30), min_size=1, max_size=9)

    @settings(max_examples=settings().max_examples // 4)
    @given(lists, st.integers(1, 4), st.sampled_from(KINDS), st.sampled_from(SCHEMES),
           st.booleans(), st.sampled_from([4, 8]), st.integers(0, 9))  # fmt: skip
    def check(lengths, size, kind, scheme, causal, block, seed):
        length, rng = sum(lengths), np.random.default_rng(seed)
        ids = np.repeat(np.arange(len(lengths)), lengths)
        mask = masks.segments(rng.permutation(len(lengths))[ids])
        if causal:
            mask &= masks.causal()
        p = problem(dtype, (2, 3, length, 8), (2, 1, length, 8), sink="float32", tiles=(8, 8),
                    dlse=True, dropout=0.3 * (seed == 0), seed=seed)  # fmt: skip
        of_rows, of_keys = (
            cupyflash.lookup(rng.standard_normal(n).astype(np.float32))
            for n in (length, -(-length // 8))
        )
        change = scores.score(lambda s, b, h, i, j: s + of_rows[i] - 0.5 * of_keys[j // 8])
        p.options.update(mask=mask, score_mod=change)
        size, scheme = served(p, size, scheme)
        judge(p, OverRanks(size, kind, "same", scheme=scheme), block)

    check()


@pytest.mark.parametrize(("size", "kind"), list(zip([2, 5, 3, 4, 2], KINDS, strict=True)))
def test_the_same_pairs_are_dropped(size, kind):
    rows, keys = 30, 41
    q, k, v = np.zeros((2, 3, rows, 4)), np.zeros((2, 1, keys, 4)), np.eye(keys)[None]
    options = {"dropout": 0.5, "seed": 9}
    whole, vjp = cupyflash.attention_vjp(q, k, v, **options)
    over = OverRanks(size, kind, kind)
    with blocks_of(4):
        out, lse = over.attention(q, k, v, return_lse=True, **options)
        assert np.array_equal(out != 0, whole != 0)
        assert 0.4 < (out != 0).mean() < 0.6
        do = np.random.default_rng(0).standard_normal(out.shape)
        ours = over.attention_backward(do, q, k, v, out, lse, **options)
    for mine, theirs in zip(ours[:3], vjp(do)[:3], strict=True):
        assert np.allclose(mine, theirs, rtol=1e-12, atol=1e-12)


def draw(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@mostly_thorough(
    ("kind", "scheme"), [(kind, scheme) for kind in KINDS for scheme in (*KEYS_TRAVEL, "nodes")],
    quick=[("contiguous", "gather"), ("zigzag", "rounds"), ("zigzag", "nodes")],
    why="the same order of sums elsewhere",
)  # fmt: skip
def test_repeats_are_bitwise_equal(kind, scheme):
    q, k, v, do = draw((3, 2, 50, 16), (3, 1, 70, 16), (3, 1, 70, 16), (3, 2, 50, 16))
    options = {"mask": masks.window(40, 10), "dropout": 0.2, "seed": 1, "sink": draw((2,))[0]}
    over = OverRanks(4, kind, kind, scheme=scheme)
    results = []
    with blocks_of(4):
        for _ in range(3):
            out, lse = over.attention(q, k, v, return_lse=True, **options)
            gradients = over.attention_backward(do, q, k, v, out, lse, **options)
            results.append([out, lse, *gradients[:3], gradients.dsink])
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            assert same_bits(ours, theirs)


MASKS_WITH_EMPTY_PAIRS = {
    "causal": masks.causal(),
    "window": masks.window(5, 2),
    "lengths": masks.lengths(np.array([20, 13])),
}


@mostly_thorough(
    ("name", "scheme"), [(x, y) for x in MASKS_WITH_EMPTY_PAIRS for y in KEYS_TRAVEL],
    quick=[("causal", "gather"), ("window", "rounds")], why="the same for other masks",
)  # fmt: skip
def test_keys_of_empty_pairs_change_no_bit(name, scheme):
    """What they hold does not matter, to the ranks that do not need them."""
    length, size, mask = 40, 3, MASKS_WITH_EMPTY_PAIRS[name]
    q, k, v, do = draw(*[(2, 2, length, 8)] * 4)
    over = OverRanks(size, "zigzag", "zigzag", scheme=scheme)
    with blocks_of(4):
        out, lse = over.attention(q, k, v, return_lse=True, mask=mask)
        dq = over.attention_backward(do, q, k, v, out, lse, mask=mask).dq
        layout = over.layouts(over.threads.ranks[0], q, k, k)[0]
        allowed = mask.to_array(2, 2, length, length)
        tried = 0
        for runs in layout.runs:
            mine = np.concatenate([np.arange(run.start, run.stop) for run in runs])
            hidden = ~allowed[..., mine, :].any(axis=(0, 1, 2))
            if not hidden.any():
                continue
            tried += 1
            poisoned = [np.where(hidden[:, None], np.float32(np.nan), x) for x in (k, v)]
            ours, our_lse = over.attention(q, *poisoned, return_lse=True, mask=mask)
            assert same_bits(ours[..., mine, :], out[..., mine, :])
            assert same_bits(our_lse[..., mine], lse[..., mine])
            our_dq = over.attention_backward(do, q, *poisoned, out, lse, mask=mask).dq
            assert same_bits(our_dq[..., mine, :], dq[..., mine, :])
    assert tried


@pytest.mark.parametrize("scheme", KEYS_TRAVEL)
def test_pairs_that_are_proven_empty_neither_travel_nor_run(scheme, monkeypatch):
    sent, length = [], 64
    (x,) = draw((1, 2, length, 8))
    over = OverRanks(4, scheme=scheme)
    send = type(over.threads.ranks[0]).exchange
    monkeypatch.setattr(
        type(over.threads.ranks[0]), "exchange",
        lambda comm, sends, receives: (
            sent.extend((comm.rank, peer, data.size) for peer, data in sends),
            send(comm, sends, receives),
        )[1],
    )  # fmt: skip
    with blocks_of(4, chunks=4):
        over.attention(x, x, x, mask=masks.window(4, 0))
    row = x.shape[1] * x.shape[-1] * x.itemsize
    assert sorted(sent) == sorted(2 * [(rank, rank + 1, 4 * row) for rank in range(3)])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_queries_without_keys_have_the_sink_alone(scheme):
    """Some ranks have no other query, and their part of the gradient of the sink is dlse."""
    q, k, do, sink, dlse = draw((1, 2, 40, 8), (1, 2, 40, 8), (1, 2, 40, 8), (2,), (1, 2, 40))
    options = {"mask": masks.lengths(np.array([9]), np.array([13])), "sink": sink}
    out, vjp = cupyflash.attention_vjp(q, k, k, **options)
    over = OverRanks({"heads": 2, "heads x rounds": 4, "nodes": 6}.get(scheme, 5), scheme=scheme)
    with blocks_of(4):
        ours, our_lse = over.attention(q, k, k, return_lse=True, **options)
        gradients = over.attention_backward(do, q, k, k, ours, our_lse, dlse=dlse, **options)
    assert not ours[..., 13:, :].any()
    assert same_bits(our_lse[..., 13:], np.broadcast_to(sink[:, None], (1, 2, 27)))
    np.testing.assert_allclose(ours, out, atol=1e-6)
    for mine, theirs in zip(gradients, vjp(do, dlse), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_is_as_good_as_contiguous(kind):
    p = problem(
        "bfloat16", (1, 4, 60, 16), (1, 2, 60, 16), mask="causal", dlse=True, tiles=(8, 8), seed=3
    )
    judge(p, OverRanks(5, kind, kind), 4)


@pytest.mark.parametrize("shape", [(1, 50), (50,), (2, 1, 1, 50), (40, 1), (3, 40, 50), ()])
def test_gradients_of_any_bias(shape):
    q, k, v, do = draw((2, 3, 40, 8), (2, 3, 50, 8), (2, 3, 50, 8), (2, 3, 40, 8))
    (bias,) = draw(shape)
    expected, vjp = cupyflash.attention_vjp(q, k, v, bias=bias)
    over = OverRanks(3, "cyclic", "contiguous")
    with blocks_of(4):
        out, lse = over.attention(q, k, v, bias=bias, return_lse=True)
        ours = over.attention_backward(do, q, k, v, out, lse, bias=bias).dbias
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_allclose(ours, vjp(do).dbias, atol=5e-5)


def test_a_rank_with_one_row_of_a_bias_asks_what_others_have():
    """Its bias (1, keys) may be its own row, or one for all: then dbias is a sum over ranks."""
    q, k, do = draw((1, 9, 4), (1, 9, 4), (1, 9, 4))
    with blocks_of(4, chunks=1):
        over = OverRanks(3)
        assert [runs.count for runs in over.layouts(over.threads.ranks[0], q, k, k)[0].runs] == [
            4,
            4,
            1,
        ]
        for rows in (9, 1):
            (bias,) = draw((rows, 9))
            out, vjp = cupyflash.attention_vjp(q, k, k, bias=bias)
            for check in (True, False):
                over = OverRanks(3, check=check)
                ours, lse = over.attention(q, k, k, bias=bias, return_lse=True)
                gradients = over.attention_backward(do, q, k, k, ours, lse, bias=bias)
                np.testing.assert_allclose(ours, out, atol=1e-6)
                np.testing.assert_allclose(gradients.dbias, vjp(do).dbias, atol=1e-5)


def test_results_go_where_the_caller_says():
    q, k, do = draw((2, 300, 8), (2, 300, 8), (2, 300, 8))

    def work(comm):
        layout = distributed.layout(comm, 300, mask=masks.causal())
        own, keys, dout = (layout.take(x) for x in (q, k, do))
        options = {"comm": comm, "layout": layout, "mask": masks.causal()}
        out, lse, vjp = distributed.attention_vjp(own, keys, keys, return_lse=True, **options)
        target, lse_target = np.empty_like(out), np.empty_like(lse)
        given = {"out": target, "lse_out": lse_target}
        assert distributed.attention(own, keys, keys, **given, **options) is target
        assert same_bits(target, out)
        assert same_bits(lse_target, lse)
        targets = [np.empty_like(x) for x in (own, keys, keys)]
        made = distributed.attention_backward(
            dout, own, keys, keys, out, lse, grads_out=targets, **options
        )
        for ours, target, theirs in zip(made, targets, vjp(dout), strict=False):
            assert ours is target
            assert same_bits(ours, theirs)
        assert copy.deepcopy(vjp) is vjp
        with pytest.raises(ArgumentTypeError, match=r"cupyflash\.distributed\.attention_backward"):
            pickle.dumps(vjp)

    distributed.Threads(2).run(work)


@pytest.mark.parametrize("name", ["attention", "attention_backward", "attention_vjp"])
def test_options_are_those_of_one_rank(name):
    """With the same types and defaults, in the same order; and those of ranks are the same."""
    ours = inspect.signature(getattr(distributed, name)).parameters
    theirs = inspect.signature(getattr(cupyflash, name)).parameters
    own = ["comm", "layout", "layout_k", "scheme", "check", "timeout"]
    options = [field.name for field in fields(Options)]
    assert [x for x in ours if x in options] == options
    assert [x for x in ours if x in own] == own
    others = {"check", "workspace", "reductions", *OF_CODES}  # which ranks do not have
    assert set(ours) - set(own) == set(theirs) - others
    for parameter in set(ours) - set(own):
        assert ours[parameter].default == theirs[parameter].default
        assert ours[parameter].annotation == theirs[parameter].annotation
    reference = inspect.signature(distributed.attention).parameters
    assert [ours[x] for x in own] == [reference[x] for x in own]


def test_arguments_that_a_function_does_not_have_are_explained():
    with pytest.raises(ArgumentTypeError, match=r"causal: .*say mask=masks\.causal"):
        distributed.attention(causal=True)


@mostly_thorough(
    "scheme",
    ["rounds", "nodes", "heads", "heads x rounds"],
    quick=["rounds"],
    why="schemes by one formula",
)
@pytest.mark.parametrize("backward", [False, True])
def test_memory_is_what_the_page_says(backward, scheme):
    """Ranks that are threads have a copy of every message in addition."""
    ranks, heads = {"heads x rounds": (4, 2), "nodes": (6, 3)}.get(scheme, (3, 3))
    nodes = 3 if scheme == "nodes" else 1
    c, dim, size = 1024, 64, 4  # positions of a rank; bytes of an element
    x = np.zeros((heads, ranks * c, dim), np.float32)

    def work(comm):
        layout = distributed.layout(comm, ranks * c)
        own = layout.take(x)
        options = {"comm": comm, "layout": layout, "scheme": scheme}
        out, lse = distributed.attention(own, own, own, return_lse=True, **options)
        if backward:
            distributed.attention_backward(out, own, own, own, out, lse, **options)

    distributed.Threads(ranks, nodes).run(work)  # compiles
    peaks = []
    for _ in range(8):  # how many copies there are at once depends on which rank comes first
        tracemalloc.start()
        distributed.Threads(ranks, nodes).run(work)
        peaks.append(tracemalloc.get_traced_memory()[1] / ranks)
        tracemalloc.stop()
    peak = min(peaks)
    rows, keys = size * heads * dim * c, 2 * size * heads * dim * c
    said = (2 * rows + 8 * keys) if backward else (rows + 3 * keys)
    if scheme == "nodes":
        said = (2 * rows + 16 * keys) if backward else (rows + 8 * keys)
    if scheme == "heads":
        said = 3 * (rows + keys + (2 * rows if backward else 0))
    elif scheme == "heads x rounds":
        said += (4 * rows + 2 * keys) if backward else (2 * rows + keys)
    copies = (2 if backward else 1) * keys
    if scheme == "heads":  # q, and in the backward do and out, travel, too
        copies = keys + (3 if backward else 1) * rows
    results_too = (4 if backward else 1) * rows
    assert 0.75 * said < peak < 1.05 * (said + copies + results_too)


@pytest.mark.parametrize("mask", [None, masks.window(9, 9)], ids=["none", "window"])
def test_chunks_of_queries_may_end_inside_of_those_of_keys(mask):
    """The backward cuts a rank's only run of queries, but no chunk of keys."""
    rng = np.random.default_rng(1)
    q, k, v, do = (rng.standard_normal((2, rows, 8)) for rows in (80, 40, 40, 80))
    with blocks_of(4):
        over = OverRanks(2, scheme="rounds")
        layouts = over.layouts(over.threads.ranks[0], q, k, v)
        assert [layout.chunk for layout in layouts] == [20, 12]
        out, lse = over.attention(q, k, v, mask=mask, return_lse=True)
        ours = over.attention_backward(do, q, k, v, out, lse, mask=mask)
    theirs = cupyflash.attention_backward(do, q, k, v, out, lse, mask=mask)
    for mine, other in zip(ours[:3], theirs[:3], strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-12)
