"""The kernel of dbias for compute capability 9.0 only: its tiles and its spec."""

from __future__ import annotations

from . import bias_tiles, grid
from .sm80 import HALVES, bias_storage_bytes
from .sm90 import ARCHITECTURE, CAPABILITY, dkdv_slower
from .spec import KernelSpec, Request, Tiles, at_head, row_bytes

# Largest head -> queries and keys of a tile of backward_sm90_bias.cu, and blocks that share an SM:
# one multiplies while another computes weights.
BIAS_TILES: dict[int, tuple[int, int, int]] = {
    128: (64, 128, 2),
    192: (64, 64, 2),
    256: (128, 64, 1),
}


def dbias_tiles(block_q: int, block_kv: int, resident: int, d: int, d_v: int) -> Tiles:
    """Return tiles of backward_sm90_bias.cu: a warpgroup for 64 queries each."""
    operands = (block_q + block_kv) * (row_bytes(d) + row_bytes(d_v))
    sums = block_q * (block_kv + 8) * 4
    shared = max(operands, sums) + bias_storage_bytes(block_q, block_q // 16)
    return Tiles(block_q, block_kv, 2 * block_q, shared, resident, stages=1)


def fit_bias(d: int, d_v: int) -> Tiles:
    """Return the tiles of backward_sm90_bias.cu."""
    return dbias_tiles(*at_head(BIAS_TILES, d, d_v), d, d_v)


def _configure(request: Request) -> Tiles:
    usual = fit_bias(request.problem.d, request.problem.d_v)
    return bias_tiles.in_block(request, usual) or usual


BIAS = KernelSpec(
    source="sm90/backward_sm90_bias.cu",
    part="bias",
    computes="dbias",
    method="multiplies {dtype} by the tensor cores of warpgroups",
    heads=dict.fromkeys(HALVES, max(BIAS_TILES)),
    capability=CAPABILITY,
    architecture=ARCHITECTURE,
    tensor_cores=True,
    condition="by the model of cost `backward_sm90_dkdv` takes less time than that of sm80",
    obstacle=dkdv_slower,
    configure=_configure,
    grid=grid.by_tiles,
)
