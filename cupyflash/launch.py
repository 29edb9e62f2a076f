"""One call on a GPU: what its kernels are told, how many blocks they get, and in which order.

Everything happens on the current stream of the arrays' device, and nothing waits for it. Memory
beyond the results is what `workspace_size` says. With ``CUPYFLASH_DEBUG=1`` every launch is waited
for, so that an error names its kernel.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from . import compile as compiler
from . import config, operands, params, target
from .errors import ArgumentError
from .expr.cuda import Generated, generate
from .operands import Lead, lead_of
from .params import KINDS, MAX_PARTS
from .problem import Array, Call, Gradients, Plan, Problem
from .source import NONE, Specialisation
from .tiles import Tiles
from .trees import trees

ALIGNMENT = 256  # bytes, of the parts of a workspace


@dataclass
class Run:
    """One call's launches: its device, its expressions, and what all of them are told."""

    call: Call
    device: int
    generated: Generated
    lead: Lead
    told: dict[str, Any]
    blocks: tuple[int, int] | None = None  # of a tile, instead of the table's
    keep: list[Any] = field(default_factory=list)  # arrays that must live until all is launched

    def launch(
        self, kernel: str, tiles: Tiles, grid: int, generated: Generated | None, **told: Any
    ) -> None:
        """Launch a kernel, if it has any block.

        `told` goes before what every launch is told. A kernel that works on rows, not on tiles of
        scores, has nothing `generated`, and no use for what makes its specialisation another one.
        """
        if not grid:
            return
        problem, common = self.call.problem, self.told
        of_rows = generated is None
        if generated is None:
            generated = NONE
            common = common | {"ints": (), "floats": (), "tables": ()}
        special = Specialisation(
            kernel=kernel,
            dtype=problem.dtype.name,
            d=0 if of_rows else problem.d,
            d_v=problem.d_v,
            tiles=tiles,
            packed=problem.packed,
            dropout=problem.dropout > 0 and not of_rows,
            count_tiles="tiles_visited" in common and not of_rows,
            generated=generated,
        )
        layout = params.params(*_lengths(generated))
        start(special, self.device, grid, layout.pack(common | told))

    def tiles(self, kernel: str, generated: Generated) -> Tiles:
        """Return the tiles of a kernel."""
        facts = target.of(self.device)
        return config.simt(kernel, self.call.problem, facts, generated.has_slope, self.blocks)

    def grid(self, rows: int, of_keys: bool, own: tuple[int, ...]) -> tuple[int, int]:
        """Return the blocks of one head, of so many rows each, and those of the whole launch."""
        problem = self.call.problem
        heads = problem.heads_kv if of_keys else problem.heads
        if problem.packed:
            total = self.told["total_k" if of_keys else "total_q"]
            blocks = total // rows + problem.batch
            return blocks, blocks * heads if total else 0
        blocks = -(-self.told["len_k" if of_keys else "len_q"] // rows)
        return blocks, blocks * heads * math.prod(own)


def _lengths(generated: Generated) -> tuple[int, int, int]:
    return len(generated.ints), len(generated.floats), len(generated.arrays)


def _begin(
    call: Call,
    arrays: Mapping[str, tuple[Any, int]],
    slope: bool,
    plan: Plan | None,
    visited: Array | None,
) -> Run:
    """Gather what every launch of a call is told.

    `arrays` maps a field's name to an array and its trailing axes: H, L, D or, without D, 2.
    """
    problem = call.problem
    assert call.device is not None
    made = trees(call)
    generated = generate(made.allowed, made.classes, made.changed, made.slope if slope else None)
    size = params.params(*_lengths(generated)).size
    if size > params.MAX_BYTES:
        ints, floats, tables = _lengths(generated)
        raise ArgumentError(
            f"mask, score_mod: {tables} arrays and {ints + floats} numbers came, which make {size} "
            f"bytes of parameters; wanted at most {params.MAX_BYTES}. Join arrays into one with "
            "another axis, or compute numbers before they enter."
        )
    lead = _lead(problem, arrays)
    len_q, len_k = (int(np.max(x, initial=0)) for x in (problem.len_q, problem.len_k))
    drop_below = round(problem.dropout * 2.0**32)
    told = {
        "batch": problem.batch,
        "lead_size": lead.sizes,
        "own_size": lead.sizes,
        "len_q": len_q,
        "len_k": len_k,
        "total_q": call.q.shape[-2],
        "total_k": call.k.shape[-2],
        "heads": problem.heads,
        "heads_kv": problem.heads_kv,
        "group": problem.heads // problem.heads_kv if problem.heads_kv else 1,
        "scale": problem.scale,
        "drop_below": drop_below,
        "keep_scale": 1.0 / (1.0 - drop_below / 2.0**32),
        "ints": generated.ints,
        "floats": generated.floats,
        "tables": [operands.table(x) for x in generated.arrays],
        **{
            name: operands.operand(array, lead.strides[name], axes == 3)
            for name, (array, axes) in arrays.items()
        },
    }
    run = Run(call, call.device, generated, lead, told)
    if plan is not None:
        run.blocks = plan.block_q, plan.block_kv
    if visited is not None:
        told["tiles_visited"] = target.address(visited)
    if target.is_device_array(problem.seed):
        told["seed_gmem"] = target.address(problem.seed)
    else:
        told["seed"] = problem.seed
    if call.offsets is not None:
        for name, offsets in zip(("offsets_q", "offsets_k"), call.offsets, strict=True):
            run.keep.append(_device_offsets(offsets, name, run.device))
            told[name] = target.address(run.keep[-1])
    if call.sink is not None:
        run.keep.append(_contiguous(call.sink, "sink", run.device))
        told |= {
            "sink": target.address(run.keep[-1]),
            "kind_sink": KINDS[call.sink.dtype.name],
        }
    return run


def _lead(problem: Problem, arrays: Mapping[str, tuple[Any, int]]) -> Lead:
    if not problem.packed:
        return lead_of(problem.lead, arrays)
    # Offsets tell where a sequence lies, and arrays have no leading axes.
    sizes = (*(1,) * (params.MAX_LEAD - 1), problem.batch)
    return Lead(sizes, dict.fromkeys(arrays, (0,) * params.MAX_LEAD))


def _contiguous(array: Array, name: str, device: int) -> Array:
    """Return an array of one axis as it is, if its elements are neighbours, else a copy."""
    if array.flags.c_contiguous:
        return array
    if target.is_capturing(device):
        raise ArgumentError(
            f"{name}: strides {array.strides} came while a CUDA graph is being captured; wanted a "
            "contiguous array, which is read in place at every replay."
        )
    copy: Array = target.to_device(array, array.dtype, device)
    return copy


def _device_offsets(offsets: Array, name: str, device: int) -> Array:
    """Return offsets as contiguous int64 in device memory."""
    on_device = target.is_device_array(offsets)
    if on_device and offsets.dtype == np.int64 and offsets.flags.c_contiguous:
        return offsets
    if target.is_capturing(device):
        raise ArgumentError(
            f"{name}: {offsets.dtype} in {'device' if on_device else 'host'} memory came while a "
            "CUDA graph is being captured; wanted contiguous int64 in device memory, which is read "
            "in place at every replay."
        )
    copy: Array = target.to_device(offsets, np.int64, device)
    return copy


def start(special: Specialisation, device: int, grid: int, packed: bytes) -> None:
    """Compile a kernel, if it is new, and launch it on the device's current stream."""
    import cupy

    if grid > target.MAX_GRID:
        raise ArgumentError(
            f"q: batch, heads and lengths make {grid} blocks of {special.kernel}; wanted at most "
            f"{target.MAX_GRID}. Split the batch over several calls."
        )
    tiles = special.tiles
    with cupy.cuda.Device(device):
        kernel = compiler.kernel(special, device)
        try:
            argument = params.argument(packed)
            kernel((grid,), (tiles.threads,), (argument,), shared_mem=tiles.shared_memory)
            if os.environ.get("CUPYFLASH_DEBUG") == "1":
                cupy.cuda.get_current_stream().synchronize()
        except Exception as error:
            error.add_note(f"while running the kernel {special.name}")
            raise


def forward(
    call: Call, out: Array, lse: Array, plan: Plan | None = None, visited: Array | None = None
) -> None:
    """Write out and lse.

    A `plan` gives other tiles than the table's. `visited`, one uint64 in device memory, grows by
    the number of tiles that were not EMPTY; counting needs kernels of their own.
    """
    if not lse.size:
        return
    arrays = {"q": (call.q, 3), "k": (call.k, 3), "v": (call.v, 3)}
    arrays |= {"out": (out, 3), "lse": (lse, 2)}
    run = _begin(call, arrays, False, plan, visited)
    tiles = run.tiles("forward_simt", run.generated)
    blocks, grid = run.grid(tiles.block_q, False, run.lead.sizes)
    run.launch("forward_simt", tiles, grid, run.generated, blocks=blocks)


def backward(
    call: Call,
    do: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    gradients: Gradients,
    workspace: Array | None,
    plan: Plan | None = None,
    visited: Array | None = None,
) -> None:
    """Write every gradient; `plan` and `visited` as in `forward`."""
    problem, device = call.problem, call.device
    assert device is not None
    dq, dk, dv, dbias, dsink = gradients
    if not problem.batch or not problem.heads:
        # What was broadcast to no batch entry at all still has a gradient.
        for gradient in gradients:
            if gradient is not None:
                target.fill(gradient, 0)
        return
    if workspace is None and target.is_capturing(device):
        raise ArgumentError(
            "workspace: None came while a CUDA graph is being captured; wanted "
            f"cupy.empty({workspace_size(call)}, cupy.uint8). Memory of CuPy's pool would serve "
            "others before the graph is replayed."
        )
    scratch = _Scratch(device, workspace)
    delta = scratch.empty(lse.shape, problem.accumulator)
    made_dk, made_dv, kind = dk, dv, KINDS[problem.dtype.name]
    shared = _shared_lead(call)
    if shared is not None:  # computed over the axes that k and v have together, then summed
        made_dk = scratch.empty((*shared, *dk.shape[-3:]), problem.accumulator)
        made_dv = scratch.empty((*shared, *dv.shape[-3:]), problem.accumulator)
        kind = KINDS[problem.accumulator.name]
    arrays = {"q": (call.q, 3), "k": (call.k, 3), "v": (call.v, 3), "out": (out, 3)}
    arrays |= {"d_out": (do, 3), "dq": (dq, 3), "dk": (made_dk, 3), "dv": (made_dv, 3)}
    arrays |= {"lse": (lse, 2), "delta": (delta, 2)}
    if dlse is not None:
        arrays["dlse"] = (dlse, 2)
    if dbias is not None:
        dbias = dbias[(None,) * (3 - dbias.ndim)]
        arrays["dbias"] = (dbias, 3)
    run = _begin(call, arrays, True, plan, visited)
    run.told |= {"kind_dq": KINDS[problem.dtype.name], "kind_dk": kind, "kind_dv": kind}
    plain = replace(run.generated, has_slope=False)

    rows = lse.size  # of all entries and heads
    run.launch("backward_delta", ROWS, -(-rows // (ROWS.threads // 32)), None)
    if dsink is not None:
        _sink_gradient(run, dsink)
    _key_gradients(run)
    if shared is not None:
        _sum_to(dk, made_dk)
        _sum_to(dv, made_dv)
    own = run.lead.own("dq") if not problem.packed else run.lead.sizes
    tiles = run.tiles("backward_simt_dq", run.generated)
    blocks, grid = run.grid(tiles.block_q, False, own)
    run.launch("backward_simt_dq", tiles, grid, run.generated, blocks=blocks, own_size=own)
    if dbias is not None:
        _bias_gradient(run, dbias, plain)


ROWS = Tiles(block_q=0, block_kv=0, threads=256, shared_memory=0)  # a warp works on one row


def _sink_gradient(run: Run, dsink: Array) -> None:
    problem = run.call.problem
    threads = 512
    shared = threads * problem.accumulator.itemsize
    target_array = dsink
    if not dsink.flags.c_contiguous:
        target_array = target.empty(dsink.shape, dsink.dtype, run.device)
    run.launch(
        "backward_sink",
        Tiles(block_q=0, block_kv=0, threads=threads, shared_memory=shared),
        problem.heads,
        None,
        dsink=target.address(target_array),
        kind_dsink=KINDS[dsink.dtype.name],
    )
    if target_array is not dsink:
        dsink[...] = target_array


def _key_gradients(run: Run) -> None:
    tiles = run.tiles("backward_simt_dkdv", run.generated)
    own = run.lead.sizes if run.call.problem.packed else run.lead.own("dk", "dv")
    blocks, grid = run.grid(tiles.block_kv, True, own)
    run.launch("backward_simt_dkdv", tiles, grid, run.generated, blocks=blocks, own_size=own)


def _shared_lead(call: Call) -> tuple[int, ...] | None:
    """Return the leading axes that k and v have together, if one of them was broadcast to them."""
    if call.problem.packed:
        return None
    lead = np.broadcast_shapes(call.k.shape[:-3], call.v.shape[:-3])
    different = math.prod(call.k.shape[:-3]) != math.prod(call.v.shape[:-3])
    return lead if different or math.prod(lead) != math.prod(call.k.shape[:-3]) else None


def _sum_to(gradient: Array, computed: Array) -> None:
    """Write the sum of `computed` over the axes along which `gradient` was broadcast to it."""
    shape = (1,) * (computed.ndim - gradient.ndim) + gradient.shape
    for axis in range(computed.ndim - 3):
        if shape[axis] != computed.shape[axis]:
            along = computed.swapaxes(0, axis)
            for n in range(1, along.shape[0]):
                along[0] += along[n]  # in place, in a fixed order
            computed = along[:1].swapaxes(0, axis)
    gradient[...] = computed.reshape(gradient.shape)


def _bias_gradient(run: Run, dbias: Array, generated: Generated) -> None:
    problem = run.call.problem
    tiles = run.tiles("backward_bias", generated)
    heads, len_q, len_k = dbias.shape[-3:]
    told: dict[str, Any] = {}
    if problem.packed:
        shared = dbias.ndim == 3 or dbias.shape[0] == 1 != problem.batch
        own = (*(1,) * (params.MAX_LEAD - 1), 1 if shared else problem.batch)
        step = 0 if shared else dbias.strides[0] // dbias.itemsize
        lead = (*(0,) * (params.MAX_LEAD - 1), step)
        told["dbias"] = operands.operand(dbias, lead)
    else:
        own = run.lead.own("dbias")
    blocks = -(-len_q // tiles.block_q) * -(-len_k // tiles.block_kv)
    run.launch(
        "backward_bias",
        tiles,
        blocks * heads * math.prod(own),
        generated,
        own_size=own,
        bias_heads=heads,
        bias_len_q=len_q,
        bias_len_k=len_k,
        kind_dbias=KINDS[dbias.dtype.name],
        **told,
    )


class _Scratch:
    """Memory for intermediate results: parts of the workspace, or fresh arrays."""

    def __init__(self, device: int, workspace: Array | None) -> None:
        self._device, self._workspace = device, workspace
        self._used = 0 if workspace is None else -target.address(workspace) % ALIGNMENT

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialised array in C order."""
        made: Array
        if self._workspace is None:
            made = target.empty(shape, dtype, self._device)
            return made
        size = math.prod(shape) * dtype.itemsize
        made = self._workspace[self._used : self._used + size].view(dtype).reshape(shape)
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return made


def workspace_size(call: Call) -> int:
    """Return the bytes of workspace that `backward` needs: delta, one number per query.

    Where k and v are broadcast over different axes, also their gradients before they are summed.
    """
    problem = call.problem
    numbers = [call.q.shape[-2] * problem.heads * (1 if problem.packed else problem.batch)]
    lead = _shared_lead(call)
    if lead is not None:
        numbers += [math.prod((*lead, *x.shape[-3:])) for x in (call.k, call.v)]
    sizes = [int(n) * problem.accumulator.itemsize for n in numbers]
    return ALIGNMENT + sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


def combine(parts: list[tuple[Array, Array]], out: Array, lse: Array) -> None:
    """Write the combination of several (out, lse)."""
    if not lse.size:
        return
    device = target.device_of(out)
    assert device is not None
    left = list(parts)
    while len(left) > MAX_PARTS:
        # Intermediate results keep the accumulator's type.
        if target.is_capturing(device):
            raise ArgumentError(
                f"combine: {len(parts)} parts came while a CUDA graph is being captured; wanted at "
                f"most {MAX_PARTS}. Combine them in groups."
            )
        wide = tuple(target.empty(x.shape, lse.dtype, device) for x in (out, lse))
        _combine(left[:MAX_PARTS], wide[0], wide[1], device, out.dtype.name)
        left[:MAX_PARTS] = [(wide[0], wide[1])]
    _combine(left, out, lse, device, out.dtype.name)


def _combine(
    parts: list[tuple[Array, Array]], out: Array, lse: Array, device: int, dtype: str
) -> None:
    def whole(array: Array, axes: int) -> Array:
        view: Array = array[(None,) * (axes - array.ndim)]
        return view

    outs, lses = [whole(o, 3) for o, _ in parts], [whole(x, 2) for _, x in parts]
    out, lse = whole(out, 3), whole(lse, 2)
    named = {f"out {n}": (x, 3) for n, x in enumerate(outs)}
    named |= {f"lse {n}": (x, 2) for n, x in enumerate(lses)}
    lead = lead_of(out.shape[:-3], named | {"out": (out, 3), "lse": (lse, 2)})
    packed = params.combine().pack({
        "outs": [operands.operand(x, lead.strides[f"out {n}"]) for n, x in enumerate(outs)],
        "lses": [operands.operand(x, lead.strides[f"lse {n}"], False) for n, x in enumerate(lses)],
        "out": operands.operand(out, lead.strides["out"]),
        "lse": operands.operand(lse, lead.strides["lse"], False),
        "lead_size": lead.sizes,
        "rows": out.shape[-2],
        "columns": out.shape[-1],
        "heads": out.shape[-3],
        "kinds": [KINDS[x.dtype.name] for x in outs],
        "kind_out": KINDS[out.dtype.name],
        "parts": len(parts),
    })  # fmt: skip
    special = Specialisation("combine", dtype, 0, 0, ROWS)
    start(special, device, -(-lse.size // (ROWS.threads // 32)), packed)
