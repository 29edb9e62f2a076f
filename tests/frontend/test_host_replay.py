"""Calls on NumPy arrays that look like an earlier one: the same bits, without checks and proofs."""

from __future__ import annotations

import gc
import threading
import weakref
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from placement import same_bits

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, lookup, masks, scores
from cupyflash.backends.host_calls import MOST_CALLS
from cupyflash.problem import cached, replay, validate

F32, F64, F16 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16)
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def entries(monkeypatch):
    """Nothing is known of calls before a test."""
    monkeypatch.setattr(replay, "_entries", {})


def normal(rng, *shape, dtype=F32):
    return rng.standard_normal(shape).astype(dtype)


def dense(dtype=F32, shape=(2, 4, 37, 24), keys=51, heads_kv=2, **options):
    def call(rng):
        batch, heads, length, d = shape
        q = normal(rng, batch, heads, length, d, dtype=dtype)
        k, v = (normal(rng, batch, heads_kv, keys, d, dtype=dtype) for _ in "kv")
        made = {name: x(rng) if callable(x) else x for name, x in options.items()}
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **made)
        do = normal(rng, *out.shape, dtype=dtype)
        dlse = normal(rng, *lse.shape, dtype=lse.dtype)
        return lambda: (
            *cupyflash.attention(q, k, v, return_lse=True, **made),
            cupyflash.attention(q, k, v, **made),
            *cupyflash.attention_backward(do, q, k, v, out, lse, dlse=dlse, **made),
        )

    return call


def learned(dtype=F32):
    """Look-ups of all kinds of indices; the chain reads them in another order than its changes."""

    def call(rng):
        shapes = (2, 4, 30, 8), (2, 4, 30, 8), (2, 1, 26, 8), (1, 1, 26, 8)
        do, q, k, v = (normal(rng, *shape, dtype=dtype) for shape in shapes)
        arrays = [normal(rng, *shape) for shape in ((), (4,), (4, 7), (2, 30), (3, 3))]
        cap, slopes, distances, gate, pairs = (
            lookup(np.asarray(abs(x) + 0.5), learned=True) for x in arrays
        )
        place = lookup(np.arange(30) * 5 % 3)

        def change(s, b, h, i, j):
            return gate[b, i] * s + pairs[place[i], place[j]] * slopes[h]

        changes = [
            scores.softcap(cap), scores.alibi(slopes), scores.relative_bias(distances),
            scores.score(change),
        ]  # fmt: skip
        options = {"score_mod": changes, "mask": masks.causal(), "dropout": 0.1, "seed": 3}
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        target = np.zeros(4, np.float32)
        given = cupyflash.Gradients(None, None, None, dlookups={slopes: target})

        def run():
            made = cupyflash.attention_backward(do, q, k, v, out, lse, **options)
            again = cupyflash.attention_backward(do, q, k, v, out, lse, grads_out=given, **options)
            assert again.dlookups[slopes] is target
            tables = cap, slopes, distances, gate, pairs
            return *made, *(x.dlookups[each] for x in (made, again) for each in tables)

        return run

    return call


def matrices(rng):
    q, k, v = (normal(rng, n, 16) for n in (9, 13, 13))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    return lambda: (out, lse, *cupyflash.attention_backward(out, q, k, v, out, lse))


def one_row(rng):
    q, k, v = (normal(rng, n, 16) for n in (1, 13, 13))
    return lambda: cupyflash.attention(q, k, v, return_lse=True)


def of_other_strides(rng):
    """Rows of heads lie in turns, and columns of v far apart, which takes a copy."""
    q, k = (normal(rng, 2, 30, 3, 16).swapaxes(1, 2) for _ in "qk")
    v = normal(rng, 2, 3, 30, 32)[..., ::2]
    out, lse = cupyflash.attention(q, k, v, mask=masks.causal(), return_lse=True)
    assert out.strides == q.strides
    return lambda: (
        *cupyflash.attention(q, k, v, mask=masks.causal(), return_lse=True),
        *cupyflash.attention_backward(out, q, k, v, out, lse, mask=masks.causal()),
    )


def packed(rng):
    q, k, v = (normal(rng, 2, 40, 16) for _ in "qkv")
    offsets = np.array([0, 11, 11, 40])
    options = {"mask": masks.causal()}
    out, lse = cupyflash.attention_varlen(q, k, v, offsets, offsets, return_lse=True, **options)
    arrays = out, q, k, v, out, lse, offsets, offsets
    return lambda: (
        *cupyflash.attention_varlen(q, k, v, offsets, offsets, return_lse=True, **options),
        *cupyflash.attention_varlen_backward(*arrays, **options),
    )


def over_cache(lengths, queries=1, entries=2, paged=False, **options):
    def call(rng):
        q = normal(rng, entries, 4, queries, 16)
        table = None
        if paged:
            k, v = (normal(rng, 20, 2, 8, 16) for _ in "kv")
            table = np.arange(2 * 10).reshape(2, 10)[:, ::-1].astype(np.int32)
        else:
            k, v = (normal(rng, entries, 2, 80, 16) for _ in "kv")
        options_here = {**options, **({} if table is None else {"table": table})}
        return lambda: [
            x
            for n in lengths
            for x in cupyflash.attention_cached(q, k, v, n, return_lse=True, **options_here)
        ]

    return call


def one_query(mask=None, dtype=F32):
    def call(rng):
        q = normal(rng, 2, 4, 1, 24, dtype=dtype)
        k, v = (normal(rng, 2, 2, 200, 24, dtype=dtype) for _ in "kv")
        options = {} if mask is None else {"mask": mask}
        grown = [(k[:, :, :n], v[:, :, :n]) for n in (1, 63, 64, 65, 200)]
        grown += [(x.copy(), y.copy()) for x, y in grown]
        return lambda: [
            x for pair in grown for x in cupyflash.attention(q, *pair, return_lse=True, **options)
        ]

    return call


def over_codes(kv_dtype, of_heads=False, number=False):
    def call(rng):
        q, k, v = normal(rng, 2, 4, 1, 32), normal(rng, 2, 2, 80, 32), normal(rng, 2, 2, 80, 32)
        (k, k_scale), (v, v_scale) = (cupyflash.quantize(x, kv_dtype) for x in (k, v))
        if of_heads:
            k_scale, v_scale = k_scale[:1, :, :1], v_scale[:, :, :1]
        if number:
            k_scale = v_scale = 0.02
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        return lambda: [
            x
            for n in (3, 64, 80)
            for x in cupyflash.attention_cached(q, k, v, n, return_lse=True, **scales)
        ]

    return call


SLOPES = np.linspace(0.1, 0.5, 4, dtype=np.float32)
KINDS = {
    "dense": dense(),
    "float64": dense(F64),
    "float16": dense(F16),
    "bfloat16": dense(BF16, mask=masks.causal()),
    "causal": dense(mask=masks.causal()),
    "window": dense(mask=masks.window(5, 3)),
    "lengths": dense(mask=masks.lengths(np.array([51, 7]))),
    "a mask without ranges": dense(mask=masks.mask(lambda b, h, i, j: (i + j) % 3 != 0)),
    "an array of Booleans": dense(
        shape=(1, 2, 20, 8), keys=30, mask=lambda rng: rng.random((20, 30)) < 0.7
    ),
    "bias": dense(bias=lambda rng: normal(rng, 4, 37, 51)),
    "bias of one head": dense(bias=lambda rng: normal(rng, 1, 37, 51, dtype=F16)),
    "alibi": dense(score_mod=scores.alibi(SLOPES)),
    "soft cap": dense(score_mod=scores.softcap(3.0), mask=masks.causal()),
    "learned look-ups": learned(),
    "learned look-ups, bfloat16": learned(BF16),
    "sink": dense(sink=lambda rng: normal(rng, 4)),
    "dropout": dense(dropout=0.3, seed=lambda rng: int(rng.integers(2**63))),
    "scale": dense(scale=-0.25),
    "matrices": matrices,
    "one row": one_row,
    "other strides": of_other_strides,
    "packed": packed,
    "cached": over_cache((1, 17, 64, 65, 80)),
    "cached, lengths of entries": over_cache([np.array([n, 80 - n]) for n in (0, 3, 70)]),
    "cached, several queries": over_cache((5, 66), 3, mask=masks.causal()),
    "cached window": over_cache((9, 40, 80), mask=masks.window(7, 0)),
    "cached prefix": over_cache((9, 40, 80), mask=masks.window(7, 0) | masks.prefix(3)),
    "cached pages": over_cache((9, 40, 80), paged=True),
    "codes of int8": over_codes("int8"),
    "codes of float8": over_codes("float8_e4m3fn", of_heads=True),
    "codes with a scale": over_codes("int8", number=True),
    "one query": one_query(),
    "one query, causal": one_query(masks.causal()),
    "one query, window": one_query(masks.window(9, 0)),
    "one query, float16": one_query(dtype=F16),
}


def refuse(*_, **__):
    raise AssertionError("the call was checked again")


def recognised():
    """Make every check an error: what runs now was recognised."""
    stack = mock.patch.multiple(validate, call=refuse, varlen_call=refuse)
    return stack, mock.patch.object(cached, "call", refuse)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_as_of_a_checked_call(kind):
    call = KINDS[kind](np.random.default_rng(2))
    with mock.patch.object(replay, "find", return_value=None):
        expected = call()
    KINDS[kind](np.random.default_rng(1))()  # of the same form
    known = replay.kept()
    checks, of_cache = recognised()
    with checks, of_cache:
        made = call()
    assert replay.kept() == known > 0
    for ours, theirs in zip(made, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert same_bits(ours, theirs)
            assert ours.strides == theirs.strides


def test_a_new_mask_of_the_same_form_is_the_same_call():
    q, k, v = np.ones((3, 1, 2, 20, 8), np.float32)
    cupyflash.attention(q, k, v, mask=masks.window(np.int64(3), 0) & masks.causal())
    checks, of_cache = recognised()
    with checks, of_cache:
        cupyflash.attention(q, k, v, mask=masks.window(np.int64(3), 0) & masks.causal())
    assert replay.kept() == 1
    with checks, of_cache:  # nor does another number make it another one
        cupyflash.attention(q, k, v, mask=masks.window(np.int64(4), 0) & masks.causal())
    assert replay.kept() == 1
    cupyflash.attention(q, k, v, mask=masks.window(np.int64(4), 0) & masks.causal(offset=0))
    assert replay.kept() == 2


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_what_masks_look_up_may_change(dtype):
    rng = np.random.default_rng(3)
    q, k, v = (normal(rng, 2, 2, 20, 8) for _ in "qkv")
    lengths = np.array([20, 3], dtype)
    for change in ((20, 3), (1, 20), (20, 3), (0, 0)):
        lengths[:] = change
        with mock.patch.object(replay, "find", return_value=None):
            expected = cupyflash.attention(q, k, v, mask=masks.lengths(lengths))
        assert same_bits(cupyflash.attention(q, k, v, mask=masks.lengths(lengths)), expected)


def test_an_index_out_of_range_is_an_error_each_time():
    q, k, v = np.ones((3, 1, 2, 20, 8), np.float32)
    at, wanted = np.zeros(20, np.int64), np.ones(5, bool)
    mask = masks.mask(lambda b, h, i, j: lookup(wanted)[lookup(at)[i]])
    for _ in range(3):
        cupyflash.attention(q, k, v, mask=mask)
    at[7] = 5
    for _ in range(2):
        with pytest.raises(ArgumentError, match="clip"):
            cupyflash.attention(q, k, v, mask=mask)


def test_an_index_made_of_floats_is_looked_at_each_time():
    q, k, v = np.ones((3, 1, 2, 20, 8), np.float32)
    at, wanted = np.zeros(20, np.float32), np.ones(5, np.float32)
    change = scores.score(
        lambda s, b, h, i, j: s + lookup(wanted)[cupyflash.expr.floor(lookup(at)[i])]
    )
    for _ in range(3):
        cupyflash.attention(q, k, v, score_mod=change)
    at[7] = 5
    with pytest.raises(ArgumentError, match="clip"):
        cupyflash.attention(q, k, v, score_mod=change)


def test_learned_look_ups_are_told_from_others():
    """Calls that differ only in which arrays have gradients, and in who reads which."""
    q, k, v, do = np.random.default_rng(4).standard_normal((4, 1, 2, 20, 8), dtype=np.float32)
    array = np.ones(2, np.float32)

    def gradients(*tables):
        change = scores.score(lambda s, b, h, i, j: s * tables[0][h] + tables[1][j % 2])
        vjp = cupyflash.attention_vjp(q, k, v, score_mod=change)[1]
        return vjp(do).dlookups

    def table(learned=True):
        return lookup(array, learned=learned)

    one = table()
    for _ in range(2):
        first, second = table(), table()
        both = gradients(first, second)
        assert list(both) == [first, second]
        shared = gradients(one, one)
        assert list(shared) == [one]
        assert np.allclose(shared[one], both[first] + both[second], rtol=1e-4)
        single = gradients(table(learned=False), second)
        assert list(single) == [second]
        assert same_bits(single[second], both[second])
        assert not gradients(table(learned=False), table(learned=False))
    unused = scores.alibi(table())
    change = scores.score(lambda s, b, h, i, j: one[h] * j)
    for _ in range(2):  # what replaces the scores that a look-up has changed
        vjp = cupyflash.attention_vjp(q, k, v, score_mod=[unused, change])[1]
        assert list(vjp(do).dlookups) == [one]


def test_other_lengths_of_a_cache_are_checked():
    q, k = np.ones((1, 2, 1, 8), np.float32), np.ones((1, 2, 30, 8), np.float32)
    for n in (3, 4):
        cupyflash.attention_cached(q, k, k, n)
    with pytest.raises(ArgumentError, match="lengths: entry 0 is 31"):
        cupyflash.attention_cached(q, k, k, 31)
    with pytest.raises(ArgumentError, match="lengths: entry 0 is -1"):
        cupyflash.attention_cached(q, k, k, np.array([-1]))


def test_a_table_with_other_pages_is_checked():
    q, k = np.ones((1, 2, 1, 8), np.float32), np.ones((4, 2, 8, 8), np.float32)
    table = np.array([[0, 1, 2]])
    for n in (3, 20):
        cupyflash.attention_cached(q, k, k, n, table=table)
    table[0, 2] = 4
    with pytest.raises(ArgumentError, match="table: entry"):
        cupyflash.attention_cached(q, k, k, 20, table=table)


def test_places_of_results_are_checked():
    q, k, v = np.ones((3, 1, 2, 20, 8), np.float32)
    memory = np.zeros((2, *q.shape), np.float32)
    for n in range(2):
        assert cupyflash.attention(q, k, v, out=memory[n]) is not None
        assert (memory[n] == 1).all()
    for place in (q, v):
        with pytest.raises(ArgumentError, match="out"):
            cupyflash.attention(q, k, v, out=place)
    fixed = np.zeros(q.shape, np.float32)
    fixed.setflags(write=False)
    with pytest.raises(ArgumentError, match="out"):
        cupyflash.attention(q, k, v, out=fixed)
    assert not fixed.any()


def test_hidden_values_that_are_not_finite_change_nothing():
    rng = np.random.default_rng(5)
    q, k, v = (normal(rng, 1, 2, 20, 8) for _ in "qkv")
    mask = masks.causal() & masks.lengths(9)
    expected = cupyflash.attention(q, k, v, mask=mask)
    k[..., 9:, :], v[..., 9:, :] = np.inf, np.nan
    for _ in range(2):
        assert same_bits(cupyflash.attention(q, k, v, mask=mask), expected)
    v[..., 3, 0] = np.nan
    out = cupyflash.attention(q, k, v, mask=mask)
    assert np.isnan(out[..., 3:, 0]).all()
    assert np.isfinite(out[..., :3, :]).all()
    assert np.isfinite(out[..., 1:]).all()


def test_no_array_is_kept_alive():
    rng = np.random.default_rng(6)
    q, k, v, bias = (normal(rng, *shape) for shape in (*[(1, 2, 20, 8)] * 3, (2, 20, 20)))
    options = {"bias": bias, "mask": masks.mask(lambda b, h, i, j: i >= j), "sink": bias[:, 0, 0]}
    out, vjp = cupyflash.attention_vjp(q, k, v, **options)
    vjp(out)
    cupyflash.attention(q[:, :, :1], k, v)
    cupyflash.attention_cached(q[:, :, :1], k, v, 7)
    assert replay.kept() == 4
    alive = [weakref.ref(x) for x in (q, k, v, bias, out)]
    del q, k, v, bias, out, vjp, options
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5


def test_many_threads_make_the_same_call():
    rng = np.random.default_rng(7)
    calls = [[normal(rng, 2, 2, 30, 16) for _ in "qkv"] for _ in range(8)]
    expected = [cupyflash.attention(*arrays, mask=masks.causal()) for arrays in calls]
    wrong = []

    def work(arrays, right):
        made = (cupyflash.attention(*arrays, mask=masks.causal()) for _ in range(40))
        wrong.extend(arrays for out in made if not same_bits(out, right))

    threads = [
        threading.Thread(target=work, args=each) for each in zip(calls, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("seed", [int, np.uint64, np.array], ids=["int", "uint64", "array"])
def test_each_seed_drops_other_pairs(seed):
    """Also a seed of 0 after others, and seeds whose arrays look alike."""
    q, k, v = np.ones((3, 1, 2, 20, 8), np.float32) * np.arange(20, dtype=np.float32)[:, None]
    expected = {}
    for number in (5, 0, 6, 5, 0, 6):
        options = {"dropout": 0.5, "seed": seed(number)}
        out, vjp = cupyflash.attention_vjp(q, k, v, **options)
        found = out.tobytes() + vjp(out).dv.tobytes()
        assert expected.setdefault(number, found) == found
    assert len(set(expected.values())) == 3


def test_bytes_in_another_order_are_refused_each_time():
    q, k, v = np.ones((3, 1, 2, 20, 8), np.float32)
    cupyflash.attention(q, k, v)
    for _ in range(2):
        with pytest.raises(ArgumentTypeError, match="native byte order"):
            cupyflash.attention(*(x.astype(">f4") for x in (q, k, v)))


def test_an_interrupted_call_leaves_nothing_half_kept(monkeypatch):
    from cupyflash.reference.cpu import forward_call

    q, k, v = np.ones((3, 1, 2, 20, 8), np.float32)
    expected, _ = cupyflash.attention(q, k, v, return_lse=True)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(forward_call, "parallel", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cupyflash.attention(q, k, v, return_lse=True)
    for _ in range(2):
        assert same_bits(cupyflash.attention(q, k, v, return_lse=True)[0], expected)


def test_gradients_after_a_change_name_the_array():
    rng = np.random.default_rng(8)
    q, k, v = (normal(rng, 1, 2, 20, 8) for _ in "qkv")
    slopes = np.ones(2, np.float32)
    for changed, name in ((k, "k"), (slopes, "array 0 of score_mod")):
        options = {"score_mod": scores.score(lambda s, b, h, i, j: s * lookup(slopes)[h])}
        for _ in range(2):
            out, vjp = cupyflash.attention_vjp(q, k, v, **options)
            vjp(out)
        changed += 1
        with pytest.raises(ArgumentError, match=f"after the forward call: {name};"):
            vjp(out)


def test_what_is_kept_is_limited(monkeypatch):
    monkeypatch.setattr(replay, "MOST", 3)
    for n in range(2, 8):
        cupyflash.attention(*np.ones((3, 1, 2, n, 8), np.float32))
    assert replay.kept() == 3
    monkeypatch.setattr(replay, "MOST_BYTES", 0)
    cupyflash.attention(*np.ones((3, 1, 2, 8, 24), np.float64)[..., ::3])  # by copies
    assert replay.kept() <= 3


def test_all_calls_of_an_entry_count():
    """Threads that make a call at once leave one each, of which few are kept; all of them count."""
    arrays = np.ones((3, 1, 2, 8, 24), np.float64)[..., ::3]  # which are copied
    kept, sizes = [], []
    for _ in range(MOST_CALLS + 2):
        cupyflash.attention(*arrays)
        (entry,) = replay._entries.values()
        kept += entry.compiled.free  # as if threads were making all of them
        entry.compiled.free.clear()
        sizes.append(entry.nbytes)
    one = sizes[0]
    assert one > 0
    assert sizes == [one * min(n, MOST_CALLS) for n in range(1, MOST_CALLS + 3)]
    assert len(kept) == MOST_CALLS
    kept.clear()  # as if all of them had raised
    cupyflash.attention(*arrays)
    (entry,) = replay._entries.values()
    assert (entry.nbytes, len(entry.compiled.free)) == (one, 1)
