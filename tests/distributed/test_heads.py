"""Rows that travel to the ranks of their heads: each head is computed as on one rank."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from lost_messages import lose_messages
from placement import same_bits
from ranks import TIMEOUT, OverRanks, blocks_of

import cupyflash
from cupyflash import distributed, masks, scores
from cupyflash.backends.cpu import Cpu
from cupyflash.distributed import DistributedError, executor
from cupyflash.distributed.partition import schemes
from cupyflash.distributed.partition.head_batches import shares
from cupyflash.distributed.partition.model import Model
from cupyflash.problem import validate

OFFSETS = [0, 30, 30, 41, 90], [0, 20, 33, 40, 77]
LENGTHS = OFFSETS[0][-1], OFFSETS[1][-1]


def draw(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def arrays_of(lead, heads, heads_kv, dtype):
    rows, keys = LENGTHS
    return draw(
        (*lead, heads, rows, 16), (*lead, heads_kv, keys, 16), (*lead, heads_kv, keys, 24),
        (*lead, heads, rows, 24), dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
def test_bits_are_those_of_one_rank(kind, packed, dtype):
    """Whatever depends on the head: masks, scores, the bias, the sink and dropout."""
    heads, heads_kv, offsets = 10, 5, OFFSETS if packed else ()
    q, k, v, do = arrays_of(() if packed else (2,), heads, heads_kv, dtype)
    longest = [int(np.diff(x).max()) for x in OFFSETS] if packed else LENGTHS
    bias, sink, slopes = draw((heads, *longest), (heads,), (heads,), seed=1)
    options = {
        "mask": masks.mask(lambda b, h, i, j: (i + j + h + b) % 5 != 0) & masks.window(60, 20),
        "score_mod": scores.alibi(slopes), "bias": bias, "sink": sink, "dropout": 0.3, "seed": 4,
    }  # fmt: skip
    one, packed_one = cupyflash.attention_vjp, cupyflash.attention_varlen_vjp
    out, lse, vjp = (packed_one if packed else one)(q, k, v, *offsets, return_lse=True, **options)
    over = OverRanks(3, kind, kind, scheme="heads")
    with blocks_of(8):
        ours, our_lse = over.attention(q, k, v, *offsets, return_lse=True, **options)
        gradients = over.attention_backward(do, q, k, v, ours, our_lse, *offsets, **options)
    assert same_bits(ours, out)
    assert same_bits(our_lse, lse)
    for mine, theirs in zip(gradients, vjp(do), strict=True):
        assert same_bits(mine, theirs)


@pytest.mark.parametrize(
    "shape", [(LENGTHS[0], LENGTHS[1]), (4, LENGTHS[0], 1), (2, 1, 1, LENGTHS[1]), (4, 1, 1), ()],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("size", "scheme"), [(3, "heads"), (6, "heads x rounds")])
def test_gradients_of_any_bias(shape, size, scheme):
    """Those of one bias for several heads are sums over ranks."""
    q, k, v, do = arrays_of((2,), 4, 4, np.float64)
    (bias,) = draw(shape, dtype=np.float64)
    out, vjp = cupyflash.attention_vjp(q, k, v, bias=bias)
    over = OverRanks(size, "cyclic", "contiguous", scheme=scheme)
    with blocks_of(8):
        ours, lse = over.attention(q, k, v, bias=bias, return_lse=True)
        gradients = over.attention_backward(do, q, k, v, ours, lse, bias=bias)
    np.testing.assert_allclose(ours, out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(gradients.dbias, vjp(do).dbias, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("leads", [((), (2,), (2,)), ((1,), (1,), (2,)), ((3, 1), (2,), (1, 1))])
@pytest.mark.parametrize(("size", "scheme"), [(2, "heads"), (6, "heads x rounds"), (3, "rounds")])
def test_leading_axes_that_are_repeated(leads, size, scheme):
    shapes = (4, 30, 16), (4, 40, 16), (4, 40, 24)
    q, k, v = draw(*((*lead, *shape) for lead, shape in zip(leads, shapes, strict=True)))
    (do,) = draw((*np.broadcast_shapes(*leads), 4, 30, 24), seed=1)
    out, lse, vjp = cupyflash.attention_vjp(q, k, v, return_lse=True)
    over = OverRanks(size, "contiguous", "contiguous", scheme=scheme)
    with blocks_of(8):
        ours, our_lse = over.attention(q, k, v, return_lse=True)
        gradients = over.attention_backward(do, q, k, v, ours, our_lse)
    for mine, theirs in zip((ours, our_lse, *gradients), (out, lse, *vjp(do)), strict=True):
        if theirs is not None:
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [60, 9])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_groups_of_ranks_divide_the_heads(packed, window):
    """Three ranks have 1, 1 and 2 of the key-value heads; two such groups exchange keys."""
    offsets = OFFSETS if packed else ()
    q, k, v, do = arrays_of(() if packed else (2,), 8, 4, np.float64)
    sink, slopes = draw((8,), (8,), dtype=np.float64, seed=1)
    options = {
        "mask": masks.mask(lambda b, h, i, j: (i + j + h + b) % 5 != 0) & masks.window(window, 5),
        "score_mod": scores.alibi(slopes), "sink": sink, "dropout": 0.3, "seed": 4,
    }  # fmt: skip
    one = cupyflash.attention_varlen_vjp if packed else cupyflash.attention_vjp
    out, vjp = one(q, k, v, *offsets, **options)
    kinds = ("proofs", "zigzag") if window > 9 else ("contiguous", "contiguous")
    over = OverRanks(6, *kinds, scheme="heads x rounds")
    results = []
    with blocks_of(8):
        for _ in range(2):
            ours, lse = over.attention(q, k, v, *offsets, return_lse=True, **options)
            gradients = over.attention_backward(do, q, k, v, ours, lse, *offsets, **options)
            results.append([ours, lse, *gradients[:3], gradients.dsink])
    assert np.array_equal(ours == 0, out == 0)
    for mine, theirs in zip((ours, *gradients), (out, *vjp(do)), strict=True):
        if theirs is not None:
            np.testing.assert_allclose(mine, theirs, rtol=1e-11, atol=1e-12)
    for first, second in zip(*results, strict=True):
        assert same_bits(first, second)


@pytest.mark.parametrize(
    ("nodes", "heads", "group"),
    [
        ([0, 0, 1, 1], 8, 2),
        ([0] * 8 + [1] * 8, 8, 8),
        ([0] * 8 + [1] * 8, 6, 4),
        ([0] * 4, 2, 2),
        ([0] * 4, 4, 1),  # a head for each rank
        ([0] * 6, 4, 3),
        ([0, 1, 2, 3], 8, 1),
        ([0, 1, 0, 1], 8, 1),
        ([0, 0, 0, 1], 8, 1),
        ([0, 0, 1, 1, 0, 0], 8, 1),
        ([0, 0, 1, 1], 1, 1),
    ],
)
def test_groups_are_in_a_node(nodes, heads, group):
    x = np.ones((heads, 8, 4))
    made = validate.call(x, x, x)
    assert schemes.group_size(made, "heads x rounds", nodes) == group
    known = schemes.candidates(made, nodes)
    assert ("heads x rounds" in known) == (group > 1)
    assert ("heads" in known) == (len(nodes) <= heads)


def test_heads_of_ranks_are_all_heads():
    for heads in range(1, 9):
        for size in range(1, heads + 1):
            made = shares(heads, size)
            assert [n for each in made for n in each] == list(range(heads))
            assert {len(each) for each in made} <= {heads // size, heads // size + 1}


def call(comm, scheme, heads=2, **options):
    x = np.ones((heads, 300, 8), np.float32)
    layout = distributed.layout(comm, 300)
    own = layout.take(x)
    return distributed.attention(own, own, own, comm=comm, layout=layout, scheme=scheme, **options)


def test_more_ranks_than_heads_are_refused_with_the_remedy():
    words = (
        r'scheme: got "heads" with 3 ranks for 2 key-value heads; expected a head or more for each '
        r'rank\. Pass scheme="rounds", or repeat the heads of k and v\.'
    )
    with pytest.raises(DistributedError, match=words):
        distributed.Threads(3).run(lambda comm: call(comm, "heads"))
    words = r'"heads x rounds" with 3 ranks for 2 key-value heads; expected nodes with as many'
    with pytest.raises(DistributedError, match=words):
        distributed.Threads(3).run(lambda comm: call(comm, "heads x rounds"))
    assert len(distributed.Threads(3).run(lambda comm: call(comm, "heads", 6))) == 3
    assert len(distributed.Threads(3).run(lambda comm: call(comm, "auto"))) == 3


@pytest.mark.parametrize("best", ["rounds", "gather", "heads"])
def test_auto_takes_the_scheme_that_the_model_prefers(best, monkeypatch):
    """On every rank, and not one that cannot serve the call."""
    asked = []

    def seconds(model, scheme, group):
        asked.append(scheme)
        return 1.0 if scheme == best else 2.0

    monkeypatch.setattr(Model, "seconds", seconds)
    x = np.ones((2, 300, 8), np.float32)
    for size, wanted in ((2, best), (3, "rounds" if best == "heads" else best)):
        for comm in distributed.Threads(size).ranks:
            layout = distributed.layout(comm, 300)
            made = validate.call(*[layout.take(x)] * 3)
            assert schemes.plan(made, layout, layout, "auto", comm.nodes).scheme == wanted
            assert schemes.plan(made, layout, layout, "rounds", comm.nodes).scheme == "rounds"
    assert set(asked) == {"rounds", "gather", "heads"}


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("forward_piece", "heads"), ("backward", "heads"), ("forward_piece", "heads x rounds"),
     ("backward", "heads x rounds")],
)  # fmt: skip
def test_a_rank_that_raises_in_the_middle_ends_all(name, scheme, monkeypatch):
    compute = getattr(Cpu, name)
    threads = distributed.Threads(2 if scheme == "heads" else 4)
    here = threading.local()

    def broken(self, part, *args, **options):
        if here.rank == 1:
            raise MemoryError("no room for a tile")
        return compute(self, part, *args, **options)

    def work(comm):
        here.rank = comm.rank
        layout = distributed.layout(comm, 600)
        own = layout.take(np.ones((2, 600, 8), np.float32))
        options = {"comm": comm, "layout": layout, "scheme": scheme}
        out, vjp = distributed.attention_vjp(own, own, own, **options)
        return vjp(out)

    monkeypatch.setattr(Cpu, name, broken)
    words = "rank 1 raised MemoryError: no room for a tile"
    with pytest.raises(DistributedError, match=words):
        threads.run(work)
    with pytest.raises(DistributedError, match=words):
        threads.ranks[0].check()


@pytest.mark.parametrize("scheme", ["heads", "heads x rounds"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_lost_message_ends_all(backward, scheme, monkeypatch):
    threads, to_lose = distributed.Threads(2 if scheme == "heads" else 4), threading.Event()

    def work(comm):
        if not backward:
            return call(comm, scheme, timeout=TIMEOUT)
        layout = distributed.layout(comm, 300)
        own = layout.take(np.ones((2, 300, 8), np.float32))
        options = {"comm": comm, "layout": layout, "scheme": scheme, "timeout": TIMEOUT}
        out, vjp = distributed.attention_vjp(own, own, own, **options)
        comm.tell(b"", TIMEOUT)  # no rank is still in the forward
        to_lose.set()
        return vjp(out)

    if not backward:
        to_lose.set()
    lose_messages(monkeypatch, threads, lambda rank: rank == 0 and to_lose.is_set())
    words = "timed out after 60 s waiting for rank 0 "
    if scheme == "heads":  # others may come to a round first
        words += r"\(.*ranks of their heads"
    with pytest.raises(DistributedError, match=words):
        threads.run(work)


@pytest.fixture
def by_documents(monkeypatch):
    """Let "auto" be by heads for one document, else in rounds; plans say what they are."""
    planned = []

    def cheapest(call, *_, **__):
        return "rounds" if call.mask.structure[1][0].max() else "heads"

    made = schemes.plan
    monkeypatch.setattr(schemes, "cheapest", cheapest)
    monkeypatch.setattr(executor, "plan", lambda *x: planned.append(found := made(*x)) or found)
    return lambda: {planned.pop().scheme for _ in list(planned)}


def test_ranks_decide_what_auto_is_when_they_have_agreed_on_a_call(by_documents):
    (x,) = draw((2, LENGTHS[0], 8))
    one, many = np.zeros(LENGTHS[0], int), np.arange(LENGTHS[0]) // 9
    comms = distributed.Threads(2)
    with blocks_of(4):
        layouts = [distributed.layout(comm, LENGTHS[0]) for comm in comms.ranks]

        def call(comm, ids, dtype=np.float32):
            own = np.ascontiguousarray(layouts[comm.rank].take(x))
            v = own.astype(dtype) if comm.rank else own
            options = {"comm": comm, "layout": layouts[comm.rank], "mask": masks.segments(ids)}
            return distributed.attention(own, own, v, **options)

        def refused(comm):
            with pytest.raises(DistributedError, match="expected one dtype"):
                call(comm, one, np.float64)

        comms.run(refused)
        assert by_documents() == {"heads"}  # of a rank whose arrays are right
        for ids in (many, one, many):  # the first of them decides
            comms.run(lambda comm, ids=ids: call(comm, ids))
            assert by_documents() == {"rounds"}
        assert executor.decisions(comms.ranks[0]).schemes(layouts[0]) == ["rounds"]
        comms = distributed.Threads(2)  # others decide anew
        comms.run(lambda comm: call(comm, one))
        assert by_documents() == {"heads"}


def test_each_pair_of_layouts_has_its_own_scheme(by_documents):
    (x,) = draw((2, LENGTHS[0], 8))
    comms = distributed.Threads(2)
    with blocks_of(4):

        def work(comm):
            layout = distributed.layout(comm, LENGTHS[0])
            others = [layout, distributed.layout(comm, LENGTHS[0], kind="cyclic")]
            q = np.ascontiguousarray(layout.take(x))
            for documents in (LENGTHS[0], 9, 5):
                mask = masks.segments(np.arange(LENGTHS[0]) // documents)
                for layout_k in others if documents > 9 else [*others, *others]:
                    k = np.ascontiguousarray(layout_k.take(x))
                    options = {"comm": comm, "layout": layout, "layout_k": layout_k}
                    distributed.attention(q, k, k, mask=mask, **options)
            return executor.decisions(comm).schemes(layout)

        assert comms.run(work) == [["heads", "heads"]] * 2
    assert by_documents() == {"heads"}
