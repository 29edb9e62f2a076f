"""The route of a backward with tangents on a GPU: see `route`.

A forward with tangents comes first, for the tangents of out and lse, then delta and its tangent,
then the kernels of tangents of gradients. Tensor cores compute all parts of a call, apart from the
tangent of a bias's gradient, or none: other kernels round no operand of a product, and read the
tangent of out before it is rounded. Every sum has a fixed order, unless the kernel of keys may add
the tangent of dq to memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..arrays.cuda_device import Target
from ..arrays.unallocated import unallocated, unallocated_like
from ..problem.call import Array, Call, Gradients, Plan, Results
from ..problem.tangents import SecondTangents, Tangents
from . import offsets, tile_lists
from .kernels import registry
from .kernels.spec import KernelSpec, Request
from .params import KINDS
from .route import bias_gradient, sums
from .workspace import ArraySpec, GradientScratch, parts_of, scratch_of
from .writer import KernelRoute, Recipe, Writer, with_names

WIDE = "tout wide"  # the name of the tangent of out before it is rounded


def of_second(call: Call, target: Target, deterministic: bool = False) -> KernelRoute:
    """Return the route of a backward along a direction in which all arrays have tangents."""
    shape = (*call.problem.array_lead, *call.q.shape[-3:-1], call.problem.d_v)
    out = unallocated_like(call.q, shape, call.problem.dtype)
    lse = unallocated(shape[:-1], call.problem.accumulator)
    owners = (call.q, call.k, call.v, call.bias, call.sink)
    gradients = (None if x is None else unallocated_like(x, x.shape) for x in owners)
    rows = {"do": out, "out": out, "lse": lse, "dlse": lse}
    tangents = SecondTangents(Tangents(*owners), out, lse)
    made = Gradients(*gradients), (out, lse)
    return backward(call, target, rows, tangents, *made, deterministic=deterministic)


def most_scratch(call: Call, target: Target) -> dict[str, ArraySpec]:
    """Return the scratch memory that a call needs at most, whatever has a tangent."""
    portable = not all(spec.tensor_cores for spec in _kernels(call, target, None))
    scratch, problem = _scratch(call, portable).arrays, call.problem
    if call.sink is not None:
        scratch[parts_of("dsink")] = ArraySpec(call.sink.shape, problem.accumulator)
    return {**scratch, **offsets.scratch(call)}


def _scratch(call: Call, portable: bool) -> GradientScratch:
    """Return what a call needs for rows, and for parts of gradients."""
    made, problem = scratch_of(call, atomic_dq=False), call.problem
    made.arrays["tdelta"] = made.arrays["delta"]
    if portable and problem.dtype != problem.accumulator:
        shape = (*made.arrays["delta"].shape, problem.d_v)
        made.arrays[WIDE] = ArraySpec(shape, problem.accumulator)
    return made


def backward(
    call: Call,
    target: Target,
    rows: Mapping[str, Array],
    tangents: SecondTangents,
    gradients: Gradients,
    results: Results,
    plan: Plan | None = None,
    count_tiles: bool = False,
    deterministic: bool = False,
) -> KernelRoute:
    """Return the route of the tangents of `gradients`, and of out and lse, which are `results`.

    `rows` are do, out, lse and, if it is given, dlse. `plan` and `count_tiles` are as in
    `route.forward`, `deterministic` as in `route.backward`.
    """
    problem = call.problem
    if not problem.batch or not problem.heads:
        return KernelRoute(call, (), Recipe(all_zero=True))
    how: dict[str, Any] = {"plan": plan, "count_tiles": count_tiles}
    kernels = _kernels(call, target, plan)
    portable = not all(spec.tensor_cores for spec in kernels)
    adds_dq = not deterministic and problem.dtype.name in kernels[0].atomic_dq
    made = _scratch(call, portable)
    scratch: dict[str, ArraySpec] = dict(made.arrays)
    is_wide = WIDE in scratch
    tout: Any = scratch.get(WIDE, results[0])
    first = _results(call, target, tangents.arrays, (tout, results[1]), portable, how)

    dq, dk, dv, dbias, dsink = gradients
    if dsink is not None and not dsink.flags.c_contiguous:
        scratch[parts_of("dsink")] = ArraySpec(dsink.shape, problem.accumulator)
    made_dk, made_dv = (made.part(name) or own for name, own in (("dk", dk), ("dv", dv)))
    arrays: dict[str, tuple[Any, int]] = {"q": (call.q, 3), "k": (call.k, 3), "v": (call.v, 3)}
    arrays |= {"out": (rows["out"], 3), "lse": (rows["lse"], 2), "d_out": (rows["do"], 3)}
    arrays |= {"delta": (scratch["delta"], 2), "tdelta": (scratch["tdelta"], 2)}
    arrays |= {"dq": (dq, 3), "dk": (made_dk, 3), "dv": (made_dv, 3)}
    arrays |= {"tout": (tout, 3), "tlse": (results[1], 2)}
    if is_wide:
        arrays["tout_rounded"] = (results[0], 3)
    optional = {"dlse": (rows.get("dlse"), 2), "tdlse": (tangents.tdlse, 2)}
    optional |= {"tdo": (tangents.tdo, 3)}
    optional |= {name: (getattr(tangents.arrays, name), 3) for name in ("tq", "tk", "tv")}
    arrays |= {name: pair for name, pair in optional.items() if pair[0] is not None}
    if dbias is not None:
        dbias = made.part("dbias") or dbias[(None,) * (3 - dbias.ndim)]
        arrays["dbias"] = (dbias, 3)
    else:
        scratch.pop(parts_of("dbias"), None)
    writer = Writer(call, target, arrays, True, tangents=tangents.arrays, second=True, **how)
    writer.scratch.update(scratch)
    writer.told |= {
        "kind_dq": KINDS[dq.dtype.name],
        "kind_dk": KINDS[made_dk.dtype.name],
        "kind_dv": KINDS[made_dv.dtype.name],
    }
    lead = writer.lead
    writer.add("tangent_delta", writer.extent(lead.sizes))
    if dsink is not None:
        kind = KINDS[scratch.get(parts_of("dsink"), dsink).dtype.name]
        extent = writer.extent(lead.sizes)
        writer.add("tangent_sink", extent, {"kind_dsink": kind}, ("dsink",))
    own = lead.own("dk", "dv")
    after = "; one kernel computes tangents of dk, dv and, in any order, dq" if adds_dq else ""
    fields, extent = {"own_size": own}, writer.extent(own, of_keys=True)
    writer.add("tangent_dkdv", extent, fields, adds_dq=adds_dq, after=after)
    own = lead.own("dq")
    if not adds_dq:
        writer.add("tangent_dq", writer.extent(own), {"own_size": own})
    if dbias is not None:
        bias_gradient(writer, dbias, made.bias_parts, "tangent_bias")
    sums(writer, gradients)
    if is_wide:
        names = {"tout": WIDE, "tout_rounded": "tout"}
        writer.steps = [
            replace(step, launch=with_names(step.launch, names)) for step in writer.steps
        ]
    # Second derivatives read no array that first ones do not: tables have the same names.
    assert all(x is y for x, y in zip(*(w.generated.arrays for w in (first, writer)), strict=True))
    writer.steps = [*(replace(step, arrays=writer.scratch) for step in first.steps), *writer.steps]
    return offsets.read_first(writer.route(call, adds_dq=adds_dq), call)


def _kernels(call: Call, target: Target, plan: Plan | None) -> list[KernelSpec]:
    """Return the kernels of the tangents of dk and dv, and of dq."""
    blocks = None if plan is None else (plan.block_q, plan.block_kv)
    request = Request(call.problem, target, call, blocks=blocks)
    return [registry.select(part, request).spec for part in ("tangent_dkdv", "tangent_dq")]


def _results(
    call: Call,
    target: Target,
    tangents: Tangents,
    results: tuple[Any, Array],
    portable: bool,
    how: Mapping[str, Any],
) -> Writer:
    """Return the writer of the step that computes the tangents of out and lse.

    The kernel stores out and lse first, and by the same threads: they go where their tangents
    overwrite them.
    """
    tout, tlse = results
    arrays: dict[str, tuple[Any, int]] = {"q": (call.q, 3), "k": (call.k, 3), "v": (call.v, 3)}
    arrays |= {"out": (tout, 3), "tout": (tout, 3), "lse": (tlse, 2), "tlse": (tlse, 2)}
    arrays |= {name: (x, 3) for name, x in tangents.named.items() if name in ("tq", "tk", "tv")}
    writer = Writer(call, target, arrays, slope=True, tangents=tangents, **how)
    choice = None
    if portable:
        spec = registry.portable("tangents")
        tiles = tile_lists.configured(spec, writer.request)
        choice = None if tiles is None else registry.Choice(spec, tiles)
    writer.add("tangents", writer.extent(writer.lead.sizes), choice=choice)
    held = WIDE if isinstance(tout, ArraySpec) else "tout"
    names = {"out": held, "tout": held, "lse": "tlse"}
    writer.steps = [replace(step, launch=with_names(step.launch, names)) for step in writer.steps]
    return writer
