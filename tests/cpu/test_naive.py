"""The specification against values worked by hand and against finite differences."""

import math

import ml_dtypes
import numpy as np
import pytest

from cupyflash.reference.cpu import philox
from cupyflash.reference.spec import naive

LN2 = math.log(2.0)
ALL_OPTIONS = ("bias", "dlse", "dropout", "mask", "scale", "score", "sink")


class Causal:
    def evaluate(self, b, h, i, j, sizes):
        return j <= i + sizes.len_k - sizes.len_q


class Softcap:
    def __init__(self, cap):
        self.cap = cap

    def evaluate(self, s, b, h, i, j, sizes):
        t = np.tanh(s / self.cap)
        return self.cap * t, 1 - t * t


class Recorder:
    """A score that remembers what it was called with and adds 100 b + 10 h."""

    def evaluate(self, s, b, h, i, j, sizes):
        self.positions, self.sizes, self.dtype = (b, h, i, j), sizes, s.dtype
        return s + 100 * b + 10 * h + 0 * i + 0 * j, np.ones_like(s)


class HideKey:
    """A score that sends one key to -inf, with an infinite slope there."""

    def evaluate(self, s, b, h, i, j, sizes):
        hidden = np.broadcast_to(j == 1, s.shape)
        return np.where(hidden, -np.inf, s), np.where(hidden, np.inf, 1.0)


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


# Values worked by hand


def test_two_keys_by_hand():
    # scores 0 and ln 2, so P = 1/3, 2/3
    q, k, v = [[1.0]], [[0.0], [LN2]], [[3.0, 0.0], [0.0, 9.0]]
    result = naive.attention(q, k, v, scale=1.0, return_probs=True)
    np.testing.assert_allclose(result.probs, [[1 / 3, 2 / 3]], rtol=1e-15)
    np.testing.assert_allclose(result.out, [[1.0, 6.0]], rtol=1e-15)
    np.testing.assert_allclose(result.lse, [math.log(3.0)], rtol=1e-15)


def test_two_keys_backward_by_hand():
    # P = 1/3, 2/3; dP = do . v = 3, 18; delta = 1/3 * 3 + 2/3 * 18 = 13
    # dT = P (dP - delta) = -10/3, 10/3
    q, k, v = [[1.0]], [[0.0], [LN2]], [[3.0, 0.0], [0.0, 9.0]]
    g = naive.attention_backward([[1.0, 2.0]], q, k, v, scale=1.0, bias=np.zeros((1, 2)))
    np.testing.assert_allclose(g.dbias, [[-10 / 3, 10 / 3]], rtol=1e-14)
    np.testing.assert_allclose(g.dq, [[10 / 3 * LN2]], rtol=1e-14)
    np.testing.assert_allclose(g.dk, [[-10 / 3], [10 / 3]], rtol=1e-14)
    np.testing.assert_allclose(g.dv, [[1 / 3, 2 / 3], [2 / 3, 4 / 3]], rtol=1e-14)
    assert g.dsink is None


def test_gradient_of_the_lse_by_hand():
    # with do = 0: dT = P dlse
    q, k, v = [[1.0]], [[0.0], [LN2]], [[3.0], [9.0]]
    g = naive.attention_backward([[0.0]], q, k, v, dlse=[6.0], scale=1.0)
    np.testing.assert_allclose(g.dk, [[2.0], [4.0]], rtol=1e-14)
    np.testing.assert_allclose(g.dq, [[4.0 * LN2]], rtol=1e-14)
    np.testing.assert_array_equal(g.dv, [[0.0], [0.0]])


def test_default_scale_and_order_of_logits():
    # 16 equal products of 1 / 4 = 4; softcap(2) of it, then + bias 1
    q, k = np.ones((1, 16)), np.ones((1, 16))
    lse = naive.attention(q, k, [[1.0]], score_mod=Softcap(2.0), bias=[[1.0]]).lse
    np.testing.assert_allclose(lse, [2 * math.tanh(2.0) + 1], rtol=1e-15)
    chain = naive.attention(q, k, [[1.0]], score_mod=[Softcap(2.0), Softcap(0.5)]).lse
    np.testing.assert_allclose(chain, [0.5 * math.tanh(2 * math.tanh(2.0) / 0.5)], rtol=1e-15)


def test_sink_by_hand():
    # logits 0, 0 and a sink of ln 2: P = 1/4, 1/4, sink 1/2
    q, k, v = [[1.0]], [[0.0], [0.0]], [[4.0], [8.0]]
    sink = [LN2]
    result = naive.attention(q, k, v, scale=3.0, sink=sink)
    np.testing.assert_allclose(result.out, [[3.0]], rtol=1e-15)
    np.testing.assert_allclose(result.lse, [math.log(4.0)], rtol=1e-15)
    g = naive.attention_backward([[1.0]], q, k, v, dlse=[5.0], sink=sink)
    np.testing.assert_allclose(g.dsink, [0.5 * (5.0 - 3.0)], rtol=1e-14)
    nothing = naive.attention(q, k, v, sink=[-np.inf])
    plain = naive.attention(q, k, v)
    np.testing.assert_array_equal(nothing.out, plain.out)
    np.testing.assert_array_equal(nothing.lse, plain.lse)


def test_dropout_by_hand():
    q, k, v = np.zeros((3, 2)), np.zeros((5, 2)), np.diag([1.0, 2.0, 3.0, 4.0, 5.0])
    kept = philox.keep(11, 0.4, 0, np.arange(3)[:, None], np.arange(5))
    assert 0 < kept.sum() < kept.size
    options = {"dropout": 0.4, "seed": 11}
    result = naive.attention(q, k, v, return_probs=True, **options)
    p_keep = 1 - round(0.4 * 2**15) / 2**15
    np.testing.assert_allclose(result.out, kept * np.arange(1.0, 6.0) / 5 / p_keep, rtol=1e-15)
    np.testing.assert_allclose(result.probs, np.full((3, 5), 0.2), rtol=1e-15)
    np.testing.assert_allclose(result.lse, np.log([5.0] * 3), rtol=1e-15)
    g = naive.attention_backward(np.ones((3, 5)), q, k, v, **options)
    column = kept.sum(axis=0) / 5 / p_keep
    np.testing.assert_allclose(g.dv, np.broadcast_to(column[:, None], (5, 5)), rtol=1e-15)


def test_dropout_counts_heads_over_the_whole_batch():
    q, k, v = np.zeros((2, 3, 4, 1)), np.zeros((2, 3, 6, 1)), np.ones((2, 3, 6, 1))
    out = naive.attention(q, k, v, dropout=0.5, seed=3).out
    flat = np.arange(6).reshape(2, 3, 1, 1)
    kept = philox.keep(3, 0.5, flat, np.arange(4)[:, None], np.arange(6))
    np.testing.assert_allclose(out[..., 0], kept.sum(axis=-1) / 6 / 0.5, rtol=1e-15)


def test_empty_rows():
    q, k, v = random(2, 3, 4), random(2, 5, 4), random(2, 5, 6)
    mask = np.ones((3, 5), bool)
    mask[1] = False
    do, dlse = random(2, 3, 6, seed=1), random(2, 3, seed=1)
    result = naive.attention(q, k, v, mask=mask)
    assert np.all(result.out[:, 1] == 0)
    assert np.all(result.lse[:, 1] == -np.inf)
    do[:, 1], dlse[:, 1] = np.nan, np.nan  # gradients of nothing go nowhere
    g = naive.attention_backward(do, q, k, v, dlse=dlse, mask=mask)
    assert np.all(g.dq[:, 1] == 0)
    others = [0, 2]
    short = naive.attention_backward(
        do[:, others], q[:, others], k, v, dlse=dlse[:, others], mask=mask[others]
    )
    np.testing.assert_allclose(g.dk, short.dk, rtol=1e-14)
    np.testing.assert_allclose(g.dv, short.dv, rtol=1e-14)


def test_otherwise_empty_row_with_a_sink():
    q, k, v, sink = random(2, 3, 4), random(2, 5, 4), random(2, 5, 6), np.array([0.5, -2.0])
    mask = np.zeros((3, 5), bool)
    result = naive.attention(q, k, v, mask=mask, sink=sink)
    assert np.all(result.out == 0)
    np.testing.assert_array_equal(result.lse, np.broadcast_to(sink[:, None], (2, 3)))
    do, dlse = random(2, 3, 6, seed=1), random(2, 3, seed=1)
    g = naive.attention_backward(do, q, k, v, dlse=dlse, mask=mask, sink=sink)
    assert not any(x.any() for x in (g.dq, g.dk, g.dv))
    np.testing.assert_allclose(g.dsink, dlse.sum(axis=1), rtol=1e-15)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_empty_axes(shape):
    rows, keys = shape
    q, k, v = random(2, 4, rows, 8), random(2, 2, keys, 8), random(2, 2, keys, 5)
    result = naive.attention(q, k, v, bias=np.zeros((4, 1, 1)), return_probs=True)
    assert result.out.shape == (2, 4, rows, 5)
    assert result.lse.shape == (2, 4, rows)
    assert result.probs.shape == (2, 4, rows, keys)
    assert not result.out.any()
    assert np.all(result.lse == -np.inf)
    g = naive.attention_backward(result.out, q, k, v, bias=np.zeros((4, 1, 1)), sink=np.zeros(4))
    shapes = [x.shape for x in g]
    assert shapes == [q.shape, k.shape, v.shape, (4, 1, 1), (4,)]
    assert not any(x.any() for x in g[:4])


def test_empty_batch():
    q, k, v = np.zeros((0, 4, 3, 8)), np.zeros((0, 2, 5, 8)), np.zeros((2, 5, 7))
    assert naive.attention(q, k, v).out.shape == (0, 4, 3, 7)
    g = naive.attention_backward(np.zeros((0, 4, 3, 7)), q, k, v)
    assert g.dv.shape == (2, 5, 7)
    assert not g.dv.any()


# Masks, -inf, non-finite values


@pytest.mark.parametrize("how", ["mask", "bias", "score"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_hidden_key_changes_nothing_whatever_it_holds(how, poison):
    q, k, v, do = random(2, 3, 4), random(2, 5, 4), random(2, 5, 6), random(2, 3, 6, seed=1)
    visible = np.broadcast_to(np.arange(5) != 1, (3, 5))
    options = {
        "mask": {"mask": visible},
        "bias": {"bias": np.where(visible, 0.0, -np.inf)},
        "score": {"score_mod": HideKey()},
    }[how]
    k_bad, v_bad = k.copy(), v.copy()
    k_bad[:, 1], v_bad[:, 1] = poison, poison
    few = [0, 2, 3, 4]
    expected = naive.attention(q, k[:, few], v[:, few])
    result = naive.attention(q, k_bad, v_bad, **options)
    np.testing.assert_allclose(result.out, expected.out, rtol=1e-14)
    np.testing.assert_allclose(result.lse, expected.lse, rtol=1e-14)
    g = naive.attention_backward(do, q, k_bad, v_bad, **options)
    short = naive.attention_backward(do, q, k[:, few], v[:, few])
    np.testing.assert_allclose(g.dq, short.dq, rtol=1e-13)
    for ours, theirs in ((g.dk, short.dk), (g.dv, short.dv)):
        assert np.all(ours[:, 1] == 0)
        np.testing.assert_allclose(ours[:, few], theirs, rtol=1e-13)
    if g.dbias is not None:
        assert np.all(g.dbias[:, 1] == 0)


def test_non_finite_values_are_pairwise_exact():
    # causal: rows 0 and 1 do not see key 2, rows 2 and 3 do
    q, k, v, do = random(4, 3), random(4, 3), random(4, 2), random(4, 2, seed=1)
    k_bad, v_bad = k.copy(), v.copy()
    k_bad[2, 0], v_bad[2, 0] = np.nan, np.inf
    clean, bad = (naive.attention(q, x, y, mask=Causal()) for x, y in ((k, v), (k_bad, v_bad)))
    np.testing.assert_array_equal(bad.out[:2], clean.out[:2])
    assert np.isnan(bad.out[2:]).all()
    assert np.isnan(bad.lse[2:]).all()
    g = naive.attention_backward(do, q, k_bad, v_bad, mask=Causal())
    expected = naive.attention_backward(do, q, k, v, mask=Causal())
    np.testing.assert_array_equal(g.dq[:2], expected.dq[:2])
    assert np.isnan(g.dq[2:]).all()
    # NaN in one query poisons its row, and the gradients of the keys that it sees
    q_bad = q.copy()
    q_bad[1] = np.nan
    poisoned = naive.attention(q_bad, k, v, mask=Causal())
    assert np.isnan(poisoned.out[1]).all()
    np.testing.assert_array_equal(np.delete(poisoned.out, 1, 0), np.delete(clean.out, 1, 0))
    g = naive.attention_backward(do, q_bad, k, v, mask=Causal())
    assert np.isnan(g.dk[:2]).all()
    np.testing.assert_array_equal(g.dk[2:], expected.dk[2:])


def test_what_masks_and_scores_are_given():
    recorder = Recorder()
    q, k, v = random(2, 1, 4, 3, 8), random(5, 2, 6, 8), random(5, 2, 6, 8)
    lse = naive.attention(q, k, v, score_mod=recorder, dtype=np.longdouble).lse
    sizes = recorder.sizes
    assert (sizes.lead, sizes.heads, sizes.len_q, sizes.len_k) == ((2, 5), 4, 3, 6)
    assert (sizes.start_q, sizes.start_k) == (0, 0)
    assert all(x.dtype == np.int64 for x in recorder.positions)
    assert np.broadcast_shapes(*(x.shape for x in recorder.positions)) == (10, 4, 3, 6)
    assert recorder.dtype == np.longdouble
    shift = 100 * np.arange(10).reshape(2, 5, 1, 1) + 10 * np.arange(4).reshape(4, 1)
    plain = naive.attention(q, k, v, dtype=np.longdouble).lse
    np.testing.assert_allclose((lse - plain).astype(float), shift + np.zeros((3,)), rtol=1e-15)


# Shapes


def test_leading_axes_and_heads_broadcast_as_if_repeated():
    q, k, v = random(2, 1, 6, 3, 8), random(5, 2, 7, 8), random(1, 5, 2, 7, 4)
    bias, sink = random(2, 1, 1, 3, 7), random(6)
    do, dlse = random(2, 5, 6, 3, 4), random(2, 5, 6, 3)
    full_q = np.broadcast_to(q, (2, 5, 6, 3, 8))
    full_k = np.repeat(np.broadcast_to(k, (2, 5, 2, 7, 8)), 3, axis=2)
    full_v = np.repeat(np.broadcast_to(v, (2, 5, 2, 7, 4)), 3, axis=2)
    full_bias = np.broadcast_to(bias, (2, 5, 6, 3, 7))
    result = naive.attention(q, k, v, bias=bias, sink=sink)
    expected = naive.attention(full_q, full_k, full_v, bias=full_bias, sink=sink)
    np.testing.assert_array_equal(result.out, expected.out)
    np.testing.assert_array_equal(result.lse, expected.lse)
    g = naive.attention_backward(do, q, k, v, dlse=dlse, bias=bias, sink=sink)
    full = naive.attention_backward(
        do, full_q, full_k, full_v, dlse=dlse, bias=full_bias, sink=sink
    )
    np.testing.assert_allclose(g.dq, full.dq.sum(axis=1, keepdims=True), rtol=1e-13)
    grouped = full.dk.reshape(2, 5, 2, 3, 7, 8).sum(axis=(0, 3))
    np.testing.assert_allclose(g.dk, grouped, rtol=1e-12, atol=1e-14)
    grouped = full.dv.reshape(2, 5, 2, 3, 7, 4).sum(axis=(0, 3))[None]
    np.testing.assert_allclose(g.dv, grouped, rtol=1e-12, atol=1e-14)
    summed = full.dbias.sum(axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(g.dbias, summed, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(g.dsink, full.dsink, rtol=1e-13)


def test_two_dimensional_arrays_are_one_head():
    q, k, v, do = random(3, 8), random(5, 8), random(5, 4), random(3, 4)
    options = {"mask": Causal(), "bias": random(5), "sink": [0.3]}
    flat = naive.attention(q, k, v, return_probs=True, **options)
    headed = naive.attention(q[None], k[None], v[None], return_probs=True, **options)
    for x, y in zip(flat, headed, strict=True):
        np.testing.assert_array_equal(x, y[0])
    gradients = naive.attention_backward(do, q, k, v, **options)
    assert [x.shape for x in gradients] == [(3, 8), (5, 8), (5, 4), (5,), (1,)]


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="heads"):
        naive.attention(random(3, 2, 4), random(2, 2, 4), random(2, 2, 4))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("computing", [np.float64, np.longdouble])
def test_inputs_of_any_type_are_converted_exactly(dtype, computing):
    q, k, v = (random(2, 3, 4, seed=n).astype(dtype) for n in range(3))
    result = naive.attention(q, k, v, dtype=computing)
    wide = naive.attention(*(x.astype(np.float64) for x in (q, k, v)), dtype=computing)
    assert result.out.dtype == computing
    assert result.lse.dtype == computing
    np.testing.assert_array_equal(result.out, wide.out)
    g = naive.attention_backward(q, q, k, v, dtype=computing)
    assert [x.dtype for x in g[:3]] == [computing] * 3


# Gradients against central differences in long double


def problem(options):
    lead, heads, rows, keys = (2,), 4, 3, 5
    arrays = {
        "q": random(*lead, heads, rows, 6),
        "k": random(heads // 2, keys, 6),
        "v": random(*lead, heads // 2, keys, 4),
    }
    fixed = {}
    if "bias" in options:
        arrays["bias"] = random(heads, 1, keys)
    if "sink" in options:
        arrays["sink"] = random(heads)
    if "mask" in options:
        fixed["mask"] = Causal()
    if "score" in options:
        fixed["score_mod"] = [Softcap(1.5), Softcap(3.0)]
    if "scale" in options:
        fixed["scale"] = -0.7
    if "dropout" in options:
        fixed |= {"dropout": 0.3, "seed": 5}
    return arrays, fixed


@pytest.mark.parametrize("options", [(), *((x,) for x in ALL_OPTIONS), ALL_OPTIONS])
def test_gradients_are_central_differences(options):
    arrays, fixed = problem(options)
    do = random(2, 4, 3, 4, seed=9)
    dlse = random(2, 4, 3, seed=9) if "dlse" in options else None
    wide = {name: x.astype(np.longdouble) for name, x in arrays.items()}

    def loss(changed):
        result = naive.attention(**changed, **fixed, dtype=np.longdouble)
        value = (result.out * do).sum()
        return value if dlse is None else value + (result.lse * dlse).sum()

    g = naive.attention_backward(do, **arrays, dlse=dlse, **fixed)
    step = np.longdouble(1e-5)
    for name, x in wide.items():
        gradient = getattr(g, "d" + name)
        assert gradient.shape == x.shape
        assert gradient.dtype == np.float64
        for index in np.ndindex(x.shape):
            ends = []
            for sign in (1, -1):
                moved = x.copy()
                moved[index] += sign * step
                ends.append(loss(wide | {name: moved}))
            difference = float((ends[0] - ends[1]) / (2 * step))
            assert gradient[index] == pytest.approx(difference, rel=1e-8, abs=1e-9), (name, index)


# Packed sequences


@pytest.mark.parametrize("options", [(), ALL_OPTIONS])
def test_packed_sequences_are_attention_each(options):
    offsets_q, offsets_k = [0, 3, 3, 7, 8], [0, 5, 6, 6, 10]
    q, k, v = random(4, 8, 6), random(2, 10, 6), random(2, 10, 5)
    do, dlse = random(4, 8, 5, seed=1), random(4, 8, seed=1) if "dlse" in options else None
    bias, sink, dense = random(4, 4, 4, 5), random(4), np.random.default_rng(0).random((4, 5)) < 0.7
    fixed = {}
    if options:
        fixed = {"score_mod": Softcap(2.0), "scale": 0.3, "sink": sink, "bias": bias, "mask": dense}
    packed = naive.attention_varlen(q, k, v, offsets_q, offsets_k, **fixed)
    g = naive.attention_varlen_backward(do, q, k, v, offsets_q, offsets_k, dlse=dlse, **fixed)
    dsink = np.zeros(4)
    for b in range(4):
        rows, keys = slice(*offsets_q[b : b + 2]), slice(*offsets_k[b : b + 2])
        len_q, len_k = rows.stop - rows.start, keys.stop - keys.start
        local = dict(fixed)
        if options:
            local |= {"bias": bias[b, :, :len_q, :len_k], "mask": dense[:len_q, :len_k]}
        parts = q[:, rows], k[:, keys], v[:, keys]
        one = naive.attention(*parts, **local)
        np.testing.assert_array_equal(packed.out[:, rows], one.out)
        np.testing.assert_array_equal(packed.lse[:, rows], one.lse)
        row_dlse = None if dlse is None else dlse[:, rows]
        h = naive.attention_backward(do[:, rows], *parts, dlse=row_dlse, **local)
        np.testing.assert_array_equal(g.dq[:, rows], h.dq)
        np.testing.assert_array_equal(g.dk[:, keys], h.dk)
        np.testing.assert_array_equal(g.dv[:, keys], h.dv)
        if options:
            np.testing.assert_array_equal(g.dbias[b, :, :len_q, :len_k], h.dbias)
            assert not g.dbias[b, :, len_q:].any()
            dsink += h.dsink
    if options:
        np.testing.assert_allclose(g.dsink, dsink, rtol=1e-14)


def test_packed_positions_are_local_and_dropout_counts_sequences():
    offsets = [0, 2, 5]
    recorder = Recorder()
    q, k, v = np.zeros((2, 5, 4)), np.zeros((2, 5, 4)), np.ones((2, 5, 3))
    out, lse, _ = naive.attention_varlen(
        q, k, v, offsets, offsets, score_mod=recorder, dropout=0.5, seed=8
    )
    sizes = recorder.sizes  # of the second sequence
    assert sizes.lead == (2,)
    assert [int(np.squeeze(x)) for x in sizes[2:]] == [3, 3, 2, 2]
    assert [int(x.max()) for x in recorder.positions] == [1, 1, 2, 2]
    for b, rows in enumerate((slice(0, 2), slice(2, 5))):
        n = rows.stop - rows.start
        for h in range(2):
            kept = philox.keep(8, 0.5, b * 2 + h, np.arange(n)[:, None], np.arange(n))
            np.testing.assert_allclose(out[h, rows, 0], kept.sum(axis=1) / n / 0.5, rtol=1e-14)
            expected = np.full(n, 100 * b + 10 * h + math.log(n))
            np.testing.assert_allclose(lse[h, rows], expected, rtol=1e-14)
