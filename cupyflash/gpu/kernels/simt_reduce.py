"""The portable kernels of reductions: their specs, whose tiles are in `simt`."""

from __future__ import annotations

import functools

from ...arrays.dtypes import FLOATS
from . import grid, simt
from .spec import KernelSpec, Request, Tiles

_HEADS = dict.fromkeys(FLOATS, simt.LARGEST_HEAD)
_METHOD = "runs the portable kernel in {accumulator}"


def _configure(kernel: str, request: Request) -> Tiles | None:
    """Return the tiles of a kernel, with one more if an expression makes values."""
    problem, device = request.problem, request.device
    sizes = problem.accumulator.itemsize, problem.dtype.itemsize, problem.d, 0
    spare = int(request.slope)
    return simt.fit(kernel, *sizes, spare, device.shared_memory, request.blocks)


KEYS = KernelSpec(
    source="simt/reduce_keys.cu",
    part="reduce_keys",
    computes="what is taken of each query's keys",
    method=_METHOD,
    heads=_HEADS,
    chooses_tiles=True,
    configure=functools.partial(_configure, "reduce_keys"),
    grid=grid.by_queries,
    slope=True,
    sizes=("d",),
)
BLOCKS = KernelSpec(
    source="simt/reduce_blocks.cu",
    part="reduce_blocks",
    computes="what is taken of each key's queries, or of blocks of both",
    method=_METHOD,
    heads=_HEADS,
    chooses_tiles=True,
    configure=functools.partial(_configure, "reduce_blocks"),
    grid=grid.by_owners,
    slope=True,
    sizes=("d",),
)
DISTANCE = KernelSpec(
    source="simt/reduce_distance.cu",
    part="reduce_distance",
    computes="what is taken of pairs of each distance",
    method=_METHOD,
    heads=_HEADS,
    chooses_tiles=True,
    configure=functools.partial(_configure, "reduce_distance"),
    grid=grid.by_owners,
    slope=True,
    sizes=("d",),
)
