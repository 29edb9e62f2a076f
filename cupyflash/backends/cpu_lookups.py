"""What the kernels of the CPU are told of learned look-ups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ArgumentError
from ..expr.learned import reads
from ..expr.nodes import LookupTable, walk
from ..expr.structure import table_of
from ..problem.bound_exprs import bound
from ..problem.call import Array, Call
from ..problem.lookups import REMEDY
from ..scores import is_score


def read(call: Call, learned: Sequence[LookupTable]) -> tuple[list[Any], list[tuple[Array, Array]]]:
    """Return what score changes read of look-ups, as programs, and tables of these.

    The former are `Read` of `reference.cpu`; the latter are as `cpu_programs.looked_up` returns
    them, and keep alive the arrays that programs read by their addresses.
    """
    if not learned:
        return [], []
    from cupyflash.reference.cpu.backward_lookup_call import Read
    from cupyflash.reference.cpu.program import NO_PROGRAM

    from ..expr.lower import lowered

    assert call.score_mod is not None, "it reads them"
    programs: list[Any] = []
    number = {table: n for n, table in enumerate(learned)}
    tables: list[tuple[Array, Array]] = []
    for each in reads(bound(call.score_mod.expr, call.problem)):
        is_one = each.slope.op == "constant" and each.slope.value == 1
        place, of_place = lowered(each.place)
        slope, of_slope = (NO_PROGRAM, []) if is_one else lowered(each.slope)
        programs.append(Read(place, slope, number[each.table]))
        tables += zip(place.tables, of_place, strict=True)
        tables += zip(slope.tables, of_slope, strict=True)
    return programs, tables


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
