"""Look-ups of which each rank holds its own part: results, proofs and messages of whole ones."""

from __future__ import annotations

import numpy as np
import pytest
from halves import mostly_thorough
from placement import same_bits
from ranks import blocks_of

import cupyflash
from cupyflash import ArgumentError, distributed, lookup, masks, scores
from cupyflash.distributed import DistributedError
from cupyflash.distributed.partition import schemes

LENGTH, HEADS = 96, 4
RNG = np.random.default_rng(0)
ARRAYS = [RNG.standard_normal((2, HEADS, LENGTH, 8)).astype(np.float32) for _ in range(4)]
OF_KEY = 2 * 2 * HEADS * 8 * 4  # bytes of a key and its value
DOCUMENTS = np.arange(LENGTH) // 23
POSITIONS = RNG.integers(0, 50, LENGTH).astype(np.int16)
KEPT = RNG.random((HEADS, LENGTH)) < 0.9  # bool, with an axis of heads
OF_DOCUMENTS = RNG.random((5, LENGTH)) < 0.8  # which is read at what another look-up holds
WEIGHTS = RNG.standard_normal((2, LENGTH)).astype(np.float16)  # with one of the batch


def several_types(parts):
    tables = DOCUMENTS, POSITIONS, KEPT, WEIGHTS, OF_DOCUMENTS
    documents, positions, kept, weights, seen = map(parts, tables)
    mask = masks.mask(
        lambda b, h, i, j: (
            (documents[i] == documents[j])
            & (kept[h, j] | (positions[j] < 25))
            & seen[documents[i], j]
        )
    )
    change = scores.score(
        lambda s, b, h, i, j: s + weights[b, j] - 0.01 * abs(positions[i] - positions[j])
    )
    return {"mask": mask, "score_mod": change}


def a_score(parts):
    """It divides an element, which may not leave 64 bits, and the pairs are dropped as ever."""
    positions = parts(POSITIONS)
    change = scores.score(lambda s, b, h, i, j: s - 0.01 * (positions[j] // (1 + h)))
    return {"score_mod": change, "dropout": 0.3, "seed": 4}


def near_documents(parts):
    documents = parts(DOCUMENTS)
    near = masks.mask(lambda b, h, i, j: documents[j] + 1 >= documents[i])
    return {"mask": masks.causal() & near, "sink": np.linspace(-1, 1, HEADS, dtype=np.float32)}


TABLES = {several_types: 8 + 2 + HEADS + 2 * 2 + 5, a_score: 2, near_documents: 8}  # bytes of a key


def on_ranks(size, kind, options, is_sharded, *, block=4, length=LENGTH, **more):
    """Return what ranks compute with their parts of look-ups, or whole ones, and what they send."""
    sent = [0] * size

    def work(comm):
        layout = distributed.layout(comm, length, kind=kind)
        exchange = comm.exchange

        def counting(sends, receives):
            sent[comm.rank] += sum(content.size for _, content in sends)
            return exchange(sends, receives)

        comm.exchange = counting

        def parts(x):
            return distributed.sharded(layout.take(x, axis=-1)) if is_sharded else lookup(x)

        q, k, v, do = (np.ascontiguousarray(layout.take(x)) for x in ARRAYS)
        given = {"comm": comm, "layout": layout, "timeout": 30, **more, **options(parts)}
        out, lse = distributed.attention(q, k, v, return_lse=True, **given)
        of_forward = sent[comm.rank]
        made = distributed.attention_backward(do, q, k, v, out, lse, **given)
        sent[comm.rank] = of_forward
        return out, lse, *[x for x in made if x is not None]

    with blocks_of(block):
        made = distributed.Threads(size, 2 if more["scheme"] == "nodes" else 1).run(work)
    return [x for of_rank in made for x in of_rank], np.array(sent)


CASES = [(size, kind, scheme, options)
         for size in (1, 2, 3, 4) for kind in ("contiguous", "zigzag", "cyclic")
         for scheme in ("rounds", "gather", "nodes") for options in TABLES
         if scheme != "nodes" or size == 4]  # fmt: skip
QUICK = [(1, "contiguous", "rounds"), (2, "zigzag", "rounds"), (3, "cyclic", "gather"),
         (4, "contiguous", "rounds"), (4, "zigzag", "nodes")]  # fmt: skip


@mostly_thorough(
    ("size", "kind", "scheme", "options"), CASES, quick=lambda case: case[:3] in QUICK,
    why="the same tables in other layouts",
)  # fmt: skip
def test_parts_have_the_bits_of_whole_arrays_and_travel_with_the_keys(size, kind, scheme, options):
    ours, sent = on_ranks(size, kind, options, True, scheme=scheme)
    theirs, before = on_ranks(size, kind, options, False, scheme=scheme)
    assert all(map(same_bits, ours, theirs))
    # By the same proofs, the same keys travel; with each, what is read at its position.
    assert (sent * OF_KEY == before * (OF_KEY + TABLES[options])).all()
    assert before.all() or size == 1 or options is near_documents


def test_proofs_are_those_of_whole_arrays(monkeypatch):
    """Here most pairs of ranks need nothing of each other."""
    made = {True: [], False: []}
    compute = schemes._made
    for is_sharded, plans_made in made.items():

        def remember(*args, kept=plans_made):
            found = compute(*args)
            kept.append([(s.sends, s.receives, s.keys, s.pieces) for s in found.steps])
            return found

        monkeypatch.setattr(schemes, "_made", remember)
        on_ranks(4, "contiguous", near_documents, is_sharded, scheme="rounds")
    # Gradients have the plan of the forward, which is remembered if arrays are whole.
    assert sorted({*map(repr, made[True])}) == sorted(map(repr, made[False]))
    assert (len(made[True]), len(made[False])) == (8, 4)


@pytest.mark.parametrize("size", [2, 3])
def test_segments_of_parts(size):
    """By the constructor, also of packed sequences, whose rows it counts."""
    whole = masks.segments(DOCUMENTS)
    expected, vjp = cupyflash.attention_vjp(*ARRAYS[:3], mask=whole)
    offsets = np.array([0, 30, 30, 41, LENGTH])
    packed = [x[0] for x in ARRAYS]
    of_packed, packed_vjp = cupyflash.attention_varlen_vjp(
        *packed[:3], offsets, offsets, mask=whole
    )
    expected = [expected, *vjp(ARRAYS[3])[:3], of_packed, *packed_vjp(packed[3])[:3]]
    made = [np.full_like(x, np.nan) for x in expected]

    def work(comm):
        layout = distributed.layout(comm, LENGTH, kind="zigzag")
        mask = masks.segments(distributed.sharded(layout.positions // 23))
        q, k, v, do = map(layout.take, ARRAYS)
        options = {"comm": comm, "layout": layout, "mask": mask}
        out, vjp = distributed.attention_vjp(q, k, v, **options)
        results = [out, *vjp(do)[:3]]
        q, k, v, do = map(layout.take, packed)
        out, vjp = distributed.attention_varlen_vjp(q, k, v, offsets, offsets, **options)
        for x, to in zip([*results, out, *vjp(do)[:3]], made, strict=True):
            layout.put(x, to)

    with blocks_of(4):
        distributed.Threads(size).run(work)
    for ours, theirs in zip(made, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.bool_])
def test_runs_of_documents_may_have_parts_of_blocks(dtype):
    """Ranks tell the ends of blocks of which each holds a part."""
    lengths = [37, 60, 75, 23, 101, 44]
    ids = np.repeat(np.arange(len(lengths)), lengths)
    length = len(ids)
    values = (np.random.default_rng(0).standard_normal(length) * 9).astype(dtype)
    x = np.random.default_rng(1).standard_normal((2, length, 8)).astype(np.float32)

    def options(documents, numbers):
        kept = masks.mask(lambda b, h, i, j: numbers[j] >= numbers[i])
        return {"mask": masks.segments(documents) & (masks.causal() | kept)}

    whole, vjp = cupyflash.attention_vjp(x, x, x, **options(ids, cupyflash.lookup(values)))
    expected = whole, *vjp(x)[:3]

    def work(comm):
        layout = distributed.layout(comm, length, mask=masks.segments(ids), kind="documents")
        assert any(run.start % 128 for run in layout.own)
        own = [distributed.sharded(layout.take(each, axis=-1)) for each in (ids, values)]
        q = layout.take(x)
        out, vjp = distributed.attention_vjp(q, q, q, comm=comm, layout=layout, **options(*own))
        for ours, theirs in zip((out, *vjp(q)[:3]), expected, strict=True):
            assert np.allclose(ours, layout.take(theirs), rtol=1e-4, atol=1e-5)

    distributed.Threads(2).run(work)


def test_elements_are_read_at_every_call():
    """Those that change may change which rank needs whose keys."""
    documents, sent = np.zeros(LENGTH, int), []

    def work(comm):
        layout = distributed.layout(comm, LENGTH)
        exchange = comm.exchange

        def counting(sends, receives):
            sent.append(sum(content.size for _, content in sends))
            return exchange(sends, receives)

        comm.exchange = counting
        own = layout.take(documents, axis=-1).copy()
        options = {"comm": comm, "layout": layout, "scheme": "rounds", "check": False}
        options["mask"] = masks.segments(distributed.sharded(own))
        x = layout.take(ARRAYS[0])
        results = []
        for _ in range(2):
            sent.clear()
            results.append(distributed.attention(x, x, x, **options))
            comm.tell(b"", 30)
            results.append(sum(sent))
            comm.tell(b"", 30)
            own += comm.rank
        return results

    with blocks_of(4):
        for rank, (first, moved, second, still) in enumerate(distributed.Threads(2).run(work)):
            assert moved == 2 * (LENGTH // 2) * (OF_KEY + 8)
            assert still == 0
            x = ARRAYS[0][..., rank * 48 : rank * 48 + 48, :]
            np.testing.assert_allclose(second, cupyflash.attention(x, x, x), atol=1e-5)
            every = cupyflash.attention(x, ARRAYS[0], ARRAYS[0])
            np.testing.assert_allclose(first, every, atol=1e-5)


def part_of(layout):
    return distributed.sharded(layout.positions // 23)


def of_segments(table):
    return {"mask": masks.segments(table)}


def of_mask(table, *index):
    def allowed(b, h, i, j):
        return table[tuple(x({"b": b, "h": h, "i": i, "j": j}) for x in index)] > 0

    return {"mask": masks.mask(allowed)}


TWO = distributed.sharded(np.zeros((3, 48), int))
REFUSED = {
    "a whole array": (
        lambda layout: of_segments(distributed.sharded(DOCUMENTS)),
        {},
        "q_ids: got 96 positions on the last axis of a sharded look-up; expected 48, those of the "
        "queries of rank 0. layout.take(whole array, axis=-1) returns them.",
    ),
    "too short on one rank": (
        lambda layout: of_segments(part_of(layout) if layout.rank else distributed.sharded([1])),
        {},
        "rank 0 raised ArgumentError: segments: q_ids: got 1 positions",
    ),
    "too short on one rank, without checks": (
        lambda layout: of_segments(part_of(layout) if layout.rank else distributed.sharded([1])),
        {"check": False},
        "rank 0 raised ArgumentError: segments: q_ids: got 1 positions",
    ),
    "of other keys": (
        lambda layout: of_segments(part_of(layout)),
        {"keys": 40},
        "k_ids: got 48 positions on the last axis of a sharded look-up; expected 24, those of the "
        "keys of rank 0.",
    ),
    "at half a position": (
        lambda layout: of_mask(part_of(layout), lambda at: at["j"] // 2),
        {},
        "is read at (j // 2); expected the position i of queries or j",
    ),
    "at a head": (
        lambda layout: of_mask(part_of(layout), lambda at: at["h"]),
        {},
        "is read at h; expected the position i of queries or j",
    ),
    "too few heads": (
        lambda layout: of_mask(TWO, lambda at: at["h"], lambda at: at["j"]),
        {},
        "is read at h, which lies between 0 and 3",
    ),
    "too few heads of a score": (
        lambda layout: {"score_mod": scores.score(lambda s, b, h, i, j: s + TWO[h, j])},
        {},
        "is read at h, which lies between 0 and 3",
    ),
    "blocks": (
        lambda layout: {"mask": masks.blocks(distributed.sharded(np.ones((24, 48), bool)), 4, 2)},
        {},
        "blocks: layout: got a sharded look-up; expected one whose last axis, and no other one",
    ),
    "heads": (
        lambda layout: of_segments(part_of(layout)),
        {"scheme": "heads"},
        'scheme: got "heads" with a sharded look-up',
    ),
    "whole on one rank": (
        lambda layout: of_segments(part_of(layout) if layout.rank else DOCUMENTS),
        {},
        "the ranks do not make the same call:\n  look-ups: whole on rank 0; in parts on rank 1\n",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_divided_is_refused_on_every_rank(case):
    options, more, expected = REFUSED[case]
    more = {"timeout": 30, **more}
    keys = more.pop("keys", LENGTH)

    def work(comm):
        layout, layout_k = (distributed.layout(comm, length) for length in (LENGTH, keys))
        q, k = layout.take(ARRAYS[0]), np.zeros((2, HEADS, layout_k.count, 8), np.float32)
        given = {"comm": comm, "layout": layout, "layout_k": layout_k}
        with pytest.raises(DistributedError) as caught:
            distributed.attention(q, k, k, **given, **more, **options(layout))
        distributed.attention(q, k, k, **given)  # the communicator may be used again
        return str(caught.value)

    with blocks_of(4):
        for text in distributed.Threads(2).run(work):
            assert expected in text


def test_parts_are_for_calls_over_ranks_only():
    part = distributed.sharded(np.zeros(48, int))
    mask = masks.segments(part)
    change = scores.score(lambda s, b, h, i, j: s + part[j])
    x = ARRAYS[0][..., :48, :]
    comm = distributed.Threads(2).ranks[0]
    calls = [
        lambda: cupyflash.attention(x, x, x, mask=mask),
        lambda: cupyflash.attention(x, x, x, score_mod=change),
        lambda: cupyflash.streamed.attention(x, x, x, mask=mask),
        lambda: distributed.layout(comm, 48, mask=mask),
        lambda: distributed.prices(2, 48, mask=masks.mask(lambda b, h, i, j: part[j] > 0)),
        lambda: cupyflash.explain(x.shape, mask=mask, ranks=2),
        lambda: mask.to_array(1, 1, 48, 48),
        lambda: masks.lengths(part),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ArgumentError, match=r"got distributed.sharded\(...\), a part"):
            call()
    with pytest.raises(ArgumentError, match="sharded: got a number"):
        distributed.sharded(np.array(3))


def test_packed_sequences_do_not_read_parts_by_their_own_positions():
    def work(comm):
        layout = distributed.layout(comm, LENGTH)
        part = distributed.sharded(layout.positions)
        x = layout.take(ARRAYS[0][0])
        mask = masks.mask(lambda b, h, i, j: part[j] > 3)
        with pytest.raises(DistributedError, match="counts from the start of each; expected"):
            distributed.attention_varlen(
                x, x, x, [0, 10, LENGTH], [0, 10, LENGTH], comm=comm, layout=layout, mask=mask
            )

    with blocks_of(4):
        distributed.Threads(2).run(work)
