"""quantize and hadamard on the emulator: the bits of the CPU, in poisoned memory, in any order."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from codes import DTYPES, LARGEST, PER, any_numbers
from emulator import build
from emulator.calls import Emulator
from emulator.machine import randomly
from emulator.problems import HostMemory
from gpu_arrays import Copies
from hadamards import transformed
from halves import mostly_thorough
from placement import PLAIN, Placed, bits, random_layout, same_bits

import cupyflash
from cupyflash.arrays.dtypes import accumulator
from cupyflash.gpu import params, rowwise
from cupyflash.gpu.kernels.rowwise import TRANSFORMED, hadamard_tiles
from cupyflash.problem.hadamard import LARGEST as LARGEST_SIZE
from cupyflash.problem.hadamard import transform
from cupyflash.problem.quantize import quantisation
from cupyflash.rowwise import HADAMARD, QUANTIZE

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
F32 = np.float32
# Rows of whole vectors, of parts of them, and of more than 32 lanes have at once.
SHAPES = [(3, 5, 64), (2, 3, 2, 4), (7,), (37, 2), (2, 96), (3, 300), (1, 2, 1, 3, 64), (2, 1288)]


def quantized_there(x, form, group, rng, per="row"):
    """Return what the emulator makes of an array in poisoned memory, in some memory order."""
    checked = quantisation(x, form, group, per)
    placed = []
    for shape, dtype in ((checked.shape_of_codes, np.uint8), (checked.shape_of_scale, F32)):
        layout = random_layout(rng, len(shape), np.dtype(dtype).itemsize)
        layout = layout._replace(shift=layout.shift // np.dtype(dtype).itemsize * 4)
        placed.append(Placed(shape, dtype, PLAIN if rng.random() < 0.5 else layout))
    copies = Copies(HostMemory())
    there = quantisation(copies.array(x), form, group, per)
    codes, scale = (copies.array(each.view, True) for each in placed)
    emulator = Emulator(schedule=randomly(int(rng.integers(2**32))))
    emulator.rowwise(QUANTIZE, there, codes=codes, scale=scale)
    copies.check()
    return [copies.value(each.view) for each in placed]


def aligned(rng, shape, dtype, values):
    """Place numbers so that their elements lie at multiples of their size."""
    layout = PLAIN
    if rng.random() < 0.6:
        layout = random_layout(rng, len(shape), dtype.itemsize, True)
        layout = layout._replace(shift=layout.shift // dtype.itemsize * dtype.itemsize)
    return Placed(shape, dtype, layout, values).view


@mostly_thorough(
    "dtype", DTYPES, quick=DTYPES[1:3], why="every number of float16 is quick", ids=str
)
def test_codes_are_those_of_the_cpu(dtype):
    for seed in range(36):
        rng = np.random.default_rng(seed)
        form, shape = sorted(LARGEST)[seed % 4], SHAPES[int(rng.integers(len(SHAPES)))]
        group = shape[-1] if form == "int4" and (shape[-1] % 32 or seed % 3) else None
        if form == "int4" and shape[-1] % 2:
            continue
        x = aligned(rng, shape, dtype, any_numbers(rng, shape, dtype))
        wanted = cupyflash.quantize(x, form, group=group)
        codes, scale = quantized_there(x, form, group, rng)
        assert np.array_equal(bits(codes), bits(wanted[0])), (seed, form, shape)
        assert same_bits(scale, wanted[1]), (seed, form, shape)


@pytest.mark.parametrize("per", PER[1:])
@mostly_thorough(
    "dtype", DTYPES, quick=DTYPES[1:3], why="every number of float16 is quick", ids=str
)
def test_rows_share_a_scale(dtype, per):
    for seed in range(30):
        rng = np.random.default_rng(seed)
        form, shape = sorted(LARGEST)[seed % 4], (*SHAPES[:4], (2, 3, 40, 8), (0, 4))[seed % 6]
        if form == "int4" and shape[-1] % 2:
            continue
        x = aligned(rng, shape, dtype, any_numbers(rng, shape, dtype))
        wanted = cupyflash.quantize(x, form, per=per)
        codes, scale = quantized_there(x, form, None, rng, per)
        assert np.array_equal(bits(codes), bits(wanted[0])), (seed, form, shape)
        assert same_bits(scale, wanted[1]), (seed, form, shape)


@pytest.mark.parametrize("form", LARGEST)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_number_of_16_bits(form, dtype):
    """Subnormal numbers of bfloat16 are those of float32, which a GPU flushes to zero."""
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    for x in (every.reshape(-1, 64), every.reshape(64, -1).T):
        wanted = cupyflash.quantize(x, form)
        checked = quantisation(x, form, None)
        codes = np.empty(checked.shape_of_codes, np.uint8)
        scale = np.empty(checked.shape_of_scale, F32)
        Emulator().rowwise(QUANTIZE, checked, codes=codes, scale=scale)
        assert np.array_equal(codes, wanted[0].view(np.uint8))
        assert same_bits(scale, wanted[1])


@pytest.mark.parametrize("form", LARGEST)
def test_where_numbers_of_float32_are_subnormal(form):
    rng = np.random.default_rng(3)
    exponents = rng.integers(-150, -50, (400, 1)).astype(F32)
    x = (rng.standard_normal((400, 32)).astype(F32) * 2.0**exponents).astype(F32)
    x[:, 5] = 0
    x[-1] = 0
    for rows in (1, 50):
        x = x.reshape(-1, rows, 32)
        per = "row" if rows == 1 else "head"
        wanted = cupyflash.quantize(x, form, per=per)
        codes, scale = quantized_there(x, form, None, rng, per)
        assert np.array_equal(codes, wanted[0].view(np.uint8))
        assert same_bits(scale, wanted[1])


@pytest.mark.parametrize("columns", [1, 8, 9, 16, 17, 64, 128, 256, 257, 2000])
def test_lanes_cover_a_group(columns):
    x = np.zeros((3, columns), F32)
    checked = quantisation(x, "int8", None)
    codes, scale = np.empty(x.shape, np.uint8), np.empty((3, 1), F32)
    (launch,) = rowwise.quantize(checked, {"x": x, "codes": codes, "scale": scale}).launches
    lanes = np.frombuffer(launch.template, params.rowwise("quantize").dtype)["lanes"][0]
    assert lanes in (1, 2, 4, 8, 16, 32)
    assert lanes == 32 or lanes * 8 >= columns
    assert lanes == 1 or lanes * 4 < columns


QUICK = [(np.dtype(F32), 64), (np.dtype(ml_dtypes.bfloat16), 96), (np.dtype(np.float64), 20)]
SIZES = [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64, 72, 80, 96, 128, 256, 288, 512]
SIZES += [576, 1024, 2048, 2304, 4096]


@mostly_thorough(
    ("dtype", "columns"),
    [(dtype, n) for n in SIZES for dtype in DTYPES],
    quick=QUICK,
    why="more sizes and types; three are quick",
)
def test_rows_are_spread_within_the_bound(dtype, columns):
    for seed in range(6):
        rng = np.random.default_rng(seed)
        shape = (*[(3, 5), (2, 1, 3, 2), (), (70,), (1,), (2, 9)][seed], columns)
        x = aligned(rng, shape, dtype, rng.standard_normal(shape))
        layout = random_layout(rng, len(shape), dtype.itemsize)
        layout = layout._replace(shift=layout.shift // dtype.itemsize * dtype.itemsize)
        out = Placed(shape, dtype, PLAIN if seed % 2 else layout).view
        number, inverse = int(rng.integers(2**63)) * 2 + seed % 2, bool(seed % 3 == 1)
        copies = Copies(HostMemory())
        target = copies.array(out, True)
        checked = transform(copies.array(x), number, inverse, None)
        Emulator(schedule=randomly(seed)).rowwise(HADAMARD, checked, out=target)
        copies.check()
        transformed(x, number, inverse).check(copies.value(out))
        # Sums have the CPU's order, so normal numbers have the CPU's bits.
        assert same_bits(copies.value(out), cupyflash.hadamard(x, number, inverse=inverse))


def test_the_largest_size_is_the_kernels():
    assert LARGEST_SIZE == TRANSFORMED
    for dtype in DTYPES:
        number = accumulator(dtype).itemsize
        tiles = [hadamard_tiles(n, number) for n in SIZES]
        assert all(each.shared_memory <= 48 << 10 for each in tiles)
        assert all(
            each.block_q * n >= TRANSFORMED // 2 for each, n in zip(tiles, SIZES, strict=True)
        )


def test_empty_arrays_launch_nothing():
    x = np.zeros((3, 0, 64), F32)
    checked = quantisation(x, "int8", None)
    codes, scale = np.empty(x.shape, np.int8), np.empty((3, 0, 1), F32)
    arrays = {"x": x, "codes": codes, "scale": scale}
    assert rowwise.quantize(checked, arrays).launches == ()
    arrays = {"x": x, "out": x.copy(), "seed": 0}
    assert rowwise.hadamard(transform(x, 0, False, None), arrays).launches == ()
    # Rows without columns have scales.
    x = np.zeros((3, 0), F32)
    codes, scale = quantized_there(x, "int8", None, np.random.default_rng(0))
    assert same_bits(scale, cupyflash.quantize(x, "int8")[1])
