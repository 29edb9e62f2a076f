"""Look-up arrays that are divided among the ranks as their positions are.

A rank holds the elements of its own positions. Those of keys travel with the keys, so a piece finds
what it reads in the arrays of its step. Proofs need no element of other ranks: all ranks tell the
minima and maxima of the blocks that they hold.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import interop
from ..errors import ArgumentError
from ..expr.bind import Alignment, resolve
from ..expr.evaluate import host
from ..expr.functions import SCORE, clip, where
from ..expr.nodes import Expr, LookupTable, array_type, lookup_node, remade
from ..expr.sharded import HeldArray, ShardedArray
from ..masks import Mask
from ..problem.call import Array, Call, Problem, changed
from ..problem.options import Options
from ..scores import Score, chain
from .partition import layouts
from .partition.fused_calls import Task
from .partition.layouts import Layout


def sharded(array: interop.DLPackArray) -> LookupTable:
    """Make this rank's part of an array readable inside a mask or score of a call over ranks.

    Parameters
    ----------
    array : array
        Booleans, integers or floats, where q will be. The last axis has this rank's positions, as
        ``layout.take(whole, axis=-1)`` returns them; other axes are those of the whole array. It
        is read in place at every call.

    Returns
    -------
    LookupTable
        Index its last axis with the position i of queries or j of keys, or pass it to a
        constructor that takes an element for each position, as `cupyflash.masks.segments` does.
        What keys read travels with them; other ranks get no more of it than they get keys.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        It is no array, has no axis, or has a dtype that expressions do not support.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import distributed, masks
    >>> x = np.random.default_rng(0).standard_normal((1, 600, 8), dtype=np.float32)
    >>> def work(comm):
    ...     layout = distributed.layout(comm, 600, kind="zigzag")
    ...     documents = layout.positions // 200  # of this rank's tokens only
    ...     mask = masks.segments(distributed.sharded(documents))
    ...     own = layout.take(x)
    ...     options = {"comm": comm, "layout": layout, "mask": mask}
    ...     return distributed.attention(own, own, own, **options).shape
    >>> distributed.Threads(2).run(work)
    [(1, 344, 8), (1, 256, 8)]
    """
    own = np.asarray(array) if isinstance(array, (list, tuple)) else interop.array(array, "sharded")
    array_type(own, "sharded")
    if not own.ndim:
        raise ArgumentError("sharded: got a number; expected an array with an axis of positions.")
    return LookupTable(ShardedArray(own))


def reads_parts(options: Options) -> bool:
    """Whether a mask or a score that a user passed reads parts; it may be anything."""
    changes = options.score_mod
    made = [options.mask, *(changes if isinstance(changes, (list, tuple)) else [changes])]
    return any(
        isinstance(array, ShardedArray)
        for each in made
        if isinstance(each, (Mask, Score))
        for array in each.structure[1]
    )


def placed(options: Options, problem: Problem, of_queries: Layout, of_keys: Layout) -> Options:
    """Return options whose parts are those that layouts give to this rank."""
    place = _Places(problem, {"i": of_queries, "j": of_keys})
    mask, score_mod = options.mask, chain(options.score_mod)
    if isinstance(mask, Mask):
        mask = Mask(place.of(mask.expr))
    if score_mod is not None:
        score_mod = Score(place.of(score_mod.expr))
    return replace(options, mask=mask, score_mod=score_mod)


class _Places:
    """What reads parts, as look-ups in arrays of all positions."""

    def __init__(self, problem: Problem, of: Mapping[str, Layout]) -> None:
        self._problem, self._layouts = problem, of
        self._held: dict[tuple[int, str], HeldArray] = {}

    def of(self, root: Expr) -> Expr:
        return remade(root, self._replaced)

    def _replaced(self, node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op == "lookup" and type(node.value[0]) is ShardedArray:
            self._problem.rows.of_queries.refuse_sharded_lookup(node.args[-1])
            held = self._array(node.value[0], node.args[-1], "lookup")
            return lookup_node(held, (*args[:-1], node.args[-1]))
        if node.op == "aligned" and type(node.value.array) is ShardedArray:
            return resolve(self._aligned(node.value), self._problem)
        return None

    def _aligned(self, alignment: Alignment) -> Alignment:
        *others, last = alignment.axes
        plain = last.exact is None and last.size == {"i": "len_q", "j": "len_k"}.get(
            str(last.index.value)
        )
        if not plain or any(axis.size != "heads" for axis in others):
            raise ArgumentError(
                f"{alignment.argument}: got a sharded look-up; expected one whose last axis, and "
                "no other one, has an element for each position. Pass the whole array, without "
                "distributed.sharded."
            )
        held = self._array(alignment.array, last.index, alignment.argument)
        return replace(alignment, array=held)

    def _array(self, array: ShardedArray, index: Expr, argument: str) -> HeldArray:
        """Return the array of which this is a part, if it has the positions that it ought to."""
        layout = self._layouts.get(index.value) if index.op == "symbol" else None
        if layout is None:
            raise ArgumentError(
                f"{argument}: the last axis of a sharded look-up is read at {index}; expected the "
                "position i of queries or j of keys itself. Pass the whole array to "
                "cupyflash.lookup, without distributed.sharded."
            )
        if array.shape[-1] != layout.count:
            whose = "queries" if index.value == "i" else "keys"
            raise ArgumentError(
                f"{argument}: got {array.shape[-1]} positions on the last axis of a sharded "
                f"look-up; expected {layout.count}, those of the {whose} of rank {layout.rank}. "
                "layout.take(whole array, axis=-1) returns them."
            )
        key = id(array), index.value
        if key not in self._held:
            self._held[key] = HeldArray(array.own, index.value, layout.length)
        return self._held[key]


def held_arrays(*made: Mask | Score | None) -> list[HeldArray]:
    """Return the divided arrays that masks and scores read, each once, in a fixed order."""
    every = [x for each in made if each is not None for x in each.structure[1]]
    found: list[HeldArray] = []
    for array in every:
        if isinstance(array, HeldArray) and all(array is not x for x in found):
            found.append(array)
    return found


class Extremes:
    """The minima and maxima of blocks, for proofs about masks and scores.

    Parameters
    ----------
    call : Call
        The call, whose mask and score are those that `placed` returns.
    of_queries, of_keys : Layout
        Who holds which positions.
    """

    def __init__(self, call: Call, of_queries: Layout, of_keys: Layout) -> None:
        self._call, self._arrays = call, held_arrays(call.mask, call.score_mod)
        self._layouts = {"i": of_queries, "j": of_keys}

    def facts(self) -> dict[str, str]:
        """Return what this rank tells the others."""
        made = {}
        for n, array in enumerate(self._arrays):
            ends = self._own(array)
            made[f"_ends of look-up {n}"] = base64.b64encode(ends.tobytes()).decode()
        return made

    def _block(self, array: HeldArray) -> int:
        """Return the positions of a block, of which runs of documents may have parts."""
        return math.gcd(self._layouts[array.axis].chunk, layouts.BLOCK)

    def _own(self, array: HeldArray) -> Array:
        """Return the minima and the maxima of this rank's blocks, (2, ..., blocks)."""
        layout = self._layouts[array.axis]
        elements = host(array.own)
        elements = elements.astype(_TYPES[array_type(elements)], copy=False)
        blocks = [layout.own.rows(x).start for x in layout.own.cut(self._block(array))]
        if not blocks:
            return np.empty((2, *array.shape[:-1], 0), elements.dtype)
        ends = [f.reduceat(elements, blocks, axis=-1) for f in (np.minimum, np.maximum)]
        return np.stack(ends)

    def _whole(self, n: int, array: HeldArray, told: Sequence[Mapping[str, str]]) -> Array:
        """Return the minima and the maxima of all blocks."""
        layout, block = self._layouts[array.axis], self._block(array)
        lead, kind = (2, *array.shape[:-1]), _TYPES[array_type(array)]
        least, most = _ENDS[array_type(array)]
        whole = np.empty((*lead, -(-layout.length // block)), kind)
        whole[0], whole[1] = most, least
        for runs, facts in zip(layout.runs, told, strict=True):
            at = [x.start // block for x in runs.cut(block)]
            content = base64.b64decode(facts[f"_ends of look-up {n}"])
            told_of = np.frombuffer(content, kind).reshape(*lead, len(at))
            for join, own, ends in zip((np.minimum, np.maximum), told_of, whole, strict=True):
                # The next run may begin in the same block.
                join.at(np.moveaxis(ends, -1, 0), at, np.moveaxis(own, -1, 0))
        return whole

    def bounded(self, told: Sequence[Mapping[str, str]]) -> Call:
        """Return a call with the same proofs, given what all ranks tell.

        In its mask and score, an element is one of the two ends of its block. Which one is not
        known, as it depends on the sign of a score.
        """
        ends = {id(x): self._whole(n, x, told) for n, x in enumerate(self._arrays)}

        def replaced(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
            if node.op != "lookup" or not isinstance(node.value[0], HeldArray):
                return None
            array = node.value[0]
            at = *args[:-1], node.args[-1] // self._block(array)
            low, high = (lookup_node(x, at, node.value[1]) for x in ends[id(array)])
            return where(SCORE < 0, low, high)

        return _rebuilt(self._call, replaced)


def _rebuilt(call: Call, replaced: Callable[[Expr, tuple[Expr, ...]], Expr | None]) -> Call:
    """Return a call in whose mask and score some nodes are others."""
    made: dict[str, Any] = {}
    if call.mask is not None:
        made["mask"] = Mask(remade(call.mask.expr, replaced))
    if call.score_mod is not None:
        made["score_mod"] = Score(remade(call.score_mod.expr, replaced))
    return changed(call, **made)


_TYPES: dict[str, Any] = {"bool": np.bool_, "int": np.int64, "float": np.float32}
_ENDS: dict[str, tuple[Any, Any]] = {  # the least and the largest number
    "bool": (False, True),
    "int": (np.iinfo(np.int64).min, np.iinfo(np.int64).max),
    "float": (-np.inf, np.inf),
}


class Lookups:
    """The divided look-ups of a call, as its pieces read them.

    Parameters
    ----------
    call : Call
        The call, whose masks and scores are those that `placed` returns.

    Attributes
    ----------
    own : tuple of array
        What travels with this rank's keys, (..., keys, 1).
    """

    def __init__(self, call: Call) -> None:
        arrays = held_arrays(call.mask, call.score_mod)
        self._travel = [x for x in arrays if x.axis == "j"]
        self.own = tuple(x.own[..., None] for x in self._travel)

    def of_piece(self, piece: Call, task: Task, there: Sequence[Array]) -> Call:
        """Return the call of a task that reads what is `there`, with the keys of its step."""
        tables = {
            id(x): table[..., task.keys.start : task.keys.stop, 0]
            for x, table in zip(self._travel, there, strict=True)
        }
        # A plain task counts from 0 in its own arrays, others count all positions.
        starts = {"i": task.piece.rows.start, "j": task.piece.keys.start}
        if task.plain:
            starts = dict.fromkeys(starts, 0)

        def replaced(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
            if node.op != "lookup" or not isinstance(node.value[0], HeldArray):
                return None
            array = node.value[0]
            table = tables.get(id(array))
            if table is None:
                table = array.own[..., task.rows.start : task.rows.stop]
            # Proofs are about all positions, of which the table has those of the piece.
            at = clip(node.args[-1] - starts[array.axis], 0, table.shape[-1] - 1)
            return lookup_node(table, (*args[:-1], at), node.value[1])

        return _rebuilt(piece, replaced)
