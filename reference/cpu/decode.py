"""Few queries and many keys: attention over a cache, the CPU twin of the decode kernels.

The sums over keys form a fixed tree (`decode_tasks`). The softmax of a leaf of 64 keys starts anew,
leaves are merged to nodes, and threads share the nodes. A row of keys or values is read once for
all heads that share it, and for the queries of several entries that share it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .arguments import CHANGES, Changes, Registers, Shape, registers_of, shape_of
from .cache import CACHE, Cache, find_rows, load_rows, row_size
from .decode_nodes import add_to_node, close_nodes, keep_rows
from .decode_tasks import LEAF
from .elementary import exp2
from .jit import INT, INTS, TABLE, helper, kernel, takes, vector, whole_rows
from .memory import ROWS, first_address, load, row_address, store
from .merge import clear, fma, size_of_state, state_size
from .microkernel import padded, round_up
from .rows_product import multiply_keys, multiply_values
from .structs import Struct
from .tile import (
    EMPTY,
    FULL,
    PARTIAL,
    SYMBOL_COUNT,
    apply_mask,
    apply_score,
    class_of_tile,
    describe_tile,
    look_at_all,
    make_registers,
)

Array = np.ndarray[Any, Any]

PARTS = 16  # sums and maxima of a leaf that stand side by side


class DecodeSizes(NamedTuple):
    """What a thread's scratch depends on. Calls that have it in common share scratch."""

    rows: int
    d: int
    d_v: int
    lanes_per_vector: int
    top: int  # levels above the leaves
    k_in_place: int
    v_in_place: int
    changes: bool  # whether scores are changed or masked
    score: Registers
    mask: Registers
    tile: Registers


def decode_sizes(shape: Shape, changes: Changes, cache: Cache, top: int) -> DecodeSizes:
    """Return the sizes of a call whose tree has `top` levels above the leaves."""
    return DecodeSizes(
        shape.block_q,
        shape.d,
        shape.d_v,
        shape.lanes_per_vector,
        top,
        cache.k.in_place,
        cache.v.in_place,
        len(changes.score.code) > 0 or changes.pointers.classify != 0,
        registers_of(changes.score),
        registers_of(changes.mask),
        registers_of(changes.tile),
    )


class DecodeScratch(NamedTuple):
    """What one thread needs to work on units; rows are those of a task's heads and queries."""

    panel: Array  # queries, (rows, width); rows are those of all tasks of a unit
    s: Array  # scores of a leaf, then weights, (rows, LEAF)
    leaf: Array  # the state of a leaf
    nodes: Array  # a state for each level
    filled: Array  # whether a level's state has keys
    part: Array
    k_rows: Array  # addresses of a leaf's keys and values, and of the next leaf's keys
    v_rows: Array
    next_rows: Array
    k_scales: Array  # addresses of their scales, if they are codes
    v_scales: Array
    k_tile: Array  # keys and values that products cannot read where they lie
    v_tile: Array
    seen: Array  # which pairs take part, (rows, LEAF)
    turned: Array  # scores of a head as [key, query]
    symbols: Array
    edges: Array  # of a leaf's keys, see `tile.FIRST`
    classes: Array  # of a leaf, for each task of a unit
    score_ri: Array
    score_rf: Array
    mask_ri: Array
    mask_rf: Array
    tile_ri: Array
    tile_rf: Array


def decode_scratch_of(number: types.Type) -> Struct:
    """Return the type of `DecodeScratch`, given the accumulator's."""
    tile, of_mask = vector(number), whole_rows(types.float32)
    return Struct(
        DecodeScratch,
        (
            *(tile,) * 4,
            INTS,
            tile,
            *(INTS,) * 5,
            tile,
            tile,
            vector(types.boolean),
            tile,
            INTS,
            INTS,
            INTS,
        )
        + (TABLE, whole_rows(number))
        + (TABLE, of_mask) * 2,
    )


def decode_scratch(sizes: DecodeSizes, number: np.dtype[Any]) -> DecodeScratch:
    """Allocate a thread's scratch."""
    rows, lanes = sizes.rows, sizes.lanes_per_vector
    width, columns = round_up(sizes.d, lanes), round_up(sizes.d_v, lanes)
    across, state = round_up(rows, lanes), size_of_state(rows, columns)
    changed = sizes.changes
    return DecodeScratch(
        np.empty(rows * width, number),
        np.empty(rows * LEAF, number),
        np.empty(state, number),
        np.empty(state * (sizes.top + 1), number),
        np.empty(sizes.top + 2, np.int64),
        np.empty(PARTS, number),
        np.empty(LEAF, np.int64),
        np.empty(LEAF, np.int64),
        np.empty(LEAF, np.int64),
        np.empty(LEAF, np.int64),
        np.empty(LEAF, np.int64),
        np.empty(0 if sizes.k_in_place else LEAF * width, number),
        np.empty(0 if sizes.v_in_place else LEAF * columns, number),
        np.empty(rows * LEAF if changed else 0, np.bool_),
        np.empty(across * LEAF if changed else 0, number),
        np.empty(SYMBOL_COUNT, np.int64),
        np.empty(4, np.int64),
        np.empty(rows, np.int64),
        *make_registers(sizes.score, across, number),
        *make_registers(sizes.mask, across, np.dtype(np.float32)),
        *make_registers(sizes.tile, 1, np.dtype(np.float32)),
    )


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
            source = row_address(q, b, head + n, i0 + i)
            first = (n * queries + i) * width
            for d in range(shape.d):
                panel[first + d] = load(source + d * shape.itemsize, zero)
            for d in range(shape.d, width):
                panel[first + d] = zero


@helper
def class_of_leaf(shape, changes, symbols, b, head, heads, i0, queries, j0, keys, edges, ri, rf):
    """Return the class of a leaf for all heads of a task."""
    if changes.pointers.classify == 0:
        return FULL
    some, full = False, True
    for h in range(head, head + heads):
        describe_tile(symbols, shape, b, h, i0, queries, j0, keys)
        found = class_of_tile(changes, symbols, queries, keys, edges, ri, rf)
        some |= found != EMPTY
        full &= found == FULL
    return FULL if full else (PARTIAL if some else EMPTY)


@helper
def softmax_of_leaf(s, first, part, log2_e):
    """Make a row of scores into weights; return its maximum and its sum."""
    minus_infinity = s.dtype.type(-math.inf)
    # Lengths that only the run knows: loops of constant length are unrolled instead of vectorised.
    row, parts = s[first : first + LEAF], part.size
    for n in range(parts):
        part[n] = minus_infinity
    for j in range(0, row.size, parts):
        for n in range(parts):
            part[n] = row[j + n] if row[j + n] > part[n] else part[n]
    m = minus_infinity
    for n in range(parts):
        m = part[n] if part[n] > m else m
    safe = m if m != minus_infinity else s.dtype.type(0)
    for n in range(row.size):
        row[n] = exp2((row[n] - safe) * log2_e)
    for n in range(parts):
        part[n] = 0
    for j in range(0, row.size, parts):
        for n in range(parts):
            part[n] += row[j + n]
    l = s.dtype.type(0)
    for n in range(parts):
        l += part[n]
    return m, l


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
            target = row_address(out, b, head + n, i0 + i)
            o = at + 2 * rows + r * columns
            for d in range(shape.d_v):
                # A sum of 0 has no sign: it would hang on pairs that take no part.
                value = zero if empty else fma(states[o + d], inverse, zero)
                store(target + d * shape.itemsize, value)
            # 9 store lse
            natural = -math.inf if l == 0 else m + math.log(l)
            target = row_address(lse, b, head + n, i0 + i)
            store(target, sink.dtype.type(natural))


@helper
def decode_combine(
    merge, parts, first_part, count, top, kept, place, size, c, nodes, filled, shape, b, head,
    heads, i0, queries, columns, sink, out, lse,
):  # fmt: skip
    """Join the parts of a task, `kept` from `place` on, and write its out and lse."""
    before, none, lowest = np.int64(-1), np.int64(-1), np.int64(1)
    rows = heads * queries
    filled[:] = 0
    for n in range(count):
        leaf = parts[first_part + n]
        if before >= 0:
            close_nodes(merge, nodes, size, rows, columns, c, filled, before, leaf, top)
        before = leaf
        # A larger node than a leaf is copied to the level above its own as it is closed.
        add_to_node(merge, nodes, size, lowest, kept, place + n * size, rows, columns, c, filled)
    close_nodes(merge, nodes, size, rows, columns, c, filled, before, none, top)
    finish_task(shape, b, head, heads, i0, queries, nodes, size * top, columns, sink, out, lse)


@takes(
    lambda number: (
        INT, INT, INT, INTS, TABLE, INTS, TABLE, TABLE, INT, shape_of(number), CHANGES, INT, CACHE,
        ROWS, vector(number), vector(number), ROWS, ROWS, INTS, decode_scratch_of(number),
    )
)  # fmt: skip
@kernel
def decode(
    first, last, most_leaves, counters, tasks, parts, units, members, top, shape, changes, merge,
    cache, q, sink, kept, out, lse, visited, scratch,
):  # fmt: skip
    """Compute units that nobody has taken, until none is left.

    A call returns early when ``(last - first) * most_leaves`` leaves are done. Who finishes a
    task's last part finishes the task. `tasks`, `parts`, `units` and `members` are what
    `decode_tasks` makes, and a node of level `top` has all keys. `merge` is the kernel's address.
    ``kept`` has a place for each part. ``counters[0]`` counts the units that were taken,
    ``counters[1 + n]`` the finished parts of task n, and ``visited[n]`` the leaves of unit n that
    were not EMPTY, for each of its tasks.
    """
    itemsize, lanes = shape.itemsize, shape.lanes_per_vector
    like = sink.dtype.type(0)
    key_size, value_size = row_size(cache.k), row_size(cache.v)
    width, columns = padded(shape.d, lanes), padded(shape.d_v, lanes)
    across = padded(shape.block_q, lanes)
    panel, s, leaf, nodes = scratch.panel, scratch.s, scratch.leaf, scratch.nodes
    filled, part, symbols = scratch.filled, scratch.part, scratch.symbols
    edges, classes = scratch.edges, scratch.classes
    k_rows, v_rows, next_rows = scratch.k_rows, scratch.v_rows, scratch.next_rows
    k_scales, v_scales = scratch.k_scales, scratch.v_scales
    seen, turned = scratch.seen, scratch.turned
    has_score = changes.score.code.shape[0] > 0
    # Variables, because helpers are compiled anew for every constant that they get.
    start, leaf_level, none = np.int64(0), np.int64(0), np.int64(-1)
    c = shape.log2_e
    loaded = -1
    leaves = 0

    while leaves < (last - first) * most_leaves:
        unit = arrive(first_address(counters))
        if unit >= units.shape[0]:
            break
        first_member, several = units[unit, 0], units[unit, 1]
        leaf_begin, leaf_end, level = units[unit, 2], units[unit, 3], units[unit, 4]
        task = members[first_member, 0]
        # The tasks of a unit differ in their entries and first queries.
        b, h_kv, head, heads = tasks[task, 0], tasks[task, 1], tasks[task, 2], tasks[task, 3]
        queries = tasks[task, 5]
        own = heads * queries
        rows = several * own
        size = state_size(rows, columns)
        # 1 load q
        if several > 1 or loaded != task:
            for x in range(several):
                task = members[first_member + x, 0]
                load_queries(
                    q, shape, tasks[task, 0], head, heads, tasks[task, 4], queries, width,
                    panel[x * own * width :],
                )  # fmt: skip
            loaded = task if several == 1 else -1
        filled[:] = 0
        before = none
        leaves += max(leaf_end - leaf_begin, 1) * several
        for n in range(leaf_begin, leaf_end):
            j0 = n * LEAF
            keys = min(LEAF, shape.len_k[b] - j0)
            looked_at, partial = 0, False
            for x in range(several):
                task = members[first_member + x, 0]
                classes[x] = class_of_leaf(
                    shape, changes, symbols, tasks[task, 0], head, heads, tasks[task, 4], queries,
                    j0, keys, edges, scratch.tile_ri, scratch.tile_rf,
                )  # fmt: skip
                looked_at += classes[x] != EMPTY
                partial |= classes[x] != FULL
            if looked_at == 0:
                continue
            visited[unit] += looked_at
            if before >= 0:
                close_nodes(merge, nodes, size, rows, columns, c, filled, before, n, level)
            before = np.int64(n)

            # 2 scores
            next_keys = max(min(LEAF, shape.len_k[b] - j0 - LEAF), 0)
            find_rows(cache, b, h_kv, j0 + LEAF, next_keys, next_rows, v_rows, k_scales, v_scales)
            find_rows(cache, b, h_kv, j0, keys, k_rows, v_rows, k_scales, v_scales)
            if not cache.k.in_place:
                load_rows(cache.k, k_rows, k_scales, keys, width, itemsize, scratch.k_tile)
            for j in range(keys, LEAF):
                k_rows[j] = k_rows[keys - 1]
            multiply_keys(
                shape.scale, first_address(panel), width, first_address(k_rows), first_address(s),
                LEAF, rows, keys, width, itemsize, first_address(v_rows), value_size,
            )  # fmt: skip
            if has_score or partial:
                look_at_all(edges, keys)
                for x in range(several * heads):
                    member, block = x // heads, s[x * queries * LEAF : (x + 1) * queries * LEAF]
                    if classes[member] == EMPTY:
                        block[:] = -math.inf
                        continue
                    task = members[first_member + member, 0]
                    for i in range(queries):
                        for j in range(keys):
                            turned[j * across + i] = block[i * LEAF + j]
                    describe_tile(
                        symbols, shape, tasks[task, 0], head + x - member * heads, tasks[task, 4],
                        queries, j0, keys,
                    )  # fmt: skip
                    # 3 score mod
                    if has_score:
                        apply_score(
                            changes.pointers, changes.score, symbols, queries, edges, across,
                            turned, turned, scratch.score_ri, scratch.score_rf,
                        )  # fmt: skip
                    # 4 mask
                    if classes[member] == PARTIAL:
                        apply_mask(
                            changes, symbols, queries, edges, across, turned, scratch.mask_ri,
                            scratch.mask_rf,
                        )  # fmt: skip
                    for i in range(queries):
                        for j in range(keys):
                            block[i * LEAF + j] = turned[j * across + i]
            for r in range(rows):
                for j in range(keys, LEAF):
                    s[r * LEAF + j] = -math.inf
            hidden = 0
            if has_score or partial:
                for r in range(rows):
                    for j in range(keys):
                        seen[r * LEAF + j] = s[r * LEAF + j] != -math.inf
                        hidden += not seen[r * LEAF + j]
            # 5 row max
            for r in range(rows):
                leaf[r], leaf[rows + r] = softmax_of_leaf(s, r * LEAF, part, shape.log2_e)
            # 7 accumulate p v
            if not cache.v.in_place:
                load_rows(cache.v, v_rows, v_scales, keys, columns, itemsize, scratch.v_tile)
            if hidden and not is_finite(v_rows, keys, columns, itemsize, like):
                multiply_seen(s, seen, v_rows, rows, keys, columns, itemsize, leaf, 2 * rows)
            else:
                multiply_values(
                    like, first_address(s), LEAF, first_address(v_rows),
                    first_address(leaf) + 2 * rows * itemsize, columns, rows, keys, columns,
                    itemsize, first_address(next_rows), next_keys, key_size,
                )  # fmt: skip
            # The leaf joins its node: merges stand for step 6.
            add_to_node(merge, nodes, size, leaf_level + 1, leaf, start, rows, columns, c, filled)
        if before >= 0:
            close_nodes(merge, nodes, size, rows, columns, c, filled, before, none, level)
        else:
            clear(nodes, size * level, rows)
        # Whoever finishes a task needs the scratch, so all parts are kept before.
        own_size = state_size(own, columns)
        for x in range(several):
            task, number = members[first_member + x, 0], members[first_member + x, 1]
            place = tasks[task, 8] + (number - tasks[task, 6]) * own_size
            keep_rows(nodes, size * level, rows, x * own, own, columns, kept, place)
        for x in range(several):
            task = members[first_member + x, 0]
            count = tasks[task, 7]
            if arrive(first_address(counters) + 8 * (1 + task)) == count - 1:
                decode_combine(
                    merge, parts, tasks[task, 6], count, top, kept, tasks[task, 8], own_size, c,
                    nodes, filled, shape, tasks[task, 0], head, heads, tasks[task, 4], queries,
                    columns, sink, out, lse,
                )  # fmt: skip
