"""Arrays that a kernel loads and stores by TMA: whether that is possible, and their tensor maps."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping

from ...arrays import device_arrays
from .. import tma
from ..params import Operand
from . import bias_tiles
from .spec import Request, Tiles, TmaOperands, TmaUse

# Initcheck of CUDA's compute-sanitizer does not see that TMA writes to memory, and reports reads of
# it as reads of uninitialised memory. For such tools, results are stored without TMA.
NO_TMA_STORE = os.environ.get("CUPYFLASH_NO_TMA_STORE") == "1"
FEWEST_PAGE_ROWS = 8  # that TMA loads at a time: the pattern of shared memory repeats after them
# The map of an array that TMA does not load: it is encoded, and the kernel does not use it.
NOTHING = tma.TensorMap("workspace", "float16", (tma.LINE, 1, 1, 1, 1), (16, 16, 16, 16), 1)
_SAID = {"d_out": "do"}  # the callers' names of arrays


def obstacle(request: Request, names: Iterable[str]) -> str | None:
    """Return in words which array TMA cannot copy, and why, or None."""
    for name in names:
        if request.is_paged(name) and not request.operand(name).lead[-1]:
            return f"of {name}, its pages repeat"
        address = device_arrays.address(request.array(name))
        operand, sizes = request.operand(name), request.sizes(name)
        if _is_codes(request, name):
            if any(x % 2 for x in (*operand.lead, operand.head, operand.row, sizes[-1])):
                return f"of {name}, rows do not begin at multiples of 16 bytes"
            operand, sizes = _in_pairs(operand, sizes)
        why = tma.obstacle(operand, address, sizes)
        if why is not None:
            return f"of {_SAID.get(name, name)}, {why}"
    return None


def of_call(request: Request, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of the arrays that a call has: it may lack tangents."""
    return tuple(name for name in names if name in "qkv" or name in request.arrays)


def _is_codes(request: Request, name: str) -> bool:
    return request.call is not None and name in request.call.encoding.operands


def _in_pairs(operand: Operand, sizes: tuple[int, ...]) -> tuple[Operand, tuple[int, ...]]:
    """Return the strides and sizes of codes in elements of 16 bits, of which each is two codes."""
    halved = Operand(
        lead=tuple(step // 2 for step in operand.lead),
        head=operand.head // 2,
        row=operand.row // 2,
        col=operand.col,
    )
    return halved, (*sizes[:-1], sizes[-1] // 2)


def _described(request: Request, name: str) -> tuple[Operand, tuple[int, ...]]:
    described = request.operand(name), request.sizes(name)
    return _in_pairs(*described) if _is_codes(request, name) else described


def page_rows(request: Request, rows: int) -> int:
    """Return how many rows of a page a TMA tile has, where a kernel's tile has `rows`."""
    assert request.call is not None
    return math.gcd(request.call.k.shape[-2], rows)


def can_store(request: Request, names: Iterable[str]) -> bool:
    """Return whether TMA may store the results.

    It may not for packed sequences, because a tile may reach into the next one's rows, and not if a
    result has another type than the storage type, because it will be summed later.
    """
    problem = request.problem
    if NO_TMA_STORE or problem.rows.adjoin:
        return False
    if any(request.array(name).dtype != problem.dtype for name in names):
        return False
    return obstacle(request, names) is None


def _cannot_load(request: Request, loads: Iterable[str], rows: Mapping[str, int]) -> bool:
    """Return whether TMA cannot load an array of a kernel that then copies it by itself."""
    pages = filter(request.is_paged, loads)
    small = any(page_rows(request, rows[name]) < FEWEST_PAGE_ROWS for name in pages)
    return small or obstacle(request, loads) is not None


def use(operands: TmaOperands | None, request: Request, tiles: Tiles) -> TmaUse:
    """Return what a launch copies by TMA. There must be no obstacle to its loads.

    If results cannot be stored by TMA, the kernel ignores their maps, and so it does those of
    arrays that a call does not have.
    """
    if operands is None:
        return TmaUse()
    has, stores = of_call(request, operands.loads), operands.stores
    loads = tuple(name if name in has else operands.loads[0] for name in operands.loads)
    if operands.optional and _cannot_load(request, loads, operands.rows(tiles)):
        return TmaUse(tuple(NOTHING for _ in loads))
    stored = operands.has_room(request, tiles) and can_store(request, stores)
    dtype, rows = request.problem.dtype.name, dict(operands.rows(tiles))
    for name in filter(request.is_paged, loads):
        rows[name] = page_rows(request, rows[name])
    maps = tuple(
        tma.of(name, dtype, *_described(request, name), rows[name])
        for name in (*loads, *(stores if stored else ()))
    )
    maps = maps if stored else (*maps, *maps[: len(stores)])
    if tiles.bias_stages:
        maps = (*maps, bias_tiles.tensor_map(request, operands.rows(tiles)[bias_tiles.NAME]))
    return TmaUse(maps, stored)
