"""Which kernels a call launches, from the recipe of a real call, without arrays' elements."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..backends import cpu, cpu_tiles, gpu
from ..gpu import recipe, rowwise
from ..gpu.kernels import registry
from ..gpu.kernels.spec import KernelSpec, Request, Tiles
from ..gpu.specialisation import Specialisation
from ..gpu.workspace import ArraySpec
from ..problem import pack_gqa
from ..problem.call import Call, Gradients, Problem
from .places import Place
from .times import Units

# What the CPU's kernels compute: their part, and the same in words.
CPU_COMPUTES = {
    "forward": "out and log-sum-exp",
    "delta": "delta = rowsum(do * out)",
    "dkdv": "dk and dv",
    "dq": "dq",
}
NUMBERS, OF_CODES = "numbers", "numbers of the codes of q, k and v"
ALIGNMENT = 256  # bytes; arrays are counted in the units of a GPU's allocator


@dataclass(frozen=True)
class Work:
    """A kernel of the call, before anything is counted."""

    name: str
    part: str
    computes: str
    blocks: int
    block_q: int = 0
    block_kv: int = 0
    special: Specialisation | None = None  # None: on the CPU
    missing: int = 0  # queries that the first tiles lack

    @property
    def blocks_of_tiles(self) -> tuple[int, int, int]:
        """Queries and keys of a tile, and the queries that the first tiles lack."""
        return self.block_q, self.block_kv, self.missing

    @property
    def spec(self) -> KernelSpec | None:
        """The kernel's spec, on a GPU."""
        return None if self.special is None else self.special.spec

    @property
    def tiles(self) -> Tiles | None:
        """The kernel's configuration, on a GPU."""
        return None if self.special is None else self.special.tiles

    @property
    def atomic_dq(self) -> bool:
        """Whether it adds its share of dq to memory."""
        return self.special is not None and self.special.atomic_dq

    @property
    def units(self) -> Units:
        """What it multiplies by."""
        if self.spec is None or not self.spec.tensor_cores:
            return "no tensor cores"
        if self.part == "forward_codes":
            return "float8"
        return "mma.sync" if self.spec.architecture is None else "tensor cores"


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
    plan = cpu_tiles.choose(problem)
    blocks = {
        size: -(-int(length) // block) * problem.batch
        for size, length, block in (
            ("q", problem.len_q, plan.block_q),
            ("k", problem.len_k, plan.block_kv),
        )
    }
    queries = problem.batch * problem.heads * int(problem.len_q)
    copies = 0
    if problem.dtype.itemsize == 2:  # results are made in float32, and rounded one by one
        inputs = [call.q.size, call.k.size, call.v.size]
        results = inputs if backward else [queries * problem.d_v]
        copies = 4 * sum(results) + 2 * max(results)
    tiles = plan.block_q, plan.block_kv
    if not backward:
        rows = blocks["q"] * problem.heads
        work = Work(plan.kernel, "forward", CPU_COMPUTES["forward"], rows, *tiles)
        return plan.reason, [work], copies
    of_q, of_k = blocks["q"] * problem.heads, blocks["k"] * problem.heads_kv
    delta = problem.batch * problem.heads, 0, 0
    sizes_of = {"delta": delta, "dkdv": (of_k, *tiles), "dq": (of_q, *tiles)}
    works = [
        Work(f"reference.backward_{part}", part, CPU_COMPUTES[part], *sizes)
        for part, sizes in sizes_of.items()
    ]
    # Delta, and queries and do transposed.
    numbers = queries * (1 + problem.d + problem.d_v)
    scratch = copies + numbers * problem.accumulator.itemsize
    return plan.reason, works, scratch


def on_cpu_cached(call: Call) -> tuple[str, list[Work], int]:
    """Return what `on_cpu` does for a call over a cache."""
    plan, problem = cpu_tiles.cached(call), call.problem
    units, scratch = cpu.units_of_cached(call)
    if problem.dtype.itemsize == 2:  # results are made in float32, and rounded at the end
        scratch += 4 * problem.batch * problem.heads * int(problem.len_q) * problem.d_v
    tiles = plan.block_q, plan.block_kv
    work = Work(plan.kernel, "forward", CPU_COMPUTES["forward"], units, *tiles)
    return plan.reason, [work], scratch


def on_cpu_codes(call: Call) -> tuple[Call, str, list[Work], int]:
    """Return the call on numbers, and what `on_cpu` does for a call on codes of float8."""
    problem = replace(call.problem, dtype=np.dtype(np.float32))
    numbers = _with_numbers(replace(call, problem=problem))
    _, works, scratch = on_cpu(numbers, False)
    first = Work("numpy", NUMBERS, OF_CODES, 1)
    scratch += sum(getattr(numbers, name).nbytes for name in "qkv")
    if call.problem.dtype.itemsize < 4:  # a result in float32 that is rounded
        scratch += 4 * problem.batch * problem.heads * int(problem.len_q) * problem.d_v
    return numbers, cpu.Cpu().plan(call).reason, [first, *works], scratch


def on_gpu_codes(call: Call, where: Place) -> tuple[Call, str, list[Work], int]:
    """Return the call that the main kernel has, and what `on_gpu` does for a call on codes."""
    facts, codes = where.target, call.codes
    assert facts is not None
    assert codes is not None
    if registry.widens(Request.of(call, facts)) is None:
        return call, *on_gpu(call, where, False, False)
    numbers = _with_numbers(call)
    launches = [
        rowwise.widen(
            getattr(call, name), codes.scales[f"{name}_scale"], codes.form, getattr(numbers, name)
        )
        for name in "qkv"
    ]
    special, blocks = launches[0].special, sum(launch.grid for launch in launches)
    first = Work(special.kernel, NUMBERS, OF_CODES, blocks, special=special)
    made, _ = pack_gqa.joined(numbers)
    _, works, scratch = on_gpu(made, where, False, False)
    scratch += sum(getattr(numbers, name).nbytes for name in "qkv")
    return made, gpu.plan_on(call, facts).reason, [first, *works], scratch


def _with_numbers(call: Call) -> Call:
    """Return a call on numbers of the problem's type that codes become first."""
    dtype = call.problem.dtype
    made: dict[str, Any] = {name: fake_array(getattr(call, name).shape, dtype) for name in "qkv"}
    return replace(call, codes=None, **made)


def on_gpu(
    call: Call, where: Place, backward: bool, deterministic: bool
) -> tuple[str, list[Work], int]:
    """Return the reason, the kernels, and the bytes of scratch of a call on CuPy arrays."""
    facts, problem = where.target, call.problem
    assert facts is not None
    shape = (*problem.lead, problem.heads, int(problem.len_q), problem.d_v)
    out, lse = fake_array(shape, problem.dtype), ArraySpec(shape[:-1], problem.accumulator)
    if backward:
        arrays = out, out, lse, None, Gradients(call.q, call.k, call.v)
        # A recipe reads only shapes and strides, so the memory need not exist yet.
        made = recipe.backward(call, facts, *arrays, deterministic=deterministic)  # type: ignore[arg-type]
    else:
        made = recipe.forward(call, facts, out, None)
    works = [
        Work(
            launch.special.kernel,
            launch.special.spec.part,
            launch.special.spec.computes,
            launch.grid,
            # The main kernel's tiles are those of the call, including what others share.
            launch.special.tiles.block_q if has_tiles else 0,
            launch.special.tiles.block_kv if has_tiles else 0,
            launch.special,
            launch.special.missing_queries(int(problem.len_q)),
        )
        for launch in made.launches
        for has_tiles in [
            launch.special.spec.part != "shared" and launch.special.tiles.block_kv > 0
        ]
    ]
    if backward:
        main = next(work for work in works if work.block_kv)
        reason = _why_backward(main, where, problem)
    else:
        reason = gpu.plan_on(call, facts).reason
    return reason, works, sum(laid.nbytes for laid in made.scratch.values())


def _why_backward(work: Work, where: Place, problem: Problem) -> str:
    facts, tiles, spec = where.target, work.tiles, work.spec
    assert facts is not None
    assert tiles is not None
    assert spec is not None
    computes = "dk, dv and, in any order, dq" if work.atomic_dq else "dk and dv"
    return (
        f"{facts.name} {spec.how(problem)}; one kernel computes {computes}; {tiles.block_q} x "
        f"{tiles.block_kv} tiles take {tiles.shared_memory} bytes of its {facts.shared_memory} of "
        "shared memory"
    )
