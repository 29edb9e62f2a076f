"""Whether a call is one for compute capability 9.0 alone: whether boxes of arrays can be copied.

Pure functions of shapes, strides and where arrays begin within 16 bytes.
"""

from __future__ import annotations

from . import operands, target, tensor_maps
from .operands import Lead
from .problem import Call
from .target import Target
from .tensor_maps import TensorMap

SHORTEST = 512  # queries, and keys: for fewer the smaller tiles of forward_sm80 are not slower
MOST_PADDING = 1.25  # times the products that forward_sm80 computes


def _padding(d: int, d_v: int) -> float:
    """Return how many times the products of forward_sm80 are computed: columns come by 64."""
    scores = -(-d // 16) * 16
    return (scores + -(-d_v // 64) * 64) / (scores + -(-d_v // 16) * 16)


def _sizes(call: Call, name: str, lead: Lead) -> tuple[int, ...]:
    array = getattr(call, name)
    return (*lead.sizes, *array.shape[-3:])


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
    if lead is None:
        arrays = {name: (getattr(call, name), 3) for name in ("q", "k", "v")}
        lead = operands.lead_of(problem.lead, arrays)
    for name in ("q", "k", "v"):
        array = getattr(call, name)
        why = tensor_maps.obstacle(
            operands.operand(array, lead.strides[name]),
            target.address(array),
            _sizes(call, name, lead),
        )
        if why is not None:
            return f"of {name}, {why}"
    return None


def besides(call: Call) -> str:
    """Return what takes registers beside products: a key of `tensor_tiles.FORWARD_HOPPER`."""
    if call.score_mod is not None or call.bias is not None:
        return "scores"
    return "nothing" if call.mask is None else "masks"


def grid(call: Call, jobs: int, facts: Target) -> int:
    """Return how many blocks share the jobs of a call, each of them one block of queries.

    Jobs of one length are dealt out beforehand, and a block prepares its next one. Those of packed
    sequences may differ: each has a block, and goes to whichever multiprocessor is free.
    """
    return jobs if call.problem.packed else min(jobs, facts.multiprocessors)


def maps(call: Call, lead: Lead, block_kv: int) -> tuple[TensorMap, ...]:
    """Return the maps of q, k and v for a call without an obstacle."""
    rows = {"q": 64, "k": block_kv, "v": block_kv}  # a warpgroup's queries; a tile's keys
    return tuple(
        tensor_maps.of(
            name,
            call.problem.dtype.name,
            operands.operand(getattr(call, name), lead.strides[name]),
            _sizes(call, name, lead),
            rows[name],
        )
        for name in rows
    )
