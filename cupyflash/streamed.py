"""Attention over arrays that are larger than the memory of the device that computes.

Keys and values, and maybe queries, are in host memory or in files (`numpy.memmap`). They are read
chunk by chunk while the chunk before is being computed. Chunks that the mask is proven to hide are
never read. Results are those of the functions of the same name in ``cupyflash``, within rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, SupportsIndex, Unpack, overload

from numpy.typing import NDArray

from . import execute
from .arrays.interop import DLPackArray
from .arrays.typed import F, FloatArray, Number
from .execute import Vjp
from .masks import Mask
from .pieces.executor import Chunk, Streamed
from .problem.arguments import ANYWHERE
from .problem.call import Array, Gradients
from .problem.keywords import explained
from .problem.options import Options
from .problem.signatures import BackwardOptions, CheckedVjpOptions, StreamedOptions
from .request import Request
from .scores import Score

__all__ = ["attention", "attention_backward", "attention_vjp"]


@overload
def attention(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    *,
    chunk: Chunk = "auto",
    device: SupportsIndex | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[StreamedOptions],
) -> NDArray[F]: ...


@overload
def attention(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    *,
    chunk: Chunk = "auto",
    device: SupportsIndex | None = None,
    return_lse: Literal[True],
    **options: Unpack[StreamedOptions],
) -> tuple[NDArray[F], FloatArray]: ...


@overload
def attention(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    chunk: Chunk = "auto",
    device: SupportsIndex | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[StreamedOptions],
) -> Array: ...


@overload
def attention(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    chunk: Chunk = "auto",
    device: SupportsIndex | None = None,
    return_lse: Literal[True],
    **options: Unpack[StreamedOptions],
) -> tuple[Array, FloatArray]: ...


@overload
def attention(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    chunk: Chunk = "auto",
    device: SupportsIndex | None = None,
    return_lse: bool,
    **options: Unpack[StreamedOptions],
) -> Array | tuple[Array, FloatArray]: ...


@explained
def attention(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    chunk: Chunk = "auto",
    device: SupportsIndex | None = None,
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
    """Compute exact attention, of which a chunk of queries and of keys is in memory at a time.

    Parameters
    ----------
    q, k, v : array
        As in `cupyflash.attention`. NumPy arrays may be `numpy.memmap`. If a GPU computes, each of
        them may be in its memory or in host memory.
    chunk : "auto" or int or tuple of 2 int
        The queries and the keys that are computed at a time: one number for both, or a pair.
        Queries in the memory of the GPU that computes form one chunk. There, numbers of keys are
        rounded up to a multiple of 128. By default, a chunk on a GPU may have all keys of some
        heads instead.
    device : int, optional
        The GPU that computes. Default: the one that has `q`, or the CPU if `q` is in host memory.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As in `cupyflash.attention`. Positions and lengths are those of the whole arrays, and
        dropout drops the same pairs. If a GPU computes, arrays may be in its memory or in host
        memory. A bias in host memory is read in parts; masks' and scores' arrays are copied whole.
    return_lse : bool
        Return (out, lse) instead of out.
    out, lse_out : array, optional
        Where to write the output and the LSE, for instance to a `numpy.memmap`; where `q` is.

    Returns
    -------
    out : array, shape (..., Hq, Lq, Dv)
        The output, in the dtype and memory order of `q`, and where `q` is. Over chunks of keys it
        is summed in the accumulator's type, in their order, and rounded once.
    lse : array, shape (..., Hq, Lq)
        Only with `return_lse`, as in `cupyflash.attention`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An argument is wrong, as in `cupyflash.attention`.

    Notes
    -----
    In addition to its arrays, a call needs memory for the output of a chunk of queries in the
    accumulator's type, if keys are divided, and on a GPU for two chunks of what is in host memory.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import masks, streamed
    >>> x = np.random.default_rng(0).standard_normal((4, 1000, 32), dtype=np.float32)
    >>> streamed.attention(x, x, x, chunk=256, mask=masks.causal()).shape
    (4, 1000, 32)
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
    return execute.forward(
        Streamed(Request(q, k, v, ANYWHERE, options=options), chunk, device),
        return_lse,
        out,
        lse_out,
    )


@overload
def attention_backward(
    do: DLPackArray,
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    out: DLPackArray,
    lse: DLPackArray,
    *,
    chunk: Chunk = "auto",
    device: SupportsIndex | None = None,
    **options: Unpack[BackwardOptions],
) -> Gradients[NDArray[F], FloatArray | None]: ...


@overload
def attention_backward(
    do: DLPackArray,
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    out: DLPackArray,
    lse: DLPackArray,
    *,
    chunk: Chunk = "auto",
    device: SupportsIndex | None = None,
    **options: Unpack[BackwardOptions],
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
    chunk: Chunk = "auto",
    device: SupportsIndex | None = None,
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
        As in `cupyflash.attention_backward`. If a GPU computes, each of them may be in its memory
        or in host memory.
    chunk, device
        As in `attention`.
    dlse : array, shape of lse, optional
        Gradient of the LSE, in its dtype.
    deterministic : bool
        As in `cupyflash.attention_backward`.
    bias_gradient : bool
        As in `cupyflash.attention_backward`.
    grads_out : Gradients or tuple, optional
        Arrays for dq, dk, dv and, if the call has a bias or a sink, dbias and dsink; None for a
        fresh array. Each is where the array is whose gradient it receives.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As given to `attention`.

    Returns
    -------
    Gradients
        dq, dk, dv, dbias, dsink, each with its input's shape and dtype, and where it is. They are
        summed in the accumulator's type, in the order of the chunks, and rounded once.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`.

    Notes
    -----
    In addition to what `attention` needs, a call needs memory for dq in the accumulator's type,
    where `q` is.
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
    request = Streamed(Request(q, k, v, ANYWHERE, options=options), chunk, device)
    return execute.backward(
        request, do, out, lse, dlse, deterministic, grads_out, None, bias_gradient
    )


@overload
def attention_vjp(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    *,
    chunk: Chunk = "auto",
    device: SupportsIndex | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[CheckedVjpOptions],
) -> tuple[NDArray[F], Vjp[F]]: ...


@overload
def attention_vjp(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    *,
    chunk: Chunk = "auto",
    device: SupportsIndex | None = None,
    return_lse: Literal[True],
    **options: Unpack[CheckedVjpOptions],
) -> tuple[NDArray[F], FloatArray, Vjp[F]]: ...


@overload
def attention_vjp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    chunk: Chunk = "auto",
    device: SupportsIndex | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[CheckedVjpOptions],
) -> tuple[Array, Vjp]: ...


@overload
def attention_vjp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    chunk: Chunk = "auto",
    device: SupportsIndex | None = None,
    return_lse: Literal[True],
    **options: Unpack[CheckedVjpOptions],
) -> tuple[Array, FloatArray, Vjp]: ...


@explained
def attention_vjp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    chunk: Chunk = "auto",
    device: SupportsIndex | None = None,
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
    check: bool | None = None,
) -> tuple[Array, Vjp] | tuple[Array, FloatArray, Vjp]:
    """Compute attention, and return it with a function that computes its gradients.

    Parameters
    ----------
    q, k, v, chunk, device
        As in `attention`.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As in `attention`.
    return_lse : bool
        Return (out, lse, vjp) instead of (out, vjp).
    deterministic : bool
        Whether gradients are bitwise equal in every run; see `cupyflash.attention_backward`.
    bias_gradient : bool
        Whether the gradient of the bias is computed; see `cupyflash.attention_backward`.
    check : bool, optional
        As in `cupyflash.attention_vjp`. Arrays in device memory are compared only with the
        environment variable CUPYFLASH_DEBUG=1.

    Returns
    -------
    out : array
        As returned by `attention`.
    lse : array
        Only with `return_lse`.
    vjp : callable
        ``vjp(do, dlse=None)`` returns `cupyflash.Gradients`, as the function that
        `cupyflash.attention_vjp` returns.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import streamed
    >>> x = np.ones((1, 8, 4), np.float32)
    >>> out, vjp = streamed.attention_vjp(x, x, x, chunk=3)
    >>> vjp(np.ones_like(out)).dv[0, :, 0]
    array([1., 1., 1., 1., 1., 1., 1., 1.], dtype=float32)
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
    request = Streamed(Request(q, k, v, ANYWHERE, options=options), chunk, device)
    return execute.vjp_of(request, return_lse, deterministic, bias_gradient, check)
