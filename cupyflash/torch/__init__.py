"""Attention on PyTorch's tensors, with autograd, and the names under which other libraries have it.

`attention`, `attention_varlen` and `attention_cached` take the options of their namesakes in
`cupyflash`. The other names take the arguments of PyTorch's and of flash_attn's functions.
"""

from __future__ import annotations

from .cached import attention_cached
from .flash_attn import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from .functions import attention, attention_varlen
from .sdpa import scaled_dot_product_attention

__all__ = [
    "attention",
    "attention_cached",
    "attention_varlen",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "scaled_dot_product_attention",
]


def __dir__() -> list[str]:
    return sorted(__all__)
