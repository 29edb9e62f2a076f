"""Dropout drops the pairs that Philox says, in every kernel and for every tile size."""

import numpy as np
import pytest
from harness import assert_near, attend, attend_backward
from hypothesis import given
from hypothesis import strategies as st
from placement import same_bits
from strategies import DTYPES, plain
from test_philox import STORED_MASKS

from cupyflash import masks
from cupyflash.reference.cpu import philox

TILES = st.tuples(*[st.sampled_from([1, 3, 5, 8, 16, 64])] * 2)
SEEDS = st.integers(0, 2**64 - 1)


def kept_by_forward(batch, heads, len_q, len_k, tiles, **options):
    """With equal scores and one-hot values, the output shows which pairs were kept."""
    q, k = np.zeros((batch, heads, len_q, 1)), np.zeros((1, 1, len_k, 1))
    out, _, _ = attend(q, k, np.eye(len_k)[None, None], tiles, **options)
    return out


@given(TILES, SEEDS, st.sampled_from([0.05, 0.5, 0.9]), st.integers(1, 20), st.integers(1, 30))
def test_forward_and_backward_drop_what_philox_says(tiles, seed, p, len_q, len_k):
    options = {"dropout": p, "seed": seed}
    b, h, i, j = np.ogrid[:2, :3, :len_q, :len_k]
    kept = philox.keep(seed, p, b * 3 + h, i, j)
    weight = 1 / philox.keep_probability(p)
    out = kept_by_forward(2, 3, len_q, len_k, tiles, **options)
    assert np.array_equal(out != 0, kept)
    np.testing.assert_allclose(out, kept * weight / len_k, rtol=1e-14)
    # One-hot do: dv[b, h, j, i] is the weight of the pair (i, j).
    q, k = np.zeros((2, 3, len_q, 1)), np.zeros((2, 3, len_k, 1))
    v, do = np.zeros((2, 3, len_k, len_q)), np.broadcast_to(np.eye(len_q), (2, 3, len_q, len_q))
    dv = attend_backward(do, q, k, v, tiles, **options).dv
    assert np.array_equal(dv.swapaxes(-1, -2) != 0, kept)
    # dP passes through the same weights: with q the unit, dq is the sum of P (Z dP - delta) k.
    bias = np.zeros((2, 3, len_q, len_k))
    ones = np.ones((2, 3, len_k, 1))
    ours = attend_backward(np.ones((2, 3, len_q, 1)), q, k, ones, tiles, bias=bias, **options)
    z = kept * weight
    expected = (z - z.mean(axis=-1, keepdims=True)) / len_k
    np.testing.assert_allclose(ours.dbias, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("tiles", [(16, 16), (7, 5), (128, 128)])
@pytest.mark.parametrize("stored", [STORED_MASKS[0], STORED_MASKS[1], STORED_MASKS[3]])
def test_stored_masks(tiles, stored):
    seed, p, head, i, j, rows = stored
    q, k = np.zeros((head + 1, i + 4, 1), np.float32), np.zeros((1, j + 24, 1), np.float32)
    v = np.eye(j + 24, dtype=np.float32)[None, :, j:]
    out, _, _ = attend(q, k, v, tiles, dropout=p, seed=seed)
    ours = out[head, i:] != 0
    assert ["".join("1" if x else "0" for x in row) for row in ours] == rows


@given(plain(), TILES, SEEDS)
def test_other_options_do_not_move_it(p, tiles, seed):
    """The mask, its tiles and the values do not matter: only seed, b, h, i and j."""
    len_q, len_k = p.q.shape[2], p.k.shape[2]
    b, h, i, j = np.ogrid[:2, : p.q.shape[1], :len_q, :len_k]
    kept = philox.keep(seed, 0.4, b * p.q.shape[1] + h, i, j)
    allowed = p.rng.random((len_q, len_k)) < 0.7
    v = np.broadcast_to(np.eye(len_k, dtype=p.dtype), (2, p.k.shape[1], len_k, len_k))
    options = {"dropout": 0.4, "seed": np.array(seed, np.uint64)}
    q = p.q / p.dtype.type(4)  # every weight well above 0
    out, _, _ = attend(q, p.k, v, tiles, mask=allowed, **options)
    assert np.array_equal(out != 0, kept & allowed)
    strided = np.swapaxes(np.ascontiguousarray(np.swapaxes(q, 1, 2)), 1, 2)
    again, _, _ = attend(strided, p.k, v, tiles, mask=masks.dense(allowed), **options)
    assert same_bits(out, again)


def test_the_mean_over_seeds_is_the_row_without_dropout():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 8, 4)) for _ in "qkv")
    whole = attend(q, k, v).out
    number, p = 800, 0.3
    drawn = np.stack([attend(q, k, v, dropout=p, seed=seed).out for seed in range(number)])
    # Var = sum_j (P_ij v_jc)^2 p / (1 - p); six standard errors.
    probs = np.exp(q @ k.swapaxes(-1, -2) / 2)
    probs /= probs.sum(axis=-1, keepdims=True)
    sigma = np.sqrt((probs**2 @ v**2) * p / (1 - p) / number)
    assert (np.abs(drawn.mean(axis=0) - whole) < 6 * sigma).all()
    assert len({x.tobytes() for x in drawn}) == number


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_dropout_at_all_below_the_last_bit(dtype):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 20, 8)).astype(dtype) for _ in "qkv")
    plain_call, tiny = attend(q, k, v), attend(q, k, v, dropout=2.0**-40, seed=0)
    assert same_bits(plain_call.out, tiny.out)
    almost_all = attend(q, k, v, dropout=1 - 2.0**-15, seed=0)
    assert not almost_all.out.any()
    assert_near(almost_all.lse, plain_call.lse, 0)
