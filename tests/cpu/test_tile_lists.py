"""The classes of a mask's tiles on the CPU: found once for all heads, and the same bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement import same_bits

import cupyflash
from cupyflash import masks
from cupyflash.dispatch import CPU
from cupyflash.expr.functions import POSITIONS
from cupyflash.expr.lower import lower
from cupyflash.expr.nodes import as_expr
from cupyflash.problem import replay, validate
from cupyflash.problem.options import Options
from cupyflash.reference.cpu import prepared, tile_lists
from cupyflash.testing import Precision, forward_bound, rho

LENGTHS = 400, 333
IDS = np.sort(np.random.default_rng(1).integers(0, 9, LENGTHS[0])) % 4  # no ranges of keys
INDICES = np.random.default_rng(2).integers(-2, 12, (2, 1, 14, 3))
MASKS = {
    "documents": masks.segments(IDS, IDS[: LENGTHS[1]]) & masks.causal(),
    "of each entry": masks.segments(np.stack([IDS, IDS[::-1]]), np.stack([IDS[: LENGTHS[1]]] * 2)),
    "chosen": masks.chosen(INDICES, (30, 32)) & masks.causal(),
    "by head": masks.mask(lambda b, h, i, j: (h == 1) | (abs(i - 2 * j) % 100 < 9)),
}

OF_ENTRIES, OF_HEADS = (lower(as_expr(POSITIONS["bhij".index(x)] > 0)) for x in "bh")


@pytest.fixture(autouse=True)
def however_few(monkeypatch):
    monkeypatch.setattr(tile_lists, "FEWEST_TILES", 1)


def draw():
    rng = np.random.default_rng(0)
    shapes = (2, 4, LENGTHS[0], 24), (2, 2, LENGTHS[1], 24), (2, 2, LENGTHS[1], 24)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.fixture
def sizes(monkeypatch):
    """How many classes the lists have that calls make."""
    found, make = [], prepared.lists_of

    def watched(*arguments):
        lists = make(*arguments)
        found.append(len(lists.classes))
        return lists

    monkeypatch.setattr(prepared, "lists_of", watched)
    return found


def computed(q, k, v, mask):
    """Out, lse and gradients of calls that are made anew, and how many tiles the first visited."""
    replay._entries.clear()
    call = validate.call(q, k, v, Options(mask=mask))
    out, lse = np.empty_like(q), np.empty(q.shape[:-1], q.dtype)
    visited = CPU.forward(call, out, lse).visited
    made = cupyflash.attention_backward(q, q, k, v, out, lse, mask=mask)
    return out, lse, *made[:3], np.array(visited)


@pytest.mark.parametrize("name", MASKS)
def test_they_change_no_bit_and_no_tile(monkeypatch, sizes, name):
    q, k, v = draw()
    found = computed(q, k, v, MASKS[name])
    monkeypatch.setattr(tile_lists, "MOST_BYTES", 0)  # each head asks for itself
    for one, other in zip(found, computed(q, k, v, MASKS[name]), strict=True):
        assert same_bits(one, other)
    # Both calls have lists first, and then neither.
    assert [n > 0 for n in sizes] == 2 * [name != "by head"] + 2 * [False]
    bound = forward_bound(q, k, v, precision=Precision.of(q.dtype), block_kv=64, mask=MASKS[name])
    assert rho(found[0], *bound.out).value <= 1
    assert rho(found[1], *bound.lse).value <= 1


def test_parts_of_a_tile_have_classes_of_their_own():
    """Nothing is seen in any part of 48 keys, but only a whole tile may be said to be unknown."""
    q, k, v = draw()
    part = masks.mask(lambda b, h, i, j: j // 48 % 2 == 0)
    out, lse = np.empty_like(q), np.empty(q.shape[:-1], q.dtype)
    other = masks.mask(lambda b, h, i, j: j // 48 % 2 == 1)
    call = validate.call(q, k, v, Options(mask=part & other))
    assert CPU.forward(call, out, lse).visited == 0
    assert not out.any()
    call = validate.call(q, k, v, Options(mask=part))
    assert CPU.forward(call, out, lse).visited > 0


def test_what_is_read_may_change_between_calls():
    q, k, v = draw()
    ids = IDS[: LENGTHS[1]].copy()
    q = np.ascontiguousarray(q[:, :, : LENGTHS[1]])
    mask = masks.segments(ids)
    for seed in range(4):  # the last ones are recognised
        ids[...] = np.sort(np.random.default_rng(seed).integers(0, 9, len(ids)))
        found = cupyflash.attention(q, k, v, mask=mask)
        wanted = cupyflash.attention(q, k, v, mask=ids[:, None] == ids)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@given(st.integers(0, 2**32 - 1))
def test_every_tile_has_a_place_of_its_own(seed):
    """Starts of tiles, as kernels step over them, are different places of the lists."""
    draws = np.random.default_rng(seed)
    block_q, block_kv, panel = (int(n) for n in draws.integers(1, 40, 3))
    len_q, len_k = (draws.integers(1, 200, 2) for _ in "qk")
    lists = tile_lists.lists_of(OF_ENTRIES, 0, 2, len_q, len_k, block_q, block_kv, panel)
    places = [
        b * lists.entry + i // lists.queries * lists.row + j // lists.keys
        for b in range(2)
        for i0 in range(0, int(len_q[b]), block_q)
        for i in range(i0, min(i0 + block_q, int(len_q[b])), panel)
        for j in range(0, int(len_k[b]), block_kv)
    ]
    assert len(set(places)) == len(places)
    assert max(places) < len(lists.classes)


def test_heads_with_masks_of_their_own_share_none():
    lengths = np.array([9]), np.array([9])
    assert len(tile_lists.lists_of(OF_ENTRIES, 0, 2, *lengths, 4, 4, 4).classes)
    assert not len(tile_lists.lists_of(OF_ENTRIES, 0, 1, *lengths, 4, 4, 4).classes)
    own = tile_lists.lists_of(OF_HEADS, 0, 2, *lengths, 4, 4, 4)
    assert own.by_head
    assert not len(own.classes)


@pytest.mark.parametrize("queries", [1, 5])
def test_a_cache_is_asked_once_for_the_heads_of_a_group(queries):
    """A mask that names the head, and says the same of each, is evaluated for each of them."""
    rng = np.random.default_rng(3)
    k, v = (rng.standard_normal((3, 2, 1500, 16)).astype(np.float32) for _ in "kv")
    q = rng.standard_normal((3, 8, queries, 16)).astype(np.float32)
    lengths = np.array([1500, 70, 1289])
    each = masks.mask(lambda b, h, i, j: h >= 0)
    for mask in (masks.window(200, 0) | masks.prefix(90), ~masks.dilated(3), masks.blocks(
        rng.random((1, 24)) < 0.3, queries, 64
    )):  # fmt: skip
        found, lse = cupyflash.attention_cached(q, k, v, lengths, mask=mask, return_lse=True)
        own = cupyflash.attention_cached(q, k, v, lengths, mask=mask & each, return_lse=True)
        assert same_bits(found, own[0])
        assert same_bits(lse, own[1])


@pytest.mark.parametrize("queries", [1, 5])
def test_a_score_of_minus_infinity_hides_no_key_of_another_head(queries):
    """The first head of a group alone is asked what the mask hides."""
    rng = np.random.default_rng(4)
    k, v = (rng.standard_normal((1, 1, 700, 16)).astype(np.float32) for _ in "kv")
    q = rng.standard_normal((1, 4, queries, 16)).astype(np.float32)
    q[..., 0], q[:, 0, :, 0] = 0, -1e30
    k[:, :, [70, 520], 0] = 1e30  # in leaves of which the mask hides some keys
    mask, each = masks.window(200, 0) | masks.prefix(90), masks.mask(lambda b, h, i, j: h >= 0)
    found, lse = cupyflash.attention_cached(q, k, v, 700, mask=mask, return_lse=True)
    own = cupyflash.attention_cached(q, k, v, 700, mask=mask & each, return_lse=True)
    assert np.isfinite(found).all()
    assert same_bits(found, own[0])
    assert same_bits(lse, own[1])
