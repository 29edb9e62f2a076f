"""Launches of pieces of calls, which are recognised as calls are.

A call by pieces makes the same launches every time, from other memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, cast

from ..problem import positions
from ..problem.call import Array, Call, Gradients, Results
from ..problem.options import Options
from ..problem.route import CallResult
from . import launch, launch_cache


def forward(call: Call, partial: Results, first: bool, results: Results | None = None) -> None:
    """Write out and lse, of the accumulator's type, or join a piece's keys to them.

    If `results` are given, these are written instead, rounded. The first piece of all has them as
    `partial`, too.
    """
    out, lse = partial if results is None else results
    before = None if first else partial
    read = {} if before is None else {"out_before": before[0], "lse_before": before[1]}
    _launch(
        _signature("forward", call, read, {"out": out, "lse": lse}),
        lambda entry, seen: launch_cache.forward(entry, seen.addresses, out, lse),
        lambda: launch.forward(call, out, lse, before=before),
        (out, lse),
    )


def backward(
    call: Call,
    do: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    gradients: Gradients,
    deterministic: bool,
) -> None:
    """Write the gradients of a piece, of the accumulator's type."""
    read = {"d_out": do, "out": out, "lse": lse, "dlse": dlse}
    kind = "deterministic backward" if deterministic else "backward"
    _launch(
        _signature(kind, call, read, gradients._asdict()),
        lambda entry, seen: launch_cache.backward(entry, seen, gradients, None),
        lambda: launch.backward(
            call, do, out, lse, dlse, gradients, None, deterministic=deterministic
        ),
        gradients,
    )


def _launch(
    signature: launch_cache.Signature | None,
    again: Callable[[launch_cache.Entry, launch_cache.Signature], Any],
    anew: Callable[[], CallResult],
    results: Sequence[Any],
) -> None:
    """Launch what is kept of a call like this one; or launch it `anew`, and keep it."""
    entry = None if signature is None else launch_cache.find(signature)
    if signature is None:
        anew()
    elif entry is None or again(entry, signature) is None:
        signature.keep(anew(), results)


def _signature(
    part: str, call: Call, read: Mapping[str, Any], written: Mapping[str, Any]
) -> launch_cache.Signature | None:
    """Return what tells a piece from others and from calls that are none, if it is recognised."""
    problem = call.problem
    sizes = positions.key_of(problem)
    if sizes is None:
        return None  # its offsets are arrays, which may have changed
    kind: Hashable = part, sizes, call.beside
    options = Options(
        mask=call.mask,
        score_mod=call.score_mod,
        bias=call.bias,
        sink=call.sink,
        scale=problem.scale,
        dropout=problem.dropout,
        seed=problem.seed,
        precision=cast(Literal["tf32x3"] | None, problem.precision),
    )
    named = {"q": call.q, "k": call.k, "v": call.v, **read}
    return launch_cache.signature(kind, named, options, written)
