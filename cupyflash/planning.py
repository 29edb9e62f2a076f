"""The public functions that say what a call would run and need: signatures and documentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, SupportsFloat, SupportsIndex

from . import dispatch
from .arrays.interop import DLPackArray
from .arrays.typed import CacheDType, DType, Number
from .backends import routes
from .errors import ArgumentError
from .execute import check_flag
from .masks import Mask
from .problem.arguments import Cached, dense_or_packed
from .problem.call import Plan
from .problem.coded import Fp8
from .problem.codes import CacheCodes
from .problem.keywords import explained
from .problem.options import Options
from .request import Request
from .scores import Score


@explained
def plan(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    offsets_q: DLPackArray | Sequence[int] | None = None,
    offsets_k: DLPackArray | Sequence[int] | None = None,
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
    tangents: bool = False,
) -> Plan:
    """Say which kernel would serve a call, with which tiles, and why. Nothing is computed.

    Parameters
    ----------
    q, k, v : array
        As in `attention`, or in `attention_varlen` with the offsets.
    offsets_q, offsets_k : array of int, optional
        As in `attention_varlen`.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As in `attention`.
    q_scale, k_scale, v_scale, qkv_dtype, out_dtype
        As in `attention`.
    tangents : bool
        Whether it is about `attention_jvp`, with tangents of all arrays.

    Returns
    -------
    Plan
        kernel, block_q, block_kv, reason, axes.

    Raises
    ------
    ArgumentError, ArgumentTypeError
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
    given = q_scale, k_scale, v_scale, qkv_dtype, out_dtype
    rows = dense_or_packed(offsets_q, offsets_k)
    check_flag(tangents, "tangents")
    call = Request(q, k, v, rows, Fp8.of(*given), options).call
    if tangents and any(x is not None for x in given):
        raise ArgumentError(
            "tangents: got True with codes, which have no tangents; expected numbers in q, k and v."
        )
    route = routes.route(call, routes.target_of(call), tangents=tangents)
    return replace(route.plan, axes=call.axes)


@explained
def plan_cached(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    lengths: SupportsIndex | DLPackArray | Sequence[int],
    *,
    table: DLPackArray | None = None,
    offsets_q: DLPackArray | Sequence[int] | None = None,
    k_scale: DLPackArray | SupportsFloat | None = None,
    v_scale: DLPackArray | SupportsFloat | None = None,
    kv_dtype: CacheDType = None,
    shared: SupportsIndex = 0,
    mask: Mask | DLPackArray | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: DLPackArray | None = None,
    sink: DLPackArray | None = None,
    scale: Number | None = None,
) -> Plan:
    """Say which kernel would serve a call over a cache, and why. Nothing is computed.

    Parameters
    ----------
    q, k, v, lengths, table, offsets_q, k_scale, v_scale, kv_dtype, shared
        As in `attention_cached`.
    mask, score_mod, bias, sink, scale
        As in `attention_cached`.

    Returns
    -------
    Plan
        kernel, block_q, block_kv, reason, axes. If entries with few and with many queries have
        different kernels, and a GPU holds the offsets, it is the kernel for few queries, and the
        reason names the other one.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention_cached`.
    """
    options = Options.of(
        mask=mask,
        score_mod=score_mod,
        bias=bias,
        sink=sink,
        scale=scale,
        dropout=0.0,
        seed=None,
        precision=None,
    )
    codes = CacheCodes(k_scale, v_scale, kv_dtype)
    call = Request(q, k, v, Cached(lengths, table, offsets_q, shared), codes, options).call
    return replace(routes.route(call, routes.target_of(call)).plan, axes=call.axes)


@explained
def workspace_size(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    offsets_q: DLPackArray | Sequence[int] | None = None,
    offsets_k: DLPackArray | Sequence[int] | None = None,
    mask: Mask | DLPackArray | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: DLPackArray | None = None,
    sink: DLPackArray | None = None,
    scale: Number | None = None,
    dropout: Number = 0.0,
    seed: SupportsIndex | DLPackArray | None = None,
    precision: Literal["tf32x3"] | None = None,
    second: bool = False,
) -> int:
    """Return the most bytes of workspace that `attention_backward` needs: linear in Lq and Lk.

    A mask of which tiles are listed adds two bits for each tile of scores, 64 MiB at most.
    `attention_jvp` and `attention_backward_jvp` take none: `explain` says what they allocate.

    Parameters
    ----------
    q, k, v : array
        As in `attention`, or in `attention_varlen` with the offsets.
    offsets_q, offsets_k : array of int, optional
        As in `attention_varlen`.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As in `attention`.
    second : bool
        Whether it is about `attention_backward_jvp`.

    Returns
    -------
    int
        Bytes.

    Raises
    ------
    ArgumentError, ArgumentTypeError
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
    check_flag(second, "second")
    call = Request(q, k, v, dense_or_packed(offsets_q, offsets_k), options=options).call
    return dispatch.backend_of(call.q).workspace_size(call, second=bool(second))
