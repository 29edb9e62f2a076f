"""Faults of pieces of calls, whose keys join a result, each with the test that is for it.

See `cache_mutants` for what a fault is.
"""

from __future__ import annotations

from .cache_mutants import Fault

WEIGHTS, FRAGMENTS = "kernels_cu/common/join.cuh", "kernels_cu/sm80/fragment_rows.cuh"
SCALARS, SCHEDULE = "kernels_cu/simt/epilogue.cuh", "cupyflash/pieces/schedule.py"
COMPUTE = "cupyflash/pieces/compute.py"
JOINS = "cuda/test_pieces.py::test_keys_join_the_result_before_them"
PIECES = "cpu/test_streamed.py::test_queries_at_the_ends_that_see_no_keys_are_left_out"
BITS = "cpu/test_streamed.py::test_queries_that_are_left_out_change_no_bit"
SM80, SM90, SIMT = "3-sm80 and 33", "0-sm90 and 72", "0-simt and 40"

ON_A_GPU = {
    "rows without keys before them are read": Fault(
        FRAGMENTS, "if (!has_before) continue;", "if (row >= valid) continue;", JOINS, SM90
    ),
    "rows without keys before them are read by scalars": Fault(
        SCALARS,
        "const bool exists = has_before && column < WIDTH;",
        "const bool exists = row < valid && column < WIDTH;",
        JOINS,
        SIMT,
    ),
    "the lse of the keys here is kept": Fault(FRAGMENTS, "m[r] = joined.lse;", "", JOINS, SM90),
    "the lse of the keys here is kept by scalars": Fault(
        SCALARS, "m[r] = joined.lse;", "", JOINS, SIMT
    ),
    "rows without any keys have some": Fault(
        FRAGMENTS,
        "l[r] = joined.lse == -number::infinity() ? accum_t(0) : accum_t(1);",
        "l[r] = accum_t(2);",
        JOINS,
        SM80,
    ),
    "columns before have no gaps": Fault(
        FRAGMENTS, "row_gmem[(column + x) * before.col]", "row_gmem[column]", JOINS, SM80
    ),
    "rows before are those of the first head": Fault(
        FRAGMENTS,
        "layout::offset(before, entry, head, false) + first * before.row",
        "layout::offset(before, entry, 0, false) + first * before.row",
        JOINS,
        SM90,
    ),
    "a mean may be larger than what it is of": Fault(
        WEIGHTS, "return bounded(sum, fmax(fabs(x), fabs(x_before)));", "return sum;", JOINS, SIMT
    ),
    "weights do not add up to 1": Fault(
        WEIGHTS, "    before *= accum_t(1) / l;\n", "", JOINS, SM90
    ),
}
ON_A_CPU = {
    "the last queries that see keys are left out": Fault(
        SCHEDULE, "of_chunk[seen[-1]].stop)", "of_chunk[seen[-1]].start)", PIECES
    ),
    "the mask of the first queries is forgotten": Fault(
        SCHEDULE, "own[seen[0] : seen[-1] + 1, m] != FULL", "own[seen[-1] :, m] != FULL", PIECES
    ),
    "the first piece leaves out queries": Fault(
        SCHEDULE,
        "made = [Piece(rows, self.keys[needed[0]]",
        "made = [Piece(self.spans.get((n, needed[0]), (rows, True))[0], self.keys[needed[0]]",
        PIECES,
    ),
    "queries behind those of the last piece are not written": Fault(
        COMPUTE, "            self._store(range(rows.stop, count))\n", "", BITS, "turned"
    ),
    "queries before those of the last piece are not written": Fault(
        COMPUTE, "            self._store(range(rows.start))\n", "", BITS, "window"
    ),
}
FAULTS = {f"gpu: pieces: {name}": fault for name, fault in ON_A_GPU.items()}
FAULTS |= {f"cpu: pieces: {name}": fault for name, fault in ON_A_CPU.items()}
