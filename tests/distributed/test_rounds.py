"""Rounds: who needs whose keys, and when they travel."""

from __future__ import annotations

import numpy as np
import pytest
from halves import mostly_thorough
from hypothesis import given
from hypothesis import strategies as st
from ranks import blocks_of

from cupyflash import distributed, expr, lookup, masks, scores
from cupyflash.distributed.partition import exchange_schedule, schemes
from cupyflash.distributed.partition.layouts import KINDS
from cupyflash.problem import validate
from cupyflash.problem.options import Options


@given(st.data())
def test_pairs_are_divided_into_the_fewest_rounds(data):
    size = data.draw(st.integers(1, 12))
    every = [(o, u) for o in range(size) for u in range(size) if o != u]
    pairs = data.draw(st.lists(st.sampled_from(every), unique=True)) if every else []
    sends, receives = (np.bincount([p[n] for p in pairs], minlength=1) for n in (0, 1))
    most = int(max(sends.max(), receives.max()))
    made = exchange_schedule.coloured(pairs, size, most)
    assert len(made) == most
    assert sorted(pair for each in made for pair in each) == sorted(pairs)
    for each in made:
        assert len({owner for owner, _ in each}) == len({user for _, user in each}) == len(each)


def steps_of_all(mask, size, kind, scheme, length=96):
    x = np.zeros((1, length, 4), np.float32)
    made = []
    for comm in distributed.Threads(size).ranks:
        layout = distributed.layout(comm, length, kind=kind)
        call = validate.call(*[x] * 3, Options(mask=mask))
        made.append((layout, schemes.plan(call, layout, layout, scheme, comm.nodes).steps))
    return made


@mostly_thorough(
    ("mask", "most"),
    [
        (masks.causal(), 5),
        (masks.window(10, 0), 1),
        (masks.window(10, 10), 2),
        (None, 5),
        (masks.lengths(np.array([10]), np.array([20])), 1),  # most queries see no key
    ],
    quick=lambda case: case[1] != 2,
    why="the same rounds for other masks",
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["rounds", "gather"])
def test_every_allowed_pair_is_computed_once_and_its_keys_are_there(mask, most, kind, scheme):
    size, length = 6, 96
    with blocks_of(4):
        made = steps_of_all(mask, size, kind, scheme)
    numbers = {len(steps) for _, steps in made}
    assert len(numbers) == 1  # every rank takes part in every round
    if scheme == "gather":
        assert numbers == {2}
    elif kind == "contiguous":
        assert numbers == {most + 1}
    allowed = np.ones((length, length), bool) if mask is None else mask.to_array(1, 1, 96, 96)[0, 0]
    count = np.zeros((length, length), int)
    for rank, (layout, steps) in enumerate(made):
        firsts = []
        for number, step in enumerate(steps):
            if scheme == "rounds":
                assert len(step.sends) <= 1
                assert len(step.receives) <= 1
            for peer, runs in step.receives.items():
                assert made[peer][1][number].sends[rank] == runs
                assert set(runs) <= {range(max(a.start, b.start), min(a.stop, b.stop))
                                     for a in runs for b in made[peer][0].own}  # fmt: skip
            came = [n for runs in step.receives.values() for run in runs for n in run]
            if number:
                assert sorted(came) == [n for run in step.keys for n in run]
            for piece in step.pieces:
                step.keys.rows(piece.keys)  # they are there
                assert set(piece.rows) <= set(layout.positions.tolist())
                at = tuple(slice(x.start, x.stop) for x in (piece.rows, piece.keys))
                assert not piece.keys or allowed[at].any()  # nothing is computed in vain
                count[at] += 1
                firsts += [piece.rows] if piece.first else []
        assert sorted(firsts, key=lambda x: x.start) == list(layout.own)
    assert count.max() == 1
    assert np.all(count[allowed] == 1)


def test_documents_need_as_many_rounds_as_the_rank_with_the_most_peers():
    """Distances alone would take a round for each of them."""
    ids = np.roll(np.repeat([0, 1, 2, 3, 4, 5, 0, 6], 12), 4)  # two documents for each rank
    with blocks_of(4, chunks=3):
        made = steps_of_all(masks.segments(ids), 8, "contiguous", "rounds")
    peers = [[peer for step in steps for peer in step.receives] for _, steps in made]
    assert max(map(len, peers)) == 4
    assert {len(steps) for _, steps in made} == {1 + 4}
    assert len({(peer - rank) % 8 for rank, each in enumerate(peers) for peer in each}) == 6


def test_what_is_fully_allowed_has_no_mask():
    with blocks_of(4):
        made = steps_of_all(masks.causal(), 4, "contiguous", "rounds")
    for rank, (_, steps) in enumerate(made):
        pieces = [piece for step in steps for piece in step.pieces]
        assert sum(piece.masked for piece in pieces) == 1  # its own keys
        assert len(pieces) == rank + 1


def test_steps_are_remembered_while_the_mask_and_what_it_reads_stay_the_same(monkeypatch):
    made = []
    compute = schemes._made
    monkeypatch.setattr(schemes, "_made", lambda *x: made.append(1) or compute(*x))
    x = np.zeros((2, 96, 4), np.float32)
    ids = np.zeros(96, int)
    comm = distributed.Threads(2).ranks[1]

    def steps(mask, layout, layout_k, scheme="rounds"):
        call = validate.call(*[x] * 3, Options(mask=mask))
        return schemes.plan(call, layout, layout_k, scheme, comm.nodes).steps

    with blocks_of(4):
        layout = distributed.layout(comm, 96)
        others = [distributed.layout(comm, 96, kind="cyclic") for _ in "12"]
        first = steps(masks.window(3, 0), layout, layout)
        assert steps(masks.window(3, 0), layout, layout) is first
        assert len(made) == 1
        for n, (mask, layout_k, scheme) in enumerate([
            (masks.window(4, 0), layout, "rounds"), (masks.window(3, 0), layout, "gather"),
            (masks.window(3, 0), others[0], "rounds"), (masks.window(3, 0), others[1], "rounds"),
        ]):  # fmt: skip
            steps(mask, layout, layout_k, scheme)
            assert len(made) == 2 + n
        # Elements may change between two calls.
        sends = []
        for document in (0, 1, 0, 1):
            ids[48:] = document
            sends.append(any(step.receives for step in steps(masks.segments(ids), layout, layout)))
        assert sends == [True, False] * 2
        assert len(made) == 7
        of_others = masks.segments(ids.astype(np.int32))  # of another type, whose bytes differ
        steps(of_others, layout, layout)
        assert len(made) == 8
        for left in range(100):
            steps(masks.window(left, 0), layout, layout)
        assert len(layout.remembered) == schemes.MOST_REMEMBERED


def test_runs_of_a_zigzag_layout_are_one_causal_call():
    """In a rank's own arrays, a causal mask is causal; other ranks' keys are seen as a whole."""
    with blocks_of(4):
        made = steps_of_all(masks.causal(), 2, "zigzag", "rounds")
    (_, first), (_, second) = made

    def shown(tasks):
        return [(x.rows, x.keys, x.piece.masked, x.plain) for x in tasks]

    low, high, all_rows = range(24), range(24, 48), range(48)
    halves = [(low, low, True, True), (high, all_rows, True, True)]
    assert shown(first[0].forward) == halves
    assert shown(second[0].forward) == [(all_rows, all_rows, True, True)]
    for steps in (first, second):  # of own keys, while keys and while gradients travel
        assert shown(steps[0].backward) == halves[:1]
        assert shown(steps[0].later) == halves[1:]
    assert shown(first[1].forward) == shown(first[1].backward) == [(high, all_rows, False, True)]
    assert shown(second[1].forward) == [(all_rows, low, False, True)]


@pytest.mark.parametrize("reads", ["mask", "score", "blocks", "both axes", "lengths", "learned"])
def test_a_rank_s_own_documents_are_one_call(reads):
    """What a mask or score reads of each position, or of whole blocks of them, comes along."""
    lengths = [24, 24, 8, 8, 16, 16]
    ids = np.repeat(np.arange(6), lengths)
    x = np.zeros((2, 96, 4), np.float32)
    mask = masks.causal() & masks.segments(ids)
    if reads == "both axes":
        mask &= masks.dense(np.ones((96, 96), bool))
    table = lookup(np.ones(96 if reads in ("score", "learned") else 24, np.float32))
    learned = lookup(np.ones(96, np.float32), learned=True)
    by_length = lookup(np.ones((2, 96), np.float32))
    change = {
        "score": lambda s, b, h, i, j: s * table[j],
        "blocks": lambda s, b, h, i, j: s + table[i // 4],
        "lengths": lambda s, b, h, i, j: s + by_length[expr.len_k // 96, j],
        "learned": lambda s, b, h, i, j: s * learned[j],
    }.get(reads)
    more = {} if change is None else {"score_mod": scores.score(change)}
    call = validate.call(x, x, x, Options(mask=mask, **more))
    for comm in distributed.Threads(2).ranks:
        layout = distributed.layout(comm, 96, mask=mask, kind="documents")
        assert len(layout.own.ranges) > 1
        if reads == "learned":  # a plan that is remembered for other look-ups is none for these
            alike = scores.score(lambda s, b, h, i, j: s * table[j])
            other = validate.call(x, x, x, Options(mask=mask, score_mod=alike))
            (before,) = schemes.plan(other, layout, layout, "rounds", comm.nodes).steps
            assert len(before.backward) == 1
        (own,) = schemes.plan(call, layout, layout, "rounds", comm.nodes).steps
        tasks = [(x.rows, x.keys, x.plain) for x in own.backward]
        if reads in ("both axes", "lengths", "learned"):
            assert len(tasks) > 1
        else:
            assert tasks == [(range(48), range(48), True)]
            assert own.backward[0].positions == (layout.own.ranges, layout.own.ranges)
        assert own.forward == own.backward


@pytest.mark.parametrize(
    ("more", "plain"),
    [("score", [True, False, True]), ("bias", [True, True, True]), ("dropout", [False] * 3)],
)
def test_what_sees_positions_is_computed_piece_by_piece(more, plain):
    """Pieces are only joined where neither scores nor dropout count from elsewhere."""
    x, bias = np.zeros((2, 96, 4), np.float32), np.zeros((96, 96), np.float32)
    options = {
        "score": {"score_mod": scores.alibi(np.ones(2, np.float32))},
        "bias": {"bias": bias},
        "dropout": {"dropout": 0.5, "seed": 1},
    }
    call = validate.call(x, x, x, Options(mask=masks.causal(), **options[more]))
    with blocks_of(4):
        comm = distributed.Threads(2).ranks[0]
        layout = distributed.layout(comm, 96, kind="zigzag")
        own, other = schemes.plan(call, layout, layout, "rounds", comm.nodes).steps
    assert [task.plain for task in own.forward] == plain
    assert len(own.pieces) == 3
    assert len(other.forward) == 1
