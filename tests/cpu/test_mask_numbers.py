"""Masks that differ in numbers: one proof serves them all, and one call is made again."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash import (
    ArgumentError,
    attention,
    attention_backward,
    attention_cached,
    attention_vjp,
    masks,
)
from cupyflash.backends import cpu_programs, cpu_ranges
from cupyflash.backends.cpu import Cpu
from cupyflash.expr.structure import MOST_NUMBER, named, tree
from cupyflash.lazy import Kept
from cupyflash.problem import replay

QUERIES, KEYS = 37, 53
FORMS = {
    "window": lambda n: masks.window(n, n + 2),
    "window of a side": lambda n: masks.window(n, None),
    "causal": lambda n: masks.causal(n - 9),
    "prefix": lambda n: masks.causal() | masks.prefix(n),
    "lengths": masks.lengths,
    "both": lambda n: masks.window(n, 3) & masks.lengths(2 * n),
    "neither": lambda n: ~masks.prefix(n) & masks.causal(),
    "by head": lambda n: masks.mask(lambda b, h, i, j: j < i + 3 * h + n),
}
NUMBERS = (5, 17, 4, 17, 3 * KEYS, 6, 5, 0, 9, 10, 11, 12, 13)


def arrays(queries=QUERIES, keys=KEYS):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 2, queries, 8), np.float32)
    k, v = rng.standard_normal((2, 2, 2, keys, 8), np.float32)
    return q, k, v


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch):
    monkeypatch.setattr(replay, "_entries", {})
    monkeypatch.setattr(cpu_programs, "_kept", Kept(64))


def made_anew(call, monkeypatch):
    """What a call computes whose mask is proved with its own numbers."""
    with monkeypatch.context() as patch:
        patch.setattr(replay, "_entries", {})
        patch.setattr(cpu_programs, "_kept", Kept(64))
        patch.setattr(cpu_programs, "_range_of_form", lambda *_: None)
        return call()


def same(call, monkeypatch):
    for n in NUMBERS:
        got, wanted = call(n), made_anew(lambda n=n: call(n), monkeypatch)
        for one, other in zip(got, wanted, strict=True):
            assert np.array_equal(one, other, equal_nan=True), n


@pytest.mark.parametrize("name", FORMS)
def test_results_are_those_of_each_mask(name, monkeypatch):
    x = arrays()
    do = np.random.default_rng(1).standard_normal(x[0].shape, np.float32)

    def call(n):
        mask = FORMS[name](n)
        out, lse = attention(*x, mask=mask, return_lse=True)
        return out, lse, *attention_backward(do, *x, out, lse, mask=mask)[:3]

    same(call, monkeypatch)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("queries", [1, 3])
def test_few_queries(name, queries, monkeypatch):
    x = arrays(queries, 600)  # enough for the kernel for few queries
    same(lambda n: attention(*x, mask=FORMS[name](n), return_lse=True), monkeypatch)


@pytest.mark.parametrize("name", FORMS)
def test_caches(name, monkeypatch):
    x, lengths = arrays(2), np.array([KEYS, 20])
    same(lambda n: attention_cached(*x, lengths, mask=FORMS[name](n), return_lse=True), monkeypatch)


@pytest.mark.parametrize("name", FORMS)
def test_other_numbers_are_neither_proved_nor_checked_again(name, monkeypatch):
    x, one, cache = arrays(), arrays(1), arrays(2)

    def calls(n):
        mask = FORMS[name](n)
        out, vjp = attention_vjp(*x, mask=mask)
        vjp(out)
        attention(*one, mask=mask)
        attention_cached(*cache, np.array([KEYS, 20]), mask=mask)

    calls(5)
    kept = replay.kept()
    assert kept == 4
    for method in ("forward", "backward", "cached"):
        monkeypatch.setattr(Cpu, method, None)
    for n in (6, 7, 5, 8):
        calls(n)
    assert replay.kept() == kept


def test_one_that_hides_nothing_is_left_out_afterwards(monkeypatch):
    x = arrays()
    plain = attention(*x)
    for n in (5, 2 * KEYS, 3 * KEYS):
        attention(*x, mask=masks.window(n, n))
    assert replay.kept() == 4  # without a mask, of the form, and the two that hide nothing
    monkeypatch.setattr(Cpu, "forward", None)
    for n in (2 * KEYS, 3 * KEYS):
        assert np.array_equal(attention(*x, mask=masks.window(n, n)), plain)
    assert not np.array_equal(attention(*x, mask=masks.window(4, 4)), plain)


def test_ends_of_some_numbers_are_kept(monkeypatch):
    x, made = arrays(), []
    right = cpu_ranges.ends_if_any

    def counted(*arguments):
        made.append(arguments)
        return right(*arguments)

    monkeypatch.setattr(cpu_ranges, "ends_if_any", counted)
    for n in (5, 7, 5, 7, 9, 7, 5):
        attention(*x, mask=masks.window(n, 0))
    assert len(made) == 4  # of 5 once more, for which the call was made
    (entry,) = replay._entries.values()
    for n in range(2 * cpu_ranges.MOST_NUMBERS):
        attention(*x, mask=masks.window(n, 0))
    (call,) = entry.compiled.free
    assert len(call._of_mask._kept) == cpu_ranges.MOST_NUMBERS


def test_numbers_that_are_too_large_are_told_as_before():
    x = arrays()
    wanted = attention(*x, mask=masks.causal())
    for n in (5, MOST_NUMBER, MOST_NUMBER + 1, 2**62):
        got = attention(*x, mask=masks.window(n, 0))
        assert np.array_equal(got, wanted) == (n > 5)
    with pytest.raises(ArgumentError, match="64-bit"):
        attention(*x, mask=masks.window(2**63 - 1, 0, offset=-(2**62)))


def test_forms():
    def of(mask):
        made = mask.structure[0]
        return made.form, made.numbers

    form, numbers = of(masks.window(3, 5))
    assert numbers == (3, 5)
    assert of(masks.window(7, 8)) == (form, (7, 8))
    assert of(masks.window(7, None))[0] != form
    assert of(masks.causal()) == (None, ())
    assert of(masks.prefix(MOST_NUMBER + 1)) == (None, ())
    assert named((3, 5)) == {"number 0": 3, "number 1": 5}
    again = tree(form.nodes, ())
    assert "number 1" in str(again)
    # What is divided or multiplied by decides about proofs.
    held = masks.mask(lambda b, h, i, j: (i // 4 == j * 3) & (j < 6))
    assert of(held)[1] == (6,)
    # A number in both places is held.
    four = masks.mask(lambda b, h, i, j: i % 4 < 2)
    assert of(four)[1] == (2,)
