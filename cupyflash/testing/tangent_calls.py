"""Calls of kernels of tangents and of second derivatives, on copies, and their bounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .copies import Copies
from .judge import expect
from .second_bound import SecondBound, second_bound
from .subject import GRADIENTS, Call, Rows, Subject, out_shape
from .tangent_bound import Directions, JvpBound, jvp_bound, jvp_bound_varlen

Array = np.ndarray[Any, Any]


class Tangent(NamedTuple):
    """What a forward with tangents returned.

    Attributes
    ----------
    out, tout : ndarray
        O and its tangent.
    lse, tlse : ndarray or None
        LSE and its tangent; None if the kernel lacks the feature "lse".
    """

    out: Array
    tout: Array
    lse: Any
    tlse: Any


def tangents(
    s: Subject, q: Array, k: Array, v: Array, along: Directions, *, offsets: Any = None,
    **options: Any,
) -> Tangent:  # fmt: skip
    """Run the forward with tangents on copies, and check shapes, types and surroundings."""
    s.claim(Call(q, k, v, options, gradients=False))
    copies, s.dtype = Copies(s.memory), q.dtype.name
    arrays = [copies.array(s.laid(x)) for x in (q, k, v)]
    given = s.copied(copies, options | along._asdict())
    function = s.jvp if offsets is None else s.varlen_jvp
    assert function is not None, "a property that needs it asks for jvp"
    returned = function(*arrays, *(offsets or ()), **given, return_lse=True)
    copies.check()
    expect(isinstance(returned, tuple) and len(returned) == 4, "expected four results")
    shape, has_lse = out_shape(q, k, v), "lse" in s.features
    made: list[Any] = []
    for name, x in zip(Tangent._fields, returned, strict=True):
        if name in ("out", "tout"):
            made.append(s.result(name, x, shape, q.dtype))
        else:
            made.append(s.result(name, x, shape[:-1], None) if has_lse else None)
    return Tangent(*made)


def second(
    s: Subject, do: Array, q: Array, k: Array, v: Array, along: Directions, *,
    rows: Rows | None = None, dlse: Array | None = None, **options: Any,
) -> dict[str, Array]:  # fmt: skip
    """Run the backward with tangents on copies; return the tangents by gradients' names."""
    s.claim(Call(q, k, v, options, gradients=True))
    if rows is None:
        rows = s.attend(q, k, v, **options)
    copies = Copies(s.memory)
    arrays = [copies.array(s.laid(x)) for x in (do, q, k, v, *rows)]
    given = s.copied(copies, options | along._asdict() | {"dlse": dlse})
    assert s.backward_jvp is not None, "a property that needs it asks for backward_jvp"
    returned = s.backward_jvp(*arrays, **given)
    copies.check()
    owners = (q, k, v, options.get("bias"), options.get("sink"))
    made = {
        name: s.result(name, x, owner.shape, owner.dtype)
        for name, x, owner in zip(GRADIENTS, returned.gradients, owners, strict=True)
        if owner is not None
    }
    made["tout"] = s.result("tout", returned.tout, do.shape, q.dtype)
    made["tlse"] = s.result("tlse", returned.tlse, do.shape[:-1], None)
    return made


def bound_of_tangents(
    s: Subject, q: Array, k: Array, v: Array, along: Directions, *, offsets: Any = None,
    **options: Any,
) -> JvpBound:  # fmt: skip
    """Return exact values and bounds of what `tangents` returns."""
    options = options | {"precision": s.precision(q.dtype), "block_kv": s.tiles[1]}
    if offsets is None:
        return jvp_bound(q, k, v, along, **options)
    offsets_q, offsets_k = offsets
    return jvp_bound_varlen(q, k, v, offsets_q, offsets_k, along, **options)


def bound_of_second(
    s: Subject, do: Array, q: Array, k: Array, v: Array, along: Directions, **options: Any
) -> SecondBound:
    """Return exact values and bounds of what `second` returns."""
    options = options | {"precision": s.precision(q.dtype), "block_kv": s.tiles[1]}
    return second_bound(do, q, k, v, along, **options)
