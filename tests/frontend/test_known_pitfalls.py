"""What is right here, and was seen to be wrong in some other library."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, attention, attention_vjp, masks


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_sums_of_gradients_in_16_bits_go_on(dtype):
    """A sum in 16 bits stops at 256 or 2048, and one of blocks in bfloat16 at 65536."""
    queries = 80_000
    do = np.full((queries, 1), 0.5, dtype)
    q, k, v = np.zeros((queries, 1), dtype), np.zeros((1, 1), dtype), np.ones((1, 1), dtype)
    _, vjp = attention_vjp(q, k, v)
    assert float(vjp(do).dv[0, 0]) == np.float32(40_000).astype(dtype)
    keys = np.zeros((20_000, 1), dtype)
    assert float(attention(q[:1], keys, np.ones_like(keys))[0, 0]) == 1


def test_no_keys_at_all():
    """Before calls with keys, and after them, which are recognised."""
    q, k = np.ones((1, 2, 1, 2), np.float32), np.ones((1, 2, 9, 2), np.float32)
    for keys in (0, 9, 9, 9, 0, 9):
        out = attention(q, k[:, :, :keys], k[:, :, :keys])
        assert np.array_equal(out, np.full_like(q, keys > 0))


def test_nan_in_hidden_slots_reaches_no_gradient():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 12, 8), np.float32)
    gradients = []
    for hidden in (0.0, np.nan, np.inf):
        k[:, 9:], v[:, 9:] = hidden, hidden
        out, vjp = attention_vjp(q, k, v, mask=masks.lengths(9) & masks.causal())
        gradients.append([out, *vjp(np.ones_like(out))[:3]])
        assert (gradients[-1][2][:, 9:] == 0).all()
        assert (gradients[-1][3][:, 9:] == 0).all()
    for a, b, c in zip(*gradients, strict=True):
        assert np.array_equal(a, b)
        assert np.array_equal(a, c)


def test_left_padding_in_float64():
    """Masks of the least float32 overflow when they are added twice, or mean nothing in float64."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 1, 10, 8))
    start = cupyflash.lookup(np.array([0, 4]))
    left = masks.mask(lambda b, h, i, j: j >= start[b]) & masks.causal()
    out = attention(q, k, v, mask=left)
    assert np.isfinite(out).all()
    assert (out[1, :, :4] == 0).all()
    alone = attention(q[1, :, 4:], k[1, :, 4:], v[1, :, 4:], mask=masks.causal())
    np.testing.assert_allclose(out[1, :, 4:], alone, rtol=1e-14, atol=1e-15)


def test_int4_of_ml_dtypes_is_packed_first():
    """It has a byte for each code; -(-8), which is 8 inside of it, is packed as -8."""
    codes = np.arange(-8, 8).astype(np.int8)
    rows = np.tile(codes, (1, 1, 3, 4)).astype(ml_dtypes.int4)  # (1, 1, 3, 64)
    q, scale = np.ones((1, 1, 1, 64), np.float32), np.full((1, 1, 3, 1), 0.01, np.float32)
    options = {"k_scale": scale, "v_scale": scale}
    with pytest.raises(
        ArgumentError, match=r"k: got int4 of ml_dtypes, .* byte for each"
    ) as caught:
        cupyflash.attention_cached(q, rows, rows, 3, **options)
    remedy = str(caught.value).partition("pack these: ")[2].partition(", with")[0]
    packed = eval(remedy, {"k": rows, "np": np})
    out = cupyflash.attention_cached(q, packed, packed, 3, kv_dtype="int4", **options)
    np.testing.assert_allclose(out[0, 0, 0], 0.01 * np.tile(codes, 4), rtol=1e-6)
    turned = eval(remedy, {"k": -rows, "np": np})
    assert np.array_equal(turned[..., 0] & 15, np.full((1, 1, 3), 8))
