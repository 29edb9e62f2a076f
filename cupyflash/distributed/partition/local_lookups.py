"""What masks and scores read in a call that counts its rows and keys from 0.

An array with an element for each position of the sequence, or for each block of them, has to be one
of these rows, or of these keys, there. It is if nothing but its last axis is read by positions,
each at its own or its block's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...expr.nodes import Expr, lookup_node, remade, walk
from ...problem.call import Array, Problem
from .intervals import Intervals

AXES = {"i": "len_q", "j": "len_k"}
OTHER_THERE = *AXES, *AXES.values(), "start_q", "start_k"  # symbols that have other values
Runs = tuple[range, ...]
Take = Callable[[Array, Runs], Array]  # an array, and which elements of its last axis are there


class _Axis(NamedTuple):
    """The last axis of an array: whether it is of queries, "i", or keys, "j", by so many."""

    symbol: str
    block: int


def _axis_of(node: Expr, problem: Problem) -> _Axis | None:
    """Return the last axis of what a node reads by positions; None if that is read otherwise."""
    if node.op == "lookup":
        array = node.value[0]
    elif node.op == "aligned" and node.args:
        array, last = node.value.array, node.value.axes[-1]
        if last.exact is not None or last.size not in AXES.values() or node.value.contains:
            return None
    else:
        return None
    *others, index = node.args
    block = 1
    if index.op == "floor_divide" and index.args[1].op == "constant":
        index, block = index.args[0], int(index.args[1].value)
    if index.op != "symbol" or index.value not in AXES or any(map(_is_other, others)):
        return None
    known = {"i": problem.rows.known_q, "j": problem.rows.known_k}[index.value]
    is_whole = block > 0 and array.ndim and array.shape[-1] >= -(-known // block)
    return _Axis(str(index.value), block) if is_whole else None


def _is_other(node: Expr) -> bool:
    return any(x.op == "symbol" and x.value in OTHER_THERE for x in walk(node))


def _blocks(runs: Sequence[range], block: int) -> Runs | None:
    """Return the blocks that have runs of positions; None if some run has parts of blocks.

    Only the last one may end within a block.
    """
    ends = [run.stop for run in runs[:-1]]
    if any(x % block for x in (*(run.start for run in runs), *ends)):
        return None
    return Intervals.of(range(run.start // block, -(-run.stop // block)) for run in runs).ranges


def elements(node: Expr, problem: Problem, positions: tuple[Runs, Runs]) -> Runs | None:
    """Return which elements of the last axis of an array belong to the rows or keys of a call.

    Parameters
    ----------
    node : Expr
        A node of a mask or score. If it reads no such array, the result is None.
    problem : Problem
        That of all positions.
    positions : tuple of 2 tuple of range
        Those of the call's rows, and of its keys.
    """
    axis = _axis_of(node, problem)
    return None if axis is None else _blocks(positions["ij".index(axis.symbol)], axis.block)


def local(root: Expr, problem: Problem, positions: tuple[Runs, Runs], take: Take) -> Expr:
    """Return a tree that reads what `take` makes of each array with elements for all positions.

    The other parameters are those of `elements`.
    """

    def replaced(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        runs = elements(node, problem, positions)
        if runs is None:
            return None
        if node.op == "lookup":
            return lookup_node(take(node.value[0], runs), args, node.value[1])
        alignment = replace(node.value, array=take(node.value.array, runs))
        return Expr(node.op, args, node.type, alignment)

    return remade(root, replaced)
