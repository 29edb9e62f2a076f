"""Faults: whatever goes wrong on one rank, every rank raises, names it, and nothing hangs."""

from __future__ import annotations

import threading
import time
from functools import partial

import numpy as np
import pytest
from halves import mostly_thorough
from lost_messages import lose_messages
from ranks import TIMEOUT

from cupyflash import ArgumentError, ArgumentTypeError, distributed, masks, scores
from cupyflash.backends.cpu import Cpu
from cupyflash.distributed import DistributedError
from cupyflash.distributed.transport.communication import Communicator

LENGTH, SIZE = 384, 3
HERE = threading.local()  # the rank of a thread
SOON = 2.0  # seconds within which all ranks have raised


def outcomes(work, threads=None):
    """What a function returns or raises on each rank, all of which end soon."""

    def kept(comm):
        try:
            return work(comm)
        except BaseException as error:  # noqa: BLE001, it is looked at
            return error

    return (threads or distributed.Threads(SIZE)).run(kept)


def call(comm, function=distributed.attention, change=None, **options):
    """Make a call of one layout; `change` changes the arrays and options of a rank."""
    HERE.rank = comm.rank
    layout = distributed.layout(comm, LENGTH, kind="contiguous")
    x = np.random.default_rng(0).standard_normal((2, LENGTH, 8), dtype=np.float32)
    arrays = [layout.take(x)] * 3
    options = {"comm": comm, "layout": layout, "timeout": TIMEOUT, **options}
    if change is not None:
        arrays, options = change(arrays, options)
    return function(*arrays, **options)


def backward(q, k, v, **options):
    forward = {name: options[name] for name in ("comm", "layout", "timeout")}
    out, lse = distributed.attention(q, k, v, return_lse=True, **forward)
    return distributed.attention_backward(out, q, k, v, out, lse, **options)


def only(rank, change):
    """Change the call of one rank."""
    return lambda comm: change if comm.rank == rank else None


def all_raise(found, *words):
    """Every rank raised the same, with these words."""
    assert all(type(error) is DistributedError for error in found), found
    assert len({str(error) for error in found}) == 1, found
    for word in words:
        assert word in str(found[0]), str(found[0])


@pytest.fixture(scope="module")
def compiled():
    """The CPU's kernels, which no test has to wait for."""
    results = outcomes(partial(call, function=backward))
    assert not any(isinstance(result, BaseException) for result in results), results


@pytest.fixture(autouse=True)
def soon(compiled):
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < SOON + 1  # some of it waits


def with_options(**options):
    return lambda arrays, given: (arrays, {**given, **options})


def with_arrays(change):
    return lambda arrays, given: ([change(x) for x in arrays], given)


def other_keys(arrays, given):
    return [arrays[0], arrays[1][:, :100], arrays[2][:, :100]], given


SINK = np.zeros(2, np.float32)
RAISED = {
    "an array": (with_arrays(lambda x: x.tolist()), "ArgumentTypeError: q: got list"),
    "a mask": (with_options(mask="causal"), "ArgumentTypeError: mask: got str"),
    "a mask's array": (
        with_options(mask=masks.lengths(np.zeros((5, 2)).astype(int))),
        "expected one that broadcasts",
    ),
    "a score": (
        with_options(score_mod=scores.alibi(np.zeros((3, 2), np.float32))),
        "expected one that broadcasts",
    ),
    "sizes": (other_keys, "ArgumentError: k: got 100 positions; expected 128, those that"),
    "the bias": (
        with_options(bias=np.zeros((128, 128), np.float32)),
        f"bias: got shape (128, 128); expected a shape that broadcasts to (2, 128, {LENGTH})",
    ),
    "a flag": (with_options(return_lse=1), "return_lse: got 1; expected True or False"),
    "another flag": (with_options(check="no"), "check: got 'no'; expected True or False"),
    "dropout": (with_options(dropout=0.5), "dropout: got 0.5 without a seed"),
    "the scheme": (
        with_options(scheme="ring"),
        'scheme: got \'ring\'; expected one of "auto", "rounds", "gather", "nodes"',
    ),
    "the timeout": (with_options(timeout=-3.0), "timeout: got -3.0; expected seconds"),
    "no layout": (with_options(layout=None), "layout: got NoneType; expected what distributed"),
    "another rank's layout": (
        with_options(layout=distributed.layout(distributed.Threads(SIZE).ranks[0], LENGTH)),
        f"layout: got the layout of rank 0 of {SIZE}; expected that of rank 1",
    ),
    "the output": (
        with_options(out=np.zeros((2, 4, 8), np.float32)),
        "out: got shape (2, 4, 8)",
    ),
}


@mostly_thorough(
    "what", RAISED, quick=["an array", "sizes", "a score", "the scheme", "no layout"],
    why="other checks of one rank",
)  # fmt: skip
def test_a_rank_with_a_wrong_argument_stops_all_before_anything_is_sent(what, monkeypatch):
    change, words = RAISED[what]
    threads = distributed.Threads(SIZE)
    sent = []
    monkeypatch.setattr(type(threads.ranks[0]), "exchange", lambda *_: sent.append(1), raising=True)
    found = outcomes(lambda comm: call(comm, change=only(1, change)(comm)), threads)
    all_raise(found, "rank 1 raised ", words, "No rank began the call")
    assert not sent
    assert isinstance(found[1].__cause__, (ArgumentError, ArgumentTypeError))
    monkeypatch.undo()
    again = outcomes(call, threads)  # the communicator goes on
    assert all(isinstance(out, np.ndarray) for out in again)


DIFFERENT = {
    "scale": (with_options(scale=0.5), "scale: 0.35355"),
    "dropout": (with_options(dropout=0.5, seed=1), "dropout: 0.0 on rank"),
    "seed": (with_options(seed=7), "seed: 0 on ranks 0, 2; 7 on rank 1"),
    "mask": (with_options(mask=masks.causal()), "mask: None on ranks 0, 2; "),
    "score_mod": (with_options(score_mod=scores.softcap(3.0)), "score_mod: None on ranks 0, 2; "),
    "bias": (with_options(bias=np.zeros((128, LENGTH))), "bias: None on ranks 0, 2; (L, 384)"),
    "sink": (with_options(sink=SINK), "sink: None on ranks 0, 2; "),
    "precision": (with_options(precision="tf32x3"), "precision: None on ranks 0, 2; tf32x3"),
    "dtype": (with_arrays(lambda x: x.astype(np.float64)), "q: (2, L, 8) of float32 on ranks"),
    "heads": (with_arrays(lambda x: x[:1]), "k: (2, L, 8) of float32 on ranks 0, 2; (1, L, 8)"),
    "head size": (with_arrays(lambda x: x[..., :4]), "v: (2, L, 8) of float32 on ranks 0, 2; "),
    "batch": (with_arrays(lambda x: x[None]), "q: (2, L, 8) of float32 on ranks 0, 2; (1, 2, L"),
    "scheme": (with_options(scheme="gather"), "scheme: rounds on ranks 0, 2; gather on rank 1"),
}


@mostly_thorough(
    "what", DIFFERENT, quick=["scale", "mask", "dtype", "scheme"], why="other fields of a digest"
)
def test_ranks_that_make_different_calls_stop_before_anything_is_sent(what):
    change, words = DIFFERENT[what]
    threads = distributed.Threads(SIZE)
    found = outcomes(lambda comm: call(comm, change=only(1, change)(comm)), threads)
    all_raise(found, "the ranks do not make the same call:", words, "Pass the same on every rank")
    assert all(isinstance(out, np.ndarray) for out in outcomes(call, threads))


def test_numbers_of_masks_arrays_of_masks_and_layouts_are_compared():
    def masked(comm, mask):
        return call(comm, mask=mask(comm.rank), score_mod=scores.softcap(1.0))

    for mask in (
        lambda rank: masks.window(3 + (rank == 2), 0),
        lambda rank: masks.segments(np.arange(LENGTH) // (9 - (rank == 2))),
        lambda rank: masks.causal(offset=rank // 2),
    ):
        all_raise(outcomes(partial(masked, mask=mask)), "mask: ", "ranks 0, 1; ", "on rank 2")

    def laid(comm):
        kind = "zigzag" if comm.rank == 0 else "cyclic"
        layout = distributed.layout(comm, 768, kind=kind)
        own = np.zeros((1, layout.count, 4), np.float32)
        return distributed.attention(own, own, own, comm=comm, layout=layout)

    all_raise(outcomes(laid), "layout: zigzag, 768 positions on 3 ranks", "cyclic, 768 positions")
    sinks = [SINK, SINK, SINK + 1]
    all_raise(outcomes(lambda comm: call(comm, sink=sinks[comm.rank])), "sink: (2,) of float32 [")


def test_masks_that_differ_are_told_in_words_around_the_difference():
    def masked(comm, *parts):
        first, last = (parts[comm.rank == 2], parts[comm.rank != 2])
        return call(comm, mask=masks.window(first, 0) & ~masks.prefix(last))

    all_raise(
        outcomes(lambda comm: masked(comm, 5, 6)), "- 5) <= j)", "on ranks 0, 1; ", "- 6) <= j)"
    )
    long = masks.causal()
    for n in range(30):
        long |= masks.prefix(n)

    def longer(comm):
        return call(comm, mask=long & masks.prefix(40 + (comm.rank == 2)) & masks.lengths(200))

    all_raise(outcomes(longer), "mask: ...", "(j < 40)", "(j < 41)")

    def too_long(comm):  # each of these doublings is one operation
        doubled = masks.prefix(40 + (comm.rank == 2))
        for _ in range(40):
            doubled = doubled & doubled
        return call(comm, mask=doubled)

    all_raise(outcomes(too_long), "mask: 4", " operations [")


def test_a_backward_meets_a_forward_or_another_backward():
    threads = distributed.Threads(SIZE)

    def mixed(comm):
        out, lse = call(comm, return_lse=True)
        if comm.rank == 0:
            return call(comm)
        return call(
            comm, lambda *x, **options: distributed.attention_backward(out, *x, out, lse, **options)
        )

    all_raise(outcomes(mixed, threads), "function: attention on rank 0; attention_backward on")
    for option, words in (({"deterministic": True}, "deterministic: "), ({"dlse": 1}, "dlse: ")):

        def different(comm, option=option):
            given = dict(option) if comm.rank == 2 else {}
            if "dlse" in given:
                given["dlse"] = np.zeros((2, 128), np.float32)
            return call(comm, partial(backward, **given))

        all_raise(outcomes(different, threads), words, "on rank 2")


def test_a_bias_of_one_row_is_the_same_everywhere():
    biases = [np.full((1, LENGTH), float(rank // 2), np.float32) for rank in range(SIZE)]
    found = outcomes(lambda comm: call(comm, bias=biases[comm.rank]))
    all_raise(found, "a bias of one row for all queries differs", "on ranks 0, 1; ", "on rank 2")
    biases[2] = np.zeros((128, LENGTH), np.float32)
    found = outcomes(lambda comm: call(comm, bias=biases[comm.rank]))
    all_raise(found, "rank 2 passed a row for each query, and ranks 0, 1 one for all")


@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_does_not_come_ends_the_others_in_time(late):
    threads = distributed.Threads(SIZE)
    together, over = threading.Barrier(SIZE - 1), threading.Barrier(SIZE)

    def work(comm):
        if comm.rank == 1:
            if not late:
                return None
            over.wait(TIMEOUT)
            return call(comm)
        together.wait(TIMEOUT)
        try:
            return call(comm, timeout=1.0)
        finally:
            if late:
                over.wait(TIMEOUT)

    found = outcomes(work, threads)
    all_raise(found if late else [found[0], found[2]], "timed out after 1 s waiting for rank 1 ")
    refused = outcomes(call, threads)
    all_raise(refused, "timed out", "The communicator is ended")


def no_rank_is_wrong_and_all_are_ended(found, expected, threads, *words):
    """Who needed the rank that failed raised; others have all of their results, till they call."""
    raised = [error for error in found if isinstance(error, DistributedError)]
    assert raised
    all_raise(raised, *words)
    for ours, theirs in zip(found, expected, strict=True):
        if not isinstance(ours, DistributedError):
            for x, y in zip(results(ours), results(theirs), strict=True):
                assert np.array_equal(x, y)
    all_raise(outcomes(call, threads), *words, "The communicator is ended")


def results(returned):
    return [returned] if isinstance(returned, np.ndarray) else list(returned[:3])


BOTH = pytest.mark.parametrize(
    "function", [distributed.attention, backward], ids=["forward", "backward"]
)


@BOTH
@pytest.mark.parametrize("scheme", ["rounds", "gather", "nodes"])
@pytest.mark.parametrize("broken_piece", [1, 2])
def test_a_rank_that_raises_in_the_middle_ends_all(function, scheme, broken_piece, monkeypatch):
    name = "forward_piece" if function is distributed.attention else "backward"
    compute, calls = getattr(Cpu, name), threading.local()

    def broken(self, piece, *args, **options):
        calls.number = getattr(calls, "number", 0) + 1
        if HERE.rank == 1 and calls.number == broken_piece:
            raise MemoryError("no room for a tile")
        return compute(self, piece, *args, **options)

    work = partial(call, function=function, scheme=scheme)
    size = (4, 2) if scheme == "nodes" else (SIZE,)
    expected = outcomes(work, distributed.Threads(*size))
    monkeypatch.setattr(Cpu, name, broken)
    threads = distributed.Threads(*size)
    found = outcomes(work, threads)
    assert isinstance(found[1], DistributedError)
    assert isinstance(found[1].__cause__, MemoryError)
    monkeypatch.undo()
    words = "rank 1 raised MemoryError: no room for a tile"
    no_rank_is_wrong_and_all_are_ended(found, expected, threads, words)


def test_an_interrupt_stays_one_and_ends_all(monkeypatch):
    compute = Cpu.forward_piece

    def interrupted(self, piece, *args):
        if HERE.rank == 2:
            raise KeyboardInterrupt
        return compute(self, piece, *args)

    monkeypatch.setattr(Cpu, "forward_piece", interrupted)
    threads = distributed.Threads(SIZE)
    found = outcomes(lambda comm: call(comm, scheme="rounds"), threads)
    assert isinstance(found[2], KeyboardInterrupt)
    all_raise(outcomes(call, threads), "rank 2 raised KeyboardInterrupt")


def test_a_program_that_fails_on_one_rank_ends_the_others():
    def work(comm):
        if comm.rank == 2:
            raise ZeroDivisionError("elsewhere in the program")
        return call(comm)

    with pytest.raises(ZeroDivisionError, match="elsewhere in the program"):
        distributed.Threads(SIZE).run(work)


def test_without_checks_wrong_sizes_are_found_where_they_arrive():
    wide = with_arrays(lambda x: np.concatenate([x, x], axis=-1))
    found = outcomes(lambda comm: call(comm, check=False, change=only(1, wide)(comm)))
    all_raise(found, "bytes from rank", "The two made different calls; check=True")
    found = outcomes(
        lambda comm: call(comm, check=False, change=only(1, with_options(mask="causal"))(comm))
    )
    all_raise(found, "rank 1 raised ArgumentTypeError: mask: got str")


@BOTH
@pytest.mark.parametrize("scheme", ["rounds", "gather", "nodes"])
@mostly_thorough("lost", range(12), quick=[0, 3], why="other messages are lost the same way")
def test_a_lost_message_ends_all_and_makes_no_wrong_result(lost, function, scheme, monkeypatch):
    size = (4, 2) if scheme == "nodes" else (SIZE,)
    threads, sent = distributed.Threads(*size), []

    def is_lost(rank):
        if rank == 0:
            sent.append(rank)
        return rank == 0 and len(sent) == lost + 1

    work = partial(call, function=function, scheme=scheme)
    expected = outcomes(work, distributed.Threads(*size))
    lose_messages(monkeypatch, threads, is_lost)
    found = outcomes(work, threads)
    if lost >= len(sent):
        of_forward = 6 if scheme == "nodes" else 4  # k and v, and as a relay those of another node
        assert len(sent) == (of_forward if function is distributed.attention else 12)
        return
    monkeypatch.undo()
    no_rank_is_wrong_and_all_are_ended(
        found, expected, threads, "timed out after 60 s waiting for rank 0"
    )


def test_ranks_that_are_none_are_refused_at_once():
    x = np.zeros((1, 4, 4))
    layout = distributed.layout(distributed.Threads(1).ranks[0], 4)
    with pytest.raises(ArgumentTypeError, match=r"comm: got int; expected what distributed\.comm"):
        distributed.attention(x, x, x, comm=3, layout=layout)
    with pytest.raises(ArgumentTypeError, match="communicator: got int; expected a communicator"):
        distributed.communicator(3)
    rank = distributed.Threads(2).ranks[1]
    assert distributed.communicator(rank) is rank
    assert isinstance(rank, Communicator)
    assert (rank.rank, rank.size, list(rank.nodes)) == (1, 2, [0, 0])
    with pytest.raises(ArgumentError, match="Threads: got 0 ranks; expected 1 or more"):
        distributed.Threads(0)
    with pytest.raises(ArgumentTypeError, match="Threads: got 'two'"):
        distributed.Threads("two")


def test_what_was_sent_may_change_when_it_was_waited_for():
    first, second = distributed.Threads(2).ranks
    sent, came = np.full(4, 7, np.uint8), np.zeros(4, np.uint8)
    first.exchange([(1, sent)], []).wait(TIMEOUT, "nothing")
    sent[...] = 0
    second.exchange([], [(0, came)]).wait(TIMEOUT, "a message")
    assert came.tolist() == [7] * 4


def test_nothing_is_under_way_after_a_refused_call():
    """What ranks told each other is used up, so that the next call is not mistaken for it."""
    threads = distributed.Threads(SIZE)
    for _ in range(3):
        found = outcomes(lambda comm: call(comm, scale=float(comm.rank + 1)), threads)
        all_raise(found, "scale: 1.0 on rank 0; 2.0 on rank 1; 3.0 on rank 2")
    results = outcomes(call, threads)
    whole = outcomes(call, distributed.Threads(SIZE))
    for ours, theirs in zip(results, whole, strict=True):
        assert np.array_equal(ours, theirs)
    assert not any(threads.ranks[0].shared.boxes.values())
