"""Which kernels a call launches: what the recipe of a real call says, without arrays' elements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends import gpu
from ..gpu import recipe
from ..gpu.kernels import config
from ..gpu.kernels.tiles import Tiles
from ..gpu.source import Specialisation
from ..gpu.workspace import Laid
from ..problem.call import Call, Gradients
from .places import Place

PARTS = ("dq_rows", "dkdv", "dq", "delta", "forward")  # by which names of kernels end, or begin
ALIGNMENT = 256  # bytes, of arrays as a GPU's memory is given out


@dataclass(frozen=True)
class Work:
    """A kernel of the call, before anything is counted."""

    name: str
    blocks: int
    tiles: Tiles | None  # None: of the CPU
    block_q: int
    block_kv: int
    atomic_dq: bool
    special: Specialisation | None

    @property
    def part(self) -> str:
        """Which of `PARTS` the kernel computes."""
        found = [part for part in PARTS if self.name.endswith(part) or f"{part}_" in self.name]
        if not found:
            raise LookupError(f"{self.name}: what it reads and writes is not told in {__name__}")
        return found[0]


def fake_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return an array that only looks as if it had elements: nothing may read them."""
    memory = np.zeros(2 * ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    one = memory[first : first + dtype.itemsize].view(dtype)
    steps = [math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape))]
    return np.lib.stride_tricks.as_strided(one, shape, steps, writeable=False)


def on_cpu(call: Call, backward: bool) -> tuple[str, list[Work], int]:
    """Return the reason, the kernels, and the bytes of scratch of a call on NumPy arrays."""
    problem = call.problem
    plan = config.choose(problem)
    blocks = {
        size: -(-int(length) // block) * problem.batch
        for size, length, block in (
            ("q", problem.len_q, plan.block_q),
            ("k", problem.len_k, plan.block_kv),
        )
    }
    queries = problem.batch * problem.heads * int(problem.len_q)
    copies = 0
    if problem.dtype.itemsize == 2:  # arrays are widened to float32, and one result rounded
        out, inputs = queries * problem.d_v, [call.q.size, call.k.size, call.v.size]
        copies = 4 * (2 if backward else 1) * (out + sum(inputs))
        copies += 2 * (max(inputs) if backward else out)
    tiles = plan.block_q, plan.block_kv, False, None
    if not backward:
        rows = blocks["q"] * problem.heads
        return plan.reason, [Work(plan.kernel, rows, None, *tiles)], copies
    of_q, of_k = blocks["q"] * problem.heads, blocks["k"] * problem.heads_kv
    works = [
        Work("reference.backward_delta", problem.batch * problem.heads, None, 0, 0, False, None),
        Work("reference.backward_dkdv", of_k, None, *tiles),
        Work("reference.backward_dq", of_q, None, *tiles),
    ]
    # Delta, and queries and do transposed.
    numbers = queries * (1 + problem.d + problem.d_v)
    scratch = copies + numbers * problem.accumulator.itemsize
    return plan.reason, works, scratch


def on_gpu(
    call: Call, where: Place, backward: bool, deterministic: bool
) -> tuple[str, list[Work], int]:
    """Return the reason, the kernels, and the bytes of scratch of a call on CuPy arrays."""
    facts, problem = where.target, call.problem
    assert facts is not None
    shape = (*problem.lead, problem.heads, int(problem.len_q), problem.d_v)
    out, lse = fake_array(shape, problem.dtype), Laid(shape[:-1], problem.accumulator)
    if backward:
        arrays = out, out, lse, None, Gradients(call.q, call.k, call.v)
        # A recipe reads shapes and strides, which memory that is not there yet has too.
        made = recipe.backward(call, facts, *arrays, deterministic=deterministic)  # type: ignore[arg-type]
    else:
        made = recipe.forward(call, facts, out, None)
    works = [
        Work(
            launch.special.kernel,
            launch.grid,
            launch.special.tiles,
            launch.special.tiles.block_q if launch.special.tiles.block_kv else 0,
            launch.special.tiles.block_kv,
            launch.special.atomic_dq,
            launch.special,
        )
        for launch in made.launches
    ]
    if backward:
        main = next(work for work in works if work.block_kv)
        reason = _why_backward(main, where, problem.dtype.name, problem.accumulator.name)
    else:
        reason = gpu.plan_on(call, facts).reason
    return reason, works, sum(laid.nbytes for laid in made.scratch.values())


def _why_backward(work: Work, where: Place, dtype: str, accumulator: str) -> str:
    facts, tiles = where.target, work.tiles
    assert facts is not None
    assert tiles is not None
    how = (
        f"runs the portable kernel in {accumulator}"
        if "_simt_" in work.name
        else f"multiplies {dtype} by tensor cores, and sums in {accumulator}"
    )
    computes = "dk, dv and, in any order, dq" if work.atomic_dq else "dk and dv"
    return (
        f"{facts.name} {how}; one kernel computes {computes}; {tiles.block_q} x "
        f"{tiles.block_kv} tiles take {tiles.shared_memory} bytes of its {facts.shared_memory} of "
        "shared memory"
    )
