"""What comes before the backward's tangent: delta with its tangent, and the sink's gradient.

With O = out and the tangents tO and mu of out and of the log-sum-exp::

    delta  = rowsum(do O) - dlse
    tdelta = rowsum(tdo O + do tO) - tdlse
    tdsink = sum_i p_i ((mu - tsink) delta - tdelta)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .float_modes import own_arithmetic
from .layout import Array


def row_sums(a: Array, b: Array, number: np.dtype[Any]) -> Array:
    """Return the sums of products of rows; where an element of `a` is 0, `b` does not matter."""
    products = np.where(a != 0, a.astype(number) * b.astype(number), 0)
    total: Array = products.sum(axis=-1, dtype=number)
    return total


@own_arithmetic
def backward_tangent_delta(
    number: np.dtype[Any], do: Array, out: Array, dlse: Array | None, tdo: Array | None,
    tdlse: Array | None, tout: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """Return delta and its tangent, in the accumulator's type `number`."""
    delta, tdelta = row_sums(out, do, number), row_sums(tout, do, number)
    if tdo is not None:
        tdelta += row_sums(out, tdo, number)
    if dlse is not None:
        delta -= dlse
    if tdlse is not None:
        tdelta -= tdlse
    return delta, tdelta


@own_arithmetic
def backward_tangent_sink(
    number: np.dtype[Any], sink: Any, tsink: Array | None, lse: Array, mu: Array, delta: Array,
    tdelta: Array, dsink: Array,
) -> None:  # fmt: skip
    """Write the tangent of the sink's gradient."""
    axes = (-1, *range(lse.ndim - 2))
    logit = sink.astype(number)[:, None]
    seen = (logit != -np.inf) & (lse != -np.inf)
    p = np.exp(np.minimum(np.where(seen, logit - np.where(seen, lse, 0), -np.inf), 0))
    moved = (0 if tsink is None else tsink.astype(number)[:, None]) - mu
    terms = p * (-moved * delta - tdelta)
    dsink[...] = np.where(seen, terms, 0).sum(axis=axes, dtype=number)
