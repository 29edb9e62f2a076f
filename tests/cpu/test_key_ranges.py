"""Masks that leave each query neighbouring keys: the CPU kernels compare, and interpret nothing."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash import attention, attention_varlen_vjp, attention_vjp, lookup, masks, scores
from cupyflash.backends import cpu_programs, cpu_ranges
from cupyflash.expr.key_range import key_range
from cupyflash.lazy import Kept
from cupyflash.problem import replay, validate
from cupyflash.problem.options import Options
from cupyflash.reference.cpu import kernels, program

HEADS, QUERIES, KEYS = 2, 150, 300
LENGTHS = np.array([7, 0, 290])
RANGES = {
    "causal": masks.causal(),
    "causal from the top left": masks.causal(0),
    "window": masks.window(20, 3),
    "window without a left end": masks.window(None, 5),
    "lengths": masks.lengths(LENGTHS),
    "prefix": masks.prefix(40),
    "prefix by batch entry": masks.prefix(LENGTHS),
    "causal and lengths": masks.causal() & masks.lengths(LENGTHS),
    "by head": masks.mask(lambda b, h, i, j: j <= i + 9 * h),
    "nobody": masks.mask(lambda b, h, i, j: j < -i),
    "segments": masks.segments(np.arange(QUERIES) // 9, np.arange(KEYS) // 9),
}
PROGRAMS = {
    "segments in pieces": masks.segments(np.arange(QUERIES) // 9, np.arange(KEYS) // 9 % 3),
    "every other": masks.mask(lambda b, h, i, j: (i + j) % 2 == 0),
}


def arrays(dtype=np.float32):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((3, HEADS, QUERIES, 8)).astype(dtype)
    k, v = rng.standard_normal((2, 3, HEADS, KEYS, 8)).astype(dtype)
    return q, k, v


def wanted(mask, backward):
    """The kernels that those of a call with a mask call by their addresses."""
    call = validate.call(*arrays(), Options(mask=mask))
    called = kernels.called_kernels(call.problem, cpu_programs.programs(call), backward)
    return {kernel for kernel, _ in called.values()}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", RANGES)
def test_the_interpreter_is_not_compiled(name, backward):
    assert program.run not in wanted(RANGES[name], backward)
    assert program.run not in wanted(None, backward)


@pytest.mark.parametrize("name", PROGRAMS)
def test_other_masks_need_it(name):
    assert program.run in wanted(PROGRAMS[name], False)


def with_programs(monkeypatch, call):
    with monkeypatch.context() as patch:
        patch.setattr(cpu_programs, "key_range", lambda allowed, problem: None)
        patch.setattr(cpu_programs, "_kept", Kept(64))
        patch.setattr(replay, "_entries", {})
        return call()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", RANGES)
def test_the_bits_are_those_of_the_interpreter(name, dtype, monkeypatch):
    options = {"mask": RANGES[name], "score_mod": scores.softcap(3.0)}

    def call():
        out, lse, vjp = attention_vjp(*arrays(dtype), return_lse=True, **options)
        return out, lse, *vjp(out)[:3]

    for one, other in zip(call(), with_programs(monkeypatch, call), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("name", ["causal", "window", "by head", "lengths"])
def test_packed_sequences(name, monkeypatch):
    q, k, v = (x[0] for x in arrays())
    starts_q, starts_k = np.array([0, 90, 90, QUERIES]), np.array([0, 20, 40, KEYS])

    def call():
        out, lse, vjp = attention_varlen_vjp(
            q, k, v, starts_q, starts_k, mask=RANGES[name], return_lse=True
        )
        return out, lse, *vjp(out)[:3]

    for one, other in zip(call(), with_programs(monkeypatch, call), strict=True):
        assert np.array_equal(one, other)


def test_ends_are_kept_per_query_only_where_they_differ():
    def shape(mask):
        call = validate.call(*arrays(), Options(mask=mask))
        found = key_range(cpu_programs.trees(call).allowed, call.problem)
        low, high = cpu_ranges.ends(call.problem, found)
        assert low.shape == high.shape
        return low.shape

    assert shape(RANGES["causal"]) == (1, 1, QUERIES)
    assert shape(RANGES["lengths"]) == (3, 1, QUERIES)
    assert shape(RANGES["by head"]) == (1, HEADS, QUERIES)


def test_a_looked_up_end_is_read_at_the_call():
    ends = np.full(QUERIES, KEYS - 2)
    mask = masks.mask(lambda b, h, i, j: j <= lookup(ends)[i])
    call = validate.call(*arrays(), Options(mask=mask))
    programs = cpu_programs.programs(call)
    ends[:] = 10**9
    assert programs.ranges is not None
    assert programs.ranges[1].max() == KEYS - 2


def test_what_numbers_decide_is_kept_for_later_calls(monkeypatch):
    monkeypatch.setattr(cpu_programs, "_kept", Kept(64))
    x = arrays()
    made = [masks.mask(lambda b, h, i, j, n=n: (i + j) % n == 0) for n in (3, 4)]
    want = [attention(*x, mask=mask) for mask in made]
    assert len(cpu_programs._kept.results) == 2
    with monkeypatch.context() as patch:
        patch.setattr(cpu_programs, "trees", None)  # nothing is proved again
        patch.setattr(replay, "_entries", {})
        got = [attention(*x, mask=mask) for mask in made]
    assert all(np.array_equal(a, b) for a, b in zip(want, got, strict=True))
    lengths = np.array([3, 30, 40])
    before = attention(*x, mask=masks.lengths(lengths))
    lengths[:] = 40
    assert not np.array_equal(before, attention(*x, mask=masks.lengths(lengths)))
    attention(*x, mask=masks.causal(), score_mod=scores.softcap(3.0))
    assert len(cpu_programs._kept.results) == 2
    for n in range(1, cpu_programs._kept.most + 5):
        mask = masks.mask(lambda b, h, i, j, n=n: (i + j) // n == 0)
        attention(*(a[..., :1, :] for a in x), mask=mask)
    assert len(cpu_programs._kept.results) <= cpu_programs._kept.most
