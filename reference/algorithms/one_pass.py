"""One pass over keys and values, one query at a time: Rabe & Staats 2021, sections 2 and 3.

The online softmax with the output carried along: v* and s* of section 2 are o and l here, m* of
section 3 is m, and one division ends each row. Only the output is stored, but every key and value
is read once per query.
"""

from __future__ import annotations

import numpy as np

from .blocks import blocks, default_scale, divide, exponentials, mask_of
from .hbm import Array, Memory


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    hbm: Memory | None = None,
) -> Array:
    """Return O of one head; a causal row ends at the last key that its query sees."""
    hbm = hbm or Memory()
    tau, offset = default_scale(q, scale), mask_of(q, k, v, causal, None).offset
    n_q, n_k, d_v = len(q), len(k), v.shape[1]
    hbm.place(q=q, k=k, v=v)
    hbm.make("o", (n_q, d_v), q.dtype)
    for row in blocks(n_q, 1):
        q_i = hbm.load("q", row)
        # Start with o = 0, l = 0 and m = -inf.
        o = hbm.hold("o", np.zeros((1, d_v), q.dtype))
        l = hbm.hold("l", np.zeros(1, q.dtype))
        m = hbm.hold("m", np.full(1, -np.inf, q.dtype))
        seen = n_k if offset is None else max(0, min(n_k, row.start + offset + 1))
        for key in blocks(seen, 1):
            k_j, v_j = hbm.load("k", key), hbm.load("v", key)
            s = hbm.hold("s", tau * (q_i @ k_j.T)[:, 0])
            m_new = hbm.hold("m_new", np.maximum(m, s))
            alpha, p = exponentials(m, m_new), exponentials(s, m_new)
            o = hbm.hold("o", alpha[:, None] * o + p[:, None] * v_j)
            l = hbm.hold("l", alpha * l + p)
            m = hbm.hold("m", m_new)
        hbm.store("o", divide(o, l), row)
        hbm.release()
    return hbm.result("o")
