"""What the layers of transformers' caches hold, for `attention_cached`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError


class Held(NamedTuple):
    """What a layer of a cache of transformers holds, as `attention_cached` takes it.

    Attributes
    ----------
    k, v : torch.Tensor, shape (B, Hkv, S, D)
        Keys and values, rotated already where a model rotates them.
    lengths : torch.Tensor of int32, shape (B,)
        How many positions hold something.
    first : int
        The position of the first of them in its sequence: above 0 where a window let others go.
    k_scale, v_scale : torch.Tensor of float32, shape (1, 1, 1, 1), or None
        The scales of codes.
    """

    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor
    first: int
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def held(layer: Any) -> Held:
    """Return the keys and values that a layer of a cache of transformers holds.

    Parameters
    ----------
    layer : object
        One of ``cache.layers`` of a DynamicCache, a StaticCache or a QuantizedCache, with a window
        or without one. A layer with a window of w holds the last w - 1 positions, or w if it is
        static.

    Returns
    -------
    Held
        Tensors without a copy; codes of float8 with the scales that a QuantizedCache of "fp8" has.
        The codes of "quanto" and "hqq" have a shift for each group, which no codes here have: their
        numbers are a copy, bit by bit those that the layer itself returns with the next keys.

    Raises
    ------
    ArgumentError
        Nothing is in the layer yet, or it is of another kind.
    """
    from transformers import cache_utils

    kinds = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer,
             cache_utils.StaticLayer, cache_utils.StaticSlidingWindowLayer)  # fmt: skip
    shifted = cache_utils.QuantoQuantizedLayer, cache_utils.HQQQuantizedLayer
    scaled = getattr(cache_utils, "Fp8QuantizedLayer", ())  # since 5.24
    if not _is_one_of(layer, kinds) and not isinstance(layer, (*shifted, scaled)):
        raise ArgumentError(
            f"layer: got {type(layer).__name__}; expected one of "
            f"{', '.join(kind.__name__ for kind in (*kinds, *shifted))}, whose tensors are "
            "(B, Hkv, S, D) in the order of positions. Pass an element of cache.layers, or read it "
            "by its own code."
        )
    if not layer.is_initialized or getattr(layer, "_quantized_keys", layer.keys) is None:
        raise ArgumentError("layer: nothing is in it yet; expected keys and values.")
    seen = int(layer.get_seq_length())
    k, v = layer.keys, layer.values
    scales: tuple[torch.Tensor, torch.Tensor] | tuple[()] = ()
    if isinstance(layer, shifted):
        k, v = _numbers(layer)
    elif isinstance(layer, scaled):
        (k, k_scale), (v, v_scale) = layer._quantized_keys, layer._quantized_values
        scales = k_scale.reshape(1, 1, 1, 1), v_scale.reshape(1, 1, 1, 1)
    length = min(seen, k.shape[2])
    lengths = torch.full((k.shape[0],), length, dtype=torch.int32, device=k.device)
    return Held(k, v, lengths, seen - length, *scales)


def _is_one_of(layer: Any, kinds: tuple[Any, ...]) -> bool:
    """Return whether a layer is of one of these kinds itself, or of a cache of ours."""
    kind = type(layer)
    return kind in kinds or kind.__module__ in _OURS


def _numbers(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of codes with a shift, and behind them those that are not codes yet."""
    k, v = (layer._dequantize(x) for x in (layer._quantized_keys, layer._quantized_values))
    if getattr(layer, "_pending_beam_idx", None) is not None:
        k, v = layer._apply_pending_reorder(k, v)
    if layer.keys.numel():
        k, v = torch.cat([k, layer.keys], dim=2), torch.cat([v, layer.values], dim=2)
    return k, v


_OURS = f"{__package__}.growing_cache", f"{__package__}.static_cache"
