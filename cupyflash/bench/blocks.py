"""The time and the counted bytes of the forward against the size of its tiles: the suite `blocks`.

On the CPU these are tiles of the kernel that calls take; on a GPU those of the SIMT kernel, which
takes any that fit. Both hold a block of queries and read keys and values tile by tile, as
FlashAttention-2 does, so its count says what passes between memory and chip.
"""

from __future__ import annotations

import functools

from ..analysis import flash_attention_2
from ..dispatch import backend_of
from ..problem import validate
from ..problem.call import Plan
from ..problem.options import Options
from .host import drawn, standard
from .measure import Meter, Work
from .tasks import OURS, STANDARD, Maker, TaskSuite, Works, calls, repeated

SHAPES = {"cpu": (1, 4, 2048, 64), "gpu": (2, 16, 4096, 64)}
QUERIES, KEYS = (16, 32, 64, 128, 256, 512), (16, 32, 64, 128, 256)
USUAL = 64  # queries or keys of a tile, where the others vary
ITEMSIZE = 4  # of float32
TILES = {
    **{f"{n} queries x {USUAL} keys": (n, USUAL) for n in QUERIES},
    **{f"{USUAL} queries x {n} keys": (USUAL, n) for n in KEYS if n != USUAL},
}


def of_tiles(
    meter: Meter, dtype: str, shape: tuple[int, int, int, int], tiles: tuple[int, int]
) -> Works:
    """Compute the forward with such tiles."""
    batch, heads, length, d = shape
    q, k, v = drawn(meter, dtype, batch, heads, length, d, number=3)
    count = calls(meter, 4.0 * batch * heads * length**2 * d)

    def ours() -> Work:
        backend = backend_of(q)
        call = validate.call(q, k, v, Options())
        out, lse = backend.empty_output(call)
        plan = Plan("", *tiles, "the tiles of the benchmark")

        def run() -> object:
            backend.forward(call, out, lse, plan)
            return out

        return run

    works = {
        OURS: lambda: repeated(ours(), count),
        STANDARD: lambda: repeated(lambda: standard(meter.xp, q, k, v), count),
    }
    return Works(works, lambda found: [found], count)


def moved(shape: tuple[int, int, int, int], tiles: tuple[int, int]) -> int:
    """Return the bytes between memory and chip, by count."""
    batch, heads, length, d = shape
    block_q, block_kv = (min(n, length) for n in tiles)
    traffic = flash_attention_2(length, length, d, block_q=block_q, block_kv=block_kv)
    return traffic.total * ITEMSIZE * batch * heads


def _suite(kind: str) -> TaskSuite:
    shape = SHAPES[kind]
    makers: dict[str, Maker] = {
        name: functools.partial(of_tiles, shape=shape, tiles=tiles) for name, tiles in TILES.items()
    }
    counted = {name: moved(shape, tiles) for name, tiles in TILES.items()}
    return TaskSuite(
        f"time and counted bytes against the size of tiles, at {shape}",
        "blocks", makers, "float32", {}, (OURS, STANDARD), moved=counted,
    )  # fmt: skip


SUITES = {kind: _suite(kind) for kind in SHAPES}
