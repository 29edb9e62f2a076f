"""The launches that make up a call on a GPU, as data: kernels, grids, parameters.

A recipe is a function of shapes, strides, numbers and a device's facts; addresses are filled in
later. Nothing here touches CuPy or an array's elements.
"""

from __future__ import annotations

import math
from typing import Any

from ..arrays.cuda_device import Target
from ..problem import pack_gqa
from ..problem.call import Array, Call, Gradients, Plan, Results
from . import decode_recipe, params, strides
from .kernels import registry
from .kernels.spec import Extent, Request
from .params import KINDS
from .workspace import ArraySpec, scratch_of
from .writer import Recipe, Writer


def forward(
    call: Call,
    facts: Target,
    out: Array,
    lse: Array | None,
    plan: Plan | None = None,
    count_tiles: bool = False,
    before: Results | None = None,
) -> Recipe:
    """Return the recipe of out and, unless it is None, lse.

    A `plan` gives tiles instead of the table. Counting tiles needs special kernels, which add the
    number of tiles that were not EMPTY to the uint64 at ``tiles_visited``. `before` is the result
    over other keys, of the accumulator's type, which these keys join.
    """
    assert before is None or (call.cache is None and call.codes is None)
    rows = ArraySpec(out.shape[:-1], call.problem.accumulator) if lse is None else lse
    if not math.prod(rows.shape):
        return Recipe()
    if call.cache is not None or (
        plan is None
        and not count_tiles
        and call.problem.whole is None
        and before is None
        and out.dtype == call.problem.dtype
        and call.codes is None
        and registry.decodes(call.problem, facts)
    ):
        return decode_recipe.forward(call, facts, out, rows, lse is not None)
    part = "forward" if call.codes is None else "forward_codes"
    written = [(out, 3), (rows, 2)]
    if before is not None:
        written += [(before[0], 3), (before[1], 2)]
    if call.codes is None:
        call, (out, rows, *others) = pack_gqa.joined(call, *written)
        before = (others[0], others[1]) if others else None
    arrays: dict[str, tuple[Any, int]] = {"q": (call.q, 3), "k": (call.k, 3), "v": (call.v, 3)}
    arrays |= {"out": (out, 3), "lse": (rows, 2)}
    if before is not None:
        arrays |= {"out_before": (before[0], 3), "lse_before": (before[1], 2)}
    if call.codes is not None:
        arrays |= {name: (scale, 3) for name, scale in call.codes.scales.items()}
    writer = Writer(call, facts, arrays, False, plan, count_tiles)
    if lse is None:
        writer.named.remove("lse")
    writer.add(part, writer.extent(writer.lead.sizes))
    return Recipe(tuple(writer.launches), {}, writer.generated.arrays)


def backward(
    call: Call,
    facts: Target,
    do: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    gradients: Gradients,
    plan: Plan | None = None,
    count_tiles: bool = False,
    deterministic: bool = False,
) -> Recipe:
    """Return the recipe of all gradients; `plan` and `count_tiles` are as in `forward`.

    Unless `deterministic`, one kernel may compute dk, dv and dq, and its blocks add dq to memory in
    any order: five products of tiles instead of seven.
    """
    problem = call.problem
    if not problem.batch or not problem.heads:
        return Recipe(all_zero=True)
    dq, dk, dv, dbias, dsink = gradients
    blocks = None if plan is None else (plan.block_q, plan.block_kv)
    atomic_dq = registry.adds_dq(Request(problem, facts, blocks=blocks), deterministic)
    scratch = scratch_of(call, atomic_dq)
    if dsink is not None and not dsink.flags.c_contiguous:
        scratch["dsink"] = ArraySpec(dsink.shape, dsink.dtype)
    made_dk, made_dv = (scratch.get(name, own) for name, own in (("dk", dk), ("dv", dv)))
    arrays: dict[str, tuple[Any, int]] = {"q": (call.q, 3), "k": (call.k, 3), "v": (call.v, 3)}
    arrays |= {"out": (out, 3), "lse": (lse, 2), "delta": (scratch["delta"], 2)}
    arrays |= {"d_out": (do, 3), "dq": (dq, 3), "dk": (made_dk, 3), "dv": (made_dv, 3)}
    if dlse is not None:
        arrays["dlse"] = (dlse, 2)
    if "dq_accum" in scratch:
        arrays["dq_accum"] = (scratch["dq_accum"], 3)
    if dbias is not None:
        dbias = dbias[(None,) * (3 - dbias.ndim)]
        arrays["dbias"] = (dbias, 3)
    writer = Writer(call, facts, arrays, True, plan, count_tiles)
    writer.told |= {
        "kind_dq": KINDS[dq.dtype.name],
        "kind_dk": KINDS[made_dk.dtype.name],
        "kind_dv": KINDS[made_dv.dtype.name],
    }
    lead = writer.lead
    writer.add("delta", writer.extent(lead.sizes))
    if dsink is not None:
        kind = {"kind_dsink": KINDS[dsink.dtype.name]}
        writer.add("sink", writer.extent(lead.sizes), kind, ("dsink",))
    own = lead.sizes if problem.packed else lead.own("dk", "dv")
    writer.add("dkdv", writer.extent(own, of_keys=True), {"own_size": own}, adds_dq=atomic_dq)
    own = lead.sizes if problem.packed else lead.own("dq")
    if "dq_accum" in scratch:
        writer.add("dq_rows", writer.extent(own), {"own_size": own})
    elif not atomic_dq:
        writer.add("dq", writer.extent(own), {"own_size": own})
    if dbias is not None:
        _bias_gradient(writer, dbias)
    return Recipe(tuple(writer.launches), scratch, writer.generated.arrays, atomic_dq=atomic_dq)


def _bias_gradient(writer: Writer, dbias: Array) -> None:
    problem = writer.call.problem
    heads, len_q, len_k = dbias.shape[-3:]
    told: dict[str, Any] = {}
    if problem.packed:
        shared = dbias.ndim == 3 or dbias.shape[0] == 1 != problem.batch
        own = (*(1,) * (params.MAX_LEAD - 1), 1 if shared else problem.batch)
        step = 0 if shared else dbias.strides[0] // dbias.itemsize
        lead = (*(0,) * (params.MAX_LEAD - 1), step)
        told["dbias"] = strides.operand(dbias, lead)
    else:
        own = writer.lead.own("dbias")
    fields: dict[str, Any] = {
        "own_size": own,
        "bias_heads": heads,
        "bias_len_q": len_q,
        "bias_len_k": len_k,
        "kind_dbias": KINDS[dbias.dtype.name],
    }
    writer.add("bias", Extent(len_q, len_k, heads, math.prod(own)), fields | told)
