"""What a call's mask and score changes become for the kernels of `reference.cpu`."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..expr.derivative import second_derivative
from ..expr.functions import SCORE
from ..expr.interval import FULL, tile_class
from ..expr.key_range import KeyRange, key_range
from ..expr.nodes import convert, walk
from ..expr.sizes import position_symbols
from ..expr.strided import strided_condition
from ..expr.structure import MOST_NUMBER, Structure, named, tree
from ..expr.tile_classes import tile_classes
from ..lazy import Kept
from ..problem import positions
from ..problem.bound_exprs import Trees, added, bound, trees
from ..problem.cache import Cache
from ..problem.cached import MOST_POSITIONS
from ..problem.cached_rows import CachedRows
from ..problem.call import Array, Call, Problem
from . import cpu_ranges, cpu_runs, host_replay


class Proved(NamedTuple):
    """What proofs say of a call's expressions.

    Attributes
    ----------
    trees : Trees
        The expressions, with the mask as far as it gives no range of keys.
    found : KeyRange or None
        The range of keys that the mask gives, or a condition of it, if one does.
    hides : bool or None
        Whether the mask may hide a pair; None if the range says so, or if it is not kept.
    numbers : tuple of int
        Those of the mask for which the range has symbols.
    """

    trees: Trees
    found: KeyRange | None
    hides: bool | None = None
    numbers: tuple[int, ...] = ()


class Needed(NamedTuple):
    """What is left of a call's expressions: a mask that hides nothing is left out.

    Attributes
    ----------
    trees : Trees
        The expressions, with the mask as far as there is no range.
    found : KeyRange or None
        The range of keys that replaces the mask, or a condition of it.
    ends : tuple of array, or None
        Its ends for each query.
    numbers : tuple of int
        As in `Proved`.
    """

    trees: Trees
    found: KeyRange | None = None
    ends: tuple[Array, Array] | None = None
    numbers: tuple[int, ...] = ()


class Seen(NamedTuple):
    """The keys that each query sees, if the mask says them so.

    Attributes
    ----------
    found : KeyRange or None
        Both ends as expressions.
    numbers : tuple of int
        As in `Proved`.
    """

    found: KeyRange | None
    numbers: tuple[int, ...]


def programs(call: Call, len_k: Array | None = None) -> Any:
    """Lower a call's mask and score changes. Programs keep alive the arrays that they read.

    `len_k` is as in `cpu_ranges.ends`.
    """
    from cupyflash.reference.cpu.layout import Programs
    from cupyflash.reference.cpu.program import NO_PROGRAM

    from ..expr.lower import lowered

    left = needed(call, len_k)
    made = [(NO_PROGRAM, []) if root is None else lowered(root) for root in left.trees]
    score, slope, mask, tile = (program for program, _ in made)
    read = [
        (row, array)
        for program, arrays in made
        for row, array in zip(program.tables, arrays, strict=True)
    ]
    return Programs(
        score, slope, mask, tile, (left.trees, read, Seen(left.found, left.numbers)), left.ends
    )


def of_tangent(call: Call, tbias: Array | None) -> tuple[Any, list[tuple[Array, Array]]]:
    """Return the program that adds the tangent of a bias, and its tables as `looked_up` does."""
    from cupyflash.reference.cpu.program import NO_PROGRAM

    from ..expr.lower import lowered

    if tbias is None:
        return NO_PROGRAM, []
    program, arrays = lowered(added(SCORE, tbias, "tbias", call.problem))
    return program, list(zip(program.tables, arrays, strict=True))


def curve(call: Call) -> tuple[Any, list[Array]]:
    """Return the program of the second derivative of a call's score changes, and its arrays."""
    from cupyflash.reference.cpu.program import NO_PROGRAM

    from ..expr.lower import lowered

    if call.score_mod is None:
        return NO_PROGRAM, []
    root = convert(second_derivative(bound(call.score_mod.expr, call.problem)), "float")
    return (NO_PROGRAM, []) if root.op == "constant" and root.value == 0 else lowered(root)


def looked_up(made: Any) -> list[tuple[Array | None, Array]]:
    """Return the rows of tables, whose first element is an address, and the arrays there.

    Arrays that the ends of ranges were computed from have no row, but None.
    """
    read: list[tuple[Array | None, Array]] = made.tables[1]
    ends = [end for end in seen(made).found or () if end is not None]
    of_ends = [node.value[0] for node in walk(*ends) if node.op == "lookup"]
    return [*read, *((None, array) for array in of_ends)]


def seen(made: Any) -> Seen:
    """Return the range of keys that replaces the mask."""
    of_mask: Seen = made.tables[2]
    return of_mask


def _grows(call: Call) -> bool:
    """Return whether a call's programs are to serve any number of keys."""
    is_part = call.problem.rows.adjoin or call.problem.whole or any(call.were_matrices)
    one = call.q.shape[-2] == 1 and not is_part
    return one and host_replay.grows(call, call.problem.dropout)


def of_dense(call: Call) -> tuple[Any, bool]:
    """Return a call's programs, and whether they serve any number of keys."""
    if _grows(call):
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
    """Return whether a call that is not over a cache is computed without its mask.

    It is if the mask hides nothing of it.
    """
    if call.mask is None:
        return False
    if _grows(call) and _proved(call).found is not None:
        return False  # it may hide some of other numbers of keys
    made = needed(call)
    return made.trees.allowed is None and made.ends is None


def needed(call: Call, len_k: Array | None = None) -> Needed:
    """Return what is left of a call's expressions; `len_k` is as in `cpu_ranges.ends`."""
    made, found, hides, numbers = _proved(call, of_lengths=len_k is not None)
    if made.allowed is not None and len_k is None and not hides:
        hides = _may_hide(call, made) if hides is None else hides
        made = made if hides else made._replace(allowed=None, classes=None)
    if found is None:
        return Needed(made)
    ends: tuple[Array, Array] | None
    if len_k is None:
        ends = cpu_ranges.ends_if_any(call.problem, found, named(numbers))
    else:
        ends = cpu_ranges.ends(call.problem, found, len_k, named(numbers))
    return Needed(made) if ends is None else Needed(made, found, ends, numbers)


_kept = Kept[Proved](64)


def _proved(call: Call, of_lengths: bool = False) -> Proved:
    """Return what proofs say of a call's expressions, `of_lengths` for all lengths of a cache.

    What only numbers decide is kept for later calls, because the proofs take longer than a small
    call.
    """
    if call.mask is None or call.score_mod is not None or call.bias is not None:
        return _proof(call)
    structure, arrays = call.mask.structure
    sizes = None if arrays else positions.key_of(call.problem)
    if sizes is None:
        return _proof(call)
    form = structure.form
    if form is not None and (known := _kept.find((form, sizes))) is not None:
        return known._replace(numbers=structure.numbers)
    known = _kept.find((structure, sizes))
    if known is not None:
        return known
    made = _proof(call)
    if made.found is not None and form is not None:
        of_form = _range_of_form(call.problem, form, structure.numbers)
        if of_form is not None:
            made = Proved(_NO_TREES, of_form)
            _kept.keep((form, sizes), made)
            return made._replace(numbers=structure.numbers)
    elif made.found is None and not of_lengths:
        made = made._replace(hides=_may_hide(call, made.trees))
    _kept.keep((structure, sizes), made)
    return made


_NO_TREES = Trees(None, None, None, None)


def _proof(call: Call) -> Proved:
    """Return what a proof says."""
    made = trees(call)
    if made.allowed is None:
        return Proved(made, None)
    found = key_range(made.allowed, call.problem)
    if found is None and (in_runs := cpu_runs.with_ranges(made.allowed)) is not made.allowed:
        found = key_range(in_runs, call.problem)
    if found is not None:
        return Proved(made._replace(allowed=None, classes=None), found)
    # Of a range of keys and an array, each is better on its own.
    part = strided_condition(made.allowed)
    if part is None or part.other is None:
        return Proved(made, None)
    found = key_range(part.other, call.problem)
    if found is None:
        return Proved(made, None)
    return Proved(made._replace(allowed=part.read, classes=tile_class(part.read)), found)


def _range_of_form(problem: Problem, form: Structure, numbers: tuple[int, ...]) -> KeyRange | None:
    """Return the keys that masks of a form let queries see, if that is proved for all numbers."""
    most = dict.fromkeys(named(numbers), MOST_NUMBER)
    with contextlib.suppress(ArgumentError):
        return key_range(bound(tree(form.nodes, ()), problem, most), problem, most)
    return None


def _may_hide(call: Call, made: Trees) -> bool:
    """Return whether a mask without a range may hide a pair of the call."""
    problem, allowed = call.problem, made.allowed
    assert allowed is not None, "there is a mask"
    assert made.classes is not None, "as there are their classes"
    if allowed.op == "lookup":
        return not host_replay.extremes(allowed.value[0])[0]
    arrays = () if call.mask is None else call.mask.structure[1]
    if sum(x.nbytes for x in arrays) > host_replay.MOST_LOOKED_AT:
        return True
    return bool((tile_classes(made.classes, _whole(problem), "cpu") != FULL).any())


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
