"""Attention of a sequence that many ranks hold together: the public functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, SupportsIndex, Unpack, overload

from numpy.typing import NDArray

from .. import execute
from ..arrays.interop import DLPackArray
from ..arrays.typed import F, FloatArray, Number
from ..execute import Vjp
from ..masks import Mask
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

__all__ = ["attention", "attention_backward", "attention_vjp"]


@overload
def attention(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[ForwardOptions],
) -> NDArray[F]: ...


@overload
def attention(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    *,
    return_lse: Literal[True],
    **options: Unpack[ForwardOptions],
) -> tuple[NDArray[F], FloatArray]: ...


@overload
def attention(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[ForwardOptions],
) -> Array: ...


@overload
def attention(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    return_lse: Literal[True],
    **options: Unpack[ForwardOptions],
) -> tuple[Array, FloatArray]: ...


@overload
def attention(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    return_lse: bool,
    **options: Unpack[ForwardOptions],
) -> Array | tuple[Array, FloatArray]: ...


@explained
def attention(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
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
    """Compute exact attention of the queries that this rank holds, to the keys of all ranks.

    Every rank makes the same call, with the rows that its layout gives it.

    Parameters
    ----------
    q, k, v : array
        As in `cupyflash.attention`, with this rank's positions, as `Layout.take`
        returns them. All but their axes of positions is the same on every rank.
    comm : Communicator
        The ranks, as `communicator` returns them.
    layout : Layout
        Which rank holds which positions of the queries, and of the keys unless `layout_k` says so.
    layout_k : Layout, optional
        Which rank holds which keys, if their sequence is another one (cross attention).
    scheme : {"auto", "rounds", "gather", "nodes", "heads", "heads x rounds"}
        "rounds": keys and values travel from rank to rank while others are computed, and a rank
        stores those of two ranks besides its own. "gather": each rank gets all that it needs in
        one exchange. "nodes": a key goes to another node once, to one rank there, which passes it
        on; keys of all ranks of a node are computed together. Nodes have as many ranks each, two or
        more. "heads": each rank computes some heads of all positions, so that rows travel
        to the ranks of their heads, and results back; there must be a key-value head or more for
        each rank. "heads x rounds": ranks of a node, or as many of them as there are heads for,
        divide the heads like that, and keys travel in rounds between such groups. "auto": the one
        that takes the least time by the model that `cupyflash.explain` uses, of H100s on the nodes
        of `comm`; maybe not the same one in the backward. The first call of its kind with these
        layouts and this comm decides: what arrays of a mask hold may change later, it stays.
    check : bool
        Before anything is sent, ranks tell each other whether they are ready, and a digest of the
        call. False skips that in a loop that is known to be right.
    timeout : float
        Seconds to wait for other ranks, each time. Then every rank raises `DistributedError`, and
        the communicator refuses further calls.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As in `cupyflash.attention`, and the same on every rank. Masks and scores see the positions
        and the lengths of the whole sequence, and dropout drops the pairs that it drops on one
        rank. A bias has this rank's rows, or one for all queries, and columns for all keys.
    return_lse : bool
        Return (out, lse) instead of out.
    out, lse_out : array, optional
        Where to write the output and the LSE.

    Returns
    -------
    out : array, shape (..., Hq, L of this rank, Dv)
        The output for this rank's queries, in the dtype and memory order of `q`. It is summed in
        the accumulator's type over the keys of all ranks, and rounded once.
    lse : array, shape (..., Hq, L of this rank)
        Only with `return_lse`, as in `cupyflash.attention`.

    Raises
    ------
    DistributedError
        A rank has a wrong argument, the ranks make different calls, or one did not come. Every
        rank raises it; it names the rank and the cause.
    ArgumentTypeError
        `comm` is no communicator, so that other ranks cannot be told.

    Notes
    -----
    Results are bitwise equal in every run with the same ranks, layout, mask and scheme. With other
    ranks, layouts or schemes they are equal within the rounding-error bound. With "heads", those
    of NumPy arrays are bitwise those of one rank, unless that has kernels for few queries.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import distributed, masks
    >>> x = np.random.default_rng(0).standard_normal((4, 1000, 32), dtype=np.float32)
    >>> def work(comm):
    ...     layout = distributed.layout(comm, 1000, mask=masks.causal())
    ...     own = layout.take(x)
    ...     options = {"comm": comm, "layout": layout, "mask": masks.causal()}
    ...     return distributed.attention(own, own, own, **options).shape
    >>> distributed.Threads(2).run(work)
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
    return execute.forward(
        Distributed(Request(q, k, v, options=options), ranks), return_lse, out, lse_out
    )


@overload
def attention_backward(
    do: DLPackArray,
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    out: DLPackArray,
    lse: DLPackArray,
    **options: Unpack[RanksBackwardOptions],
) -> Gradients[NDArray[F], FloatArray | None]: ...


@overload
def attention_backward(
    do: DLPackArray,
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    out: DLPackArray,
    lse: DLPackArray,
    **options: Unpack[RanksBackwardOptions],
) -> Gradients[Array, FloatArray | None]: ...


@explained
def attention_backward(
    do: DLPackArray,
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    out: DLPackArray,
    lse: DLPackArray,
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
    """Compute the gradients of `attention` from its output and LSE.

    Parameters
    ----------
    do, q, k, v, out, lse : array
        As in `cupyflash.attention_backward`, with this rank's positions.
    comm, layout, layout_k, scheme, check, timeout
        As in `attention`.
    dlse : array, shape of lse, optional
        Gradient of the LSE, in its dtype; given on every rank or on none.
    deterministic : bool
        As in `cupyflash.attention_backward`. What travels is added in a fixed order in any case.
    bias_gradient : bool
        As in `cupyflash.attention_backward`.
    grads_out : Gradients or tuple, optional
        Arrays for dq, dk, dv and, if the call has a bias or a sink, dbias and dsink; None for a
        fresh array.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As given to `attention`.

    Returns
    -------
    Gradients
        dq, dk, dv, dbias, dsink, each with its input's shape and dtype: those of what this rank
        holds. dsink, and dbias of a bias of one row, are sums over all ranks, and the same on each.

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
    request = Distributed(Request(q, k, v, options=options), ranks)
    return execute.backward(
        request, do, out, lse, dlse, deterministic, grads_out, None, bias_gradient
    )


@overload
def attention_vjp(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[RanksVjpOptions],
) -> tuple[NDArray[F], Vjp[F]]: ...


@overload
def attention_vjp(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    *,
    return_lse: Literal[True],
    **options: Unpack[RanksVjpOptions],
) -> tuple[NDArray[F], FloatArray, Vjp[F]]: ...


@overload
def attention_vjp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[RanksVjpOptions],
) -> tuple[Array, Vjp]: ...


@overload
def attention_vjp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    return_lse: Literal[True],
    **options: Unpack[RanksVjpOptions],
) -> tuple[Array, FloatArray, Vjp]: ...


@explained
def attention_vjp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
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
    """Compute attention, and return it with a function that computes its gradients.

    Parameters
    ----------
    q, k, v, comm, layout, layout_k, scheme, check, timeout
        As in `attention`.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As in `attention`.
    return_lse : bool
        Return (out, lse, vjp) instead of (out, vjp).
    deterministic : bool
        Whether gradients are bitwise equal in every run; see `cupyflash.attention_backward`.
    bias_gradient : bool
        Whether the gradient of the bias is computed; see `cupyflash.attention_backward`.

    Returns
    -------
    out : array
        As returned by `attention`.
    lse : array
        Only with `return_lse`.
    vjp : callable
        ``vjp(do, dlse=None)`` returns `cupyflash.Gradients`, as the function that
        `cupyflash.attention_vjp` returns. Every rank calls it. With `check`, arrays that were
        changed in place since are an error, the results as well; those in device memory are
        compared only with the environment variable CUPYFLASH_DEBUG=1.

    Raises
    ------
    DistributedError, ArgumentTypeError
        As in `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import distributed
    >>> x = np.ones((1, 300, 4), np.float32)
    >>> def work(comm):
    ...     layout = distributed.layout(comm, 300)
    ...     own = layout.take(x)
    ...     out, vjp = distributed.attention_vjp(own, own, own, comm=comm, layout=layout)
    ...     return vjp(np.ones_like(out)).dv.shape
    >>> distributed.Threads(2).run(work)
    [(1, 128, 4), (1, 172, 4)]
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
    request = Distributed(Request(q, k, v, options=options), ranks)
    return execute.vjp_of(request, return_lse, deterministic, bias_gradient, request.is_checked)
