"""States of leaves and nodes, which are merged to the nodes above them.

A state has m and l of every row, and then the rows of o; see `merge`.
"""

from __future__ import annotations

from .decode_tasks import LOG_CHILDREN
from .jit import helper
from .merge import call_merge, clear


@helper
def close_nodes(pointer, states, size, rows, columns, c, filled, before, now, top):
    """Merge nodes into their parents, up to level `top`: those that hold `before`, and not `now`.

    Both are leaves, and `now` is -1 behind the last one.
    """
    for n in range(1, top):
        shift = LOG_CHILDREN * n
        if now >= 0 and before >> shift == now >> shift:
            return
        add_to_node(pointer, states, size, n + 1, states, size * n, rows, columns, c, filled)
        filled[n] = 0


@helper
def add_to_node(pointer, states, size, level, others, at, rows, columns, c, filled):
    """Merge a state into the node of a level."""
    if not filled[level]:
        clear(states, size * level, rows)
        filled[level] = 1
    call_merge(pointer, (states, size * level, others, at, rows, columns, c))


@helper
def keep_rows(states, at, rows, first, own, columns, target, place):
    """Copy the state of some of the rows of a state."""
    for r in range(own):
        target[place + r] = states[at + first + r]
        target[place + own + r] = states[at + rows + first + r]
    source, result = at + 2 * rows + first * columns, place + 2 * own
    for n in range(own * columns):
        target[result + n] = states[source + n]
