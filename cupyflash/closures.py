"""The public function that returns attention with a function of its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, SupportsIndex, Unpack, overload

from numpy.typing import NDArray

from . import execute
from .arrays.interop import DLPackArray
from .arrays.typed import F, FloatArray, Number
from .execute import Vjp
from .masks import Mask
from .problem.call import Array
from .problem.keywords import explained
from .problem.options import Options
from .problem.signatures import CheckedVjpOptions
from .request import Request
from .scores import Score


@overload
def attention_vjp(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[CheckedVjpOptions],
) -> tuple[NDArray[F], Vjp[F]]: ...


@overload
def attention_vjp(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    *,
    return_lse: Literal[True],
    **options: Unpack[CheckedVjpOptions],
) -> tuple[NDArray[F], FloatArray, Vjp[F]]: ...


@overload
def attention_vjp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[CheckedVjpOptions],
) -> tuple[Array, Vjp]: ...


@overload
def attention_vjp(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    return_lse: Literal[True],
    **options: Unpack[CheckedVjpOptions],
) -> tuple[Array, FloatArray, Vjp]: ...


@explained
def attention_vjp(
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
    return_lse: bool = False,
    deterministic: bool = False,
    bias_gradient: bool = True,
    check: bool | None = None,
) -> tuple[Array, Vjp] | tuple[Array, FloatArray, Vjp]:
    """Compute attention, and return it with a function that computes its gradients.

    Parameters
    ----------
    q, k, v : array
        As in `attention`.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As in `attention`.
    return_lse : bool
        Return (out, lse, vjp) instead of (out, vjp).
    deterministic : bool
        Whether gradients are bitwise equal in every run; see `attention_backward`.
    bias_gradient : bool
        Whether the gradient of the bias is computed; see `attention_backward`.
    check : bool, optional
        Whether `vjp` notices arrays that were changed in place since. It reads them once when
        `attention_vjp` is called and once when `vjp` is. For arrays in device memory this takes
        two launches, and nothing waits for them. Where these would take more than 2 % of the
        backward's time, as for short sequences, the first eight calls with such arrays are checked
        and then one of several. True checks every call, and False none.

    Returns
    -------
    out : array
        As returned by `attention`.
    lse : array
        Only with `return_lse`.
    vjp : callable
        ``vjp(do, dlse=None)`` returns `Gradients`. It keeps q, k, v, out, lse and what else the
        call read, such as a bias or the lengths of a mask, without a copy. With `out` and `lse` in
        host memory you may do what you like: if they have changed, they are computed again.
        Changes of the other arrays are an error. On a GPU, if any array has changed, all gradients
        are NaN, and a later call of this function raises the error. It cannot be pickled; save q,
        k, v, out and lse, and call `attention_backward` where you need the gradients.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`. From `vjp`, also if an array that it keeps has changed; on a GPU, from a
        later call.

    References
    ----------
    T. Dao, "FlashAttention-2", 2023, Algorithms 1 and 2.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import attention_vjp
    >>> x = np.ones((1, 8, 4), np.float32)
    >>> out, vjp = attention_vjp(x, x, x)
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
    request = Request(q, k, v, options=options)
    return execute.vjp_of(request, return_lse, deterministic, bias_gradient, check)
