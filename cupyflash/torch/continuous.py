"""Transformers' continuous batching: sequences one after the other, whose keys are of a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .. import masks
from . import functions
from .operands import Settings


def attention(
    settings: Settings,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sink: torch.Tensor | None,
    options: Mapping[str, Any],
) -> torch.Tensor | None:
    """Compute a layer's attention of each sequence alone, (1, total, Hq, Dv).

    The library's mask has a row for each query of the batch and a column for each key. Its pairs of
    other sequences are not computed here. None if that mask has to be used: on a GPU, where the
    starts of sequences are not read back, or where rows behind the last sequence are padding.

    Parameters
    ----------
    settings : Settings
        The options of the call, without a mask.
    query, key, value : torch.Tensor, shape (1, H, total, D)
        Rows of all sequences.
    mask : torch.Tensor of floats, shape (1, 1, total_q, total_k), or None
        What is added to scores: a causal mask or a window for each sequence.
    sink : torch.Tensor, shape (Hq,), or None
        Logits of one extra key of value 0 per head.
    options : mapping
        The other arguments of the layer.
    """
    of_q, of_k = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if mask is None or not query.is_cpu:
        return None
    if not (isinstance(of_q, torch.Tensor) and isinstance(of_k, torch.Tensor)):
        return None
    starts_q, starts_k = of_q.tolist(), of_k.tolist()
    rows = query.shape[2], key.shape[2]
    if not (starts_q[-1], starts_k[-1]) == rows == tuple(mask.shape[-2:]):
        return None
    left = _window(options.get("sliding_window"), mask[0, 0], starts_q, starts_k)
    band = masks.causal() if left is None else masks.window(left, 0)
    q, k, v = query[0], key[0], value[0]
    settings = settings._replace(mask=band, rows_first=False)
    out = functions.run(settings, q, k, v, None, sink, of_q, of_k, False)
    return out.transpose(0, 1).contiguous()[None]


def _window(size: Any, mask: torch.Tensor, starts_q: list[int], starts_k: list[int]) -> int | None:
    """Return how many keys before its own a query sees; None if a layer has no window.

    Layers without a window may be told of one, too. The mask has the last word: the last query of
    the longest sequence sees the key before the window, or does not.
    """
    if size is None or len(starts_k) < 2:
        return None
    pairs = zip(starts_k, starts_k[1:], starts_q[1:], strict=False)
    length, end_k, end_q = max((end - begin, end, end_q) for begin, end, end_q in pairs)
    if length <= size:
        return None  # no query has that many keys before it
    is_hidden = float(mask[end_q - 1, end_k - 1 - size]) < 0.0
    return size - 1 if is_hidden else None
