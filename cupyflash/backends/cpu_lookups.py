"""The gradients of learned look-ups on NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..errors import ArgumentError
from ..expr.learned import Read, reads
from ..expr.nodes import LookupTable, walk
from ..problem.bound_exprs import bound
from ..problem.call import Array, Call
from ..problem.lookups import REMEDY
from . import cpu_programs, cpu_tiles


def backward(call: Call, rows: Mapping[str, Array], gradients: Mapping[LookupTable, Array]) -> None:
    """Write gradients; `rows` are do, out, lse and, if it is given, dlse."""
    from cupyflash.reference.cpu import launch
    from cupyflash.reference.cpu.program import NO_PROGRAM
    from cupyflash.reference.cpu.sums import store

    from ..expr.lower import lowered

    assert call.score_mod is not None, "it reads them"
    totals = {table: np.zeros(x.shape, np.float64) for table, x in gradients.items()}
    programs, made, held = [], [], []
    for read in reads(bound(call.score_mod.expr, call.problem)):
        is_one = read.slope.op == "constant" and read.slope.value == 1
        place = lowered(read.place)
        slope = (NO_PROGRAM, []) if is_one else lowered(read.slope)
        held.append((place, slope))
        programs.append((place[0], slope[0], totals[read.table]))
    plan, made = cpu_tiles.tiled(call.problem), cpu_programs.programs(call)
    launch.backward_lookups(
        call.problem,
        made,
        programs,
        rows["do"],
        call.q,
        call.k,
        call.v,
        rows["out"],
        rows["lse"],
        rows.get("dlse"),
        plan.block_q,
        plan.block_kv,
    )
    for table, total in totals.items():
        store(total, gradients[table])


def check(call: Call) -> None:
    """Refuse elements whose number depends on the score."""
    assert call.score_mod is not None, "it reads them"
    for read in reads(bound(call.score_mod.expr, call.problem)):
        _check_place(read)


def _check_place(read: Read) -> None:
    if any(node.op == "symbol" and node.value == "score" for node in walk(read.place)):
        raise ArgumentError(
            f"score_mod: got a learned look-up that is read at {read.place}, which depends on the "
            "score, and has no gradient then; expected indices of b, h, i and j. " + REMEDY
        )
