"""`shared` of `attention_cached` on the CPU: the same bits, and each shared key is read once."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from coded_caches import Coded, words
from halves import mostly_thorough
from hypothesis import given, settings
from hypothesis import strategies as st
from placement import same_bits
from strategies import DTYPES

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, attention_cached, masks, scores
from cupyflash.backends import cpu_programs
from cupyflash.problem import cached as cached_calls
from cupyflash.problem import replay
from cupyflash.problem.options import Options
from cupyflash.reference.cpu import decode_launch, decode_tasks
from cupyflash.testing import Precision, forward_bound, rho

FLOAT32 = np.dtype(np.float32)
ROOM = 1400
MASKS = {
    "all": None,
    "causal": masks.causal(),
    "window": masks.window(300, 0),
    "by entry": masks.mask(lambda b, h, i, j: (j + b + h) % 3 != 0),
    "other leaves": masks.mask(lambda b, h, i, j: (j // 64 + b) % 3 != 0),
    "none of some": masks.mask(lambda b, h, i, j: (b != 1) & (j != 70)),
}
SCORES = [None, scores.softcap(5.0), scores.score(lambda s, b, h, i, j: s + 0.1 * b - 0.01 * h)]


class Shared:
    """Entries whose first `n` positions are the same, in pages; and the same, poisoned.

    In `poisoned` the others have no page numbers where those of entry 0 serve, and NaN at shared
    positions of their own pages.
    """

    def __init__(self, rng, lengths, n, page, *, dtype=FLOAT32, heads_kv=2, group=2, len_q=1):
        self.rng, self.n, self.lengths = rng, n, np.asarray(lengths)
        batch, each = len(lengths), -(-ROOM // page)
        pages = batch * each + 3
        self.table = rng.permutation(pages)[: batch * each].reshape(batch, each).astype(np.int32)
        self.q = self._random((batch, group * heads_kv, len_q, 16), dtype)
        self.k, self.v = (self._random((pages, heads_kv, page, 16), dtype) for _ in range(2))
        whole, rest = divmod(n, page)
        self.table[1:, :whole] = self.table[0, :whole]
        self.poisoned = self.k.copy(), self.v.copy(), self.table.copy()
        self.poisoned[2][1:, :whole] = -7
        if rest:
            first, others = self.table[0, whole], self.table[1:, whole]
            for plain, poisoned in zip((self.k, self.v), self.poisoned[:2], strict=True):
                plain[others, :, :rest] = plain[first, :, :rest]
                poisoned[others, :, :rest] = np.nan

    def _random(self, shape, dtype):
        return self.rng.standard_normal(shape, np.float32).astype(dtype)

    def run(self, **options):
        return attention_cached(
            self.q, self.k, self.v, self.lengths, table=self.table, return_lse=True, **options
        )

    def run_shared(self, n=None, **options):
        k, v, table = self.poisoned
        options = {"table": table, "shared": self.n if n is None else n} | options
        return attention_cached(self.q, k, v, self.lengths, return_lse=True, **options)

    def rows_of(self, b):
        """The keys and the values of an entry."""
        place = np.arange(self.lengths[b])
        page = self.k.shape[2]
        at = self.table[b, place // page], slice(None), place % page
        return tuple(x[at].swapaxes(0, 1) for x in (self.k, self.v))


def same(ours, theirs):
    return all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


@settings(max_examples=3 * settings().max_examples)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(0, ROOM),
    page=st.sampled_from([1, 3, 16, 64, 100]),
    batch=st.integers(1, 11),
    heads_kv=st.integers(1, 2),
    group=st.integers(1, 5),
    len_q=st.sampled_from([1, 1, 2, 3, 8]),
    long=st.booleans(),
    mask=st.sampled_from(list(MASKS)),
    score=st.sampled_from(SCORES),
)
def test_sharing_changes_no_bit(
    seed, n, page, batch, heads_kv, group, len_q, long, mask, score
):  # fmt: skip
    rng = np.random.default_rng(seed)
    lengths = rng.integers(n if long else 0, ROOM + 1, batch)
    case = Shared(rng, lengths, n, page, heads_kv=heads_kv, group=group, len_q=len_q)
    options = {"mask": MASKS[mask], "score_mod": score}
    expected = case.run(**options)
    assert same(case.run_shared(**options), expected)
    assert same(case.run(shared=int(rng.integers(0, n + 1)), **options), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [None, masks.window(300, 0)], ids=["all", "window"])
def test_results_are_within_the_bound(dtype, mask):
    lengths = [900, 0, 1400, 640, 641, 700]
    case = Shared(np.random.default_rng(1), lengths, 650, 16, dtype=dtype)
    sink = np.linspace(-1, 1, 4).astype(np.float32)
    out, lse = case.run_shared(mask=mask, sink=sink)
    for b in range(len(lengths)):
        arrays = case.q[b], *case.rows_of(b)
        expected = forward_bound(*arrays, precision=Precision.of(dtype), mask=mask, sink=sink)
        assert rho(out[b], *expected.out).value <= 1
        assert rho(lse[b], *expected.lse).value <= 1


@mostly_thorough(
    "threads", ["1", "2", "5"], quick=["2"], why="other numbers of threads for the same schedules"
)
@pytest.mark.parametrize("most_units", [0, 8, 1000])
def test_the_schedule_changes_no_bit(monkeypatch, threads, most_units):
    """Nodes of all sizes, entries that end within shared nodes, and tasks of one shared part."""
    rng = np.random.default_rng(2)
    for lengths in ([192, 1400, 600, 1100, 64, 0, 193, 1300, 512], [512] * 9):
        case = Shared(rng, lengths, 1100, 64)
        for mask in (None, masks.window(700, 0)):
            expected = case.run(mask=mask)
            with monkeypatch.context() as patch:
                patch.setenv("CUPYFLASH_NUM_THREADS", threads)
                patch.setattr(decode_tasks, "MOST_UNITS", most_units)
                patch.setattr(decode_launch, "MOST_PRODUCTS", 1)
                patch.setattr(replay, "_entries", {})
                assert same(case.run_shared(mask=mask), expected)


def test_batch_mates_change_no_bit():
    case = Shared(np.random.default_rng(3), [1000, 1300, 70, 1400], 900, 16)
    out, lse = case.run_shared(mask=masks.causal())
    for b in range(4):
        alone = attention_cached(
            case.q[b : b + 1], case.k, case.v, case.lengths[b : b + 1],
            table=case.table[b : b + 1], mask=masks.causal(), return_lse=True, shared=900,
        )  # fmt: skip
        assert same(alone, (out[b : b + 1], lse[b : b + 1]))


def test_nan_of_an_entry_stays_there():
    case = Shared(np.random.default_rng(4), [1000, 1300, 1100, 1400], 900, 16)
    mask = masks.mask(lambda b, h, i, j: (b != 2) | (j % 2 == 0))
    expected = case.run_shared(mask=mask)
    case.q[1] = np.nan
    page = case.table[2, 1000 // 16]
    case.poisoned[0][page] = case.poisoned[1][page] = np.inf
    out, lse = case.run_shared(mask=mask)
    assert np.isnan(out[1]).all()
    for b in (0, 3):
        assert same((out[b], lse[b]), [x[b] for x in expected])


def test_packed_queries():
    case = Shared(np.random.default_rng(5), [1000, 1300, 1100, 900], 900, 16, len_q=2)
    rows = [0, 1, 3, 3, 5]  # one query, two, none, two
    q = case.q.swapaxes(0, 1).reshape(4, 8, 16)[:, [1, 2, 3, 6, 7]]
    arrays = [q, case.k, case.v, case.lengths]
    options = {"offsets_q": rows, "mask": masks.causal(), "return_lse": True}
    expected = attention_cached(*arrays, table=case.table, **options)
    arrays[1:3] = case.poisoned[:2]
    assert same(attention_cached(*arrays, table=case.poisoned[2], shared=900, **options), expected)


def test_rows_of_arrays_without_a_table():
    rng = np.random.default_rng(6)
    k, v = rng.standard_normal((2, 1, 2, 800, 16), np.float32)
    q = rng.standard_normal((6, 4, 1, 16), np.float32)
    lengths = [800, 800, 640, 3, 0, 700]
    all_k, all_v = (np.repeat(x, 6, axis=0) for x in (k, v))
    expected = attention_cached(q, all_k, all_v, lengths, return_lse=True)
    all_k[1:, :, :700] = all_v[1:, :, :700] = np.nan
    given = {"shared": 700, "return_lse": True}
    assert same(attention_cached(q, all_k, all_v, lengths, **given), expected)
    of_one = (np.broadcast_to(x, (6, *x.shape[1:])) for x in (k, v))  # a stride of 0
    given["shared"] = 800
    assert same(attention_cached(q, *of_one, lengths, **given), expected)
    assert same(attention_cached(q, k, v, lengths, **given), expected)


@pytest.mark.parametrize("form", ["int8", "int4", ("int8", "int4"), (None, "int8")], ids=words)
def test_caches_of_codes(form):
    rng = np.random.default_rng(7)
    k, v = rng.standard_normal((2, 1, 2, 800, 32), np.float32)
    held = Coded.of(form, *(np.repeat(x, 5, axis=0) for x in (k, v)))
    q = rng.standard_normal((5, 4, 1, 32), np.float32)
    lengths = [800, 700, 650, 64, 799]
    expected = attention_cached(q, held.k, held.v, lengths, return_lse=True, **held.options)
    copies = {name: getattr(held, name).copy() for name in held.names}
    spoilt = dataclasses.replace(held, **copies)
    for name in held.names:
        getattr(spoilt, name)[1:, :, :640] = 77
    given = spoilt.options | {"shared": 640, "return_lse": True}
    assert same(attention_cached(q, spoilt.k, spoilt.v, lengths, **given), expected)


# The schedule, arguments and the plan


def planned(batch, n, length, shared):
    q, k = np.zeros((batch, 8, 1, 16), np.float32), np.zeros((1, 2, n, 16), np.float32)
    call = cached_calls.call(q, k, k, [length] * batch, None, None, Options(), shared=shared)
    problem = call.problem.sized(len_k=np.full(batch, length))
    return decode_launch.planned(problem, cpu_programs.programs(call, problem.len_k), shared)


@pytest.mark.parametrize(("shared", "leaves"), [(4096, 64), (1000, 15), (1024, 16), (63, 0)])
def test_each_shared_key_is_read_once(shared, leaves):
    """Eight entries with four heads in a group make 32 rows, as many as a unit has."""
    plan = planned(8, 5000, 5000, shared)
    read = (plan.units[:, 3] - plan.units[:, 2]).sum()
    assert read == 2 * (leaves + 8 * (79 - leaves))
    assert plan.units[:, 1].max() == (8 if leaves else 1)
    assert sorted(plan.members[:, 1]) == list(range(len(plan.parts)))
    assert (planned(1, 5000, 5000, shared).units[:, 1] == 1).all()  # nobody shares them


def test_many_entries_share_in_groups():
    plan = planned(20, 1024, 1024, 1024)
    assert sorted(set(plan.units[:, 1])) == [4, 8]
    assert (plan.units[:, 3] - plan.units[:, 2]).sum() == 2 * 16 * 3


@pytest.mark.parametrize(
    ("shared", "error", "words"),
    [
        (-1, ArgumentError, "shared: got -1; expected 0 to 1408"),
        (1409, ArgumentError, "shared: got 1409; expected 0 to 1408, because the cache has room"),
        (2.0, ArgumentTypeError, "shared: got 2.0; expected an integer"),
        (True, ArgumentTypeError, "shared: got True"),
        ([3, 4], ArgumentTypeError, r"shared: got \[3, 4\].*pass what all of them share"),
        (None, ArgumentTypeError, "shared: got None"),
    ],
)
def test_errors(shared, error, words):
    case = Shared(np.random.default_rng(8), [100, 200], 64, 64)
    with pytest.raises(error, match=words):
        case.run(shared=shared)
    assert same(case.run(shared=np.int32(64)), case.run())


def test_pages_of_the_first_entry_are_checked_as_far_as_they_serve():
    case = Shared(np.random.default_rng(9), [10, 640, 1000], 640, 64)
    case.poisoned[2][0, 10:] = -1  # behind what is shared, and behind its length
    assert same(case.run_shared(), case.run())
    case.poisoned[2][0, 9] = -1
    with pytest.raises(ArgumentError, match=r"table: entry \(0, 9\) is -1"):
        case.run_shared()
    case.poisoned[2][0, 9], case.poisoned[2][2, 10] = case.table[0, 9], 10**6
    with pytest.raises(ArgumentError, match=r"table: entry \(2, 10\) is 1000000"):
        case.run_shared()


def test_all_checks_compare_the_pages(monkeypatch):
    monkeypatch.setattr(cached_calls, "CHECKS_ALL", True)
    case = Shared(np.random.default_rng(10), [100, 700, 300], 650, 64)
    assert same(case.run(shared=650), case.run())  # the last page may be a copy
    case.table[2, 5:] = -1  # behind its length
    expected = case.run(shared=650)
    case.table[2, 3] += 1
    with pytest.raises(ArgumentError, match=r"table: entry \(2, 3\) .*with shared=650; expected"):
        case.run(shared=650)
    monkeypatch.setattr(cached_calls, "CHECKS_ALL", False)
    assert same(case.run(shared=650), expected)


def test_a_plan_says_what_is_shared():
    case = Shared(np.random.default_rng(11), [100, 700], 64, 64)
    arrays = case.q, case.k, case.v, case.lengths
    plan = cupyflash.plan_cached(*arrays, table=case.table, shared=64)
    assert "the first 64 positions serve the queries of several entries" in plan.reason
    assert "several entries" not in cupyflash.plan_cached(*arrays, table=case.table).reason
