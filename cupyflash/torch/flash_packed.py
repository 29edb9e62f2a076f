"""The functions of flash_attn that take keys and values, or queries too, in one tensor."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from ..errors import ArgumentError
from ..problem.keywords import explained
from . import longest, tensors
from .flash_attn import Window, call


@overload
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = False,
) -> torch.Tensor: ...  # fmt: skip


@overload
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ..., *,
    return_attn_probs: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, None]: ...  # fmt: skip


@explained
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention as flash_attn's function of this name does; see `flash_attn_func`.

    Parameters
    ----------
    qkv : torch.Tensor, shape (B, L, 3, H, D)
        Queries, keys and values.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_func`.
    deterministic, return_attn_probs
        As in `flash_attn_func`.

    Returns
    -------
    out : torch.Tensor, shape (B, L, H, D)
        As in `flash_attn_func`.
    lse : torch.Tensor, shape (B, H, L)
        Only with `return_attn_probs`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`.
    """
    q, k, v = _parts("qkv", qkv, "(B, L, 3, H, D)")
    offsets = None, None
    return call(
        (q, k, v), offsets, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


@overload
def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = False,
) -> torch.Tensor: ...  # fmt: skip


@overload
def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ..., *,
    return_attn_probs: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, None]: ...  # fmt: skip


@explained
def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention as flash_attn's function of this name does; see `flash_attn_func`.

    Parameters
    ----------
    q : torch.Tensor, shape (B, Lq, Hq, D)
        Queries.
    kv : torch.Tensor, shape (B, Lk, 2, Hkv, D)
        Keys and values.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_func`.
    deterministic, return_attn_probs
        As in `flash_attn_func`.

    Returns
    -------
    out : torch.Tensor, shape (B, Lq, Hq, D)
        As in `flash_attn_func`.
    lse : torch.Tensor, shape (B, Hq, Lq)
        Only with `return_attn_probs`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`.
    """
    k, v = _parts("kv", kv, "(B, L, 2, H, D)")
    offsets = None, None
    return call(
        (q, k, v), offsets, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, dropout_p: float = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ...,
    softcap: float = ..., alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = False,
) -> torch.Tensor: ...  # fmt: skip


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, dropout_p: float = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ...,
    softcap: float = ..., alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ..., *,
    return_attn_probs: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, None]: ...  # fmt: skip


@explained
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention as flash_attn's function of this name does; see `flash_attn_varlen_func`.

    Parameters
    ----------
    qkv : torch.Tensor, shape (total, 3, H, D)
        Queries, keys and values of all sequences.
    cu_seqlens : torch.Tensor of int, shape (n + 1,)
        Sequence b has the rows from ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``.
    max_seqlen : int
        As in `flash_attn_varlen_func`.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_varlen_func`.
    deterministic, return_attn_probs
        As in `flash_attn_varlen_func`.

    Returns
    -------
    out : torch.Tensor, shape (total, H, D)
        As in `flash_attn_func`.
    lse : torch.Tensor, shape (H, total)
        Only with `return_attn_probs`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention_varlen`.
    """
    q, k, v = _parts("qkv", qkv, "(total, 3, H, D)")
    return call(
        (q, k, v), (cu_seqlens, cu_seqlens), dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
        longest.known(max_seqlen, max_seqlen),
    )  # fmt: skip


@overload
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ...,
    softcap: float = ..., alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = False,
) -> torch.Tensor: ...  # fmt: skip


@overload
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ...,
    softcap: float = ..., alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ..., *,
    return_attn_probs: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, None]: ...  # fmt: skip


@explained
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention as flash_attn's function of this name does; see `flash_attn_varlen_func`.

    Parameters
    ----------
    q : torch.Tensor, shape (total_q, Hq, D)
        Queries of all sequences.
    kv : torch.Tensor, shape (total_k, 2, Hkv, D)
        Keys and values of all sequences.
    cu_seqlens_q, cu_seqlens_k : torch.Tensor of int, shape (n + 1,)
        Sequence b has the rows from ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``.
    max_seqlen_q, max_seqlen_k : int
        As in `flash_attn_varlen_func`.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_varlen_func`.
    deterministic, return_attn_probs
        As in `flash_attn_varlen_func`.

    Returns
    -------
    out : torch.Tensor, shape (total_q, Hq, D)
        As in `flash_attn_func`.
    lse : torch.Tensor, shape (Hq, total_q)
        Only with `return_attn_probs`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention_varlen`.
    """
    k, v = _parts("kv", kv, "(total, 2, H, D)")
    return call(
        (q, k, v), (cu_seqlens_q, cu_seqlens_k), dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
        longest.known(max_seqlen_q, max_seqlen_k),
    )  # fmt: skip


def _parts(name: str, packed: torch.Tensor, wanted: str) -> tuple[torch.Tensor, ...]:
    """Return the tensors that share one, whose shape is called `wanted`."""
    tensors.check({name: packed}, (name,))
    axes = wanted.count(",") + 1
    count = 3 if "3" in wanted else 2
    if packed.ndim != axes or packed.shape[-3] != count:
        raise ArgumentError(f"{name}: got shape {tuple(packed.shape)}; expected {wanted}.")
    return packed.unbind(-3)
