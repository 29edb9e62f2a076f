"""Arrays that a kernel loads and stores by TMA: whether that is possible, and their tensor maps."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

from ...arrays import device_arrays
from .. import tma
from .spec import Request, Tiles, TmaOperands, TmaUse

# initcheck of CUDA's compute-sanitizer does not see that TMA writes to memory, and calls a read of
# it one of what was never written. For such tools results leave otherwise.
NO_TMA_STORE = os.environ.get("CUPYFLASH_NO_TMA_STORE") == "1"
FEWEST_PAGE_ROWS = 8  # that TMA loads at a time: the pattern of shared memory repeats after them
_SAID = {"d_out": "do"}  # what callers know an array by


def obstacle(request: Request, names: Iterable[str]) -> str | None:
    """Return in words which array TMA cannot copy, and why, or None."""
    for name in names:
        if request.is_paged(name) and not request.operand(name).lead[-1]:
            return f"of {name}, its pages repeat"
        address = device_arrays.address(request.array(name))
        why = tma.obstacle(request.operand(name), address, request.sizes(name))
        if why is not None:
            return f"of {_SAID.get(name, name)}, {why}"
    return None


def page_rows(request: Request, rows: int) -> int:
    """Return how many rows of a page a TMA tile has, where a kernel's tile has `rows`."""
    assert request.call is not None
    assert request.call.cache is not None
    return math.gcd(request.call.cache.page_size, rows)


def can_store(request: Request, names: Iterable[str]) -> bool:
    """Whether results may leave by TMA.

    Not those of packed sequences: a tile may reach into the next one's rows. Not where a result has
    another type than what is stored, because it is to be summed on.
    """
    problem = request.problem
    if NO_TMA_STORE or problem.packed:
        return False
    if any(request.array(name).dtype != problem.dtype for name in names):
        return False
    return obstacle(request, names) is None


def use(operands: TmaOperands | None, request: Request, tiles: Tiles) -> TmaUse:
    """Return what a launch copies by TMA, for whose loads there is no obstacle.

    Where results cannot be stored so, the kernel's maps for them are any.
    """
    if operands is None:
        return TmaUse()
    loads, stores = operands.loads, operands.stores
    stored = operands.has_room(request, tiles) and can_store(request, stores)
    dtype, rows = request.problem.dtype.name, dict(operands.rows(tiles))
    for name in filter(request.is_paged, loads):
        rows[name] = page_rows(request, rows[name])
    maps = tuple(
        tma.of(name, dtype, request.operand(name), request.sizes(name), rows[name])
        for name in (*loads, *(stores if stored else ()))
    )
    return TmaUse(maps if stored else (*maps, *maps[: len(stores)]), stored)
