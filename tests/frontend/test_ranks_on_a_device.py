"""Calls over ranks on a device that is the host's memory: what is made again from a tape.

The back end is the CPU's, so that results are those of NumPy arrays, bit by bit.
"""

from __future__ import annotations

import dataclasses
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from halves import mostly_thorough
from host_cupy import HostCupy, in_host, read_in_host
from placement import same_bits
from ranks import blocks_of

from cupyflash import dispatch, distributed, masks, scores
from cupyflash.arrays import tape as tapes
from cupyflash.backends.gpu import Gpu
from cupyflash.distributed import DistributedError
from cupyflash.distributed.partition import schemes
from cupyflash.gpu import jit
from cupyflash.problem.call import Gradients

LENGTH = 96
ARRAYS = "q", "k", "v", "bias", "sink"


class OnHost(Gpu):
    """A back end that computes on the CPU, and says so to the tape."""

    def _work(self, function, call, arrays):
        named = {name: getattr(call, name) for name in ARRAYS if getattr(call, name) is not None}
        read = {"mask": read_in_host(call.mask), "score_mod": read_in_host(call.score_mod)}

        def work(*given):
            own = read | dict(zip(named, map(in_host, given), strict=False))
            rest = [in_host(x) for x in given[len(named) :]]
            function(dataclasses.replace(call, device=None, **own), *rest)

        every = *named.values(), *arrays
        if (written := tapes.current()) is not None:
            written.elementwise(work, *every)
        work(*every)

    def forward_piece(self, call, partial, first, results=None):
        def function(own, *made):
            dispatch.CPU.forward_piece(own, made[:2], first, made[2:] or None)

        self._work(function, call, [*partial, *(results or ())])

    def backward_piece(self, call, do, out, lse, dlse, gradients, deterministic):
        there = [x for x in gradients if x is not None]
        given = [x is not None for x in gradients]
        rows = [do, out, lse, *([] if dlse is None else [dlse])]

        def function(own, *made):
            left = list(made[len(rows) :])
            made_gradients = Gradients(*(left.pop(0) if x else None for x in given))
            statistics = (*made[: len(rows)], *([None] if dlse is None else []))
            dispatch.CPU.backward_piece(own, *statistics, made_gradients, deterministic)

        self._work(function, call, [*rows, *there])


class Cupy(HostCupy):
    """With sums and downloads; memory that is new is full of NaN."""

    def __init__(self):
        super().__init__()
        self.ndarray.get = lambda array: array.host.copy()
        self.ndarray.copy = lambda array: self.asarray(array.host)

    def alloc(self, size):
        made = super().alloc(size)
        made.held.fill(0xFF)
        return made


@pytest.fixture
def cupy(install, monkeypatch):
    # By tiles, sums depend on where a piece of keys begins, which differs where less is proven.
    monkeypatch.setenv("CUPYFLASH_AMX", "none")
    made = install(Cupy())
    monkeypatch.setattr(dispatch, "GPU", OnHost())
    return made


@pytest.fixture
def played(monkeypatch):
    """The tapes that were played."""
    found, play = [], tapes.Tape.play
    monkeypatch.setattr(
        tapes.Tape, "play", lambda tape, *x: (found.append(tape), play(tape, *x))[1]
    )
    return found


def draw(seed, heads=4):
    rng = np.random.default_rng(seed)
    shapes = (2, heads, LENGTH, 8), (2, 2, LENGTH, 8), (2, 2, LENGTH, 12), (2, heads, LENGTH, 12)
    return [rng.standard_normal(shape).astype(np.float16) for shape in shapes]


class Case:
    """A call on some ranks, whose layouts stay."""

    def __init__(self, size, kind, scheme, options, check=True):
        self.comms = distributed.Threads(size, 2 if scheme == "nodes" else 1)
        self.layouts = [distributed.layout(comm, LENGTH, kind=kind) for comm in self.comms.ranks]
        self.scheme, self.options, self.check = scheme, options, check

    def run(self, arrays, place, **more):
        def work(comm):
            layout = self.layouts[comm.rank]
            q, k, v, do = (place(np.ascontiguousarray(layout.take(x))) for x in arrays)
            options = {"comm": comm, "layout": layout, "scheme": self.scheme}
            options |= {"check": self.check, **self.options(place), **more}
            out, lse = distributed.attention(q, k, v, return_lse=True, **options)
            return out, lse, *distributed.attention_backward(do, q, k, v, out, lse, **options)[:3]

        return [x for of_rank in self.comms.run(work) for x in map(in_host, of_rank)]


OPTIONS = {
    "none": lambda _: {},
    "causal": lambda _: {"mask": masks.causal()},
    "dropout": lambda _: {"mask": masks.window(40, 3), "dropout": 0.4, "seed": 3},
    "alibi": lambda place: {
        "mask": masks.window(20, 3), "score_mod": scores.alibi(place(np.ones(4, np.float32)))
    },
}  # fmt: skip
SCHEMES = [
    (2, "rounds"),
    (3, "rounds"),
    (3, "gather"),
    (4, "nodes"),
    (2, "heads"),
    (4, "heads x rounds"),
]


QUICK = [("none", 3, "gather"), ("causal", 2, "rounds"), ("dropout", 2, "heads"),
         ("alibi", 4, "heads x rounds"), ("causal", 4, "nodes")]  # fmt: skip


@mostly_thorough(
    ("kind", "size", "scheme"),
    [(kind, *scheme) for kind in OPTIONS for scheme in SCHEMES],
    quick=QUICK,
    why="each scheme with each kind of options",
)
def test_a_call_that_is_made_again_has_the_bits_of_numpy(kind, size, scheme, cupy, played):
    with blocks_of(4):
        case = Case(size, "zigzag", scheme, OPTIONS[kind], check=kind != "alibi")
        for n in range(3):
            arrays = draw(n)
            ours = case.run(arrays, cupy.asarray)
            assert len(played) == 2 * size * n  # every call but the first one
            theirs = case.run(arrays, np.asarray)
            assert all(map(same_bits, ours, theirs))


def test_a_seed_is_not_kept(install, played):
    """What kernels are told, by the back end of the GPU itself."""
    cupy = install(Cupy())
    with blocks_of(4):
        case = Case(2, "zigzag", "rounds", lambda _: {"dropout": 0.4})
        for n in range(3):
            seed = 2**40 + 17 + n
            before = len(cupy.launches)
            case.run(draw(0), cupy.asarray, seed=seed)
            launches = [x for x in cupy.launches[before:] if "forward" in x.kernel]
            assert launches
            assert all(seed in x.words and seed - 1 not in x.words for x in launches)
    assert len(played) == 8


def test_outputs_may_be_given_and_must_not_overlap(cupy, played):
    with blocks_of(4):
        case = Case(2, "contiguous", "rounds", OPTIONS["causal"])

        def work(comm, seed, out_of=lambda q: None):
            layout = case.layouts[comm.rank]
            q, k, v, _ = (cupy.asarray(np.ascontiguousarray(layout.take(x))) for x in draw(seed))
            v = v[..., :8]
            out, options = out_of(q), {"comm": comm, "layout": layout, "mask": masks.causal()}
            made = distributed.attention(q, k, v, scheme="rounds", out=out, **options)
            assert out is None or made is out
            return made.host.copy()

        def empty(q):
            return cupy.ndarray(q.shape, q.dtype)

        expected = case.comms.run(lambda comm: work(comm, 1))
        for n in range(2):
            found = case.comms.run(lambda comm: work(comm, 1, empty))
            assert len(played) == 2 * n
            assert all(map(same_bits, found, expected))
        with pytest.raises(DistributedError, match="out and q share memory"):
            case.comms.run(lambda comm: work(comm, 1, lambda q: q))
    assert len(played) == 2


def test_a_rank_that_calls_otherwise_is_told_by_those_that_make_a_call_again(cupy, played):
    with blocks_of(4):
        case = Case(2, "zigzag", "rounds", OPTIONS["causal"])
        case.run(draw(0), cupy.asarray)

        def work(comm):
            layout, change = case.layouts[comm.rank], {"scale": 0.5} if comm.rank else {}
            q, k, v, _ = (cupy.asarray(np.ascontiguousarray(layout.take(x))) for x in draw(1))
            options = {"comm": comm, "layout": layout, "scheme": "rounds", "return_lse": True}
            with pytest.raises(DistributedError, match=r"scale: .* on rank 0; 0.5 on rank 1"):
                distributed.attention(q, k, v, mask=masks.causal(), **options, **change)

        case.comms.run(work)
        assert not played
        ours = case.run(draw(2), cupy.asarray)
        assert len(played) == 4
        assert all(map(same_bits, ours, case.run(draw(2), np.asarray)))


def test_what_a_tape_cannot_tell_apart_is_checked_every_time(cupy, played):
    with blocks_of(4):
        case = Case(2, "zigzag", "rounds", OPTIONS["causal"])

        def work(comm):
            own = np.ascontiguousarray(case.layouts[comm.rank].take(draw(0)[0]))
            x, y, z = (cupy.asarray(own) for _ in "123")
            options = {"comm": comm, "layout": case.layouts[comm.rank], "scheme": "rounds"}
            for _ in range(2):
                distributed.attention(x, x, x, **options)  # three names of one array
            mask = masks.lengths(cupy.asarray(np.array([90, 7])))
            for _ in range(2):
                distributed.attention(x, y, z, mask=mask, **options)

        case.comms.run(work)
    assert not played


@pytest.mark.parametrize("scheme", ["heads", "auto", "rounds"])
def test_what_a_mask_reads_may_change_and_rows_that_travel_by_heads_need_no_plan(
    scheme, cupy, played, monkeypatch
):
    monkeypatch.setattr(schemes, "cheapest", lambda *_, **__: next(chosen))
    chosen = iter(["heads"] * 4 + ["rounds"] * 99)  # of two ranks, forward and backward
    ids = np.zeros(LENGTH, int)
    there = cupy.asarray(ids)

    def options(place):
        return {"mask": masks.causal() & masks.segments(ids if place is np.asarray else there)}

    with blocks_of(4):
        case = Case(2, "zigzag", scheme, options, check=False)
        theirs = Case(2, "zigzag", "rounds" if scheme == "rounds" else "heads", options)
        for n, each in enumerate((19, 7, LENGTH)):
            ids[:] = there.host[:] = np.arange(LENGTH) // each
            arrays = draw(n)
            ours = case.run(arrays, cupy.asarray)
            assert len(played) == (0 if scheme == "rounds" else 4 * n)
            assert all(map(same_bits, ours, theirs.run(arrays, np.asarray)))


@pytest.mark.parametrize("kind", ["zigzag", "documents"])
def test_what_a_mask_reads_is_compared_with_what_it_was_where_ranks_send_by_it(kind, cupy, played):
    """Where documents are whole, none is sent, and stale results are computed again."""
    ids = np.arange(LENGTH) // 16
    ids[50:] += 9
    there = cupy.asarray(ids)

    def options(place):
        return {"mask": masks.causal() & masks.segments(ids if place is np.asarray else there)}

    with blocks_of(4):
        case = Case(2, kind, "rounds", options, check=False)
        theirs = Case(2, kind, "rounds", options)
        if kind == "documents":
            for each in (case, theirs):
                each.layouts = [
                    distributed.layout(comm, LENGTH, kind=kind, mask=options(np.asarray)["mask"])
                    for comm in each.comms.ranks
                ]
                assert each.layouts[0].price.received == 0
        stale = 0
        for n, moved in enumerate((0, 0, 7, 0, 7, 0)):
            ids[:] = there.host[:] = np.roll(ids, moved)
            arrays = draw(n)
            ours = case.run(arrays, cupy.asarray)
            if n % 2:
                assert len(played) == stale + 4  # of two ranks, forward and backward
            elif n == 2:  # nothing is sent, so that it is computed while contents are compared
                assert len(played) == stale + (4 if kind == "documents" else 0)
            else:
                assert len(played) == stale
            stale = len(played)
            assert all(map(same_bits, ours, theirs.run(arrays, np.asarray)))


@pytest.mark.parametrize(("size", "kind"), [(2, "zigzag"), (3, "cyclic")])
def test_parts_of_look_ups_have_the_bits_of_numpy(size, kind, cupy, played):
    documents, distances = np.arange(LENGTH) // 19, np.arange(LENGTH, dtype=np.float32) % 7
    with blocks_of(4):
        case = Case(size, kind, "rounds", lambda _: {}, check=False)
        made = []
        for place in (cupy.asarray, cupy.asarray, np.asarray):

            def work(comm, place=place):
                layout = case.layouts[comm.rank]
                own = [place(layout.take(x, axis=-1)) for x in (documents, distances)]
                of, far = map(distributed.sharded, own)
                q, k, v, do = (place(np.ascontiguousarray(layout.take(x))) for x in draw(0))
                out, vjp = distributed.attention_vjp(
                    q, k, v, comm=comm, layout=layout, scheme="rounds", check=False,
                    mask=masks.mask(lambda b, h, i, j: of[i] - of[j] <= 1) & masks.causal(),
                    score_mod=scores.score(lambda s, b, h, i, j: s + far[j]),
                )  # fmt: skip
                return out, *vjp(do)[:3]

            made.append([x for of_rank in case.comms.run(work) for x in map(in_host, of_rank)])
    assert all(map(same_bits, made[0], made[2]))
    assert all(map(same_bits, made[1], made[2]))
    assert not played  # what look-ups hold is read every time


def test_another_layout_of_the_same_sizes_has_its_own_tape(cupy, played):
    with blocks_of(4):
        first = Case(2, "zigzag", "rounds", OPTIONS["causal"])
        first.run(draw(0), cupy.asarray)
        second = Case(2, "contiguous", "rounds", OPTIONS["causal"])
        second.comms = first.comms
        for n in range(2):
            ours = second.run(draw(n), cupy.asarray)
            assert all(map(same_bits, ours, second.run(draw(n), np.asarray)))
    assert len(played) == 4


def test_devices_of_one_process_load_kernels_at_the_same_time(install, monkeypatch):
    """One may wait for messages of a rank that has to load a kernel before it sends them."""
    install(Cupy())
    both = threading.Barrier(2)
    monkeypatch.setattr(jit, "_text", lambda special: special.name)
    monkeypatch.setattr(jit, "_compiled", lambda *_: both.wait(10))
    special = SimpleNamespace(
        name="a kernel",
        tiles=SimpleNamespace(shared_memory=0, beside=False),
        architecture=None,
    )
    made = distributed.Threads(2).run(lambda comm: jit.kernel(special, comm.rank))
    assert sorted(made) == [0, 1]


@pytest.mark.parametrize(("size", "scheme"), [(3, "rounds"), (2, "heads")])
def test_packed_sequences_have_the_bits_of_numpy(size, scheme, cupy, played):
    offsets = np.array([0, 20, 20, 27, 70, LENGTH])
    with blocks_of(4):
        comms = distributed.Threads(size)
        arrays = [x[0] for x in draw(5)]
        made = []
        for place in (cupy.asarray, np.asarray):

            def work(comm, place=place):
                layout = distributed.layout(comm, LENGTH, offsets_q=offsets)
                q, k, v, do = (place(np.ascontiguousarray(layout.take(x))) for x in arrays)
                options = {"comm": comm, "layout": layout, "scheme": scheme}
                options |= {"mask": masks.causal(), "dropout": 0.3, "seed": 2}
                ends = place(offsets), place(offsets)
                out, vjp = distributed.attention_varlen_vjp(q, k, v, *ends, **options)
                return out, *vjp(do)[:3]

            made.append([x for of_rank in comms.run(work) for x in map(in_host, of_rank)])
    assert all(map(same_bits, *made))
    assert not played  # what offsets hold is read every time
