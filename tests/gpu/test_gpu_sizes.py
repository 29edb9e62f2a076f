"""CuPy arrays of extreme sizes: large and odd heads, many entries, offsets beyond 31 bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from gpu_calls import precision_of

import cupyflash
from cupyflash import masks, scores
from cupyflash.reference.spec import naive
from cupyflash.testing import backward_bound, forward_bound, rho

pytestmark = pytest.mark.gpu

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
HEAD_SIZES = [(128, 128), (72, 200), (512, 512), (257, 400), (511, 1), (1, 512), (192, 128), (3, 5)]


@pytest.fixture
def cupy(gpu):
    import cupy

    return cupy


@pytest.mark.parametrize("sizes", HEAD_SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_head_sizes_are_within_the_bound(cupy, dtype, sizes):
    rng = np.random.default_rng(sizes)
    shapes = [(4, 70, sizes[0]), (2, 77, sizes[0]), (2, 77, sizes[1]), (4, 70, sizes[1])]
    host = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    options = {"mask": masks.causal(), "score_mod": scores.softcap(5.0)}
    q, k, v, do = (cupy.asarray(x) for x in host)
    out, lse, vjp = cupyflash.attention_vjp(q, k, v, return_lse=True, **options)
    gradients = vjp(do)
    more = {"precision": precision_of(dtype), "block_kv": 8, **options}
    bound = forward_bound(*host[:3], **more)
    assert rho(out.get(), *bound.out).value <= 1
    assert rho(lse.get(), *bound.lse).value <= 1
    bound = backward_bound(host[3], *host[:3], **more)
    for name in ("dq", "dk", "dv"):
        assert rho(getattr(gradients, name).get(), *getattr(bound, name)).value <= 1, name


def test_a_batch_beyond_65535(cupy):
    rng = np.random.default_rng(0)
    q, k, v = (cupy.asarray(rng.standard_normal((70_000, 1, 3, 4), np.float32)) for _ in range(3))
    out, vjp = cupyflash.attention_vjp(q, k, v)
    last = [x[-3:].get() for x in (q, k, v)]
    np.testing.assert_allclose(out[-3:].get(), naive.attention(*last).out, rtol=0, atol=2e-5)
    do = cupy.ones_like(out)
    wanted = naive.attention_backward(do[-3:].get(), *last)
    for ours, theirs in zip(vjp(do)[:3], wanted[:3], strict=True):
        np.testing.assert_allclose(ours[-3:].get(), theirs, rtol=0, atol=2e-5)


def test_offsets_beyond_31_bits(cupy):
    rows = 2**31 // 128 + 1000
    free = cupy.cuda.runtime.memGetInfo()[0]
    if free < 4.5 * rows * 128 * 2 * 2:
        pytest.skip("needs 40 GB of memory")
    q = cupy.ones((1, 64, 128), np.float16)
    k = cupy.zeros((1, rows, 128), np.float16)
    v = cupy.zeros((1, rows, 128), np.float16)
    k[0, -1], v[0, -1] = 60, 3  # the last key takes everything
    out, lse = cupyflash.attention(q, k, v, return_lse=True, scale=1.0)
    assert (out == 3).all()
    assert (lse == 60 * 128).all()
    gradients = cupyflash.attention_backward(cupy.ones_like(out), q, k, v, out, lse, scale=1.0)
    assert (gradients.dv[0, -1] == 64).all()
    assert not gradients.dv[0, :-1].any()


def test_strides_beyond_31_bits(cupy):
    # Rows, heads and entries that lie gigabytes apart in an array of one byte's type.
    step = 2**30 + 8  # elements
    free = cupy.cuda.runtime.memGetInfo()[0]
    if free < 8 * step * 2:
        pytest.skip("needs 18 GB of memory")
    rng = np.random.default_rng(0)
    host = [rng.standard_normal((2, 2, 2, 8)).astype(np.float16) for _ in range(3)]
    memory = cupy.empty(7 * step + 64, np.float16)
    held = []
    for n, x in enumerate(host):
        strides = tuple(2 * each for each in (4 * step, 2 * step, step, 1))
        view = cupy.ndarray(x.shape, x.dtype, memory.data + 32 * n, strides)
        view[...] = cupy.asarray(x)
        held.append(view)
    out, vjp = cupyflash.attention_vjp(*held, mask=masks.causal())
    wanted = naive.attention(*host, mask=masks.causal()).out
    np.testing.assert_allclose(out.get().astype(float), wanted, rtol=0, atol=2e-3)
    do = cupy.ones_like(out)
    wanted = naive.attention_backward(do.get(), *host, mask=masks.causal())
    for ours, theirs in zip(vjp(do)[:3], wanted[:3], strict=True):
        np.testing.assert_allclose(ours.get().astype(float), theirs, rtol=0, atol=5e-3)
