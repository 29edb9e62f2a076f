"""How many blocks a multiprocessor holds: shared memory, registers and warps limit them."""

from __future__ import annotations

import math
from typing import NamedTuple

from ...gpu.kernels.spec import REGISTERS, Tiles
from .results import Occupancy

WARP = 32
PARTS = 4  # per multiprocessor, each with a quarter of the registers
REGISTER_UNIT = 256  # registers that a warp gets at a time


class Limits(NamedTuple):
    """What a multiprocessor has.

    CUDA C++ Programming Guide, technical specifications per compute capability.
    """

    warps: int
    blocks: int
    shared_memory: int  # bytes
    reserved: int  # bytes of it that every block takes in addition
    unit: int  # unit in which shared memory is allocated, bytes


KIB = 1024
LIMITS: dict[tuple[int, int], Limits] = {
    (7, 5): Limits(32, 16, 64 * KIB, 0, 256),
    (8, 0): Limits(64, 32, 164 * KIB, KIB, 128),
    (8, 6): Limits(48, 16, 100 * KIB, KIB, 128),
    (8, 7): Limits(48, 16, 164 * KIB, KIB, 128),
    (8, 9): Limits(48, 24, 100 * KIB, KIB, 128),
    (9, 0): Limits(64, 32, 228 * KIB, KIB, 128),
    (10, 0): Limits(64, 32, 228 * KIB, KIB, 128),
    (12, 0): Limits(48, 24, 100 * KIB, KIB, 128),
}


def occupancy(
    tiles: Tiles, registers: int, capability: tuple[int, int], blocks: int, multiprocessors: int
) -> Occupancy:
    """Return how many blocks of a kernel a multiprocessor holds.

    Parameters
    ----------
    tiles : Tiles
        Threads and shared memory of a block.
    registers : int
        Of a thread.
    capability : tuple of int
        Of the device; one of `LIMITS`.
    blocks, multiprocessors : int
        Of the launch, and of the device.
    """
    has = LIMITS[capability]
    warps = -(-tiles.threads // WARP)
    of_warp = -(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    shared = -(-tiles.shared_memory // has.unit) * has.unit + has.reserved
    room = {
        "shared memory": has.shared_memory // shared if shared else has.blocks,
        "registers": REGISTERS // PARTS // of_warp * PARTS // warps,
        "warps": has.warps // warps,
        "blocks": has.blocks,
    }
    least = min(room.values())
    limit = next(name for name, most in room.items() if most == least)
    waves = blocks / (least * multiprocessors) if least else math.inf
    return Occupancy(least, least * warps, has.warps, limit, waves)
