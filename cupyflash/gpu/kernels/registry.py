"""Which kernel serves a part of a call on a GPU: the first spec of this part that can.

The choice never depends on the batch size, so that a result does not depend on the batch in which
it is computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...arrays.cuda_device import OLDEST_CAPABILITY
from ...errors import ArgumentError
from . import (
    rowwise,
    short_packed,
    simt,
    simt_reduce,
    simt_tangent,
    sm80,
    sm80_f64,
    sm80_reduce,
    sm80_second,
    sm80_tangent,
    sm80_tile,
    sm90,
    sm90_bias,
    sm90_decode,
    sm90_fp8,
    sm90_tangent,
    sm90_tf32,
)
from .spec import KernelSpec, Request, Tiles

# Part of a call -> its kernels, the best first.
KERNELS: dict[str, tuple[KernelSpec, ...]] = {
    "forward": (sm90.FORWARD, sm90_tf32.FORWARD, sm80.FORWARD, simt.FORWARD),
    "tangents": (sm90_tangent.TANGENTS, sm80_tangent.TANGENTS, simt.TANGENTS),
    "tangent_delta": (rowwise.TANGENT_DELTA,),
    "tangent_sink": (rowwise.TANGENT_SINK,),
    "tangent_dkdv": (sm80_second.DKDV, simt_tangent.DKDV),
    "tangent_dq": (sm80_second.DQ, simt_tangent.DQ),
    "tangent_bias": (simt_tangent.BIAS,),
    "forward_codes": (sm90_fp8.FORWARD,),
    "decode": (sm80.DECODE, sm90_decode.DECODE, simt.DECODE),  # the first two: for other heads
    "shared": (sm80.SHARED,),
    "join": (rowwise.DECODE_COMBINE,),
    "delta": (rowwise.DELTA,),
    "sink": (rowwise.SINK,),
    "dkdv": (sm80_tile.DKDV_BIAS, sm80_tile.DKDV, sm90.DKDV, sm80.DKDV, sm80_f64.DKDV, simt.DKDV),
    "dq": (sm80.DQ, sm80_f64.DQ, simt.DQ),
    "dq_rows": (rowwise.DQ_ROWS,),
    "bias": (sm90_bias.BIAS, sm80.BIAS, simt.BIAS),
    "lookup": (simt.LOOKUP,),
    "reduce_keys": (simt_reduce.KEYS,),
    "reduce_blocks": (simt_reduce.BLOCKS,),
    "reduce_weights": (sm80_reduce.WEIGHTS,),  # of blocks, where these can
    "reduce_distance": (simt_reduce.DISTANCE,),
    "sums": (rowwise.SUMS,),
    "lists": (simt.LIST_TILES,),
    "order": (simt.ORDER_TILES,),
    "singles": (simt.SINGLE_TILES,),
    "long": (rowwise.LIST_LONG,),
    **{spec.part: (spec,) for spec in rowwise.OPERATIONS},
}
SPECS: dict[str, KernelSpec] = {spec.name: spec for specs in KERNELS.values() for spec in specs}


class Choice(NamedTuple):
    """The kernel that serves a part of a call.

    Attributes
    ----------
    spec : KernelSpec
        The kernel.
    tiles : Tiles
        Its configuration.
    passed_over : tuple of (KernelSpec, str)
        Better kernels for this type on this device, and why they do not serve the call.
    """

    spec: KernelSpec
    tiles: Tiles
    passed_over: tuple[tuple[KernelSpec, str], ...] = ()


def find(part: str, request: Request) -> Choice | None:
    """Return the kernel that serves a part of a call, or None if no kernel of that part does.

    Raises
    ------
    ArgumentError
        If the device is too old, or does not support the requested precision.
    """
    problem, device = request.problem, request.device
    _check_precision(request)
    if device.capability < OLDEST_CAPABILITY:
        wanted, came = (".".join(map(str, x)) for x in (OLDEST_CAPABILITY, device.capability))
        raise ArgumentError(
            f"q: got an array on {device.name}, of compute capability {came}; expected a GPU of "
            f"{wanted} (Turing) or newer. NumPy arrays run on the CPU; cupy.asnumpy makes them."
        )
    passed_over: list[tuple[KernelSpec, str]] = []
    for spec in KERNELS[part]:
        if not spec.is_for(problem, device):
            continue
        why = spec.serves(request)
        if why is None:
            tiles = spec.configure(request)
            if tiles is not None:
                return Choice(spec, tiles, tuple(passed_over))
            why = f"its tiles take more than {device.shared_memory} bytes of shared memory"
        passed_over.append((spec, why))
    return None


def select(part: str, request: Request) -> Choice:
    """Return the kernel that serves a part of a call.

    Raises
    ------
    ArgumentError
        As `find`, and if the device has too little shared memory for these head sizes.
    """
    choice = find(part, request)
    if choice is not None:
        return choice
    problem, device = request.problem, request.device
    raise ArgumentError(
        f"q, v: got head sizes {problem.d} and {problem.d_v} of {problem.dtype}, for which "
        f"{KERNELS[part][-1].name} needs more than the {device.shared_memory} bytes of shared "
        f"memory of {device.name}; expected smaller heads or elements."
    )


def portable(part: str) -> KernelSpec:
    """Return the kernel of a part that runs everywhere: it rounds no operand of a product."""
    return KERNELS[part][-1]


def shares(request: Request, choice: Choice) -> Choice | None:
    """Return the kernel of keys that entries share, if one goes with the choice for other keys."""
    found = find("shared", request)
    return found if found is not None and found.spec.beside == choice.spec.name else None


def widens(request: Request) -> str | None:
    """Return None, or in words why codes have to become numbers before they are multiplied."""
    problem, device = request.problem, request.device
    for spec in KERNELS["forward_codes"]:
        if not spec.is_for(problem, device):
            major, minor = spec.capability
            return f"{spec.name} is for compute capability {major}.{minor}"
        why = spec.serves(request)
        if why is not None:
            return f"{spec.name} does not serve the call: {why}"
    return None


def reason(choice: Choice, request: Request, before: str = "", after: str = "") -> str:
    """Return in words why a kernel serves a part of a call with these tiles.

    `before` says what is done first, and `after` what else there is to say of the kernel.
    """
    problem, device, spec, tiles = request.problem, request.device, choice.spec, choice.tiles
    major, minor = device.capability
    why = f"{device.name} (compute capability {major}.{minor}) {before}{spec.how(problem)}"
    if not tiles.block_kv:
        return why
    if choice.passed_over:
        other, obstacle = choice.passed_over[-1]
        why += f"; not by {other.name}, because {obstacle}"
    takes = spec.cost(request, tiles)
    if takes is not None:
        why += f"; by the model of cost, a head takes {takes}"
    in_rows = problem.heads_in_rows
    if spec.part == "decode" and problem.heads_kv:
        in_rows *= problem.heads // problem.heads_kv
    if in_rows > 1:
        why += f"; the {in_rows} heads that share keys are rows of one"
    return (
        f"{why}; {tiles.block_q} x {tiles.block_kv} tiles take {tiles.shared_memory} bytes of its "
        f"{device.shared_memory} of shared memory{after}"
    )


def has_all_keys(request: Request) -> bool:
    """Return whether a block of the kernel of dk and dv has all keys of a head, and can store dq.

    As for `adds_dq`, a request without arrays is enough. Packed queries without keys have no block,
    and where nobody looked at the offsets, there may be some.
    """
    problem, choice = request.problem, select("dkdv", request)
    keys = int(np.max(problem.len_k, initial=0))
    if problem.rows.unread or not choice.spec.whole_dq or not 0 < keys <= choice.tiles.block_kv:
        return False
    return not np.any((problem.len_k == 0) & (problem.len_q > 0))


def stores_packed_dq(request: Request) -> bool:
    """Return whether the kernel of dk and dv stores dq of packed sequences where it can.

    Unlike other questions, this one needs arrays. If another kernel serves after all, it can, too.
    """
    return has_all_keys(request) and select("dkdv", request).spec.packed_dq


def adds_dq(request: Request, deterministic: bool) -> bool:
    """Return whether the kernel of dk and dv adds dq to memory, in any order of its blocks.

    A request without arrays is enough: a kernel that depends on them adds dq for the same types as
    the one that serves without.
    """
    if deterministic:
        return False
    return request.problem.dtype.name in select("dkdv", request).spec.atomic_dq


def makes_delta(request: Request) -> bool:
    """Return whether the kernel of dk and dv computes delta, too.

    As for `stores_packed_dq`, the request has arrays.
    """
    return select("dkdv", request).spec.own_delta


def of_short(part: str, request: Request) -> Choice | None:
    """Return the kernel of short packed sequences, if others are to be listed for the usual one.

    As for `stores_packed_dq`, the request has arrays.
    """
    spec = select(part, request).spec
    tiles = short_packed.tiles_of_short(spec, request)
    return None if tiles is None else Choice(spec, tiles)


def makes_dbias(request: Request) -> bool:
    """Return whether the kernel of dk and dv computes parts of dbias, too, as `makes_delta`."""
    return select("dkdv", request).spec.own_dbias


def shares_queries(request: Request) -> bool:
    """Return whether several blocks of the kernel of dk and dv may share a block's queries.

    As for `adds_dq`, a request without arrays is enough.
    """
    return select("dkdv", request).spec.parts


def multiplies(dtype: Any, precision: str | None, capability: tuple[int, int]) -> bool:
    """Whether tensor cores of a device compute a forward of some heads of a type."""
    name = np.dtype(dtype).name
    return any(
        spec.tensor_cores
        and name in spec.heads
        and spec.precisions.get(name) in (None, precision)
        and spec.capability <= capability
        for spec in KERNELS["forward"]
        if spec.architecture is None
    )


def _check_precision(request: Request) -> None:
    """Refuse a precision that a device cannot have."""
    problem, device = request.problem, request.device
    if problem.precision is None:
        return
    # The last kernel that has this precision serves the most devices and heads.
    spec = next(
        spec
        for spec in reversed(KERNELS["forward"])
        if problem.precision in spec.precisions.values()
    )
    if device.capability < spec.capability:
        oldest, came = (".".join(map(str, x)) for x in (spec.capability, device.capability))
        raise ArgumentError(
            f'precision: got "{problem.precision}" with arrays on {device.name}, of compute '
            f"capability {came}; expected {oldest} or newer. Leave precision out: without it, any "
            "GPU computes in float32."
        )
    largest = spec.heads[problem.dtype.name]
    if max(problem.d, problem.d_v) > largest:
        raise ArgumentError(
            f'precision: got "{problem.precision}" with head sizes {problem.d} and {problem.d_v}; '
            f"expected at most {largest}. Leave precision out for larger heads."
        )
