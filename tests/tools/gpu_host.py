"""Where the host's time of small calls on a GPU goes: the whole call, and without parts of it.

    python tests/tools/gpu_host.py

Each row is a call that is recognised. `all` is the whole; `plain` has launches that never begin
early; `python` has no launches, so that it is the package and CuPy's memory alone. Below are CuPy's
parts, each alone. Times are medians over runs of 20 calls, for which an idle device has room, in
microseconds.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

import cupyflash
from cupyflash import masks
from cupyflash.gpu import driver, launch
from cupyflash.problem import replay

CALLS, RUNS = 20, 200


def microseconds(cupy: Any, call: Callable[[], Any], runs: int = RUNS) -> float:
    """Return the time until a call returns, while the device has room for it."""
    for _ in range(3):
        call()
    times = []
    for _ in range(runs):
        cupy.cuda.get_current_stream().synchronize()
        before = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - before) / CALLS)
    return 1e6 * statistics.median(times)


def calls(cupy: Any) -> dict[str, Callable[[], Any]]:
    """Return small calls by name."""
    made = np.random.default_rng(0).standard_normal

    def draw(*shape: int, count: int = 3) -> list[Any]:
        return [cupy.asarray(made(shape).astype(np.float16)) for _ in range(count)]

    dense, packed = draw(1, 8, 128, 64), draw(8, 512, 64)
    (q,), (k, v) = draw(1, 6, 1, 48, count=1), draw(1, 6, 512, 48, count=2)
    lengths, growing = cupy.asarray(np.array([250], np.int32)), itertools.cycle(range(200, 300))
    ends = np.arange(5, dtype=np.int32) * 128
    offsets = {name: cupy.asarray(ends.astype(name)) for name in ("int32", "int64")}
    varlen = functools.partial(cupyflash.attention_varlen, *packed)
    cached = functools.partial(cupyflash.attention_cached, q, k, v)
    window = masks.window(64, 0)
    found = {
        "attention": lambda: cupyflash.attention(*dense),
        "attention_cached": lambda: cached(lengths),
        "attention_cached, a window": lambda: cached(lengths, mask=window),
        "attention_cached, a number that grows": lambda: cached(next(growing)),
        "attention_varlen, host": lambda: varlen(ends, ends),
    }
    for (name, each), check in itertools.product(offsets.items(), (None, False, True)):
        found[f"attention_varlen, {name}, check={check}"] = functools.partial(
            varlen, each, each, check=check
        )
    return found


@contextmanager
def never_early() -> Iterator[None]:
    """Let kernels begin when the ones before have ended."""
    with (
        mock.patch.object(driver, "OVERLAP_DRIVER", 2**31),
        mock.patch.object(replay, "_entries", {}),
    ):
        driver.queue.cache_clear()
        yield
    driver.queue.cache_clear()


def _launch_nothing(*_: Any) -> None:
    pass


def table(cupy: Any, runs: int = RUNS) -> dict[str, list[float]]:
    """Return the times of calls, and of CuPy's parts."""
    rows = {}
    for name, call in calls(cupy).items():
        times = [microseconds(cupy, call, runs)]
        with never_early():
            times.append(microseconds(cupy, call, runs))
        with mock.patch.object(launch.CompiledLaunches, "start", _launch_nothing):
            times.append(microseconds(cupy, call, runs))
        rows[name] = times
    queue = driver.queue(cupy.cuda.runtime.getDevice())
    parts = {
        "memory": lambda: cupy.cuda.alloc(1 << 16),
        "an array": lambda: cupy.ndarray((1, 8, 128, 64), np.float16),
        "the stream": queue.current_stream,
        "whether it is captured": lambda: queue.current_stream().is_capturing(),
        "the device": queue.is_here,
    }
    return rows | {name: [microseconds(cupy, part, runs)] for name, part in parts.items()}


def main() -> int:
    import cupy

    print(f"{'':45}{'all':>8}{'plain':>8}{'python':>8}")
    for name, times in table(cupy).items():
        print(f"{name:45}" + "".join(f"{each:8.1f}" for each in times), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
