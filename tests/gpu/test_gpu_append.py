"""append and rope on CuPy arrays: what they write, lengths and tables unread, and CUDA graphs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from gpu_arrays import Copies
from placement import PLAIN, Placed, random_layout, same_bits
from rows import DTYPES, Step, appended, draw_rotary, draw_step, rotated

import cupyflash
from cupyflash import ArgumentTypeError, Rotary

pytestmark = pytest.mark.gpu


@pytest.fixture
def cupy(gpu):
    import cupy

    return cupy


def arguments(step: Step, copies: Copies) -> dict[str, Any]:
    """Return the arguments of a step's call in the GPU's poisoned memory."""
    rotary = step.rotary
    if rotary is not None:
        rotary = Rotary(copies.array(rotary.cos), copies.array(rotary.sin), rotary.interleaved)
    names = "k_new", "v_new", "lengths", "table", "offsets", "q", "positions"
    made = {name: copies.array(getattr(step, name)) for name in names}
    made |= {name: copies.array(getattr(step, name), True) for name in ("k", "v")}
    return made | {"rotary": rotary}


def run(step: Step, gpu: Any, **unchecked: Any) -> None:
    """Run a step with other lengths or tables, and hold what it writes to the loops."""
    step = dataclasses.replace(step, **unchecked)
    copies = Copies(gpu)
    out = cupyflash.append(**arguments(step, copies))
    copies.check()
    wanted = appended(step)
    for name in ("k", "v"):
        wanted[name].check(copies.value(getattr(step, name)))
    assert (out is None) == (step.q is None)
    if out is not None:
        wanted["q"].check(gpu.result(out))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_a_step_is_what_loops_write(gpu, dtype, packed, paged):
    for seed in range(20):
        run(draw_step(np.random.default_rng(seed), dtype, paged, packed), gpu)
        columns = (128, 64) if seed % 2 else (576, 512)
        rng = np.random.default_rng(seed)
        run(draw_step(rng, dtype, paged, packed, columns=columns, aligned=True), gpu)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_are_rotated_within_the_bound(gpu, dtype, interleaved):
    for seed in range(8):
        rng = np.random.default_rng(seed)
        shape = [(2, 3, 50, 16), (3, 7, 34), (1, 2, 3, 272), (2, 8, 40, 128)][seed % 4]
        itemsize = np.dtype(dtype).itemsize
        layout = random_layout(rng, len(shape), itemsize)
        layout = layout._replace(shift=layout.shift // itemsize * itemsize)
        x = Placed(shape, dtype, layout if seed % 2 else PLAIN, rng.standard_normal(shape)).view
        rotary = draw_rotary(rng, 40, int(rng.choice([1, shape[-1] // 2])), interleaved, dtype)
        positions = rng.integers(0, 40, (*shape[:-3], shape[-2])).astype(rng.choice(["i4", "i8"]))
        copies = Copies(gpu)
        held = Rotary(copies.array(rotary.cos), copies.array(rotary.sin), interleaved)
        arrays = copies.array(x), copies.array(positions)
        for inverse in (False, True):
            out = cupyflash.rope(*arrays, held, inverse=inverse)
            rotated(x, positions, rotary, inverse).check(gpu.result(out))
        copies.check()


def test_lengths_and_pages_are_not_trusted(gpu):
    wrong = [-1, 2**31 - 1, -(2**63), 2**63 - 1]
    for seed in range(12):
        step = draw_step(np.random.default_rng(seed), np.dtype(np.float32), True, False)
        n, capacity = step.k_new.shape[-2], step.capacity
        table = step.table.astype(np.int64)
        for b, length in enumerate(step.lengths):
            table[b, (length - 1) // step.page_size] = wrong[(seed + b) % 4]
        run(step, gpu, table=table)
        pages = np.arange(step.table.size).reshape(step.table.shape)
        for lengths in ([0, n - 1, capacity + 1], [capacity + n, *wrong[2:]]):
            run(step, gpu, lengths=np.array(lengths[: step.batch]), table=pages)


def test_a_graph_serves_all_later_lengths(cupy, gpu):
    rng = np.random.default_rng(0)
    heads, d, page, steps = 4, 64, 16, 70
    rotary = draw_rotary(rng, 200, d // 2, False)
    angles = Rotary(cupy.asarray(rotary.cos), cupy.asarray(rotary.sin))
    new = rng.standard_normal((3, steps, 2, heads, 1, d)).astype(np.float16)
    table = rng.permutation(10)[:10].reshape(2, 5).astype(np.int32)
    cache = np.full((2, 10, heads, page, d), np.nan, np.float16)
    k, v = cupy.asarray(cache)
    k_new, v_new, q = (cupy.asarray(x[0]) for x in new)
    out, lengths = cupy.empty_like(q), cupy.zeros(2, np.int32)
    keywords = {"table": cupy.asarray(table), "q": q, "rotary": angles, "out": out}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        # The first call compiles; with length 0 it writes nothing.
        cupyflash.append(k_new, v_new, k, v, lengths, **keywords)
        stream.begin_capture()
        cupyflash.append(k_new, v_new, k, v, lengths, **keywords)
        graph = stream.end_capture()
        host = np.array([0, 3], np.int32)
        for n in range(steps):
            host += 1
            lengths.set(host, stream)
            for target, values in zip((k_new, v_new, q), new[:, n], strict=True):
                target.set(values, stream)
            graph.launch(stream)
            turned = cupyflash.append(
                *new[:2, n], *cache, host, table=table, q=new[2, n], rotary=rotary
            )
            stream.synchronize()
            np.testing.assert_allclose(out.get(), turned, rtol=2e-3, atol=2e-3)
    assert same_bits(v.get(), cache[1])
    np.testing.assert_allclose(k.get(), cache[0], rtol=2e-3, atol=2e-3)


def test_arrays_live_in_one_place(cupy):
    k, v = cupy.zeros((2, 1, 1, 8, 4), np.float32)
    new = cupy.ones((1, 1, 1, 4), np.float32)
    with pytest.raises(ArgumentTypeError, match="lengths: got an array in host memory"):
        cupyflash.append(new, new, k, v, np.array([1]))
    cos = cupy.ones((9, 2), np.float32)
    with pytest.raises(ArgumentTypeError, match="positions: got an array in host memory"):
        cupyflash.rope(new, np.array([0]), Rotary(cos, cos))
    with pytest.raises(ArgumentTypeError, match="sin: got an array in the memory of GPU 0"):
        Rotary(cos.get(), cos)
