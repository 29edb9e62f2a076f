"""Few queries and many keys: attention over a cache, the CPU twin of the decode kernels.

The sums over keys form a fixed tree (`decode_tasks`). The softmax of a leaf of 64 keys starts anew,
leaves are merged to nodes, and threads share the nodes. A row of keys or values is read once for
all heads that share it, and for the queries of several entries that share it.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .cache import find_rows, groups_of, lines_of, load_rows
from .decode_nodes import add_to_node, close_nodes, keep_rows
from .decode_scratch import decode_scratch_of
from .decode_tasks import LEAF, LOG_CHILDREN, LOG_LEAF
from .decode_work import decode_work_of
from .elementary import exp2
from .jit import INT, helper, kernel, takes
from .memory import first_address, load, row_address, store
from .merge import clear, fma, state_size
from .microkernel import padded
from .narrow import write_narrow
from .rows_product import VECTOR_BYTES, call_keys, call_values, is_finite, softmax_of_leaf
from .tile import (
    EMPTY,
    FULL,
    PARTIAL,
    apply_mask,
    apply_score,
    class_of_tile,
    describe_tile,
    look_at_all,
)
from .widen import NATIVE, find_rows_at


@intrinsic
def arrive(typingctx, counter):
    """Add 1 to the integer at an address, and return what it was; what was written is seen."""

    def codegen(context, builder, sig, args):
        word = ir.IntType(64)
        pointer = builder.inttoptr(args[0], word.as_pointer())
        return builder.atomic_rmw("add", pointer, word(1), "seq_cst")

    return types.int64(types.int64), codegen


@helper
def load_queries(widen, q, shape, b, head, heads, i0, queries, width, panel):
    """Load a task's queries as rows of `panel`: those of a head, then those of the next one.

    Those of 16 bits are widened by the kernel at `widen`.
    """
    zero = panel.dtype.type(0)
    for n in range(heads):
        if q.kind != NATIVE:
            tile = panel[n * queries * width :]
            find_rows_at(widen, q, b, head + n, i0, queries, shape.d, width, tile)
            continue
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
    last = head + (heads if changes.lists.by_head else 1)
    for h in range(head, last):
        describe_tile(symbols, shape, b, h, i0, queries, j0, keys)
        found = class_of_tile(changes, symbols, queries, keys, edges, ri, rf)
        some |= found != EMPTY
        full &= found == FULL
    return FULL if full else (PARTIAL if some else EMPTY)


@helper
def classes_of_leaf(
    shape, changes, symbols, tasks, members, first_member, several, head, heads, queries, j0, keys,
    edges, ri, rf, classes,
):  # fmt: skip
    """Write the class of keys for each task of a unit.

    Return for how many it is not EMPTY, and whether it is not FULL for any.
    """
    looked_at, partial = 0, False
    for x in range(several):
        task = members[first_member + x, 0]
        classes[x] = class_of_leaf(
            shape, changes, symbols, tasks[task, 0], head, heads, tasks[task, 4], queries, j0, keys,
            edges, ri, rf,
        )  # fmt: skip
        looked_at += classes[x] != EMPTY
        partial |= classes[x] != FULL
    return looked_at, partial


@helper
def next_leaf(
    shape, changes, symbols, tasks, members, first_member, several, head, heads, queries, n, end,
    edges, ri, rf, classes,
):  # fmt: skip
    """Return the first leaf from `n` to `end` that lies in no EMPTY node, or `end`.

    Return also where a FULL node ends that begins there, or 0. Large nodes are tried first, so that
    the keys between two ranges cost next to nothing, and those within a range little.
    """
    b = tasks[members[first_member, 0], 0]
    shift, found = 0, False
    while n < end:
        while not found:  # a larger node that begins here and ends in time
            larger = shift + LOG_CHILDREN
            if n >> larger << larger != n or n + (1 << larger) > end:
                break
            shift = larger
        if shift == 0:
            break
        j0 = n << LOG_LEAF
        keys = min(LEAF << shift, shape.len_k[b] - j0)
        looked_at, partial = classes_of_leaf(
            shape, changes, symbols, tasks, members, first_member, several, head, heads, queries,
            j0, keys, edges, ri, rf, classes,
        )  # fmt: skip
        if not partial:
            return n, n + (1 << shift)
        found = looked_at > 0
        if found:
            shift -= LOG_CHILDREN
        else:
            n += 1 << shift
            shift = 0
    return n, 0


@helper
def multiply_seen(s, seen, values, count, keys, columns, states, first):
    """Multiply weights by a tile of values pair by pair, leaving out those that take no part."""
    zero = s.dtype.type(0)
    for r in range(count):
        o = states[first + r * columns : first + (r + 1) * columns]
        for d in range(columns):
            o[d] = zero
        for j in range(keys):
            if seen[r * LEAF + j]:
                for d in range(columns):
                    o[d] = fma(s[r * LEAF + j], values[j * columns + d], o[d])


@helper
def finish_task(narrow, shape, b, head, heads, i0, queries, states, at, columns, sink, out, lse):
    """Write out and lse of a task whose state is complete, and is not needed any more.

    The kernel at `narrow` rounds numbers to 16 bits.
    """
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
            first = at + 2 * rows + r * columns
            o = states[first : first + columns]
            for d in range(shape.d_v):
                # A sum of 0 has no sign: it would hang on pairs that take no part.
                o[d] = zero if empty else fma(o[d], inverse, zero)
            if out.kind != NATIVE:
                size = columns * shape.itemsize
                write_narrow(narrow, (first_address(o), size, 1, shape.d_v, target, size))
            else:
                for d in range(shape.d_v):
                    store(target + d * shape.itemsize, o[d])
            # 9 store lse
            natural = -math.inf if l == 0 else m + math.log(l)
            target = row_address(lse, b, head + n, i0 + i)
            store(target, sink.dtype.type(natural))


@helper
def decode_combine(
    narrow, merge, parts, first_part, count, top, kept, place, size, c, nodes, filled, shape, b,
    head, heads, i0, queries, columns, sink, out, lse,
):  # fmt: skip
    """Join the parts of a task, `kept` from `place` on, and write its out and lse.

    With a `count` of 0, no part was kept, and the node of level `top` is the task's.
    """
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
    if count:
        close_nodes(merge, nodes, size, rows, columns, c, filled, before, none, top)
    finish_task(
        narrow, shape, b, head, heads, i0, queries, nodes, size * top, columns, sink, out, lse
    )


@takes(lambda number: (INT, INT, decode_work_of(number), decode_scratch_of(number)))
@kernel
def decode(first, last, work, scratch):
    """Compute units that nobody has taken, until none is left.

    A call returns early when ``(last - first) * most_leaves`` leaves are done. Who finishes a
    task's last part finishes the task. A node of level `top` has all keys. ``counters[0]`` counts
    the units that were taken, and ``counters[1 + n]`` the finished parts of task n.
    """
    shape, changes, cache, sink = work.shape, work.changes, work.cache, work.sink
    tasks, parts, units, members = work.tasks, work.parts, work.units, work.members
    counters, visited, kept, top = work.counters, work.visited, work.kept, work.top
    q, out, lse, merge = work.q, work.out, work.lse, work.merge
    widen, narrow = changes.pointers.widen, changes.pointers.narrow
    itemsize, lanes = shape.itemsize, shape.lanes_per_vector
    like = sink.dtype.type(0)
    width, columns = padded(shape.d, lanes), padded(shape.d_v, lanes)
    across = padded(shape.block_q, lanes)
    panel, s, leaf, nodes = scratch.panel, scratch.s, scratch.leaf, scratch.nodes
    filled, symbols = scratch.filled, scratch.symbols
    edges, classes = scratch.edges, scratch.classes
    k_rows, v_rows = scratch.k_rows, scratch.v_rows
    k_scales, v_scales = scratch.k_scales, scratch.v_scales
    seen, turned = scratch.seen, scratch.turned
    has_score = changes.score.code.shape[0] > 0
    k, v = cache.k, cache.v
    k_lines, v_lines = lines_of(k), lines_of(v)
    groups = groups_of(k)
    vectors = width * itemsize // VECTOR_BYTES // groups
    # Variables, because helpers are compiled anew for every constant that they get.
    start, lowest, none = np.int64(0), np.int64(1), np.int64(-1)
    c = shape.log2_e
    loaded = -1
    leaves = 0
    # Where a mask lets queries see one range of keys, units have no others.
    may_hide = changes.mask.code.shape[0] > 0
    # Whether heads hide the same pairs, so that the mask is evaluated once.
    shares, zero = not (has_score or changes.lists.by_head), like

    while leaves < (last - first) * work.most_leaves:
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
                    widen, q, shape, tasks[task, 0], head, heads, tasks[task, 4], queries, width,
                    panel[x * own * width :],
                )  # fmt: skip
            loaded = task if several == 1 else -1
        filled[:] = 0
        before, prepared = none, none
        leaves += max(leaf_end - leaf_begin, 1) * several
        n, full_end, searches = leaf_begin, np.int64(0), may_hide
        while n < leaf_end:
            if searches:
                searches = False
                n, full_end = next_leaf(
                    shape, changes, symbols, tasks, members, first_member, several, head, heads,
                    queries, n, leaf_end, edges, scratch.tile_ri, scratch.tile_rf, classes,
                )  # fmt: skip
                continue
            j0 = n * LEAF
            keys = min(LEAF, shape.len_k[b] - j0)
            looked_at, partial = several, False
            if n >= full_end:
                looked_at, partial = classes_of_leaf(
                    shape, changes, symbols, tasks, members, first_member, several, head, heads,
                    queries, j0, keys, edges, scratch.tile_ri, scratch.tile_rf, classes,
                )  # fmt: skip
            if looked_at == 0:
                n, searches = n + 1, may_hide
                continue
            visited[unit] += looked_at
            if before >= 0:
                close_nodes(merge, nodes, size, rows, columns, c, filled, before, n, level)
            before = n

            # 2 scores
            here, ahead = (n & 1) * LEAF, LEAF - (n & 1) * LEAF
            if prepared != n:
                find_rows(cache, b, h_kv, j0, keys, here, k_rows, v_rows, k_scales, v_scales)
            next_keys = max(min(LEAF, shape.len_k[b] - j0 - LEAF), 0)
            find_rows(
                cache, b, h_kv, j0 + LEAF, next_keys, ahead, k_rows, v_rows, k_scales, v_scales
            )
            prepared = n + 1
            k_places = first_address(k_rows) + 8 * here
            if not k.in_place:
                load_rows(k, k_rows[here:], k_scales[here:], keys, width, itemsize, scratch.k_tile)
                k_places = first_address(scratch.k_tile_rows)
            v_places = first_address(v_rows) + 8 * here
            call_keys(
                work.multiply_keys,
                (
                    shape.scale, first_address(panel), width, k_places,
                    first_address(k_scales) + 8 * here, first_address(s), LEAF, rows, keys, groups,
                    vectors, k.scale_group, itemsize, v_places, v_lines,
                ),
            )  # fmt: skip
            if has_score or partial:
                look_at_all(edges, keys)
                for x in range(several * heads):
                    member, block = x // heads, s[x * queries * LEAF : (x + 1) * queries * LEAF]
                    if classes[member] == EMPTY:
                        block[:] = -math.inf
                        continue
                    if shares and classes[member] == FULL:
                        continue
                    if shares and x % heads:  # they see what the first of them sees
                        for i in range(queries):
                            for j in range(keys):
                                if turned[j * across + i] == -math.inf:
                                    block[i * LEAF + j] = -math.inf
                        continue
                    task = members[first_member + member, 0]
                    for i in range(queries):
                        for j in range(keys):
                            turned[j * across + i] = zero if shares else block[i * LEAF + j]
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
                            if not shares:
                                block[i * LEAF + j] = turned[j * across + i]
                            elif turned[j * across + i] == -math.inf:
                                block[i * LEAF + j] = -math.inf
            hidden = 0
            if has_score or partial:
                for r in range(rows):
                    for j in range(keys):
                        seen[r * LEAF + j] = s[r * LEAF + j] != -math.inf
                        hidden += not seen[r * LEAF + j]
            # The first leaf of a node is its state, and others join it: merges stand for step 6.
            joins = filled[lowest]
            filled[lowest] = 1
            states, at = (leaf, start) if joins else (nodes, size)
            state = first_address(states) + at * itemsize
            # 5 row max
            for r in range(rows):
                place = state + r * itemsize
                softmax_of_leaf(
                    first_address(s) + r * LEAF * itemsize, keys, place, place + rows * itemsize, c
                )
            # 7 accumulate p v
            v_tile = scratch.v_tile
            if hidden or not v.in_place:
                load_rows(v, v_rows[here:], v_scales[here:], keys, columns, itemsize, v_tile)
            if not v.in_place:
                v_places = first_address(scratch.v_tile_rows)
            if hidden and not is_finite(first_address(v_tile), keys * columns, like):
                multiply_seen(s, seen, v_tile, rows, keys, columns, states, at + 2 * rows)
            else:
                call_values(
                    work.multiply_values,
                    (
                        like, first_address(s), LEAF, v_places, first_address(v_scales) + 8 * here,
                        max(v.group, 1), v.scale_group, state + 2 * rows * itemsize, columns, rows,
                        keys, columns, itemsize, first_address(k_rows) + 8 * ahead,
                        k_lines if next_keys else 0,
                    ),
                )  # fmt: skip
            if joins:
                add_to_node(merge, nodes, size, lowest, leaf, start, rows, columns, c, filled)
            n += 1
            searches = may_hide and n >= full_end and n >> LOG_CHILDREN << LOG_CHILDREN == n
        if before >= 0:
            close_nodes(merge, nodes, size, rows, columns, c, filled, before, none, level)
        else:
            clear(nodes, size * level, rows)
        task = members[first_member, 0]
        if several == 1 and tasks[task, 7] == 1:  # this is all of it
            decode_combine(
                narrow, merge, parts, start, start, level, kept, start, size, c, nodes, filled,
                shape, b, head, heads, tasks[task, 4], queries, columns, sink, out, lse,
            )  # fmt: skip
            continue
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
                    narrow, merge, parts, tasks[task, 6], count, top, kept, tasks[task, 8],
                    own_size, c, nodes, filled, shape, tasks[task, 0], head, heads, tasks[task, 4],
                    queries, columns, sink, out, lse,
                )  # fmt: skip
