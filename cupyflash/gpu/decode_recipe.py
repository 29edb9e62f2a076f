"""Recipes for calls with few queries and many keys, and for calls over a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays.cuda_device import Target
from ..problem.call import Array, Call, Plan
from .kernels import decode, registry
from .kernels.spec import Extent, Grid, Request, Tiles
from .workspace import ArraySpec
from .writer import Recipe, Writer, group_of, keys_of


def forward(call: Call, facts: Target, out: Array, lse: Any, want_lse: bool) -> Recipe:
    """Return the recipe for a call with few queries and many keys, or over a cache.

    Over a cache, a decode kernel serves entries with few queries, and a forward kernel those with
    many. If the numbers of packed queries are on the device, both are launched, and each skips the
    entries of the other.
    """
    arrays: dict[str, tuple[Any, int]] = {"q": (call.q, 3), "k": (call.k, 3), "v": (call.v, 3)}
    arrays |= {"out": (out, 3), "lse": (lse, 2)}
    writer = Writer(call, facts, arrays, False, None, False)
    if not want_lse:
        writer.named.remove("lse")
    few, many = entries_by_rows(call, facts)
    if _prefills(call, facts):
        writer.told["few_rows"] = decode.MOST_CACHED_ROWS
    else:
        writer.told["few_rows"] = 2**31 - 1
    scratch = {}
    if few:
        size = _add_decode(writer, _extent_of_tasks(call, facts))
        scratch["workspace"] = ArraySpec((size,), np.dtype(np.uint8))
    if many:
        extent = writer.extent(writer.lead.sizes)
        assert call.cache is not None
        writer.add("forward", extent._replace(differ=not isinstance(call.cache.lengths, int)))
    return Recipe(tuple(writer.launches), scratch, writer.generated.arrays)


def _add_decode(writer: Writer, extent: Extent) -> int:
    """Add the kernels of few queries and the one that joins; return their workspace."""
    call, named = writer.call, ("workspace",)
    choice = registry.select("decode", Request(call.problem, writer.facts, call))
    spec, tiles = choice.spec, choice.tiles
    grid, shared = spec.grid(extent, tiles), shared_of(call, writer.facts)
    fields = dict(decode.fields(grid, tiles, keys_of(call), shared.nodes))
    if shared.nodes:
        writer.add("shared", extent, fields, named, team=shared.team)
    writer.add("decode", extent, fields, named, shared=shared.nodes > 0)
    if grid.size:
        # Maxima are scores; logits where scores are changed, and in the portable kernel.
        has_scores = spec.tensor_cores and not writer.generated.functions.has_score
        fields["scale"] = abs(call.problem.scale) if has_scores else 1.0
        blocks = tiles.block_q, tiles.block_kv
        writer.add("join", extent, fields, named, blocks=blocks, shared=shared.nodes > 0)
    return _decode_bytes(call, writer.facts, grid, tiles)


def shared_of(call: Call, facts: Target) -> decode.Shared:
    """Return what is read once for all entries of a call over a cache.

    No bit depends on it. Where a kernel of other arithmetic serves, or where little is saved, each
    entry reads all of its keys.
    """
    problem, cache = call.problem, call.cache
    if cache is None or cache.shared < decode.NODE or problem.batch < 2:
        return decode.NOT_SHARED
    if problem.packed or not problem.heads_kv or not problem.len_q:
        return decode.NOT_SHARED
    choice = registry.shares(Request(problem, facts, call))
    if choice is None:
        return decode.NOT_SHARED
    nodes = cache.shared // decode.NODE
    keys = problem.heads_kv * nodes * decode.NODE
    saved = (problem.batch - 1) * keys * sum(x.shape[-1] * x.itemsize for x in (call.k, call.v))
    if saved < decode.FEWEST_SHARED_BYTES:
        return decode.NOT_SHARED
    group, queries = group_of(problem), int(problem.len_q)
    tiles = choice.tiles
    heads, most = decode.rows_of_task(group, tiles.block_q)
    entries = tiles.block_q // decode.most_rows(group, tiles.block_q, queries)
    warps = -(-problem.batch // entries) * -(-group // heads) * -(-queries // most)
    team = decode.team_of(tiles, warps)
    return decode.Shared(
        choice.spec.name, nodes, team, -(-warps // team), warps * tiles.block_q * keys
    )


def _prefills(call: Call, facts: Target) -> bool:
    """Return whether a forward kernel serves a call's entries with many queries."""
    cache = call.cache
    return cache is not None and cache.codes is None and registry.prefills(call.problem, facts)


def entries_by_rows(call: Call, facts: Target) -> tuple[bool, bool]:
    """Return whether a call may have entries for a decode kernel, and for a forward kernel."""
    if not _prefills(call, facts):
        return True, False
    rows = group_of(call.problem) * np.asarray(call.problem.len_q)
    is_few = rows <= decode.MOST_CACHED_ROWS
    return bool(is_few.any()), not is_few.all()


def plan(call: Call, facts: Target) -> Plan:
    """Return which kernel serves a call over a cache: if there are two, that of few queries."""
    few, many = entries_by_rows(call, facts)
    request = Request.of(call, facts)
    made = registry.plan(request, "decode" if few else "forward")
    if few and many:
        other = registry.select("forward", request).spec.name
        most = decode.MOST_CACHED_ROWS
        why = f"{other} serves entries whose heads that share keys have more than {most} queries"
        made = replace(made, reason=f"{made.reason}; {why}")
    if call.cache is not None and call.cache.shared:
        shared = shared_of(call, facts)
        why = f"each entry reads the first {call.cache.shared} positions by itself"
        if few and shared.nodes:
            most = shared.nodes * decode.NODE
            why = f"{shared.kernel} reads the first {most} positions once for all entries"
        made = replace(made, reason=f"{made.reason}; {why}")
    return made


def _extent_of_tasks(call: Call, facts: Target) -> Extent:
    problem = call.problem
    entries = (1, problem.batch) if problem.packed else (problem.batch, 0)
    sizes = int(call.q.shape[-2]), keys_of(call), problem.heads_kv, *entries
    return Extent(*sizes, facts.multiprocessors, group_of(problem))


def _decode_bytes(call: Call, facts: Target, grid: Grid, tiles: Tiles) -> int:
    problem = call.problem
    # All numbers of packed queries have the same workspace.
    longest = int(call.q.shape[-2])
    rows = decode.most_rows(group_of(problem), tiles.block_q, longest)
    sizes = rows, problem.d_v, problem.accumulator.itemsize, keys_of(call)
    return decode.nbytes(grid, tiles, *sizes, shared_of(call, facts).nodes)


def workspace_size(call: Call, facts: Target) -> int:
    """Return the size in bytes of the workspace for a call over a cache."""
    if not entries_by_rows(call, facts)[0]:
        return 0
    choice = registry.select("decode", Request(call.problem, facts, call))
    grid = choice.spec.grid(_extent_of_tasks(call, facts), choice.tiles)
    return _decode_bytes(call, facts, grid, choice.tiles)
