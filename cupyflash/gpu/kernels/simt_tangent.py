"""The portable kernels of second derivatives: their specs, whose tiles are in `simt`."""

from __future__ import annotations

import functools

from ...arrays.dtypes import FLOATS
from . import grid, simt
from .spec import KernelSpec, Request, Tiles

_HEADS = dict.fromkeys(FLOATS, simt.LARGEST_HEAD)
_METHOD = "runs the portable kernel in {accumulator}"


def _configure(kernel: str, request: Request) -> Tiles | None:
    """Return the tiles of a kernel, with one more if there is dropout."""
    problem, device = request.problem, request.device
    sizes = problem.accumulator.itemsize, problem.dtype.itemsize, problem.d, problem.d_v
    spare = int(problem.dropout > 0)
    return simt.fit(kernel, *sizes, spare, device.shared_memory, request.blocks)


DKDV = KernelSpec(
    source="simt/backward_simt_tangent_dkdv.cu",
    part="tangent_dkdv",
    computes="tangents of dk and dv",
    method=_METHOD,
    heads=_HEADS,
    chooses_tiles=True,
    configure=functools.partial(_configure, "backward_simt_tangent_dkdv"),
    grid=grid.by_keys,
    slope=True,
    atomic_dq=("float32",),
)
DQ = KernelSpec(
    source="simt/backward_simt_tangent_dq.cu",
    part="tangent_dq",
    computes="tangent of dq",
    method=_METHOD,
    heads=_HEADS,
    chooses_tiles=True,
    configure=functools.partial(_configure, "backward_simt_tangent_dq"),
    grid=grid.by_queries,
    slope=True,
)
BIAS = KernelSpec(
    source="simt/backward_tangent_bias.cu",
    part="tangent_bias",
    computes="tangent of dbias",
    method=_METHOD,
    heads=_HEADS,
    chooses_tiles=True,
    configure=functools.partial(_configure, "backward_tangent_bias"),
    grid=grid.by_tiles,
    slope=True,
)
