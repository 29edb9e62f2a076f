"""Routes of calls with few queries and many keys, and of calls over a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .. import masks
from ..arrays.cuda_device import Target
from ..problem.call import Array, Call
from ..problem.rows import UNKNOWN
from .call_code import keys_of
from .kernels import decode, registry
from .kernels.registry import Choice
from .kernels.spec import Extent, Request
from .workspace import ArraySpec
from .writer import KernelRoute, Writer, group_of, request_of


def choice_of(call: Call, target: Target, arrays: Mapping[str, tuple[Any, int]]) -> Choice | None:
    """Return the kernel for few queries and many keys if it serves a call on dense arrays."""
    if not decode.wanted(call.problem):
        return None
    return registry.find("decode", request_of(call, target, arrays))


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
    call = _without_full_mask(call)
    arrays: dict[str, tuple[Any, int]] = {"q": (call.q, 3), "k": (call.k, 3), "v": (call.v, 3)}
    writer = Writer(call, target, arrays | {"out": (out, 3), "lse": (lse, 2)})
    if not wants_lse:
        writer.named.remove("lse")
    kernels = _kernels(call, writer.request, choice)
    few, many = kernels.few, kernels.many
    writer.told["few_rows"] = decode.MOST_CACHED_ROWS if kernels.prefills else 2**31 - 1
    words = _words_of_shared(call, kernels.shared)
    if few is not None:
        writer.scratch |= scratch_of(call, target, kernels)
        others = ""
        if many is not None:
            others = (
                f"; {many.spec.name} serves entries whose heads that share keys have more than "
                f"{decode.MOST_CACHED_ROWS} queries"
            )
        _add_decode(writer, few, kernels, first, others + words)
    if many is not None:
        extent = writer.extent(writer.lead.sizes)._replace(differ=call.rows.differ)
        writer.add("forward", extent, choice=many, after=words if few is None else "")
    return writer.route(call, kernels.shared)


def _without_full_mask(call: Call) -> Call:
    """Return a call without its mask if that is the causal one and each entry has one query.

    Such a query sees every key, and kernels without a mask know so before they have read lengths.
    Where a decode kernel serves it, no bit depends on that. Those of many rows may have other tiles
    without a mask, and keep it.
    """
    problem, mask = call.problem, call.mask
    if mask is None or problem.whole is not None or problem.rows.known_q != 1:
        return call
    if group_of(problem) > decode.MOST_CACHED_ROWS:
        return call
    return replace(call, mask=None) if mask.structure == masks.causal().structure else call


class Kernels(NamedTuple):
    """The kernels of a call with few queries, or over a cache.

    Attributes
    ----------
    few, many : Choice or None
        The kernels of entries with few queries, and of those with many, if there may be some.
    prefills : bool
        Whether a kernel of entries with many queries serves the call, had it such entries.
    sharing : Choice or None
        The kernel of keys that entries share.
    shared : Shared
        What that reads.
    """

    few: Choice | None
    many: Choice | None
    prefills: bool
    sharing: Choice | None
    shared: decode.Shared


def _kernels(call: Call, request: Request, choice: Choice | None = None) -> Kernels:
    """Return the kernels that serve a call; `choice` is that of few queries if it is known."""
    many = None if not call.rows.takes_workspace else registry.find("forward", request)
    prefills = many is not None
    if many is not None:
        rows = group_of(call.problem) * np.asarray(call.problem.len_q)
        is_few = rows <= decode.MOST_CACHED_ROWS
        if is_few.size and is_few.all():
            many = None
        elif not is_few.any():
            return Kernels(None, many, prefills, None, decode.NOT_SHARED)
    choice = choice or registry.select("decode", request)
    sharing = registry.shares(request, choice) if _may_share(call) else None
    shared = decode.NOT_SHARED if sharing is None else _shared(call, sharing)
    return Kernels(choice, many, prefills, sharing, shared)


def scratch_of(call: Call, target: Target, kernels: Kernels | None = None) -> dict[str, ArraySpec]:
    """Return the scratch memory of a call with few queries, or over a cache."""
    if kernels is None:
        call = _without_full_mask(call)
        arrays = {name: (getattr(call, name), 3) for name in "qkv"}
        kernels = _kernels(call, request_of(call, target, arrays))
    if kernels.few is None or kernels.few.tiles.whole:
        return {}
    tiles = kernels.few.tiles
    grid = kernels.few.spec.grid(_extent_of_tasks(call, target), tiles)
    # All numbers of packed queries have the same workspace.
    rows = decode.most_rows(group_of(call.problem), tiles.block_q, int(call.q.shape[-2]))
    sizes = rows, call.problem.d_v, call.problem.accumulator.itemsize, keys_of(call)
    nbytes = decode.nbytes(grid, tiles, *sizes, kernels.shared.nodes)
    return {"workspace": ArraySpec((nbytes,), np.dtype(np.uint8))}


def _add_decode(writer: Writer, choice: Choice, kernels: Kernels, before: str, after: str) -> None:
    """Add the kernels of few queries, and the one that joins what they leave in a workspace.

    Blocks that have whole tasks leave nothing.
    """
    call, named, shared = writer.call, ("workspace",), kernels.shared
    extent, tiles = _extent_of_tasks(call, writer.target), choice.tiles
    if tiles.whole:
        after = f"; a block has all keys of its rows{after}"
        writer.add("decode", extent, choice=choice, before=before, after=after)
        return
    grid = choice.spec.grid(extent, tiles)
    fields = dict(decode.fields(grid, tiles, keys_of(call), shared.nodes))
    is_shared = shared.nodes > 0
    if is_shared:
        writer.add("shared", extent, fields, named, team=shared.team, choice=kernels.sharing)
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


def _shared(call: Call, sharing: Choice) -> decode.Shared:
    """Return what a kernel reads once for all entries of a call over a cache.

    No bit depends on it. Where little is saved, each entry reads all of its keys.
    """
    problem = call.problem
    nodes = problem.rows.shared // decode.NODE
    keys = problem.heads_kv * nodes * decode.NODE
    saved = (problem.batch - 1) * keys * sum(x.shape[-1] * x.itemsize for x in (call.k, call.v))
    if saved < decode.FEWEST_SHARED_BYTES:
        return decode.NOT_SHARED
    group, queries = group_of(problem), int(problem.len_q)
    tiles = sharing.tiles
    heads, most = decode.rows_of_task(group, tiles.block_q)
    entries = tiles.block_q // decode.most_rows(group, tiles.block_q, queries)
    warps = -(-problem.batch // entries) * -(-group // heads) * -(-queries // most)
    team = decode.team_of(tiles, warps)
    return decode.Shared(
        sharing.spec.name, nodes, team, -(-warps // team), warps * tiles.block_q * keys
    )


def _words_of_shared(call: Call, shared: decode.Shared) -> str:
    """Return in words who reads the positions that entries share, if there are some."""
    if not call.rows.shared:
        return ""
    if shared.nodes:
        most = shared.nodes * decode.NODE
        return f"; {shared.kernel} reads the first {most} positions once for all entries"
    return f"; each entry reads the first {call.rows.shared} positions by itself"


def _extent_of_tasks(call: Call, target: Target) -> Extent:
    problem = call.problem
    entries = problem.rows.entries(problem.batch)
    sizes = int(call.q.shape[-2]), keys_of(call), problem.heads_kv, *entries
    return Extent(*sizes, target.multiprocessors, group_of(problem))
