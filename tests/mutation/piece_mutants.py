"""Faults of pieces of calls, whose keys join a result, each with the test that is for it.

See `cache_mutants` for what a fault is.
"""

from __future__ import annotations

from .cache_mutants import Fault

WEIGHTS, FRAGMENTS = "kernels_cu/common/join.cuh", "kernels_cu/warp/fragment_rows.cuh"
SCALARS, SCHEDULE = "kernels_cu/simt/epilogue.cuh", "cupyflash/pieces/schedule.py"
COMPUTE = "cupyflash/pieces/compute.py"
DROPOUT, SM80_DROPOUT = "kernels_cu/common/tile.cuh", "sm80-dtype1-causal"
ANY_KEY = "cuda/test_pieces.py::test_pieces_are_within_the_bound"
JOINS = "cuda/test_pieces.py::test_keys_join_the_result_before_them"
PIECES = "cpu/test_streamed.py::test_queries_at_the_ends_that_see_no_keys_are_left_out"
BITS = "cpu/test_streamed.py::test_queries_that_are_left_out_change_no_bit"
HEADS = (
    "frontend/test_streamed_device.py::test_heads_with_all_of_their_keys_have_the_bits_of_one_call"
)
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
    "dropout counts four keys at a time from a multiple of 4": Fault(
        DROPOUT,
        "return philox::words_from(key, static_cast<unsigned long long>(j), i, b_h);",
        "return philox::words(key, static_cast<unsigned int>(j / 4), i, b_h);",
        ANY_KEY,
        SM80_DROPOUT,
    ),
    "the second draw of four keys is the first one's": Fault(
        "kernels_cu/common/philox.cuh",
        "words(key, group + 1, i, b_h)",
        "words(key, group, i, b_h)",
        ANY_KEY,
        SM80_DROPOUT,
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
    "heads of a group are counted from its first one": Fault(
        "cupyflash/pieces/parts.py",
        "origin_h=whole.origin_h + group * kv.start",
        "origin_h=whole.origin_h",
        HEADS,
        "dropout and dhhd",
    ),
    "queries of a group are as many as its keys' heads": Fault(
        "cupyflash/pieces/heads.py",
        "made[name] = take(array, group.heads)",
        "made[name] = take(array, group.kv)",
        HEADS,
        "plain and dhhd",
    ),
    "groups of heads read keys that nobody sees": Fault(
        "cupyflash/pieces/heads.py",
        "is_small and by_heads and is_seen",
        "is_small and by_heads",
        "frontend/test_streamed_device.py::test_heads_are_divided_where_each_group_fills_the_device",
    ),
    "queries before those of the last piece are not written": Fault(
        COMPUTE, "            self._store(range(rows.start))\n", "", BITS, "window"
    ),
}
FAULTS = {f"gpu: pieces: {name}": fault for name, fault in ON_A_GPU.items()}
FAULTS |= {f"cpu: pieces: {name}": fault for name, fault in ON_A_CPU.items()}
