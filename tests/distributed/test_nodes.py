"""Keys that cross the network once for a node, whose ranks relay them."""

from __future__ import annotations

import numpy as np
import pytest
from halves import mostly_thorough
from placement import same_bits
from ranks import blocks_of

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, distributed, masks
from cupyflash.distributed import DistributedError
from cupyflash.distributed.partition import schemes
from cupyflash.distributed.partition.exchange_schedule import ranks_of_a_node
from cupyflash.problem import validate
from cupyflash.problem.options import Options

LENGTH = 96
MASKS = {"none": None, "causal": masks.causal(), "window": masks.window(10, 3)}


def sent_between_nodes(size, nodes, kind, mask, scheme, backward):
    """Return the bytes from each rank to each one of another node, and where they went."""
    threads = distributed.Threads(size, nodes)
    of = threads.ranks[0].nodes
    sent = np.zeros((size, size), np.int64)
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((2, LENGTH, 8)).astype(np.float32) for _ in range(4))

    def work(comm):
        layout = distributed.layout(comm, LENGTH, kind=kind)
        options = {"comm": comm, "layout": layout, "mask": mask, "scheme": scheme}
        _, vjp = distributed.attention_vjp(*map(layout.take, (q, k, v)), **options)
        exchange = comm.exchange

        def counting(sends, receives):
            for peer, content in sends:
                if of[peer] != of[comm.rank]:
                    sent[comm.rank, peer] += content.size
            return exchange(sends, receives)

        comm.exchange = counting
        if backward:
            vjp(layout.take(do))
        else:
            distributed.attention(*map(layout.take, (q, k, v)), **options)
        return layout

    with blocks_of(4):
        return sent, threads.run(work)[0]


@mostly_thorough(
    ("size", "nodes", "mask"), [(*x, y) for x in ((4, 2), (6, 2), (6, 3)) for y in MASKS],
    quick=[(6, 2, "causal"), (6, 3, "window"), (4, 2, "none")], why="the same under other masks",
)  # fmt: skip
def test_a_key_enters_a_node_once_and_so_does_the_sum_of_its_gradients(size, nodes, mask):
    """Those that any rank of the node needs, in whole chunks."""
    sent, layout = sent_between_nodes(size, nodes, "zigzag", MASKS[mask], "nodes", False)
    backward, _ = sent_between_nodes(size, nodes, "zigzag", MASKS[mask], "nodes", True)
    seen = np.ones((LENGTH, LENGTH), bool)
    if MASKS[mask] is not None:
        seen = MASKS[mask].to_array(1, 1, LENGTH, LENGTH)[0, 0]
    chunk, each = layout.chunk, size // nodes
    blocks = seen.reshape(LENGTH // chunk, chunk, LENGTH // chunk, chunk).any(axis=(1, 3))
    held = [[run.start // chunk for run in runs.cut(chunk)] for runs in layout.runs]
    expected = np.zeros_like(sent)
    for owner in range(size):
        for node in set(range(nodes)) - {owner // each}:
            rows = [n for rank in range(node * each, (node + 1) * each) for n in held[rank]]
            needed = blocks[np.ix_(rows, held[owner])].any(axis=0).sum() * chunk
            expected[owner, node * each + owner % each] = needed * 2 * 2 * 8 * 4
    assert np.array_equal(sent, expected)
    assert np.array_equal(backward, expected + expected.T)  # float32, as the keys are
    assert expected.any()
    if mask == "none":  # in rounds, each rank gets its own copy
        rounds, _ = sent_between_nodes(size, nodes, "zigzag", None, "rounds", False)
        assert rounds.sum() == each * sent.sum()


@mostly_thorough(
    ("size", "nodes", "mask"), [(*x, y) for x in ((4, 2), (6, 2), (8, 4)) for y in MASKS],
    quick=[(6, 2, "causal"), (8, 4, "window")], why="the same relays under other masks",
)  # fmt: skip
def test_results_are_those_of_one_rank(size, nodes, mask):
    rng = np.random.default_rng(3)
    q, k, v, do = (rng.standard_normal((2, 4, LENGTH, 8)) for _ in range(4))
    out, vjp = cupyflash.attention_vjp(q, k[:, :2], v[:, :2], mask=MASKS[mask])
    expected = [out, *vjp(do)[:3]]
    for kind in ("contiguous", "cyclic"):
        made = [np.full_like(x, np.nan) for x in expected]

        def work(comm, kind=kind, made=made):
            layout = distributed.layout(comm, LENGTH, kind=kind)
            options = {"comm": comm, "layout": layout, "mask": MASKS[mask], "scheme": "nodes"}
            arrays = map(layout.take, (q, k[:, :2], v[:, :2]))
            out, vjp = distributed.attention_vjp(*arrays, **options)
            for x, to in zip((out, *vjp(layout.take(do))[:3]), made, strict=True):
                layout.put(x, to)

        with blocks_of(4):
            distributed.Threads(size, nodes).run(work)
        for ours, theirs in zip(made, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def test_results_do_not_depend_on_what_nodes_keep_back():
    """Keys that no rank of a node sees do not enter it: what they hold changes no bit there."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, LENGTH, 8)).astype(np.float32) for _ in range(3))
    made = []
    for _ in range(2):

        def work(comm):
            layout = distributed.layout(comm, LENGTH)
            options = {"comm": comm, "layout": layout, "mask": masks.causal(), "scheme": "nodes"}
            return distributed.attention(*map(layout.take, (q, k, v)), **options)

        with blocks_of(4):
            made.append(distributed.Threads(4, 2).run(work))
        k[:, LENGTH // 2 :] = np.nan
    assert all(map(same_bits, made[0][:2], made[1][:2]))
    assert np.isnan(made[1][2]).any()


@pytest.mark.parametrize(
    ("nodes", "each"),
    [((0, 0, 1, 1), 2), ((0, 0, 0, 0), 4), ((0, 1), 1), ((5, 5, 2, 2), 2), ((0, 1, 0, 1), 0),
     ((0, 0, 1), 0), ((0, 0, 0, 1), 0), ((0, 1, 1, 0), 0), ((0, 0, 1, 2, 2, 2), 0)],
)  # fmt: skip
def test_nodes_have_as_many_ranks_each_in_a_row(nodes, each):
    assert ranks_of_a_node(nodes) == each
    x = np.zeros((2, LENGTH, 8), np.float32)
    call = validate.call(x, x, x, Options())
    assert ("nodes" in schemes.candidates(call, nodes)) == (1 < each < len(nodes))


def test_other_nodes_are_refused_on_every_rank():
    def work(comm):
        comm.nodes = (0, 0, 1)
        layout = distributed.layout(comm, LENGTH)
        x = np.zeros((2, layout.count, 8), np.float32)
        with pytest.raises(DistributedError, match=r'"nodes" with ranks on the nodes \[0, 0, 1\]'):
            distributed.attention(x, x, x, comm=comm, layout=layout, scheme="nodes")
        return distributed.attention(x, x, x, comm=comm, layout=layout).shape

    with blocks_of(4):
        assert len(distributed.Threads(3).run(work)) == 3
    with pytest.raises(ArgumentError, match="nodes: got 2 for 3 ranks; expected a divisor"):
        distributed.Threads(3, 2)
    with pytest.raises(ArgumentTypeError, match="nodes: got True; expected a number of machines"):
        distributed.Threads(3, True)


def test_auto_relays_where_the_network_is_what_a_call_waits_for():
    """One key-value head cannot be divided, and rounds would bring each key twice."""
    x = np.zeros((16, 2**13, 128), np.float16)
    call = validate.call(x, x[:1], x[:1], Options())
    chosen = {}
    for nodes in (1, 4):
        comm = distributed.Threads(8, nodes).ranks[0]
        layout = distributed.layout(comm, 2**13)
        chosen[nodes] = schemes.plan(call, layout, layout, "auto", comm.nodes).scheme
    assert chosen[4] == "nodes"
    assert chosen[1] != "nodes"
