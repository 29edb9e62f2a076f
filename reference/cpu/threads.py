"""The CPU's threads: work items are handed out in order to threads that are free.

Kernels release the GIL, so Python's threads are enough, and any number of callers may share them.
Every item is computed in the same way by any thread, so results do not depend on the threads.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def num_threads() -> int:
    """Return how many threads a call uses: ``CUPYFLASH_NUM_THREADS``, else the process's CPUs."""
    chosen = os.environ.get("CUPYFLASH_NUM_THREADS", "").strip()
    if chosen:
        if not chosen.isdecimal() or int(chosen) < 1:
            raise ValueError(
                f"CUPYFLASH_NUM_THREADS is {chosen!r}; expected a whole number, 1 or more. "
                "Correct this environment variable, or unset it for one thread per CPU."
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


_SHORT, _LONG = 0.02, 0.1  # seconds that a chunk should take; Ctrl-C takes effect between chunks


class _Job:
    """One call's items: threads take them in chunks until none is left, or one chunk has failed.

    A kernel has only addresses, so the job holds the arrays that they belong to. A helper holds the
    job: even if its caller leaves, the memory that it writes to exists.
    """

    def __init__(
        self, run: Callable[[int, int], None], items: int, most: int, arrays: object
    ) -> None:
        self._run: Callable[[int, int], None] | None = run
        self._arrays: object = arrays
        self._items, self._most = items, most
        self._next = 0
        self._taking = threading.Lock()
        self._changed = threading.Condition()
        self._helpers = 0  # helpers at work
        self._closed = False
        self._error: BaseException | None = None

    def _take(self, chunk: int) -> tuple[int, int]:
        with self._taking:
            first = self._next
            self._next = last = min(first + chunk, self._items)
        return first, last

    def work(self) -> None:
        """Compute chunks; keep an exception for `finish`."""
        chunk, run = 1, self._run
        assert run is not None
        try:
            while self._error is None:
                first, last = self._take(chunk)
                if first == last:
                    return
                begin = time.perf_counter()
                run(first, last)
                seconds = time.perf_counter() - begin
                if seconds > _LONG:
                    chunk = max(1, chunk // 2)
                elif seconds < _SHORT:
                    chunk = min(2 * chunk, self._most)
        except BaseException as error:  # noqa: BLE001 (`finish` raises it)
            self._error = self._error or error

    def help(self) -> None:
        """Work as a helper, unless the caller has gone: kernels write to memory that it owns."""
        with self._changed:
            if self._closed:
                return
            self._helpers += 1
        self.work()
        with self._changed:
            self._helpers -= 1
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until nobody works any more, then raise what a chunk raised."""
        while True:
            try:
                with self._changed:
                    self._closed = True
                    self._changed.wait_for(lambda: not self._helpers)
                    self._run = self._arrays = None  # a late helper may hold the job for a while
                break
            except KeyboardInterrupt as again:  # a second Ctrl-C, while memory is being written
                self._error = self._error or again
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            error = None  # it holds this frame


def parallel(run: Callable[[int, int], None], items: int, arrays: object = None) -> None:
    """Call ``run(first, last)`` over all of ``range(items)``, in chunks, on several threads.

    The caller works, too, so that callers that share the pool never wait for each other's turn. If
    a chunk raises an exception, it is raised here once all threads have stopped; chunks that have
    not begun are left out. Chunks are short, so that Ctrl-C soon takes effect.

    Parameters
    ----------
    run : callable
        Computes the items from `first` up to, but not including, `last`.
    items : int
        How many there are.
    arrays : object
        Any object that holds the arrays whose addresses `run` uses. They stay alive as long as any
        thread computes.
    """
    workers = min(num_threads(), items)
    if not items:
        return
    job = _Job(run, items, max(1, items // (workers * 16)), arrays)
    if workers == 1:
        job.work()
        job.finish()
        return
    try:
        # If no thread can be started (there is a limit, or the interpreter is ending), fewer
        # threads do the work.
        with contextlib.suppress(RuntimeError):
            pool = _shared_pool(workers - 1)
            for _ in range(workers - 1):
                pool.submit(job.help)
        job.work()
    finally:
        job.finish()
