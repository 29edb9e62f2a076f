"""What is said about calls over ranks without them: what real ranks send, and a model's times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from halves import mostly_thorough
from ranks import blocks_of

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, distributed, masks
from cupyflash.arrays.unallocated import unallocated as fake_array
from cupyflash.commands.explain import seconds
from cupyflash.commands.main import main
from cupyflash.distributed.partition import head_batches, model, simulation
from cupyflash.distributed.partition.head_batches import shares
from cupyflash.distributed.partition.model import H100, Machine, Model
from cupyflash.distributed.partition.proofs import Proofs
from cupyflash.problem import validate
from cupyflash.problem.options import Options

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "distributed.md"
SCHEMES = ("rounds", "gather", "nodes", "heads", "heads x rounds")
LENGTH, HEADS, HEADS_KV, DIM, DIM_V = 320, 6, 3, 8, 16
MASKS = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.window(40, 0),
    "documents": masks.causal() & masks.segments(np.repeat(np.arange(10), 32)),
}


def said(mask, ranks, backward, scheme, nodes=1):
    """What is said of a call that takes a scheme."""
    q, k, v = (
        fake_array((heads, LENGTH, dim), np.dtype(np.float32))
        for heads, dim in ((HEADS, DIM), (HEADS_KV, DIM), (HEADS_KV, DIM_V))
    )
    call = validate.call(q, k, v, Options(mask=mask))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "cheapest", lambda *_, **__: scheme)
        return simulation.simulate(call, ranks, nodes, backward, H100)


def sent(mask, ranks, backward, scheme, monkeypatch, nodes=1):
    """The bytes that ranks really send, and the exchanges with messages."""
    threads, counts, exchanges = distributed.Threads(ranks, nodes), [], set()
    kind = type(threads.ranks[0])
    exchange = kind.exchange

    def counted(comm, sends, receives):
        if counting:
            counts.extend(message.size for _, message in sends)
            if sends:
                exchanges.add(comm._exchanges)
        return exchange(comm, sends, receives)

    counting = []
    rng = np.random.default_rng(0)
    q, k, v, do = (
        rng.standard_normal((heads, LENGTH, dim), dtype=np.float32)
        for heads, dim in ((HEADS, DIM), (HEADS_KV, DIM), (HEADS_KV, DIM_V), (HEADS, DIM_V))
    )

    def work(comm):
        layout = distributed.layout(comm, LENGTH, mask=mask)
        options = {"comm": comm, "layout": layout, "mask": mask, "scheme": scheme}
        counting[:] = [] if backward else [True]
        _, vjp = distributed.attention_vjp(*(layout.take(x) for x in (q, k, v)), **options)
        if backward:
            comm.tell(b"", 60.0)  # no rank is still in the forward
            counting[:] = [True]
            vjp(layout.take(do))

    monkeypatch.setattr(kind, "exchange", counted)
    threads.run(work)
    return sum(counts), len(exchanges)


@mostly_thorough(
    ("name", "scheme", "backward"),
    [(x, y, z) for x in MASKS for y in SCHEMES for z in (False, True)],
    quick=[("causal", "heads x rounds", True), ("causal", "rounds", True),
           ("documents", "gather", False), ("causal", "heads", True), ("none", "heads", False),
           ("causal", "nodes", True), ("window", "nodes", False), ("documents", "nodes", False)],
    why="the same amounts under other masks",
)  # fmt: skip
def test_bytes_and_rounds_are_those_that_ranks_send(name, scheme, backward, monkeypatch):
    ranks, nodes = {"heads x rounds": (4, 1), "nodes": (6, 3)}.get(scheme, (3, 1))
    with blocks_of(16, chunks=4):
        made = said(MASKS[name], ranks, backward, scheme, nodes)
        moved, exchanges = sent(MASKS[name], ranks, backward, scheme, monkeypatch, nodes)
    assert made.moved == moved
    if not backward or scheme == "heads":
        assert made.rounds == exchanges
    assert made.scheme == scheme


@pytest.mark.parametrize("name", MASKS)
def test_what_is_needed_is_what_queries_see(name, monkeypatch):
    """In blocks of keys that some query of the rank sees; chunks are larger."""
    mask, block, ranks = MASKS[name], 8, 4
    monkeypatch.setattr(simulation, "BLOCK", block)
    with blocks_of(block, chunks=2):
        made = said(mask, ranks, False, "rounds")
        layout = distributed.layout(distributed.Threads(ranks).ranks[0], LENGTH, mask=mask)
    allowed = (
        np.ones((LENGTH, LENGTH), bool) if mask is None else mask.to_array(1, 1, LENGTH, LENGTH)
    )
    blocks = allowed.reshape(LENGTH, -1, block).any(axis=-1)
    owners = np.empty(LENGTH, int)
    for rank, runs in enumerate(layout.runs):
        for run in runs:
            owners[run.start : run.stop] = rank
    keys = sum(
        block * int((blocks[owners == rank].any(axis=0) & (owners[::block] != rank)).sum())
        for rank in range(ranks)
    )
    assert made.needed == keys * HEADS_KV * (DIM + DIM_V) * 4
    assert made.needed <= made.moved
    assert made.imbalance == pytest.approx(layout.price.imbalance)
    assert made.layout == layout.kind


def modelled(machine, mask=None, ranks=4, backward=False, heads=(8, 8), nodes=None, length=2**15):
    q, k = (fake_array((n, length, 128), np.dtype(np.float16)) for n in heads)
    call = validate.call(q, k, k, Options(mask=mask))
    layout = distributed.layout(distributed.Threads(ranks).ranks[0], length, kind="contiguous")
    proofs = Proofs(call, layout, layout)
    return Model(call, proofs, nodes or [0] * ranks, machine, backward)


FAST = Machine(1e12, 1e30, 1e30, 1e30)


def test_times_of_what_can_be_worked_out_by_hand(monkeypatch):
    monkeypatch.setattr(model, "MESSAGE", 0.0)
    pairs, each = 2.0**30 * 8, 2 * 2 * 128
    full = modelled(FAST)
    assert full.one_rank == pytest.approx(pairs * each / 1e12)
    for scheme in ("rounds", "gather", "heads"):  # nothing but arithmetic
        group = 4 if scheme == "heads" else 1
        assert full.seconds(scheme, group) == pytest.approx(full.one_rank / 4)
    assert full.seconds("heads x rounds", 2) == pytest.approx(full.one_rank / 4)
    backward = modelled(FAST, backward=True)
    assert backward.one_rank == pytest.approx(2.5 * full.one_rank)
    # Three rounds of keys and values, and nothing else.
    slow = modelled(Machine(1e30, 1e30, 1e9, 1e3))
    part = 2 * 8 * 128 * 2 * 2**13
    assert slow.seconds("rounds", 1) == pytest.approx(3 * part / 1e9)
    assert slow.seconds("gather", 1) == pytest.approx(3 * part / 1e9)
    assert slow.seconds("heads", 4) == pytest.approx(0.75 * (1.5 * part + 0.5 * part) / 1e9)
    # dk and dv of each round return in float32.
    slow = modelled(Machine(1e30, 1e30, 1e9, 1e3), backward=True)
    assert slow.seconds("gather", 1) == pytest.approx(3 * (part + 2 * part) / 1e9)
    # In three rounds, those of the first two travel together with keys of later ones.
    assert slow.seconds("rounds", 1) == pytest.approx((1 + 1 + 3 + 2 + 2) * part / 1e9)
    # The last rank receives from all others, or all others from the first.
    for mask in (
        masks.mask(lambda b, h, i, j: i >= 3 * 2**13), masks.mask(lambda b, h, i, j: j < 2**13),
    ):  # fmt: skip
        one = modelled(Machine(1e30, 1e30, 1e9, 1e3), mask)
        assert one.seconds("gather", 1) == pytest.approx(3 * part / 1e9)
    # Half of the rows and results travel within a pair, and half of the keys between two pairs.
    pair = modelled(Machine(1e30, 1e30, 1e9, 1e8), nodes=[0, 0, 1, 1])
    assert pair.seconds("heads x rounds", 2) == pytest.approx(part / 1e9 + part / 1e8)
    # The last of four nodes gets all of its keys from others.
    apart = modelled(Machine(1e30, 1e30, 1e30, 1e9), nodes=[0, 1, 2, 3])
    assert apart.seconds("rounds", 1) == pytest.approx(3 * part / 1e9)
    together = modelled(Machine(1e30, 1e30, 1e30, 1e9), nodes=[0, 0, 1, 1])
    assert together.seconds("gather", 1) == pytest.approx(2 * part / 1e9)
    # By nodes, one part comes from there, and one more from the other rank of the node, twice.
    assert together.seconds("nodes", 1) == pytest.approx(part / 1e9)
    inside = modelled(Machine(1e30, 1e30, 1e9, 1e30), nodes=[0, 0, 1, 1])
    assert inside.seconds("nodes", 1) == pytest.approx(2 * part / 1e9)
    across = modelled(Machine(1e30, 1e30, 1e30, 1e9), nodes=[0, 0, 1, 1], backward=True)
    assert across.seconds("nodes", 1) == pytest.approx((part + 2 * part) / 1e9)
    # Partial results of all rows, once for the rank, for the node, and for the other node; and what
    # three ranks have sent is copied to where it belongs.
    memory = modelled(Machine(1e30, 1e9, 1e30, 1e30), nodes=[0, 0, 1, 1])
    partial = 2 * 4 * 8 * 128 * 2**13
    assert memory.seconds("nodes", 1) == pytest.approx((3 * partial + 3 * 2 * part) / 1e9)
    # Rows of q, k and v, and results: three quarters of those of two heads.
    rows = modelled(Machine(1e30, 1e9, 1e30, 1e30))
    assert rows.seconds("heads", 4) == pytest.approx(2 * 0.75 * 2 * part / 1e9)


def test_messages_and_partial_results_take_time(monkeypatch):
    nothing = Machine(1e30, 1e30, 1e30, 1e30)
    assert modelled(nothing).seconds("rounds", 1) == pytest.approx(3 * model.MESSAGE)
    assert modelled(nothing).seconds("gather", 1) == pytest.approx(model.MESSAGE)
    monkeypatch.setattr(head_batches, "TILES", 256)
    # There and back, of one head in each of two turns, or at once.
    assert modelled(nothing).seconds("heads", 4) == pytest.approx(4 * model.MESSAGE)
    assert modelled(nothing, ranks=8).seconds("heads", 8) == pytest.approx(2 * model.MESSAGE)
    monkeypatch.setattr(model, "MESSAGE", 0.0)
    memory = modelled(replace(nothing, memory=1e9))
    partial, part = 2 * 4 * 8 * 128 * 2**13, 2 * 8 * 128 * 2 * 2**13
    assert memory.seconds("rounds", 1) == pytest.approx((4 * partial + 3 * 2 * part) / 1e9)
    # Rounds follow from what arrays hold that a mask reads; rows travel to their heads anyway.
    documents = modelled(nothing, masks.segments(np.zeros(2**15, np.int32)))
    for scheme in ("rounds", "gather"):
        assert documents.seconds(scheme, 1) == pytest.approx(model.LOOKED_AT)
    assert documents.seconds("heads", 4) < 1e-12
    # Own keys are two pieces, those of each round one, and a turn of heads is one, too.
    for machine, backward, piece in ((nothing, False, 1.0), (nothing, True, 10.0)):
        lost = modelled(replace(machine, piece=(1.0, 10.0)), backward=backward)
        assert lost.seconds("rounds", 1) == pytest.approx(5 * piece)
        assert lost.seconds("gather", 1) == pytest.approx(5 * piece)
        assert lost.seconds("heads", 4) == pytest.approx(2 * piece)
    # Rows of the second turn arrive, and results of the first one return, during the computation.
    for flops, least in ((1e30, 2.0), (1e9, 1.0)):
        busy = modelled(Machine(flops, 1e30, 1e9, 1e30))
        once = 0.75 * (1.5 * part + 0.5 * part) / 1e9
        expected = least / 2 * once + busy.one_rank / 4
        assert busy.seconds("heads", 4) == pytest.approx(expected)
    causal = modelled(FAST, masks.causal())  # the last of four ranks has 7 of 16 pairs
    assert causal.seconds("rounds", 1) == pytest.approx(7 / 16 * causal.one_rank, rel=0.01)


def test_turns_of_tiles_that_take_different_times_are_longer():
    def turns(mask):
        x = fake_array((16, 2**16, 128), np.dtype(np.float16))
        call = validate.call(x, x, x, Options(mask=mask))
        made = head_batches.head_batches(call, shares(16, 2))
        assert [[x for turn in made for x in turn[rank]] for rank in (0, 1)] == [
            list(range(8)), list(range(8, 16))
        ]  # fmt: skip
        return [len(turn[0]) for turn in made]

    assert turns(None) == turns(masks.causal()) == [1, 2, 4, 1]
    assert turns(masks.causal() & masks.segments(np.arange(2**16) // 999)) == [2, 4, 2]


def explained(mask, ranks, length, backward=False, **options):
    given = {"device": "H100-SXM", "dtype": "bfloat16", "compile": False, **options}
    shapes = (32, length, 128), (8, length, 128)
    return cupyflash.explain(
        *shapes, mask=mask, ranks=ranks, nodes=max(ranks // 8, 1), backward=backward, **given
    )


def test_explain_has_it_with_ranks_only():
    assert cupyflash.explain((8, 64), device="cpu").over_ranks is None
    made = explained(masks.causal(), 8, 2**14)
    told = json.loads(made.to_json())["over_ranks"]
    assert told["simulated"] is True
    assert told["efficiency"] == made.over_ranks.efficiency
    assert told["schemes"]["heads"] == made.over_ranks.schemes["heads"]
    assert set(made.over_ranks.schemes) == {"rounds", "gather", "heads"}
    more = explained(masks.causal(), 16, 2**14).over_ranks.schemes
    assert set(more) == {"rounds", "gather", "nodes", "heads x rounds"}
    best = min(made.over_ranks.schemes.values())
    assert made.over_ranks.seconds == best == made.over_ranks.schemes[made.over_ranks.scheme]


def test_times_of_unknown_devices_are_not_told():
    for device, words in (("cpu", "CPU"), ("A10", "A10")):
        made = explained(None, 4, 1024, device=device, dtype="float16")
        assert made.over_ranks.seconds is None
        assert made.over_ranks.efficiency is None
        assert made.over_ranks.moved > 0
        assert any(f"time over ranks: how fast {words}" in line for line in made.unknown)


def test_heads_that_ranks_cannot_divide_evenly_are_an_imbalance():
    with blocks_of(16, chunks=5):  # so that groups have as many positions each
        for ranks, scheme, wanted in (
            (2, "heads", 2 / 1.5), (4, "heads x rounds", 2 / 1.5), (3, "heads", 1.0),
        ):  # fmt: skip
            assert said(None, ranks, False, scheme).imbalance == pytest.approx(wanted)


def test_one_rank_sends_nothing():
    made = explained(masks.causal(), 1, 2**14).over_ranks
    assert (made.moved, made.needed, made.rounds) == (0, 0, 0)
    assert 0.9 < made.efficiency <= 1


def test_keys_of_another_length():
    made = cupyflash.explain((8, 1024, 64), (1, 4096, 64), device="cpu", ranks=4).over_ranks
    assert made.moved == made.needed == 4 * 3072 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"ranks": 0}, ArgumentError, "ranks: got 0; expected 1 or more"),
        ({"ranks": 2.5}, ArgumentTypeError, r"ranks: got 2\.5; expected an integer"),
        ({"ranks": 12, "nodes": 8}, ArgumentError, "nodes: got 8 for 12 ranks; expected a divisor"),
        ({"ranks": 4, "nodes": True}, ArgumentTypeError, "nodes: got True; expected an integer"),
    ],
)
def test_wrong_arguments(options, error, words):
    with pytest.raises(error, match=words):
        cupyflash.explain((8, 64), device="cpu", **options)


def test_the_command(capsys):
    words = "explain 32,16384,128 --heads-kv 8 --mask causal --device H100-SXM --no-compile".split()
    assert main([*words, "--ranks", "8"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    made = explained(masks.causal(), 8, 16384, dtype="float16").over_ranks
    assert "over ranks simulated, not measured: 8 GPUs on 1 node, layout zigzag, scheme" in printed
    assert f"rounds {seconds(made.schemes['rounds'])}, " in printed
    assert main([*words, "--ranks", "6", "--nodes", "4"]) == 2
    assert "nodes: got 4 for 6 ranks" in capsys.readouterr().err


PAGES_MASKS = {"causal": masks.causal(), "window of 32k": masks.window(2**15, 0)}


def rows():
    """The rows of the page's table: mask, GPUs, positions, and the whole line."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in PAGES_MASKS and len(cells) == 9:
            found.append((cells[0], *(int(x.replace(",", "")) for x in cells[1:3]), line))
    return found


def written(mask, gpus, length):
    """A row of the table."""
    made = [explained(PAGES_MASKS[mask], gpus, length, x).over_ranks for x in (False, True)]
    cells = [
        " / ".join(f"{x.one_rank / (gpus * x.schemes[scheme]):.0%}" for x in made)
        if scheme in made[0].schemes
        else "–"
        for scheme in SCHEMES
    ]
    return f"| {mask} | {gpus:,} | {length:,} | {made[0].layout} | {' | '.join(cells)} |"


@mostly_thorough(
    ("mask", "gpus", "length", "line"), rows(), quick=lambda case: case[1] == 8,
    why="simulations of many ranks", ids=lambda x: str(x)[:12],
)  # fmt: skip
def test_the_pages_table(mask, gpus, length, line):
    assert written(mask, gpus, length) == line
