"""Whether a call is one for compute capability 9.0 alone: whether boxes of arrays can be copied.

Pure functions of shapes, strides and where arrays begin within 16 bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from ...arrays import device_arrays
from ...arrays.cuda_device import Target
from ...problem.call import Array, Call, Problem
from .. import params, strides, tma
from ..strides import Lead
from ..tma import TensorMap
from . import tensor_tiles
from .tiles import Tiles

SHORTEST = 512  # queries, and keys: for fewer the smaller tiles of forward_sm80 are not slower
# initcheck of CUDA's compute-sanitizer does not see that boxes are written to memory, and calls a
# read of it one of what was never written. For such tools results leave otherwise.
NO_TMA_STORE = os.environ.get("CUPYFLASH_NO_TMA_STORE") == "1"
MOST_PADDING = 1.25  # times the products that forward_sm80 or backward_sm80_dkdv computes

_MAPS_BYTES = 7 * tma.BYTES  # of q, k, v, do, dk and dv, and what aligns them
_SAID = {"d_out": "do"}  # what callers know an array by


def _padding(d: int, d_v: int) -> float:
    """Return how many times the products of forward_sm80 are computed: columns come by 64."""
    scores = -(-d // 16) * 16
    return (scores + -(-d_v // 64) * 64) / (scores + -(-d_v // 16) * 16)


def _line(d: int, d_v: int) -> int:
    """Columns that backward_sm90_dkdv computes at a time; of wide heads in two warpgroups."""
    return 64 if max(d, d_v) <= 128 else 128


def _backward_padding(d: int, d_v: int) -> float:
    """Return the same of backward_sm80_dkdv: scores and dP as they are, dv, dk and dq by lines."""
    line = _line(d, d_v)
    wide, wide_v = (-(-n // line) * line for n in (d, d_v))
    own, own_v = (-(-n // 16) * 16 for n in (d, d_v))
    return (own + own_v + 2 * wide + wide_v) / (3 * own + 2 * own_v)


def _sizes(array: Array, lead: Lead) -> tuple[int, ...]:
    return (*lead.sizes, *array.shape[-3:])


def _uncopied(arrays: Mapping[str, Array], lead: Lead) -> str | None:
    """Return in words which array's boxes cannot be copied, or None."""
    for name, array in arrays.items():
        why = tma.obstacle(
            strides.operand(array, lead.strides[name]),
            device_arrays.address(array),
            _sizes(array, lead),
        )
        if why is not None:
            return f"of {_SAID.get(name, name)}, {why}"
    return None


def _maps(
    call: Call, arrays: Mapping[str, Array], lead: Lead, rows: Mapping[str, int]
) -> tuple[TensorMap, ...]:
    """Return the maps of arrays whose boxes have so many rows."""
    return tuple(
        tma.of(
            name,
            call.problem.dtype.name,
            strides.operand(array, lead.strides[name]),
            _sizes(array, lead),
            rows[name],
        )
        for name, array in arrays.items()
    )


def obstacle(call: Call, lead: Lead | None = None) -> str | None:
    """Return in words why forward_sm90 cannot serve a call, whatever the device, or None.

    Parameters
    ----------
    call : Call
        The call.
    lead : Lead, optional
        The leading axes of its launch; without it those of a fresh output.
    """
    problem = call.problem
    # No sequence's result may depend on the lengths of others that are packed with it.
    if not problem.packed and min(problem.len_q, problem.len_k) < SHORTEST:
        return f"it is for {SHORTEST} queries and keys or more"
    if _padding(problem.d, problem.d_v) > MOST_PADDING:
        return f"it computes columns of v by 64, which {problem.d_v} are too far from"
    arrays: dict[str, Array] = {"q": call.q, "k": call.k, "v": call.v}
    if lead is None:
        lead = strides.lead_of(problem.lead, {name: (x, 3) for name, x in arrays.items()})
    return _uncopied(arrays, lead)


def besides(call: Call) -> str:
    """Return what a call's tiles depend on beside its heads: a key of `FORWARD_HOPPER`."""
    if call.score_mod is not None or call.bias is not None:
        return "scores"
    # No sequence's result may depend on the lengths of others that are packed with it.
    problem = call.problem
    if call.mask is None:
        few = not problem.packed and int(problem.len_k) <= tensor_tiles.FEW_KEYS
        return "nothing of few keys" if few else "nothing"
    short = not problem.packed and int(problem.len_q) <= tensor_tiles.SHORT_ROWS
    return "masks of short rows" if short else "masks"


def grid(call: Call, jobs: int, facts: Target) -> int:
    """Return how many blocks share the jobs of a call, each of them one block of queries.

    Jobs are dealt out beforehand, and a block prepares its next one. Those of packed sequences may
    differ in any way: each has a block, and goes to whichever multiprocessor is free.
    """
    return jobs if call.problem.packed else min(jobs, facts.multiprocessors)


def tma_store(call: Call, out: Array, lead: Lead, tiles: Tiles) -> bool:
    """Whether forward_sm90 writes results by boxes, which pass through shared memory.

    Not those of packed sequences: a box may reach into the next one's rows.
    """
    problem = call.problem
    has_room = tensor_tiles.results_have_room(tiles, problem.d, problem.d_v)
    if NO_TMA_STORE or problem.packed or not has_room:
        return False
    return _uncopied({"out": out}, lead) is None


def maps(
    call: Call, out: Array, lead: Lead, block_kv: int, tma_store: bool
) -> tuple[TensorMap, ...]:
    """Return the maps of q, k and v for a call without an obstacle, and where boxes are stored out.

    Where they are not, the last is any: the kernel has four.
    """
    arrays: dict[str, Array] = {"q": call.q, "k": call.k, "v": call.v, "out": out}
    # a warpgroup's queries; a tile's keys; a warp's rows
    rows = {"q": 64, "k": block_kv, "v": block_kv, "out": 16}
    if not tma_store:
        del arrays["out"]
    made = _maps(call, arrays, lead, rows)
    return made if tma_store else (*made, made[0])


def bias_obstacle(problem: Problem) -> str | None:
    """Return in words why backward_sm90_bias does not serve a problem, or None."""
    longest = [int(np.max(x, initial=0)) for x in (problem.len_q, problem.len_k)]
    if min(longest) < SHORTEST:
        return f"it is for {SHORTEST} queries and keys or more"
    return None


def backward_obstacle(call: Call, do: Array, lead: Lead, size: int) -> str | None:
    """Return in words why backward_sm90_dkdv cannot serve a call, whatever the device, or None.

    `size` is that of its parameters in bytes; maps follow them.
    """
    problem = call.problem
    short = bias_obstacle(problem)
    if short is not None:
        return short
    if size + _MAPS_BYTES > params.MAX_BYTES:
        return "its mask and scores read too many arrays or numbers"
    d, d_v = problem.d, problem.d_v
    if _backward_padding(d, d_v) > MOST_PADDING:
        return f"it computes columns by {_line(d, d_v)}, which {d} and {d_v} are too far from"
    return _uncopied({"q": call.q, "k": call.k, "v": call.v, "d_out": do}, lead)


def stores_gradients(call: Call, dk: Array, dv: Array, lead: Lead) -> bool:
    """Whether backward_sm90_dkdv writes dk and dv by boxes.

    Not those of packed sequences, as in `tma_store`, and not what is to be summed on.
    """
    problem = call.problem
    if NO_TMA_STORE or problem.packed:
        return False
    if dk.dtype != problem.dtype or dv.dtype != problem.dtype:
        return False
    return _uncopied({"dk": dk, "dv": dv}, lead) is None


def backward_maps(
    call: Call, do: Array, boxes: Mapping[str, Array], lead: Lead, block_q: int
) -> tuple[TensorMap, ...]:
    """Return the maps of q, k, v and do for a backward without an obstacle, and of dk and dv.

    `boxes` are dk and dv where they are stored by boxes. Where they are not, the last two are any:
    the kernel has six.
    """
    arrays: dict[str, Array] = {"q": call.q, "k": call.k, "v": call.v, "d_out": do, **boxes}
    # a tile's; a warpgroup's keys; a warp's
    rows = {"q": block_q, "k": 64, "v": 64, "d_out": block_q, "dk": 16, "dv": 16}
    made = _maps(call, arrays, lead, rows)
    return (*made, *made[: 2 - len(boxes)])
