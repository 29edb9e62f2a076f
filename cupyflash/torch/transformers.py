"""An attention implementation for models of Hugging Face's transformers.

`register` makes "cupy_attention" a value for a model's ``attn_implementation``. The library makes
the same masks as for "sdpa": boolean tensors, or none for a causal mask without padding.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError
from .compute import Settings
from .functions import drawn_seed, run

__all__ = ["attention_forward", "register"]


def register(name: str = "cupy_attention") -> None:
    """Register a name with transformers, for ``attn_implementation=`` of models.

    Parameters
    ----------
    name : str
        The name. It must not contain "flash", because transformers takes such names for kernels of
        flash_attn and makes other masks for them.

    Raises
    ------
    ArgumentError
        The name contains "flash".

    Examples
    --------
    >>> from cupyflash.torch import transformers
    >>> transformers.register()

    Then load a model by ``AutoModelForCausalLM.from_pretrained(...,
    attn_implementation="cupy_attention")``, or change a loaded one by
    ``model.set_attn_implementation("cupy_attention")``.
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
        The layer. Its ``is_causal`` is used if the argument is None.
    query : torch.Tensor, shape (B, Hq, Lq, D)
        Queries.
    key : torch.Tensor, shape (B, Hkv, Lk, D)
        Keys.
    value : torch.Tensor, shape (B, Hkv, Lk, Dv)
        Values.
    attention_mask : torch.Tensor or None
        It broadcasts to (B, Hq, Lq, Lk). If it is bool, True means attend. If it is of floats, it
        is added to the scores.
    dropout : float
        Probability of dropping a pair. The seed comes from PyTorch's generator of the CPU.
    scaling : float, optional
        Default: 1 / sqrt(D).
    is_causal : bool, optional
        Whether queries see no later keys if there is no mask.
    softcap : float, optional
        Bound of the scores, which then lie in (-softcap, softcap).
    s_aux : torch.Tensor, shape (Hq,), optional
        Logits of one extra key of value 0 per head.
    position_bias : torch.Tensor, optional
        It broadcasts to (B, Hq, Lq, Lk), and is added to the scores.
    **options : object
        Arguments for other implementations, which are ignored.

    Returns
    -------
    out : torch.Tensor, shape (B, Lq, Hq, Dv)
        In the dtype of `query`.
    weights : None
        Weights are never stored.

    Raises
    ------
    ArgumentError
        ``output_attentions`` is True.
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
        # The first query sees only the first key, because an empty static cache has more keys.
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
