"""Run a drawn problem on the emulator, and check what its kernels read and wrote."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from harness import backward_ratios, call_of, forward_ratios
from placement import Layout, Placed, random_layout
from strategies import Problem

from cupyflash import launch
from cupyflash.problem import Array, Gradients

from .calls import Blocks, Emulator
from .machine import randomly


def emulator_of(problem: Problem) -> Emulator:
    """Return tiles near the problem's own, and threads and a schedule that its seed chooses."""
    rng = np.random.default_rng([problem.seed, 3])
    most = max(problem.q.shape[-1], problem.v.shape[-1])
    tiles = [16 if n <= 16 and most <= 256 else 32 for n in problem.tiles or (32, 32)]
    return Emulator(Blocks(*tiles, int(rng.choice([32, 64, 128]))), randomly(problem.seed))


def _target(problem: Problem, rng: np.random.Generator, shape: Any, dtype: Any) -> Placed:
    layout = Layout()
    if problem.layouts == "random":
        layout = random_layout(rng, len(shape), np.dtype(dtype).itemsize)
    return Placed(shape, dtype, layout)


def _full(array: Array | None, matrix: bool) -> Array | None:
    return array[None] if matrix and array is not None else array


def run_forward(problem: Problem, emulator: Emulator) -> tuple[Array, Array]:
    """Compute out and lse into poisoned memory, and check that nothing else changed."""
    rng = np.random.default_rng([problem.seed, 1])
    call = call_of(problem)
    out = _target(problem, rng, problem.do.shape, problem.dtype)
    lse = _target(problem, rng, problem.do.shape[:-1], problem.accumulator)
    emulator.forward(call, *(_full(x.view, call.matrices) for x in (out, lse)))
    for placed in (out, lse, *problem.placed):
        placed.check()
    return out.view, lse.view


def run_backward(problem: Problem, emulator: Emulator, out: Array, lse: Array) -> Gradients:
    """Compute every gradient into poisoned memory, and check that nothing else changed."""
    rng = np.random.default_rng([problem.seed, 2])
    call = call_of(problem)
    owners = [problem.q, problem.k, problem.v]
    owners += [problem.options.get("bias"), problem.options.get("sink")]
    made = [None if x is None else _target(problem, rng, x.shape, x.dtype) for x in owners]
    views = [None if x is None else x.view for x in made]
    scratch = Placed((launch.workspace_size(call),), np.uint8) if problem.workspace else None
    rows = [_full(x, call.matrices) for x in (problem.do, out, lse, problem.dlse)]
    matrices = (*call.were_matrices, False, False)
    targets = (_full(x, matrix) for x, matrix in zip(views, matrices, strict=True))
    workspace = None if scratch is None else scratch.view
    emulator.backward(call, *rows, Gradients(*targets), workspace)
    for placed in (*made, scratch, *problem.placed):
        if placed is not None:
            placed.check()
    return Gradients(*views)


def ratios(problem: Problem, emulator: Emulator) -> dict[str, float]:
    """Compute everything; return rho of every output.

    Gradients are left out where out is not finite: the backward reads what float16 made of it.
    """
    blocks = emulator.blocks
    bounded = dataclasses.replace(problem, tiles=(blocks.block_q, blocks.block_kv))
    out, lse = run_forward(problem, emulator)
    found = forward_ratios(bounded, out, lse)
    if np.isfinite(out).all():
        found |= backward_ratios(bounded, run_backward(problem, emulator, out, lse))
    return found
