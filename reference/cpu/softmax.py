"""The online softmax on one tile: row maximum m, row sum l, and the rescaling that joins tiles.

Tiles are kept transposed, ``s[j, i]`` with one query per lane, so that maxima and sums over keys
are lane by lane and a NaN in one query stays in its lane. Milakov & Gimelshein 2018, Algorithm 3;
FlashAttention-2 (Dao 2023), Algorithm 1, lines 8-10.
"""

from __future__ import annotations

import math

from .elementary import exp2
from .jit import helper


@helper
def init_state(m, l, acc, lanes, columns, sink):
    """Begin with nothing seen, or with the sink: one key of that logit and value 0."""
    for i in range(lanes):
        m[i] = sink
        l[i] = 0 if sink == -math.inf else 1
    for n in range(lanes * columns):
        acc[n] = 0


@helper
def row_max(s, keys, lanes, m, m_new):
    """m_new = max(m, row maxima of the tile), lane by lane; whether any grew."""
    for i in range(lanes):
        m_new[i] = m[i]
    for j in range(keys):
        row = s[j * lanes : (j + 1) * lanes]
        for i in range(lanes):
            m_new[i] = row[i] if row[i] > m_new[i] else m_new[i]
    grew = False
    for i in range(lanes):
        grew |= m_new[i] > m[i]
    return grew


@helper
def rescale(m, m_new, l, acc, lanes, columns, log2_e):
    """Bring l and the accumulated output from the old maxima to the new ones."""
    for i in range(lanes):
        if m_new[i] > m[i]:
            alpha = exp2((m[i] - m_new[i]) * log2_e)
            l[i] *= alpha
            row = acc[i * columns : (i + 1) * columns]
            for d in range(columns):
                row[d] *= alpha
            m[i] = m_new[i]


@helper
def exponentiate(s, keys, lanes, m, l, log2_e):
    """Make s into p = exp(s - m); l grows by its row sums; masked scores (-inf) become 0."""
    zero = m.dtype.type(0)
    for j in range(keys):
        row = s[j * lanes : (j + 1) * lanes]
        for i in range(lanes):
            safe = m[i] if m[i] != -math.inf else zero
            p = exp2((row[i] - safe) * log2_e)
            row[i] = p
            l[i] += p
