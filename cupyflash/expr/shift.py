"""Whether a tree has the same value at other positions and lengths, such as those of a part.

A causal mask compares positions, so that it is the same for queries and keys that are moved alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .nodes import Expr, walk


def unchanged(
    root: Expr, moved: Mapping[str, int], moves_along: Callable[[Expr], bool] | None = None
) -> bool:
    """Return whether a tree is proven to keep its value where symbols grow by some numbers.

    Parameters
    ----------
    root : Expr
        The tree; it need not be bound.
    moved : mapping of str to int
        How much larger each symbol is there: "i", "j", "len_q", "len_k". Others are as they are,
        and so are the heads and the leading axes.
    moves_along : callable, optional
        Says of a node that reads an array whether that has the same elements for the same positions
        there.
    """
    grows: dict[Expr, int | None] = {}
    for node in walk(root):
        if moves_along is not None and moves_along(node):
            grows[node] = 0
            continue
        grows[node] = _growth(node, [grows[arg] for arg in node.args], moved)
    return grows[root] == 0


def _growth(node: Expr, args: Sequence[int | None], moved: Mapping[str, int]) -> int | None:
    """Return how much larger a node is there; None if that is not known."""
    if node.op == "symbol":
        return moved.get(node.value, 0)
    if node.op == "aligned" and any(x.exact is None and x.size != "heads" for x in node.value.axes):
        return None  # it has an element for each position
    if all(arg == 0 for arg in args):
        return 0
    if None in args:
        return None
    known = [arg for arg in args if arg is not None]
    if node.op == "negative" and node.type == "int":
        return -known[0]
    if node.op in ("add", "subtract") and node.type == "int":
        return known[0] + (known[1] if node.op == "add" else -known[1])
    alike = len(known) == 2 and known[0] == known[1]
    if alike and all(arg.type == "int" for arg in node.args):
        if node.op in ("less", "less_equal", "equal", "not_equal"):
            return 0
        if node.op in ("minimum", "maximum"):
            return known[0]
    return None
