"""Second derivatives of CuPy arrays: bounds, bits, graphs of CUDA, memory, and tensors."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from gpu_arrays import Copies
from gpu_calls import run_forward
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from placement import same_bits
from strategies import DTYPES, problems
from tangents import bound_second, cotangents_of, directions_of, ratios_of_second

import cupyflash
from cupyflash import ArgumentError, masks, scores

pytestmark = pytest.mark.gpu


@pytest.fixture
def cupy(gpu):
    import cupy

    return cupy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_second_derivatives_are_within_the_bound(gpu, dtype, data):
    problem = data.draw(problems(dtype, packed=False))
    out, lse = run_forward(problem, gpu)
    assume(np.isfinite(out).all())
    directions, (tdo, tdlse) = directions_of(problem), cotangents_of(problem)
    copies = Copies(gpu)

    def on_gpu(x):
        return None if x is None else copies.array(x)

    arrays = map(on_gpu, (problem.do, problem.q, problem.k, problem.v, out, lse, *directions[:3]))
    more = dict(zip(("tbias", "tsink"), directions[3:], strict=True))
    more |= {"tdo": tdo, "tdlse": tdlse, "dlse": problem.dlse}
    more = {name: on_gpu(x) for name, x in more.items()}
    made = cupyflash.attention_backward_jvp(*arrays, **copies.options(problem.options), **more)
    copies.check()
    found = {**made.gradients._asdict(), "tout": made.tout, "tlse": made.tlse}
    found = {name: None if x is None else x.get() for name, x in found.items()}
    # The bound grows a little with the number of key tiles; no kernel has smaller ones.
    bounded = dataclasses.replace(problem, tiles=(8, 8))
    bound = bound_second(bounded, directions, (tdo, tdlse), problem.dtype.itemsize == 2)
    ratios = ratios_of_second(bound, found)
    assert max(ratios.values()) <= 1, ratios


def drawn(cupy, dtype=np.float32, shape=(2, 4, 300, 64)):
    rng = np.random.default_rng(1)
    q, k, v, do, tq, tk, tv = (cupy.asarray(rng.standard_normal(shape), dtype) for _ in range(7))
    how = {"mask": masks.causal(), "score_mod": scores.softcap(3.0), "dropout": 0.1, "seed": 3}
    return (do, q, k, v, *cupyflash.attention(q, k, v, return_lse=True, **how), tq, tk, tv), how


def every(made):
    return [x for x in (*made.gradients, made.tout, made.tlse) if x is not None]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda x: x.__name__)
def test_every_run_has_the_same_bits(cupy, dtype, deterministic):
    arrays, how = drawn(cupy, dtype)

    def run(arrays):
        made = cupyflash.attention_backward_jvp(*arrays, **how, deterministic=deterministic)
        any_order = dtype == np.float32 and not deterministic
        return every(made)[1 if any_order else 0 :]

    expected = run(arrays)
    for _ in range(3):  # recognised
        for ours, right in zip(run(arrays), expected, strict=True):
            assert same_bits(ours.get(), right.get())
    # Entries are computed alone.
    for ours, right in zip(run([x[:1] for x in arrays]), expected, strict=True):
        assert same_bits(ours.get(), right[:1].get())


def test_packed_sequences_are_each_alone(cupy):
    rng = np.random.default_rng(2)
    ends = [0, 70, 70, 300]
    do, q, k, v, tq, tk, tv = (cupy.asarray(rng.standard_normal((4, 300, 40))) for _ in range(7))
    how = {"mask": masks.causal(), "score_mod": scores.softcap(3.0)}
    out, lse = cupyflash.attention_varlen(q, k, v, ends, ends, return_lse=True, **how)
    of = do, q, k, v, out, lse
    made = cupyflash.attention_varlen_backward_jvp(*of, cupy.asarray(ends), ends, tq, tk, tv, **how)
    for begin, end in ((0, 70), (70, 300)):
        rows = [x[:, begin:end] for x in (*of, tq, tk, tv)]
        one = cupyflash.attention_backward_jvp(*rows, **how)
        for ours, right in zip(every(made), every(one), strict=True):
            assert same_bits(ours[:, begin:end].get(), right.get())


def test_a_graph_needs_a_workspace(cupy):
    arrays, how = drawn(cupy)
    size = cupyflash.workspace_size(*arrays[1:4], second=True, **how)
    how["deterministic"] = True
    expected = every(cupyflash.attention_backward_jvp(*arrays, **how))
    workspace = cupy.empty(size, np.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cupyflash.attention_backward_jvp(*arrays, workspace=workspace, **how)
        stream.begin_capture()
        with pytest.raises(ArgumentError, match="workspace: got None while a CUDA graph"):
            cupyflash.attention_backward_jvp(*arrays, **how)
        made = every(cupyflash.attention_backward_jvp(*arrays, workspace=workspace, **how))
        graph = stream.end_capture()
        for x in made:
            x.fill(np.nan)
        graph.launch()
    stream.synchronize()
    for ours, right in zip(made, expected, strict=True):
        assert same_bits(ours.get(), right.get())


def test_memory_grows_with_the_length(cupy):
    sizes = []
    for length in (1000, 2000, 4000):
        q = cupy.zeros((1, 2, length, 64), np.float16)
        sizes.append(cupyflash.workspace_size(q, q, q, second=True))
    assert sizes[2] - sizes[1] <= 2 * (sizes[1] - sizes[0]) + 4096


def test_tensors_are_differentiated_twice(cupy):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from cupyflash.torch import attention

    generator = torch.Generator("cuda").manual_seed(0)
    how = {"device": "cuda", "dtype": torch.float64, "generator": generator}
    operands = [torch.randn(1, 2, 5, 3, requires_grad=True, **how) for _ in range(3)]

    def function(q, k, v):
        return attention(q, k, v, mask=masks.causal(), score_mod=scores.softcap(2.0))

    assert torch.autograd.gradgradcheck(function, operands)
