"""NaN and infinity: where they may not reach, not a bit changes."""

import numpy as np
import pytest
from harness import attend, attend_backward
from hypothesis import given
from hypothesis import strategies as st
from placement import same_bits
from strategies import DTYPES, plain

from cupyflash import attention_varlen_vjp, attention_vjp, combine, masks, scores
from cupyflash.expr import where
from cupyflash.reference.spec import naive

VALUES = st.sampled_from([np.nan, np.inf, -np.inf, 6e4])


def hidden_by(how, allowed, rng):
    """Options that hide the pairs that are not allowed (..., Lq, Lk): by mask, bias or score."""
    bias = np.where(allowed, rng.standard_normal(allowed.shape), -np.inf).astype(np.float32)
    if how == "mask":
        return {"mask": allowed}
    if how == "bias":
        return {"bias": bias}
    if how == "bias over a score":
        return {"bias": bias, "score_mod": scores.softcap(3.0)}
    if how == "mask, bias and dropout":
        return {"mask": allowed, "bias": np.where(allowed, bias, np.nan), "dropout": 0.3, "seed": 1}
    table = masks.dense(allowed)
    return {"score_mod": [scores.softcap(3.0), _hide(table)]}


def _hide(mask):
    return scores.Score(where(mask.expr, scores.SCORE, -np.inf))


HOW = st.sampled_from(["mask", "bias", "bias over a score", "mask, bias and dropout", "score"])


@given(plain(), VALUES, HOW)
def test_keys_that_a_row_may_not_see_change_no_bit_of_it(p, value, how):
    """Pairwise: a poisoned key reaches the rows that see it and no other, forward and backward."""
    heads, keys = p.q.shape[1], p.k.shape[2]
    allowed = p.rng.random((2, heads, p.q.shape[2], keys)) < p.rng.choice([0.2, 0.6])
    bad = p.rng.random(keys) < 0.3
    clean_rows = ~(allowed & bad).any(axis=-1)
    options = hidden_by(how, allowed, p.rng)
    before = attend(p.q, p.k, p.v, p.tiles, **options)
    gradients = attend_backward(p.do, p.q, p.k, p.v, p.tiles, **options)
    which = p.rng.integers(3)
    for n, x in enumerate((p.k, p.v)):
        if which in (n, 2):
            x[:, :, bad] = value
    after = attend(p.q, p.k, p.v, p.tiles, **options)
    changed = attend_backward(p.do, p.q, p.k, p.v, p.tiles, **options)
    assert same_bits(before.out[clean_rows], after.out[clean_rows])
    assert same_bits(before.lse[clean_rows], after.lse[clean_rows])
    assert same_bits(gradients.dq[clean_rows], changed.dq[clean_rows])
    # Keys that are seen by no row that sees a poisoned key, of any query head of theirs.
    seen = (allowed & ~clean_rows[..., None]).any(axis=2)
    unseen = ~seen.reshape(2, p.k.shape[1], -1, keys).any(axis=2)
    for name in ("dk", "dv"):
        a, b = getattr(gradients, name), getattr(changed, name)
        assert same_bits(a[unseen], b[unseen])


@given(plain(), VALUES, HOW)
def test_keys_that_nobody_sees_change_no_bit(p, value, how):
    rows, keys = p.q.shape[2], p.k.shape[2]
    hidden = p.rng.random(keys) < 0.4
    options = hidden_by(how, np.broadcast_to(~hidden, (rows, keys)), p.rng)
    before = attend(p.q, p.k, p.v, p.tiles, **options)
    gradients = attend_backward(p.do, p.q, p.k, p.v, p.tiles, **options)
    for x in (p.k, p.v):
        x[:, :, hidden] = value
    after = attend(p.q, p.k, p.v, p.tiles, **options)
    changed = attend_backward(p.do, p.q, p.k, p.v, p.tiles, **options)
    assert same_bits(before.out, after.out)
    assert same_bits(before.lse, after.lse)
    for name in ("dq", "dk", "dv", "dbias"):
        a, b = getattr(gradients, name), getattr(changed, name)
        assert a is b is None or same_bits(a, b), name


@given(plain(), VALUES)
def test_padding_of_either_side_changes_no_bit(p, value):
    """Padded batches, as users have them: the true lengths are in `masks.lengths`."""
    true_q, true_k = (p.rng.integers(0, n + 1, 2) for n in (p.q.shape[2], p.k.shape[2]))
    mask = masks.lengths(true_k, true_q) & masks.causal(offset=true_k - true_q)
    before = attend(p.q, p.k, p.v, p.tiles, mask=mask)
    gradients = attend_backward(p.do, p.q, p.k, p.v, p.tiles, mask=mask)
    for b in range(2):
        for x, n in ((p.q, true_q[b]), (p.do, true_q[b]), (p.k, true_k[b]), (p.v, true_k[b])):
            x[b, :, n:] = value
    after = attend(p.q, p.k, p.v, p.tiles, mask=mask)
    changed = attend_backward(p.do, p.q, p.k, p.v, p.tiles, mask=mask)
    assert same_bits(before.out, after.out)
    assert same_bits(before.lse, after.lse)
    for a, b in zip(gradients[:3], changed[:3], strict=True):
        assert same_bits(a, b)
    for b in range(2):
        assert not after.out[b, :, true_q[b] :].any()
        assert not changed.dq[b, :, true_q[b] :].any()
        assert not changed.dk[b, :, true_k[b] :].any()
        assert not changed.dv[b, :, true_k[b] :].any()


@given(plain(), st.sampled_from([np.nan, np.inf, -np.inf]), st.booleans())
def test_a_query_poisons_its_row_alone(p, value, masked):
    i = int(p.rng.integers(p.q.shape[2]))
    others = np.arange(p.q.shape[2]) != i
    options = {"mask": masks.window(5, 5)} if masked else {}
    before = attend(p.q, p.k, p.v, p.tiles, **options)
    gradients = attend_backward(p.do, p.q, p.k, p.v, p.tiles, **options)
    p.q[:, :, i] = value
    after = attend(p.q, p.k, p.v, p.tiles, **options)
    changed = attend_backward(p.do, p.q, p.k, p.v, p.tiles, **options)
    assert same_bits(before.out[:, :, others], after.out[:, :, others])
    assert same_bits(before.lse[:, :, others], after.lse[:, :, others])
    assert same_bits(gradients.dq[:, :, others], changed.dq[:, :, others])
    mask = masks.window(5, 5).to_array(1, 1, p.q.shape[2], p.k.shape[2])[0, 0, i]
    seen = mask if masked else np.ones(p.k.shape[2], bool)
    if np.isnan(value) and seen.any():
        assert np.isnan(after.out[:, :, i]).all()
        assert np.isnan(after.lse[:, :, i]).all()
        assert np.isnan(changed.dq[:, :, i]).all()
        assert np.isnan(changed.dk[:, :, seen]).all()
    for name in ("dk", "dv"):  # keys that it does not see
        a, b = getattr(gradients, name), getattr(changed, name)
        assert same_bits(a[:, :, ~seen], b[:, :, ~seen])


@given(plain(), st.sampled_from([np.nan, np.inf]))
def test_do_poisons_its_row_and_the_keys_it_sees(p, value):
    i = int(p.rng.integers(p.q.shape[2]))
    others = np.arange(p.q.shape[2]) != i
    mask = masks.window(4, 4)
    seen = mask.to_array(1, 1, p.q.shape[2], p.k.shape[2])[0, 0, i]
    before = attend_backward(p.do, p.q, p.k, p.v, p.tiles, mask=mask)
    p.do[:, :, i] = value
    after = attend_backward(p.do, p.q, p.k, p.v, p.tiles, mask=mask)
    assert same_bits(before.dq[:, :, others], after.dq[:, :, others])
    for name in ("dk", "dv"):
        a, b = getattr(before, name), getattr(after, name)
        assert same_bits(a[:, :, ~seen], b[:, :, ~seen])
    if seen.any() and np.isnan(value):
        assert np.isnan(after.dq[:, :, i]).all()
        assert np.isnan(after.dv[:, :, seen]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("of", ["q", "k", "v", "bias", "sink"])
def test_what_is_seen_spreads_as_in_the_specification(dtype, value, of):
    """NaN and infinities lie where the formulas put them."""
    if of == "sink" and value == np.inf:
        pytest.skip("the formulas give inf - inf, the kernel their limit: O = 0 and LSE = inf")
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((2, 18, 8)).astype(dtype) for name in "qkv"}
    options = {"bias": rng.standard_normal((18, 18)), "sink": np.zeros(2)}
    held = arrays[of] if of in arrays else options[of]
    held[0 if of == "sink" else (..., 5, slice(None)) if of == "bias" else (0, 5)] = value
    mask = masks.window(3, 4)
    ours = attend(*arrays.values(), (8, 8), mask=mask, **options)
    exact = naive.attention(*arrays.values(), mask=mask, **options)
    assert np.array_equal(np.isnan(ours.out), np.isnan(exact.out))
    assert np.array_equal(np.isnan(ours.lse), np.isnan(exact.lse))
    assert np.array_equal(np.isinf(ours.out), np.isinf(exact.out))
    assert np.array_equal(np.isneginf(ours.lse), np.isneginf(exact.lse))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_of_minus_infinity_hides_even_a_nan_score(dtype):
    x = np.ones((1, 4, 2), dtype)
    k, v = x.copy(), x * np.arange(4, dtype=dtype)[:, None]
    k[:, 2] = np.nan
    bias = np.array([0, 0, -np.inf, 0], dtype)
    for score_mod in (None, scores.softcap(2.0)):
        out, lse, _ = attend(x, k, v, bias=bias, score_mod=score_mod)
        np.testing.assert_allclose(out.astype(float), 4 / 3, rtol=1e-2)
        assert np.isfinite(lse).all()
        ours = attend_backward(x, x, k, v, bias=bias, score_mod=score_mod)
        assert all(np.isfinite(g).all() for g in ours[:2])
        assert ours.dbias[2] == 0
        assert not ours.dk[:, 2].any()
        assert not ours.dv[:, 2].any()


def test_what_the_caller_does_with_overflow_changes_nothing():
    """NumPy's error state is the caller's, for arithmetic of its own."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((2, 2, 40, 8)) / 4).astype(np.float16)
    x[..., 0] *= np.float16(1e-4)  # its gradients vanish
    y = x[:1]  # whose gradients are sums over the batch, and overflow
    do = np.full_like(x, 6e4)
    do[..., 0] = 1e-7
    bias, sink = np.zeros((2, 40, 40), np.float16), np.zeros(2, np.float16)

    def results():
        out, lse, vjp = attention_vjp(x, y, y, bias=bias, sink=sink, return_lse=True)
        packed, of_packed = attention_varlen_vjp(x[0], x[0], x[0], [0, 9, 40], [0, 40, 40])
        joined = combine([(out, lse), (out, lse - 20)])
        return [out, lse, *vjp(do), packed, *of_packed(do[0])[:3], *joined]

    with np.errstate(all="ignore"):
        wanted = results()
    assert any(np.isinf(result).any() for result in wanted)
    with np.errstate(all="raise"):
        assert all(map(same_bits, results(), wanted))
