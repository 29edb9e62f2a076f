"""Times one sequence on one GPU and divided among several, and writes them down, as JSON.

    mpiexec -n 2 python -m mpi4py tests/tools/gpu_ranks.py

Each rank has a GPU. Masks are those of training: documents of random lengths, and a window. Ways
are timed in turns, each several calls in a row; times are medians, in milliseconds. The efficiency
is the time of one GPU, divided by the GPUs and by their time. The record goes to tests/data/gpu.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_machine
import numpy as np
from mpi4py import MPI

import cupyflash
from cupyflash import distributed, masks
from cupyflash.distributed.executor import decisions

HEADS, COLUMNS = 16, 128
WAYS = "one GPU", "all GPUs"


def ids(length: int, documents: int) -> np.ndarray:
    """Return the document of each position, of documents of random lengths."""
    rng = np.random.default_rng(documents)
    ends = np.sort(rng.choice(np.arange(1, length), documents - 1, replace=False))
    return np.searchsorted(ends, np.arange(length), side="right").astype(np.int32)


def masks_of(cupy: Any, length: int) -> dict[str, Any]:
    """Return the masks by name."""
    return {
        "causal": masks.causal(),
        "window of 4,096": masks.window(4095, 0),
        **{
            f"{n} documents": masks.causal() & masks.segments(cupy.asarray(ids(length, n)))
            for n in (16, 128)
        },
    }


def timed(call: Callable[[], Any], wait: Callable[[], None], calls: int) -> float:
    """Return the milliseconds of a call among several in a row."""
    call()
    wait()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return (time.perf_counter() - begin) / calls * 1e3


def times(
    comm: Any, cupy: Any, mask: Any, length: int, wait: Callable[[], None], calls: int, rounds: int
) -> tuple[dict[str, list[float]], list[str]]:
    """Return the medians of a forward and a backward by each way, and the schemes of these."""
    layout = distributed.layout(comm, length, mask=mask)

    def draw(rows: int) -> list[Any]:
        import ml_dtypes

        shape = 1, HEADS, rows, COLUMNS
        drawn = (cupy.random.standard_normal(shape, dtype=np.float32) for _ in range(4))
        return [x.astype(ml_dtypes.bfloat16) for x in drawn]

    *whole, do = draw(length)
    *own, own_do = draw(layout.count)
    options = {"comm": comm, "layout": layout, "mask": mask, "check": False}
    _, vjp = cupyflash.attention_vjp(*whole, mask=mask)
    _, own_vjp = distributed.attention_vjp(*own, **options)
    works: dict[str, list[Callable[[], Any]]] = {
        WAYS[0]: [lambda: cupyflash.attention(*whole, mask=mask), lambda: vjp(do)],
        WAYS[1]: [lambda: distributed.attention(*own, **options), lambda: own_vjp(own_do)],
    }
    found: dict[str, list[list[float]]] = {way: [[], []] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            for each, work in zip(found[way], works[way], strict=True):
                each.append(timed(work, wait, calls))
    medians = {way: [round(statistics.median(x), 4) for x in found[way]] for way in WAYS}
    return medians, decisions(comm).schemes(layout)


def main(arguments: list[str] | None = None) -> None:
    """Time all masks, and write a record on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--commit", default="", help="where there is no git")
    parser.add_argument("--folder", type=Path, default=gpu_machine.RECORDS)
    parser.add_argument("--length", type=int, default=65536)
    parser.add_argument("--calls", type=int, default=8, help="in a row")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args(arguments)
    import cupy

    world = MPI.COMM_WORLD
    cupy.cuda.Device(world.rank).use()
    comm = distributed.communicator(world, device=world.rank)

    def wait() -> None:
        cupy.cuda.get_current_stream().synchronize()
        world.Barrier()

    rows = {}
    for name, mask in masks_of(cupy, asked.length).items():
        found, schemes = times(comm, cupy, mask, asked.length, wait, asked.calls, asked.rounds)
        rows[name] = {**found, "schemes": schemes}
        if world.rank == 0:
            one, several = (found[way] for way in WAYS)
            shown = [f"{a / world.size / b:.2f}" for a, b in zip(one, several, strict=True)]
            print(name, found, *shown, *schemes, flush=True)
    if world.rank == 0:
        record = gpu_machine.facts(asked.commit) | {
            "shape": [1, HEADS, asked.length, COLUMNS],
            "dtype": "bfloat16",
            "ranks": world.size,
            "calls": asked.calls,
            "rounds": asked.rounds,
            "milliseconds": rows,
        }
        gpu_machine.write(record, "ranks", asked.folder)


if __name__ == "__main__":
    main()
