"""The route of a reduction on a GPU: see `route`.

One portable kernel takes a reduction of each form, and reads the log-sum-exp where it needs it.
Sums of weights over queries, or over blocks, have one for tensor cores, too.
"""

from __future__ import annotations

import math
from typing import Any

from ..arrays.cuda_device import Target
from ..expr.functions import SCORE
from ..expr.nodes import Expr, convert
from ..problem.bound_exprs import bound, of_logit
from ..problem.call import Array, Call
from ..problem.reduction_form import Form
from .kernels import registry
from .kernels.spec import Extent
from .writer import KernelRoute, Writer

# Numbered as in the kernels' pair_values.cuh.
OF = {"logit": 0, "weight": 1, "entropy": 2, "program": 3}
BY = {"sum": 0, "max": 1, "top": 2}
# Rows of a result along distances: one, and one for each block of queries that is as long as a
# part of a block of keys, of which there are at most eight.
MOST_PARTS = 9


def shape_of(call: Call, form: Form) -> tuple[int, ...]:
    """Return the shape of what kernels write: leading axes, heads, rows and columns."""
    problem = call.problem
    len_q, len_k = int(problem.len_q), int(problem.len_k)
    rest = {
        "keys": (len_q, form.most),
        "distance": (MOST_PARTS, max(len_q + len_k - 1, 0)),
        "blocks": (-(-len_q // form.block[0]), -(-len_k // form.block[1])),
    }
    return (*problem.lead, problem.heads, *rest[form.along])


def of(
    call: Call, target: Target, form: Form, lse: Array | None, value: Expr | None, found: Array
) -> KernelRoute:
    """Return the route of a reduction of a call into `found`, of `shape_of`.

    `lse` is (..., Hq, Lq), and `value` an expression in which the score stands for the logit, as
    in `backends.cpu_reductions.reduce`.
    """
    of_values, value = _values(call, form, value)
    arrays: dict[str, tuple[Any, int]] = {"q": (call.q, 3), "k": (call.k, 3), "found": (found, 3)}
    if lse is not None:
        arrays["lse"] = (lse, 2)
    writer = Writer(call, target, arrays, slope=value is not None, by=value, reduces=True)
    choice = None
    if form.along == "blocks" and (of_values, form.by) == ("weight", "sum"):
        choice = registry.find("reduce_weights", writer.request)
    choice = choice or registry.select(f"reduce_{form.along}", writer.request)
    block_q, block_kv = choice.tiles.block_q, choice.tiles.block_kv
    len_q, len_k = int(call.problem.len_q), int(call.problem.len_k)
    rows, keys = form.block
    fields: dict[str, Any] = {"of": OF[of_values], "by": BY[form.by]}
    extent = writer.extent(writer.lead.sizes)
    if form.along == "blocks":  # a thread block has whole blocks of keys
        keys_of_owner = keys * max(1, block_kv // keys)
        owners_k = -(-len_k // keys_of_owner)
        first, last = form.rows
        fields |= {"first_query": first, "end_query": last, "block_q": rows, "block_k": keys}
        fields |= {"keys_of_owner": keys_of_owner, "owners_k": owners_k}
        extent = _owners(extent, writer, -(-len_q // rows) * owners_k)
    elif form.along == "distance":
        assert block_kv // block_q < MOST_PARTS, "a row for each of these"
        before = (-(-len_k // block_kv) - 1) * (block_kv // block_q)
        diagonals = before + -(-len_q // block_q) if len_q and len_k else 0
        extent = _owners(extent, writer, diagonals)
    named = ("keys",) if form.by == "top" else ()
    writer.add(choice.spec.part, extent, fields, named, choice=choice)
    return writer.route(call)


def parts(route: KernelRoute) -> int:
    """Return how many rows of a result along distances have numbers."""
    step = route.steps[-1]
    return 1 + step.block_kv // step.block_q


def _owners(extent: Extent, writer: Writer, owners: int) -> Extent:
    """Return the extent of a launch with so many thread blocks for each head."""
    entries = math.prod(writer.lead.sizes)
    return extent._replace(queries=owners, keys=0, entries=entries)


def _values(call: Call, form: Form, value: Expr | None) -> tuple[str, Expr | None]:
    """Return what values are, and the expression of the score that makes them, if one does."""
    if value is None and form.raw:
        value = SCORE
    elif value is None:
        return form.of, None
    else:
        value = bound(value, call.problem) if form.raw else of_logit(value, call)
    return "program", convert(value, "float")
