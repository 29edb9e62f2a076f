"""How many places in shared memory what passes by is copied to, by the tables of tiles."""

from __future__ import annotations

from ..arrays.dtypes import DTYPES
from ..gpu.kernels import tensor_tiles
from ..gpu.source import Specialisation


def stages(special: Specialisation) -> int | None:
    """Return the places of a kernel; None where it has none, or its table does not tell."""
    tiles, name = special.tiles, special.kernel
    if not tiles.block_q:
        return None
    if name in ("forward_sm90_tf32", "backward_sm90_bias"):
        return 1
    if name == "forward_sm90":
        room = not special.functions.has_score
        return tensor_tiles.forward_sm90_places(special.d, special.d_v, room)[0]
    if "_sm90" in name:
        return tensor_tiles.PASSING_STAGES
    if "_simt_" in f"{name}_":
        return 2  # the two buffers of `tiles.Shape.stage`
    if "_f64_" in f"{name}_":
        return 1
    sizes = special.d, special.d_v
    warps = tiles.threads // 32
    if name == "forward_sm80":
        itemsize = DTYPES[special.dtype].itemsize
        for rows in tensor_tiles.FORWARD[itemsize].values():
            for block_q, block_kv, own, slots, _ in rows:
                made = tensor_tiles.shared_memory(block_q, block_kv, own, slots, *sizes, itemsize)
                if (block_q, block_kv, own, made) == (
                    tiles.block_q, tiles.block_kv, warps, tiles.shared_memory,
                ):  # fmt: skip
                    return slots
        return None
    bytes_of = {
        "backward_sm80_dkdv": tensor_tiles.backward_sm80_dkdv,
        "backward_sm80_dq": tensor_tiles.backward_sm80_dq,
        "backward_sm80_bias": tensor_tiles.backward_sm80_bias,
    }
    if name not in bytes_of:
        return None
    for rows in tensor_tiles.BACKWARD[name].values():
        for block_q, block_kv, own, places, _ in rows:
            made = bytes_of[name](block_q, block_kv, own, places, *sizes)
            if (block_q, block_kv, own, made) == (
                tiles.block_q, tiles.block_kv, warps, tiles.shared_memory,
            ):  # fmt: skip
                return places
    return None
