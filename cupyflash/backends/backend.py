"""What every back end can do with a validated call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ..expr.nodes import Expr
from ..problem.call import Array, Call, Gradients, Plan, Results
from ..problem.reduction_form import Form
from ..problem.route import CallResult
from ..problem.tangents import SecondTangents, TangentResults, Tangents
from ..rowwise import Arrays, Operation


class Backend(Protocol):
    """Computes calls whose arrays are all of one kind. A `plan` gives other tiles than its own."""

    def forward(
        self, call: Call, out: Array, lse: Array | None, plan: Plan | None = None
    ) -> CallResult:
        """Compute `out` and `lse`, which is what `empty_output` returns or like it."""
        ...

    def forward_piece(
        self, call: Call, partial: Results, first: bool, results: Results | None = None
    ) -> None:
        """Compute a piece's out and lse: in `partial`, contiguous arrays of the accumulator's type.

        Unless it is the `first` piece of its queries, these have the result over the pieces before
        it, which its keys join. If `results` are given, it is the last piece, and they are written
        instead, rounded; of a first piece, they are `partial`, too.
        """
        ...

    def backward_piece(
        self,
        call: Call,
        do: Array,
        out: Array,
        lse: Array,
        dlse: Array | None,
        gradients: Gradients,
        deterministic: bool,
    ) -> None:
        """Compute the gradients of a piece, as `backward` does."""
        ...

    def backward(
        self,
        call: Call,
        do: Array,
        out: Array,
        lse: Array,
        dlse: Array | None,
        gradients: Gradients,
        workspace: Array | None,
        plan: Plan | None = None,
        deterministic: bool = False,
    ) -> CallResult:
        """Compute `gradients`, with their look-ups; those that the call does not have are None."""
        ...

    def check_lookups(self, call: Call) -> None:
        """Refuse learned look-ups whose gradients are not computed."""
        ...

    def forward_tangent(
        self, call: Call, tangents: Tangents, results: TangentResults, plan: Plan | None = None
    ) -> CallResult:
        """Compute out, lse and their tangents: arrays as `empty_output` returns, or like them."""
        ...

    def backward_tangent(
        self,
        call: Call,
        rows: Mapping[str, Array],
        tangents: SecondTangents,
        gradients: Gradients,
        results: Results,
        workspace: Array | None = None,
        deterministic: bool = False,
    ) -> CallResult:
        """Compute the tangents of `gradients`, and of out and lse, which are `results`.

        `rows` are do, out, lse and, if it is given, dlse.
        """
        ...

    def reduce(
        self, call: Call, form: Form, lse: Array | None, value: Expr | None = None
    ) -> tuple[Array, Array | None]:
        """Return what is taken of weights, logits or an expression of pairs: (B, Hq, ...).

        In the expression, the score stands for the logit; a form of it has "program". `lse` is
        (..., Hq, Lq), for "weight" and "entropy" alone. With "top", the second array has positions
        of keys.
        """
        ...

    def reduction_gradients(
        self, call: Call, factor: Expr, lse: Array, dq: Array, dk: Array, dbias: Array | None
    ) -> None:
        """Write gradients of a loss whose derivative by the logit of a pair is p times `factor`.

        In the factor, the score stands for the logit. `lse` is (..., Hq, Lq).
        """
        ...

    def workspace_size(self, call: Call, second: bool = False) -> int:
        """Return the bytes of scratch that the call's backward needs, or its second derivatives."""
        ...

    def cached(
        self, call: Call, out: Array, lse: Array | None, workspace: Array | None
    ) -> CallResult:
        """Compute `out` and `lse` of a call over a cache."""
        ...

    def workspace_size_cached(self, call: Call) -> int:
        """Return the bytes of scratch that a call over a cache needs."""
        ...

    def rowwise(self, operation: Operation[Any], checked: Any, arrays: Arrays) -> CallResult:
        """Compute a checked call of a rowwise operation on its arrays and results, by name."""
        ...

    def empty_like(
        self,
        array: Array,
        shape: tuple[int, ...] | None = None,
        dtype: Any = None,
        in_c_order: bool = False,
    ) -> Array:
        """Return an uninitialised array of the same shape, dtype and memory order, or of these."""
        ...

    def empty_output(
        self,
        call: Call,
        out: Array | None = None,
        lse: Array | None = None,
        want_lse: bool = True,
    ) -> tuple[Array, Array | None]:
        """Return out and lse, or uninitialised arrays in place of None.

        A new out has the memory order of q. A back end that does not need the LSE makes it only if
        `want_lse`.
        """
        ...


def output_shape(call: Call) -> tuple[int, ...]:
    """Return the shape of out with a head axis."""
    return (*call.problem.array_lead, *call.q.shape[-3:-1], call.problem.d_v)
