"""Faults in the CPU kernels of a cache, and the tests that notice them.

See `cache_mutants` for what a fault is.
"""

from __future__ import annotations

from .cache_mutants import Fault

DECODE_CPU, MERGE_CPU, CACHE_CPU, APPEND_CPU, ROPE_CPU, TASKS_CPU, ROWS_CPU = (
    f"reference/cpu/{x}.py"
    for x in ("decode", "merge", "cache", "append", "rope", "decode_tasks", "rows_product")
)
CACHED, STEPS = "cpu/test_cached.py::test_", "frontend/test_append.py::test_"
PAGED = CACHED + "pages_change_no_bit"
HIDDEN = CACHED + "nodes_that_a_mask_shows_or_hides_change_no_bit"
BOUND, BITS = CACHED + "out_and_lse_are_within_the_bound", CACHED + "the_schedule_changes_no_bit"

ON_A_CPU = {
    "the pages of a neighbour": Fault(
        CACHE_CPU,
        "cache.table + b * cache.table_batch",
        "cache.table + b // 2 * cache.table_batch",
        PAGED,
    ),
    "the page before": Fault(
        CACHE_CPU,
        "+ number * cache.table_step",
        "+ max(number - 1, 0) * cache.table_step",
        PAGED,
    ),
    "a page ends one row early": Fault(
        CACHE_CPU,
        "min(count, cache.page_size - row)",
        "min(count, cache.page_size - row + 1)",
        PAGED,
    ),
    "a leaf of 63 keys": Fault(
        DECODE_CPU,
        "keys = min(LEAF, shape.len_k[b] - j0)",
        "keys = min(LEAF - 1, shape.len_k[b] - j0)",
        BOUND,
        "float32",
    ),
    "a leaf with a key that is not held": Fault(
        DECODE_CPU,
        "keys = min(LEAF, shape.len_k[b] - j0)",
        "keys = min(LEAF, shape.len_k[b] - j0 + 1)",
        BOUND,
        "float32",
    ),
    "the last leaf is left out": Fault(
        TASKS_CPU,
        "[rows[:, 0]] + LEAF - 1) >> LOG_LEAF",
        "[rows[:, 0]]) >> LOG_LEAF",
        BOUND,
        "float32",
    ),
    "missing columns are not 0": Fault(
        CACHE_CPU,
        "for d in range(source.columns, width):\n            store(",
        "for d in range(width, width):\n            store(",
        BOUND,
        "float32",
    ),
    "missing keys count": Fault(
        ROWS_CPU,
        'builder.icmp_signed("<", numbers, held)',
        'builder.icmp_signed("<=", numbers, held)',
        BOUND,
        "float32",
    ),
    "masks of the query behind": Fault(
        DECODE_CPU,
        "head + x - member * heads, tasks[task, 4],",
        "head + x - member * heads, tasks[task, 4] + 1,",
        BOUND,
        "float32",
    ),
    "the first leaf of a unit is left out": Fault(
        DECODE_CPU,
        "n, full_end, searches = leaf_begin,",
        "n, full_end, searches = leaf_begin + 1,",
        BOUND,
        "float32",
    ),
    "the last fold runs backwards": Fault(
        DECODE_CPU,
        """    for n in range(count):
        leaf = parts""",
        """    for n in range(count - 1, -1, -1):
        leaf = parts""",
        BITS,
    ),
    "a node that is seen in part is FULL": Fault(
        DECODE_CPU,
        "        if not partial:\n            return n, n",
        "        if looked_at:\n            return n, n",
        HIDDEN,
    ),
    "an EMPTY node is as long as two": Fault(
        DECODE_CPU, "            n += 1 << shift\n", "            n += 2 << shift\n", HIDDEN
    ),
    "rows of the leaf that follows the last one": Fault(
        DECODE_CPU, "if prepared != n:", "if prepared < 0:", HIDDEN
    ),
    "sums of some lanes are those of another key": Fault(
        ROWS_CPU,
        "keep = [n + self.lanes * bool(n & apart) for n in lanes]",
        "keep = [n + self.lanes * bool(n & 1) for n in lanes]",
        BOUND,
        "float32",
    ),
    "nodes are never closed": Fault(
        "reference/cpu/decode_nodes.py",
        "if now >= 0 and before >> shift == now >> shift:",
        "if now >= 0:",
        BITS,
    ),
    "nobody is the last": Fault(
        DECODE_CPU,
        "== count - 1:",
        "== count:",
        CACHED + "many_levels_of_nodes",
    ),
    "a sink for every unit": Fault(
        DECODE_CPU,
        "m, l = top, fma(l, weight, own)",
        "m, l = top, fma(l, weight, 2 * own)",
        BOUND,
        "float32",
    ),
    "the maximum of the first set": Fault(
        MERGE_CPU,
        "top = other_m if other_m > m else m",
        "top = m",
        CACHED + "leaves_whose_scores_lie_far_apart",
    ),
    "the sum is not rescaled": Fault(
        MERGE_CPU,
        "fma(other_l, other, product(l, own))",
        "fma(other_l, other, l)",
        BOUND,
        "float32",
    ),
    "rotation by the other sign": Fault(
        ROPE_CPU,
        "        if inverse:\n            s = -s\n",
        "        if not inverse:\n            s = -s\n",
        STEPS + "rows_are_rotated_within_the_bound",
        "float32",
    ),
    "the rest of a row is not copied": Fault(
        ROPE_CPU,
        "    out[..., rotated:] = x[..., rotated:]\n",
        "",
        STEPS + "rows_are_rotated_within_the_bound",
        "float32",
    ),
    "rows go to the position before": Fault(
        APPEND_CPU,
        "held = lengths[entries] - behind",
        "held = lengths[entries] - behind - 1",
        STEPS + "a_step_is_what_loops_write",
        "float32",
    ),
    "rows go to a neighbour's pages": Fault(
        APPEND_CPU,
        "table[entries, page]",
        "table[entries // 2, page]",
        STEPS + "a_step_is_what_loops_write",
        "float32",
    ),
    "a packed row goes to the entry before": Fault(
        APPEND_CPU,
        "behind = offsets[1:][entries] - np.arange(rows)",
        "behind = offsets[:-1][entries] - np.arange(rows)",
        STEPS + "a_step_is_what_loops_write",
        "float32",
    ),
    "queries are rotated by the position behind": Fault(
        APPEND_CPU,
        "rope(q, turned_by, *rotary, False, out)",
        "rope(q, turned_by + 1, *rotary, False, out)",
        STEPS + "a_step_is_what_loops_write",
        "float32",
    ),
}

FAULTS = {f"cpu: {name}": x for name, x in ON_A_CPU.items()}
