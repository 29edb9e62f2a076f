"""One call on the CPU, from its arrays to its results.

Programs are already lowered; they contain addresses, so the caller must keep their arrays alive.
"""

from __future__ import annotations

from collections.abc import Sequence

from .backward_call import BackwardCall
from .backward_lookup_call import Read
from .backward_tangent_call import BackwardTangentCall
from .float_modes import own_arithmetic
from .forward_call import ForwardCall
from .forward_tangent_call import ForwardTangentCall
from .layout import Array, Problem, Programs
from .program import Program
from .reduce_call import Form, ReduceCall


@own_arithmetic
def forward(
    problem: Problem,
    programs: Programs,
    q: Array,
    k: Array,
    v: Array,
    sink: Array | None,
    out: Array,
    lse: Array,
    block_q: int,
    block_kv: int,
    resumes: bool = False,
) -> ForwardCall:
    """Write out and lse; return the call, which can be made again.

    With `resumes`, out and lse have the result over other keys, and these keys join it. Kernels
    must be able to use both arrays in place, and there must be no sink.
    """
    tiles = block_q, block_kv
    call = ForwardCall(problem, programs, q, k, v, sink, out, lse, *tiles, resumes)
    call(q, k, v, sink, out, lse)
    return call


@own_arithmetic
def forward_tangent(
    problem: Problem,
    programs: Programs,
    tbias: Program,
    q: Array,
    k: Array,
    v: Array,
    tq: Array | None,
    tk: Array | None,
    tv: Array | None,
    sink: Array | None,
    tsink: Array | None,
    out: Array,
    tout: Array,
    lse: Array,
    tlse: Array,
    block_q: int,
    block_kv: int,
) -> ForwardTangentCall:
    """Write out, lse and their tangents; return the call, which can be made again."""
    read = q, k, v, tq, tk, tv, sink, tsink
    written = out, tout, lse, tlse
    like = *read[:-1], *written
    call = ForwardTangentCall(problem, programs, tbias, *like, block_q, block_kv)
    call(*read, *written)
    return call


@own_arithmetic
def backward(
    problem: Problem,
    programs: Programs,
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    sink: Array | None,
    dq: Array,
    dk: Array,
    dv: Array,
    dbias: Array | None,
    dsink: Array | None,
    block_q: int,
    block_kv: int,
    workspace: Array | None,
    reads: Sequence[Read] = (),
    dlookups: Sequence[Array] = (),
) -> BackwardCall:
    """Write every gradient; return the call, which can be made again.

    `reads` are what the score changes read of arrays whose gradients `dlookups` are.
    """
    arrays = do, q, k, v, out, lse, dlse, sink, dq, dk, dv, dbias, dsink
    learned = reads, dlookups
    call = BackwardCall(problem, programs, *arrays[:-1], block_q, block_kv, workspace, *learned)
    call(*arrays, dlookups)
    return call


@own_arithmetic
def backward_tangent(
    problem: Problem,
    programs: Programs,
    tbias: Program,
    curve: Program,
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    sink: Array | None,
    tdo: Array | None,
    tdlse: Array | None,
    tq: Array | None,
    tk: Array | None,
    tv: Array | None,
    tsink: Array | None,
    gradients: tuple[Array | None, ...],
    results: tuple[Array, Array],
    block_q: int,
    block_kv: int,
) -> BackwardTangentCall:
    """Write the tangents of every gradient, of out and of lse; return the call.

    `curve` is the second derivative of the score changes. `gradients` are the targets of dq, dk,
    dv, dbias and dsink, `results` those of out and lse.
    """
    arrays = do, q, k, v, out, lse, dlse, sink, tdo, tdlse, tq, tk, tv, tsink
    call = BackwardTangentCall(problem, programs, block_q, block_kv)
    call(tbias, curve, *arrays, gradients, results)
    return call


@own_arithmetic
def reduce(
    problem: Problem,
    programs: Programs,
    value: Program | None,
    form: Form,
    q: Array,
    k: Array,
    lse: Array | None,
    block_q: int,
    block_kv: int,
) -> tuple[Array, Array]:
    """Return statistics of weights and logits as `form` says, (B, H, ...).

    `value` makes the value of a pair of its logit, if the form says "program"; others need the
    log-sum-exp, (B, H, L). With "top", the second array has positions of keys.
    """
    call = ReduceCall(problem, programs, value, form, q, k, lse, block_q, block_kv)
    return call(q, k)
