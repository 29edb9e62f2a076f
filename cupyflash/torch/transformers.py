"""Models of Hugging Face's transformers that compute their attention here.

`register` makes "cupy_attention" a value of a model's ``attn_implementation``. Masks are those that
the library makes for "sdpa": boolean tensors, or none where a mask is causal without padding.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError
from .compute import Settings
from .functions import drawn_seed, run

__all__ = ["attention_forward", "register"]


def register(name: str = "cupy_attention") -> None:
    """Make a name known to transformers, for ``attn_implementation=`` of models.

    Parameters
    ----------
    name : str
        The name. It must not contain "flash": transformers takes such names for kernels of
        flash_attn, whose masks it makes otherwise.

    Raises
    ------
    ArgumentError
        The name contains "flash".

    Examples
    --------
    >>> from cupyflash.torch import transformers
    >>> transformers.register()

    Then ``AutoModelForCausalLM.from_pretrained(..., attn_implementation="cupy_attention")``,
    or ``model.set_attn_implementation("cupy_attention")`` for a model that is there.
    """
    if "flash" in name:
        raise ArgumentError(
            f'name: got {name!r}; expected one without "flash", which transformers takes for a '
            "kernel of flash_attn."
        )
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of a layer, as transformers calls it.

    Parameters
    ----------
    module : torch.nn.Module
        The layer, whose ``is_causal`` counts where the argument is None.
    query : torch.Tensor, shape (B, Hq, Lq, D)
        Queries.
    key : torch.Tensor, shape (B, Hkv, Lk, D)
        Keys.
    value : torch.Tensor, shape (B, Hkv, Lk, Dv)
        Values.
    attention_mask : torch.Tensor or None
        Broadcasts to (B, Hq, Lq, Lk): of bool, True attends; of floats, it is added to the scores.
    dropout : float
        Probability of dropping a pair; PyTorch's generator of the CPU gives the seed.
    scaling : float, optional
        Default: 1 / sqrt(D).
    is_causal : bool, optional
        Whether queries see no later keys where there is no mask.
    softcap : float, optional
        Hold scores within (-softcap, softcap).
    s_aux : torch.Tensor, shape (Hq,), optional
        Logits of one extra key of value 0 per head.
    position_bias : torch.Tensor, optional
        Broadcasts to (B, Hq, Lq, Lk); it is added to the scores.
    **options : object
        What other implementations need.

    Returns
    -------
    out : torch.Tensor, shape (B, Lq, Hq, Dv)
        In the dtype of `query`.
    weights : None
        They are never stored.

    Raises
    ------
    ArgumentError
        Weights are asked for.
    """
    if options.get("output_attentions"):
        raise ArgumentError(
            "output_attentions: got True; expected False, because weights are never stored. Load "
            'the model with attn_implementation="eager" to see them.'
        )
    mask: Any = attention_mask
    bias = position_bias
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if attention_mask is None:
        # The first query sees the first key alone: a static cache that is empty has more keys.
        mask = ("causal", 0) if is_causal and query.shape[2] > 1 else None
    elif attention_mask.dtype is not torch.bool:
        mask, bias = None, attention_mask if bias is None else attention_mask + bias
    settings = Settings(
        mask=mask,
        score_mod=None if softcap is None else [("softcap", float(softcap))],
        scale=scaling,
        dropout=dropout,
        seed=drawn_seed(dropout),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    out = run(settings, query, key, value, bias, s_aux, None, None, False)
    return out.transpose(1, 2).contiguous(), None
