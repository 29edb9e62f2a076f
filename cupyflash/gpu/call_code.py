"""The code of a call's expressions for kernels, its numbers, and what kernels take of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..errors import ArgumentError
from ..expr import width
from ..expr.cuda import generate
from ..expr.cuda_functions import Functions, Generated
from ..expr.derivative import derivative
from ..expr.functions import SCORE
from ..expr.key_range import key_range
from ..expr.nodes import LOOKUPS, Expr, convert, walk
from ..problem.bound_exprs import added, trees
from ..problem.call import Call, Problem
from ..problem.tangents import Tangents
from . import params, strides


def of(
    call: Call,
    slope: bool,
    tangents: Tangents | None = None,
    by: Expr | None = None,
    second: bool = False,
) -> Generated:
    """Return the code of a call's expressions, and of what is added to tangents of scores.

    `slope` says whether derivatives are needed, and `second` whether second ones are; `by` is one
    by something else than the score.
    """
    made, problem, tangent, curve = trees(call), call.problem, None, None
    if second and made.slope is not None:
        curve = convert(derivative(made.slope), "float")  # it has the nodes of the score change
    if tangents is not None and tangents.tbias is not None:
        tangent = added(SCORE, tangents.tbias, "tbias", problem)
    # Kernels of gradients ask for derivatives only where scores are changed.
    changed = SCORE if made.changed is None and by is not None else made.changed
    generated = generate(
        made.allowed,
        made.classes,
        changed,
        (made.slope if by is None else by) if slope else None,
        None if made.allowed is None else key_range(made.allowed, problem),
        short=_is_short(call, made.allowed, made.changed, tangent, by),
        tangent=tangent,
        curve=curve,
    )
    return _with_origins(generated, problem) if has_origins(problem) else generated


def constants(code: Generated) -> dict[str, Any]:
    """Return the numbers and the layouts of arrays that kernels are told."""
    tables = [strides.table(x) for x in code.arrays]
    return {"ints": code.ints, "floats": code.floats, "tables": tables}


def has_origins(problem: Problem) -> bool:
    """Return whether dropout counts positions from where a piece begins."""
    return problem.dropout > 0 and problem.whole is not None


def _with_origins(generated: Generated, problem: Problem) -> Generated:
    """Return expressions whose last numbers say where a piece begins, as dropout counts."""
    origins = problem.origin_q, problem.origin_k, problem.origin_b_h, problem.heads_of_entry
    functions = replace(generated.functions, num_ints=generated.functions.num_ints + len(origins))
    ints = (*generated.ints, *origins)
    return replace(generated, functions=functions, ints=ints)


def _is_short(call: Call, *roots: Expr | None) -> bool:
    """Whether positions, lengths, heads, entries and the strides of tables fit into 32 bits."""
    problem = call.problem
    sizes = problem.batch, problem.heads, call.q.shape[-2], keys_of(call)
    strides = [
        abs(stride)
        for root in roots
        for node in (walk(root) if root is not None else ())
        if node.op in LOOKUPS
        for stride in node.value[0].strides
    ]
    return max(sizes) <= width.LIMIT and max(strides, default=0) < 2**31


def check_size(has: Functions, size: int) -> None:
    """Refuse expressions whose numbers and arrays make so many bytes of parameters."""
    if size > params.MAX_BYTES:
        raise ArgumentError(
            f"mask, score_mod: got {has.num_tables} arrays and {has.num_ints + has.num_floats} "
            f"numbers, which make {size} bytes of parameters; expected at most "
            f"{params.MAX_BYTES}. Join several arrays into one with another axis, or combine "
            "numbers before you pass them."
        )


def keys_of(call: Call) -> int:
    """Return an upper bound of the keys of an entry; for packed arrays, the number of all keys."""
    return call.rows.room(int(call.k.shape[-2]))
