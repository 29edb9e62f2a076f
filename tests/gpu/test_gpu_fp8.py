"""CuPy arrays of codes of float8: within the bound, recognised, and which bits Hopper keeps."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from coded_arrays import FORMATS, Coded, draw

import cupyflash
from cupyflash import masks, scores
from cupyflash.testing import Precision, forward_bound, forward_bound_varlen, rho
from cupyflash.testing.precision import CODE_UNIT

pytestmark = pytest.mark.gpu

# Heads, queries, keys, D, Dv.
SIZES = [(1, 512, 512, 64, 64), (1, 513, 700, 128, 128), (2, 700, 513, 256, 256),
         (2, 640, 1000, 80, 64), (1, 1100, 515, 192, 128), (2, 530, 530, 32, 208),
         (1, 1100, 515, 128, 128)]  # fmt: skip
OPTIONS = {
    "full": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.window(100, 20)},
    "softcap": {"score_mod": scores.softcap(3.0)},
}


@pytest.fixture
def cupy(gpu):
    import cupy

    return cupy


@pytest.fixture
def hopper(cupy):
    held = on_device(cupy, Coded.of(FORMATS[0], *draw(*[(1, 512, 64)] * 3)))
    chosen = cupyflash.plan(*held.arrays, **held.options)
    if chosen.kernel != "forward_sm90_fp8":
        pytest.skip(f"a GPU that has no kernel for codes, or what it needs is missing: {chosen}")
    return cupy


def on_device(cupy, held):
    moved = (tuple(map(cupy.asarray, x)) for x in (held.arrays, held.scales))
    return Coded(held.form, *moved)


def attend(held, *offsets, **options):
    function = cupyflash.attention_varlen if offsets else cupyflash.attention
    return function(*held.arrays, *offsets, return_lse=True, **held.options, **options)


def within_the_bound(held, results, precision, offsets=None, **options):
    options |= {"precision": precision, "block_kv": 8}
    if offsets is None:
        bound = forward_bound(*held.numbers, **options)
    else:
        bound = forward_bound_varlen(*held.numbers, *offsets, **options)
    assert not bound.ill_conditioned
    for ours, bounded in zip(results, (bound.out, bound.lse), strict=True):
        assert rho(ours.get(), *bounded).value <= 1


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("by", ["head", "row"])
def test_codes_are_within_the_bound_of_their_products(hopper, sizes, form, by):
    heads, len_q, len_k, d, d_v = sizes
    q, k, v = draw((2 * heads, len_q, d), (heads, len_k, d), (heads, len_k, d_v))
    host = Coded.of(form, q, k, v, by=by)
    held = on_device(hopper, host)
    assert cupyflash.plan(*held.arrays, **held.options).kernel == "forward_sm90_fp8"
    for n, options in enumerate(OPTIONS.values()):
        out_dtype = ("bfloat16", "float16", "float32")[n % 3]
        results = attend(held, scale=0.03, out_dtype=out_dtype, **options)
        assert results[0].dtype.name == out_dtype
        precision = Precision.of_codes(out_dtype, "codes")
        within_the_bound(host, results, precision, scale=0.03, **options)


@pytest.mark.parametrize("by", ["head", "row"])
def test_packed_sequences(hopper, by):
    offsets = np.array([0, 700, 700, 1300]), np.array([0, 1000, 1300, 1800])
    host = Coded.of(FORMATS[0], *draw((4, 1300, 128), (2, 1800, 128), (2, 1800, 128)), by=by)
    on_gpu = tuple(map(hopper.asarray, offsets))
    results = attend(on_device(hopper, host), *on_gpu, mask=masks.causal(), scale=0.05)
    precision = Precision.of_codes("bfloat16", "codes")
    within_the_bound(host, results, precision, offsets, mask=masks.causal(), scale=0.05)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16", "float32"])
def test_few_codes_become_numbers_first(cupy, form, out_dtype):
    # Of these numbers, no row is ill-conditioned.
    host = Coded.of(form, *draw((2, 4, 100, 40), (2, 2, 130, 40), (2, 2, 130, 72), seed=13))
    held = on_device(cupy, host)
    assert "turns codes" in cupyflash.plan(*held.arrays, **held.options, out_dtype=out_dtype).reason
    results = attend(held, out_dtype=out_dtype, mask=masks.causal())
    precision = Precision.of_codes(out_dtype, "out_dtype")
    within_the_bound(host, results, precision, mask=masks.causal())


def test_no_bit_depends_on_the_batch_or_on_repetition(hopper):
    host = Coded.of(FORMATS[0], *draw(*[(5, 3, 1100, 128)] * 3))
    held = on_device(hopper, host)
    out, lse = attend(held, mask=masks.causal())
    for _ in range(20):
        again = attend(held, mask=masks.causal())
        assert (out.view(np.uint16) == again[0].view(np.uint16)).all()
    one = on_device(
        hopper,
        Coded(host.form, *(tuple(x[2:3] for x in y) for y in (host.arrays, host.scales))),
    )
    alone, alone_lse = attend(one, mask=masks.causal())
    assert (out[2:3].view(np.uint16) == alone.view(np.uint16)).all()
    assert (lse[2:3].view(np.uint32) == alone_lse.view(np.uint32)).all()


def test_scales_that_a_query_does_not_see_change_no_bit(hopper):
    host = Coded.of(FORMATS[0], *draw(*[(2, 1100, 128)] * 3))
    scales = [x.copy() for x in host.scales]
    for x in scales[1:]:
        x[:, 1050:] *= 1e6
    first, other = (
        attend(on_device(hopper, x), mask=masks.causal())[0].view(np.uint16)
        for x in (host, Coded(host.form, host.arrays, tuple(scales)))
    )
    assert (first[:, :1050] == other[:, :1050]).all()
    assert (first[:, 1050:] != other[:, 1050:]).any()


def test_a_graph_is_launched_again(hopper):
    first, second = (
        on_device(hopper, Coded.of(FORMATS[0], *draw(*[(2, 600, 64)] * 3, seed=n)))
        for n in range(2)
    )
    out = hopper.empty((2, 600, 64), ml_dtypes.bfloat16)
    attend(first, out=out)
    stream = hopper.cuda.Stream(non_blocking=True)
    hopper.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        attend(first, out=out)
        graph = stream.end_capture()
    for to, source in zip(
        (*first.arrays, *first.scales), (*second.arrays, *second.scales), strict=True
    ):
        to[...] = source
    hopper.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    expected, _ = attend(second)
    assert (out.view(np.uint16) == expected.view(np.uint16)).all()


def kept(cupy, bits, column):
    """Return the share of 2^(16 - bits) that is left of it beside 2^16, in a sum of codes.

    All keys are equal, so the LSE is a score and the logarithm of their number.
    """
    exponent = 16 - bits
    low = max(-6, min(8, exponent // 2))
    q = np.zeros((512, 128), ml_dtypes.float8_e4m3fn)
    k = q.copy()
    q[:, 0] = k[:, 0] = 256
    q[:, column], k[:, column] = 2.0**low, 2.0 ** (exponent - low)
    one = np.ones((1, 1), np.float32)
    held = Coded(FORMATS[0], (q.view(np.uint8), k.view(np.uint8), k.view(np.uint8)), (one,) * 3)
    _, lse = attend(on_device(cupy, held), scale=1.0)
    return (float(lse[0]) - 2.0**16 - np.log(512)) / 2.0**exponent


@pytest.mark.parametrize("column", [1, 40, 127], ids=["one step", "the next", "the last"])
def test_sums_of_codes_keep_as_many_bits_as_the_bound_assumes(hopper, column):
    assumed = round(-np.log2(CODE_UNIT))
    for bits in range(4, assumed + 1):
        assert kept(hopper, bits, column) == pytest.approx(1, abs=0.05), bits
