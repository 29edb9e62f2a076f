"""Reductions of drawn problems, and what bounds say of their results."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
from harness import plan_of, precision_of

import cupyflash
from cupyflash import reductions
from cupyflash.backends import cpu_tiles
from cupyflash.problem import replay
from cupyflash.reductions import Reduction
from cupyflash.testing import reduction_bound, reduction_gradients_bound, rho
from cupyflash.testing.cases import Problem

SUMS = {
    "entropy": reductions.entropy(),
    "mass": reductions.mass(),
    "last": reductions.mass(queries=slice(-5, None)),
    "distance": reductions.distance(),
    "blocks": reductions.blocks((7, 20)),
    "own": reductions.reduction(lambda p, t, b, h, i, j: p * p * abs(i - j) + 0.5 * h),
}
OTHERS = {
    "max_logit": reductions.max_logit(),
    "raw": reductions.max_logit(raw=True, per_head=True),
    "top": reductions.top_keys(3),
    "largest": reductions.blocks((20, 7), by="max", of="t"),
    "peak": reductions.reduction(lambda p, t, b, h, i, j: p, "queries", "max"),
    "far": reductions.reduction(lambda p, t, b, h, i, j: p, "distance", "max"),
    "argmax": reductions.reduction(lambda p, t, b, h, i, j: t, by="argmax"),
}
EVERY = SUMS | OTHERS


def call_of(problem: Problem) -> tuple[Any, Any, dict[str, Any]]:
    """Return queries, keys and options; leading axes that only v has go to q."""
    q, k, v = problem.q, problem.k, problem.v
    lead = np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    if lead != np.broadcast_shapes(q.shape[:-3], k.shape[:-3]):
        q = np.broadcast_to(q, (*lead, *((1,) * (3 - q.ndim) + q.shape)[-3:]))
    options = {n: x for n, x in problem.options.items() if n not in ("dropout", "seed")}
    return q, k, options


def run(problem: Problem, function: Any, named: dict[str, Reduction]) -> Any:
    """Compute reductions with the problem's tiles."""
    tiled = cpu_tiles.tiled

    def chosen(of: Any, mask: Any = None) -> Any:
        return plan_of(*problem.tiles) if problem.tiles else tiled(of, mask)

    q, k, options = call_of(problem)
    # Calls with other tiles are other calls.
    kept, tiles = (
        mock.patch.object(replay, "_entries", {}),
        mock.patch.object(cpu_tiles, "tiled", chosen),
    )
    with kept, tiles:
        return function(q, k, named, **options)


def ratios(
    problem: Problem,
    found: dict[str, Any],
    named: dict[str, Reduction],
    tensor_cores: bool = False,
) -> dict[str, Any]:
    """Return the worst ratio of error to bound of each result but positions."""
    precision = precision_of(problem, tensor_cores)
    q, k, options = call_of(problem)
    made = {}
    for name, reduction in named.items():
        if reduction.by == "argmax":
            continue
        bound = reduction_bound(q, k, reduction, precision=precision, **options)
        values = found[name].values if reduction.by == "top" else found[name]
        with np.errstate(invalid="ignore"):
            nan = np.isnan(np.asarray(bound.exact, np.float64))
            assert (np.isnan(values) == nan).all(), name
        made[name] = rho(*(np.where(nan, 0, x) for x in (values, *bound))).value
    return made


def gradient_ratios(problem: Problem) -> dict[str, float]:
    """Return the worst ratio of error to bound of each gradient of `SUMS` on the CPU."""
    q, k, options = call_of(problem)
    found, vjp = run(problem, cupyflash.reduce_vjp, SUMS)
    given = given_of(problem, found)
    bias = options.get("bias")
    of_bias = bias is None or not is_shared(q, k, bias)
    return ratios_of_gradients(problem, given, vjp(given, bias_gradient=of_bias))


def given_of(problem: Problem, found: dict[str, Any]) -> dict[str, Any]:
    """Return gradients of results."""
    rng = np.random.default_rng([problem.seed, 5])
    return {name: rng.standard_normal(x.shape).astype(x.dtype) for name, x in found.items()}


def ratios_of_gradients(
    problem: Problem, given: dict[str, Any], gradients: Any, tensor_cores: bool = False
) -> dict[str, float]:
    """Return the worst ratio of error to bound of each gradient of `SUMS`."""
    q, k, options = call_of(problem)
    terms = [(SUMS[name], x) for name, x in given.items()]
    precision = precision_of(problem, tensor_cores)
    bound = reduction_gradients_bound(q, k, terms, precision=precision, **options)
    return {
        name: rho(x, *getattr(bound, name)).value
        for name, x in gradients._asdict().items()
        if x is not None
    }


def is_shared(q: Any, k: Any, bias: Any) -> bool:
    """Return whether heads or entries share a bias that has an element for each pair."""
    lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3])
    heads = q.shape[-3] if q.ndim > 2 else 1
    shape = (1,) * (len(lead) + 3 - bias.ndim) + bias.shape
    return shape[-2] > 1 and shape[-1] > 1 and shape[:-2] != (*lead, heads)
