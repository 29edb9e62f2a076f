"""Attention with the arguments of PyTorch's own function. Its docstring says what differs."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError
from ..problem.keywords import explained
from . import functions, heads, tensors
from .compute import Settings


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
        is added to the scores, and has a gradient if it requires one.
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
        mask = ("causal", 0)
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
