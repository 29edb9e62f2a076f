"""Run a drawn problem on a GPU, as users would."""

from __future__ import annotations

from typing import Any

import numpy as np
from gpu_arrays import Copies
from placement import Layout, Placed, random_layout
from strategies import Problem

import cupyflash
from cupyflash.commands import verify
from cupyflash.problem.call import Gradients
from cupyflash.testing import Directions

Array = np.ndarray[Any, Any]
precision_of = verify.precision_of("gpu")


def tensor_cores(dtype: Any) -> bool:
    """Whether the forward in this dtype may run on tensor cores here."""
    return precision_of(dtype).truncates


def _target(problem: Problem, rng: np.random.Generator, shape: Any, dtype: Any) -> Array:
    layout = Layout()
    if problem.layouts == "random":
        layout = random_layout(rng, len(shape), np.dtype(dtype).itemsize)
    return Placed(shape, dtype, layout).view


def run_forward(problem: Problem, memory: Any, **more: Any) -> tuple[Array, Array]:
    """Compute out and lse into poisoned memory, and check that nothing else changed."""
    rng = np.random.default_rng([problem.seed, 1])
    copies = Copies(memory)
    out = _target(problem, rng, problem.do.shape, problem.dtype)
    lse = _target(problem, rng, problem.do.shape[:-1], problem.accumulator)
    arrays = [copies.array(x) for x in (problem.q, problem.k, problem.v)]
    options = copies.options(problem.options) | more
    options |= {"out": copies.array(out, True), "lse_out": copies.array(lse, True)}
    if problem.offsets is None:
        cupyflash.attention(*arrays, **options)
    else:
        cupyflash.attention_varlen(*arrays, *problem.offsets, **options)
    copies.check()
    return copies.value(out), copies.value(lse)


def run_jvp(problem: Problem, memory: Any, directions: Directions) -> list[Array]:
    """Compute results and tangents into poisoned memory, and check that nothing else changed."""
    rng = np.random.default_rng([problem.seed, 4])
    copies = Copies(memory)
    rows, types = problem.do.shape[:-1], (problem.dtype, problem.accumulator)
    made = [_target(problem, rng, problem.do.shape, types[0]) for _ in range(2)]
    made += [_target(problem, rng, rows, types[1]) for _ in range(2)]
    arrays = [copies.array(x) for x in (problem.q, problem.k, problem.v)]
    tq, tk, tv, tbias, tsink = map(copies.array, directions)
    names = "out", "tout_out", "lse_out", "tlse_out"
    options = copies.options(problem.options) | {"tbias": tbias, "tsink": tsink}
    options |= dict(zip(names, (copies.array(x, True) for x in made), strict=True))
    if problem.offsets is None:
        cupyflash.attention_jvp(*arrays, tq, tk, tv, return_lse=True, **options)
    else:
        more = *problem.offsets, tq, tk, tv
        cupyflash.attention_varlen_jvp(*arrays, *more, return_lse=True, **options)
    copies.check()
    return [copies.value(x) for x in made]


def run_backward(problem: Problem, memory: Any, out: Array, lse: Array, **more: Any) -> Gradients:
    """Compute every gradient into poisoned memory, and check that nothing else changed."""
    rng = np.random.default_rng([problem.seed, 2])
    copies = Copies(memory)
    owners = [problem.q, problem.k, problem.v]
    owners += [problem.options.get("bias"), problem.options.get("sink")]
    made = [None if x is None else _target(problem, rng, x.shape, x.dtype) for x in owners]
    arrays = [copies.array(x) for x in (problem.do, problem.q, problem.k, problem.v, out, lse)]
    options = copies.options(problem.options) | more | {"dlse": copies.array(problem.dlse)}
    options["grads_out"] = Gradients(*(copies.array(x, True) for x in made))
    if problem.workspace:
        offsets = dict(zip(("offsets_q", "offsets_k"), problem.offsets or (), strict=False))
        size = cupyflash.workspace_size(*arrays[1:4], **offsets, **copies.options(problem.options))
        options["workspace"] = copies.array(Placed((size,), np.uint8).view, True)
    if problem.offsets is None:
        cupyflash.attention_backward(*arrays, **options)
    else:
        cupyflash.attention_varlen_backward(*arrays, *problem.offsets, **options)
    copies.check()
    return Gradients(*(None if x is None else copies.value(x) for x in made))
