"""Attention on PyTorch tensors, with autograd, and under the names that other libraries use.

`attention`, `attention_varlen`, `attention_cached`, `append` and `rope` take the options of the
functions of the same names in `cupyflash`. The others take the arguments of PyTorch's and
flash_attn's functions.
"""

from __future__ import annotations

from .cached import append, attention_cached, rope
from .flash_attn import flash_attn_func, flash_attn_varlen_func
from .flash_cache import flash_attn_with_kvcache
from .flash_packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .functions import attention, attention_varlen
from .implementation import register_flash_attention
from .sdpa import scaled_dot_product_attention
from .varlen import varlen_attn

__all__ = [
    "append",
    "attention",
    "attention_cached",
    "attention_varlen",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "register_flash_attention",
    "rope",
    "scaled_dot_product_attention",
    "varlen_attn",
]


def __dir__() -> list[str]:
    return sorted(__all__)
