"""Attention of packed sequences that many ranks hold together: the public functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, SupportsIndex, Unpack, overload

from numpy.typing import NDArray

from .. import execute
from ..arrays.interop import DLPackArray
from ..arrays.typed import F, FloatArray, Number
from ..execute import Vjp
from ..masks import Mask
from ..problem.arguments import Packed
from ..problem.call import Array, Gradients
from ..problem.keywords import explained
from ..problem.options import Options
from ..request import Request
from ..scores import Score
from .executor import Distributed, Ranks
from .partition.exchange_schedule import Scheme
from .partition.layouts import Layout
from .signatures import ForwardOptions, RanksBackwardOptions, RanksVjpOptions
from .transport.communication import Communicator

__all__ = ["attention_varlen", "attention_varlen_backward", "attention_varlen_vjp"]


@overload
def attention_varlen(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[ForwardOptions],
) -> NDArray[F]: ...


@overload
def attention_varlen(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    *,
    return_lse: Literal[True],
    **options: Unpack[ForwardOptions],
) -> tuple[NDArray[F], FloatArray]: ...


@overload
def attention_varlen(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[ForwardOptions],
) -> Array: ...


@overload
def attention_varlen(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    *,
    return_lse: Literal[True],
    **options: Unpack[ForwardOptions],
) -> tuple[Array, FloatArray]: ...


@overload
def attention_varlen(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    *,
    return_lse: bool,
    **options: Unpack[ForwardOptions],
) -> Array | tuple[Array, FloatArray]: ...


@explained
def attention_varlen(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    *,
    comm: Communicator,
    layout: Layout,
    layout_k: Layout | None = None,
    scheme: Scheme = "auto",
    check: bool = True,
    timeout: float = 300.0,
    mask: Mask | DLPackArray | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: DLPackArray | None = None,
    sink: DLPackArray | None = None,
    scale: Number | None = None,
    dropout: Number = 0.0,
    seed: SupportsIndex | DLPackArray | None = None,
    precision: Literal["tf32x3"] | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    lse_out: Array | None = None,
) -> Array | tuple[Array, FloatArray]:
    """Compute attention within packed sequences, each of which may lie on several ranks.

    Every rank makes the same call, with the rows that its layout gives it.

    Parameters
    ----------
    q, k, v : array
        As in `cupyflash.attention_varlen`, with this rank's packed rows, as
        `Layout.take` returns them.
    offsets_q, offsets_k : array of int, shape (n + 1,)
        As in `cupyflash.attention_varlen`: they count the rows of all ranks, and are the same on
        every rank.
    comm, layout, layout_k, scheme, check, timeout
        As in `attention`. The positions of layouts are packed rows; `layout` takes the offsets,
        too, so that it weighs only pairs of one sequence.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As in `cupyflash.attention_varlen`, and the same on every rank. Masks and scores see the
        positions and lengths of whole sequences, and dropout drops the pairs that it drops on one
        rank. A bias is not divided: every rank passes all of it.
    return_lse : bool
        Return (out, lse) instead of out.
    out, lse_out : array, optional
        Where to write the output and the LSE.

    Returns
    -------
    out : array, shape (Hq, rows of this rank, Dv)
        The output for this rank's queries.
    lse : array, shape (Hq, rows of this rank)
        Only with `return_lse`.

    Raises
    ------
    DistributedError, ArgumentTypeError
        As in `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import distributed, masks
    >>> x = np.random.default_rng(0).standard_normal((4, 1000, 32), dtype=np.float32)
    >>> offsets = [0, 700, 1000]
    >>> def work(comm):
    ...     options = {"mask": masks.causal()}
    ...     layout = distributed.layout(comm, 1000, offsets_q=offsets, **options)
    ...     own = layout.take(x)
    ...     options |= {"comm": comm, "layout": layout}
    ...     return distributed.attention_varlen(own, own, own, offsets, offsets, **options).shape
    >>> sorted(distributed.Threads(2).run(work))
    [(4, 488, 32), (4, 512, 32)]
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
    ranks = Ranks(comm, layout, layout_k, scheme, check, timeout)
    request = Distributed(Request(q, k, v, Packed(offsets_q, offsets_k), options=options), ranks)
    return execute.forward(request, return_lse, out, lse_out)


@overload
def attention_varlen_backward(
    do: DLPackArray,
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    out: DLPackArray,
    lse: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    **options: Unpack[RanksBackwardOptions],
) -> Gradients[NDArray[F], FloatArray | None]: ...


@overload
def attention_varlen_backward(
    do: DLPackArray,
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    out: DLPackArray,
    lse: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    **options: Unpack[RanksBackwardOptions],
) -> Gradients[Array, FloatArray | None]: ...


@explained
def attention_varlen_backward(
    do: DLPackArray,
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    out: DLPackArray,
    lse: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    *,
    comm: Communicator,
    layout: Layout,
    layout_k: Layout | None = None,
    scheme: Scheme = "auto",
    check: bool = True,
    timeout: float = 300.0,
    dlse: DLPackArray | None = None,
    deterministic: bool = False,
    bias_gradient: bool = True,
    grads_out: Gradients | Sequence[Array | None] | None = None,
    mask: Mask | DLPackArray | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: DLPackArray | None = None,
    sink: DLPackArray | None = None,
    scale: Number | None = None,
    dropout: Number = 0.0,
    seed: SupportsIndex | DLPackArray | None = None,
    precision: Literal["tf32x3"] | None = None,
) -> Gradients[Array, FloatArray | None]:
    """Compute the gradients of `attention_varlen` from its output and LSE.

    Parameters
    ----------
    do, q, k, v, out, lse : array
        As in `cupyflash.attention_varlen_backward`, with this rank's packed rows.
    offsets_q, offsets_k : array of int, shape (n + 1,)
        As in `attention_varlen`.
    comm, layout, layout_k, scheme, check, timeout
        As in `attention_varlen`.
    dlse, deterministic, bias_gradient, grads_out
        As in `attention_backward`.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As given to `attention_varlen`.

    Returns
    -------
    Gradients
        dq, dk, dv, dbias, dsink, each with its input's shape and dtype: those of what this rank
        holds. dbias and dsink are sums over all ranks, and the same on each.

    Raises
    ------
    DistributedError, ArgumentTypeError
        As in `attention`.
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
    ranks = Ranks(comm, layout, layout_k, scheme, check, timeout)
    request = Distributed(Request(q, k, v, Packed(offsets_q, offsets_k), options=options), ranks)
    return execute.backward(
        request, do, out, lse, dlse, deterministic, grads_out, None, bias_gradient
    )


@overload
def attention_varlen_vjp(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[RanksVjpOptions],
) -> tuple[NDArray[F], Vjp[F]]: ...


@overload
def attention_varlen_vjp(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    *,
    return_lse: Literal[True],
    **options: Unpack[RanksVjpOptions],
) -> tuple[NDArray[F], FloatArray, Vjp[F]]: ...


@overload
def attention_varlen_vjp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[RanksVjpOptions],
) -> tuple[Array, Vjp]: ...


@overload
def attention_varlen_vjp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    *,
    return_lse: Literal[True],
    **options: Unpack[RanksVjpOptions],
) -> tuple[Array, FloatArray, Vjp]: ...


@explained
def attention_varlen_vjp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    *,
    comm: Communicator,
    layout: Layout,
    layout_k: Layout | None = None,
    scheme: Scheme = "auto",
    check: bool = True,
    timeout: float = 300.0,
    mask: Mask | DLPackArray | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: DLPackArray | None = None,
    sink: DLPackArray | None = None,
    scale: Number | None = None,
    dropout: Number = 0.0,
    seed: SupportsIndex | DLPackArray | None = None,
    precision: Literal["tf32x3"] | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    bias_gradient: bool = True,
) -> tuple[Array, Vjp] | tuple[Array, FloatArray, Vjp]:
    """Compute `attention_varlen`, and return it with a function that computes its gradients.

    Parameters
    ----------
    q, k, v, offsets_q, offsets_k, comm, layout, layout_k, scheme, check, timeout
        As in `attention_varlen`.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As in `attention_varlen`.
    return_lse : bool
        Return (out, lse, vjp) instead of (out, vjp).
    deterministic : bool
        Whether gradients are bitwise equal in every run; see `cupyflash.attention_backward`.
    bias_gradient : bool
        Whether the gradient of the bias is computed; see `cupyflash.attention_backward`.

    Returns
    -------
    out : array
        As returned by `attention_varlen`.
    lse : array
        Only with `return_lse`.
    vjp : callable
        ``vjp(do, dlse=None)`` returns `cupyflash.Gradients`, as the function that
        `cupyflash.attention_vjp` returns. Every rank calls it. With `check`, arrays that were
        changed in place since are an error, the results as well.

    Raises
    ------
    DistributedError, ArgumentTypeError
        As in `attention`.
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
    ranks = Ranks(comm, layout, layout_k, scheme, check, timeout)
    request = Distributed(Request(q, k, v, Packed(offsets_q, offsets_k), options=options), ranks)
    return execute.vjp_of(request, return_lse, deterministic, bias_gradient, request.is_checked)
