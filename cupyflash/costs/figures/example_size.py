"""How a mask draws itself, at sizes that its arrays and numbers suggest."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...errors import ArgumentError
from ...expr.bind import Dense, bind
from ...expr.nodes import Expr, walk
from .mask import Figure, HasExpr, mask_pairs, mask_tiles

LENGTH = 32  # if the mask suggests none
LONGEST = 2**20
TILES = 32  # along each side, at most
LARGEST = 2**26  # elements of an array that is looked at for a drawing


def example(mask: HasExpr) -> Figure | None:
    """Draw a mask at an example size, which the drawing names.

    Parameters
    ----------
    mask : Mask
        A mask of `cupyflash.masks`.

    Returns
    -------
    Figure or None
        A figure, pair by pair if it is small; None if no size fits the mask's arrays, or if they
        are so large that a notebook would have to wait.
    """
    for sizes in _candidates(mask.expr):
        try:
            bind(mask.expr, sizes)
        except ArgumentError:
            continue
        notes = [f"an example: {sizes.len_q:,} queries, {sizes.len_k:,} keys"]
        longest = max(sizes.len_q, sizes.len_k)
        batch, heads = sizes.lead, sizes.heads
        if longest <= 2 * LENGTH:
            block = max(1, longest // 4)
            return mask_pairs(
                mask, sizes.len_q, sizes.len_k,
                block_q=block, block_kv=block, batch=batch, heads=heads, notes=notes,
            )  # fmt: skip
        block = 2 ** max(0, math.ceil(math.log2(longest / TILES)))
        return mask_tiles(
            mask, sizes.len_q, sizes.len_k,
            block_q=block, block_kv=block, batch=batch, heads=heads, notes=notes,
        )  # fmt: skip
    return None


def _candidates(root: Expr) -> Iterator[Dense]:
    """Go through sizes that may fit a mask, the best first."""
    found: dict[str, int] = {}
    lead: tuple[int, ...] = (1,)
    numbers = [LENGTH // 2]
    for node in walk(root):
        if node.op in ("aligned", "lookup"):
            array = node.value.array if node.op == "aligned" else node.value[0]
            if math.prod(array.shape) > LARGEST:
                return
        if node.op == "constant" and node.type == "int":
            numbers.append(abs(int(node.value)))
        elif node.op == "aligned":
            shape, axes = tuple(node.value.array.shape), node.value.axes
            for size, axis in zip(reversed(shape), reversed(axes), strict=False):
                base, _, divisor = axis.size.partition("/")
                if size > 1 and axis.exact is None:
                    found[base] = size * int(divisor or 1)
            more = shape[: max(len(shape) - len(axes), 0)]
            if math.prod(more) > math.prod(lead):
                lead = more
        elif node.op == "lookup" and len(node.args) == 1 and node.args[0].op == "symbol":
            names = {"i": "len_q", "j": "len_k", "h": "heads"}
            name = names.get(node.args[0].value)
            if name is not None:
                found[name] = min(found.get(name, LONGEST), int(node.value[0].shape[0]))
            elif node.args[0].value == "b":
                lead = (int(node.value[0].shape[0]),)
    heads = found.get("heads", 1)
    near = [n for n in numbers if n <= LONGEST // 2]
    length = 2 * 2 ** math.ceil(math.log2(max(near)))
    given = found.get("len_q"), found.get("len_k")
    while length:
        len_q = given[0] or given[1] or length
        yield Dense(lead, heads, len_q, given[1] or len_q)
        if all(given):
            return
        length //= 2
