"""CuPy arrays on Hopper: calls that `forward_sm90` or `backward_sm90_dkdv` serves.

They go through the package's own launches.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from gpu_calls import precision_of

import cupyflash
from cupyflash import masks, scores
from cupyflash.gpu.kernels import registry
from cupyflash.testing import backward_bound, forward_bound, forward_bound_varlen, rho

pytestmark = pytest.mark.gpu

EACH_TYPE = pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16], ids=lambda dtype: np.dtype(dtype).name
)
# Heads, queries, keys, D, Dv: tiles that are not whole, and heads that boxes fill with zeros.
SIZES = [(1, 512, 512, 64, 64), (1, 513, 700, 128, 128), (2, 700, 513, 256, 256),
         (2, 640, 1000, 72, 64), (1, 1100, 515, 192, 128), (4, 530, 530, 40, 64),
         (1, 530, 700, 512, 512), (2, 515, 300, 384, 264), (2, 300, 515, 72, 504)]  # fmt: skip


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


# What leaves pairs, tiles, rows and all out; by ranges of keys and by other shapes.
MASKS = {
    "causal": masks.causal(),
    "first queries see none": masks.causal(offset=-300),
    "window": masks.window(200, 10),
    "documents": masks.mask(lambda b, h, i, j: i // 170 == j // 170),
    "no range": masks.mask(lambda b, h, i, j: (i + j) % 3 > 0),
    "no key": masks.mask(lambda b, h, i, j: j < 0),
}


@EACH_TYPE
@pytest.mark.parametrize("d", [64, 128, 192, 256, 512])
@pytest.mark.parametrize("name", MASKS)
def test_masks(cupy, dtype, d, name):
    q, k, v = draw(cupy, dtype, (2, 1000, d), (1, 1000, d), (1, 1000, d))
    options = {"mask": MASKS[name]}
    assert cupyflash.plan(q, k, v, **options).kernel == "forward_sm90"
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    within_the_bound(dtype, q, k, v, out, lse, **options)


@EACH_TYPE
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_a_value_reaches_only_the_rows_that_see_it(cupy, dtype, value, d):
    q, k, v = draw(cupy, dtype, *[(8, 1500, d)] * 3)
    plain = cupyflash.attention(q, k, v, mask=masks.causal())
    v[:, 700, 3] = value
    for _ in range(10):
        other = cupyflash.attention(q, k, v, mask=masks.causal())
        same = other.view(np.uint16) == plain.view(np.uint16)
        seen = other[:, 700:, 3].astype(np.float32)
        assert (cupy.isnan(seen) if np.isnan(value) else seen == value).all()
        same[:, 700:, 3] = True
        assert same.all()


SLOPES = np.linspace(0.01, 0.5, 4, dtype=np.float32)
CHANGES = {
    "softcap": {"score_mod": scores.softcap(2.0)},
    "alibi": {"score_mod": scores.alibi(SLOPES), "mask": masks.causal()},
    "dropout": {"dropout": 0.2, "seed": 2**63 + 5, "mask": masks.causal(), "scale": -0.3},
    "bias": {"bias": np.linspace(-3, 3, 1000, dtype=np.float32)},
}


@EACH_TYPE
@pytest.mark.parametrize("d", [64, 128, 256, 512])
@pytest.mark.parametrize("name", CHANGES)
def test_changed_scores(cupy, dtype, d, name):
    q, k, v = draw(cupy, dtype, (4, 700, d), (2, 1000, d), (2, 1000, d))
    options = CHANGES[name]
    given = {n: cupy.asarray(x) if n == "bias" else x for n, x in options.items()}
    if name == "alibi":
        given["score_mod"] = scores.alibi(cupy.asarray(SLOPES))
    assert cupyflash.plan(q, k, v, **given).kernel == "forward_sm90"
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **given)
    within_the_bound(dtype, q, k, v, out, lse, **options)


@EACH_TYPE
@pytest.mark.parametrize("d", [64, 128, 256, 512])
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["plain", "causal"])
def test_packed_sequences(cupy, dtype, d, mask):
    ends = np.array([0, 1, 1, 500, 530, 1700, 2000])
    q, k, v = draw(cupy, dtype, (4, 2000, d), (2, 2000, d), (2, 2000, d))
    options = {} if mask is None else {"mask": mask}
    assert cupyflash.plan(q, k, v, offsets_q=ends, offsets_k=ends, **options).kernel == (
        "forward_sm90"
    )
    out, lse = cupyflash.attention_varlen(q, k, v, ends, ends, return_lse=True, **options)
    host = [x.get() for x in (q, k, v)]
    more = {"precision": precision_of(dtype), "block_kv": 8, **options}
    bound = forward_bound_varlen(*host, ends, ends, **more)
    assert rho(out.get(), *bound.out).value <= 1
    assert rho(lse.get(), *bound.lse).value <= 1
    # What neighbours hold changes no bit.
    own = slice(530, 1700)
    for x in (q, k, v):
        x[:, :530], x[:, 1700:] = np.nan, np.inf
    other, other_lse = cupyflash.attention_varlen(q, k, v, ends, ends, return_lse=True, **options)
    assert (other[:, own].view(np.uint16) == out[:, own].view(np.uint16)).all()
    assert (other_lse[:, own] == lse[:, own]).all()


@EACH_TYPE
@pytest.mark.parametrize("d", [64, 128, 256, 512])
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["plain", "causal"])
def test_a_head_has_the_same_bits_in_any_company(cupy, dtype, d, mask):
    # A block goes on from head to head; one head alone has a block for each of its jobs.
    options = {} if mask is None else {"mask": mask}
    q, k, v = draw(cupy, dtype, *[(300, 515, d)] * 3)
    v[7, 300, 5] = np.inf
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    for n in (0, 6, 7, 8, 299):
        one, one_lse = cupyflash.attention(
            q[n : n + 1], k[n : n + 1], v[n : n + 1], return_lse=True, **options
        )
        assert (one[0].view(np.uint16) == out[n].view(np.uint16)).all()
        assert (one_lse[0] == lse[n]).all()
    within_the_bound(dtype, q[:3], k[:3], v[:3], out[:3], lse[:3], **options)


@EACH_TYPE
def test_a_graph(cupy, dtype):
    options = {"mask": masks.causal(), "return_lse": True}
    with cupy.cuda.Stream(non_blocking=True) as stream:
        q, k, v = draw(cupy, dtype, *[(200, 600, 64)] * 3)
        out, lse = cupyflash.attention(q, k, v, **options)
        stream.begin_capture()
        cupyflash.attention(q, k, v, out=out, lse_out=lse, **options)
        graph = stream.end_capture()
        q[...], k[...], v[...] = draw(cupy, dtype, *[(200, 600, 64)] * 3, seed=1)
        for _ in range(3):
            out.fill(np.nan)
            graph.launch(stream)
            wanted, wanted_lse = cupyflash.attention(q, k, v, **options)
            assert (out.view(np.uint16) == wanted.view(np.uint16)).all()
            assert (lse == wanted_lse).all()


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
    select = registry.select

    def noted(part, request):
        choice = select(part, request)
        if part == "dkdv":
            chosen.append(choice.spec.name)
        return choice

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "select", noted)
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        made = cupyflash.attention_backward(
            do, q, k, v, out, lse, deterministic=deterministic, **options
        )
    assert not chosen or "backward_sm90_dkdv" in chosen
    return made[:3]


@EACH_TYPE
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sizes", GRADIENT_SIZES, ids=str)
def test_its_gradients_are_within_the_bound(cupy, dtype, sizes, options):
    d, d_v = sizes
    given = OPTIONS[options]
    shapes = (4, 640, d), (2, 700, d), (2, 700, d_v), (4, 640, d_v)
    q, k, v, do = draw(cupy, dtype, *shapes)
    there = {n: cupy.asarray(x) if n == "bias" else x for n, x in given.items()}
    made = gradients(cupy, q, k, v, do, **there)
    host = [x.get() for x in (do, q, k, v)]
    bound = backward_bound(*host, precision=precision_of(dtype), block_kv=8, **given)
    for found, wanted in zip(made, bound[:3], strict=True):
        assert rho(found.get(), *wanted).value <= 1


# A bias of every pair, and broadcast along other axes.
BIAS_SHAPES = [(2, 2, 640, 700), (2, 640, 700), (2, 1, 1, 700), (640, 1)]


@EACH_TYPE
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (40, 72), (256, 256)], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["every pair", "causal"])
def test_the_gradient_of_a_bias_is_within_the_bound(cupy, dtype, sizes, masked):
    d, d_v = sizes
    shapes = (2, 2, 640, d), (2, 1, 700, d), (2, 1, 700, d_v), (2, 2, 640, d_v)
    q, k, v, do = draw(cupy, dtype, *shapes)
    options = {"mask": masks.causal()} if masked else {}
    for shape in BIAS_SHAPES:
        (bias,) = draw(cupy, dtype, shape, seed=2)
        out, lse = cupyflash.attention(q, k, v, return_lse=True, bias=bias, **options)
        dbias = cupyflash.attention_backward(do, q, k, v, out, lse, bias=bias, **options).dbias
        host = [x.get() for x in (do, q, k, v)]
        bound = backward_bound(
            *host, precision=precision_of(dtype), block_kv=8, bias=bias.get(), **options
        )
        assert rho(dbias.get(), *bound.dbias).value <= 1
        again = cupyflash.attention_backward(do, q, k, v, out, lse, bias=bias, **options).dbias
        assert (again.view(np.uint16) == dbias.view(np.uint16)).all()


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
