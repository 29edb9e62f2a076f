"""quantize and hadamard on CuPy arrays: codes have the CPU's bits, rows are within the bound."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from codes import DTYPES, LARGEST, PER, any_numbers
from gpu_arrays import Copies
from hadamards import SIZES, transformed
from halves import mostly_thorough
from placement import PLAIN, Placed, bits, random_layout, same_bits

import cupyflash
from cupyflash import ArgumentTypeError

pytestmark = pytest.mark.gpu
F32 = np.float32


@pytest.fixture
def cupy(gpu):
    import cupy

    return cupy


def placed(rng, shape, dtype, values):
    layout = random_layout(rng, len(shape), dtype.itemsize, True)
    layout = layout._replace(shift=layout.shift // dtype.itemsize * dtype.itemsize)
    return Placed(shape, dtype, layout if rng.random() < 0.6 else PLAIN, values).view


def assert_codes(gpu, x, form, group=None, per="row"):
    copies = Copies(gpu)
    codes, scale = cupyflash.quantize(copies.array(x), form, group=group, per=per)
    copies.check()
    wanted, wanted_scale = cupyflash.quantize(x, form, group=group, per=per)
    assert codes.dtype == (np.int8 if form == "int8" else np.uint8)
    assert np.array_equal(bits(gpu.result(codes)), bits(wanted))
    assert same_bits(gpu.result(scale), wanted_scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", LARGEST)
def test_codes_are_those_of_the_cpu(gpu, dtype, form):
    for seed in range(60):
        rng = np.random.default_rng(seed)
        shape = [(3, 5, 64), (2, 3, 2, 32), (700, 128), (5, 576), (2, 4096)][seed % 5]
        group = [None, shape[-1]][seed % 2]
        assert_codes(gpu, placed(rng, shape, dtype, any_numbers(rng, shape, dtype)), form, group)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", LARGEST)
@pytest.mark.parametrize("per", PER[1:])
def test_rows_share_a_scale(gpu, dtype, form, per):
    for seed in range(30):
        rng = np.random.default_rng(seed)
        shape = [(3, 5, 64), (2, 3, 2, 32), (4, 700, 128), (5, 576), (0, 4)][seed % 5]
        assert_codes(gpu, placed(rng, shape, dtype, any_numbers(rng, shape, dtype)), form, per=per)


def test_a_graph_of_shared_scales(cupy):
    """Scales of an earlier replay, which were larger, are forgotten."""
    x = cupy.ones((3, 200, 64), np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cupyflash.quantize(x, "int8", per="head")
        stream.begin_capture()
        codes, scale = cupyflash.quantize(x, "int8", per="head")
        graph = stream.end_capture()
        for size in (100, 1):
            values = np.random.default_rng(0).standard_normal(x.shape).astype(F32) * size
            x.set(values, stream)
            graph.launch(stream)
            stream.synchronize()
            wanted = cupyflash.quantize(values, "int8", per="head")
            assert np.array_equal(codes.get(), wanted[0])
            assert same_bits(scale.get(), wanted[1])


@pytest.mark.parametrize("form", LARGEST)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_number_of_16_bits(gpu, form, dtype):
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    for x in (every.reshape(-1, 64), every.reshape(64, -1).T):
        assert_codes(gpu, x, form)


@pytest.mark.parametrize("form", LARGEST)
def test_where_numbers_of_float32_are_subnormal(gpu, form):
    rng = np.random.default_rng(3)
    exponents = rng.integers(-150, -50, (4000, 1)).astype(F32)
    x = (rng.standard_normal((4000, 32)).astype(F32) * 2.0**exponents).astype(F32)
    x[-1] = 0
    assert_codes(gpu, x, form)


@mostly_thorough(
    ("dtype", "columns"),
    [(dtype, n) for n in [*SIZES, 1024, 2304, 4096] for dtype in DTYPES],
    quick=[(dtype, n) for n in (64, 128, 576) for dtype in DTYPES],
    why="more sizes; three of each type are quick",
)
def test_rows_are_spread_within_the_bound(gpu, dtype, columns):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        many = 700 if columns <= 640 else 20  # what is wanted takes the square of the columns
        shape = (*[(3, 5), (2, 1, 3, 2), (), (many,)][seed], columns)
        x = placed(rng, shape, dtype, rng.standard_normal(shape))
        copies = Copies(gpu)
        for inverse in (False, True):
            out = cupyflash.hadamard(copies.array(x), 2**63 + seed, inverse=inverse)
            transformed(x, 2**63 + seed, inverse).check(gpu.result(out))
        copies.check()


def test_a_recognised_call_has_its_own_seed(cupy, gpu):
    x = cupy.asarray(np.random.default_rng(0).standard_normal((5, 64)).astype(F32))
    out = cupy.empty_like(x)
    for seed in range(4):
        for inverse in (False, True):
            assert cupyflash.hadamard(x, seed, inverse=inverse, out=out) is out
            wanted = transformed(x.get(), seed, inverse)
            wanted.check(out.get())
            wanted.check(cupyflash.hadamard(x, seed, inverse=inverse).get())


def test_a_graph_transforms_what_arrays_hold_then(cupy, gpu):
    x = cupy.asarray(np.zeros((5, 64), F32))
    out = cupy.empty_like(x)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cupyflash.hadamard(x, 3, out=out)
        stream.begin_capture()
        cupyflash.hadamard(x, 3, out=out)
        graph = stream.end_capture()
        values = np.random.default_rng(0).standard_normal((5, 64)).astype(F32)
        x.set(values, stream)
        graph.launch(stream)
        stream.synchronize()
    transformed(values, 3, False).check(out.get())


def test_a_seed_is_a_number(cupy):
    with pytest.raises(ArgumentTypeError, match="seed: got ndarray; expected an integer"):
        cupyflash.hadamard(cupy.ones((2, 4), F32), cupy.asarray(np.uint64(1)))
