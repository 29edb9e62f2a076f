"""Tensors and a cache of keys and values: attention for inference, new rows, and rotations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from ..errors import ArgumentTypeError
from ..masks import Mask
from ..problem.keywords import explained
from ..problem.rotary import Rotary
from ..scores import Score
from . import cached_calls, cached_operators, tensors


@overload
def attention_cached(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    lengths: int | torch.Tensor | Sequence[int], *, table: torch.Tensor | None = ...,
    offsets_q: torch.Tensor | Sequence[int] | None = ..., k_scale: torch.Tensor | None = ...,
    v_scale: torch.Tensor | None = ..., kv_dtype: Any = ..., shared: int = ...,
    mask: Mask | torch.Tensor | None = ..., score_mod: Score | Sequence[Score] | None = ...,
    bias: torch.Tensor | None = ..., sink: torch.Tensor | None = ..., scale: float | None = ...,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...  # fmt: skip


@overload
def attention_cached(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    lengths: int | torch.Tensor | Sequence[int], *, table: torch.Tensor | None = ...,
    offsets_q: torch.Tensor | Sequence[int] | None = ..., k_scale: torch.Tensor | None = ...,
    v_scale: torch.Tensor | None = ..., kv_dtype: Any = ..., shared: int = ...,
    mask: Mask | torch.Tensor | None = ..., score_mod: Score | Sequence[Score] | None = ...,
    bias: torch.Tensor | None = ..., sink: torch.Tensor | None = ..., scale: float | None = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@explained
def attention_cached(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: int | torch.Tensor | Sequence[int],
    *,
    table: torch.Tensor | None = None,
    offsets_q: torch.Tensor | Sequence[int] | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    kv_dtype: Any = None,
    shared: int = 0,
    mask: Mask | torch.Tensor | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute attention of new queries over a cache of keys and values.

    The arguments are those of `cupyflash.attention_cached`. No gradient is computed. Under
    torch.compile, the call is one operator of the graph.

    Parameters
    ----------
    q : torch.Tensor, shape (B, Hq, Lq, D)
        Queries. With `offsets_q` they are packed: (Hq, total, D).
    k : torch.Tensor, shape (B, Hkv, S, D)
        Keys, with room for S positions. With `table` they are in pages: (P, Hkv, page, D).
    v : torch.Tensor, shape (B, Hkv, S, Dv)
        Values. With `table` they are in pages: (P, Hkv, page, Dv).
    lengths : int or torch.Tensor, shape (B,)
        The number of positions that the cache holds, including those of the queries. A tensor is
        of int32 or int64, on the device of `q`.
    table : torch.Tensor, shape (B, N), optional
        The page numbers of each sequence, of int32 or int64.
    offsets_q : torch.Tensor, shape (B + 1,), optional
        Sequence b has the packed queries from ``offsets_q[b]`` to ``offsets_q[b + 1]``.
    k_scale, v_scale : torch.Tensor of float32, optional
        The scales of a cache of codes, as in `cupyflash.attention_cached`.
    kv_dtype : str or torch.dtype, optional
        What the bytes of `k` and `v` are if they are uint8: "int8", "float8_e4m3fn", "float8_e5m2"
        or "int4". Tensors of int8 and of float8 types say it themselves.
    shared, mask, score_mod, bias, sink, scale
        As in `cupyflash.attention_cached`.
    return_lse : bool
        Return (out, lse) instead of out.

    Returns
    -------
    out : torch.Tensor, shape (B, Hq, Lq, Dv), or (Hq, total, Dv)
        In the dtype of `q`.
    lse : torch.Tensor, shape (B, Hq, Lq), or (Hq, total)
        Only with `return_lse`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `cupyflash.attention_cached`, and if a tensor requires a gradient.
    """
    is_operator = tensors.is_traced() or tensors.has_no_elements(q)
    compute = cached_operators.attention if is_operator else cached_calls.attention
    return compute(
        q,
        k,
        v,
        lengths,
        table=table,
        offsets_q=offsets_q,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_dtype=kv_dtype,
        shared=shared,
        mask=mask,
        score_mod=score_mod,
        bias=bias,
        sink=sink,
        scale=scale,
        return_lse=return_lse,
    )


@explained
def append(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: int | torch.Tensor | Sequence[int],
    *,
    table: torch.Tensor | None = None,
    offsets: torch.Tensor | Sequence[int] | None = None,
    q: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    positions: torch.Tensor | Sequence[Any] | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    kv_dtype: Any = None,
    shared: int = 0,
) -> torch.Tensor | None:
    """Write new keys and values to a cache in place, and rotate keys and queries.

    The arguments are those of `cupyflash.append`. No gradient is computed.

    Parameters
    ----------
    k_new : torch.Tensor, shape (B, Hkv, n, D)
        New keys. With `offsets` they are packed: (Hkv, total, D).
    v_new : torch.Tensor, shape (B, Hkv, n, Dv)
        New values. With `offsets` they are packed: (Hkv, total, Dv).
    k : torch.Tensor, shape (B, Hkv, S, D)
        The cache's keys, in the dtype of `k_new` or codes. With `table` they are in pages: (P, Hkv,
        page, D).
    v : torch.Tensor, shape (B, Hkv, S, Dv)
        The cache's values. With `table` they are in pages: (P, Hkv, page, Dv).
    lengths : int or torch.Tensor, shape (B,)
        How many positions the cache holds after this step, as int32 or int64.
    table : torch.Tensor, shape (B, N), optional
        The page numbers of each sequence, of int32 or int64.
    offsets : torch.Tensor, shape (B + 1,), optional
        Entry b has the packed rows from ``offsets[b]`` to ``offsets[b + 1]``.
    q : torch.Tensor, shape (B, Hq, n, D), optional
        Queries of the same positions, which `rotary` rotates, too.
    rotary : Rotary, optional
        The angles, which may be made from tensors: ``Rotary(cos, sin)``.
    positions : torch.Tensor, shape (B, n) or (total,), optional
        The positions by which rows are rotated, if they are not those in the cache.
    k_scale, v_scale : torch.Tensor of float32, optional
        Where to write the scales of a cache of codes: (B, Hkv, S, 1), or (P, Hkv, page, 1).
    kv_dtype : str or torch.dtype, optional
        Which codes `k` and `v` hold if they are uint8.
    shared : int
        As in `cupyflash.append`: the number of first positions at which entries may write the same
        row of a page, if they write the same.

    Returns
    -------
    torch.Tensor or None
        The rotated queries, in the dtype of `q`; None without `q`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `cupyflash.append`, and if a tensor requires a gradient.
    """
    is_operator = tensors.is_traced() or tensors.has_no_elements(k)
    compute = cached_operators.append if is_operator else cached_calls.append
    return compute(
        k_new,
        v_new,
        k,
        v,
        lengths,
        table=table,
        offsets=offsets,
        q=q,
        rotary=rotary,
        positions=positions,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_dtype=kv_dtype,
        shared=shared,
    )


@torch.compiler.disable(reason="rotations are not operators of torch.compile")
@explained
def rope(
    x: torch.Tensor,
    positions: torch.Tensor | Sequence[Any],
    rotary: Rotary,
    *,
    inverse: bool = False,
) -> torch.Tensor:
    """Rotate rows by their positions: rotary position embedding, with a gradient.

    The arguments are those of `cupyflash.rope`.

    Parameters
    ----------
    x : torch.Tensor, shape (B, H, L, D) or (H, total, D)
        Queries or keys.
    positions : torch.Tensor, shape (B, L) or (L,)
        Positions of the rows, the same for all heads, as int32 or int64.
    rotary : Rotary
        The angles, which may be made from tensors: ``Rotary(cos, sin)``.
    inverse : bool
        Rotate back.

    Returns
    -------
    torch.Tensor
        The rotated rows, with the shape and dtype of `x`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `cupyflash.rope`.
    """
    named = {"x": x}
    if isinstance(positions, torch.Tensor):
        named["positions"] = positions
    tensors.refuse_meta(tensors.check(named, ("x",)))
    tensors.refuse_transforms(named)
    if type(inverse) is not bool:
        raise ArgumentTypeError(f"inverse: got {inverse!r}; expected True or False.")
    made: torch.Tensor = _Rotation.apply(x, positions, rotary, inverse)
    return made


class _Rotation(torch.autograd.Function):
    """Rotates rows; the gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, positions: Any, rotary: Rotary, inverse: bool) -> Any:
        ctx.rest = positions, rotary, inverse
        return cached_calls.rotated(x, positions, rotary, inverse)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        positions, rotary, inverse = ctx.rest
        return _Rotation.apply(dout, positions, rotary, not inverse), None, None, None
