"""What it costs to notice changed arrays on a GPU: forward and backward, with `check` and without.

    python tests/tools/gpu_changes.py                  the table, and a record in tests/data/gpu
    python tests/tools/gpu_changes.py --folder DIR     the record goes elsewhere

Each shape is timed in turns of as many calls as one of which is checked: without; as it is by
default behind the first calls; with every call checked; in this order and in the reverse one. Times
are of the device, between events, and of the host, until calls return. What checks cost is the
median of the differences between turns that follow each other, so that a clock that drifts is in
neither; it has the quartiles, and what the same difference is of two ways that are the same. With
these are the times of the backward alone, and of the launch that sums, alone, with the bytes that
it reads in a second.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_machine
import numpy as np
from gpu_machine import RECORDS

import cupyflash
from cupyflash import masks
from cupyflash.gpu import checksum_launches

# Batch, heads, length, head size, type, causal.
SHAPES = [
    (2, 16, 8192, 128, "float16", False),
    (2, 16, 8192, 128, "float16", True),
    (1, 16, 32768, 128, "float16", True),
    (4, 16, 2048, 128, "float16", True),
    (1, 8, 2048, 64, "float16", False),
    (8, 12, 128, 64, "float16", False),
    (1, 1, 16, 64, "float32", False),
]
SECONDS, FEWEST, MOST = 2.5, 8, 200  # of the turns of a way: how long, and how many


def timed(cupy: Any, call: Callable[[], Any], count: int) -> tuple[float, float]:
    """Return the seconds of a call on the device, and on the host."""
    stream = cupy.cuda.get_current_stream()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    stream.synchronize()
    begin.record(stream)
    before = time.perf_counter()
    for _ in range(count):
        call()
    host = time.perf_counter() - before
    end.record(stream)
    end.synchronize()
    return cupy.cuda.get_elapsed_time(begin, end) / 1e3 / count, host / count


def host_alone(cupy: Any, call: Callable[[], Any], count: int) -> float:
    """Return the seconds until a call returns, while the device has nothing else to do.

    It is a mean over a number of calls, between which the device is waited for.
    """
    total = 0.0
    for _ in range(count):
        cupy.cuda.get_current_stream().synchronize()
        before = time.perf_counter()
        call()
        total += time.perf_counter() - before
    return total / count


def more(times: list[float], than: list[float], unit: float) -> list[float]:
    """Return the quartiles of the differences of turns, as shares of a time."""
    differences = [(a - b) / unit for a, b in zip(times, than, strict=True)]
    return [round(x, 4) for x in statistics.quantiles(differences, n=4)]


def measure(cupy: Any, shape: tuple[Any, ...]) -> dict[str, Any]:
    """Return the times of one shape, in milliseconds and microseconds."""
    *sizes, dtype, causal = shape
    rng = cupy.random.default_rng(0)
    q, k, v, do = (rng.standard_normal(sizes, np.float32).astype(dtype) for _ in range(4))
    options: dict[str, Any] = {"mask": masks.causal()} if causal else {}

    def call(check: bool | None) -> Callable[[], Any]:
        return lambda: cupyflash.attention_vjp(q, k, v, **options, check=check)[1](do)

    ways = {
        "without": call(False), "default": call(None), "every call": call(True),
        "without again": call(False),
    }  # fmt: skip
    for work in ways.values():  # everything is compiled, and the first calls are over
        for _ in range(checksum_launches.FIRST + 2):
            work()
    out, lse, vjp = cupyflash.attention_vjp(q, k, v, return_lse=True, check=True, **options)
    sums = vjp._sums
    count = sums._kind.every
    a_turn = timed(cupy, ways["without"], count)[0] * count
    turns = max(FEWEST, min(MOST, int(SECONDS / len(ways) / a_turn)))
    device: dict[str, list[float]] = {name: [] for name in ways}
    host: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns):
        for name in [*ways][:: 1 if turn % 2 else -1]:
            device[name].append(timed(cupy, ways[name], count)[0])
            host[name].append(host_alone(cupy, ways[name], count))
    ms = {name: round(1e3 * statistics.median(x), 4) for name, x in device.items()}
    us = {name: round(1e6 * statistics.median(x), 1) for name, x in host.items()}

    def backward() -> Any:
        return cupyflash.attention_backward(do, q, k, v, out, lse, **options)

    backward()
    several = max(count, 10)
    alone = timed(cupy, backward, several)[0]
    nbytes = sum(x.nbytes for x in (q, k, v, out, lse))
    summing = timed(cupy, lambda: sums._kind.sums.forward(sums._addresses), several)[0]
    return {
        "shape": sizes, "dtype": dtype, "causal": causal, "one_of": count,
        "ms": ms, "host_us": us, "backward_ms": round(1e3 * alone, 4),
        "sums": {"ms": round(1e3 * summing, 4), "GB/s": round(nbytes / summing / 1e9)},
        "turns": turns,
        **{f"{name.replace(' ', '_')}_more": more(x, device["without"], alone)[1]
           for name, x in device.items() if name != "without"},
        "default_quartiles": more(device["default"], device["without"], alone),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--commit", default="", help="where there is no git")
    parser.add_argument("--folder", type=Path, default=RECORDS, help="where the record goes")
    asked = parser.parse_args()
    facts = gpu_machine.facts(asked.commit)
    import cupy

    rows = []
    for shape in SHAPES:
        rows.append(measure(cupy, shape))
        print(rows[-1], flush=True)
    gpu_machine.write(facts | {"rows": rows}, "changes", asked.folder)
    worst = max(row["default_more"] for row in rows)
    print(f"by default, at most {100 * worst:.1f} % of the backward")
    return 0


if __name__ == "__main__":
    sys.exit(main())
