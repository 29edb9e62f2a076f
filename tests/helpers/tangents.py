"""Directions of drawn problems, calls along them into poisoned memory, and their bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from harness import Array, block_kv, plan_of, precision_of

import cupyflash
from cupyflash.backends import cpu_tiles
from cupyflash.problem import replay
from cupyflash.testing import (
    Directions,
    JvpBound,
    SecondBound,
    jvp_bound,
    jvp_bound_varlen,
    rho,
    second_bound,
)
from cupyflash.testing.cases import Problem
from cupyflash.testing.placement import Layout, Placed, random_layout

NAMES = ("out", "tout", "lse", "tlse")


def directions_of(problem: Problem, missing: float = 0.2) -> Directions:
    """Draw a direction; tangents are None with the probability `missing`."""
    rng = np.random.default_rng([problem.seed, 3])
    arrays = (problem.q, problem.k, problem.v, *map(problem.options.get, ("bias", "sink")))
    drawn: list[Array | None] = []
    for x in arrays:
        if x is None or rng.random() < missing:
            drawn.append(None)
            continue
        layout = random_layout(rng, x.ndim, x.itemsize) if rng.random() < 0.5 else Layout()
        placed = Placed(x.shape, x.dtype, layout)
        placed.view[...] = rng.standard_normal(x.shape)
        drawn.append(placed.view)
    return Directions(*drawn)


def run_jvp(problem: Problem, directions: Directions) -> list[Array]:
    """Compute results and tangents into poisoned memory, and check that nothing else changed."""
    rng = np.random.default_rng([problem.seed, 4])
    random = problem.layouts == "random"
    targets = []
    for name in NAMES:
        is_lse = "lse" in name
        shape = problem.do.shape[:-1] if is_lse else problem.do.shape
        dtype = problem.accumulator if is_lse else problem.dtype
        layout = random_layout(rng, len(shape), dtype.itemsize) if random else Layout()
        targets.append(Placed(shape, dtype, layout))
    with mock.patch.object(replay, "_entries", {}):  # calls with other tiles are other calls
        with_tiles(problem, directions, [x.view for x in targets])
    for placed in (*targets, *problem.placed):
        placed.check()
    return [x.view for x in targets]


def with_tiles(problem: Problem, directions: Directions, targets: list[Array]) -> None:
    """Call the public function, with the problem's tiles."""
    tiled = cpu_tiles.tiled

    def chosen(of: Any, mask: Any = None) -> Any:
        return plan_of(*problem.tiles) if problem.tiles else tiled(of, mask)

    tq, tk, tv, tbias, tsink = directions
    out, tout, lse, tlse = targets
    options = problem.options | {
        "tbias": tbias, "tsink": tsink, "return_lse": True, "out": out, "tout_out": tout,
        "lse_out": lse, "tlse_out": tlse,
    }  # fmt: skip
    arrays = problem.q, problem.k, problem.v
    with mock.patch.object(cpu_tiles, "tiled", chosen):
        if problem.offsets is None:
            results = cupyflash.attention_jvp(*arrays, tq, tk, tv, **options)
        else:
            results = cupyflash.attention_varlen_jvp(
                *arrays, *problem.offsets, tq, tk, tv, **options
            )
    assert all(a is b for a, b in zip(results, targets, strict=True))


def bound_jvp(problem: Problem, directions: Directions, tensor_cores: bool = False) -> JvpBound:
    """Return exact values and bounds."""
    arrays = problem.q, problem.k, problem.v
    options = problem.options | {
        "precision": precision_of(problem, tensor_cores), "block_kv": block_kv(problem)
    }  # fmt: skip
    if problem.offsets is None:
        return jvp_bound(*arrays, directions, **options)
    return jvp_bound_varlen(*arrays, *problem.offsets, directions, **options)


def jvp_ratios(
    problem: Problem, directions: Directions, results: list[Array], tensor_cores: bool = False
) -> dict[str, float]:
    """Return rho of every result. Only problems that say so may have ill-conditioned rows."""
    bound = bound_jvp(problem, directions, tensor_cores)
    assert problem.hard or not bound.ill_conditioned
    return {
        name: rho(x, *getattr(bound, name)).value for name, x in zip(NAMES, results, strict=True)
    }


class Cotangents(NamedTuple):
    """Tangents of the gradients of out and lse; None: zeros."""

    tdo: Array | None
    tdlse: Array | None


def cotangents_of(problem: Problem) -> Cotangents:
    """Draw tangents of do and dlse, or none."""
    rng = np.random.default_rng([problem.seed, 5])
    shape = problem.do.shape
    made = rng.standard_normal(shape).astype(problem.dtype), rng.standard_normal(shape[:-1])
    kept = [x if rng.random() < 0.5 else None for x in made]
    return Cotangents(kept[0], None if kept[1] is None else kept[1].astype(problem.accumulator))


def bound_second(
    problem: Problem, directions: Directions, cotangents: tuple[Array | None, Array | None],
    tensor_cores: bool = False,
) -> SecondBound:  # fmt: skip
    """Return exact second derivatives and bounds; `cotangents` are tdo and tdlse."""
    bound = second_bound(
        problem.do,
        problem.q,
        problem.k,
        problem.v,
        directions,
        dlse=problem.dlse,
        tdo=cotangents[0],
        tdlse=cotangents[1],
        precision=precision_of(problem, tensor_cores),
        block_kv=block_kv(problem),
        **problem.options,
    )
    assert problem.hard or not bound.ill_conditioned
    return bound


def ratios_of_second(bound: SecondBound, ours: Mapping[str, Array | None]) -> dict[str, float]:
    """Return rho of every second derivative; None stands for those that a call does not have."""
    assert all((x is None) == (getattr(bound, name) is None) for name, x in ours.items())
    return {name: rho(x, *getattr(bound, name)).value for name, x in ours.items() if x is not None}


def second_ratios(problem: Problem, directions: Directions) -> dict[str, float]:
    """Return rho of all second derivatives; of none where out has overflowed in float16."""
    (tq, tk, tv, tbias, tsink), tiled = directions, cpu_tiles.tiled
    tdo, tdlse = cotangents_of(problem)
    arrays = problem.q, problem.k, problem.v

    def chosen(of: Any, mask: Any = None) -> Any:
        return plan_of(*problem.tiles) if problem.tiles else tiled(of, mask)

    how = {"dlse": problem.dlse, "tdo": tdo, "tdlse": tdlse, **problem.options}
    with (
        mock.patch.multiple(cpu_tiles, tiled=chosen, has_few_queries=lambda _: False),
        mock.patch.object(replay, "_entries", {}),
    ):
        out, lse = cupyflash.attention(*arrays, return_lse=True, **problem.options)
        if not np.isfinite(out.astype(np.float32)).all():
            return {}
        made = cupyflash.attention_backward_jvp(
            problem.do, *arrays, out, lse, tq, tk, tv, tbias=tbias, tsink=tsink, **how
        )
    for placed in problem.placed:
        placed.check()
    ours = {**made.gradients._asdict(), "tout": made.tout, "tlse": made.tlse}
    return ratios_of_second(bound_second(problem, directions, (tdo, tdlse)), ours)
