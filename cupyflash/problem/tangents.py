"""Directions along which a call is differentiated, as users pass them and checked."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..arrays.typed import FloatArray
from ..errors import ArgumentError
from . import validate
from .call import Array, Call, Gradients


class Tangents(NamedTuple):
    """Tangents of the arrays of a call, each of its array's shape and dtype; None stands for zeros.

    Attributes
    ----------
    tq, tk, tv, tbias, tsink : array or None
        Tangents of q, k, v, of the bias and of the sink.
    """

    tq: Any = None
    tk: Any = None
    tv: Any = None
    tbias: Any = None
    tsink: Any = None

    @property
    def named(self) -> dict[str, Any]:
        """Those that there are, by name."""
        return {name: x for name, x in self._asdict().items() if x is not None}


RESULTS = "out", "tout", "lse", "tlse"
TangentResults = tuple[Array, Array, Any, Any]  # out, its tangent, lse, its tangent; or None


class SecondTangents(NamedTuple):
    """What a backward is differentiated along.

    Attributes
    ----------
    arrays : Tangents
        Those of the operands.
    tdo, tdlse : array or None
        Those of the gradients of out and of lse.
    """

    arrays: Tangents
    tdo: Any = None
    tdlse: Any = None


class Second(NamedTuple):
    """Derivatives of the gradients of a call along a direction, and those of its results.

    Attributes
    ----------
    gradients : Gradients
        The tangents of dq, dk, dv, dbias and dsink, each with its array's shape and dtype. In the
        direction of gradients by dq, dk and so on, they are the gradients of these by q, k and so
        on: a double backward.
    tout, tlse : array
        The tangents of out and lse: the gradients by do and dlse, of a double backward.
    """

    gradients: Gradients[Array, FloatArray | None]
    tout: Array
    tlse: FloatArray


_ABSENT = {
    "tbias": "pass bias=np.zeros_like(tbias), which changes no score",
    "tsink": "pass sink=, without which there is no sink that could change",
}


def checked(tangents: Tangents, call: Call) -> Tangents:
    """Return tangents as arrays of the shapes that users see; refuse those of the wrong form."""
    owners = call.q, call.k, call.v, call.bias, call.sink
    matrices = (*call.were_matrices, False, False)
    arrays: list[Array | None] = []
    for name, x, owner, matrix in zip(tangents._fields, tangents, owners, matrices, strict=True):
        if x is None:
            arrays.append(None)
            continue
        if owner is None:
            raise ArgumentError(
                f"{name}: got a tangent, but the call has no {name[1:]}; {_ABSENT[name]}, or leave "
                f"{name} out."
            )
        shape = owner.shape[1:] if matrix else owner.shape
        arrays.append(validate.given(x, name, shape, owner.dtype))
    return Tangents(*arrays)


def with_heads(tangents: Tangents, call: Call) -> Tangents:
    """Return checked tangents with an axis of heads, as the call's operands have it."""
    matrices = (*call.were_matrices, False, False)
    return Tangents(
        *(
            x[None] if x is not None and matrix else x
            for x, matrix in zip(tangents, matrices, strict=True)
        )
    )
