"""What an explanation asks of a step of a route: on the CPU, most of it is nothing."""

from __future__ import annotations

from ..gpu.kernels.spec import Tiles
from ..gpu.source import Specialisation
from ..gpu.writer import KernelStep
from ..problem.call import Call
from ..problem.route import Step
from .times import Units


def special_of(step: Step) -> Specialisation | None:
    """Return what the kernel is compiled for; None on the CPU."""
    return step.special if isinstance(step, KernelStep) else None


def tiles_of(step: Step) -> Tiles | None:
    """Return the kernel's configuration; None on the CPU."""
    special = special_of(step)
    return None if special is None else special.tiles


def adds_dq(step: Step) -> bool:
    """Return whether the kernel adds its share of dq to memory."""
    special = special_of(step)
    return special is not None and special.atomic_dq


def missing_queries(step: Step, call: Call) -> int:
    """Return how many queries of a tile the first tiles lack; `call` is the main kernel's."""
    special = special_of(step)
    return 0 if special is None else special.missing_queries(int(call.problem.len_q))


def units(step: Step) -> Units:
    """Return what the kernel multiplies by."""
    special = special_of(step)
    if special is None or not special.spec.tensor_cores:
        return "no tensor cores"
    if step.part == "forward_codes":
        return "float8"
    return "mma.sync" if special.spec.architecture is None else "tensor cores"
