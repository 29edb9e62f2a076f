"""The public functions of second derivatives: gradients, differentiated along a direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, SupportsIndex

from . import execute
from .arrays.interop import DLPackArray
from .arrays.typed import Number
from .masks import Mask
from .problem.arguments import Packed
from .problem.call import Array, Gradients
from .problem.keywords import explained
from .problem.options import Options
from .problem.tangents import Second, SecondTangents, Tangents
from .request import Request
from .scores import Score


@explained
def attention_backward_jvp(
    do: DLPackArray,
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    out: DLPackArray,
    lse: DLPackArray,
    tq: DLPackArray | None = None,
    tk: DLPackArray | None = None,
    tv: DLPackArray | None = None,
    *,
    tbias: DLPackArray | None = None,
    tsink: DLPackArray | None = None,
    dlse: DLPackArray | None = None,
    tdo: DLPackArray | None = None,
    tdlse: DLPackArray | None = None,
    deterministic: bool = False,
    bias_gradient: bool = True,
    grads_out: Gradients | Sequence[Array | None] | None = None,
    workspace: Array | None = None,
    mask: Mask | DLPackArray | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: DLPackArray | None = None,
    sink: DLPackArray | None = None,
    scale: Number | None = None,
    dropout: Number = 0.0,
    seed: SupportsIndex | DLPackArray | None = None,
    precision: Literal["tf32x3"] | None = None,
) -> Second:
    """Compute the derivative of `attention_backward` along a direction: second derivatives.

    If the direction (tq, tk, ...) is the gradient of a loss by dq, dk, ..., the results are the
    gradients of a double backward, because second derivatives are symmetric: `gradients` by q, k,
    ..., `tout` by `do`, and `tlse` by `dlse`. They are also products of the Hessian of
    ``sum(do * out) + sum(dlse * lse)`` and the direction.

    Parameters
    ----------
    do : array, shape of out
        Gradient of the output, in the dtype of `q`.
    q, k, v : array
        As given to `attention`.
    out, lse : array
        As returned by `attention` with the same options and ``return_lse=True``.
    tq, tk, tv : array, optional
        The direction: tangents of `q`, `k` and `v`, each of its array's shape and dtype. None
        stands for zeros, and saves the products with them.
    tbias, tsink : array, optional
        Tangents of `bias` and `sink`, likewise.
    dlse : array, shape of lse, optional
        Gradient of the LSE, in its dtype.
    tdo, tdlse : array, optional
        Tangents of `do` and `dlse`, likewise; for a double backward they are left out.
    deterministic : bool
        As in `attention_backward`: only the tangent of dq in float32 on a GPU depends on it.
    bias_gradient : bool
        Whether the tangent of the bias's gradient is computed; without it, it is None.
    grads_out : Gradients or tuple, optional
        Arrays for the tangents of dq, dk, dv, dbias and dsink, as in `attention_backward`.
    workspace : array of uint8, optional
        Scratch memory of at least ``workspace_size(..., second=True)`` bytes, on the device of `q`.
        It is needed while a CUDA graph is captured.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As given to `attention`.

    Returns
    -------
    Second
        gradients (the tangents of dq, dk, dv, dbias and dsink, each with its array's shape and
        dtype), tout and tlse.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention_jvp`.

    Notes
    -----
    With the letters of `attention_jvp`, g = Z * (do vᵀ) - delta + dlse, dT = P * g, dS = f' * dT
    and the second derivative f'' of the score changes, ::

        tdT = P * (tt - tlse) * g + P * (Z * (tdo vᵀ + do tvᵀ) - tdelta + tdlse)
        tdS = f' * tdT + f'' * ts * dT
        tdq = scale * (tdS k + dS tk)
        tdk = scale * (tdSᵀ q + dSᵀ tq)
        tdv = (Z * P * (tt - tlse))ᵀ do + (Z * P)ᵀ tdo

    Memory grows with L, as in `attention_backward`. On a GPU, tensor cores compute it in float16
    and bfloat16 for heads up to 128, apart from the tangent of dbias, and other kernels in the
    accumulator's type. At a kink of a score change, it is that of the branch that is taken.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import attention, attention_backward, attention_backward_jvp
    >>> q, k, v, do, tq = np.random.default_rng(0).standard_normal((5, 2, 50, 8))
    >>> def dk(q):
    ...     out, lse = attention(q, k, v, return_lse=True)
    ...     return attention_backward(do, q, k, v, out, lse).dk
    >>> out, lse = attention(q, k, v, return_lse=True)
    >>> second = attention_backward_jvp(do, q, k, v, out, lse, tq)
    >>> difference = (dk(q + 1e-6 * tq) - dk(q - 1e-6 * tq)) / 2e-6
    >>> bool(abs(second.gradients.dk - difference).max() < 1e-7)
    True
    """
    options = Options.of(
        mask=mask,
        score_mod=score_mod,
        bias=bias,
        sink=sink,
        scale=scale,
        dropout=dropout,
        seed=seed,
        precision=precision,
    )
    request = Request(q, k, v, options=options)
    read = {"do": do, "out": out, "lse": lse, "dlse": dlse}
    moved = SecondTangents(Tangents(tq, tk, tv, tbias, tsink), tdo, tdlse)
    how = grads_out, deterministic, bias_gradient, workspace
    return execute.backward_tangent(request, read, moved, *how)


@explained
def attention_varlen_backward_jvp(
    do: DLPackArray,
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    out: DLPackArray,
    lse: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    tq: DLPackArray | None = None,
    tk: DLPackArray | None = None,
    tv: DLPackArray | None = None,
    *,
    check: bool | None = None,
    tbias: DLPackArray | None = None,
    tsink: DLPackArray | None = None,
    dlse: DLPackArray | None = None,
    tdo: DLPackArray | None = None,
    tdlse: DLPackArray | None = None,
    deterministic: bool = False,
    bias_gradient: bool = True,
    grads_out: Gradients | Sequence[Array | None] | None = None,
    workspace: Array | None = None,
    mask: Mask | DLPackArray | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: DLPackArray | None = None,
    sink: DLPackArray | None = None,
    scale: Number | None = None,
    dropout: Number = 0.0,
    seed: SupportsIndex | DLPackArray | None = None,
    precision: Literal["tf32x3"] | None = None,
) -> Second:
    """Compute the derivative of `attention_varlen_backward` along a direction.

    Parameters
    ----------
    do, q, k, v, out, lse : array
        As in `attention_backward_jvp`, packed.
    offsets_q, offsets_k : array of int, shape (n + 1,)
        As in `attention_varlen`.
    tq, tk, tv : array, optional
        Tangents of `q`, `k` and `v`, packed like them; None stands for zeros.
    check : bool, optional
        As in `attention_varlen`.
    tbias, tsink, dlse, tdo, tdlse, deterministic, bias_gradient, grads_out, workspace
        As in `attention_backward_jvp`.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As given to `attention_varlen`.

    Returns
    -------
    Second
        As in `attention_backward_jvp`, packed.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention_backward_jvp`.
    """
    options = Options.of(
        mask=mask,
        score_mod=score_mod,
        bias=bias,
        sink=sink,
        scale=scale,
        dropout=dropout,
        seed=seed,
        precision=precision,
    )
    request = Request(q, k, v, Packed(offsets_q, offsets_k, check), options=options)
    read = {"do": do, "out": out, "lse": lse, "dlse": dlse}
    moved = SecondTangents(Tangents(tq, tk, tv, tbias, tsink), tdo, tdlse)
    how = grads_out, deterministic, bias_gradient, workspace
    return execute.backward_tangent(request, read, moved, *how)
