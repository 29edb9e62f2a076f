"""What it costs to notice changed arrays on a GPU: forward and backward, with `check` and without.

    python tests/tools/gpu_changes.py                  the table, and a record in tests/data/gpu
    python tests/tools/gpu_changes.py --folder DIR     the record goes elsewhere

Each shape is timed in turns, without and with. Times are medians: of the device, between events; of
the host, until the calls return; of the backward alone; and of the launch that sums, alone, with
the bytes that it reads in a second.
"""

from __future__ import annotations

import argparse
import itertools
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
TARGET = 0.3  # seconds of a turn
TURNS = 9


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


def host_alone(cupy: Any, call: Callable[[], Any]) -> float:
    """Return the seconds until a call returns, while the device has nothing else to do."""
    found = []
    for _ in range(40):
        cupy.cuda.get_current_stream().synchronize()
        before = time.perf_counter()
        call()
        found.append(time.perf_counter() - before)
    return statistics.median(found)


def measure(cupy: Any, shape: tuple[Any, ...]) -> dict[str, Any]:
    """Return the times of one shape, in milliseconds and microseconds."""
    *sizes, dtype, causal = shape
    rng = cupy.random.default_rng(0)
    q, k, v, do = (rng.standard_normal(sizes, np.float32).astype(dtype) for _ in range(4))
    options: dict[str, Any] = {"mask": masks.causal()} if causal else {}

    def call(**more: Any) -> Callable[[], Any]:
        return lambda: cupyflash.attention_vjp(q, k, v, **options, **more)[1](do)

    ways = {"without": call(check=False), "checked": call()}
    for work in ways.values():  # everything is compiled
        work(), work()
    count = max(3, min(2000, int(TARGET / timed(cupy, ways["without"], 3)[0])))
    device: dict[str, list[float]] = {name: [] for name in ways}
    host: dict[str, list[float]] = {name: [] for name in ways}
    for _, (name, work) in itertools.product(range(TURNS), ways.items()):
        device[name].append(timed(cupy, work, count)[0])
        host[name].append(host_alone(cupy, work))
    ms = {name: round(1e3 * statistics.median(x), 4) for name, x in device.items()}
    us = {name: round(1e6 * statistics.median(x), 1) for name, x in host.items()}
    out, lse, vjp = cupyflash.attention_vjp(q, k, v, return_lse=True, **options)

    def backward() -> Any:
        return cupyflash.attention_backward(do, q, k, v, out, lse, **options)

    backward()
    alone = timed(cupy, backward, count)[0]
    nbytes, sums = sum(x.nbytes for x in (q, k, v, out, lse)), vjp._sums
    words = {"sums": cupy.zeros(64, np.uint64).data.ptr}
    summing = timed(cupy, lambda: sums._kind.sums.forward(sums._addresses | words), count)[0]
    return {
        "shape": sizes, "dtype": dtype, "causal": causal,
        "ms": ms, "host_us": us, "backward_ms": round(1e3 * alone, 4),
        "sums": {"ms": round(1e3 * summing, 4), "GB/s": round(nbytes / summing / 1e9)},
        "more": round((ms["checked"] - ms["without"]) / (1e3 * alone), 4),
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
    worst = max(row["more"] for row in rows)
    print(f"at most {100 * worst:.1f} % of the backward")
    return 0


if __name__ == "__main__":
    sys.exit(main())
