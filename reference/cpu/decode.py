"""Few queries and many keys: attention over a cache, the CPU twin of the decode kernels.

The sums over keys form a fixed tree (`decode_tasks`). The softmax of a leaf of 64 keys starts anew,
leaves are merged to nodes, and threads share the nodes. A row of keys or values is read once for
all heads that share it.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .accumulate import padded
from .arguments import CHANGES, shape_of
from .cache import CACHE, find_rows, load_rows, row_size
from .decode_tasks import LEAF, LOG_CHILDREN
from .elementary import exp2
from .jit import INT, INTS, TABLE, helper, kernel, takes, vector
from .memory import ROWS, load, row_address, store
from .merge import call_merge, clear, fma, state_size
from .rows_product import multiply_keys, multiply_values
from .tile import (
    EMPTY,
    FULL,
    PARTIAL,
    apply_mask,
    apply_score,
    class_of_tile,
    describe_tile,
    make_registers,
)

PARTS = 16  # sums and maxima of a leaf that stand side by side


@intrinsic
def arrive(typingctx, counter):
    """Add 1 to the integer at an address, and return what it was; what was written is seen."""

    def codegen(context, builder, sig, args):
        word = ir.IntType(64)
        pointer = builder.inttoptr(args[0], word.as_pointer())
        return builder.atomic_rmw("add", pointer, word(1), "seq_cst")

    return types.int64(types.int64), codegen


@helper
def load_queries(q, shape, b, head, heads, i0, queries, width, panel):
    """Load a task's queries as rows of `panel`: those of a head, then those of the next one."""
    zero = panel.dtype.type(0)
    for n in range(heads):
        for i in range(queries):
            source = row_address(q, b, head + n, i0 + i, shape.itemsize)
            first = (n * queries + i) * width
            for d in range(shape.d):
                panel[first + d] = load(source + d * shape.itemsize, zero)
            for d in range(shape.d, width):
                panel[first + d] = zero


@helper
def class_of_leaf(shape, changes, symbols, b, head, heads, i0, queries, j0, keys, ri, rf):
    """Return the class of a leaf for all heads of a task."""
    if changes.pointers.classify == 0:
        return FULL
    some, full = False, True
    for h in range(head, head + heads):
        describe_tile(symbols, shape, b, h, i0, queries, j0, keys)
        found = class_of_tile(changes, symbols, queries, keys, ri, rf)
        some |= found != EMPTY
        full &= found == FULL
    return FULL if full else (PARTIAL if some else EMPTY)


@helper
def softmax_of_leaf(s, first, part, log2_e):
    """Make a row of scores into weights; return its maximum and its sum."""
    minus_infinity = s.dtype.type(-math.inf)
    row = s[first : first + LEAF]
    for n in range(PARTS):
        part[n] = minus_infinity
    for j in range(0, LEAF, PARTS):
        for n in range(PARTS):
            part[n] = row[j + n] if row[j + n] > part[n] else part[n]
    width = PARTS // 2
    while width:
        for n in range(width):
            part[n] = part[n + width] if part[n + width] > part[n] else part[n]
        width //= 2
    m = part[0]
    safe = m if m != minus_infinity else s.dtype.type(0)
    for n in range(PARTS):
        part[n] = 0
    for j in range(0, LEAF, PARTS):
        for n in range(PARTS):
            p = exp2((row[j + n] - safe) * log2_e)
            row[j + n] = p
            part[n] += p
    width = PARTS // 2
    while width:
        for n in range(width):
            part[n] += part[n + width]
        width //= 2
    return m, part[0]


@helper
def is_finite(rows, keys, columns, itemsize, like):
    """Whether all elements of rows are finite."""
    found = 0
    for j in range(keys):
        for d in range(columns):
            value = load(rows[j] + d * itemsize, like)
            found += value - value != 0
    return found == 0


@helper
def multiply_seen(s, seen, rows, count, keys, columns, itemsize, states, first):
    """Compute `multiply_values` pair by pair, leaving out those that take no part."""
    zero = s.dtype.type(0)
    for r in range(count):
        o = states[first + r * columns : first + (r + 1) * columns]
        for d in range(columns):
            o[d] = zero
        for j in range(keys):
            if seen[r * LEAF + j]:
                for d in range(columns):
                    o[d] = fma(s[r * LEAF + j], load(rows[j] + d * itemsize, zero), o[d])


@helper
def close_nodes(pointer, states, size, rows, columns, c, filled, before, now, level, top):
    """Merge nodes into their parents, up to level `top`: those that hold `before`, and not `now`.

    Both are nodes of `level`, and `now` is -1 behind the last one.
    """
    for n in range(level + 1, top):
        shift = LOG_CHILDREN * (n - level)
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
def finish_task(shape, b, head, heads, i0, queries, states, at, columns, sink, out, lse):
    """Write out and lse of a task whose state is complete."""
    zero, one = sink.dtype.type(0), sink.dtype.type(1)
    rows = heads * queries
    for n in range(heads):
        logit = sink[head + n]
        for i in range(queries):
            r = n * queries + i
            m, l, weight = states[at + r], states[at + rows + r], one
            empty = l == 0  # then o holds anything
            if logit != -math.inf:
                top = m if m > logit else logit
                weight = one if m == top else exp2((m - top) * shape.log2_e)
                own = one if logit == top else exp2((logit - top) * shape.log2_e)
                m, l = top, fma(l, weight, own)
            # 8 normalise
            inverse = zero if empty else weight / l
            target = row_address(out, b, head + n, i0 + i, shape.itemsize)
            o = at + 2 * rows + r * columns
            for d in range(shape.d_v):
                # A sum of 0 has no sign: it would hang on pairs that take no part.
                value = zero if empty else fma(states[o + d], inverse, zero)
                store(target + d * shape.itemsize, value)
            # 9 store lse
            natural = -math.inf if l == 0 else m + math.log(l)
            target = row_address(lse, b, head + n, i0 + i, shape.itemsize)
            store(target, sink.dtype.type(natural))


@takes(
    lambda number: (
        INT, INTS, TABLE, TABLE, INT, INT, shape_of(number), CHANGES, INT, CACHE, ROWS,
        vector(number), vector(number), INTS, ROWS, ROWS, INTS,
    )
)  # fmt: skip
@kernel
def decode(
    most_leaves, taken, tasks, units, level, top, shape, changes, merge, cache, q, sink, kept, done,
    out, lse, visited,
):  # fmt: skip
    """Compute units that nobody has taken, until none is left or `most_leaves` are done.

    Who finishes a task's last unit finishes the task. `tasks` and `units` are what `decode_tasks`
    makes, `level` is the units', and a node of level `top` has all keys. `merge` is the kernel's
    address. ``kept`` has a place for each unit of tasks that have several. ``taken[0]`` counts the
    units that were taken, ``done[n]`` the finished units of task n, and ``visited[n]`` the leaves
    of unit n that were not EMPTY.
    """
    itemsize, lanes = shape.itemsize, shape.lanes_per_vector
    like = sink.dtype.type(0)
    key_size, value_size = row_size(cache.k), row_size(cache.v)
    width, columns = padded(shape.d, lanes), padded(shape.d_v, lanes)
    most = shape.block_q
    most_size = state_size(most, columns)
    panel = np.empty(most * width, sink.dtype)
    s = np.empty(most * LEAF, sink.dtype)
    leaf = np.empty(most_size, sink.dtype)
    nodes = np.empty(most_size * (top + 1), sink.dtype)
    filled = np.zeros(top + 2, np.int64)
    part = np.empty(PARTS, sink.dtype)
    k_rows, v_rows = np.empty(LEAF, np.int64), np.empty(LEAF, np.int64)
    next_rows = np.empty(LEAF, np.int64)
    k_tile = np.empty(0 if cache.k.in_place else LEAF * width, sink.dtype)
    v_tile = np.empty(0 if cache.v.in_place else LEAF * columns, sink.dtype)
    has_score = changes.score.code.shape[0] > 0
    changed = has_score or changes.pointers.classify != 0
    seen = np.empty(most * LEAF if changed else 0, np.bool_)
    across = padded(most, lanes)
    turned = np.empty(across * LEAF if changed else 0, sink.dtype)
    symbols = np.empty(11, np.int64)
    score_ri, score_rf = make_registers(changes.score, across, sink)
    mask_ri, mask_rf = make_registers(changes.mask, across, np.empty(0, np.float32))
    tile_ri, tile_rf = make_registers(changes.tile, 1, np.empty(0, np.float32))
    loaded = -1
    leaves = 0

    while leaves < most_leaves:
        unit = arrive(taken.ctypes.data)
        if unit >= units.shape[0]:
            break
        task, leaf_begin, leaf_end = units[unit, 0], units[unit, 2], units[unit, 3]
        b, h_kv, head, heads = tasks[task, 0], tasks[task, 1], tasks[task, 2], tasks[task, 3]
        i0, queries = tasks[task, 4], tasks[task, 5]
        first_unit, count, place = tasks[task, 6], tasks[task, 7], tasks[task, 8]
        rows = heads * queries
        size = state_size(rows, columns)
        # 1 load q
        if loaded != task:
            load_queries(q, shape, b, head, heads, i0, queries, width, panel)
            loaded = task
        filled[:] = 0
        before = -1
        leaves += max(leaf_end - leaf_begin, 1)
        for n in range(leaf_begin, leaf_end):
            j0 = n * LEAF
            keys = min(LEAF, shape.len_k[b] - j0)
            leaf_class = class_of_leaf(
                shape, changes, symbols, b, head, heads, i0, queries, j0, keys, tile_ri, tile_rf
            )
            if leaf_class == EMPTY:
                continue
            visited[unit] += 1
            if before >= 0:
                close_nodes(
                    merge, nodes, size, rows, columns, shape.log2_e, filled, before, n, 0, level
                )
            before = n

            # 2 scores
            next_keys = max(min(LEAF, shape.len_k[b] - j0 - LEAF), 0)
            find_rows(cache, b, h_kv, j0 + LEAF, next_keys, next_rows, v_rows)
            find_rows(cache, b, h_kv, j0, keys, k_rows, v_rows)
            if not cache.k.in_place:
                load_rows(cache.k, k_rows, keys, width, itemsize, k_tile)
            for j in range(keys, LEAF):
                k_rows[j] = k_rows[keys - 1]
            multiply_keys(
                shape.scale, panel.ctypes.data, width, k_rows.ctypes.data, s.ctypes.data, LEAF,
                rows, keys, width, itemsize, v_rows.ctypes.data, value_size,
            )  # fmt: skip
            if has_score or leaf_class == PARTIAL:
                for x in range(heads):
                    block = s[x * queries * LEAF : (x + 1) * queries * LEAF]
                    for i in range(queries):
                        for j in range(keys):
                            turned[j * across + i] = block[i * LEAF + j]
                    describe_tile(symbols, shape, b, head + x, i0, queries, j0, keys)
                    # 3 score mod
                    if has_score:
                        apply_score(
                            changes.pointers, changes.score, symbols, i0, queries, keys, across,
                            turned, turned, score_ri, score_rf,
                        )  # fmt: skip
                    # 4 mask
                    if leaf_class == PARTIAL:
                        apply_mask(
                            changes, symbols, queries, keys, across, turned, mask_ri, mask_rf
                        )
                    for i in range(queries):
                        for j in range(keys):
                            block[i * LEAF + j] = turned[j * across + i]
            for r in range(rows):
                for j in range(keys, LEAF):
                    s[r * LEAF + j] = -math.inf
            hidden = 0
            if has_score or leaf_class == PARTIAL:
                for r in range(rows):
                    for j in range(keys):
                        seen[r * LEAF + j] = s[r * LEAF + j] != -math.inf
                        hidden += not seen[r * LEAF + j]
            # 5 row max
            for r in range(rows):
                leaf[r], leaf[rows + r] = softmax_of_leaf(s, r * LEAF, part, shape.log2_e)
            # 7 accumulate p v
            if not cache.v.in_place:
                load_rows(cache.v, v_rows, keys, columns, itemsize, v_tile)
            if hidden and not is_finite(v_rows, keys, columns, itemsize, like):
                multiply_seen(s, seen, v_rows, rows, keys, columns, itemsize, leaf, 2 * rows)
            else:
                multiply_values(
                    like, s.ctypes.data, LEAF, v_rows.ctypes.data,
                    leaf.ctypes.data + 2 * rows * itemsize, columns, rows, keys, columns, itemsize,
                    next_rows.ctypes.data, next_keys, key_size,
                )  # fmt: skip
            # 6 rescale
            add_to_node(merge, nodes, size, 1, leaf, 0, rows, columns, shape.log2_e, filled)
        if before >= 0:
            close_nodes(
                merge, nodes, size, rows, columns, shape.log2_e, filled, before, -1, 0, level
            )
        else:
            clear(nodes, size * level, rows)
        result = level
        if count > 1:
            at = place + (unit - first_unit) * size
            kept[at : at + size] = nodes[size * level : size * (level + 1)]
            if arrive(done.ctypes.data + 8 * task) != count - 1:
                continue
            filled[:] = 0
            before = -1
            for n in range(count):
                index = units[first_unit + n, 1]
                if before >= 0:
                    close_nodes(
                        merge, nodes, size, rows, columns, shape.log2_e, filled, before, index,
                        level, top,
                    )  # fmt: skip
                before = index
                add_to_node(
                    merge, nodes, size, level + 1, kept, place + n * size, rows, columns,
                    shape.log2_e, filled,
                )  # fmt: skip
            close_nodes(
                merge, nodes, size, rows, columns, shape.log2_e, filled, before, -1, level, top
            )
            result = top
        finish_task(
            shape, b, head, heads, i0, queries, nodes, size * result, columns, sink, out, lse
        )
