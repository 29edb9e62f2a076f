"""The route of a call on a GPU: which kernels serve it, with which tiles, grids and parameters.

This is where the choice is made, once for each call; launches, plans, explanations, sizes of
workspaces and replays read it. A route is a function of shapes, strides, numbers and a device's
facts; addresses are filled in later. Nothing here touches CuPy or an array's elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..arrays.cuda_device import Target
from ..arrays.dtypes import accumulator
from ..arrays.unallocated import unallocated, unallocated_like
from ..expr.nodes import Expr
from ..problem import pack_gqa
from ..problem.call import Array, Call, Gradients, Plan, Problem, Results
from ..problem.encoding import NUMBERS
from ..problem.lookups import gradient_name
from ..problem.tangents import TangentResults, Tangents
from . import decode_route, offsets, rowwise, short_sequences, tile_lists
from .kernels import registry
from .kernels.spec import Extent, Request
from .lookups import Served
from .params import KINDS
from .workspace import (
    ArraySpec,
    GradientScratch,
    parts_of,
    parts_of_bias,
    scratch_of,
    with_own_dbias,
)
from .writer import KernelRoute, Launch, Recipe, Writer, request_of, step_of, with_names


def of(call: Call, target: Target) -> KernelRoute:
    """Return the route of a forward into new arrays, on a device that need not be there."""
    shape = (*call.problem.array_lead, *call.q.shape[-3:-1], call.problem.d_v)
    return forward(call, target, unallocated_like(call.q, shape, call.problem.dtype), None)


def of_gradients(call: Call, target: Target, deterministic: bool = False) -> KernelRoute:
    """Return the route of a backward into new arrays, on a device that need not be there."""
    shape = (*call.problem.array_lead, *call.q.shape[-3:-1], call.problem.d_v)
    out = unallocated_like(call.q, shape, call.problem.dtype)
    lse = unallocated(shape[:-1], call.problem.accumulator)
    owners = (call.q, call.k, call.v, call.bias, call.sink)
    gradients = (None if x is None else unallocated_like(x, x.shape) for x in owners)
    arrays = out, out, lse, None, Gradients(*gradients)
    return backward(call, target, *arrays, deterministic=deterministic)


def of_tangents(call: Call, target: Target) -> KernelRoute:
    """Return the route of a forward with tangents of all arrays, which are like these."""
    shape = (*call.problem.array_lead, *call.q.shape[-3:-1], call.problem.d_v)
    out = unallocated_like(call.q, shape, call.problem.dtype)
    lse = unallocated(shape[:-1], call.problem.accumulator)
    tangents = Tangents(call.q, call.k, call.v, call.bias, call.sink)
    return forward_tangent(call, target, tangents, (out, out, lse, lse))


def forward_tangent(
    call: Call,
    target: Target,
    tangents: Tangents,
    results: TangentResults,
    plan: Plan | None = None,
    count_tiles: bool = False,
) -> KernelRoute:
    """Return the route of out, lse, unless it is None, and their tangents.

    `plan` and `count_tiles` are as in `forward`.
    """
    out, tout, lse, tlse = results
    arrays = _arrays(call, out, _rows_of(call, out, lse))
    arrays |= {"tout": (tout, 3), "tlse": (_rows_of(call, out, tlse), 2)}
    arrays |= {name: (x, 3) for name, x in tangents.named.items() if name in ("tq", "tk", "tv")}
    how: dict[str, Any] = {"plan": plan, "count_tiles": count_tiles, "tangents": tangents}
    writer = Writer(call, target, arrays, slope=True, **how)
    if lse is None:
        writer.named.remove("lse")
        writer.named.remove("tlse")
    writer.add("tangents", writer.extent(writer.lead.sizes))
    return offsets.read_first(writer.route(call), call)


def forward(
    call: Call,
    target: Target,
    out: Array,
    lse: Array | None,
    plan: Plan | None = None,
    count_tiles: bool = False,
    before: Results | None = None,
) -> KernelRoute:
    """Return the route of out and, unless it is None, lse.

    A `plan` gives tiles instead of the table. Counting tiles needs special kernels, which add the
    number of tiles that were not EMPTY to the uint64 at ``tiles_visited``. `before` is the result
    over other keys, of the accumulator's type, which these keys join.
    """
    made = _forward(call, target, out, lse, plan, count_tiles, before)
    return offsets.read_first(made, call)


def _forward(
    call: Call,
    target: Target,
    out: Array,
    lse: Array | None,
    plan: Plan | None,
    count_tiles: bool,
    before: Results | None,
) -> KernelRoute:
    """Return the same of a call whose offsets have been read."""
    if call.rows.cache is not None:
        rows = _rows_of(call, out, lse)
        return decode_route.forward(call, target, out, rows, lse is not None)
    if call.encoding.operands:
        return _of_codes(call, target, out, lse, plan, count_tiles)
    return _of_numbers(call, target, out, lse, plan, count_tiles, before)


def _rows_of(call: Call, out: Array, lse: Any) -> Any:
    """Return lse, or what is like it."""
    return ArraySpec(out.shape[:-1], call.problem.accumulator) if lse is None else lse


def _arrays(call: Call, out: Any, lse: Any) -> dict[str, tuple[Any, int]]:
    """Return the arrays of a forward, with how many axes follow their leading ones."""
    arrays: dict[str, tuple[Any, int]] = {"q": (call.q, 3), "k": (call.k, 3), "v": (call.v, 3)}
    return arrays | {"out": (out, 3), "lse": (lse, 2)}


def _of_numbers(
    call: Call,
    target: Target,
    out: Array,
    lse: Array | None,
    plan: Plan | None,
    count_tiles: bool,
    before: Results | None = None,
    first: str = "",
) -> KernelRoute:
    """Return the route of a forward of numbers without a cache; `first` says what precedes it."""
    rows = _rows_of(call, out, lse)
    is_whole = call.problem.whole is None and before is None and out.dtype == call.problem.dtype
    if is_whole and plan is None and not count_tiles:
        choice = decode_route.choice_of(call, target, _arrays(call, out, rows))
        if choice is not None:
            wants_lse = lse is not None
            return decode_route.forward(call, target, out, rows, wants_lse, choice, first)
    written = [(out, 3), (rows, 2)]
    if before is not None:
        written += [(before[0], 3), (before[1], 2)]
    call, (out, rows, *others) = pack_gqa.joined(call, *written)
    arrays = _arrays(call, out, rows)
    if others:
        arrays |= {"out_before": (others[0], 3), "lse_before": (others[1], 2)}
    writer = Writer(call, target, arrays, plan=plan, count_tiles=count_tiles)
    if lse is None:
        writer.named.remove("lse")
    if is_whole and (short := short_sequences.list_others(writer, "forward")) is not None:
        short_sequences.add(writer, short, writer.lead.sizes, {})
    writer.add("forward", writer.extent(writer.lead.sizes), before=first)
    return writer.route(call)


def _of_codes(
    call: Call, target: Target, out: Array, lse: Any, plan: Plan | None, count_tiles: bool
) -> KernelRoute:
    """Return the route of a forward of codes: as they are, or of the numbers that they become."""
    arrays = _arrays(call, out, _rows_of(call, out, lse))
    arrays |= {name: (scale, 3) for name, scale in call.encoding.scales.items()}
    why = registry.widens(request_of(call, target, arrays, plan))
    if why is not None:
        return _of_widened(call, target, why, out, lse, plan, count_tiles)
    writer = Writer(call, target, arrays, plan=plan, count_tiles=count_tiles)
    if lse is None:
        writer.named.remove("lse")
    writer.add("forward_codes", writer.extent(writer.lead.sizes))
    return writer.route(call)


def _of_widened(
    call: Call,
    target: Target,
    why: str,
    out: Array,
    lse: Array | None,
    plan: Plan | None,
    count_tiles: bool,
) -> KernelRoute:
    """Return the route of codes that become numbers of the output's type in scratch memory."""
    codes, dtype = call.encoding, call.problem.dtype
    numbers: dict[str, Any] = {
        name: unallocated(getattr(call, name).shape, dtype) for name in "qkv"
    }
    first = f"turns codes of {codes.form.name} into {dtype} first, because {why}; then it "
    widened = replace(call, encoding=NUMBERS, **numbers)
    main = _of_numbers(widened, target, out, lse, plan, count_tiles, first=first)
    if not math.prod(out.shape[:-1]):
        return main  # without results, no codes are read
    scratch, names, steps = dict(main.recipe.scratch), {}, []
    for name, x in numbers.items():
        held, scale = f"{name}_numbers", f"{name}_scale"
        launch = rowwise.widen(getattr(call, name), codes.scales[scale], codes.form, x)
        launch = with_names(launch, {"codes": name, "scale": scale, "x": held})
        reason = partial(_words_of_rows, launch, target)
        step = step_of(launch, scratch, reason)
        computes = f"numbers of the codes of {name}"
        steps.append(replace(step, part="numbers", computes=computes))
        if x.size:
            scratch[held], names[name] = ArraySpec(x.shape, dtype), held
    steps += [
        replace(each, launch=with_names(each.launch, names), arrays=scratch) for each in main.steps
    ]
    launches = tuple(step.launch for step in steps if step.grid)
    recipe = replace(main.recipe, launches=launches, scratch=scratch)
    return replace(main, steps=tuple(steps), recipe=recipe)


def _words_of_rows(launch: Launch, target: Target) -> str:
    """Return in words what computes rows."""
    spec, dtype = launch.special.spec, launch.special.dtype
    method = spec.method.format(accumulator=accumulator(dtype))
    return f"{target.name} {method}"


def backward(
    call: Call,
    target: Target,
    do: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    gradients: Gradients,
    plan: Plan | None = None,
    count_tiles: bool = False,
    deterministic: bool = False,
    slope: Expr | None = None,
    served: Sequence[Served] = (),
) -> KernelRoute:
    """Return the route of all gradients; `plan` and `count_tiles` are as in `forward`.

    A `slope` takes the place of the derivative of the score changes. `served` are the gradients of
    look-ups, whose names are those of `problem.lookups.gradient_name`.

    Where a block has all keys, one kernel computes dk, dv and dq: five products of tiles. With more
    keys it may do so unless `deterministic`, and its blocks add dq to memory in any order; else
    there are two kernels, and seven products. Where a block has all of a head, it may compute
    delta, too, and is the only launch.
    """
    problem = call.problem
    if not problem.batch or not problem.heads:
        return KernelRoute(call, (), Recipe(all_zero=True))
    dq, dk, dv, dbias, dsink = gradients
    # Nobody else reads delta, or other scores' derivatives, and gradients have the rows' type.
    wide = any(x.dtype.name != problem.dtype.name for x in (dq, dk, dv))
    alone = slope is None and not served and not wide
    wants_dbias = dbias is not None and alone
    made = scratch_of_gradients(call, target, plan, deterministic, do, wants_dbias)
    scratch, atomic_dq, whole_dq = made.arrays, made.atomic_dq, made.whole_dq
    if dsink is not None and not dsink.flags.c_contiguous:
        scratch[parts_of("dsink")] = ArraySpec(dsink.shape, problem.accumulator)
    made_dk, made_dv = (made.part(name) or own for name, own in (("dk", dk), ("dv", dv)))
    arrays: dict[str, tuple[Any, int]] = {"q": (call.q, 3), "k": (call.k, 3), "v": (call.v, 3)}
    arrays |= {"out": (out, 3), "lse": (lse, 2)}
    arrays |= {"d_out": (do, 3), "dq": (dq, 3), "dk": (made_dk, 3), "dv": (made_dv, 3)}
    if made.own_delta and dsink is None:
        del scratch["delta"]  # nobody reads it
    else:
        arrays["delta"] = (scratch["delta"], 2)
    if dlse is not None:
        arrays["dlse"] = (dlse, 2)
    if "dq_accum" in scratch:
        arrays["dq_accum"] = (scratch["dq_accum"], 3)
    if dbias is not None:
        dbias = made.part("dbias") or dbias[(None,) * (3 - dbias.ndim)]
        arrays["dbias"] = (dbias, 3)
    else:
        scratch.pop(parts_of("dbias"), None)
    how: dict[str, Any] = {"plan": plan, "count_tiles": count_tiles, "by": slope}
    writer = Writer(call, target, arrays, slope=True, **how)
    writer.request = replace(writer.request, whole_heads=made.own_delta, wants_dbias=made.own_dbias)
    writer.scratch.update(scratch)
    writer.told |= {
        "kind_dq": KINDS[dq.dtype.name],
        "kind_dk": KINDS[made_dk.dtype.name],
        "kind_dv": KINDS[made_dv.dtype.name],
    }
    lead = writer.lead
    if "dq_accum" in scratch and made.key_parts == 1 and _is_own(call.q, problem):
        _add_singles(writer, scratch["dq_accum"])
    short = short_sequences.list_others(writer, "dkdv") if "dq_accum" in scratch else None
    if not made.own_delta:
        writer.add("delta", writer.extent(lead.sizes))
    own = lead.own("dk", "dv")
    extent = writer.extent((*own, made.key_parts), of_keys=True)
    computes = "dk, dv and, in any order, dq" if atomic_dq else "dk and dv"
    computes = "dk, dv and dq" if whole_dq else computes
    computes = f"delta, {computes}" if made.own_delta else computes
    computes += " and parts of dbias" * made.own_dbias
    after = f"; one kernel computes {computes}"
    if made.key_parts > 1:
        after += f"; {made.key_parts} blocks share the queries of a block of keys"
    fields: dict[str, Any] = {"own_size": own, "tasks": made.key_parts}
    if dbias is not None and made.own_dbias:
        extent, fields = _of_dbias(writer, dbias, made.bias_parts)
    if short is not None:
        short_sequences.add(writer, short, own, fields, stores_dq=True)
    parts = made.key_parts > 1
    writer.add(
        "dkdv", extent, fields, adds_dq=atomic_dq, stores_dq=whole_dq, parts=parts, after=after
    )
    own = lead.own("dq")
    if "dq_accum" in scratch:
        writer.add("dq_rows", writer.extent(own), {"own_size": own})
    elif not atomic_dq and not whole_dq:
        writer.add("dq", writer.extent(own), {"own_size": own})
    if dsink is not None:
        made_dsink = scratch.get(parts_of("dsink"), dsink)
        kind = {"kind_dsink": KINDS[made_dsink.dtype.name]}
        writer.add("sink", writer.extent(lead.sizes), kind, ("dsink",))
    if dbias is not None and not made.own_dbias:
        bias_gradient(writer, dbias, made.bias_parts)
    sums(writer, gradients)
    route, rows = writer.route(call, adds_dq=atomic_dq), (do, out, lse, dlse)
    for n, each in enumerate(served):
        route = _with_lookup(route, target, rows, each, gradient_name(n))
    return offsets.read_first(route, call)


def _add_singles(writer: Writer, sums: ArraySpec) -> None:
    """Add the kernels of lists that mark tiles of queries of one block of keys, where this pays.

    Kernels that are added afterwards store the dq of these, and leave it out of the sums.
    """
    spec, tiles, _ = registry.select("dkdv", writer.request)
    lists = tile_lists.of(writer.call, writer.classes, spec, tiles)
    lists = tile_lists.with_singles(lists, writer.classes, spec, tiles, sums)
    if lists is not None:
        blocks = tiles.block_q, tiles.block_kv
        writer.add_lists(blocks, lists)
        writer.add("singles", Extent(lists.single_words, 0, 1), blocks=blocks, lists=lists)
        writer.singles = lists


def _is_own(x: Array, problem: Problem) -> bool:
    """Whether no entries share an array."""
    return bool(math.prod(x.shape[:-3]) == problem.batch)


def scratch_of_gradients(
    call: Call,
    target: Target,
    plan: Plan | None = None,
    deterministic: bool = False,
    do: Array | None = None,
    wants_dbias: bool = True,
) -> GradientScratch:
    """Return the scratch memory of a backward; without `do`, the most that one may need.

    `wants_dbias` says whether blocks of keys may compute the gradient of a bias, too.
    """
    blocks = None if plan is None else (plan.block_q, plan.block_kv)
    request = Request(call.problem, target, blocks=blocks)
    whole = registry.has_all_keys(request)
    arrays = {"q": (call.q, 3), "k": (call.k, 3), "v": (call.v, 3), "d_out": (do, 3)}
    if call.rows.adjoin:
        # Longer sequences have other kernels, of which only those of sums give the same dq.
        whole = whole and not deterministic and do is not None
        if whole:
            whole = registry.stores_packed_dq(request_of(call, target, arrays, plan))
    else:  # what entries share has the sum of their dq
        whole = whole and _is_own(call.q, call.problem)
    atomic_dq = not whole and registry.adds_dq(request, deterministic)
    made = scratch_of(call, atomic_dq, whole, registry.shares_queries(request))
    shared = any(math.prod(x.shape[:-3]) != call.problem.batch for x in (call.k, call.v))
    if not whole or shared or call.rows.adjoin:
        return made
    known = {name: x for name, x in arrays.items() if x[0] is not None}
    wants_dbias = wants_dbias and call.bias is not None
    request = request_of(call, target, known, plan)
    request = replace(request, whole_heads=True, wants_dbias=wants_dbias)
    if wants_dbias and registry.makes_dbias(request):
        own = with_own_dbias(made, call)
        if do is not None:
            return own._replace(own_delta=True)
        return max(made, own, key=lambda x: x.bias_parts)
    return made if do is None else made._replace(own_delta=registry.makes_delta(request))


def _with_lookup(
    made: KernelRoute, target: Target, rows: tuple[Any, ...], served: Served, name: str
) -> KernelRoute:
    """Return the route of a backward with the gradient of a look-up, an array of that name.

    That is the gradient of a bias, of which dS is multiplied by another slope. `rows` are do, out,
    lse and dlse.
    """
    call, gradient, parts = made.call, served.gradient, parts_of(name)
    do, out, lse, dlse = rows
    scratch = dict(made.recipe.scratch)
    of_parts = scratch_of_lookup(call, gradient.shape)
    written: Any = gradient
    if of_parts is not None:
        scratch[parts] = of_parts
        written = ArraySpec(gradient.shape, of_parts.dtype)
    arrays: dict[str, tuple[Any, int]] = {"q": (call.q, 3), "k": (call.k, 3), "v": (call.v, 3)}
    arrays |= {"out": (out, 3), "lse": (lse, 2), "delta": (scratch["delta"], 2), "d_out": (do, 3)}
    arrays["dbias"] = (written, 3)
    if dlse is not None:
        arrays["dlse"] = (dlse, 2)
    writer = Writer(call, target, arrays, slope=served.slope is not None, by=served.slope)
    if of_parts is not None:
        writer.scratch[parts_of("dbias")] = of_parts
    count = 1 if of_parts is None else of_parts.shape[0]
    bias_gradient(writer, written, count, "lookup")
    sums(writer, Gradients(None, None, None, dbias=gradient))
    tables = list(made.recipe.tables)
    names = {"dbias": name, parts_of("dbias"): parts}
    for n, table in enumerate(writer.generated.arrays):
        known = [place for place, x in enumerate(tables) if x is table]
        names[f"table {n}"] = f"table {known[0] if known else len(tables)}"
        tables += [] if known else [table]
    more = (replace(step, launch=with_names(step.launch, names)) for step in writer.steps)
    steps = tuple(replace(step, arrays=scratch) for step in (*made.steps, *more))
    launches = tuple(step.launch for step in steps if step.grid)
    recipe = replace(made.recipe, launches=launches, scratch=scratch, tables=tuple(tables))
    return replace(made, steps=steps, recipe=recipe)


def scratch_of_lookup(call: Call, shape: tuple[int, ...]) -> ArraySpec | None:
    """Return the parts of the gradient of a look-up, given its axes as a bias; None: it has one."""
    parts = parts_of_bias(call, shape)
    return ArraySpec((parts, *shape), call.problem.accumulator) if parts > 1 else None


def bias_gradient(writer: Writer, dbias: Any, parts: int, part: str = "bias") -> None:
    """Add the kernel of dbias, or of its tangent, whose blocks write parts if there are several."""
    extent, fields = _of_dbias(writer, dbias, parts)
    shared = f"; {parts} blocks share the scores of a tile" if parts > 1 else ""
    writer.add(part, extent, fields, after=shared)


def _of_dbias(writer: Writer, dbias: Any, parts: int) -> tuple[Extent, dict[str, Any]]:
    """Return the extent of a launch whose blocks write parts of dbias, and its parameters."""
    heads, len_q, len_k = dbias.shape[-3:]
    own = writer.lead.own("dbias", rows=False)
    fields: dict[str, Any] = {
        "own_size": own,
        "bias_heads": heads,
        "bias_len_q": len_q,
        "bias_len_k": len_k,
        "kind_dbias": KINDS[dbias.dtype.name],
        "tasks": parts,
    }
    return Extent(len_q, len_k, heads, math.prod(own) * parts), fields


def sums(writer: Writer, gradients: Gradients) -> None:
    """Let kernels write parts to scratch memory, and add the kernel that sums these."""
    pairs = {}
    for name, gradient in gradients._asdict().items():
        parts = writer.scratch.get(parts_of(name))
        if gradient is not None and parts is not None:
            with_axes = parts.reshape((1,) * (3 - parts.ndim) + parts.shape)
            pairs[name] = parts_of(name), with_axes, gradient[(None,) * (3 - gradient.ndim)]
    if not pairs:
        return
    names = {name: parts_of(name) for name in pairs}
    writer.steps = [replace(step, launch=with_names(step.launch, names)) for step in writer.steps]
    launch = rowwise.sums(pairs, writer.call.problem.dtype.name)
    reason = partial(_words_of_rows, launch, writer.target)
    writer.steps.append(step_of(launch, writer.scratch, reason))
