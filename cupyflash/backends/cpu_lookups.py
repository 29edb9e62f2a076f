"""The gradients of learned look-ups on NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..errors import ArgumentError
from ..expr.learned import reads
from ..expr.nodes import LookupTable, walk
from ..expr.structure import table_of
from ..problem.bound_exprs import bound
from ..problem.call import Array, Call
from ..problem.lookups import REMEDY
from ..scores import is_score
from . import cpu_programs, cpu_tiles


def backward(call: Call, rows: Mapping[str, Array], gradients: Mapping[LookupTable, Array]) -> None:
    """Write gradients; `rows` are do, out, lse and, if it is given, dlse."""
    from cupyflash.reference.cpu import launch
    from cupyflash.reference.cpu.program import NO_PROGRAM
    from cupyflash.reference.cpu.sums import store

    from ..expr.lower import lowered

    assert call.score_mod is not None, "it reads them"
    totals = {table: np.zeros(x.shape, np.float64) for table, x in gradients.items()}
    programs, arrays = [], []  # the latter are read by their addresses
    for read in reads(bound(call.score_mod.expr, call.problem)):
        is_one = read.slope.op == "constant" and read.slope.value == 1
        place, of_place = lowered(read.place)
        slope, of_slope = (NO_PROGRAM, []) if is_one else lowered(read.slope)
        programs.append((place, slope, totals[read.table]))
        arrays += [*of_place, *of_slope]
    plan = cpu_tiles.tiled(call.problem)
    launch.backward_lookups(
        call.problem,
        cpu_programs.programs(call),
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
    del arrays


def check(call: Call) -> None:
    """Refuse elements whose number depends on the score."""
    assert call.score_mod is not None, "it reads them"
    for node in walk(call.score_mod.expr):
        if table_of(node) is not None and any(is_score(each) for each in walk(*node.args)):
            raise ArgumentError(
                f"score_mod: got a learned look-up that is read at {', '.join(map(str, node.args))}"
                ", which depends on the score, and has no gradient then; expected indices of b, h, "
                f"i and j. {REMEDY}"
            )
