"""The writer of the steps of a route, to which routes add kernels.

A step depends on shapes, strides, numbers and the facts of a device. Addresses are filled in
later. Nothing here uses CuPy or reads elements of arrays.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ..arrays.cuda_device import MAX_GRID, Target
from ..errors import ArgumentError
from ..expr.cuda_functions import Functions, Generated
from ..expr.nodes import Expr
from ..lazy import cached_property
from ..problem import scalars
from ..problem.bound_exprs import trees
from ..problem.call import Cache, Call, Plan, Problem
from ..problem.encoding import NUMBERS
from ..problem.route import Route, Step
from ..problem.tangents import Tangents
from . import call_code, params, strides, tile_lists
from .call_code import keys_of
from .kernels import bias_tiles, decode, registry, short_packed, tma_operands
from .kernels.registry import Choice
from .kernels.spec import Extent, KernelSpec, Request
from .params import KINDS
from .specialisation import NONE, Specialisation
from .tile_lists import Lists
from .tma import TensorMap
from .workspace import ArraySpec

_ADDRESS = struct.Struct("=Q")
_OF_SINGLES = "delta", "dkdv", "dq_rows"  # parts that `Writer.singles` are for
_LANES = 32  # of a warp: the distance in `dq_accum` of two numbers of one lane
_OF_CODES = "forward_codes", "decode", "shared"  # parts of which codes change the kernel
_RESULT = {
    "forward": "out",
    "forward_codes": "out",
    "dq_rows": "dq",
    "tangents": "out",
    "tangent_delta": "tout",
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
        The parameters of the kernel; those in the places of `slots` mean nothing.
    slots : tuple of (int, str)
        Byte offsets, each with the name of the array whose address belongs there. In the places of
        "seed" and "len_k" belongs the number itself.
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
        Memory that the launches need in addition to the call's arrays.
    tables : tuple of array
        Arrays of look-ups. The one with index n has the name ``table n``.
    """

    launches: tuple[Launch, ...] = ()
    scratch: Mapping[str, ArraySpec] = field(default_factory=dict)
    tables: tuple[Any, ...] = ()
    all_zero: bool = False  # no entry or head: gradients of what was broadcast to it are 0
    atomic_dq: bool = False  # launches add to dq_accum or, without it, to dq, which starts as 0


@dataclass(frozen=True, eq=False)
class KernelStep(Step):
    """A step on a GPU.

    Attributes
    ----------
    launch : Launch
        Its launch.
    arrays : mapping of str to ArraySpec
        The scratch memory of the route, by name.
    """

    launch: Launch
    arrays: Mapping[str, ArraySpec]

    @property
    def special(self) -> Specialisation:
        """What the kernel is compiled for: its spec, its tiles, and every compile-time flag."""
        return self.launch.special

    @property
    def grid(self) -> int:
        """Number of blocks; with none of them, it is not launched."""
        return self.launch.grid

    @property
    def scratch(self) -> int:
        """Bytes of the route's scratch memory that it reads or writes."""
        names = {name for _, name in self.launch.slots} | {x.name for x in self.launch.maps}
        return sum(spec.nbytes for name, spec in self.arrays.items() if name in names)


@dataclass(frozen=True, eq=False)
class KernelRoute(Route):
    """The route of a call on a GPU.

    Attributes
    ----------
    recipe : Recipe
        Its launches, without those that have no blocks.
    shared : Shared
        What one of its kernels reads once for all entries of a cache.
    """

    steps: tuple[KernelStep, ...]
    recipe: Recipe
    shared: decode.Shared = decode.NOT_SHARED

    @property
    def scratch(self) -> int:
        """Bytes of scratch memory of all steps together."""
        return sum(spec.nbytes for spec in self.recipe.scratch.values())


def step_of(launch: Launch, scratch: Mapping[str, ArraySpec], why: Callable[[], str]) -> KernelStep:
    """Return the step of a launch."""
    spec, tiles = launch.special.spec, launch.special.tiles
    # The tiles of a call are those of its main kernel, which include what entries share.
    beside = spec.part in ("shared", "lists", "order")
    blocks = (0, 0) if beside or not tiles.block_kv else (tiles.block_q, tiles.block_kv)
    return KernelStep(spec.name, spec.part, spec.computes, *blocks, why, launch, scratch)


def with_names(launch: Launch, names: Mapping[str, str]) -> Launch:
    """Return a launch that takes the addresses of other names."""
    slots = tuple((place, names.get(name, name)) for place, name in launch.slots)
    maps = tuple(each._replace(name=names.get(each.name, each.name)) for each in launch.maps)
    return replace(launch, slots=slots, maps=maps)


def request_of(
    call: Call,
    target: Target,
    arrays: Mapping[str, tuple[Any, int]],
    plan: Plan | None = None,
) -> Request:
    """Return what the choice of a kernel depends on, as far as it needs no expressions.

    `arrays` are as in `Writer`. A `plan` gives tiles.
    """
    others = {name: array for name, (array, _) in arrays.items()}
    blocks = None if plan is None else (plan.block_q, plan.block_kv)
    rows, bias = call.rows, call.bias
    lead = strides.lead_of(
        call.problem.lead,
        arrays,
        apart=rows.apart,
        by_offsets=rows.adjoin,
        optional=None if bias is None else {bias_tiles.NAME: (bias, min(bias.ndim, 3))},
    )
    return Request(call.problem, target, call, others, lead, blocks=blocks)


class Writer:
    """Writes the launches of one call, with its expressions and the parameters of all its kernels.

    `arrays` maps the name of a field to an array and its number of trailing axes: 3 for (H, L, D),
    or 2 for (H, L). `slope` and `by` are as in `call_code.of`. With `second`, `tangents` are those
    of a backward; `reduces` says whether kernels are those of reductions.
    """

    def __init__(
        self,
        call: Call,
        target: Target,
        arrays: Mapping[str, tuple[Any, int]],
        slope: bool = False,
        plan: Plan | None = None,
        count_tiles: bool = False,
        tangents: Tangents | None = None,
        by: Expr | None = None,
        second: bool = False,
        reduces: bool = False,
    ) -> None:
        self.call, self.target, self._slope, self._is_by = call, target, slope, by is not None
        request = request_of(call, target, arrays, plan)
        self.generated = call_code.of(call, slope, tangents, by, second)
        functions, self.has_tangents = self.generated.functions, tangents is not None
        self.is_second, self.reduces = second, reduces
        size = self._layout(functions).size
        call_code.check_size(functions, size)
        self.request = replace(request, slope=functions.has_dscore, params_bytes=size)
        self.classes = tile_lists.classes_of(trees(call), functions.has_range)
        assert self.request.lead is not None
        self.arrays, self.lead = self.request.arrays, self.request.lead
        self.steps: list[KernelStep] = []
        self.scratch: dict[str, ArraySpec] = {}
        self.singles: Lists | None = None  # lists that mark tiles, for kernels added after them
        self.listed = False  # whether kernels that are added are for sequences of a list
        problem = call.problem
        drop_below = scalars.drop_below(problem.dropout)
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
            "keep_scale": 1.0 / (1.0 - drop_below / scalars.DRAWS),
            **call_code.constants(self.generated),
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
        self.named += call.rows.offsets
        call.rows.tell(self)
        of_rows = [f"{name}_scale" for name in call.encoding.operands]
        self.told |= {
            name: strides.rows_of_scale(call.encoding.scales[name], self.lead.strides[name])
            for name in of_rows
        }
        # Whether rows of keys and of values have scales of their own.
        self.has_scales = {name: self.told[name].row != 0 for name in of_rows}
        if call.sink is not None:
            self.named.append("sink")
            self.told["kind_sink"] = KINDS[call.sink.dtype.name]
        if tangents is not None and tangents.tsink is not None:
            self.named.append("tsink")
            self.told["kind_tsink"] = KINDS[tangents.tsink.dtype.name]

    def _layout(self, has: Functions) -> params.Layout:
        """Return the layout of the parameters of a kernel with these functions."""
        kind = self.has_tangents, self.is_second, self.reduces
        return params.params(has.num_ints, has.num_floats, has.num_tables, *kind)

    @cached_property
    def without_bias(self) -> Generated:
        """The code of the call's expressions for kernels that load the bias in tiles."""
        return call_code.of(replace(self.call, bias=None), self._slope)

    def _places(self, names: Iterable[str], code: Generated) -> list[tuple[str, str]]:
        """Return fields of parameters that are addresses, and the names of these.

        Of the tables, kernels are told those that their code reads, in its order.
        """
        found = [(name, name) for name in names if name not in self.tables]
        for n, array in enumerate(code.arrays):
            found.append((f"table {n}", self._table_of(array)))
        return found

    def _table_of(self, array: Any) -> str:
        """Return the name of the address of an array that expressions read."""
        return next(f"table {n}" for n, known in enumerate(self.generated.arrays) if known is array)

    def tell_cache(self, cache: Cache) -> None:
        """Tell kernels the layout of lengths, table and pages."""
        call, lengths, table = self.call, cache.lengths, cache.table
        self.told["len_k"] = cache.capacity
        self.told["page_size"] = cache.page_size
        if isinstance(lengths, int):
            self.named.append("len_k")  # the number itself
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
        self.named += cache.encoding.scales
        self.told |= strides.scales(cache.encoding, paged=table is not None)

    def add(
        self,
        part: str,
        extent: Extent,
        fields: Mapping[str, Any] | None = None,
        named: tuple[str, ...] = (),
        adds_dq: bool = False,
        stores_dq: bool = False,
        parts: bool = False,
        short: bool = False,
        blocks: tuple[int, int] | None = None,
        shared: bool = False,
        team: int = 0,
        choice: Choice | None = None,
        before: str = "",
        after: str = "",
        lists: Lists | None = None,
    ) -> None:
        """Add the kernel that serves a part of the call, after that of its lists, if it reads some.

        `fields` override the common parameters, and `named` are additional addresses. `adds_dq`
        says whether the kernel adds its share of dq to memory, `stores_dq` whether it stores all of
        dq, `parts` whether it computes parts of dk and dv, and `short` whether it is for short
        sequences alone. `blocks` are the queries and keys of a tile, if another kernel's decide.
        `shared` and `team` are as in `Specialisation`. `choice` is the kernel if it was selected;
        `before` and `after` are as in `registry.reason`. `lists` are those that the kernel writes.
        """
        problem = self.call.problem
        request = self.request if blocks is None else replace(self.request, blocks=blocks)
        choice = choice or registry.select(part, request)
        spec, tiles = choice.spec, choice.tiles
        writes_lists, singles = lists is not None, self.singles if part in _OF_SINGLES else None
        if lists is None:
            lists = singles or tile_lists.of(self.call, self.classes, spec, tiles)
            if lists is not None and spec.lists:
                after += "; it reads which tiles the mask leaves from lists"
                if singles is None:
                    self.add_lists((tiles.block_q, tiles.block_kv), lists)
                else:
                    after += ", and stores dq of those that one block of keys alone sees"
        assert not adds_dq or problem.dtype.name in spec.atomic_dq
        has_keys = spec.whole_dq and (short or self.told["len_k"] <= tiles.block_kv)
        assert not stores_dq or has_keys, "blocks have all keys"
        listed = self.listed and not short and part in short_packed.OF_LISTED
        grid, resident = spec.grid(extent, tiles), extent.multiprocessors * tiles.resident_blocks
        grid = short_packed.in_turns(part, grid, resident) if listed else grid
        tma = tma_operands.use(spec.tma, request, tiles)
        adjacent_dq = adds_dq and request.device.capability >= spec.adjacent_dq
        if adds_dq and "dq_accum" in self.told:  # the kernel that reads the sums needs it, too
            sums = self.told["dq_accum"]
            self.told["dq_accum"] = sums._replace(col=1 if adjacent_dq else _LANES)
        told = self.told | {"blocks": grid.blocks}
        addresses = [*self.named, *named]
        code = self.without_bias if tiles.bias_stages else self.generated
        functions = code.functions
        if tiles.bias_stages:
            assert not self._is_by, "the derivative would read the bias, too"
            told |= call_code.constants(code) | {"bias": bias_tiles.operand(request)}
        if spec.scores:
            functions = replace(functions, has_dscore=functions.has_dscore and spec.slope)
        else:
            code, functions = Generated(NONE), NONE
            told |= call_code.constants(code)
        if lists is not None:
            told["tables"] = [*told["tables"], lists.table]
            functions = replace(functions, num_tables=functions.num_tables + 1)
        if spec.operands is not None:
            others = self.arrays.keys() - spec.operands
            addresses = [name for name in addresses if name not in others]
        codes = self.call.encoding if spec.part in _OF_CODES else NUMBERS
        result = self.arrays[_RESULT[part]].dtype if part in _RESULT else problem.dtype
        stored, wide_result = problem.dtype.name, result != problem.dtype
        if part == "forward_codes" and problem.dtype.itemsize > 2:
            stored, wide_result = "bfloat16", True
        if writes_lists or part == "long":
            stored, wide_result = "float32", False  # whatever the type of the call
        special = Specialisation(
            spec=spec,
            dtype=stored,
            d=problem.d if "d" in spec.sizes else 0,
            d_v=problem.d_v if "d_v" in spec.sizes else 0,
            tiles=tiles,
            **self.call.rows.flags,
            page_rows=_page_rows(self.call, spec),
            aligned=spec.aligned and strides.are_aligned(self.call),
            lists=lists is not None and spec.lists != "",
            singles=singles is not None,
            dropout=spec.scores and problem.dropout > 0 and not writes_lists,
            count_tiles=spec.scores and "tiles_visited" in self.named and not writes_lists,
            functions=functions,
            bias=bias_tiles.kind(request) if tiles.bias_stages else "",
            atomic_dq=adds_dq or stores_dq,
            whole_dq=stores_dq,
            only_short=short,
            only_long=listed,
            adjacent_dq=adjacent_dq,
            parts=parts,
            tma_store=tma.stores,
            origins=spec.scores and call_code.has_origins(problem),
            k_codes=codes.k_form,
            v_codes=codes.v_form,
            wide_result=wide_result,
            resumes=part == "forward" and "out_before" in self.arrays,
            shared=shared,
            team=team,
            k_rows=self.has_scales.get("k_scale", False),
            v_rows=self.has_scales.get("v_scale", False),
            tq="tq" in self.arrays,
            tk="tk" in self.arrays,
            tv="tv" in self.arrays,
            tdo="tdo" in self.arrays,
        )
        check_grid(spec.name, max(grid.work_tiles, grid.size))
        maps, places = tma.maps, self._places(addresses, code)
        if tiles.bias_stages:
            table = self._table_of(self.call.bias)
            places.append((bias_tiles.NAME, table))
            maps = tuple(x._replace(name=table) if x.name == bias_tiles.NAME else x for x in maps)
        told["tma_rows"] = next((x.rows for x in tma.maps if x.name == "k"), 0)
        layout = self._layout(functions)
        slots = [(layout.place(x), name) for x, name in places]
        if lists is not None:
            of_lists = f"tiles of {spec.lists or ('keys' if lists.of_keys else 'queries')}"
            slots.append((layout.place(f"table {functions.num_tables - 1}"), of_lists))
            self.scratch[of_lists] = lists.array
        template = layout.pack({**told, **(fields or {})})
        launch = Launch(special, grid.size, template, tuple(slots), maps)
        why = partial(registry.reason, choice, request, before, after)
        self.steps.append(step_of(launch, self.scratch, why))

    def add_lists(self, blocks: tuple[int, int], lists: Lists) -> None:
        """Add the kernels that write lists for a kernel with these tiles."""
        self.add("lists", Extent(lists.word_count, 0, 1), blocks=blocks, lists=lists)
        if lists.ordered:
            self.add("order", Extent(lists.entries * lists.heads, 0, 1), blocks=blocks, lists=lists)

    def route(
        self, call: Call, shared: decode.Shared = decode.NOT_SHARED, adds_dq: bool = False
    ) -> KernelRoute:
        """Return the route of the kernels that were added; the arguments are its fields."""
        launches = tuple(step.launch for step in self.steps if step.grid)
        tables = self.generated.arrays
        recipe = Recipe(launches, self.scratch, tables, atomic_dq=adds_dq)
        return KernelRoute(call, tuple(self.steps), recipe, shared)

    def extent(self, entries: tuple[int, ...], of_keys: bool = False) -> Extent:
        """Return the extent of a launch whose result has leading axes of the lengths `entries`."""
        problem = self.call.problem
        heads = problem.heads_kv if of_keys else problem.heads
        sms = self.target.multiprocessors
        longest = self.told["len_q"], self.told["len_k"]
        lengths = problem.rows.extent(longest, (self.told["total_q"], self.told["total_k"]))
        entries = problem.rows.entries(math.prod(entries))
        return Extent(*lengths, heads, *entries, sms, differ=self.call.beside, longest=longest)


def _page_rows(call: Call, spec: KernelSpec) -> int:
    """Return the neighbouring positions of a cache that lie in the same page, for a kernel."""
    in_pages = "k" in call.rows.apart
    return spec.page_rows if in_pages and call.k.shape[-2] % spec.page_rows == 0 else 1


def check_grid(kernel: str, blocks: int) -> None:
    """Refuse a launch of more blocks than devices take."""
    if blocks > MAX_GRID:
        raise ArgumentError(
            f"q: batch, heads and lengths make {blocks} blocks of {kernel}; expected at most "
            f"{MAX_GRID}. Split the batch over several calls."
        )


def group_of(problem: Problem) -> int:
    """Return how many query heads share a key head."""
    return problem.heads // problem.heads_kv if problem.heads_kv else 1
