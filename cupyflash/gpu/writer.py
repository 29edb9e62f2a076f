"""The writer of the launches of a call, to which recipes add kernels.

A recipe depends on shapes, strides, numbers and the facts of a device. Addresses are filled in
later. Nothing here uses CuPy or reads elements of arrays.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..arrays import device_arrays
from ..arrays.cuda_device import MAX_GRID, Target
from ..errors import ArgumentError
from ..expr import width
from ..expr.cuda import generate
from ..expr.cuda_functions import Functions, Generated
from ..expr.key_range import key_range
from ..expr.nodes import walk
from ..problem.bound_exprs import Trees, trees
from ..problem.call import Cache, Call, Codes, Plan, Problem, scale_steps
from . import params, strides
from .kernels import registry, tma_operands
from .kernels.spec import Extent, Grid, KernelSpec, Request, Tiles
from .params import KINDS, Operand
from .source import NONE, Specialisation
from .strides import Lead, lead_of
from .tma import TensorMap
from .workspace import ArraySpec

_ADDRESS = struct.Struct("=Q")
ROW_ALIGNMENT = 16  # bytes, that a thread copies at once
_RESULT = {
    "forward": "out",
    "forward_codes": "out",
    "dq_rows": "dq",
}  # the result of parts that know two types of it


@dataclass(frozen=True)
class Launch:
    """The launch of one kernel.

    Attributes
    ----------
    special : Specialisation
        Which kernel is launched.
    grid : int
        The number of blocks.
    template : bytes
        The parameters of the kernel, with 0 in the places of `slots`.
    slots : tuple of (int, str)
        Byte offsets, each with the name of the array whose address belongs there. In the place of
        "seed" belongs the number itself.
    maps : tuple of TensorMap
        Maps of the arrays that the kernel copies by TMA. They are encoded and follow the
        parameters.
    """

    special: Specialisation
    grid: int
    template: bytes
    slots: tuple[tuple[int, str], ...]
    maps: tuple[TensorMap, ...] = ()

    def packed(self, addresses: Mapping[str, int]) -> bytearray:
        """Return the parameters with every address in its place."""
        packed = bytearray(self.template)
        for offset, name in self.slots:
            _ADDRESS.pack_into(packed, offset, addresses[name])
        return packed


@dataclass(frozen=True)
class Recipe:
    """The launches of a call, in order.

    Attributes
    ----------
    launches : tuple of Launch
        The launches. No grid is empty.
    scratch : dict of str to ArraySpec
        Memory that the launches need in addition to the call's arrays. A gradient that has scratch
        memory is computed there first, and then summed over the axes along which its input was
        broadcast.
    tables : tuple of array
        Arrays of look-ups. The one with index n has the name ``table n``.
    """

    launches: tuple[Launch, ...] = ()
    scratch: Mapping[str, ArraySpec] = field(default_factory=dict)
    tables: tuple[Any, ...] = ()
    all_zero: bool = False  # no entry or head: gradients of what was broadcast to it are 0
    atomic_dq: bool = False  # launches add to dq_accum or, without it, to dq, which starts as 0


class Writer:
    """Writes the launches of one call, with its expressions and the parameters of all its kernels.

    `arrays` maps the name of a field to an array and its number of trailing axes: 3 for (H, L, D),
    or 2 for (H, L).
    """

    def __init__(
        self,
        call: Call,
        facts: Target,
        arrays: Mapping[str, tuple[Any, int]],
        slope: bool,
        plan: Plan | None,
        count_tiles: bool,
    ) -> None:
        made = trees(call)
        self.call, self.facts = call, facts
        self.arrays = {name: array for name, (array, _) in arrays.items()}
        self.blocks = None if plan is None else (plan.block_q, plan.block_kv)
        self.generated = generate(
            made.allowed,
            made.classes,
            made.changed,
            made.slope if slope else None,
            None if made.allowed is None else key_range(made.allowed, call.problem),
            short=_is_short(call, made),
        )
        self.lead = _lead(call, arrays)
        self.launches: list[Launch] = []
        _check_size(self.generated.functions)
        problem = call.problem
        self.has_origins = problem.dropout > 0 and problem.whole is not None
        if self.has_origins:
            self.generated = _with_origins(self.generated, problem)
        drop_below = round(problem.dropout * 2.0**32)
        self.told: dict[str, Any] = {
            "batch": problem.batch,
            "lead_size": self.lead.sizes,
            "own_size": self.lead.sizes,
            "len_q": int(np.max(problem.len_q, initial=0)),
            "len_k": int(np.max(problem.len_k, initial=0)),
            "total_q": call.q.shape[-2],
            "total_k": keys_of(call),
            "heads": problem.heads,
            "heads_kv": problem.heads_kv,
            "group": group_of(problem),
            "scale": problem.scale,
            "drop_below": drop_below,
            "keep_scale": 1.0 / (1.0 - drop_below / 2.0**32),
            "ints": self.generated.ints,
            "floats": self.generated.floats,
            "tables": [strides.table(x) for x in self.generated.arrays],
            **{
                name: strides.operand(array, self.lead.strides[name], axes == 3)
                for name, (array, axes) in arrays.items()
            },
        }
        self.named = [*arrays, "seed" if isinstance(problem.seed, int) else "seed_gmem"]
        self.tables = [f"table {n}" for n in range(len(self.generated.arrays))]
        self.named += self.tables
        if count_tiles:
            self.named.append("tiles_visited")
        if call.offsets is not None:
            named = zip(("offsets_q", "offsets_k"), call.offsets, strict=True)
            self.named += [name for name, offsets in named if offsets is not None]
        if call.cache is not None:
            self._tell_cache(call.cache)
        if call.codes is not None:
            self.told |= {
                name: strides.rows_of_scale(scale, self.lead.strides[name])
                for name, scale in call.codes.scales.items()
            }
        if call.sink is not None:
            self.named.append("sink")
            self.told["kind_sink"] = KINDS[call.sink.dtype.name]

    def _tell_cache(self, cache: Cache) -> None:
        """Tell kernels the layout of lengths, table and pages."""
        call, lengths, table = self.call, cache.lengths, cache.table
        self.told["len_k"] = cache.capacity
        self.told["page_size"] = cache.page_size
        if isinstance(lengths, int):
            self.told["len_k"] = lengths
        else:
            self.named.append("lengths")
            self.told["kind_lengths"] = KINDS[lengths.dtype.name]
            self.told["length_step"] = lengths.strides[0] // lengths.itemsize
        if table is not None:
            self.named.append("table")
            steps = (stride // table.itemsize for stride in table.strides)
            self.told["table_batch"], self.told["table_step"] = steps
            self.told["kind_table"] = KINDS[table.dtype.name]
            self.told["pages"] = call.k.shape[0]
            self.told["k_page"], self.told["v_page"] = (
                x.strides[0] // x.itemsize for x in (call.k, call.v)
            )
        if cache.codes is not None:
            self.named += cache.codes.scales
            self.told |= _scales(cache.codes, paged=table is not None)

    def add(
        self,
        part: str,
        extent: Extent,
        fields: Mapping[str, Any] | None = None,
        named: tuple[str, ...] = (),
        adds_dq: bool = False,
        blocks: tuple[int, int] | None = None,
        shared: bool = False,
        team: int = 0,
    ) -> tuple[Grid, Tiles]:
        """Add the kernel that serves a part of the call, and return its grid and its tiles.

        `fields` override the common parameters, and `named` are additional addresses. `adds_dq`
        says whether the kernel adds its share of dq to memory. `blocks` are the queries and keys of
        a tile, if those of another kernel decide. `shared` and `team` are as in `Specialisation`.
        """
        problem = self.call.problem
        functions = self.generated.functions
        request = Request(
            problem,
            self.facts,
            self.call,
            self.arrays,
            self.lead,
            slope=functions.has_dscore,
            params_bytes=_size(functions),
            blocks=blocks or self.blocks,
        )
        spec, tiles, _ = registry.select(part, request)
        grid = spec.grid(extent, tiles)
        tma = tma_operands.use(spec.tma, request, tiles)
        if adds_dq and "dq_accum" in self.told:  # the kernel that reads the sums needs it, too
            sums = self.told["dq_accum"]
            self.told["dq_accum"] = sums._replace(col=spec.dq_accum_step)
        told = self.told | {"blocks": grid.blocks}
        addresses = [*self.named, *named]
        if spec.scores:
            functions = replace(functions, has_dscore=functions.has_dscore and spec.slope)
        else:
            functions = NONE
            told |= {"ints": (), "floats": (), "tables": ()}
            addresses = [name for name in addresses if name not in self.tables]
        cache, codes = self.call.cache, self.call.codes
        if cache is not None and spec.part in ("decode", "shared"):
            codes = cache.codes
        result = self.arrays[_RESULT[part]].dtype if part in _RESULT else problem.dtype
        stored, wide_result = problem.dtype.name, result != problem.dtype
        if part == "forward_codes" and problem.dtype.itemsize > 2:
            stored, wide_result = "bfloat16", True
        special = Specialisation(
            spec=spec,
            dtype=stored,
            d=problem.d if "d" in spec.sizes else 0,
            d_v=problem.d_v if "d_v" in spec.sizes else 0,
            tiles=tiles,
            packed=problem.packed,
            cached=cache is not None,
            paged=cache is not None and cache.table is not None,
            page_rows=_page_rows(self.call, spec),
            aligned=spec.aligned and _are_aligned(self.call),
            dropout=spec.scores and problem.dropout > 0,
            count_tiles=spec.scores and "tiles_visited" in self.named,
            functions=functions,
            atomic_dq=adds_dq,
            tma_store=tma.stores,
            origins=spec.scores and self.has_origins,
            k_codes=codes.k_form if codes is not None else None,
            v_codes=codes.v_form if codes is not None else None,
            wide_result=wide_result,
            resumes=part == "forward" and "out_before" in self.arrays,
            shared=shared,
            team=team,
            k_rows=self.call.codes is not None and self.told["k_scale"].row != 0,
            v_rows=self.call.codes is not None and self.told["v_scale"].row != 0,
        )
        check_grid(spec.name, max(grid.work_tiles, grid.size))
        told["tma_rows"] = next((x.rows for x in tma.maps if x.name == "k"), 0)
        if grid.size:
            layout = params.params(functions.num_ints, functions.num_floats, functions.num_tables)
            slots = tuple((layout.place(name), name) for name in addresses)
            template = layout.pack({**told, **(fields or {})})
            self.launches.append(Launch(special, grid.size, template, slots, tma.maps))
        return grid, tiles

    def extent(self, entries: tuple[int, ...], of_keys: bool = False) -> Extent:
        """Return the extent of a launch whose result has leading axes of the lengths `entries`."""
        problem = self.call.problem
        heads = problem.heads_kv if of_keys else problem.heads
        sms = self.facts.multiprocessors
        if problem.packed:
            totals = self.told["total_q"], self.told["total_k"]
            return Extent(*totals, heads, 1, problem.batch, sms)
        lengths = self.told["len_q"], self.told["len_k"]
        return Extent(*lengths, heads, math.prod(entries), 0, sms, differ=self.call.beside)


def _page_rows(call: Call, spec: KernelSpec) -> int:
    """Return the neighbouring positions of a cache that lie in the same page, for a kernel."""
    in_pages = call.cache is not None and call.cache.table is not None
    return spec.page_rows if in_pages and call.k.shape[-2] % spec.page_rows == 0 else 1


def _are_aligned(call: Call) -> bool:
    """Return whether rows of q, k and v are contiguous and begin at multiples of 16 bytes."""
    return all(
        x.strides[-1] == x.itemsize
        and not any(step % ROW_ALIGNMENT for step in x.strides[:-1])
        and not device_arrays.address(x) % ROW_ALIGNMENT
        for x in (call.q, call.k, call.v)
    )


def _scales(codes: Codes, paged: bool) -> dict[str, Any]:
    """Return how the scales of a cache lie in memory, by the names of kernels."""
    told: dict[str, Any] = {}
    for name, scale in codes.scales.items():
        page, head, row, group = (step // scale.itemsize for step in scale_steps(scale))
        entry = 0 if paged else page
        lead = (*(0,) * (params.MAX_LEAD - 1), entry)
        told[name] = Operand(lead=lead, head=head, row=row, col=group)
        told[f"{name}_page"] = page if paged else 0
    return told


def _with_origins(generated: Generated, problem: Problem) -> Generated:
    """Return expressions whose last numbers say where a piece begins, as dropout counts."""
    origins = problem.origin_q, problem.origin_k, problem.origin_b_h, problem.heads_of_entry
    functions = replace(generated.functions, num_ints=generated.functions.num_ints + len(origins))
    ints = (*generated.ints, *origins)
    return replace(generated, functions=functions, ints=ints)


def check_grid(kernel: str, blocks: int) -> None:
    """Refuse a launch of more blocks than devices take."""
    if blocks > MAX_GRID:
        raise ArgumentError(
            f"q: batch, heads and lengths make {blocks} blocks of {kernel}; expected at most "
            f"{MAX_GRID}. Split the batch over several calls."
        )


def _is_short(call: Call, made: Trees) -> bool:
    """Whether positions, lengths, heads, entries and the strides of tables fit into 32 bits."""
    problem = call.problem
    sizes = problem.batch, problem.heads, call.q.shape[-2], keys_of(call)
    strides = [
        abs(stride)
        for root in (made.allowed, made.changed)
        for node in (walk(root) if root is not None else ())
        if node.op == "lookup"
        for stride in node.value[0].strides
    ]
    return max(sizes) <= width.LIMIT and max(strides, default=0) < 2**31


def _size(has: Functions) -> int:
    """Return the size in bytes of the parameters of a kernel with these functions."""
    return params.params(has.num_ints, has.num_floats, has.num_tables).size


def _check_size(has: Functions) -> None:
    size = _size(has)
    if size > params.MAX_BYTES:
        raise ArgumentError(
            f"mask, score_mod: got {has.num_tables} arrays and {has.num_ints + has.num_floats} "
            f"numbers, which make {size} bytes of parameters; expected at most "
            f"{params.MAX_BYTES}. Join several arrays into one with another axis, or combine "
            "numbers before you pass them."
        )


def group_of(problem: Problem) -> int:
    """Return how many query heads share a key head."""
    return problem.heads // problem.heads_kv if problem.heads_kv else 1


def keys_of(call: Call) -> int:
    """Return an upper bound of the keys of an entry; for packed arrays, the number of all keys."""
    return int(call.k.shape[-2]) if call.cache is None else call.cache.capacity


def _lead(call: Call, arrays: Mapping[str, tuple[Any, int]]) -> Lead:
    problem = call.problem
    if call.cache is not None:
        # The entries form one axis. Pages and packed queries do not have it.
        sizes = (*(1,) * (params.MAX_LEAD - 1), problem.batch)
        own = {}
        for name, (array, axes) in arrays.items():
            no_entries = array.ndim == axes or array.shape[0] == 1
            paged = name in ("k", "v") and call.cache.table is not None
            step = 0 if no_entries or paged else array.strides[0] // array.itemsize
            own[name] = (*(0,) * (params.MAX_LEAD - 1), step)
        return Lead(sizes, own)
    if not problem.packed:
        return lead_of(problem.lead, arrays)
    # Offsets say where a sequence is, and arrays have no leading axes.
    sizes = (*(1,) * (params.MAX_LEAD - 1), problem.batch)
    return Lead(sizes, dict.fromkeys(arrays, (0,) * params.MAX_LEAD))
