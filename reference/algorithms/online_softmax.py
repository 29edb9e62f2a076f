"""Online softmax in two passes: Milakov & Gimelshein 2018, Algorithm 3.

Maximum and sum come from one pass, because a sum that began with an older maximum is brought to the
newer one by a factor: the step that all of FlashAttention rests on.
"""

from __future__ import annotations

import numpy as np

from .blocks import exponentials
from .hbm import Array, Memory


def softmax(x: Array, hbm: Memory | None = None) -> Array:
    """Return the softmax of each row of x, (R, V), an element of every row at a time."""
    hbm = hbm or Memory()
    n_rows, n = x.shape
    hbm.place(x=x)
    hbm.make("y", x.shape, x.dtype)
    m = hbm.hold("m", np.full(n_rows, -np.inf, x.dtype))  # line 1
    d = hbm.hold("d", np.zeros(n_rows, x.dtype))  # line 2
    for j in range(n):  # lines 3-6
        x_j = hbm.load("x", slice(None), j)
        m_new = hbm.hold("m_new", np.maximum(m, x_j))  # line 4
        d = hbm.hold("d", d * exponentials(m, m_new) + exponentials(x_j, m_new))  # line 5
        m = hbm.hold("m", m_new)
    hbm.release("m_new")
    for i in range(n):  # lines 7-9
        x_i = hbm.load("x", slice(None), i)
        hbm.store("y", exponentials(x_i, m) / d, slice(None), i)
    hbm.release()
    return hbm.result("y")
