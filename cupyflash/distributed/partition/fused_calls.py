"""The calls that compute the pieces of a step: as few as the mask allows, and without positions.

A rank has runs of positions one after the other in its arrays. Where the mask is the same if its
rows and keys are counted from 0, several runs are one call, which is that of a rank alone. So with
a zigzag layout, a causal mask is causal in the rank's own arrays, and documents that are whole are
documents there. Arrays that the mask reads have the elements of these rows and keys then.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ...errors import ArgumentError
from ...expr.evaluate import host
from ...expr.interval import EMPTY, FULL
from ...expr.nodes import Expr
from ...expr.shift import unchanged
from ...masks import Mask
from ...pieces.schedule import Piece, classes
from ...problem.call import Array, Call, Problem
from .intervals import Intervals
from .local_lookups import Runs, elements, local


class Task(NamedTuple):
    """A call that computes one piece, or several.

    Attributes
    ----------
    rows, keys : range
        Rows of the rank's arrays, and of those with the keys of the step.
    piece : Piece
        The piece, or the first of several.
    plain : bool
        Whether masks and scores see the rows and keys of the call, counted from 0, and no others.
    positions : tuple of 2 tuple of range
        Of a plain task: those of its rows, and of its keys.
    """

    rows: range
    keys: range
    piece: Piece
    plain: bool
    positions: tuple[Runs, Runs] = ((), ())


def tasks(
    call: Call, pieces: Sequence[Piece], rows: Intervals, keys: Intervals
) -> tuple[list[Task], list[Task]]:
    """Return the tasks of a step in the forward, and those in the backward.

    In the forward, each has rows of one run: where later steps have pieces, the first and the last
    piece are not the same ones for all runs.
    """
    each = [Task(rows.rows(x.rows), keys.rows(x.keys), x, False) for x in pieces]
    if not call.rows.divisible or call.problem.dropout or call.problem.whole is not None:
        return each, each
    forward: list[Task] = []
    by_rows = sorted(each, key=lambda task: (task.rows.start, task.keys.start))
    for _, of_rows in itertools.groupby(by_rows, lambda task: task.rows):
        forward += _joined(call, list(of_rows))
    whole = None if len(forward) < 2 else _one(call, each)
    return forward, forward if whole is None else [whole]


def divided(
    call: Call, pieces: Sequence[Piece], rows: Intervals, keys: Intervals
) -> tuple[list[Task], list[Task]]:
    """Return the tasks of own keys in a backward: those at first, and those at last.

    Keys travel during the former, and gradients during the latter.
    """
    made, _ = tasks(call, pieces, rows, keys)
    parts = list(dict.fromkeys(task.rows for task in made))
    early = set(parts[: -(-len(parts) // 2)])
    return [x for x in made if x.rows in early], [x for x in made if x.rows not in early]


def _joined(call: Call, tasks: list[Task]) -> list[Task]:
    """Return tasks of the same rows, as many as can be joined to one."""
    made: list[Task] = []
    group: list[Task] = []
    for task in tasks:
        one = _one(call, [*group, task]) if group else None
        if one is not None:
            made[-1] = one
            group.append(task)
        else:
            made.append(_one(call, [task]) or task)
            group = [task]
    return made


def _one(call: Call, tasks: list[Task]) -> Task | None:
    """Return the plain task that computes all of some tasks, if there is one."""
    if not all(task.piece.keys for task in tasks):
        return None
    rows, keys = (
        _covered(sorted({(x.start, x.stop) for x in ranges}))
        for ranges in ([task.rows for task in tasks], [task.keys for task in tasks])
    )
    firsts = {(task.rows.start, task.piece.first) for task in tasks}
    has_sink = call.sink is not None and any(first for _, first in firsts)
    of_one_piece = call.bias is not None and call.bias.ndim > 0 and call.bias.shape[-1] != 1
    if rows is None or keys is None or (of_one_piece and len(tasks) > 1):
        return None
    if has_sink and len({start for start, first in firsts if first}) < len(
        {start for start, _ in firsts}
    ):
        return None
    positions = _runs(x.piece.rows for x in tasks), _runs(x.piece.keys for x in tasks)
    if not _is_plain(call, tasks, rows, keys, positions):
        return None
    first = min(tasks, key=lambda task: (task.rows.start, task.keys.start))
    masked = any(task.piece.masked for task in tasks) or len(tasks) < _rectangles(tasks)
    begins = any(first for _, first in firsts)
    return Task(rows, keys, first.piece._replace(masked=masked, first=begins), True, positions)


def _runs(positions: Iterable[range]) -> Runs:
    """Return some ranges, each once, in ascending order."""
    return tuple(sorted(set(positions), key=lambda x: x.start))


def _covered(ranges: list[tuple[int, int]]) -> range | None:
    """Return the range that some ranges in a row fill without gaps, if they do."""
    if any(one[1] != other[0] for one, other in itertools.pairwise(ranges)):
        return None
    return range(ranges[0][0], ranges[-1][1])


def _rectangles(tasks: list[Task]) -> int:
    return len({task.rows for task in tasks}) * len({task.keys for task in tasks})


def _is_plain(
    call: Call,
    tasks: list[Task],
    rows: range,
    keys: range,
    positions: tuple[Runs, Runs],
) -> bool:
    """Return whether mask and scores are the same for all pairs if these are counted from 0."""
    whole = call.problem
    here = whole.sized(len(rows), len(keys))

    def moves_along(node: Expr) -> bool:
        return elements(node, whole, positions) is not None

    learns = call.score_mod is not None and bool(call.score_mod.learned_tables)
    for task in tasks:
        moved = {
            "i": task.piece.rows.start - (task.rows.start - rows.start),
            "j": task.piece.keys.start - (task.keys.start - keys.start),
            "len_q": whole.rows.known_q - here.rows.known_q,
            "len_k": whole.rows.known_k - here.rows.known_k,
        }
        if call.score_mod is not None and not unchanged(
            call.score_mod.expr, moved, None if learns else moves_along
        ):
            return False
        if task.piece.masked:
            assert call.mask is not None
            if not unchanged(call.mask.expr, moved, moves_along):
                return False
    kinds = {(task.rows, task.keys): None if task.piece.masked else FULL for task in tasks}
    if not any(task.piece.masked for task in tasks):
        return len(kinds) == _rectangles(tasks)  # masks that hide rectangles only are rare
    of_rows, of_keys = (list(dict.fromkeys(x)) for x in zip(*kinds, strict=True))
    wanted = [[kinds.get((x, y), EMPTY) for y in of_keys] for x in of_rows]
    if all(each is None for row in wanted for each in row):
        return True
    parts = [_from(rows, x) for x in of_rows], [_from(keys, x) for x in of_keys]
    found = _classes(call, here, positions, parts)
    return found is not None and all(
        each is None or each == kind
        for row, kinds_of_row in zip(wanted, found.tolist(), strict=True)
        for each, kind in zip(row, kinds_of_row, strict=True)
    )


def _from(whole: range, part: range) -> range:
    return range(part.start - whole.start, part.stop - whole.start)


def _classes(
    call: Call,
    here: Problem,
    positions: tuple[Runs, Runs],
    parts: tuple[list[range], list[range]],
) -> Array | None:
    """Return the classes of parts of a call's rows with parts of its keys, (rows, keys).

    None if the call has no mask for these sizes.
    """
    assert call.mask is not None

    def take(array: Array, runs: Runs) -> Array:
        taken: Array = host(array)[..., np.concatenate([*map(np.array, runs)])]
        return taken

    try:
        return classes(Mask(local(call.mask.expr, call.problem, positions, take)), here, *parts)
    except ArgumentError:
        return None
