"""Layouts: every position once, whole blocks, and the cheapest kind by the mask's own proofs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import blocks_of

from cupyflash import ArgumentError, ArgumentTypeError, distributed, lookup, masks
from cupyflash.distributed.partition import divisions
from cupyflash.distributed.partition.intervals import Intervals
from cupyflash.distributed.partition.layouts import KINDS

FIRST_QUERIES = masks.mask(lambda b, h, i, j: i < 50)  # have all of the work


def rank_of(size, rank=0):
    return distributed.Threads(size).ranks[rank]


@given(st.integers(0, 5000), st.integers(1, 9), st.sampled_from(KINDS), st.integers(1, 300),
       st.sampled_from([None, masks.causal(), FIRST_QUERIES]))  # fmt: skip
def test_every_position_is_held_once_in_whole_blocks(length, size, kind, block, mask):
    with blocks_of(block, chunks=3):
        made = [distributed.layout(comm, length, kind=kind, mask=mask)
                for comm in distributed.Threads(size).ranks]  # fmt: skip
    assert all(each.runs == made[0].runs for each in made)
    positions = np.concatenate([each.positions for each in made])
    assert np.array_equal(np.sort(positions), np.arange(length))
    for each in made:
        assert each.count == len(each.positions)
        assert np.all(np.diff(each.positions) > 0)
        for run in each.own:
            assert run.start % block == 0
            assert run.stop % block == 0 or run.stop == length
    counts = [each.count for each in made]
    stripes = {"zigzag": 2, "proofs": 2}.get(kind, 1)  # proofs balance pairs
    assert max(counts) - min(counts) <= stripes * made[0].chunk * 2


@pytest.mark.parametrize("kind", KINDS)
def test_taking_and_putting_are_inverse(kind, tmp_path):
    length = 70
    x = np.random.default_rng(0).standard_normal((2, length, 3))
    file = np.memmap(tmp_path / "x", x.dtype, "w+", shape=x.shape)
    with blocks_of(8):
        for comm in distributed.Threads(3).ranks:
            layout = distributed.layout(comm, length, kind=kind)
            own = layout.take(x)
            assert np.array_equal(own, x[:, layout.positions])
            layout.put(own, file)
            ids = np.arange(length)
            assert np.array_equal(layout.take(ids, axis=-1), layout.positions)
            assert np.array_equal(layout.take(x.swapaxes(0, 1), axis=0), own.swapaxes(0, 1))
    assert np.array_equal(file, x)


def test_wrong_lengths_are_refused():
    layout = distributed.layout(rank_of(2), 300)
    x = np.zeros((1, 299, 2))
    with pytest.raises(ArgumentError, match=r"got 299 positions on axis -2; expected 300, all of"):
        layout.take(x)
    with pytest.raises(ArgumentError, match=r"put: got 299 positions on axis -2; expected 128"):
        layout.put(x, np.zeros((1, 300, 2)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "mask",
    [masks.causal(), masks.window(30, 0), masks.segments(np.repeat(np.arange(8), 20)), None],
    ids=["causal", "window", "segments", "none"],
)
def test_prices_are_those_of_the_pairs(mask, kind):
    """Counted pair by pair; what a mask hides in part counts half, chunk by chunk."""
    size, length = 4, 160
    with blocks_of(4, chunks=10):
        price = distributed.prices(size, length, mask=mask)[kind]
        layout = distributed.layout(rank_of(size), length, mask=mask, kind=kind)
    assert layout.price == price
    allowed = np.ones((1, 1, length, length), bool)
    if mask is not None:
        allowed = mask.to_array(1, 1, length, length)
    chunks = allowed[0, 0].reshape(40, 4, 40, 4).sum(axis=(1, 3))
    weights = np.where(chunks == 0, 0, np.where(chunks == 16, 16, 8))
    owners = np.empty(40, int)
    for rank, runs in enumerate(layout.runs):
        for run in runs:
            owners[run.start // 4 : run.stop // 4] = rank
    work = [weights[owners == rank].sum() for rank in range(size)]
    keys = [((weights[owners == r] > 0).any(axis=0) & (owners != r)).sum() * 4 for r in range(size)]
    assert price.imbalance == max(work) / np.mean(work)
    assert price.received == max(keys) / length
    costs = [w + divisions.PAIRS_PER_KEY * k for w, k in zip(work, keys, strict=True)]
    assert price.cost == max(costs)


def documents(length, count, seed=0):
    ids = np.zeros(length, np.int64)
    ids[np.random.default_rng(seed).choice(length, count - 1, replace=False)] = 1
    return np.cumsum(ids)


LENGTH = 2**20
CHEAPEST = {
    "causal": (masks.causal(), "zigzag"),
    "window": (masks.window(2**16, 0), "contiguous"),
    "documents": (masks.causal() & masks.segments(documents(LENGTH, 64)), "documents"),
    "prefix or window": (
        masks.causal() & (masks.prefix(2**12) | masks.window(2**15, 0)),
        "contiguous",
    ),
}


@pytest.mark.parametrize("name", CHEAPEST)
def test_the_cheapest_layout_is_chosen(name):
    mask, wanted = CHEAPEST[name]
    made = distributed.layout(rank_of(64), LENGTH, mask=mask)
    assert made.kind == wanted
    assert made.price.imbalance < 1.05
    found = distributed.prices(64, LENGTH, mask=mask)
    assert found[wanted] == made.price
    assert found[wanted].cost == min(price.cost for price in found.values())


LENGTHS = [900, 77, 130, 512, 300, 45, 641, 128, 250, 17, 700, 300]


def runs_of(lengths):
    return np.repeat(np.arange(len(lengths)), lengths)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_documents_stay_whole_and_are_dealt_nearly_as_well_as_can_be(size, causal):
    mask = masks.segments(runs_of(LENGTHS))
    if causal:
        mask &= masks.causal()
    length, ends = sum(LENGTHS), np.cumsum(LENGTHS)
    made = distributed.layout(rank_of(size), length, mask=mask)
    assert (made.kind, made.price.received) == ("documents", 0)
    found = {end for runs in made.runs for run in runs for end in (run.start, run.stop)}
    assert found <= {0, *ends}
    if size > 2:
        return  # there are too many ways to deal them
    work, sizes = (np.array(LENGTHS, float) ** n for n in (2, 1))
    shares = np.stack([work / work.sum(), sizes / length]) * size
    best = np.inf
    for number in range(size ** (len(LENGTHS) - 1)):
        owners = number // size ** np.arange(len(LENGTHS)) % size
        best = min(best, np.stack([np.bincount(owners, x, size) for x in shares]).max())
    found = [sum(LENGTHS[np.searchsorted(ends, run.stop)] for run in runs) for runs in made.runs]
    assert max(found) * size <= 1.06 * best * length
    assert made.price.imbalance <= 1.06 * best


def test_documents_that_are_too_long_for_a_rank_are_cut():
    mask = masks.causal() & masks.segments(runs_of([6000, 500, 700, 300, 692]))
    found = distributed.prices(2, 8192, mask=mask)["documents"]
    assert found.imbalance < 1.1
    assert 0 < found.received < 0.6
    cut = distributed.layout(rank_of(2), 8192, mask=mask, kind="documents")
    others = {0, 6000, 6500, 7200, 7500, 8192}
    for runs in cut.runs:
        for run in runs:
            assert all(end in others or end % 512 == 0 for end in (run.start, run.stop))
    assert abs(cut.runs[0].count - 4096) < 512


def test_no_rank_gets_many_more_positions_than_others_for_the_sake_of_whole_documents():
    mask = masks.causal() & masks.segments(runs_of([2000, *[100] * 40]))
    made = distributed.layout(rank_of(2), 6000, mask=mask)
    assert max(runs.count for runs in made.runs) <= 3000 * 9 / 8


def test_sequences_are_documents_and_several_masks_have_those_of_all():
    offsets = np.cumsum([0, *LENGTHS])
    length = int(offsets[-1])
    made = distributed.layout(rank_of(2), length, offsets_q=offsets, mask=masks.causal())
    assert (made.kind, made.price.received) == ("documents", 0)
    first = masks.segments(np.arange(4096) // 512)
    other = masks.segments(np.arange(4096) // 768)
    both = distributed.layout(rank_of(2), 4096, mask=[first, other], kind="documents")
    whole = {0, 1536, 3072, 4096}  # where documents of both begin
    ends = {end for runs in both.runs for run in runs for end in (run.start, run.stop)}
    assert ends <= whole | set(range(0, 4096, 256))
    assert distributed.prices(2, 4096, mask=[first, other])["documents"].received <= 0.5


def test_without_documents_chunks_take_their_place():
    for mask in (None, masks.causal(), masks.window(100, 0)):
        made = distributed.layout(rank_of(3), 5000, mask=mask, kind="documents")
        assert sum(runs.count for runs in made.runs) == 5000
        assert made.price.imbalance < 1.2
    assert distributed.layout(rank_of(3), 0, mask=masks.causal(), kind="documents").count == 0


@pytest.mark.parametrize("mask", [
    masks.dilated(3) & masks.causal(),
    masks.dense(np.random.default_rng(0).random((768, 768)) < 0.5),
    masks.segments(np.arange(768) % 5),
    masks.prefix(9) | masks.segments(np.arange(768) // 100),
], ids=["dilated", "random", "interleaved", "prefix"])  # fmt: skip
def test_masks_whose_neighbours_do_not_see_each_other_need_not_have_documents(mask):
    assert distributed.layout(rank_of(2), 768, mask=mask).kind != "documents"
    chosen = distributed.layout(rank_of(2), 768, mask=mask, kind="documents")
    assert all(len(runs.ranges) <= 8 for runs in chosen.runs)


def test_masks_that_differ_between_heads_have_the_documents_of_all():
    ids = np.stack([np.arange(2048) // 512, np.arange(2048) // 1024])
    table = lookup(ids)
    mask = masks.mask(lambda b, h, i, j: table[h, i] == table[h, j])
    made = distributed.layout(rank_of(2), 2048, mask=mask, heads=2)
    assert made.price.received == 0
    assert [run for runs in made.runs for run in runs] == [range(1024), range(1024, 2048)]


def test_keys_that_travel_count_as_pairs():
    """All ranks could compute as many pairs, but would need nearly all keys."""
    found = distributed.prices(64, LENGTH, mask=masks.window(2**18, 0))
    assert found["proofs"].imbalance < 1.01 < 1.1 < found["contiguous"].imbalance
    assert found["contiguous"].received < 0.3 < 0.9 < found["proofs"].received
    assert min(found, key=lambda kind: found[kind].cost) == "contiguous"


def test_several_masks_share_a_layout():
    every = [masks.causal(), masks.window(2**12, 0), None]
    one = [distributed.prices(8, 2**16, mask=mask)["zigzag"] for mask in every]
    together = distributed.prices(8, 2**16, mask=every)["zigzag"]
    assert together.received == max(price.received for price in one)
    assert min(x.imbalance for x in one) <= together.imbalance <= max(x.imbalance for x in one)


def test_masks_of_batch_entries_and_of_keys_of_another_sequence():
    lengths = masks.lengths(np.array([100, 600]))
    with pytest.raises(ArgumentError, match="expected one that broadcasts"):
        distributed.layout(rank_of(2), 1024, mask=lengths)
    keys = distributed.layout(rank_of(2), 2048, kind="contiguous")
    made = distributed.layout(rank_of(2), 1024, mask=lengths, lead=(2,), layout_k=keys)
    assert made.price.received == 0.5 * 640 / 1024  # the second rank's keys are beyond all lengths
    assert made.length == 1024


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"length": -1}, ArgumentError, "length: got -1; expected 0 or more"),
        ({"length": 2.5}, ArgumentTypeError, r"length: got 2\.5; expected an integer"),
        ({"kind": "stripes"}, ArgumentError, "kind='stripes'; expected \"auto\" or one of"),
        ({"heads": 0}, ArgumentError, "heads: got 0; expected 1 or more"),
        ({"mask": "causal"}, ArgumentTypeError, "mask: got str; expected a mask"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        distributed.layout(rank_of(2), **{"length": 10, **arguments})


def test_layouts_of_other_ranks_are_refused():
    with pytest.raises(ArgumentError, match="layout_k: got a layout of 3 ranks; expected one of 2"):
        distributed.layout(rank_of(2), 10, layout_k=distributed.layout(rank_of(3), 10))


@given(st.sets(st.integers(0, 40)))
def test_runs_know_the_row_of_every_position(positions):
    runs = Intervals.of(range(n, n + 1) for n in sorted(positions, reverse=True))
    held = [n for run in runs for n in run]
    assert held == sorted(positions)
    assert runs.count == len(positions)
    assert bool(runs) == bool(positions)
    for before, after in zip(runs.ranges, runs.ranges[1:], strict=False):
        assert before.stop < after.start
    for row, n in enumerate(held):
        assert runs.rows(range(n, n + 1)) == range(row, row + 1)
    cut = runs.cut(8)
    assert [n for each in cut for n in each] == held
    assert all(each.start // 8 == (each.stop - 1) // 8 for each in cut)


def test_runs_hold_a_position_once():
    with pytest.raises(ArgumentError, match=r"got range\(0, 5\) and range\(4, 6\); expected every"):
        Intervals.of([range(4, 6), range(5)])
