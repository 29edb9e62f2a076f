"""The route of a call on NumPy arrays: the choices of `cpu_tiles`, as steps that can be counted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ..arrays.unallocated import unallocated
from ..problem.call import Call
from ..problem.encoding import NUMBERS
from ..problem.route import Route, Step
from . import cpu, cpu_programs, cpu_tiles
from .cpu_tiles import Choice

# What the kernels compute: their part, and the same in words.
COMPUTES = {
    "forward": "out and log-sum-exp",
    "tangents": "out, log-sum-exp and their tangents",
    "tangent_dkdv": "tangents of dk and dv",
    "tangent_dq": "tangent of dq",
    "delta": "delta = rowsum(do * out)",
    "dkdv": "dk and dv",
    "dq": "dq",
    "numbers": "numbers of the codes of q, k and v",
}


@dataclass(frozen=True, eq=False)
class CpuStep(Step):
    """A step on the CPU.

    Attributes
    ----------
    blocks, nbytes : function
        Return its blocks, and the bytes of scratch memory that it needs.
    """

    blocks: Callable[[], int]
    nbytes: Callable[[], int]

    @property
    def grid(self) -> int:
        """Number of blocks, which threads share."""
        return self.blocks()

    @property
    def scratch(self) -> int:
        """Bytes of scratch memory that it needs."""
        return self.nbytes()


class CpuRoute(Route):
    """The route of a call on the CPU, where each step has its own scratch memory."""

    @property
    def scratch(self) -> int:
        """Bytes of scratch memory of all steps together."""
        return sum(step.scratch for step in self.steps)


def of(call: Call) -> CpuRoute:
    """Return the route of a forward."""
    choice = cpu_tiles.forward(call)
    if not choice.widens:
        return CpuRoute(call, (_main(call, choice),))
    problem = replace(call.problem, dtype=cpu_tiles.NUMBERS)
    arrays: dict[str, Any] = {
        name: unallocated(getattr(call, name).shape, problem.dtype) for name in "qkv"
    }
    numbers = replace(call, problem=problem, encoding=NUMBERS, **arrays)
    # A narrower result is computed in the type of the numbers, and rounded.
    wide = problem.dtype.itemsize * _queries(numbers) * problem.d_v
    nbytes = sum(x.nbytes for x in arrays.values()) + wide * (call.problem.dtype.itemsize < 4)
    why = functools.partial(_why, choice, call)
    first = _step("numpy", "numbers", (0, 0), why, lambda: 1, lambda: nbytes)
    return CpuRoute(numbers, (first, _main(numbers, choice)))


def of_tangents(call: Call) -> CpuRoute:
    """Return the route of a forward with tangents."""
    return CpuRoute(call, (_tangents(call, 0),))


def _tangents(call: Call, nbytes: int) -> CpuStep:
    """Return the step that computes out, lse and their tangents."""
    plan = cpu_tiles.with_tangents(call.problem, call.mask)
    of_queries = partial(_blocks, call, call.problem.len_q, plan.block_q, call.problem.heads)
    tiles, why = (plan.block_q, plan.block_kv), partial(_why, Choice(plan, for_few=False), call)
    return _step(plan.kernel, "tangents", tiles, why, of_queries, lambda: nbytes)


def of_second(call: Call) -> CpuRoute:
    """Return the route of a backward with tangents: a forward with tangents, then gradients'."""
    problem, rows, item = call.problem, _queries(call), call.problem.accumulator.itemsize
    # out, lse, their tangents, delta and its tangent; products of rows, and which are not 0.
    nbytes = rows * ((2 * problem.d_v + 4) * item + problem.d_v * (2 * item + 1))
    first = _tangents(call, nbytes)
    tiles = first.block_q, first.block_kv
    blocks = {
        "tangent_dkdv": partial(_blocks, call, problem.len_k, first.block_kv, problem.heads_kv),
        "tangent_dq": partial(_blocks, call, problem.len_q, first.block_q, problem.heads),
    }
    steps = (
        _step(f"reference.backward_{part}", part, tiles, first.why, count, lambda: 0)
        for part, count in blocks.items()
    )
    return CpuRoute(call, (first, *steps))


def of_gradients(call: Call) -> CpuRoute:
    """Return the route of a backward."""
    problem, plan = call.problem, cpu_tiles.tiled(call.problem, call.mask)
    why = functools.partial(_why, Choice(plan, for_few=False), call)
    item, tiles = problem.accumulator.itemsize, (plan.block_q, plan.block_kv)

    def nbytes() -> int:
        """Return the bytes of delta, and of dq's sums over several blocks of keys."""
        several = bool(np.any(np.asarray(problem.len_k) > plan.block_kv))
        return _queries(call) * (1 + problem.d * several) * item

    blocks: dict[str, Callable[[], int]] = {
        "delta": lambda: problem.batch * problem.heads,
        "dkdv": partial(_blocks, call, problem.len_k, plan.block_kv, problem.heads_kv),
        "dq": partial(_blocks, call, problem.len_q, plan.block_q, problem.heads),
    }
    return CpuRoute(
        call,
        tuple(
            _step(
                f"reference.backward_{part}",
                part,
                (0, 0) if part == "delta" else tiles,
                why,
                count,
                nbytes if part == "dkdv" else lambda: 0,
            )
            for part, count in blocks.items()
        ),
    )


def _main(call: Call, choice: Choice) -> CpuStep:
    """Return the step that computes out and lse."""
    problem, plan, rows = call.problem, choice.plan, _queries(call)
    tiles, why = (plan.block_q, plan.block_kv), functools.partial(_why, choice, call)
    if choice.for_few:
        units = functools.cache(partial(cpu.units_of, call))
        # Results of 16 bits are computed in float32, and rounded at the end.
        wide = 4 * rows * problem.d_v if problem.dtype.itemsize == 2 else 0
        return _step(
            plan.kernel,
            "forward",
            tiles,
            why,
            lambda: units()[0],
            lambda: units()[1] + wide,
        )
    of_queries = partial(_blocks, call, problem.len_q, plan.block_q, problem.heads)
    return _step(plan.kernel, "forward", tiles, why, of_queries, lambda: 0)


def _why(choice: Choice, call: Call) -> str:
    """Return why a call has its kernel, and what is left out of it."""
    reason = choice.plan.reason
    if choice.keeps_mask or not cpu_programs.leaves_out_mask(call):
        return reason
    return f"{reason}; the mask hides nothing of this call and is left out"


def _step(
    kernel: str,
    part: str,
    tiles: tuple[int, int],
    reason: Callable[[], str],
    blocks: Callable[[], int],
    nbytes: Callable[[], int],
) -> CpuStep:
    return CpuStep(kernel, part, COMPUTES[part], *tiles, reason, blocks, nbytes)


def _queries(call: Call) -> int:
    """Return the number of rows of the result."""
    problem = call.problem
    return problem.rows.total_q(call.q.shape[-2], problem.batch) * problem.heads


def _blocks(call: Call, lengths: Any, rows: int, heads: int) -> int:
    """Return the number of tiles of so many rows of all heads, each of one entry."""
    of_entries = np.broadcast_to(lengths, (call.problem.batch,))
    return int(np.sum(-(-of_entries // rows))) * heads
