"""The CPU's threads: work items handed out in order to whoever is free.

Kernels release the GIL, so Python's threads are enough, and any number of callers may share them.
Every item is computed the same way whoever computes it: results do not depend on the threads.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def num_threads() -> int:
    """Return how many threads a call uses: ``CUPYFLASH_NUM_THREADS``, else the process's CPUs."""
    chosen = os.environ.get("CUPYFLASH_NUM_THREADS", "").strip()
    if chosen:
        if not chosen.isdigit() or int(chosen) < 1:
            raise ValueError(
                f"CUPYFLASH_NUM_THREADS is {chosen!r}; wanted a whole number, 1 or more."
            )
        return int(chosen)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _forget_pool() -> None:
    # A forked child has none of its parent's threads, and perhaps a lock that one of them held.
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _shared_pool(workers: int) -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None or _pool._max_workers < workers:
            _pool = ThreadPoolExecutor(workers, thread_name_prefix="cupyflash")
        return _pool


def parallel(run: Callable[[int, int], None], items: int) -> None:
    """Call ``run(first, last)`` over all of ``range(items)``, in chunks, on several threads.

    The caller works too, so that callers that share the pool never wait for each other's turn. An
    exception of any chunk is raised here, once all threads have stopped.
    """
    workers = min(num_threads(), items)
    chunk = max(1, items // (workers * 16)) if workers > 1 else max(items, 1)
    starts = itertools.count(0, chunk)

    def work() -> None:
        for first in starts:
            if first >= items:
                return
            run(first, min(first + chunk, items))

    if workers <= 1:
        if items:
            run(0, items)
        return
    pool = _shared_pool(workers - 1)
    helpers = [pool.submit(work) for _ in range(workers - 1)]
    try:
        work()
    finally:
        for helper in helpers:
            if not helper.cancel():
                helper.exception()  # waits
    for helper in helpers:
        if not helper.cancelled():
            helper.result()
