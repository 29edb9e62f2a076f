"""Faults of positions that entries of a cache share, on the CPU, each with the test that is for it.

See `cache_mutants` for what a fault is.
"""

from __future__ import annotations

from .cache_mutants import CACHE_CPU, DECODE_CPU, TASKS_CPU, Fault

SHARED = "cpu/test_cached_shared.py::test_"
BITS, DIVIDED = SHARED + "sharing_changes_no_bit", SHARED + "the_schedule_changes_no_bit"
NODES_CPU = "reference/cpu/decode_nodes.py"

_FAULTS = {
    "every entry reads its own pages": Fault(
        CACHE_CPU,
        "owner, count = 0, min(count, cache.shared - row)",
        "owner, count = b, min(count, cache.shared - row)",
        BITS,
    ),
    "rows behind the shared ones are those of entry 0": Fault(
        CACHE_CPU,
        "owner, count = 0, min(count, cache.shared - row)",
        "owner, count = 0, count",
        BITS,
    ),
    "masks of the first entry of a unit": Fault(
        DECODE_CPU,
        "symbols, shape, tasks[task, 0], head + x - member * heads",
        "symbols, shape, b, head + x - member * heads",
        BITS,
    ),
    "classes of the first entry of a unit": Fault(
        DECODE_CPU,
        "shape, changes, symbols, tasks[task, 0], head, heads",
        "shape, changes, symbols, b, head, heads",
        BITS,
    ),
    "queries of the first entry of a unit": Fault(
        DECODE_CPU,
        "q, shape, tasks[task, 0], head, heads",
        "q, shape, b, head, heads",
        BITS,
    ),
    "rows of the first entry are kept": Fault(
        NODES_CPU,
        "source, result = at + 2 * rows + first * columns",
        "source, result = at + 2 * rows",
        BITS,
    ),
    "nodes without keys join": Fault(
        NODES_CPU, "        if filled[n]:\n", "        if True:\n", BITS
    ),
    "parts of a task are one node": Fault(
        TASKS_CPU,
        "return Schedule(tasks, parts.node,",
        "return Schedule(tasks, 0 * parts.node,",
        DIVIDED,
    ),
    "a leaf that is shared in part": Fault(
        TASKS_CPU,
        "shared) >> LOG_LEAF, 0)",
        "shared) + LEAF - 1 >> LOG_LEAF, 0)",
        BITS,
    ),
    "units of parts that end elsewhere": Fault(
        TASKS_CPU, "    alike += (parts.end[shared],)\n", "", DIVIDED
    ),
}

FAULTS = {f"cpu: {name}": fault for name, fault in _FAULTS.items()}
