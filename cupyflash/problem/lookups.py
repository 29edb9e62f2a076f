"""Gradients of learned look-ups: which calls have them, and arrays given for them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError
from ..expr.nodes import LookupTable
from ..scores import Score, chain
from .call import Array, Call

Target = tuple[Any, tuple[int, ...], np.dtype[Any]]

REMEDY = (
    "Make it with cupyflash.lookup(array), without learned=True; for the gradient of what it adds "
    "to the scores, pass that as bias, and sum dbias over the pairs that share an element."
)


def learns(score_mod: Any) -> bool:
    """Whether score changes, as users pass them, read learned look-ups."""
    if score_mod is None:
        return False
    changes = (score_mod,) if isinstance(score_mod, Score) else score_mod
    if not isinstance(changes, (list, tuple)):
        return False  # a check of it says what is wrong
    return any(isinstance(each, Score) and bool(each.learned_tables) for each in changes)


class Learned(NamedTuple):
    """The learned look-ups of score changes as users pass them, which are not checked yet.

    Attributes
    ----------
    tables : tuple of LookupTable
        Each once, in the order of the changes.
    pattern : tuple
        Which nodes of the changes' structures read which of them: equal for calls that differ in
        arrays alone.
    """

    tables: tuple[LookupTable, ...]
    pattern: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, score_mod: Any) -> Learned | None:
        """Return those that score changes read; None if there are none."""
        if not learns(score_mod):
            return None
        changes = (score_mod,) if isinstance(score_mod, Score) else score_mod
        numbers: dict[LookupTable, int] = {}
        pattern = tuple(
            tuple((n, numbers.setdefault(table, len(numbers))) for n, table in each.learned_reads)
            for each in changes
        )
        return cls(tuple(numbers), pattern)

    def given(self, grads_out: Any) -> dict[str, Any] | None:
        """Return the arrays given for gradients by the kernels' names; None if they are wrong."""
        arrays = getattr(grads_out, "dlookups", {})
        if type(arrays) not in (dict, MappingProxyType) or not set(arrays) <= set(self.tables):
            return None
        return {gradient_name(n): arrays.get(table) for n, table in enumerate(self.tables)}


def gradient_name(number: int) -> str:
    """Return the kernels' name of the gradient of a look-up, of which a call may have several."""
    return f"dlookup {number}"


def of_call(call: Call) -> tuple[LookupTable, ...]:
    """Return the learned look-ups of a call, each once."""
    change = chain(call.score_mod)
    return () if change is None else change.learned_tables


def refuse(call: Call, where: str, remedy: str = REMEDY) -> None:
    """Refuse learned look-ups in calls that do not compute their gradients, `where` in words."""
    for table in of_call(call):
        raise ArgumentTypeError(
            f"score_mod: got a learned look-up of shape {tuple(table.array.shape)}, whose gradient "
            f"is not computed {where}; expected none. {remedy}"
        )


def targets(grads_out: Any, call: Call) -> dict[LookupTable, Array | None]:
    """Return the learned look-ups of a call, each with the array that is given for its gradient."""
    wanted: dict[LookupTable, Array | None] = dict.fromkeys(of_call(call))
    given = getattr(grads_out, "dlookups", None) or {}
    if not isinstance(given, Mapping):
        raise ArgumentTypeError(
            f"grads_out.dlookups: got {type(given).__name__}; expected a mapping from look-ups of "
            "cupyflash.lookup(array, learned=True) to arrays."
        )
    for table, array in given.items():
        if not isinstance(table, LookupTable) or table not in wanted:
            raise ArgumentError(
                f"grads_out.dlookups: got an array for {_named(table)}, which is no learned "
                "look-up of the score changes; expected keys that score_mod reads, made by "
                "cupyflash.lookup(array, learned=True)."
            )
        wanted[table] = array
    return wanted


def checks(wanted: Mapping[LookupTable, Array | None]) -> dict[str, Target]:
    """Return the arrays that are given as they are to be checked."""
    return {
        f"grads_out.dlookups of look-up {n}": (target, table.array.shape, table.array.dtype)
        for n, (table, target) in enumerate(wanted.items())
        if target is not None
    }


def _named(table: Any) -> str:
    if not isinstance(table, LookupTable):
        return type(table).__name__
    return f"a look-up of shape {tuple(table.array.shape)}"
