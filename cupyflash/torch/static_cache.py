"""Layers of a cache of transformers with room for all tokens, for models that are compiled.

Those of the library's StaticCache write rows by PyTorch's own operators, of which each is a kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import cache_utils

from ..arrays.integers import integer
from ..errors import ArgumentError
from .cached import append


class StaticLayer(cache_utils.StaticLayer):
    """A layer with room for the keys of all tokens."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Hold new rows, and return the whole rooms."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            return super().update(key_states, value_states, *args, **kwargs)
        self.cumulative_length.add_(key_states.shape[2])
        lengths = self.cumulative_length.repeat(key_states.shape[0])
        append(key_states, value_states, self.keys, self.values, lengths)
        return self.keys, self.values


def static(config: Any, rows: Any) -> cache_utils.StaticCache:
    """Return a cache for models of a configuration; see `transformers.static_cache`."""
    number = integer(rows)
    if number is None or number < 1:
        raise ArgumentError(
            f"rows: got {rows!r}; expected how many tokens a sequence will have at most, with its "
            "prompt."
        )
    cache = cache_utils.StaticCache(config=config, max_cache_len=number)
    for n, layer in enumerate(cache.layers):
        if type(layer) is cache_utils.StaticLayer:
            cache.layers[n] = StaticLayer(layer.max_cache_len)
    return cache
