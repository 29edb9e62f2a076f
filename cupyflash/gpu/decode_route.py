"""Routes of calls with few queries and many keys, and of calls over a cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.cuda_device import Target
from ..problem.call import Array, Call
from ..problem.rows import UNKNOWN
from .kernels import decode, registry
from .kernels.registry import Choice
from .kernels.spec import Extent, Request
from .workspace import ArraySpec
from .writer import KernelRoute, Writer, group_of, keys_of


def choice_of(request: Request) -> Choice | None:
    """Return the kernel for few queries and many keys if it serves a call on dense arrays."""
    return registry.find("decode", request) if decode.wanted(request.problem) else None


def forward(
    call: Call,
    target: Target,
    out: Array,
    lse: Any,
    wants_lse: bool,
    choice: Choice | None = None,
    first: str = "",
) -> KernelRoute:
    """Return the route of a call over a cache, or of one that the kernel `choice` serves.

    `first` says what precedes it.

    Over a cache, a decode kernel serves entries with few queries, and a forward kernel those with
    many. If the numbers of packed queries are on the device, both are launched, and each skips the
    entries of the other.
    """
    arrays: dict[str, tuple[Any, int]] = {"q": (call.q, 3), "k": (call.k, 3), "v": (call.v, 3)}
    arrays |= {"out": (out, 3), "lse": (lse, 2)}
    writer = Writer(call, target, arrays)
    if not wants_lse:
        writer.named.remove("lse")
    request = writer.request
    for_many = registry.find("forward", request) if choice is None else None
    few, many = _entries_by_rows(call, for_many is not None)
    many = many or not few  # without any entry, a forward kernel has no blocks
    writer.told["few_rows"] = 2**31 - 1 if for_many is None else decode.MOST_CACHED_ROWS
    shared, others = decode.NOT_SHARED, ""
    if few and many:
        assert for_many is not None
        others = (
            f"; {for_many.spec.name} serves entries whose heads that share keys have more than "
            f"{decode.MOST_CACHED_ROWS} queries"
        )
    if few:
        choice = choice or registry.select("decode", request)
        shared_by = registry.shares(request, choice) if _may_share(call) else None
        shared = _shared(call, shared_by)
        _add_decode(writer, choice, shared_by, shared, first, others)
    if many:
        extent = writer.extent(writer.lead.sizes)._replace(differ=call.rows.differ)
        after = "" if few else _words_of_shared(call, shared)
        writer.add("forward", extent, choice=for_many, after=after)
    return writer.route(call, shared)


def _add_decode(
    writer: Writer,
    choice: Choice,
    shared_by: Choice | None,
    shared: decode.Shared,
    before: str,
    after: str,
) -> None:
    """Add the kernels of few queries, and the one that joins what they leave in a workspace."""
    call, named = writer.call, ("workspace",)
    extent, tiles = _extent_of_tasks(call, writer.target), choice.tiles
    grid = choice.spec.grid(extent, tiles)
    # All numbers of packed queries have the same workspace.
    rows = decode.most_rows(group_of(call.problem), tiles.block_q, int(call.q.shape[-2]))
    sizes = rows, call.problem.d_v, call.problem.accumulator.itemsize, keys_of(call)
    nbytes = decode.nbytes(grid, tiles, *sizes, shared.nodes)
    writer.scratch["workspace"] = ArraySpec((nbytes,), np.dtype(np.uint8))
    fields = dict(decode.fields(grid, tiles, keys_of(call), shared.nodes))
    is_shared = shared.nodes > 0
    if is_shared:
        writer.add("shared", extent, fields, named, team=shared.team, choice=shared_by)
    after += _words_of_shared(call, shared)
    writer.add(
        "decode", extent, fields, named, shared=is_shared, choice=choice, before=before, after=after
    )
    # Maxima are scores; logits where scores are changed, and in the portable kernel.
    has_scores = choice.spec.tensor_cores and not writer.generated.functions.has_score
    fields["scale"] = abs(call.problem.scale) if has_scores else 1.0
    blocks = tiles.block_q, tiles.block_kv
    writer.add("join", extent, fields, named, blocks=blocks, shared=is_shared)


def _may_share(call: Call) -> bool:
    """Return whether entries share so many keys that a kernel might read them once for all."""
    problem = call.problem
    if problem.rows.shared < decode.NODE or problem.batch < 2:
        return False
    return problem.heads_kv > 0 and 0 < problem.rows.known_q < UNKNOWN


def _shared(call: Call, shared_by: Choice | None) -> decode.Shared:
    """Return what a kernel reads once for all entries of a call over a cache.

    No bit depends on it. Where the kernel of the other keys has other arithmetic, or where little
    is saved, each entry reads all of its keys.
    """
    problem = call.problem
    if shared_by is None:
        return decode.NOT_SHARED
    nodes = problem.rows.shared // decode.NODE
    keys = problem.heads_kv * nodes * decode.NODE
    saved = (problem.batch - 1) * keys * sum(x.shape[-1] * x.itemsize for x in (call.k, call.v))
    if saved < decode.FEWEST_SHARED_BYTES:
        return decode.NOT_SHARED
    group, queries = group_of(problem), int(problem.len_q)
    tiles = shared_by.tiles
    heads, most = decode.rows_of_task(group, tiles.block_q)
    entries = tiles.block_q // decode.most_rows(group, tiles.block_q, queries)
    warps = -(-problem.batch // entries) * -(-group // heads) * -(-queries // most)
    team = decode.team_of(tiles, warps)
    return decode.Shared(
        shared_by.spec.name, nodes, team, -(-warps // team), warps * tiles.block_q * keys
    )


def _words_of_shared(call: Call, shared: decode.Shared) -> str:
    """Return in words who reads the positions that entries share, if there are some."""
    if not call.rows.shared:
        return ""
    if shared.nodes:
        most = shared.nodes * decode.NODE
        return f"; {shared.kernel} reads the first {most} positions once for all entries"
    return f"; each entry reads the first {call.rows.shared} positions by itself"


def _entries_by_rows(call: Call, has_forward: bool) -> tuple[bool, bool]:
    """Return whether a call may have entries for a decode kernel, and for a forward kernel."""
    if not has_forward:
        return True, False
    rows = group_of(call.problem) * np.asarray(call.problem.len_q)
    is_few = rows <= decode.MOST_CACHED_ROWS
    return bool(is_few.any()), not is_few.all()


def _extent_of_tasks(call: Call, target: Target) -> Extent:
    problem = call.problem
    entries = problem.rows.entries(problem.batch)
    sizes = int(call.q.shape[-2]), keys_of(call), problem.heads_kv, *entries
    return Extent(*sizes, target.multiprocessors, group_of(problem))
