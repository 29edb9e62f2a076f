"""Attention with the arguments of PyTorch's own function. Its docstring says what differs."""

from __future__ import annotations

from typing import Any

import torch

from .. import masks
from ..errors import ArgumentError
from ..problem.keywords import explained
from . import functions, heads, tensors
from .operands import Settings


@explained
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute attention as ``torch.nn.functional.scaled_dot_product_attention`` does.

    What differs: dropout draws its seed from PyTorch's generator of the CPU, so that
    ``torch.manual_seed`` makes it repeatable, but it drops other pairs than PyTorch does. Head
    sizes are at most 512. A query that sees no key gets 0. A float mask may have another dtype than
    `query`.

    Parameters
    ----------
    query : torch.Tensor, shape (..., Hq, L, E)
        Queries. One head of queries, of keys or of values stands for as many as the others have.
    key : torch.Tensor, shape (..., H, S, E)
        Keys.
    value : torch.Tensor, shape (..., H, S, Ev)
        Values.
    attn_mask : torch.Tensor, optional
        It broadcasts to (..., Hq, L, S). If it is bool, True means attend. If it is of floats, it
        is added to the scores, and has a gradient if it requires one. It may also be what
        ``causal_upper_left(L, S)`` or ``causal_lower_right(L, S)`` of torch.nn.attention.bias
        return, which hide later keys. No other subclass of tensors is taken.
    dropout_p : float
        Probability in [0, 1) of dropping a pair.
    is_causal : bool
        Whether query i sees only keys 0 to i. This aligns at the start, unlike ``masks.causal()``.
    scale : float, optional
        Default: 1 / sqrt(E).
    enable_gqa : bool
        Whether Hq may be a multiple of H.

    Returns
    -------
    torch.Tensor, shape (..., Hq, L, Ev)
        In the dtype of `query`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`, and if both `attn_mask` and `is_causal` are given.
    """
    mask: Any = None
    bias = None
    if is_causal:
        if attn_mask is not None:
            raise ArgumentError(
                "is_causal: got True with an attn_mask; expected only one of them. Join them: "
                "attn_mask & torch.ones(L, S, dtype=torch.bool).tril()."
            )
        mask = masks.causal(0)
    if type(attn_mask).__name__ == "CausalBias":
        mask, attn_mask = _band(attn_mask, query, key), None
    if attn_mask is not None:
        if isinstance(attn_mask, torch.Tensor) and attn_mask.dtype is not torch.bool:
            bias = attn_mask
        else:
            mask = attn_mask
    named = {"query": query, "key": key, "value": value}
    tensors.check(
        {**named, "attn_mask": attn_mask}, (*named, *(["attn_mask"] if bias is not None else []))
    )
    query, key, value = heads.broadcast(query, key, value, enable_gqa)
    settings = Settings(
        mask=mask,
        scale=scale,
        dropout=dropout_p,
        seed=functions.drawn_seed(dropout_p),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    result: torch.Tensor = functions.run(settings, query, key, value, bias, None, None, None, False)
    return result


def _band(bias: Any, query: torch.Tensor, key: torch.Tensor) -> Any:
    """Return the mask that PyTorch's CausalBias means. Its memory holds no values."""
    from torch.nn.attention.bias import CausalVariant

    meant = bias.seq_len_q, bias.seq_len_kv
    lengths = query.shape[-2], key.shape[-2]
    if meant != lengths:
        raise ArgumentError(
            f"attn_mask: got a CausalBias of {meant} with queries and keys of lengths {lengths}; "
            f"expected equal lengths. Make it with causal_{bias.variant.name.lower()}{lengths}."
        )
    return masks.causal(0 if bias.variant is CausalVariant.UPPER_LEFT else None)
