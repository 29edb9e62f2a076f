"""Faults of positions that entries of a cache share, each with the test that is for it.

See `cache_mutants` for what a fault is.
"""

from __future__ import annotations

from .cache_mutants import JOIN, TASKS, Fault
from .cached_cpu_mutants import CACHE_CPU, DECODE_CPU, TASKS_CPU

SHARED = "cpu/test_cached_shared.py::test_"
BITS, DIVIDED = SHARED + "sharing_changes_no_bit", SHARED + "the_schedule_changes_no_bit"
NODES_CPU = "reference/cpu/decode_nodes.py"

TEAMS, ROWS = "kernels_cu/sm80/decode_sm80_shared.cu", "kernels_cu/decode/shared.cuh"
ON_GPU = "cuda/test_decode_shared.py::test_"
SAME, OF_TEAMS = ON_GPU + "no_bit_depends_on_what_is_shared", ON_GPU + "teams_of_any_size"
LARGER = ON_GPU + "own_units_are_larger_than_shared_nodes"
ROWS_OF_LEAF = "kernels_cu/warp/decode_rows.cuh"
LEVELS, FINITE = ON_GPU + "units_of_every_level", ON_GPU + "values_that_are_not_finite"

ON_A_CPU = {
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
    "a node that is closed stays filled": Fault(
        NODES_CPU, "        filled[n] = 0\n", "        filled[n] = 1\n", BITS
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

ON_A_GPU = {
    "rows are those of the first entry": Fault(
        ROWS, "first_entry + member(row);", "first_entry;", SAME, "all"
    ),
    "results are those of the first entry": Fault(
        ROWS, "first_task + member(row) * tasks_of_entry", "first_task", SAME, "all"
    ),
    "rows of later entries are not their own": Fault(
        ROWS, "return row - member(row) * own;", "return row;", SAME, "all"
    ),
    "classes are those of the last head": Fault(
        ROWS, "full = full && found == FULL;", "full = found == FULL;", SAME, "entry and by"
    ),
    "nothing is masked": Fault(TEAMS, "(full >> n & 1) == 0", "false", SAME, "entry and by"),
    "short entries share what they do not have": Fault(
        TASKS, "return leaves > shared ?", "return leaves > 0 ?", SAME, "all"
    ),
    "units that begin later follow shared nodes": Fault(
        JOIN,
        "if (units.first_node > shared >> (LOG_CHILDREN * own)) shared = 0;",
        "",
        SAME,
        "short",
    ),
    "keys are those of another entry": Fault(
        TEAMS,
        "keys.leaf(n).first_key()), LEAF, 0);",
        "keys.leaf(n).first_key()), LEAF, 2);",
        SAME,
        "all",
    ),
    "a team does not meet": Fault(
        TEAMS,
        "      ptx::named_barrier_sync(1 + team, TEAM * ptx::WARP_SIZE);",
        "      __syncwarp();",
        OF_TEAMS,
        "5-4-1-2",
    ),
    "a team meets another one": Fault(
        TEAMS,
        "      ptx::named_barrier_sync(1 + team, TEAM * ptx::WARP_SIZE);",
        "      ptx::named_barrier_sync(1, TEAM * ptx::WARP_SIZE);",
        SAME,
        "all",
    ),
    "a step is not waited for": Fault(
        TEAMS, "cp_async_wait<AHEAD - 1>();", "cp_async_wait<AHEAD>();", OF_TEAMS, "5-4-1-2"
    ),
    "a stage is overwritten before it is read": Fault(
        TEAMS, "AHEAD = RING - 1;", "AHEAD = RING;", OF_TEAMS, "5-4-1-2"
    ),
    "each warp copies the same part of a step": Fault(
        ROWS_OF_LEAF, "(n + sharer) * Row::AT_ONCE", "n * Row::AT_ONCE", OF_TEAMS, "5-4-1-2"
    ),
    "warps without masked pairs do not look": Fault(
        TEAMS,
        "ready.holds, index == 0",
        "MAY_MASK && has_masked, index == 0",
        FINITE + "_stay_where_they_are_seen",
        "True",
    ),
    "all warps clear values": Fault(
        TEAMS,
        "ready.holds, index == 0",
        "ready.holds, true",
        FINITE + "_stay_where_they_are_seen",
        "True",
    ),
    "own keys begin within a node": Fault(TASKS, "shared >> shift << shift", "shared", LARGER),
    "leaves join shared nodes": Fault(
        JOIN, "shared > 0 && own == 0 ? 1 : own;", "own;", LEVELS, "512"
    ),
    "shared nodes begin at the units' level": Fault(
        JOIN, "shared > 0 && own > 1 ? 1 : own;", "own;", LARGER
    ),
    "shared nodes are those of all levels": Fault(
        JOIN,
        "shared(task.shared(p, own)) {",
        "shared(task.shared(p, 0)) {",
        LARGER,
    ),
    "shared nodes lie where made ones do": Fault(
        JOIN, "level > (is_shared ? 1 : own)", "level > own", LEVELS, "512"
    ),
}

FAULTS = {f"cpu: {name}": fault for name, fault in ON_A_CPU.items()}
FAULTS |= {f"gpu: shared: {name}": fault for name, fault in ON_A_GPU.items()}
