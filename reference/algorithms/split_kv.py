"""Split keys: Flash-Decoding (Dao, Haziza, Massa, Sizov 2023, on the PyTorch blog).

For few queries and many keys there are too few blocks of queries to fill a device. So (1) keys and
values are cut into parts, views without a copy; (2) FlashAttention runs on every part at once, and
leaves O and the log-sum-exp of each; (3) a second kernel combines them. Steps 2 and 3 are the
package's own kernels, `reference/cpu/forward.py` and `reference/cpu/combine.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..cpu.rows_launch import combine as run_combine
from .blocks import Dropout, blocks, default_scale, mask_of
from .causal_tiles import seen
from .flash_attention_2 import kernel, walk
from .hbm import Array, Memory


class Forward(NamedTuple):
    """O and the log-sum-exp over all keys."""

    o: Array
    lse: Array


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    splits: int,
    scale: float | None = None,
    causal: bool = False,
    block_q: int = 64,
    block_kv: int = 64,
    hbm: Memory | None = None,
) -> Forward:
    """Attention of one head over at most `splits` parts of ceil(Lk / splits) keys each."""
    if splits < 1:
        raise ValueError(f"there is at least one part of the keys, not {splits}")
    hbm = hbm or Memory()
    tau, offset = float(default_scale(q, scale)), mask_of(q, k, v, causal, None).offset
    n_q, d_v = len(q), v.shape[1]
    size = max(1, -(-len(k) // splits))  # step 1
    parts = list(blocks(len(k), size)) or [slice(0, 0)]
    hbm.place(q=q, k=k, v=v)
    hbm.make("o_parts", (len(parts), n_q, d_v), q.dtype)
    hbm.make("lse_parts", (len(parts), n_q), q.dtype)
    hbm.make("o", (n_q, d_v), q.dtype)
    hbm.make("lse", (n_q,), q.dtype)

    for n, part in enumerate(parts):  # step 2; on a GPU, side by side
        # Within a part, keys count from its first key, and so does the causal offset.
        own = None if offset is None else offset - part.start
        made = kernel(q, k[part], v[part], tau, own, Dropout(), (block_q, block_kv))

        def tiles_of(rows: slice, part: slice = part, own: int | None = own) -> list[slice]:
            local = seen(rows, part.stop - part.start, block_kv, own)
            return [slice(part.start + c.start, part.start + c.stop) for c in local]

        def store(o_i: Array, lse_i: Array, rows: slice, n: int = n) -> None:
            hbm.store("o_parts", o_i, n, rows)
            hbm.store("lse_parts", lse_i, n, rows)

        walk(hbm, made, block_q, tiles_of, store)

    o, lse = np.empty((n_q, d_v), q.dtype), np.empty(n_q, q.dtype)  # step 3
    o_parts, lse_parts = hbm.result("o_parts"), hbm.result("lse_parts")
    run_combine(list(zip(o_parts, lse_parts, strict=True)), o, lse)
    for row in blocks(n_q, 1):
        # The kernel reads a row's few log-sum-exps twice; they count once, as kept on chip.
        lse_row = hbm.load("lse_parts", slice(None), row)
        hbm.reserve("acc", d_v)
        for n in range(len(parts)):
            if lse_row[n, 0] != -np.inf:  # parts that this query does not see are left out
                hbm.load("o_parts", n, row)
        hbm.store("o", o[row], row)
        hbm.store("lse", lse[row], row)
        hbm.release()
    return Forward(hbm.result("o"), hbm.result("lse"))
