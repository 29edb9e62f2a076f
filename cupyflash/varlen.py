"""The public functions on packed sequences of different lengths: signatures and documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, SupportsFloat, SupportsIndex, Unpack, overload

from numpy.typing import NDArray

from . import execute
from .arrays.interop import DLPackArray
from .arrays.typed import DType, F, FloatArray, Number
from .backends.host_recent import recognised_packed
from .execute import Vjp
from .masks import Mask
from .problem.arguments import Packed
from .problem.call import Array, Gradients
from .problem.coded import Fp8
from .problem.keywords import explained
from .problem.options import Options
from .problem.signatures import ForwardOptions, VjpOptions, WorkspaceBackwardOptions
from .request import Request
from .scores import Score


@overload
def attention_varlen(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    *,
    check: bool | None = None,
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
    check: bool | None = None,
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
    check: bool | None = None,
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
    check: bool | None = None,
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
    check: bool | None = None,
    return_lse: bool,
    **options: Unpack[ForwardOptions],
) -> Array | tuple[Array, FloatArray]: ...


@recognised_packed
@explained
def attention_varlen(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    *,
    check: bool | None = None,
    mask: Mask | DLPackArray | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: DLPackArray | None = None,
    sink: DLPackArray | None = None,
    scale: Number | None = None,
    dropout: Number = 0.0,
    seed: SupportsIndex | DLPackArray | None = None,
    precision: Literal["tf32x3"] | None = None,
    q_scale: DLPackArray | SupportsFloat | None = None,
    k_scale: DLPackArray | SupportsFloat | None = None,
    v_scale: DLPackArray | SupportsFloat | None = None,
    qkv_dtype: DType = None,
    out_dtype: DType = None,
    return_lse: bool = False,
    out: Array | None = None,
    lse_out: Array | None = None,
) -> Array | tuple[Array, FloatArray]:
    """Compute attention within each of several sequences that lie one after the other.

    Parameters
    ----------
    q : array, shape (Hq, total_q, D)
        Queries of all sequences.
    k : array, shape (Hkv, total_k, D)
        Keys of all sequences.
    v : array, shape (Hkv, total_k, Dv)
        Values of all sequences.
    offsets_q, offsets_k : array of int, shape (n + 1,)
        Sequence b has the rows from ``offsets[b]`` to ``offsets[b + 1]``. Offsets run from 0 to the
        total and never decrease.
    check : bool, optional
        How offsets on a GPU are checked; those in host memory always are, by the call. By default
        a short kernel checks them, and the call waits for nothing: other kernels hold wrong offsets
        within the arrays, so that results are wrong, and a later call on that GPU raises the error.
        With True the call reads the offsets and raises at once. It waits until the GPU has done
        what was asked of it before, and new offsets cost some hundred microseconds in addition.
        Known offsets, these or those in host memory, have one use: the gradients of sequences that
        are all shorter than 512 are computed by kernels for them. With False nothing is checked.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As in `attention`. In masks and scores, b is the sequence, i and j count within it, and the
        default offset of `masks.causal` is that sequence's Lk - Lq. `bias` and a mask array
        broadcast to (n, Hq, max Lq, max Lk); `masks.segments` takes packed arrays.
    q_scale, k_scale, v_scale, qkv_dtype, out_dtype
        As in `attention`; scales broadcast to (H, total, 1).
    return_lse, out, lse_out
        As in `attention`.

    Returns
    -------
    out : array, shape (Hq, total_q, Dv)
        The output, as `attention` returns it for each sequence alone.
    lse : array, shape (Hq, total_q)
        Only with `return_lse`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`.

    References
    ----------
    T. Dao, "FlashAttention-2", 2023, Algorithm 1.
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
    given = q_scale, k_scale, v_scale, qkv_dtype, out_dtype
    request = Request(q, k, v, Packed(offsets_q, offsets_k, check), Fp8.of(*given), options)
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
    *,
    check: bool | None = None,
    **options: Unpack[WorkspaceBackwardOptions],
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
    *,
    check: bool | None = None,
    **options: Unpack[WorkspaceBackwardOptions],
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
    check: bool | None = None,
    dlse: DLPackArray | None = None,
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
) -> Gradients[Array, FloatArray | None]:
    """Compute the gradients of `attention_varlen`.

    Parameters
    ----------
    do, q, k, v, out, lse : array
        As in `attention_backward`, packed.
    offsets_q, offsets_k : array of int, shape (n + 1,)
        As in `attention_varlen`.
    check : bool, optional
        As in `attention_varlen`.
    dlse, deterministic, bias_gradient, grads_out, workspace
        As in `attention_backward`.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As given to `attention_varlen`.

    Returns
    -------
    Gradients
        dq, dk, dv, dbias, dsink, each with its input's shape and dtype; ``dlookups`` has those of
        learned look-ups of `score_mod`, as of ``lookup(array, learned=True)``, by look-up.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`.

    References
    ----------
    T. Dao, "FlashAttention-2", 2023, Algorithm 2.
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
    return execute.backward(
        request, do, out, lse, dlse, deterministic, grads_out, workspace, bias_gradient
    )


@overload
def attention_varlen_vjp(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    *,
    check: bool | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[VjpOptions],
) -> tuple[NDArray[F], Vjp[F]]: ...


@overload
def attention_varlen_vjp(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    *,
    check: bool | None = None,
    return_lse: Literal[True],
    **options: Unpack[VjpOptions],
) -> tuple[NDArray[F], FloatArray, Vjp[F]]: ...


@overload
def attention_varlen_vjp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    *,
    check: bool | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[VjpOptions],
) -> tuple[Array, Vjp]: ...


@overload
def attention_varlen_vjp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    *,
    check: bool | None = None,
    return_lse: Literal[True],
    **options: Unpack[VjpOptions],
) -> tuple[Array, FloatArray, Vjp]: ...


@explained
def attention_varlen_vjp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    *,
    check: bool | None = None,
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
    q, k, v, offsets_q, offsets_k
        As in `attention_varlen`.
    check : bool, optional
        As in `attention_varlen` for offsets, and as in `attention_vjp` for arrays that were changed
        in place since, offsets in device memory among them.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As in `attention_varlen`.
    return_lse : bool
        Return (out, lse, vjp) instead of (out, vjp).
    deterministic : bool
        Whether gradients are bitwise equal in every run; see `attention_backward`.
    bias_gradient : bool
        Whether the gradient of the bias is computed; see `attention_backward`.

    Returns
    -------
    out : array
        As returned by `attention_varlen`.
    lse : array
        Only with `return_lse`.
    vjp : callable
        ``vjp(do, dlse=None)`` returns `Gradients`, as in `attention_vjp`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`.

    References
    ----------
    T. Dao, "FlashAttention-2", 2023, Algorithms 1 and 2.
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
    return execute.vjp_of(request, return_lse, deterministic, bias_gradient, check)
