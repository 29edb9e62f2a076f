"""The calls that compute the pieces of a step: as few as the mask allows, and without positions.

A rank has runs of positions one after the other in its arrays. Where the mask is the same if its
rows and keys are counted from 0, several runs are one call, which is that of a rank alone. So with
a zigzag layout, a causal mask is causal in the rank's own arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from ...errors import ArgumentError
from ...expr.interval import EMPTY, FULL
from ...expr.shift import unchanged
from ...pieces.schedule import Piece, classes
from ...problem.call import Call, Problem
from .intervals import Intervals


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
    """

    rows: range
    keys: range
    piece: Piece
    plain: bool


def tasks(
    call: Call, pieces: Sequence[Piece], rows: Intervals, keys: Intervals
) -> tuple[list[Task], list[Task]]:
    """Return the tasks of a step in the forward, and those in the backward.

    In the forward, each has rows of one run: the first and the last piece are not the same ones for
    all runs.
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
    if not _is_plain(call, tasks, rows, keys):
        return None
    first = min(tasks, key=lambda task: (task.rows.start, task.keys.start))
    masked = any(task.piece.masked for task in tasks) or len(tasks) < _rectangles(tasks)
    begins = any(first for _, first in firsts)
    return Task(rows, keys, first.piece._replace(masked=masked, first=begins), True)


def _covered(ranges: list[tuple[int, int]]) -> range | None:
    """Return the range that some ranges in a row fill without gaps, if they do."""
    if any(one[1] != other[0] for one, other in itertools.pairwise(ranges)):
        return None
    return range(ranges[0][0], ranges[-1][1])


def _rectangles(tasks: list[Task]) -> int:
    return len({task.rows for task in tasks}) * len({task.keys for task in tasks})


def _is_plain(call: Call, tasks: list[Task], rows: range, keys: range) -> bool:
    """Return whether mask and scores are the same for all pairs if these are counted from 0."""
    whole = call.problem
    here = whole.sized(len(rows), len(keys))
    for task in tasks:
        moved = {
            "i": task.piece.rows.start - (task.rows.start - rows.start),
            "j": task.piece.keys.start - (task.keys.start - keys.start),
            "len_q": whole.rows.known_q - here.rows.known_q,
            "len_k": whole.rows.known_k - here.rows.known_k,
        }
        if call.score_mod is not None and not unchanged(call.score_mod.expr, moved):
            return False
        if task.piece.masked:
            assert call.mask is not None
            if not unchanged(call.mask.expr, moved):
                return False
    kinds = {(task.rows, task.keys): None if task.piece.masked else FULL for task in tasks}
    if not any(task.piece.masked for task in tasks):
        return len(kinds) == _rectangles(tasks)  # masks that hide rectangles only are rare
    return all(
        _class(call, here, _from(rows, x), _from(keys, y)) == kind
        for x, y in itertools.product({x.rows for x in tasks}, {x.keys for x in tasks})
        if (kind := kinds.get((x, y), EMPTY)) is not None
    )


def _from(whole: range, part: range) -> range:
    return range(part.start - whole.start, part.stop - whole.start)


def _class(call: Call, here: Problem, rows: range, keys: range) -> int | None:
    """Return the class of some pairs of a call; None if it has no mask for these sizes."""
    try:
        return int(classes(call.mask, here, [rows], [keys])[0, 0])
    except ArgumentError:
        return None
