"""Pages of keys and values, in the order of axes of other libraries."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from ..arrays.interop import array
from ..errors import ArgumentError

Array = np.ndarray[Any, Any]
Layout = Literal["NHD", "HND", "paged_attention_k", "paged_attention_v"]

_AXES = {
    "NHD": "(P, page, Hkv, D)",
    "HND": "(P, Hkv, page, D)",
    "paged_attention_k": "(P, Hkv, D / x, page, x)",
    "paged_attention_v": "(P, Hkv, D, page)",
}
_BYTES = 16  # of x neighbours


def pages(x: Any, layout: Layout, *, inverse: bool = False) -> Array:
    """Return pages of keys or values of another library as `attention_cached` takes them.

    vLLM's ``block_table`` is the `table` of `attention_cached`, its ``seq_lens`` are `lengths`, and
    slot ``page * block_size + row`` of its ``slot_mapping`` is that row of that page. Its scales of
    float8 multiply, as `k_scale` and `v_scale` do.

    Parameters
    ----------
    x : array
        Keys or values of one layer; in one array of both, ``x[0]`` or ``x[:, 0]`` are the keys.
    layout : str
        How the axes lie: "NHD", (P, page, Hkv, D), as in vLLM with FlashAttention and Triton, in
        flash_attn and in FlashInfer; "HND", (P, Hkv, page, D), as here, and as in FlashInfer and
        vLLM by this name; "paged_attention_k", (P, Hkv, D / x, page, x), whose last axis has 16
        bytes, and "paged_attention_v", (P, Hkv, D, page), as the paged_attention kernels of vLLM
        have keys and values.
    inverse : bool
        Make pages of another library of pages here.

    Returns
    -------
    array, shape (P, Hkv, page, D)
        A view of the same memory; of "paged_attention_k", a copy. With `inverse`, the axes of the
        layout.

    Raises
    ------
    ArgumentError
        There is no such layout, or the array has other axes.
    """
    x = array(x, "x")
    if layout not in _AXES:
        raise ArgumentError(f"layout: got {layout!r}; expected one of {', '.join(_AXES)}.")
    neighbours = max(1, _BYTES // x.dtype.itemsize)
    axes = "(P, Hkv, page, D)" if inverse else _AXES[layout]
    packed = layout == "paged_attention_k"
    if x.ndim != axes.count(",") + 1:
        raise ArgumentError(
            f"x: got shape {x.shape}; expected {axes}. Take x[0] or x[:, 0] of keys and values in "
            "one array."
        )
    if packed and (x.shape[-1] % neighbours if inverse else x.shape[-1] != neighbours):
        wanted = f"a multiple of {neighbours}" if inverse else f"x = {neighbours}"
        raise ArgumentError(
            f"x: got {x.shape[-1]} for its last axis; expected {wanted}, because {layout} has "
            f"{_BYTES} bytes side by side."
        )
    made: Array = x
    if layout == "NHD":
        made = x.swapaxes(1, 2)
    elif layout == "paged_attention_v":
        made = x.swapaxes(2, 3)
    elif packed and inverse:
        made = x.reshape(*x.shape[:3], -1, neighbours).swapaxes(2, 3).copy()
    elif packed:
        made = x.swapaxes(2, 3).reshape(*x.shape[:2], x.shape[3], -1)
    return made
