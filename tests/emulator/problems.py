"""Run a drawn problem on the emulator, and check what its kernels read and wrote."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from harness import backward_ratios, call_of, forward_ratios
from placement import Layout, Placed, random_layout
from strategies import Problem

from cupyflash.expr.functions import SCORE
from cupyflash.gpu.kernels import simt
from cupyflash.problem.call import Array, Call, Gradients, Results
from cupyflash.problem.reduction_form import Form
from cupyflash.problem.tangents import SecondTangents, Tangents, with_heads
from cupyflash.testing import Directions, Precision
from cupyflash.testing import copies as memory
from cupyflash.testing.copies import Copies

from .calls import Blocks, Emulator
from .machine import randomly


def emulator_of(problem: Problem) -> Emulator:
    """Return tiles near the problem's own; its seed chooses the rest."""
    rng = np.random.default_rng([problem.seed, 3])
    most = max(problem.q.shape[-1], problem.v.shape[-1])
    tiles = [16 if n <= 16 and most <= 256 else 32 for n in problem.tiles or (32, 32)]
    blocks = Blocks(*tiles, int(rng.choice([32, 64, 128])), tensor=bool(rng.random() < 0.7))
    return Emulator(blocks, randomly(problem.seed), deterministic=bool(rng.random() < 0.4))


class HostMemory(memory.HostMemory):
    """Memory as a GPU's: elements lie at multiples of their size."""

    any_address = False


def target(rng: np.random.Generator, shape: Any, dtype: Any, random: bool) -> Array:
    """Return an array that says how an output is to lie in memory."""
    layout = random_layout(rng, len(shape), np.dtype(dtype).itemsize) if random else Layout()
    return Placed(shape, dtype, layout).view


def _full(array: Array | None, matrix: bool) -> Array | None:
    return array[None] if matrix and array is not None else array


def _copied(problem: Problem, copies: Copies) -> Call:
    arrays = {name: copies.array(getattr(problem, name)) for name in "qkv"}
    options = copies.options(problem.options)
    return call_of(dataclasses.replace(problem, options=options, **arrays))


def run_forward(problem: Problem, emulator: Emulator) -> tuple[Array, Array]:
    """Compute out and lse into poisoned memory, and check that nothing else changed."""
    rng = np.random.default_rng([problem.seed, 1])
    random = problem.layouts == "random"
    out = target(rng, problem.do.shape, problem.dtype, random)
    lse = target(rng, problem.do.shape[:-1], problem.accumulator, random)
    copies = Copies(HostMemory())
    call = _copied(problem, copies)
    emulator.forward(call, *(_full(copies.array(x, True), call.matrices) for x in (out, lse)))
    copies.check()
    return copies.value(out), copies.value(lse)


def run_backward(problem: Problem, emulator: Emulator, out: Array, lse: Array) -> Gradients:
    """Compute every gradient into poisoned memory, and check that nothing else changed."""
    rng = np.random.default_rng([problem.seed, 2])
    random = problem.layouts == "random"
    copies = Copies(HostMemory())
    call = _copied(problem, copies)
    owners = [problem.q, problem.k, problem.v]
    owners += [problem.options.get("bias"), problem.options.get("sink")]
    made = [None if x is None else target(rng, x.shape, x.dtype, random) for x in owners]
    matrices = (*call.were_matrices, False, False)
    gradients = Gradients(
        *(_full(copies.array(x, True), matrix) for x, matrix in zip(made, matrices, strict=True))
    )
    rows = (problem.do, out, lse, problem.dlse)
    given = [_full(copies.array(x), call.matrices) for x in rows]
    workspace = None
    if problem.workspace:
        workspace = copies.array(Placed((emulator.workspace_size(call),), np.uint8).view, True)
    emulator.backward(call, *given, gradients, workspace)
    copies.check()
    return Gradients(*(None if x is None else copies.value(x) for x in made))


def ratios(problem: Problem, emulator: Emulator) -> dict[str, float]:
    """Compute everything; return rho of every output.

    Gradients are left out where out is not finite: the backward reads what float16 made of it.
    """
    blocks = emulator.blocks
    tensor = blocks.forward_without_arrays(call_of(problem).problem).name == "forward_sm80"
    bounded = dataclasses.replace(problem, tiles=(blocks.block_q, blocks.block_kv))
    out, lse = run_forward(problem, emulator)
    found = forward_ratios(bounded, out, lse, tensor)
    if np.isfinite(out).all():
        found |= backward_ratios(bounded, run_backward(problem, emulator, out, lse), tensor)
    return found


def combine_bounds(
    outs: list[Array], lses: list[Array], dtype: Any
) -> dict[str, tuple[Array, Array]]:
    """Return what parts combine to, out and lse, and a bound on the error of each.

    A sum rounds once for every part, twice where there are two levels, and a few times more;
    rounding x - m is an error of the weight. The weights' sum, which divides, errs as they do.
    """
    x, o = (np.stack([np.asarray(each, np.longdouble) for each in some]) for some in (lses, outs))
    empty = np.isinf(x).all(axis=0)
    m = np.where(empty, 0, x.max(axis=0))
    gaps = np.where(np.isinf(x), 0, m - x)
    p = np.where(np.isinf(x), 0, np.exp(-gaps))
    total = np.where(empty, 1, p.sum(axis=0))
    weights = (p / total)[..., None]
    o = np.where(weights == 0, 0, o)
    out = (weights * o).sum(axis=0)
    precision, number = Precision.of(dtype), len(outs)
    error = precision.unit * (2 * number + 20 + 2 * gaps)
    bound = (weights * error[..., None] * (np.abs(o) + np.abs(out))).sum(axis=0)
    stored = precision.output
    bound = (1 + stored.unit) * bound + stored.unit * np.abs(out) + stored.underflow
    lse = np.where(empty, -np.inf, m + np.log(total))
    lse_bound = precision.unit * (2 * number + 20 + 4 * np.abs(m) + 2 * gaps.max(axis=0))
    return {"out": (out, bound), "lse": (lse, np.where(empty, 0, lse_bound))}


def run_tangent(problem: Problem, emulator: Emulator, directions: Directions) -> list[Array]:
    """Compute results and tangents into poisoned memory, and check that nothing else changed."""
    rng = np.random.default_rng([problem.seed, 4])
    random, shape = problem.layouts == "random", problem.do.shape
    made = [
        *(target(rng, shape, problem.dtype, random) for _ in range(2)),
        *(target(rng, shape[:-1], problem.accumulator, random) for _ in range(2)),
    ]
    copies = Copies(HostMemory())
    call = _copied(problem, copies)
    along = Tangents(*(None if x is None else copies.array(x) for x in directions))
    results: Any = tuple(_full(copies.array(x, True), call.matrices) for x in made)
    emulator.forward_tangent(call, with_heads(along, call), results)
    copies.check()
    return [copies.value(x) for x in made]


def lean_kernels() -> dict[str, Any]:
    """Return rows of `simt.KERNELS` with which kernels keep less in shared memory."""
    return {name: (lean, *simt.KERNELS[name][1:]) for name, lean in simt.LEAN.items()}


def run_second(
    problem: Problem,
    emulator: Emulator,
    directions: Directions,
    cotangents: tuple[Array | None, Array | None],
    results: Results,
    deterministic: bool = False,
) -> dict[str, Array]:
    """Compute second derivatives into poisoned memory, and check that nothing else changed.

    `cotangents` are tdo and tdlse, and `results` are out and lse.
    """
    rng = np.random.default_rng([problem.seed, 6])
    random = problem.layouts == "random"
    copies = Copies(HostMemory())
    call = _copied(problem, copies)
    owners = (problem.q, problem.k, problem.v, *map(problem.options.get, ("bias", "sink")))
    made = [None if x is None else target(rng, x.shape, x.dtype, random) for x in owners]
    made += [target(rng, x.shape, x.dtype, random) for x in results]
    matrices = (*call.were_matrices, False, False, call.matrices, call.matrices)
    written: list[Any] = [
        _full(copies.array(x, True), matrix) for x, matrix in zip(made, matrices, strict=True)
    ]
    names = ("do", "out", "lse", "dlse", "tdo", "tdlse")
    given = dict(zip(names, (problem.do, *results, problem.dlse, *cotangents), strict=True))
    read: dict[str, Any] = {
        name: _full(copies.array(x), call.matrices) for name, x in given.items() if x is not None
    }
    along = Tangents(*(None if x is None else copies.array(x) for x in directions))
    moved = SecondTangents(with_heads(along, call), read.pop("tdo", None), read.pop("tdlse", None))
    to = Gradients(*written[:5]), (written[5], written[6])
    emulator.backward_tangent(call, read, moved, *to, deterministic=deterministic)
    copies.check()
    names = (*Gradients._fields, "tout", "tlse")
    return {name: copies.value(x) for name, x in zip(names, made, strict=True) if x is not None}


def reduce_in_every_form(emulator: Emulator, call: Call, lse: Array) -> None:
    """Take reductions of 40 queries: lists of the largest, results of several tiles of keys."""
    for form in (
        Form("logit", "keys", "top", most=2),
        Form("program", "keys", "top", most=2),
        Form("weight", "blocks", "sum", rows=(0, 40), block=(40, 20)),
        Form("program", "blocks", "max", rows=(0, 40), block=(40, 1)),
        Form("entropy", "distance", "sum"),
        Form("program", "distance", "max"),
    ):
        emulator.reduce(call, form, lse, SCORE * 2.0 if form.of == "program" else None)
