"""What a call's mask and score changes become for the kernels of `reference.cpu`."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..expr.interval import FULL
from ..expr.key_range import KeyRange, key_range
from ..expr.tile_classes import tile_classes
from ..lazy import Kept
from ..masks import position_symbols
from ..problem import positions
from ..problem.bound_exprs import Trees, trees
from ..problem.cache import Cache
from ..problem.cached import MOST_POSITIONS
from ..problem.cached_rows import CachedRows
from ..problem.call import Array, Call, Problem
from . import cpu_ranges, host_replay

MOST_LOOKED_AT = 1 << 12  # bytes of arrays that a proof reads, unless they are the whole mask


class Proved(NamedTuple):
    """What proofs say of a call's expressions.

    Attributes
    ----------
    trees : Trees
        The expressions.
    found : KeyRange or None
        The range of keys that the mask gives, if it gives one.
    hides : bool or None
        Whether the mask may hide a pair; None if the range says so, or if it is not kept.
    """

    trees: Trees
    found: KeyRange | None
    hides: bool | None = None


class Needed(NamedTuple):
    """What is left of a call's expressions: a mask that hides nothing is left out.

    Attributes
    ----------
    trees : Trees
        The expressions, without the mask if there is a range.
    found : KeyRange or None
        The range of keys that replaces the mask.
    ends : tuple of array, or None
        Its ends for each query.
    """

    trees: Trees
    found: KeyRange | None
    ends: tuple[Array, Array] | None


def programs(call: Call, len_k: Array | None = None) -> Any:
    """Lower a call's mask and score changes. Programs keep alive the arrays that they read.

    `len_k` is as in `cpu_ranges.ends`.
    """
    from cupyflash.reference.cpu.layout import Programs
    from cupyflash.reference.cpu.program import NO_PROGRAM

    from ..expr.lower import lowered

    bound, found, ends = needed(call, len_k)
    made = [(NO_PROGRAM, []) if tree is None else lowered(tree) for tree in bound]
    score, slope, mask, tile = (program for program, _ in made)
    read = [
        (row, array)
        for program, arrays in made
        for row, array in zip(program.tables, arrays, strict=True)
    ]
    return Programs(score, slope, mask, tile, (bound, read, found), ends)


def looked_up(made: Any) -> list[tuple[Array, Array]]:
    """Return the rows of tables, whose first element is an address, and the arrays there."""
    read: list[tuple[Array, Array]] = made.tables[1]
    return read


def of_dense(call: Call) -> tuple[Any, bool]:
    """Return a call's programs, and whether they serve any number of keys."""
    if host_replay.grows(call):
        length = call.k.shape[-2]
        cache = Cache(MOST_POSITIONS, length, None, MOST_POSITIONS)
        problem = replace(call.problem, rows=CachedRows.of(call.problem.rows.of_queries, cache))
        lengths = np.full(call.problem.batch, length, np.int64)
        # Its numbers may be too large for some lengths.
        with contextlib.suppress(ArgumentError):
            made = programs(replace(call, problem=problem), lengths)
            if call.mask is None or made.ranges is not None:
                return made, True
    return programs(call), False


def leaves_out_mask(call: Call) -> bool:
    """Return whether a call is computed without its mask, which hides nothing of it."""
    if call.mask is None or call.rows.cache is not None:
        return False
    if host_replay.grows(call) and _proved(call).found is not None:
        return False  # it may hide some of other numbers of keys
    bound, _, ends = needed(call)
    return bound.allowed is None and ends is None


def needed(call: Call, len_k: Array | None = None) -> Needed:
    """Return what is left of a call's expressions; `len_k` is as in `cpu_ranges.ends`."""
    bound, found, hides = _proved(call, of_lengths=len_k is not None)
    if bound.allowed is None:
        return Needed(bound, None, None)
    without = bound._replace(allowed=None, classes=None)
    if found is not None:
        if len_k is not None:
            return Needed(without, found, cpu_ranges.ends(call.problem, found, len_k))
        ends = cpu_ranges.ends_if_any(call.problem, found)
        return Needed(without, None if ends is None else found, ends)
    if len_k is not None or (_may_hide(call, bound) if hides is None else hides):
        return Needed(bound, None, None)
    return Needed(without, None, None)


_kept = Kept[Proved](64)


def _proved(call: Call, of_lengths: bool = False) -> Proved:
    """Return what proofs say of a call's expressions, `of_lengths` for all lengths of a cache.

    What only numbers decide is kept for later calls, because the proofs take longer than a small
    call.
    """
    key, problem = None, call.problem
    if call.mask is not None and call.score_mod is None and call.bias is None:
        structure, arrays = call.mask.structure
        sizes = None if arrays else positions.key_of(problem)
        if sizes is not None:
            key = structure, sizes
            known = _kept.find(key)
            if known is not None:
                return known
    bound = trees(call)
    found = None if bound.allowed is None else key_range(bound.allowed, problem)
    if key is None:
        return Proved(bound, found)
    hides = None
    if found is None and not of_lengths:
        hides = _may_hide(call, bound)
    result = Proved(bound, found, hides)
    _kept.keep(key, result)
    return result


def _may_hide(call: Call, bound: Trees) -> bool:
    """Return whether a mask without a range may hide a pair of the call."""
    problem, allowed = call.problem, bound.allowed
    assert allowed is not None, "there is a mask"
    assert bound.classes is not None, "as there are their classes"
    if allowed.op == "lookup":
        return not host_replay.is_all_true(allowed.value[0])
    arrays = () if call.mask is None else call.mask.structure[1]
    if sum(x.nbytes for x in arrays) > MOST_LOOKED_AT:
        return True
    return bool((tile_classes(bound.classes, _whole(problem), "cpu") != FULL).any())


def _whole(problem: Problem) -> dict[str, Any]:
    """Return the symbols of a tile that has all pairs, for each entry and head."""
    b, h = np.ix_(np.arange(problem.batch), np.arange(problem.heads))
    symbols = position_symbols(b, h, 0, 0, problem)
    of_entry = {
        name: value if value.ndim == 0 else np.broadcast_to(value, problem.batch)[:, None]
        for name, value in symbols.items()
        if name not in "bhij"
    }
    corners = {
        "i_low": np.int64(0),
        "i_high": of_entry["len_q"] - 1,
        "j_low": np.int64(0),
        "j_high": of_entry["len_k"] - 1,
    }
    return symbols | of_entry | corners
