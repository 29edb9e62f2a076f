"""Keras: its function by each of its back ends, and its layer."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np

from ..options import mask_array
from .base import Array, Documented, Functions, Peer, mask_or_bias, rounded_weights


def _start(back_end: str) -> Any:
    """Import Keras with a back end; a process has one."""
    os.environ["KERAS_BACKEND"] = back_end
    import keras

    return keras


def _allowed(mask: Any, q: Array, k: Array) -> Any:
    shape = (*q.shape[:-1], k.shape[-2])
    return None if mask is None else np.broadcast_to(np.array(mask_array(mask, q, k)), shape)


def _function(back_end: str) -> Functions:
    keras = _start(back_end)

    def forward(
        q: Array, k: Array, v: Array, *, mask: Any = None, bias: Any = None,
        scale: float | None = None, **_: Any,
    ) -> Any:  # fmt: skip
        shape = (*q.shape[:-1], k.shape[-2])
        added = None if bias is None else np.broadcast_to(bias, shape).astype(q.dtype)
        turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
        made = keras.ops.dot_product_attention(
            *turned, bias=added, mask=_allowed(mask, q, k), scale=scale
        )
        return np.array(keras.ops.convert_to_numpy(made)).swapaxes(1, 2), None

    return Functions(forward)


def _layer() -> Functions:
    """keras.layers.MultiHeadAttention, whose projections are the identity."""
    keras = _start("torch" if importlib.util.find_spec("torch") else "jax")

    def forward(q: Array, k: Array, v: Array, *, mask: Any = None, **_: Any) -> Any:
        batch, heads, rows, width = q.shape
        flat = [
            np.ascontiguousarray(x.swapaxes(1, 2)).reshape(batch, x.shape[2], -1) for x in (q, v, k)
        ]
        layer = keras.layers.MultiHeadAttention(heads, width, use_bias=False)
        layer.build(*(x.shape for x in flat))
        one = np.eye(heads * width, dtype=q.dtype)
        parts = one.reshape(-1, heads, width)
        layer.set_weights([parts, parts, parts, one.reshape(heads, width, -1)])
        made = layer(*flat, attention_mask=_allowed(mask, q, k))
        out = np.array(keras.ops.convert_to_numpy(made))
        return out.reshape(batch, rows, heads, width).swapaxes(1, 2), None

    return Functions(forward)


TAKES = ("masks", "bias", "scale", "lengths", "widths", "strides", "finite")
SAYS = {"precision": rounded_weights, "empty_rows": "any", "serves": mask_or_bias}
BLHD = Documented("(B, L, H, D)")
PEERS = (
    Peer(
        "keras-torch", "keras", "keras", "pip install keras torch", lambda: _function("torch"),
        ("float32",), TAKES, SAYS, BLHD,
    ),
    Peer(
        "keras-jax", "keras", "keras", "pip install keras jax", lambda: _function("jax"),
        ("float32",), tuple(x for x in TAKES if x != "widths"), SAYS | {"shapes": 3}, BLHD,
    ),
    Peer(
        "keras-numpy", "keras", "keras", "pip install keras", lambda: _function("numpy"),
        ("float32",), TAKES, SAYS, BLHD,
    ),
    Peer(
        "keras-layer", "keras", "keras", "pip install keras torch", _layer, ("float32",),
        ("masks", "lengths", "strides", "finite"), {"precision": rounded_weights,
        "empty_rows": "any"}, Documented("(B, L, H D)"),
    ),
)  # fmt: skip
