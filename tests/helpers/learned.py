"""Score changes with learned look-ups for drawn problems, and their gradients and bounds."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
from harness import block_kv, call_of, precision_of, small_tiles
from hypothesis import assume
from strategies import DTYPES

import cupyflash
from cupyflash import lookup, scores
from cupyflash.backends.cpu import Cpu
from cupyflash.expr import clip, exp, tanh, where
from cupyflash.testing import lookup_bound, rho
from cupyflash.testing.cases import Problem
from cupyflash.testing.placement import Layout, Placed, random_layout


def learned_changes(problem: Problem) -> list[Any]:
    """Draw two or three changes that read learned look-ups, of all kinds of indices."""
    rng = np.random.default_rng([problem.seed, 7])
    heads = call_of(problem).problem.heads
    gates = max(min(x.shape[-2] for x in (problem.q, problem.k)), 1)

    def table(*shape: int, low: float = -1.0, high: float = 1.0) -> Any:
        dtype = DTYPES[int(rng.integers(len(DTYPES)))]
        layout = random_layout(rng, len(shape), dtype.itemsize) if rng.random() < 0.5 else Layout()
        placed = Placed(shape, dtype, layout)
        placed.view[...] = rng.uniform(low, high, shape)
        problem.placed.append(placed)
        return lookup(placed.view, learned=True)

    cap, slopes, distances = table(low=1, high=3), table(heads), table(heads, 7)
    temperature, window, pairs = table(heads, low=0.5, high=1.5), table(1), table(3, 3)
    by_query, by_key = table(gates), table(heads, gates)
    bucket = lookup(rng.integers(0, 3, 11))
    made = [
        scores.softcap(cap),
        scores.alibi(slopes),
        scores.relative_bias(distances),
        scores.score(lambda s, b, h, i, j: s * temperature[h] + 0.5 * temperature[h]),
        scores.score(lambda s, b, h, i, j: where(s > window[0], s, window[0] - 0.5 * i)),
        scores.score(lambda s, b, h, i, j: s + pairs[bucket[i % 11], bucket[j % 11]]),
        scores.score(lambda s, b, h, i, j: s * exp(by_query[clip(i, 0, gates - 1)])),
        scores.score(lambda s, b, h, i, j: s + tanh(by_key[h, clip(j, 0, gates - 1)])),
    ]
    return [made[n] for n in rng.choice(len(made), int(rng.integers(2, 4)), replace=False)]


def lookup_ratios(problem: Problem) -> dict[Any, float]:
    """Return rho of all gradients of learned look-ups that are finite; none if out overflowed."""
    changes = problem.options.get("score_mod") or []
    changes = [*(changes if isinstance(changes, list) else [changes]), *learned_changes(problem)]
    options = problem.options | {"score_mod": changes}
    arrays, offsets = (problem.q, problem.k, problem.v), problem.offsets or ()
    with small_tiles(problem):
        call = cupyflash.attention_varlen if offsets else cupyflash.attention
        back = cupyflash.attention_varlen_backward if offsets else cupyflash.attention_backward
        with mock.patch.object(Cpu, "empty_like", poisoned):
            out, lse = call(*arrays, *offsets, return_lse=True, **options)
            if not np.isfinite(out.astype(np.float32)).all():
                return {}
            made = back(
                problem.do, *arrays, out, lse, *offsets, dlse=problem.dlse, **options
            ).dlookups
    for placed in problem.placed:
        placed.check()
    bound = lookup_bound(
        problem.do, *arrays, offsets=problem.offsets, dlse=problem.dlse, **options,
        precision=precision_of(problem, False), block_kv=block_kv(problem),
    )  # fmt: skip
    assume(problem.hard or not bound.ill_conditioned)  # the changes above may make it so
    assert set(made) == set(bound.dlookups)
    for table, gradient in made.items():
        assert gradient.dtype == table.array.dtype
    finite = {  # not where a score change gives a cap scores of -inf, for example
        table: x for table, x in made.items() if np.isfinite(bound.dlookups[table].exact).all()
    }
    return {table: rho(x, *bound.dlookups[table]).value for table, x in finite.items()}


_empty_like = Cpu.empty_like


def poisoned(*args: Any, **keywords: Any) -> Any:
    """Return an array as the back end does, of NaN."""
    made = _empty_like(*args, **keywords)
    made[...] = np.nan
    return made
