"""What attention costs: HBM traffic of the papers' algorithms, block sizes, FLOPs, rooflines.

Everything is computed from sizes; nothing runs and no device is needed. Traffic and the on-chip
peak are counted in elements of one head. The algorithms themselves, which count as they run, are
``cupyflash.reference.algorithms``; tests hold their counts equal to these formulas.
"""

from .devices import DEVICES, Device, device
from .flash import (
    block_sparse_attention,
    flash_attention,
    flash_attention_2,
    flash_attention_3,
    flash_attention_backward,
    packed_qkv,
    split_kv,
)
from .roofline import Problem, Roofline, flops, roofline
from .standard import (
    one_pass_attention,
    online_softmax,
    rabe_staats,
    rabe_staats_backward,
    safe_softmax,
    standard_attention,
    standard_attention_backward,
)
from .theorem import IOComplexity, block_sizes, theorem_2
from .tiles import TileCount, causal_tiles
from .traffic import Traffic

__all__ = [
    "DEVICES",
    "Device",
    "IOComplexity",
    "Problem",
    "Roofline",
    "TileCount",
    "Traffic",
    "block_sizes",
    "block_sparse_attention",
    "causal_tiles",
    "device",
    "flash_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_backward",
    "flops",
    "one_pass_attention",
    "online_softmax",
    "packed_qkv",
    "rabe_staats",
    "rabe_staats_backward",
    "roofline",
    "safe_softmax",
    "split_kv",
    "standard_attention",
    "standard_attention_backward",
    "theorem_2",
]
