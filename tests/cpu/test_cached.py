"""Attention over a cache on the CPU: within the bound, and bit for bit what it promises."""

from __future__ import annotations

import numpy as np
import pytest
from drawn_cache import BY_DTYPE, FLOAT32, WIDE, Case, cases, same
from halves import mostly_thorough
from hypothesis import given, settings
from hypothesis import strategies as st
from placement import same_bits
from strategies import DTYPES

import cupyflash
from cupyflash import attention_cached, masks, scores
from cupyflash.backends import cpu_programs
from cupyflash.problem import cached as cached_calls
from cupyflash.problem import replay
from cupyflash.problem.options import Options
from cupyflash.reference.cpu import decode_launch, decode_tasks
from cupyflash.testing import Precision, forward_bound


@mostly_thorough("times", [1, 4], quick=[1], why="the same, searched for longer")
@BY_DTYPE
def test_out_and_lse_are_within_the_bound(dtype, times):
    @settings(max_examples=times * settings().max_examples)
    @given(cases(dtype))
    def check(case):
        case.check(*case.run())

    check()


@mostly_thorough(
    ("dtype", "d", "d_v"),
    [(dtype, *sizes) for sizes in WIDE for dtype in DTYPES],
    quick=[(DTYPES[0], *WIDE[0]), (DTYPES[1], *WIDE[1]), (DTYPES[2], *WIDE[2])],
    why="other types of the same heads, which small problems have",
    ids=str,
)
def test_long_caches_and_wide_heads(dtype, d, d_v):
    rng = np.random.default_rng(d)
    case = Case(rng, dtype, [4097, 0, 700], group=4, heads_kv=1, d=d, d_v=d_v)
    case.check(*case.with_options(sink=True).run())


def test_many_levels_of_nodes():
    case = Case(np.random.default_rng(1), FLOAT32, [40000], group=2, len_q=3, d=8, d_v=8)
    case.check(*case.with_options(masks.causal()).run())


@pytest.mark.parametrize("order", [1, -1])
def test_leaves_whose_scores_lie_far_apart(order):
    """A maximum that grows from leaf to leaf: weights by the first one would overflow."""
    case = Case(np.random.default_rng(17), FLOAT32, [1100], group=2, d=8, d_v=8)
    case.q[...], case.k[..., 0] = 1, 300 * (np.arange(1100) // 64)[::order]
    case.check(*case.with_options().run())


def test_long_prompts():
    case = Case(np.random.default_rng(2), FLOAT32, [300, 170], group=3, heads_kv=2, len_q=150)
    case.check(*case.with_options(masks.causal()).run())


def test_groups_of_many_heads():
    case = Case(np.random.default_rng(3), FLOAT32, [130], group=71, heads_kv=2, len_q=2)
    case.check(*case.with_options(masks.causal(), sink=True).run())


def test_values_of_float16_that_are_subnormal_or_large():
    case = Case(np.random.default_rng(4), np.dtype(np.float16), [200], d_v=32)
    case.v[...] = case.v * np.float16(2.0**-16)
    case.v[..., ::3] = case.rng.choice([65504, -65504, 2.0**-24, -0.0], case.v[..., ::3].shape)
    case.check(*case.with_options().run())


def test_an_empty_entry_gives_0_and_its_sink():
    case = Case(np.random.default_rng(5), FLOAT32, [0, 5], group=2)
    out, lse = case.with_options().run()
    assert (out[0] == 0).all()
    assert np.isneginf(lse[0]).all()
    np.full(10**5, np.nan)  # what is freed is what kernels get
    out, lse = case.with_options(sink=True).run()
    assert (out[0] == 0).all()
    assert same_bits(lse[0, :, 0], case.options["sink"])


@pytest.mark.parametrize("shape", [(0, 2, 1, 8), (2, 0, 1, 8), (2, 2, 0, 8)])
def test_empty_axes(shape):
    q = np.ones(shape, np.float32)
    k = np.ones((shape[0], shape[1], 3, shape[3]), np.float32)
    out, lse = attention_cached(q, k, k, 3, return_lse=True)
    assert out.shape == shape
    assert lse.shape == shape[:-1]
    assert np.allclose(lse, np.log(3))


@pytest.mark.parametrize("offset", [-30, 40])
def test_entries_have_key_ranges_of_their_own_lengths(offset):
    case = Case(np.random.default_rng(6), FLOAT32, [200, 90, 0], group=2, len_q=4)
    case.check(*case.with_options(masks.window(17, 2) | masks.causal(offset)).run())


# Bit by bit


@given(cases(FLOAT32), st.sampled_from([1, 3, 16, 64, 100]))
def test_pages_change_no_bit(case, page):
    expected = case.run()
    pages = case.paged(page)
    assert same(case.run(**_with_room(case, pages)), expected)
    wide = pages | {"table": pages["table"].astype(np.int64)[:, ::-1].copy()[:, ::-1]}
    assert same(case.run(case.lengths.astype(np.int32), **_with_room(case, wide)), expected)


def _with_room(case, pages):
    """Pages, and options as large as what they have room for."""
    room = pages["table"].shape[1] * pages["k"].shape[2]
    more = [(0, 0)] * 3 + [(0, room - case.k.shape[2])]
    options = case.arguments()
    for name in ("mask", "bias"):
        if isinstance(options.get(name), np.ndarray):
            pages = pages | {name: np.pad(options[name], more)}
    return pages


@given(cases(FLOAT32), st.sampled_from(DTYPES), st.data())
def test_other_entries_room_and_strides_change_no_bit(case, dtype, data):
    out, lse = case.run()
    b = data.draw(st.integers(0, len(case.lengths) - 1))
    n = case.lengths[b]
    alone = {"q": case.q[b : b + 1], "k": case.k[b : b + 1, :, :n], "v": case.v[b : b + 1, :, :n]}
    for name in ("mask", "bias"):
        if isinstance(case.options.get(name), np.ndarray):
            of_entry = case.options[name][b : b + 1]
            alone[name] = of_entry if of_entry.ndim == 3 else of_entry[..., :n]
    if "mask" in alone and alone["mask"].ndim == 3:
        alone["mask"] = masks.tree(alone["mask"])
    for x in ("k", "v"):  # (B, S, H, D) in memory, every second column
        wide = np.full((*alone[x].shape[:3], 2 * alone[x].shape[3]), np.nan, np.float32)
        wide = wide.swapaxes(1, 2).copy().swapaxes(1, 2)
        wide[..., ::2] = alone[x]
        alone[x] = wide[..., ::2]
    assert same(case.run(n, **alone), (out[b : b + 1], lse[b : b + 1]))


@pytest.mark.parametrize("most_units", [0, 1, 64, 1000])
@pytest.mark.parametrize("threads", ["1", "2", "5"])
@pytest.mark.parametrize("products", [1, 2**28])
def test_the_schedule_changes_no_bit(monkeypatch, threads, most_units, products):
    case = Case(np.random.default_rng(7), FLOAT32, [33000, 0, 700], group=3, heads_kv=2, len_q=2)
    calls = [{"mask": masks.window(32000, 0)}, {}]
    expected = [case.run(**options) for options in calls]
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", threads)
    monkeypatch.setattr(decode_tasks, "MOST_UNITS", most_units)
    monkeypatch.setattr(decode_launch, "MOST_PRODUCTS", products)
    monkeypatch.setattr(replay, "_entries", {})
    for _ in range(3):
        assert all(same(case.run(**x), y) for x, y in zip(calls, expected, strict=True))


@BY_DTYPE
@pytest.mark.parametrize("length", [66, 513, 515, 4100])
@pytest.mark.parametrize("mask", [masks.causal(), masks.window(70, 0)], ids=["causal", "window"])
def test_drafts_in_one_call_are_single_steps(dtype, length, mask):
    drafts = 9
    case = Case(np.random.default_rng(length), dtype, [length], group=3, heads_kv=2, len_q=drafts)
    case.v[:, :, -1] *= -1
    out, lse = case.with_options(mask, scores.softcap(3.0), sink=True).run()
    for i in range(drafts):
        step = case.run(length - drafts + i + 1, q=case.q[:, :, i : i + 1])
        assert same(step, (out[:, :, i : i + 1], lse[:, :, i : i + 1]))


@BY_DTYPE
@pytest.mark.parametrize("d", [16, 33])
def test_nonfinite_drafts_change_no_bit_of_those_before_them(dtype, d):
    case = Case(np.random.default_rng(8), dtype, [300], group=2, len_q=4, d=d, d_v=d)
    case.with_options(masks.causal())
    expected = [x[:, :, :3].copy() for x in case.run()]
    case.k[:, :, -1], case.v[:, :, -1] = np.inf, np.nan
    out, lse = case.run()
    assert same((out[:, :, :3], lse[:, :, :3]), expected)
    assert np.isnan(out[:, :, 3]).all()


@given(cases(FLOAT32, options=False), st.sampled_from([None, masks.causal(), masks.window(9, 1)]))
def test_packed_queries_are_dense_ones(case, mask):
    case.with_options(mask)
    out, lse = case.run()
    batch, heads, len_q, d = case.q.shape
    packed = np.ascontiguousarray(case.q.transpose(1, 0, 2, 3).reshape(heads, batch * len_q, d))
    offsets = np.arange(batch + 1) * len_q
    ours = case.run(q=packed, offsets_q=offsets)
    assert same_bits(ours[0], out.transpose(1, 0, 2, 3).reshape(ours[0].shape))
    assert same_bits(ours[1], lse.transpose(1, 0, 2).reshape(ours[1].shape))


def test_packed_entries_of_different_numbers_of_queries():
    case = Case(np.random.default_rng(9), FLOAT32, [100, 65, 7, 0], group=2, heads_kv=2, len_q=70)
    counts = [1, 70, 0, 3]
    offsets = np.cumsum([0, *counts])
    packed = np.concatenate([case.q[b, :, :n] for b, n in enumerate(counts)], axis=1)
    out, lse = case.with_options(masks.causal()).run(q=packed, offsets_q=offsets)
    for b, n in enumerate(counts):
        rows = slice(offsets[b], offsets[b + 1])
        alone = {"q": case.q[b : b + 1, :, :n], "k": case.k[b : b + 1], "v": case.v[b : b + 1]}
        expected = case.run(case.lengths[b : b + 1], **alone)
        assert same((out[None, :, rows], lse[None, :, rows]), expected)


def test_keys_behind_the_window_may_be_dropped():
    case = Case(np.random.default_rng(10), FLOAT32, [1500], group=2, len_q=2)
    case.with_options(masks.window(99, 0))
    expected = case.run()
    pages = case.paged(16)
    dropped = pages["table"][0, : (1500 - 2 - 99) // 16].copy()
    pages["k"][dropped], pages["v"][dropped] = np.nan, np.nan
    assert same(case.run(**pages), expected)
    pages["table"][0, : len(dropped)] = dropped[0]
    assert same(case.run(**pages), expected)


@pytest.mark.parametrize("mask", [None, masks.causal()], ids=str)
def test_the_keys_of_one_row_occupy_all_threads(monkeypatch, mask):
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "4")
    for n in (2048, 32768):
        x = np.ones((1, 1, n, 8), np.float32)
        call = cached_calls.call(x[:, :, :1], x, x, [n], None, None, Options(mask=mask))
        problem = call.problem.sized(len_k=np.array([n]))
        units = decode_launch.planned(problem, cpu_programs.programs(call, problem.len_k), 0).units
        assert len(units) >= 4
        assert (units[:, 3] - units[:, 2]).max() <= n // 64 // 4


def test_only_leaves_that_are_seen_are_visited(monkeypatch):
    found = []
    original = decode_launch.decode
    monkeypatch.setattr(
        decode_launch, "decode", lambda *args: found.append(original(*args)) or found[-1]
    )
    case = Case(np.random.default_rng(11), FLOAT32, [1000], len_q=2)
    case.with_options(masks.window(99, 0)).run()
    case.with_options(masks.blocks(np.arange(16)[None] % 4 == 1, 2, 64)).run()
    case.with_options().run()
    assert [call.visited for call in found] == [2, 4, 16]


@pytest.mark.parametrize(
    ("mask", "sees"),
    [
        (
            masks.window(1000, 0) | masks.prefix(70),
            lambda h, i, j: (j <= i) & (j >= i - 1000) | (j < 70),
        ),
        (
            masks.mask(lambda b, h, i, j: (j < 700) | (j >= 9000) & (j % 5000 < 4700)),
            lambda h, i, j: (j < 700) | (j >= 9000) & (j % 5000 < 4700),
        ),
        (
            masks.mask(lambda b, h, i, j: (j >= 4096) & (j < 8192 + h)),
            lambda h, i, j: (j >= 4096) & (j < 8192 + h),
        ),
    ],
    ids=["window and prefix", "many ranges", "whole nodes"],
)
@pytest.mark.parametrize("most_units", [1, 64])
def test_nodes_that_a_mask_shows_or_hides_change_no_bit(monkeypatch, mask, sees, most_units):
    """Nodes of 8 and 64 leaves, EMPTY and FULL ones and others, against an array of all pairs."""
    monkeypatch.setattr(decode_tasks, "MOST_UNITS", most_units)
    lengths = [9300, 33000]
    case = Case(np.random.default_rng(18), FLOAT32, lengths, group=2, len_q=2, d=8, d_v=8)
    ours = case.with_options(mask).run()
    case.check(*ours)
    last = np.reshape(lengths, (2, 1, 1, 1)) - 1
    h, i, j = np.arange(2)[:, None, None], np.arange(2)[:, None] + last - 1, np.arange(33000)
    dense = np.broadcast_to(sees(h, i, j), (2, 2, 2, 33000))
    assert same(case.run(mask=np.ascontiguousarray(dense)), ours)


@pytest.mark.parametrize("group", [1, 3, 7])
@BY_DTYPE
def test_rows_have_the_same_bits_however_they_are_stored_and_shared(dtype, group):
    """In place and in tiles, alone and with the other heads of their group, widened before or not.

    Head sizes of 1 to 15 vectors are cut into blocks of all sizes.
    """
    for d, d_v in ((48, 112), (80, 240), (160, 16)):
        case = Case(np.random.default_rng(d), dtype, [150, 64], group=group, d=d, d_v=d_v)
        out, lse = case.with_options().run()
        for h in range(group):
            assert same(case.run(q=case.q[:, h : h + 1]), (out[:, h : h + 1], lse[:, h : h + 1]))
        apart = {}
        for name in ("k", "v"):  # every second column, which products cannot read in place
            x = getattr(case, name)
            apart[name] = np.stack([x, x], axis=-1).reshape(*x.shape[:-1], -1)[..., ::2]
        assert same(case.run(**apart), (out, lse))
        if dtype.itemsize == 2:
            wide = {name: getattr(case, name).astype(np.float32) for name in ("q", "k", "v")}
            wide_out, wide_lse = case.run(**wide)
            assert same((wide_out.astype(dtype), wide_lse), (out, lse))


def test_one_cache_for_all_entries():
    case = Case(np.random.default_rng(12), FLOAT32, [90], group=2)
    q = np.concatenate([case.q, 2 * case.q])
    out, lse = case.with_options().run(np.array([90, 50]), q=q)
    assert same((out[:1], lse[:1]), case.run())
    assert same((out[1:], lse[1:]), case.run(50, q=q[1:]))


def test_a_step_is_the_last_row_of_the_prompt():
    case = Case(np.random.default_rng(13), FLOAT32, [140], group=2, len_q=140)
    out, _ = case.with_options(masks.causal()).run()
    whole = cupyflash.attention(case.q, case.k, case.v, mask=masks.causal())
    bound = forward_bound(
        case.q, case.k, case.v, precision=Precision.of(np.float32), mask=masks.causal()
    ).out.bound
    assert (abs(out - whole) <= 2 * bound).all()
    step, _ = case.run(140, q=case.q[:, :, -1:])
    assert same_bits(step, out[:, :, -1:])


@pytest.mark.parametrize(
    ("lead_q", "lead_k"), [((), ()), ((3,), (3,)), ((3,), (1,)), ((2, 1), (3,)), ((1, 3), (2, 1))]
)
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(100, 0)], ids=str)
def test_attention_with_few_queries_has_the_bits_of_a_full_cache(lead_q, lead_k, mask):
    rng = np.random.default_rng(5)
    q = rng.standard_normal((*lead_q, 4, 2, 24), np.float32)
    k, v = rng.standard_normal((2, *lead_k, 2, 700, 24), np.float32)
    assert cupyflash.plan(q, k, v, mask=mask).kernel == "reference.decode"
    out, lse = cupyflash.attention(q, k, v, mask=mask, return_lse=True)
    lead = np.broadcast_shapes(lead_q, lead_k)
    q, k, v = (
        np.broadcast_to(x, (*lead, *x.shape[-3:])).reshape(-1, *x.shape[-3:]) for x in (q, k, v)
    )
    cached = attention_cached(q, k, v, 700, mask=mask, return_lse=True)
    for got, want in zip((out, lse), cached, strict=True):
        assert same_bits(got.reshape(want.shape), want)


def test_attention_with_more_queries_or_dropout_is_tiled():
    def kernel(queries, keys, heads=2, **options):
        q, k = np.ones((1, heads, queries, 8), np.float32), np.ones((1, 2, keys, 8), np.float32)
        return cupyflash.plan(q, k, k, **options).kernel

    assert kernel(8, 448) == "reference.forward"
    assert kernel(8, 449) == kernel(8, 449, heads=8) == "reference.decode"
    x = np.ones((1, 2, 512, 8), np.float32)
    plan = cupyflash.plan(x[..., :1, :], x, x)
    assert (plan.block_q, plan.block_kv) == (decode_tasks.MOST_ROWS, decode_tasks.LEAF)
    for kernel_of in (kernel(9, 512), kernel(8, 512, heads=10)):
        assert kernel_of == "reference.forward"
    assert kernel(8, 512, dropout=0.5, seed=1) == "reference.forward"


def test_unaligned_and_read_only_arrays():
    case = Case(np.random.default_rng(14), FLOAT32, [100], group=2)
    expected = case.with_options().run()
    moved = {}
    for name in ("q", "k", "v"):
        x = getattr(case, name)
        memory = np.empty(x.nbytes + 1, np.uint8)
        moved[name] = memory[1:].view(np.float32).reshape(x.shape)
        moved[name][...] = x
        moved[name].flags.writeable = False
    table = np.zeros((1, 1), np.int64)
    table.flags.writeable = False
    assert same(case.run(**moved), expected)
    assert same(case.run(**moved, table=table), expected)


def test_trees_are_their_dense_masks():
    case = Case(np.random.default_rng(15), FLOAT32, [100, 7], group=2, len_q=7)
    ancestors = case.rng.random((2, 7, 7)) < 0.5
    ours = case.with_options(masks.tree(ancestors)).run()
    dense = np.zeros((2, 1, 7, 100), bool)
    for b, n in enumerate(case.lengths):
        dense[b, :, :, : n - 7] = True
        dense[b, 0, :, n - 7 : n] = ancestors[b]
    assert same(ours, case.with_options(masks.dense(dense)).run())


def test_the_callers_error_state_of_numpy_changes_nothing():
    case = Case(np.random.default_rng(16), np.dtype(np.float16), [70])
    case.v[:] *= np.float16(1e-4)  # out has subnormal numbers
    expected = case.with_options().run()
    with np.errstate(all="raise"):
        assert same(case.run(), expected)
