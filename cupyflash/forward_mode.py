"""The public functions of forward mode: results and their derivatives along a direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, SupportsIndex, TypeAlias, Unpack, overload

from numpy.typing import NDArray

from . import execute
from .arrays.interop import DLPackArray
from .arrays.typed import F, FloatArray, Number
from .masks import Mask
from .problem.arguments import Packed
from .problem.call import Array
from .problem.keywords import explained
from .problem.options import Options
from .problem.signatures import JvpOptions
from .problem.tangents import Tangents
from .request import Request
from .scores import Score

Results: TypeAlias = tuple[Array, Array] | tuple[Array, Array, FloatArray, FloatArray]


@overload
def attention_jvp(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    tq: DLPackArray | None = None,
    tk: DLPackArray | None = None,
    tv: DLPackArray | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[JvpOptions],
) -> tuple[NDArray[F], NDArray[F]]: ...


@overload
def attention_jvp(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    tq: DLPackArray | None = None,
    tk: DLPackArray | None = None,
    tv: DLPackArray | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[JvpOptions],
) -> tuple[NDArray[F], NDArray[F], FloatArray, FloatArray]: ...


@overload
def attention_jvp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    tq: DLPackArray | None = None,
    tk: DLPackArray | None = None,
    tv: DLPackArray | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[JvpOptions],
) -> tuple[Array, Array]: ...


@overload
def attention_jvp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    tq: DLPackArray | None = None,
    tk: DLPackArray | None = None,
    tv: DLPackArray | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[JvpOptions],
) -> tuple[Array, Array, FloatArray, FloatArray]: ...


@overload
def attention_jvp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    tq: DLPackArray | None = None,
    tk: DLPackArray | None = None,
    tv: DLPackArray | None = None,
    *,
    return_lse: bool,
    **options: Unpack[JvpOptions],
) -> Results: ...


@explained
def attention_jvp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    tq: DLPackArray | None = None,
    tk: DLPackArray | None = None,
    tv: DLPackArray | None = None,
    *,
    tbias: DLPackArray | None = None,
    tsink: DLPackArray | None = None,
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
    tout_out: Array | None = None,
    lse_out: Array | None = None,
    tlse_out: Array | None = None,
) -> Results:
    """Compute attention and its derivative along a direction, in one pass: forward mode.

    If q moves by ``e * tq``, k by ``e * tk`` and so on, for a small number e, then the output moves
    by ``e * tout``. Memory grows with L, as in `attention`; nothing is kept for later.

    Parameters
    ----------
    q, k, v : array
        As in `attention`.
    tq, tk, tv : array, optional
        The direction: tangents of `q`, `k` and `v`, each of its array's shape and dtype, with any
        strides. None stands for zeros, and saves the products with them.
    tbias, tsink : array, optional
        Tangents of `bias` and `sink`, likewise.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As in `attention`. The same pairs are dropped from the output and from its tangent.
    return_lse : bool
        Return (out, tout, lse, tlse) instead of (out, tout).
    out, tout_out, lse_out, tlse_out : array, optional
        Where to write the results.

    Returns
    -------
    out : array, shape (..., Hq, Lq, Dv)
        As returned by `attention`, up to rounding.
    tout : array, shape of out
        The tangent of the output, in the dtype of `q`. It is 0 for a query that sees no key.
    lse : array, shape (..., Hq, Lq)
        Only with `return_lse`: as returned by `attention`.
    tlse : array, shape of lse
        Only with `return_lse`: the tangent of `lse`, in its dtype. It is 0 for a query that sees no
        key, and `tsink` if there is a sink.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`; and if a tangent has another shape or dtype than its array, or its array
        is not there.

    See Also
    --------
    attention_vjp : Gradients: derivatives of one number by all arrays.

    Notes
    -----
    With the letters of `attention_backward`, weights P, dropout factors Z, and the slope f' of the
    score changes, ::

        tt   = f' * scale * (tq kᵀ + q tkᵀ) + tbias
        tlse = rowsum(P * tt) + p_sink * tsink
        tout = (Z * P * (tt - tlse)) v + (Z * P) tv

    The limits of `attention` hold for the sums of abs(tq * k) and abs(q * tk), too, and for those
    of abs((tt - c) * v) and abs(tv) over the keys that a query sees, for every number c between
    the smallest and the largest of their tt.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import attention, attention_jvp
    >>> q, k, v, tq = np.random.default_rng(0).standard_normal((4, 2, 50, 8))
    >>> out, tout = attention_jvp(q, k, v, tq)
    >>> difference = (attention(q + 1e-6 * tq, k, v) - attention(q - 1e-6 * tq, k, v)) / 2e-6
    >>> bool(abs(tout - difference).max() < 1e-8)
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
    tangents = Tangents(tq, tk, tv, tbias, tsink)
    request = Request(q, k, v, options=options)
    results = out, tout_out, lse_out, tlse_out
    made: Results = execute.forward_tangent(request, tangents, return_lse, results)
    return made


@overload
def attention_varlen_jvp(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    tq: DLPackArray | None = None,
    tk: DLPackArray | None = None,
    tv: DLPackArray | None = None,
    *,
    check: bool | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[JvpOptions],
) -> tuple[NDArray[F], NDArray[F]]: ...


@overload
def attention_varlen_jvp(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    tq: DLPackArray | None = None,
    tk: DLPackArray | None = None,
    tv: DLPackArray | None = None,
    *,
    check: bool | None = None,
    return_lse: Literal[True],
    **options: Unpack[JvpOptions],
) -> tuple[NDArray[F], NDArray[F], FloatArray, FloatArray]: ...


@overload
def attention_varlen_jvp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    tq: DLPackArray | None = None,
    tk: DLPackArray | None = None,
    tv: DLPackArray | None = None,
    *,
    check: bool | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[JvpOptions],
) -> tuple[Array, Array]: ...


@overload
def attention_varlen_jvp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    tq: DLPackArray | None = None,
    tk: DLPackArray | None = None,
    tv: DLPackArray | None = None,
    *,
    check: bool | None = None,
    return_lse: Literal[True],
    **options: Unpack[JvpOptions],
) -> tuple[Array, Array, FloatArray, FloatArray]: ...


@overload
def attention_varlen_jvp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    tq: DLPackArray | None = None,
    tk: DLPackArray | None = None,
    tv: DLPackArray | None = None,
    *,
    check: bool | None = None,
    return_lse: bool,
    **options: Unpack[JvpOptions],
) -> Results: ...


@explained
def attention_varlen_jvp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    offsets_q: DLPackArray | Sequence[int],
    offsets_k: DLPackArray | Sequence[int],
    tq: DLPackArray | None = None,
    tk: DLPackArray | None = None,
    tv: DLPackArray | None = None,
    *,
    check: bool | None = None,
    tbias: DLPackArray | None = None,
    tsink: DLPackArray | None = None,
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
    tout_out: Array | None = None,
    lse_out: Array | None = None,
    tlse_out: Array | None = None,
) -> Results:
    """Compute `attention_varlen` and its derivative along a direction, in one pass.

    Parameters
    ----------
    q, k, v, offsets_q, offsets_k
        As in `attention_varlen`.
    tq, tk, tv : array, optional
        Tangents of `q`, `k` and `v`, packed like them; None stands for zeros.
    check : bool, optional
        As in `attention_varlen`.
    tbias, tsink : array, optional
        Tangents of `bias` and `sink`.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As in `attention_varlen`.
    return_lse, out, tout_out, lse_out, tlse_out
        As in `attention_jvp`.

    Returns
    -------
    out, tout : array, shape (Hq, total_q, Dv)
        The output and its tangent, as `attention_jvp` returns them for each sequence alone.
    lse, tlse : array, shape (Hq, total_q)
        Only with `return_lse`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention_jvp`.
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
    tangents = Tangents(tq, tk, tv, tbias, tsink)
    request = Request(q, k, v, Packed(offsets_q, offsets_k, check), options=options)
    results = out, tout_out, lse_out, tlse_out
    made: Results = execute.forward_tangent(request, tangents, return_lse, results)
    return made
