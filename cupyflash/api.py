"""The public functions on dense arrays: signatures and documentation, no logic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, SupportsFloat, SupportsIndex, Unpack, overload

from numpy.typing import NDArray

from . import execute, statistics
from .arrays.interop import DLPackArray
from .arrays.typed import DType, F, FloatArray, Number
from .backends.host_recent import recognised
from .masks import Mask
from .problem import validate
from .problem.call import Array, Gradients
from .problem.coded import Fp8
from .problem.keywords import explained
from .problem.options import Options
from .problem.signatures import ForwardOptions, WorkspaceBackwardOptions
from .reductions import Reduction
from .request import Request
from .row_request import RowRequest
from .rowwise import COMBINE, Parts, arrays_of_parts
from .scores import Score


@overload
def attention(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    *,
    return_lse: Literal[False] = False,
    reductions: None = None,
    **options: Unpack[ForwardOptions],
) -> NDArray[F]: ...


@overload
def attention(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    *,
    return_lse: Literal[True],
    reductions: None = None,
    **options: Unpack[ForwardOptions],
) -> tuple[NDArray[F], FloatArray]: ...


@overload
def attention(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    return_lse: Literal[False] = False,
    reductions: None = None,
    **options: Unpack[ForwardOptions],
) -> Array: ...


@overload
def attention(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    return_lse: Literal[True],
    reductions: None = None,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, FloatArray]: ...


@overload
def attention(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    return_lse: bool,
    reductions: None = None,
    **options: Unpack[ForwardOptions],
) -> Array | tuple[Array, FloatArray]: ...


@overload
def attention(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    *,
    reductions: Mapping[str, Reduction],
    return_lse: Literal[False] = False,
    **options: Unpack[ForwardOptions],
) -> tuple[NDArray[F], dict[str, Any]]: ...


@overload
def attention(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    *,
    reductions: Mapping[str, Reduction],
    return_lse: Literal[True],
    **options: Unpack[ForwardOptions],
) -> tuple[NDArray[F], FloatArray, dict[str, Any]]: ...


@overload
def attention(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    reductions: Mapping[str, Reduction],
    return_lse: bool = False,
    **options: Unpack[ForwardOptions],
) -> tuple[Any, ...]: ...


@recognised
@explained
def attention(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
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
    reductions: Mapping[str, Reduction] | None = None,
    out: Array | None = None,
    lse_out: Array | None = None,
) -> Array | tuple[Any, ...]:
    """Compute exact attention, softmax(scale q kᵀ) v, without storing the scores.

    Shapes follow `numpy.matmul`. The logits are score_mod(scale * q.k) + bias, -inf where `mask` is
    False; the sink is one more key.

    Parameters
    ----------
    q : array, shape (..., Hq, Lq, D)
        Queries: float16, bfloat16 (ml_dtypes), float32 or float64, with any strides. All arrays of
        a call are NumPy's, or all are CuPy's. Leading axes broadcast against those of `k` and `v`;
        a two-dimensional array is one head.
    k : array, shape (..., Hkv, Lk, D)
        Keys, with the dtype of `q`. Hq must be a multiple of Hkv: query head h reads key-value head
        ``h // (Hq // Hkv)``.
    v : array, shape (..., Hkv, Lk, Dv)
        Values, with the dtype of `q`.
    mask : Mask or array of bool, optional
        Which pairs attend (True); see `cupyflash.masks`. An array broadcasts to (..., Hq, Lq, Lk).
    score_mod : Score or sequence of Score, optional
        Changes of the scores, applied in order; see `cupyflash.scores`.
    bias : array, optional
        Added to the scores, after `score_mod`. It broadcasts to (..., Hq, Lq, Lk) and has any of
        the four dtypes. -inf hides a pair, and so does a number that rounds to -inf in the
        accumulator's type.
    sink : array, shape (Hq,), optional
        Logit of one extra key of value 0 per head.
    scale : float, optional
        Any finite number. Default: 1 / sqrt(D).
    dropout : float
        Probability in [0, 1) of dropping a pair, after the softmax; needs `seed`.
    seed : int or 0-d array of uint64, optional
        Key of the Philox generator: the same seed drops the same pairs everywhere.
    precision : {None, "tf32x3"}
        For float32 arrays only. With "tf32x3", a GPU of compute capability 8.0 or newer may
        multiply on its tensor cores, for head sizes up to 256. Each product is then the sum of
        three (relative error 2^-21 instead of 2^-24). A CPU computes in float32 all the same.
    q_scale, k_scale, v_scale : array of float32 or float, optional
        For codes of float8 in `q`, `k` and `v`, as of `quantize`: the result is attention of
        ``scale * code``. A scale broadcasts to (..., L, 1). Codes have no gradients.
    qkv_dtype : dtype_like, optional
        What codes in uint8 are: "float8_e4m3fn" or "float8_e5m2".
    out_dtype : dtype_like, optional
        The type of the output of codes: bfloat16 by default, float16 or float32.
    return_lse : bool
        Return (out, lse) instead of out.
    reductions : mapping of str to Reduction, optional
        Statistics to return, too, by names of your own: see `cupyflash.reductions`. They are what
        `reduce` computes of the same arrays and options: a pass over the scores each, which reads
        the log-sum-exp of this call.
    out : array, optional
        Where to write the output.
    lse_out : array, optional
        Where to write the LSE.

    Returns
    -------
    out : array, shape (..., Hq, Lq, Dv)
        The output, in the dtype and memory order of `q`. A query that sees no key gets 0.
    lse : array, shape (..., Hq, Lq)
        Only with `return_lse`: the natural logarithm of the sum of exp(logits), with the sink and
        before dropout. It is float32 (float64 for float64 input), and -inf for a query that sees no
        key.
    found : dict of str to array
        Only with `reductions`: what `reduce` returns. Leading axes are those of all three arrays.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An argument is wrong. The message names it, what it got and expected, and the remedy.
        Every array is left as it was.

    Notes
    -----
    The sums of abs(q * k) over D, before and after the scale, and of abs(v) over the keys that a
    query sees, must stay below half the largest number of the accumulator, 1.7e38 or 9e307; the
    latter sum must do so even after it is multiplied by 256 (16-bit types on tensor cores) and by
    ``1 / (1 - dropout)``. Beyond that, a result may be infinite or NaN. The remedy is to scale `v`:
    out is linear in it.

    GPUs of compute capability 9.0 multiply codes as they are, for 512 queries and keys or more, and
    round weights to float8_e4m3fn. Otherwise, a GPU first rounds ``scale * code`` to `out_dtype`,
    and a CPU to float32; `plan` says which.

    References
    ----------
    T. Dao, "FlashAttention-2", 2023, Algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import attention, masks
    >>> x = np.random.default_rng(0).standard_normal((2, 4, 100, 32), dtype=np.float32)
    >>> attention(x, x, x, mask=masks.causal()).shape
    (2, 4, 100, 32)
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
    request = Request(q, k, v, codes=Fp8.of(*given), options=options)
    if reductions is not None:
        return statistics.with_reductions(request, reductions, return_lse, out, lse_out)
    return execute.forward(request, return_lse, out, lse_out)


@overload
def attention_backward(
    do: DLPackArray,
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    out: DLPackArray,
    lse: DLPackArray,
    **options: Unpack[WorkspaceBackwardOptions],
) -> Gradients[NDArray[F], FloatArray | None]: ...


@overload
def attention_backward(
    do: DLPackArray,
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    out: DLPackArray,
    lse: DLPackArray,
    **options: Unpack[WorkspaceBackwardOptions],
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
    """Compute the gradients of `attention` from its output and LSE.

    Parameters
    ----------
    do : array, shape of out
        Gradient of the output, in the dtype of `q`.
    q, k, v : array
        As given to `attention`.
    out, lse : array
        As returned by `attention` with the same options and ``return_lse=True``.
    dlse : array, shape of lse, optional
        Gradient of the LSE, in its dtype.
    deterministic : bool
        Ask for bitwise equal gradients in every run. This matters on tensor cores and in float32:
        there, dq is otherwise summed in any order, which takes fewer products.
    bias_gradient : bool
        Whether the gradient of the bias is computed. It takes products of its own, which False
        leaves out; dbias is then None.
    grads_out : Gradients or tuple, optional
        Arrays for dq, dk, dv and, if the call has a bias or a sink, dbias and dsink; None for a
        fresh array. They may be views: three views of one packed QKV gradient receive the gradients
        without a copy. `Gradients` takes arrays for learned look-ups, too: ``dlookups={table: x}``.
    workspace : array of uint8, optional
        Scratch memory of at least `workspace_size` bytes, on the device of `q`. It is needed while
        a CUDA graph is being captured.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As given to `attention`.

    Returns
    -------
    Gradients
        dq, dk, dv, dbias, dsink, each with its input's shape and dtype; ``dlookups`` has those of
        learned look-ups of `score_mod`, as of ``lookup(array, learned=True)``, by look-up.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`.

    Notes
    -----
    In addition to the limits of `attention`, the sums of abs(do * v) and abs(do * out) over Dv, of
    abs(dS * k) over keys and of abs(dS * q) over queries, both before and after the scale, and of
    abs(P * do) over queries must stay below half the largest number of the accumulator. dS is the
    gradient of the scores, and P are the weights. Beyond that, gradients may be infinite or NaN.

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
    request = Request(q, k, v, options=options)
    return execute.backward(
        request, do, out, lse, dlse, deterministic, grads_out, workspace, bias_gradient
    )


def combine(parts: Sequence[tuple[DLPackArray, DLPackArray]]) -> tuple[Array, FloatArray]:
    """Join attention over disjoint sets of keys into attention over all of them.

    `combine` is associative and commutative up to rounding, and (0, -inf) is its unit. No element
    of the output is larger than the largest of the parts, so finite parts give finite results.
    Calls with dropout cannot be combined. If there is a sink, exactly one of the calls gets it.

    Parameters
    ----------
    parts : sequence of (out, lse)
        Results of calls over different keys with the same queries: out of shape (..., Lq, Dv), lse
        (natural logarithm) of shape (..., Lq).

    Returns
    -------
    out : array
        In the dtype of the parts.
    lse : array
        float32, or float64.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        The parts differ in shape or dtype, or there are none.

    Notes
    -----
    A row without keys has the log-sum-exp -inf. A log-sum-exp of NaN or +inf makes its row NaN. Any
    other number is taken as it is, so convert what another library returns: logarithms to base 2 by
    ``lse * math.log(2)``, and rows without keys, for which PyTorch's memory-efficient kernel has
    0.0, by ``numpy.where(hidden, -numpy.inf, lse)``. One of 16 bits (JAX, for arrays of 16 bits)
    has lost what a weight needs, and is refused.

    References
    ----------
    M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018, equation 4.
    """

    def check() -> Parts:
        return validate.parts(parts)

    results = execute.rows(RowRequest(COMBINE, check, arrays_of_parts(parts)))
    return results["out"], results["lse"]
