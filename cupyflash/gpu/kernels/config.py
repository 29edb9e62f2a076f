"""Which kernel and tiles serve a problem: a pure function of sizes and types.

It never reads the batch size, so that a result does not depend on the batch it is computed in.
"""

from __future__ import annotations

import functools

from ...arrays.cuda_device import OLDEST_CAPABILITY, Target
from ...errors import ArgumentError
from ...problem.call import Plan, Problem
from . import f64_tiles, tensor_tiles
from .tiles import Tiles, fit

UNKNOWN = "its arrays are not known"

# Largest head size -> (block_q, block_kv) of the CPU kernels. A tile of scores, the block of
# queries and the accumulated output share the second-level cache of a core.
CPU_TILES = ((128, (128, 128)), (512, (64, 64)))


def choose(
    problem: Problem,
    target: Target | None = None,
    obstacle: str | None = UNKNOWN,
    besides: str = "nothing",
) -> Plan:
    """Return the kernel and tiles for a problem on a GPU, or without one on the CPU.

    `obstacle` and `besides` are as in `forward`.
    """
    if target is not None:
        kernel, tiles = forward(problem, target, None, obstacle, besides)
        why = _why(kernel, problem, target, obstacle)
        if problem.heads_in_rows > 1:
            why += f"; the {problem.heads_in_rows} heads that share keys are rows of one"
        return Plan(
            kernel=kernel,
            block_q=tiles.block_q,
            block_kv=tiles.block_kv,
            reason=f"{why}; {tiles.block_q} x {tiles.block_kv} tiles "
            f"take {tiles.shared_memory} bytes of its {target.shared_memory} of shared memory",
        )
    widest = max(problem.d, problem.d_v)
    block_q, block_kv = next(tiles for most, tiles in CPU_TILES if widest <= most)
    return Plan(
        kernel="reference.forward",
        block_q=block_q,
        block_kv=block_kv,
        reason=f"NumPy arrays run the tiled Numba kernels in {problem.accumulator}; "
        f"{block_q} x {block_kv} tiles are the table's for head sizes up to {widest}",
    )


def _why(kernel: str, problem: Problem, target: Target, obstacle: str | None) -> str:
    """Say why a kernel serves the forward of a problem."""
    major, minor = target.capability
    name = f"{target.name} (compute capability {major}.{minor})"
    if kernel == "forward_sm90":
        return f"{name} multiplies {problem.dtype} by the tensor cores of warpgroups"
    if kernel == "forward_sm90_tf32":
        return (
            f"{name} multiplies {problem.dtype} by the tensor cores of warpgroups, as three "
            "products each"
        )
    if kernel == "forward_sm80":
        how = "as three products each, " if problem.precision is not None else ""
        said = (
            f"{name} multiplies {problem.dtype} by tensor cores, {how}and sums in "
            f"{problem.accumulator}"
        )
        if target.capability == tensor_tiles.HOPPER and problem.dtype.itemsize == 2:
            said += f"; not by forward_sm90, because {_hopper_obstacle(target, obstacle)}"
        if target.capability == tensor_tiles.HOPPER and problem.dtype.itemsize == 4:
            largest = max(tensor_tiles.SPLIT_HOPPER)
            why = target.lacks or f"it serves heads up to {largest}"
            said += f"; not by forward_sm90_tf32, because {why}"
        return said
    said = f"{name} runs the portable kernel in {problem.accumulator}"
    if problem.dtype.itemsize == 4:
        return said
    largest = tensor_tiles.largest_head(problem.dtype)
    if target.capability < tensor_tiles.OLDEST_CAPABILITY:
        oldest = ".".join(map(str, tensor_tiles.OLDEST_CAPABILITY))
        said += f", because forward_sm80 needs {oldest}"
    elif max(problem.d, problem.d_v) > largest:
        said += (
            f", because head sizes {problem.d} and {problem.d_v} are beyond the "
            f"{largest} of forward_sm80 in {problem.dtype}"
        )
    return said


def _hopper_obstacle(target: Target, obstacle: str | None) -> str | None:
    """Return in words why forward_sm90 does not serve a call on a device that is one for it."""
    return target.lacks or obstacle


def _check_precision(problem: Problem, target: Target) -> None:
    """Refuse a precision that a device cannot have."""
    if problem.precision is None:
        return
    if target.capability < tensor_tiles.OLDEST_CAPABILITY:
        oldest, came = (
            ".".join(map(str, x)) for x in (tensor_tiles.OLDEST_CAPABILITY, target.capability)
        )
        raise ArgumentError(
            f'precision: "{problem.precision}" came with arrays on {target.name}, of compute '
            f"capability {came}; it needs {oldest}. Leave it out: without it any GPU computes in "
            "float32."
        )
    largest = tensor_tiles.largest_head(problem.dtype)
    if max(problem.d, problem.d_v) > largest:
        raise ArgumentError(
            f'precision: "{problem.precision}" came with head sizes {problem.d} and '
            f"{problem.d_v}; it serves heads up to {largest}. Leave it out for larger ones."
        )


def forward(
    problem: Problem,
    target: Target,
    plan: Plan | None = None,
    obstacle: str | None = UNKNOWN,
    besides: str = "nothing",
) -> tuple[str, Tiles]:
    """Return the kernel that serves the forward on a device, and its tiles.

    Parameters
    ----------
    problem : Problem
        Types and sizes.
    target : Target
        The device.
    plan : Plan, optional
        Another kernel and other tiles than the best ones.
    obstacle : str, optional
        Why forward_sm90 cannot serve the call, or None where it can.
    besides : str
        What takes registers beside products: a key of `tensor_tiles.FORWARD_HOPPER`.

    Raises
    ------
    ArgumentError
        If the device is too old, has too little shared memory for these head sizes, or cannot have
        the precision that is asked for.
    """
    _check_precision(problem, target)
    if plan is None and tensor_tiles.serves(problem, target.capability):
        itemsize = problem.dtype.itemsize
        hopper = target.capability == tensor_tiles.HOPPER
        if hopper and itemsize == 2 and not _hopper_obstacle(target, obstacle):
            return "forward_sm90", tensor_tiles.fit_hopper(problem.d, problem.d_v, besides)
        if hopper and itemsize == 4 and not target.lacks:
            tiles = tensor_tiles.fit_split(problem.d, problem.d_v)
            if tiles is not None:
                return "forward_sm90_tf32", tiles
        tiles = tensor_tiles.fit(problem.d, problem.d_v, target.shared_memory, itemsize)
        if tiles is not None:
            return "forward_sm80", tiles
    blocks = None if plan is None else (plan.block_q, plan.block_kv)
    return "forward_simt", simt("forward_simt", problem, target, blocks=blocks)


def backward(
    kernel: str,
    problem: Problem,
    target: Target,
    slope: bool,
    plan: Plan | None = None,
    obstacle: str | None = UNKNOWN,
) -> tuple[str, Tiles]:
    """Return the kernel that serves a part of the backward on a device, and its tiles.

    Parameters
    ----------
    kernel : str
        The part: dkdv, dq or bias.
    problem : Problem
        Types and sizes.
    target : Target
        The device.
    slope : bool
        Whether scores are changed.
    plan : Plan, optional
        Another kernel and other tiles than the best ones.
    obstacle : str, optional
        Why the kernel for compute capability 9.0 cannot serve the call, or None where it can.

    Raises
    ------
    ArgumentError
        If the device is too old, has too little shared memory for these head sizes, or cannot have
        the precision that is asked for.
    """
    _check_precision(problem, target)
    if plan is None and tensor_tiles.serves_backward(problem, target.capability):
        fit_hopper = tensor_tiles.FIT_BACKWARD_HOPPER.get(kernel)
        hopper = target.capability == tensor_tiles.HOPPER
        if hopper and fit_hopper is not None and not _hopper_obstacle(target, obstacle):
            return f"backward_sm90_{kernel}", fit_hopper(problem.d, problem.d_v)
        name = f"backward_sm80_{kernel}"
        tiles = tensor_tiles.fit_backward(name, problem.d, problem.d_v, target.shared_memory)
        if tiles is not None:
            return name, tiles
    if plan is None and kernel != "bias" and f64_tiles.serves(problem, target.capability):
        name = f"backward_f64_{kernel}"
        tiles = f64_tiles.fit(name, problem.d, problem.d_v, target.shared_memory)
        if tiles is not None:
            return name, tiles
    blocks = None if plan is None else (plan.block_q, plan.block_kv)
    name = "backward_bias" if kernel == "bias" else f"backward_simt_{kernel}"
    return name, simt(name, problem, target, slope, blocks)


def atomic_dq(
    problem: Problem, target: Target, deterministic: bool, plan: Plan | None = None
) -> bool:
    """Whether the kernel that computes dk and dv adds dq to memory, in any order of its blocks."""
    if deterministic:
        return False
    kernel = backward("dkdv", problem, target, False, plan)[0]
    if kernel == "backward_simt_dkdv":
        return problem.dtype.itemsize == 4
    return True


def simt(
    kernel: str,
    problem: Problem,
    target: Target,
    slope: bool = False,
    blocks: tuple[int, int] | None = None,
) -> Tiles:
    """Return the tiles of a portable kernel.

    Parameters
    ----------
    kernel : str
        Its name.
    problem : Problem
        Types and sizes.
    target : Target
        The device.
    slope : bool
        Whether scores are changed, so that a backward kernel keeps their derivatives.
    blocks : tuple of int, optional
        Queries and keys of a tile, instead of the best ones.

    Raises
    ------
    ArgumentError
        If the device is too old, or has too little shared memory for these head sizes.
    """
    if target.capability < OLDEST_CAPABILITY:
        wanted, came = (".".join(map(str, x)) for x in (OLDEST_CAPABILITY, target.capability))
        raise ArgumentError(
            f"q: an array on {target.name} came, of compute capability {came}; wanted a GPU of "
            f"{wanted} (Turing) or newer. NumPy arrays, as cupy.asnumpy makes, run on the CPU."
        )
    spare = int(slope) + int(problem.dropout > 0)
    sizes = (problem.accumulator.itemsize, problem.dtype.itemsize, problem.d, problem.d_v)
    tiles = _fit(kernel, *sizes, spare, target.shared_memory, blocks)
    if tiles is None:
        raise ArgumentError(
            f"q, v: head sizes {problem.d} and {problem.d_v} of {problem.dtype} came; "
            f"{kernel} needs more than the {target.shared_memory} bytes of shared memory of "
            f"{target.name} for them. Wanted smaller heads or elements."
        )
    return tiles


_fit = functools.lru_cache(maxsize=1024)(fit)
