"""Safe softmax in three passes: Milakov & Gimelshein 2018, Algorithm 2.

Three reads and one write of every element: maximum, sum, quotients. Without the maximum (their
Algorithm 1) one pass less would do, and exp would overflow.
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
    for k in range(n):  # lines 2-4
        x_k = hbm.load("x", slice(None), k)
        m = hbm.hold("m", np.maximum(m, x_k))
    d = hbm.hold("d", np.zeros(n_rows, x.dtype))  # line 5
    for j in range(n):  # lines 6-8
        x_j = hbm.load("x", slice(None), j)
        d = hbm.hold("d", d + exponentials(x_j, m))
    for i in range(n):  # lines 9-11
        x_i = hbm.load("x", slice(None), i)
        hbm.store("y", exponentials(x_i, m) / d, slice(None), i)
    hbm.release()
    return hbm.result("y")
