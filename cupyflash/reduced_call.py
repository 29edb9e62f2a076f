"""A call of which reductions are taken, and what back ends are asked of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from . import dispatch, execute
from .arrays import interop
from .arrays.device_arrays import is_device_array
from .arrays.dtypes import DTYPES
from .backends import cpu_reductions
from .expr.functions import SCORE, exp
from .expr.nodes import Expr, rebuild
from .problem import validate
from .problem.bound_exprs import bound, by_query
from .problem.call import Array, Call
from .problem.options import Options
from .problem.reduction_form import Form
from .reductions import LOGIT, LSE, WEIGHT, Reduction, TopKeys, is_symbol
from .request import Request

OF_PAIR = WEIGHT, LOGIT, LSE  # symbols that depend on it


class ReducedCall(NamedTuple):
    """A validated call, and its log-sum-exp with an axis of heads if it is needed."""

    call: Call
    lse: Any

    @classmethod
    def of(
        cls, q: Any, k: Any, options: Options, lse: Any, named: Mapping[str, Reduction]
    ) -> ReducedCall:
        """Validate a call, and compute the log-sum-exp if it is needed and not given."""
        q, k = interop.of_device(q=q, k=k)
        q, k = interop.array(q, "q"), interop.array(k, "k")
        request = without_values(q, k, k, options)
        made = cls.of_call(request.call, named)
        if lse is not None:
            seen = made.rows[-1:] if made.call.matrices else made.rows
            lse = validate.given(lse, "lse", seen, made.call.problem.accumulator)
            interop.one_home({"q": q, "lse": lse})
        elif any(x.reads_lse for x in named.values()):
            lse = execute.forward(request, True, None, None)[1]
        return made if lse is None else made.with_lse(lse)

    @classmethod
    def of_call(cls, call: Call, named: Mapping[str, Reduction]) -> ReducedCall:
        """Check arrays of expressions; there is no log-sum-exp yet."""
        _check_places(call, named)
        for each in named.values():
            bound(
                rebuild(each.expr, lambda node: SCORE if is_symbol(node, *OF_PAIR) else None),
                call.problem,
            )
        return cls(call, None)

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of the log-sum-exp: leading axes, heads and queries."""
        problem = self.call.problem
        return (*problem.lead, problem.heads, self.call.q.shape[-2])

    def with_lse(self, lse: Array) -> ReducedCall:
        """Return the same with a log-sum-exp."""
        return self._replace(lse=lse.reshape(self.rows))

    def found(self, named: Mapping[str, Reduction]) -> dict[str, Any]:
        """Return the results of reductions."""
        return {name: self.shown(x, self.value(x)) for name, x in named.items()}

    def of_logits(self, expr: Expr) -> Expr:
        """Return an expression of p, t and lse as one of the score, which stands for the logit."""
        lse = None if self.lse is None else by_query(self.lse, "lse")
        weight = None if lse is None else exp(SCORE - lse)

        def replaced(node: Expr) -> Expr | None:
            if is_symbol(node, WEIGHT):
                return weight
            if is_symbol(node, LSE):
                return lse
            return SCORE if is_symbol(node, LOGIT) else None

        return rebuild(expr, replaced)

    def value(self, reduction: Reduction) -> tuple[Array, Array | None]:
        """Return what a reduction takes, (B, Hq, ...), and positions of keys."""
        form = self.form(reduction)
        value = self.of_logits(reduction.expr) if form.of == "program" else None
        lse = self.lse if form.of in ("weight", "entropy") else None
        found, indices = dispatch.backend_of(self.call.q).reduce(self.call, form, lse, value)
        if reduction.along == "keys" and reduction.count == 1 and reduction.by != "top":
            found, indices = found[..., 0], None if indices is None else indices[..., 0]
        if reduction.along == "queries":  # one row of blocks, or none without queries
            if found.shape[2]:
                return found[:, :, 0], None
            start = 0.0 if reduction.by == "sum" else -math.inf
            shape = (*found.shape[:2], found.shape[3])
            found = dispatch.backend_of(self.call.q).empty_like(found, shape, in_c_order=True)
            found[...] = start
        return found, indices

    def of_sink(self, function: Any) -> Array:
        """Return the sink's weights times a function of LSE - sink, (..., Hq, Lq)."""
        return cpu_reductions.of_sink(self.call, self.lse, function)

    def over_keys(self, value: Expr) -> Array:
        """Return the sums of an expression over the keys of each query, (..., Hq, Lq).

        In the expression, the score stands for the logit.
        """
        form, backend = Form("program", "keys", "sum"), dispatch.backend_of(self.call.q)
        return backend.reduce(self.call, form, None, value)[0].reshape(self.rows)

    def gradients(self, factor: Expr, of_bias: bool) -> tuple[Array, Array, Array | None]:
        """Return dq, dk and, if it is wanted, dbias: see `Backend.reduction_gradients`."""
        call, backend = self.call, dispatch.backend_of(self.call.q)
        dq, dk = (backend.empty_like(x) for x in (call.q, call.k))
        dbias = backend.empty_like(call.bias) if of_bias and call.bias is not None else None
        backend.reduction_gradients(call, factor, self.lse, dq, dk, dbias)
        return dq, dk, dbias

    def form(self, reduction: Reduction) -> Form:
        """Return what the kernels take, and over which pairs."""
        len_q = int(self.call.problem.len_q)
        rows, along, block = reduction.rows_seen(len_q), reduction.along, reduction.block
        if along == "queries":
            along, block = "blocks", (max(len_q, 1), 1)
        by = "top" if reduction.by == "argmax" else reduction.by
        of = "entropy" if reduction.name == "entropy" else "program"
        if is_symbol(reduction.expr, WEIGHT, LOGIT) and not (
            by == "top" and is_symbol(reduction.expr, WEIGHT)
        ):
            of = "weight" if is_symbol(reduction.expr, WEIGHT) else "logit"
        return Form(of, along, by, reduction.raw, reduction.count, rows, block)

    def shown(self, reduction: Reduction, made: tuple[Array, Array | None]) -> Any:
        """Return a result as users see it."""
        found, indices = made
        problem, matrices = self.call.problem, self.call.matrices
        if reduction.per_head:
            found = _largest(found)

        def seen(x: Array) -> Array:
            rest = x.shape[2:]
            return x.reshape(rest if matrices else (*problem.lead, problem.heads, *rest))

        if indices is None:
            return seen(found)
        if reduction.by == "top":
            shape = found.shape
            return TopKeys(seen(found), seen(indices.reshape(shape)))
        return seen(indices.reshape(found.shape))


def _largest(found: Array) -> Array:
    """Return the maximum along the last axis, -inf of none."""
    if found.shape[-1]:
        return cast("Array", found.max(axis=-1))
    made: Array = found.sum(axis=-1)
    made[...] = -math.inf
    return made


def without_values(q: Array, k: Array, v: Array, options: Options) -> Request:
    """Return a call with values of which only the leading axes count."""
    # Others are refused by validation; and on a GPU, the best kernels have equal heads.
    if not is_device_array(v) and v.ndim > 1 and v.dtype.name in DTYPES:
        # One column of zeros, which takes no memory.
        v = np.broadcast_to(np.zeros((), v.dtype), (*v.shape[:-1], 1))
    return Request(q, k, v, options=options)


def _check_places(call: Call, named: Mapping[str, Reduction]) -> None:
    """Refuse arrays of expressions that are not where the call's are."""
    read = {"q": call.q}
    for name, each in named.items():
        read |= validate.looked_up(each.expr, f"reductions: {name!r}")
    interop.one_home(read)
