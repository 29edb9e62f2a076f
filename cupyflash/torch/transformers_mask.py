"""The masks that transformers makes for layers with an attention of ours."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from ..errors import ArgumentError

EAGER = 'Load the model with attn_implementation="eager".'


def attention_mask(config: Any = None, **options: Any) -> torch.Tensor | None:
    """Make the mask of a layer, as transformers calls it.

    Parameters
    ----------
    config : transformers.PreTrainedConfig, optional
        The configuration of the model.
    **options : object
        As ``transformers.masking_utils.sdpa_mask`` takes them.

    Returns
    -------
    torch.Tensor or None
        A bool tensor, shape (B, 1, Lq, Lk), True meaning attend; for models that add columns of
        floats to it, a tensor of floats, which is added to the scores. It is None where a causal
        mask with as many queries as keys, or a mask without hidden keys, needs none. Where a cache
        has room for later keys, Lk leaves that room out.

    Raises
    ------
    ArgumentError
        The model computes attention by its own code, which would add this mask to its scores.
    """
    from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

    kind: Any = type(config)
    _refuse_attention_of_its_own(kind)
    if getattr(config, "model_type", None) in _ADD_TO_MASKS:
        floats: torch.Tensor = eager_mask(**options)
        return floats
    # sdpa_mask does not look at the function: it would take a window for a causal mask.
    if options.get("mask_function", causal_mask_function) is not causal_mask_function and (
        options.get("local_size") is None
    ):
        options["allow_is_causal_skip"] = False
    # Without a mask, the layers decide whether they are causal, and here they differ from the mask.
    if not getattr(config, "is_causal", True):
        options["allow_is_bidirectional_skip"] = False
    if getattr(config, "use_bidirectional_attention", False):
        options["allow_is_causal_skip"] = False
    mask: torch.Tensor | None = sdpa_mask(**options)
    if mask is None and options.get("allow_is_causal_skip", True):
        queries = options["q_length"]
        if 1 < queries < options["kv_length"]:
            # A static cache that was empty. If some queries were left out later, nothing would tell
            # whether the others are the first ones or the last ones, so a mask is needed.
            needed = {"kv_length": queries, "attention_mask": None, "allow_is_causal_skip": False}
            mask = sdpa_mask(**options | needed)
    return mask


_ADD_TO_MASKS = ("deepseek_v4",)


@functools.cache
def _refuse_attention_of_its_own(config: Any) -> None:
    """Refuse models whose attention does not ask transformers' interface which one to use."""
    from transformers import PreTrainedModel

    every = _subclasses(PreTrainedModel)
    for kind in config.__mro__:
        models = [model for model in every if model.config_class is kind]
        if models:
            break
    else:
        return
    if not any(map(_asks_the_interface, models)):
        raise ArgumentError(
            f"attn_implementation: got this one for a model with a {config.__name__}; expected "
            '"eager", because transformers says of no class of this model that its attention can '
            "be another one. Its own code may ignore this one, and add a bool mask to its scores. "
            f"{EAGER} A class of your own whose layers call transformers' AttentionInterface says "
            "so by _supports_attention_backend = True."
        )


def _subclasses(kind: Any) -> list[Any]:
    found: list[Any] = list(kind.__subclasses__())
    return [*found, *(model for each in found for model in _subclasses(each))]


def _asks_the_interface(model: Any) -> bool:
    """Return whether a class of models says so, and its code has the interface or layers with it.

    Falcon says that it supports sdpa, and calls sdpa by its own code.
    """
    if model._supports_attention_backend:
        return True
    modules = {each.__module__ for each in model.__mro__}
    for module in [sys.modules[name] for name in modules if name in sys.modules]:
        parts = [x.__module__ for x in vars(module).values() if isinstance(x, type)]
        modules |= {name for name in parts if name.startswith(_CODE)}
    return model._supports_sdpa and any(
        hasattr(sys.modules.get(name), "ALL_ATTENTION_FUNCTIONS")
        for name in modules - {"transformers.modeling_utils"}
    )


_CODE = "transformers.models.", "transformers_modules."  # where models are, and users' models
