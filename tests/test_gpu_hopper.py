"""CuPy arrays on Hopper: calls that `forward_sm90` or `backward_sm90_dkdv` serves.

They go through the package's own launches.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from gpu_calls import precision_of

import cupyflash
from cupyflash import config, masks, recipe, scores
from cupyflash.testing import backward_bound, forward_bound, rho

pytestmark = pytest.mark.gpu

EACH_TYPE = pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16], ids=lambda dtype: np.dtype(dtype).name
)
# Heads, queries, keys, D, Dv: tiles that are not whole, and heads that boxes fill with zeros.
SIZES = [(1, 512, 512, 64, 64), (1, 513, 700, 128, 128), (2, 700, 513, 256, 256),
         (2, 640, 1000, 72, 64), (1, 1100, 515, 192, 128), (4, 530, 530, 40, 64)]  # fmt: skip


@pytest.fixture
def cupy(gpu):
    import cupy

    q = cupy.zeros((1, 512, 64), np.float16)
    chosen = cupyflash.plan(q, q, q)
    if chosen.kernel != "forward_sm90":
        pytest.skip(f"a GPU that forward_sm90 is not for, or what it needs is missing: {chosen}")
    return cupy


def draw(cupy, dtype, *shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [cupy.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


def within_the_bound(dtype, q, k, v, out, lse, **options):
    host = [x.get() for x in (q, k, v)]
    more = {"precision": precision_of(dtype), "block_kv": 8, **options}
    bound = forward_bound(*host, **more)
    assert rho(out.get(), *bound.out).value <= 1
    assert rho(lse.get(), *bound.lse).value <= 1


@EACH_TYPE
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_its_results_are_within_the_bound(cupy, dtype, sizes):
    heads, len_q, len_k, d, d_v = sizes
    shapes = (2 * heads, len_q, d), (heads, len_k, d), (heads, len_k, d_v)
    q, k, v = draw(cupy, dtype, *shapes)
    assert cupyflash.plan(q, k, v).kernel == "forward_sm90"
    sink = cupy.asarray(np.linspace(-1, 1, 2 * heads, dtype=np.float32))
    for options in ({}, {"sink": sink}):
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        held = {name: x.get() for name, x in options.items()}
        within_the_bound(dtype, q, k, v, out, lse, **held)


@EACH_TYPE
def test_arrays_lie_as_they_like_among_others(cupy, dtype):
    # Rows of several heads take turns, entries are broadcast, and what lies between is NaN.
    def among(shape):
        *lead, heads, length, d = shape
        whole = cupy.full((*lead, length + 40, heads + 1, 2 * d), np.nan, dtype)
        between = cupy.ones(whole.shape, bool)
        place = (..., slice(8, 8 + length), slice(heads), slice(8, 8 + d))
        between[place] = False
        part = whole[place].swapaxes(-2, -3)
        part[...] = draw(cupy, dtype, shape)[0]
        return part, whole, between

    (q, *_), (k, *_), (v, *_) = map(among, ((3, 2, 600, 64), (1, 1, 530, 64), (1, 1, 530, 64)))
    out, whole, between = among((3, 2, 600, 64))
    assert cupyflash.plan(q, k, v).kernel == "forward_sm90"
    made, lse = cupyflash.attention(q, k, v, out=out, return_lse=True)
    assert made is out
    within_the_bound(dtype, q, k, v, out, lse)
    assert cupy.isnan(whole[between].astype(np.float32)).all()


@EACH_TYPE
def test_bits_are_those_of_the_first_run(cupy, dtype):
    q, k, v = draw(cupy, dtype, *[(8, 2000, 128)] * 3)
    first = cupyflash.attention(q, k, v).view(np.uint16)
    for _ in range(50):
        assert (cupyflash.attention(q, k, v).view(np.uint16) == first).all()


# -- the backward ---------------------------------------------------------------------------------

BIAS = np.random.default_rng(5).standard_normal((640, 700)).astype(np.float32)
# Options, and whether pairs are masked.
OPTIONS = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.window(100, 3)},
    "scores": {"score_mod": scores.softcap(3.0), "bias": BIAS},
    "dropout": {"dropout": 0.2, "seed": 3, "mask": masks.causal()},
}
GRADIENT_SIZES = [(64, 64), (128, 128), (96, 72), (64, 128), (40, 40), (256, 256), (192, 128)]


def gradients(cupy, q, k, v, do, deterministic=False, **options):
    """Return dq, dk and dv, which backward_sm90_dkdv has to compute."""
    chosen = []
    backward = config.backward

    def noted(*arguments):
        chosen.append(backward(*arguments))
        return chosen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe.config, "backward", noted)
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        made = cupyflash.attention_backward(
            do, q, k, v, out, lse, deterministic=deterministic, **options
        )
    assert not chosen or "backward_sm90_dkdv" in [kernel for kernel, _ in chosen]
    return made[:3]


@EACH_TYPE
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sizes", GRADIENT_SIZES, ids=str)
def test_its_gradients_are_within_the_bound(cupy, dtype, sizes, options):
    d, d_v = sizes
    given = OPTIONS[options]
    shapes = (4, 640, d), (2, 700, d), (2, 700, d_v), (4, 640, d_v)
    q, k, v, do = draw(cupy, dtype, *shapes)
    made = gradients(cupy, q, k, v, do, **given)
    host = [x.get() for x in (do, q, k, v)]
    bound = backward_bound(*host, precision=precision_of(dtype), block_kv=8, **given)
    for found, wanted in zip(made, bound[:3], strict=True):
        assert rho(found.get(), *wanted).value <= 1


@EACH_TYPE
@pytest.mark.parametrize("d", [64, 128, 256])
def test_gradients_of_packed_sequences_are_within_the_bound(cupy, dtype, d):
    # What follows a sequence is the next one's; the last one is not finite.
    offsets = [0, 600, 600, 700, 1300]
    mask = masks.causal()
    q, k, v, do = draw(cupy, dtype, (2, 1300, d), *[(1, 1300, d)] * 2, (2, 1300, d))
    for array in (q, k, v, do):
        array[:, 700:] = np.nan
    rows = q, k, v, offsets, offsets
    out, lse = cupyflash.attention_varlen(*rows, return_lse=True, mask=mask)
    made = cupyflash.attention_varlen_backward(do, q, k, v, out, lse, *rows[3:], mask=mask)
    for first, end in ((0, 600), (600, 700)):
        host = [x[:, first:end].get() for x in (do, q, k, v)]
        bound = backward_bound(*host, precision=precision_of(dtype), block_kv=8, mask=mask)
        for found, wanted in zip(made[:3], bound[:3], strict=True):
            assert rho(found[:, first:end].get(), *wanted).value <= 1


@EACH_TYPE
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["full", "causal"])
def test_gradients_have_the_bits_of_the_first_run(cupy, dtype, mask):
    q, k, v, do = draw(cupy, dtype, *[(8, 2000, 128)] * 4)
    first = gradients(cupy, q, k, v, do, True, mask=mask)
    for _ in range(20):
        made = gradients(cupy, q, k, v, do, True, mask=mask)
        for x, y in zip(made, first, strict=True):
            assert (x.view(np.uint16) == y.view(np.uint16)).all()
        _, dk, dv = gradients(cupy, q, k, v, do, mask=mask)
        assert (dk.view(np.uint16) == first[1].view(np.uint16)).all()
        assert (dv.view(np.uint16) == first[2].view(np.uint16)).all()


@EACH_TYPE
def test_masked_queries_and_keys_change_no_bit_of_gradients(cupy, dtype):
    q, k, v, do = draw(cupy, dtype, *[(2, 600, 128)] * 4)
    mask = masks.mask(lambda b, h, i, j: (j <= i) & (i != 50) & (j != 3))
    results = []
    for bad in (0, np.nan, np.inf):
        q[:, 50], do[:, 50], k[:, 3], v[:, 3] = bad, bad, bad, bad
        results.append(gradients(cupy, q, k, v, do, True, mask=mask))
    for first, *others in zip(*results, strict=True):
        assert all((x.view(np.uint16) == first.view(np.uint16)).all() for x in others)
