"""Masks that hide nothing of a call are left out of it, with the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash import attention, attention_varlen, attention_vjp, explain, lookup, masks, scores
from cupyflash.backends import cpu_programs
from cupyflash.problem import replay, validate
from cupyflash.problem.options import Options

QUERIES, KEYS = 37, 53
FULL = {
    "window": masks.window(KEYS, KEYS),
    "causal beyond the end": masks.causal(KEYS),
    "lengths": masks.lengths(np.array([KEYS, KEYS + 3])),
    "prefix": masks.prefix(KEYS),
    "remainder": masks.mask(lambda b, h, i, j: (i + j) % 3 >= 0),
    "segments": masks.segments(np.ones(QUERIES, int), np.ones(KEYS, int)),
    "array": np.ones((QUERIES, KEYS), bool),
    "array of entries": np.ones((2, 1, 1, KEYS), bool),
    "broadcast": np.broadcast_to(np.ones((), bool), (2, 2, QUERIES, KEYS)),
}
HIDES = {
    "window": masks.window(KEYS, KEYS - QUERIES - 1, offset=0),
    "lengths": masks.lengths(np.array([KEYS, KEYS - 1])),
    "remainder": masks.mask(lambda b, h, i, j: (i + j) % (QUERIES + KEYS - 1) < QUERIES + KEYS - 2),
    "by head": masks.mask(lambda b, h, i, j: j < KEYS - h),
    "segments": masks.segments(np.ones(QUERIES, int), np.arange(KEYS) // (KEYS - 1) + 1),
    "array": np.arange(QUERIES * KEYS).reshape(QUERIES, KEYS) < QUERIES * KEYS - 1,
}


def arrays(dtype=np.float32):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 2, QUERIES, 8)).astype(dtype)
    k, v = rng.standard_normal((2, 2, 2, KEYS, 8)).astype(dtype)
    return q, k, v


def programs(mask, **options):
    mask = mask if isinstance(mask, masks.Mask) else masks.dense(mask)
    return cpu_programs.programs(validate.call(*arrays(), Options(mask=mask, **options)))


@pytest.mark.parametrize("name", FULL)
def test_it_is_left_out(name):
    assert not programs(FULL[name]).may_mask
    made = programs(FULL[name], score_mod=scores.softcap(3.0))
    assert len(made.score.code)
    assert not len(made.mask.code)
    assert made.ranges is None


@pytest.mark.parametrize("name", HIDES)
def test_one_that_hides_a_pair_is_not(name):
    assert programs(HIDES[name]).may_mask


@pytest.mark.parametrize("name", FULL)
def test_bits_are_those_without_it(name):
    def computed(mask):
        out, lse, vjp = attention_vjp(*arrays(), mask=mask, return_lse=True)
        return out, lse, *vjp(out)[:3]

    wanted = computed(None)
    for _ in range(2):  # the second call is replayed
        for one, other in zip(computed(FULL[name]), wanted, strict=True):
            assert np.array_equal(one, other)


@pytest.mark.parametrize("length", [30, 200])
def test_an_array_that_hides_something_later_does(length, monkeypatch):
    """Also one that is too large to be compared by its contents."""
    monkeypatch.setattr(replay, "_entries", {})
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 2, length, 8), np.float32)
    mask = np.ones((length, length), bool)
    wanted = attention(q, k, v)
    for _ in range(2):
        assert np.array_equal(attention(q, k, v, mask=mask), wanted)
    assert len(replay._entries) == 2  # it is replayed
    mask[-1, 0] = False
    got = attention(q, k, v, mask=mask)
    assert not np.array_equal(got[..., -1, :], wanted[..., -1, :])
    assert np.array_equal(got[..., :-1, :], wanted[..., :-1, :])


def test_packed_sequences_see_all_of_their_own_keys():
    q, k, v = (x[0] for x in arrays())
    packed = q[:, :30], k[:, :50], v[:, :50], np.array([0, 10, 10, 30]), np.array([0, 7, 12, 50])

    def made(mask):
        return attention_varlen(*packed, mask=mask)

    assert np.array_equal(made(masks.lengths(np.array([7, 5, 38]))), made(None))
    assert not np.array_equal(made(masks.lengths(np.array([7, 5, 37]))), made(None))


def test_one_query_serves_other_numbers_of_keys():
    """Its mask is kept: of more keys it may hide some."""
    q, k, v = arrays()
    mask = masks.window(KEYS - 1, 0)
    for _ in range(2):
        assert np.array_equal(attention(q[:, :, :1], k, v, mask=mask), attention(q[:, :, :1], k, v))
    more = [np.concatenate([x, x], axis=2) for x in (k, v)]
    got = attention(q[:, :, :1], *more, mask=mask)
    assert not np.array_equal(got, attention(q[:, :, :1], *more))


def test_a_table_that_changes_is_read_again():
    ends = np.full(QUERIES, KEYS - 1)
    mask = masks.mask(lambda b, h, i, j: j <= lookup(ends)[i])
    assert not programs(mask).may_mask
    wanted = attention(*arrays(), mask=mask)
    ends[3] = 0
    assert programs(mask).may_mask
    got = attention(*arrays(), mask=mask)
    assert not np.array_equal(got[:, :, 3], wanted[:, :, 3])


def test_explain_says_so():
    shapes = (2, 2, QUERIES, 8), (2, 2, KEYS, 8)
    words = "hides nothing of this call and is left out"
    for backward in (False, True):
        told = {"device": "cpu", "backward": backward, "dtype": np.float32}
        assert words in explain(*shapes, mask=FULL["window"], **told).reason
        assert words in explain(*shapes, mask=FULL["array"], **told).reason
        assert words not in explain(*shapes, mask=HIDES["by head"], **told).reason
        assert words not in explain(*shapes, **told).reason
    one = (2, 2, 1, 8), (2, 2, KEYS, 8)
    assert words not in explain(*one, mask=masks.causal(), device="cpu", dtype=np.float32).reason
