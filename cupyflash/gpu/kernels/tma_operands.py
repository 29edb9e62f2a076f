"""Arrays that a kernel loads and stores by TMA: whether that is possible, and their tensor maps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from ...arrays import device_arrays
from .. import tma
from .spec import Request, TmaUse

# initcheck of CUDA's compute-sanitizer does not see that TMA writes to memory, and calls a read of
# it one of what was never written. For such tools results leave otherwise.
NO_TMA_STORE = os.environ.get("CUPYFLASH_NO_TMA_STORE") == "1"
_SAID = {"d_out": "do"}  # what callers know an array by


def obstacle(request: Request, names: Iterable[str]) -> str | None:
    """Return in words which array TMA cannot copy, and why, or None."""
    for name in names:
        address = device_arrays.address(request.array(name))
        why = tma.obstacle(request.operand(name), address, request.sizes(name))
        if why is not None:
            return f"of {_SAID.get(name, name)}, {why}"
    return None


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


def use(
    request: Request,
    loads: tuple[str, ...],
    stores: tuple[str, ...],
    rows: Mapping[str, int],
    may_store: bool = True,
) -> TmaUse:
    """Return the tensor maps of a launch for which there is no obstacle.

    Parameters
    ----------
    request : Request
        The request.
    loads : tuple of str
        Arrays that are loaded.
    stores : tuple of str
        Arrays that are stored. Where they cannot be, their maps are any.
    rows : mapping of str to int
        Rows of a TMA tile of each array.
    may_store : bool
        Whether the kernel has room for results in shared memory.
    """
    stored = may_store and can_store(request, stores)
    dtype = request.problem.dtype.name
    maps = tuple(
        tma.of(name, dtype, request.operand(name), request.sizes(name), rows[name])
        for name in (*loads, *(stores if stored else ()))
    )
    return TmaUse(maps if stored else (*maps, *maps[: len(stores)]), stored)
