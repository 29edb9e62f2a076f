"""Standard attention (FlashAttention, Algorithm 0), which stores all scores: the baseline.

The functions work with an array module ``xp``, ``numpy`` or ``cupy``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any  # of `xp`


def standard_forward(
    xp: Any,
    q: Array,
    k: Array,
    v: Array,
    causal: bool = False,
    change: Callable[[Array], None] | None = None,
) -> tuple[Array, Array]:
    """Compute standard attention, all scores in one array.

    Parameters
    ----------
    xp : module
        The array module of all arrays.
    q, k, v : array, shape (..., L, D)
        16-bit types are widened to float32: NumPy multiplies them far too slowly for a fair
        comparison, and CuPy itself widens those of more than one head.
    causal : bool
        Whether query i sees only keys up to i.
    change : callable, optional
        Changes the scaled scores in place.

    Returns
    -------
    o : array, shape (..., L, D)
        The output, in the dtype of q.
    p : array, shape (..., L, L)
        The probabilities, which the backward needs; in float32 or float64.
    """
    dtype = q.dtype
    work = np.promote_types(dtype, np.float32)
    q, k, v = (array.astype(work, copy=False) for array in (q, k, v))
    p = (q * q.shape[-1] ** -0.5) @ k.swapaxes(-1, -2)
    if change is not None:
        change(p)
    if causal:
        at = xp.arange(p.shape[-1])
        xp.copyto(p, -np.inf, where=at > at[:, None])
    p -= p.max(axis=-1, keepdims=True)
    xp.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    return (p @ v).astype(dtype, copy=False), p


def standard_backward(
    xp: Any,
    inputs: tuple[Array, Array, Array, Array],
    o: Array,
    p: Array,
    slope: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Compute the gradients of standard attention from the probabilities that the forward kept.

    Parameters
    ----------
    xp : module
        The array module of all arrays.
    inputs : tuple of array
        q, k and v, as given to the forward, and do, the gradient of its output.
    o, p : array
        What `standard_forward` returned.
    slope : array, optional
        Derivative of the changed scores with respect to the scaled scores; by default 1.

    Returns
    -------
    dq, dk, dv : array, shape (..., L, D)
        In the dtype of q.
    """
    dtype = inputs[0].dtype
    q, k, v, do, o = (array.astype(p.dtype, copy=False) for array in (*inputs, o))
    dv = transposed_product(xp, p, do)
    ds = do @ v.swapaxes(-1, -2)
    ds -= (do * o).sum(axis=-1, keepdims=True)
    ds *= p
    if slope is not None:
        ds *= slope
    scale = q.shape[-1] ** -0.5
    dq = scale * (ds @ k)
    dk = scale * transposed_product(xp, ds, q)
    return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype)


def transposed_product(xp: Any, a: Array, b: Array) -> Array:
    """Return aᵀ b, where `a` is the large one, (..., L, L), and `b` is (..., L, D).

    CuPy copies a transposed operand, so with CuPy the small operand is transposed. NumPy copies
    neither, and is slower in that order.
    """
    if xp is np:
        return a.swapaxes(-1, -2) @ b
    return (b.swapaxes(-1, -2) @ a).swapaxes(-1, -2)
