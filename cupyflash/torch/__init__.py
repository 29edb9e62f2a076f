"""Attention on PyTorch's tensors, with autograd, and the names under which other libraries have it.

`attention`, `attention_varlen` and `attention_cached` take the options of their namesakes in
`cupyflash`. The other names take the arguments of PyTorch's and of flash_attn's functions.
"""

from __future__ import annotations

from .functions import attention, attention_varlen

__all__ = [
    "attention",
    "attention_varlen",
]
