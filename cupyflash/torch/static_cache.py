"""Layers of a cache of transformers with room for all tokens, for models that are compiled.

Those of the library's StaticCache write rows by PyTorch's own operators, of which each is a kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import cache_utils

from ..arrays.integers import integer
from ..errors import ArgumentError
from . import tensors
from .cached import append
from .growing_cache import refuse_unlike


class StaticLayer(cache_utils.StaticLayer):
    """A layer with room for the keys of all tokens."""

    checks_room = False  # one layer does, for the others of its cache, too

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Hold new rows, and return the whole rooms."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new, rooms = (key_states, value_states), (self.keys, self.values)
        has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in new)
        if has_gradient or not _are_alike(*new, *rooms):
            return super().update(key_states, value_states, *args, **kwargs)
        for held, x in zip(rooms, new, strict=True):
            refuse_unlike(held, x)
        count = key_states.shape[2]
        if self.checks_room:
            self._refuse_more(count)
        self.cumulative_length.add_(count)
        lengths = self.cumulative_length.repeat(key_states.shape[0])
        append(key_states, value_states, self.keys, self.values, lengths)
        return self.keys, self.values

    def _refuse_more(self, count: int) -> None:
        """Refuse rows for which there is no room; on a GPU without waiting for it."""
        words = (
            f"rows: got {self.max_cache_len} for static_cache, and a sequence with more tokens; "
            "expected as many as a sequence will have, with its prompt."
        )
        has_room = self.cumulative_length <= self.max_cache_len - count
        if has_room.is_cuda or tensors.is_traced():
            torch._assert_async(has_room, words)
        elif not has_room:
            raise ArgumentError(words)


def _are_alike(first: torch.Tensor, *others: torch.Tensor) -> bool:
    return all(x.dtype == first.dtype and x.device == first.device for x in others)


def static(config: Any, rows: Any) -> cache_utils.StaticCache:
    """Return a cache for models of a configuration; see `transformers.static_cache`."""
    number = integer(rows)
    if number is None or number < 1:
        raise ArgumentError(
            f"rows: got {rows!r}; expected how many tokens a sequence will have at most, with its "
            "prompt."
        )
    cache = cache_utils.StaticCache(config=config, max_cache_len=number)
    own = [n for n, layer in enumerate(cache.layers) if type(layer) is cache_utils.StaticLayer]
    if not own:
        names = sorted({type(layer).__name__ for layer in cache.layers})
        raise ArgumentError(
            f"config: got one of a model whose layers are {', '.join(names)}; expected some with a "
            "StaticLayer. Use transformers.StaticCache(config=config, max_cache_len=rows)."
        )
    for n in own:
        cache.layers[n] = StaticLayer(cache.layers[n].max_cache_len)
    cache.layers[own[0]].checks_room = True
    return cache
