"""Small tiles for kernels on the emulator, and the ones that the package would take.

They stand in for `cupyflash.gpu.kernels.registry`, whose tiles are those of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from cupyflash.gpu.kernels import (
    bias_tiles,
    registry,
    simt,
    sm80,
    sm80_f64,
    sm80_reduce,
    sm80_second,
    sm80_tangent,
    sm90,
    sm90_bias,
    sm90_dkdv,
)  # fmt: skip
from cupyflash.gpu.kernels.registry import Choice
from cupyflash.gpu.kernels.spec import KernelSpec, Request, Tiles
from cupyflash.problem.call import Problem

from .wide import wide_tiles

WITH_SLOPES = "dkdv", "dq", "lookup", "reduce"  # which have a tile for them
SHARED_MEMORY = 232448  # bytes that a block may have
LEAST_WITH_TENSOR_CORES = 101376  # bytes of shared memory, of GPUs that have them for bfloat16


def _is_short(spec: KernelSpec, problem: Problem) -> bool:
    """Whether a kernel for short rows is one for these."""
    return max(problem.rows.known_q, problem.rows.known_k) <= (spec.longest or 0)


@dataclass(frozen=True)
class Blocks:
    """Sizes of a tile of scores, and threads of a block."""

    block_q: int = 16
    block_kv: int = 16
    threads: int = 64
    tensor: bool = True  # whether the GPU has tensor cores for 16-bit types
    hopper: bool = False  # whether they are those of compute capability 9.0
    multiprocessors: int = 2
    # Queries and keys of a tile of forward_sm90, blocks that share an SM; None: those of long rows.
    warpgroups: tuple[int, int, int] | None = None
    bias_tiles: bool = False  # whether kernels of sm90 load a bias in tiles, where they can
    few_keys: bool = False  # whether backward_sm90_dkdv has its tiles of few keys, where it can
    one_tile: bool = False  # whether heads of one tile have the kernel that is for them

    def choose(self, part: str, request: Request) -> Choice:
        """Return the kernel of a part of a call, and its tiles, as `registry.select`."""
        choice = self.find(part, request)
        assert choice is not None, f"nothing serves {part} of {request.problem}"
        return choice

    def find(self, part: str, request: Request) -> Choice | None:
        """Return the kernel of a part of a call, or None, as `registry.find`."""
        problem = request.problem
        for spec in registry.KERNELS[part]:
            dtype = problem.dtype.name
            if dtype not in spec.heads or not self._has(spec):
                continue
            if request.has_cache and not spec.caches:
                continue
            if request.has_codes and not spec.codes:
                continue
            if spec.precisions.get(dtype) not in (None, problem.precision):
                continue
            if spec.only not in (None, (problem.d, problem.d_v)):
                continue
            if spec.longest is not None and not (self.one_tile and _is_short(spec, problem)):
                continue
            if max(problem.d, problem.d_v) > spec.heads[dtype] or spec.obstacle(request):
                continue
            tiles = self.tiles_of(spec, request)
            if tiles is not None:
                return Choice(spec, tiles)
        return None

    def forward_without_arrays(self, problem: Problem) -> KernelSpec:
        """Return the kernel of a forward of whose arrays nothing is known."""
        return self.choose("forward", Request(problem, self.device)).spec

    @property
    def device(self) -> Any:
        """What a kernel asks of its device."""
        return SimpleNamespace(
            multiprocessors=self.multiprocessors,
            shared_memory=SHARED_MEMORY,
            capability=(9, 0) if self.hopper else (8, 0) if self.tensor else (7, 5),
            lacks="",
        )

    def _has(self, spec: KernelSpec) -> bool:
        """Whether the GPU has what a kernel multiplies by."""
        if spec.architecture is not None:
            return self.hopper
        return self.tensor or not spec.tensor_cores

    def tiles_of(self, spec: KernelSpec, request: Request) -> Tiles | None:
        """Return small tiles of a kernel, or where nothing is said of it those of its spec."""
        tiles = self._own_tiles_of(spec, request)
        if spec.part == "bias" and self.bias_tiles and spec.tensor_cores and tiles is not None:
            return bias_tiles.in_block(request, tiles) or tiles
        return tiles

    def _own_tiles_of(self, spec: KernelSpec, request: Request) -> Tiles | None:
        """Return the same without tiles of a bias in a block of dbias."""
        problem = request.problem
        if spec is sm80.FORWARD:
            return self.tensor_tiles(problem)
        if spec is sm80_tangent.TANGENTS:
            return self.tangent_tiles(problem)
        if spec in (sm80_second.DKDV, sm80_second.DQ):
            return self.second_tiles(spec.name, problem)
        if spec is sm80_reduce.WEIGHTS:
            return self.weight_tiles(problem)
        if spec.name in sm80.BACKWARD_BYTES:
            return self.gradient_tiles(spec.name, problem)
        if spec.name in sm80_f64.BACKWARD_BYTES:
            return self.f64_tiles(spec.name, problem)
        if spec.name in simt.KERNELS:
            slope = request.slope and spec.part.startswith(WITH_SLOPES)
            return self.tiles(spec.name, problem, slope)
        if spec is sm90.FORWARD:
            return self.warpgroup_tiles(request)
        if spec is sm90.DKDV:
            usual = sm90_dkdv.fit_dkdv(problem.d, problem.d_v, sm90_dkdv.is_plain(request))
            found = bias_tiles.beside_queries(request, usual) if self.bias_tiles else None
            return found or (spec.configure(request) if self.few_keys else usual)
        if spec is sm90_bias.BIAS:
            return sm90_bias.fit_bias(problem.d, problem.d_v)
        return spec.configure(request)

    def warpgroup_tiles(self, request: Request) -> Tiles:
        """Return tiles of forward_sm90."""
        assert request.call is not None
        registers, sizes = (
            sm90.register_class(request.call),
            (request.problem.d, request.problem.d_v),
        )
        tiles_of_bias = self.bias_tiles and bias_tiles.obstacle(request) is None
        if self.warpgroups is None and tiles_of_bias:
            return sm90.fit_forward_bias(*sizes, bias_tiles.itemsize(request))
        if self.warpgroups is None:
            return sm90.fit_forward(*sizes, registers)
        block_q, block_kv, resident = self.warpgroups
        longest = int(np.max(request.problem.len_k, initial=0))
        one_tile = longest <= block_kv and not request.has_cache
        if tiles_of_bias:
            more = bias_tiles.itemsize(request), resident, one_tile
            found = sm90.forward_bias_tiles(block_q, block_kv, *sizes, *more)
            assert found is not None
            return found
        room = registers not in sm90.CHANGED
        return sm90.forward_tiles(block_q, block_kv, *sizes, room, resident, one_tile)

    def gradient_tiles(self, kernel: str, problem: Problem) -> Tiles:
        """Return tiles for tensor cores: rows as warps own them, one or two stages."""
        warps = self.threads // 32
        block_q, block_kv = self.block_q, self.block_kv
        if kernel == "backward_sm80_dq":
            block_q = 32 * warps if block_q >= 32 * warps else 16 * warps
        elif kernel == "backward_sm80_bias":  # 16 or 32 queries, and 16 keys or more
            block_q = max(16, min(block_q, 32 * warps))
            sharers = warps * (32 if block_q % 32 == 0 else 16) // block_q
            block_kv = max(block_kv, 16 * sharers)
        else:  # every warp has 16 or 32 keys of a tile, and 16 queries or more
            block_q = max(block_q, 16 * -(-16 * warps // block_kv))
        stages = 1 + (block_q + block_kv + problem.d) // 16 % 2
        if kernel == "backward_sm80_bias":
            stages = 1
        if max(problem.d, problem.d_v) > sm80.LARGEST_OF_WARP:
            block_q, block_kv, warps = wide_tiles(kernel, block_q, block_kv, warps)
        return sm80.backward_tiles(kernel, block_q, block_kv, warps, stages, problem.d, problem.d_v)

    def f64_tiles(self, kernel: str, problem: Problem) -> Tiles | None:
        """Return tiles for tensor cores in float64: every warp has a part of each product."""
        threads = max(self.threads, 64)  # for each piece of 16 bytes of the widest row
        warps = threads // 32
        block_q, block_kv = self.block_q, self.block_kv
        if kernel == "backward_f64_dq":
            block_kv = max(block_kv, 8 * -(-16 * warps // block_q))
        else:
            block_q = max(block_q, 16 * -(-16 * warps // block_kv))
        sizes = block_q, block_kv, warps, problem.d, problem.d_v
        shared = sm80_f64.BACKWARD_BYTES[kernel](*sizes)
        return Tiles(block_q, block_kv, threads, shared)

    def tensor_tiles(self, problem: Problem) -> Tiles:
        """Return tiles for tensor cores: 16 or 32 rows a warp, a ring of 2 or 3 places."""
        itemsize = problem.dtype.itemsize
        # A row of the widest head has a piece of 16 bytes for each of 64 threads.
        is_wide = max(problem.d, problem.d_v) > sm80.LARGEST_OF_WARP
        threads = max(self.threads, 64) if itemsize > 2 or is_wide else self.threads
        warps, block_kv = threads // 32, self.block_kv
        rows = 32 * warps if self.block_q >= 32 * warps else 16 * warps
        if is_wide:  # two warps share 16 rows
            rows, block_kv = 8 * warps, 32
        slots = 2 + (self.block_q + self.block_kv + problem.d) // 16 % 2
        return sm80.forward_tiles(rows, block_kv, warps, slots, problem.d, problem.d_v, itemsize)

    def tangent_tiles(self, problem: Problem) -> Tiles:
        """Return tiles of forward mode: as above, but two or four warps share rows beyond 128."""
        warps, block_kv, sizes = self.threads // 32, self.block_kv, (problem.d, problem.d_v)
        rows = 32 * warps if self.block_q >= 32 * warps else 16 * warps
        if max(sizes) > 128:
            warps = max(2, warps)
            rows, block_kv = 8 * warps, max(32, block_kv)
        return sm80_tangent.tiles_of(rows, block_kv, warps, *sizes)

    def second_tiles(self, kernel: str, problem: Problem) -> Tiles:
        """Return tiles of second derivatives: 16 rows a warp, one or two stages."""
        warps = self.threads // 32
        block_q, block_kv = 16 * warps, max(16, self.block_kv)
        if kernel == sm80_second.DKDV_NAME:
            block_q, block_kv = max(16, self.block_q), 16 * warps
        stages = 1 + (self.block_q + self.block_kv + problem.d) // 16 % 2
        sizes = block_q, block_kv, warps, stages, problem.d, problem.d_v
        return sm80_second.tiles_of(kernel, *sizes)

    def weight_tiles(self, problem: Problem) -> Tiles:
        """Return tiles of sums of weights: 16 or 32 keys a warp; wide rows need 64 threads."""
        warps = max(self.threads // 32, 2 if problem.d > sm80.LARGEST_OF_WARP else 1)
        keys = 32 * warps if self.block_kv >= 32 * warps else 16 * warps
        return sm80_reduce.tiles_of(min(max(self.block_q, 16), 32 * warps), keys, warps, problem.d)

    def tiles(self, kernel: str, problem: Problem, slope: bool) -> Tiles:
        """Return the tiles of a portable kernel; heads beyond 256 need tiles of 32 by 32."""
        sizes = problem.accumulator.itemsize, problem.dtype.itemsize, problem.d, problem.d_v
        shape = simt.Shape(*sizes, self.threads)
        least = max(shape.column_threads, shape.row_threads)
        rows, columns = max(self.block_q, least), max(self.block_kv, least)
        elements, _, _ = simt.KERNELS[kernel]
        spare = int(slope) + int(problem.dropout > 0)
        shared = elements(shape, rows, columns, spare) * shape.itemsize
        return Tiles(rows, columns, self.threads, shared)


@dataclass(frozen=True)
class Chosen(Blocks):
    """The tiles that a GPU gets; the sizes are those that a bound may assume."""

    block_q: int = 8
    block_kv: int = 8
    shared_memory: int = SHARED_MEMORY

    def tiles(self, kernel: str, problem: Problem, slope: bool) -> Tiles:
        """Return the tiles that the package's table gives a kernel."""
        sizes = problem.accumulator.itemsize, problem.dtype.itemsize, problem.d, problem.d_v
        chosen = simt.fit(kernel, *sizes, int(slope) + int(problem.dropout > 0), self.shared_memory)
        assert chosen is not None
        return chosen

    def gradient_tiles(self, kernel: str, problem: Problem) -> Tiles:
        """Return the tiles that the package's table gives the backward for tensor cores."""
        limit = max(self.shared_memory, LEAST_WITH_TENSOR_CORES)
        chosen = sm80.fit_backward(kernel, problem.d, problem.d_v, limit)
        assert chosen is not None
        return chosen

    def f64_tiles(self, kernel: str, problem: Problem) -> Tiles | None:
        """Return the tiles that the package's table gives the backward in float64, if any."""
        return sm80_f64.fit(kernel, problem.d, problem.d_v, self.shared_memory)

    def tensor_tiles(self, problem: Problem) -> Tiles:
        """Return the tiles that the package's table gives the forward for tensor cores."""
        limit = max(self.shared_memory, LEAST_WITH_TENSOR_CORES)
        chosen = sm80.fit_forward(problem.d, problem.d_v, limit, problem.dtype.itemsize)
        assert chosen is not None
        return chosen

    def tangent_tiles(self, problem: Problem) -> Tiles:
        """Return the tiles that the package's table gives forward mode on tensor cores."""
        limit = max(self.shared_memory, LEAST_WITH_TENSOR_CORES)
        chosen = sm80_tangent.fit(problem.d, problem.d_v, limit, False)
        assert chosen is not None
        return chosen

    def second_tiles(self, kernel: str, problem: Problem) -> Tiles:
        """Return the tiles that the package's table gives second derivatives on tensor cores."""
        limit = max(self.shared_memory, LEAST_WITH_TENSOR_CORES)
        chosen = sm80_second.fit(kernel, problem.d, problem.d_v, limit)
        assert chosen is not None
        return chosen

    def weight_tiles(self, problem: Problem) -> Tiles:
        """Return the tiles that the package's table gives sums of weights on tensor cores."""
        chosen = sm80_reduce.fit(problem.d, max(self.shared_memory, LEAST_WITH_TENSOR_CORES))
        assert chosen is not None
        return chosen
