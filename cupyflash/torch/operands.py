"""What a call on tensors is made of."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

MOVING = 5  # the first operands have derivatives: q, k, v, bias and sink


class Settings(NamedTuple):
    """The options of a call that are not tensors, as `cupyflash.attention` takes them.

    Attributes
    ----------
    mask : Mask or None
        A mask that is a tensor is in `Operands` instead.
    score_mod : Score, sequence of Score or None
    scale : float or None
    dropout : float
    seed : int or None
        A seed that is a tensor is in `Operands` instead.
    precision : str or None
    deterministic : bool
        Whether gradients have the same bits in every run.
    check : bool or None
        How offsets on a GPU are checked, as `cupyflash.attention_varlen` takes it.
    rows_first : bool
        Whether the result is (B, L, H, D), as layers of models go on with it. On a GPU, gradients
        also lie so in memory: a layer's heads are parts of its rows, and so nothing is copied.
    by_rows : bool
        Whether q, k, v, the result and all gradients are (..., L, H, D). Only `autograd.again`
        takes such a call, so that a recognised one needs no transposed view of a tensor.
    """

    mask: Any = None
    score_mod: Any = None
    scale: float | None = None
    dropout: float = 0.0
    seed: Any = None
    precision: Any = None
    deterministic: bool = False
    check: bool | None = None
    rows_first: bool = False
    by_rows: bool = False


class Operands(NamedTuple):
    """The tensors of a call. Those that it does not have are None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    seed: torch.Tensor | None = None
    offsets_q: torch.Tensor | None = None
    offsets_k: torch.Tensor | None = None


def by_heads(settings: Settings, x: Operands) -> tuple[Settings, Operands]:
    """Return a call `by_rows` as one of q, k and v with heads before rows."""
    q, k, v = (each.transpose(-3, -2) for each in x[:3])
    return settings._replace(by_rows=False), x._replace(q=q, k=k, v=v)
