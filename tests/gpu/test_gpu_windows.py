"""Gradients of windows of few rows with a bias, as those of Swin, on a GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from gpu_calls import precision_of

import cupyflash
from cupyflash.testing import backward_bound, rho

pytestmark = pytest.mark.gpu
EACH_TYPE = pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16], ids=lambda dtype: np.dtype(dtype).name
)
IMAGES, WINDOWS, HEADS, ROWS, COLUMNS = 6, 4, 3, 49, 32
NAMES = "dq", "dk", "dv", "dbias"


@pytest.fixture
def cupy(gpu):
    import cupy

    return cupy


def windows(cupy, dtype, images=IMAGES):
    """Return q, k, v and do (B, W, H, N, D), which lie as a linear map wrote them."""
    rng = np.random.default_rng(0)
    shape = images, WINDOWS, ROWS, HEADS, COLUMNS
    made = (rng.standard_normal(shape).astype(dtype) for _ in range(4))
    return [cupy.asarray(x).swapaxes(-3, -2) for x in made]


def bias_of(cupy, dtype, lead, hidden=-np.inf):
    """Return a bias of such leading axes; in the last windows it hides pairs of two parts."""
    rng = np.random.default_rng(1)
    bias = rng.standard_normal((*lead, ROWS, ROWS), np.float32)
    part = np.arange(ROWS) % 7 < 3
    if len(lead) > 1:
        bias[WINDOWS // 2 :, :, part[:, None] != part] = hidden
    return cupy.asarray(bias.astype(dtype))


def gradients(q, k, v, do, bias):
    out, lse = cupyflash.attention(q, k, v, bias=bias, return_lse=True)
    return cupyflash.attention_backward(do, q, k, v, out, lse, bias=bias)


def bits(made):
    return [getattr(made, name).get().view(np.uint16) for name in NAMES]


@EACH_TYPE
@pytest.mark.parametrize(
    ("lead", "hidden"),
    [
        ((HEADS,), 0),
        ((1,), 0),
        ((WINDOWS, HEADS), -np.inf),
        ((WINDOWS, 1), -np.inf),
        ((WINDOWS, HEADS), -100.0),
    ],
    ids=str,
)
def test_gradients_are_within_the_bound(cupy, dtype, lead, hidden):
    q, k, v, do = windows(cupy, dtype)
    bias = bias_of(cupy, dtype, lead, hidden)
    made = gradients(q, k, v, do, bias)
    precision = precision_of(dtype)
    host = [x.get() for x in (do, q, k, v)]
    bound = backward_bound(*host, precision=precision, block_kv=8, bias=bias.get())
    for name in NAMES:
        assert rho(getattr(made, name).get(), *getattr(bound, name)).value <= 1, name
    for _ in range(10):
        again = gradients(q, k, v, do, bias)
        assert all((x == y).all() for x, y in zip(bits(again), bits(made), strict=True))


@EACH_TYPE
def test_a_window_has_the_bits_that_it_has_alone(cupy, dtype):
    q, k, v, do = windows(cupy, dtype)
    bias = bias_of(cupy, dtype, (WINDOWS, HEADS))
    made = gradients(q, k, v, do, bias)
    for w in (0, WINDOWS - 1):
        own = [x[:, w : w + 1] for x in (q, k, v, do)]
        alone = gradients(*own, bias[w : w + 1])
        *rows, dbias = bits(alone)
        *all_rows, all_dbias = bits(made)
        for x, y in zip(rows, all_rows, strict=True):
            assert (x == y[:, w : w + 1]).all()
        assert (dbias == all_dbias[w : w + 1]).all()
    one = gradients(*(x[2:3] for x in (q, k, v, do)), bias)
    for x, y in zip(bits(one)[:3], bits(made)[:3], strict=True):
        assert (x == y[2:3]).all()


@EACH_TYPE
def test_hidden_pairs_hide_what_is_not_finite(cupy, dtype):
    q, k, v, do = windows(cupy, dtype)
    bias = bias_of(cupy, dtype, (WINDOWS, HEADS))
    clean = gradients(q, k, v, do, bias)
    w, part = WINDOWS - 1, np.arange(ROWS) % 7 < 3
    k[1, w, 0, 0, 3], v[2, w, 1, 0, 2], q[3, w, 2, 0, 1], do[4, w, 0, 0, 0] = (
        np.nan, np.inf, -np.inf, np.nan,
    )  # fmt: skip
    made = gradients(q, k, v, do, bias)
    for name in NAMES[:3]:
        x, y = (getattr(z, name).get()[:, w][:, :, ~part] for z in (made, clean))
        assert (x.view(np.uint16) == y.view(np.uint16)).all(), name
    x, y = (z.dbias.get()[w][:, ~part] for z in (made, clean))
    assert (x.view(np.uint16) == y.view(np.uint16)).all()
