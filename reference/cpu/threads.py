"""The CPU's threads: work items are handed out in order to threads that are free.

Kernels release the GIL, so Python's threads are enough, and any number of callers may share them.
A short call of a kernel is one call of C instead, shared by the threads of `team`. Every item is
computed in the same way by any thread, so results do not depend on the threads.

A signal's handler may raise an exception in the main thread wherever Python code begins or a call
returns, so no Python code can be sure to wait. What waits here for the threads is therefore one
call of C, which no signal interrupts: a gate for each helper is closed when the helper has stopped.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from . import openmp, team
from .calls import Bound
from .chain import Chain
from .float_modes import use_usual_modes
from .thread_limits import num_threads

# Locks of Python's own C interface: unlike those of `threading`, they wait whatever signals come.
_new_lock = ctypes.CFUNCTYPE(ctypes.c_void_p)(("PyThread_allocate_lock", ctypes.pythonapi))
_acquire = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)(
    ("PyThread_acquire_lock", ctypes.pythonapi)
)
_release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(("PyThread_release_lock", ctypes.pythonapi))
_TRY, _WAIT = 0, 1


class _Gate:
    """Lets one helper into one job, until the caller closes it. It is used again afterwards.

    Whoever holds the lock has passed: a helper as long as it works, or the caller for ever. Once
    it is closed, it is opened by whoever knows that no other thread will look at it for this job:
    the caller if a helper came through, else the helper that comes late. Who does not open it may
    not even look at it any more, because it may already be the gate of another job.
    """

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock: int = _new_lock()  # never freed, since a helper may come late


class _Pool:
    """Threads that wait for jobs.

    They are daemons, which nobody has to end: they compute only while a caller waits for them.
    """

    def __init__(self) -> None:
        self.jobs: SimpleQueue[tuple[_Job, _Gate]] = SimpleQueue()
        self.size = 0
        self._gates: list[_Gate] = []  # free
        self._growing = threading.RLock()  # a signal's handler may make calls, too

    def grow(self, size: int) -> None:
        """Have so many threads, or as many as can be started."""
        # There may be a limit, or the interpreter may be ending.
        with self._growing, contextlib.suppress(RuntimeError):
            while self.size < size:
                name = f"cupyflash-{self.size}"
                threading.Thread(target=self._serve, name=name, daemon=True).start()
                self.size += 1

    def gates(self, number: int) -> list[_Gate]:
        """Return open gates."""
        found: list[_Gate] = []
        with contextlib.suppress(IndexError):
            while len(found) < number:
                found.append(self._gates.pop())
        return found + [_Gate() for _ in range(number - len(found))]

    def free(self, gate: _Gate) -> None:
        """Open a gate again, of which nobody knows any more; who calls this holds its lock."""
        _release(gate.lock)
        self._gates.append(gate)

    def _serve(self) -> None:
        use_usual_modes()
        while True:
            job, gate = self.jobs.get()
            if not _acquire(gate.lock, _TRY):  # its caller has gone
                self.free(gate)
            else:
                job.entered.append(gate)
                try:
                    job.work()
                except BaseException as error:  # noqa: BLE001 (the caller raises it)
                    job.fail(error)
                finally:
                    _release(gate.lock)
            del job, gate  # they hold arrays


_pool = _Pool()


def _forget_pool() -> None:
    # A forked child has none of its parent's threads, and perhaps a lock that one of them held.
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


SHORT, _LONG = 0.02, 0.1  # seconds that a chunk should take; Ctrl-C takes effect between chunks
AT_ONCE = 0.1  # seconds of work, as estimated, that one call of C may do
# To hand work to another thread takes about 25 us, in which the caller could have done as much.
_WORTH_A_THREAD = 1e-4  # seconds of work
_WORTH_A_CHUNK = 2.5e-4


class _Job:
    """One call's items: threads take them in chunks until none is left."""

    def __init__(
        self, run: Callable[[int, int], None], items: int, first: int, most: int, arrays: object
    ) -> None:
        self.run: Callable[[int, int], None] | None = run
        self.arrays: object = arrays
        self.items = items  # 0 if no thread is to begin another chunk
        self.error: BaseException | None = None  # of a helper
        self.entered: list[_Gate] = []  # gates through which helpers came
        self._first, self._most = first, most
        self._next = 0
        self._taking = threading.Lock()

    def _take(self, chunk: int) -> tuple[int, int]:
        with self._taking:
            first = self._next
            self._next = last = min(first + chunk, self.items)
        return first, last

    def work(self) -> None:
        """Compute chunks."""
        chunk, run = self._first, self.run
        assert run is not None
        while True:
            first, last = self._take(chunk)
            if first >= last:
                return
            begin = time.perf_counter()
            run(first, last)
            seconds = time.perf_counter() - begin
            if seconds > _LONG:
                chunk = max(1, chunk // 2)
            elif seconds < SHORT:
                chunk = min(2 * chunk, self._most)

    def fail(self, error: BaseException) -> None:
        """Keep the first exception of a helper, and let the others stop."""
        self.items = 0
        self.error = self.error or error


def workers_for(items: int, work: float | None) -> int:
    """Return how many threads are worth their while for so many items.

    `work` is as in `parallel`.
    """
    if work is None:
        return min(num_threads(), items)
    if not may_share(work):
        return 1  # to ask how many there are takes time, too
    return min(num_threads(), items, int(work / _WORTH_A_THREAD))


def may_share(work: float) -> bool:
    """Return whether two threads are worth their while for so many seconds of work."""
    return work >= 2 * _WORTH_A_THREAD


def chunks(items: int, workers: int, work: float | None) -> tuple[int, int]:
    """Return how many items the first chunk has, and how many a chunk has at most."""
    most = max(1, items // (workers * 16))
    if work is None:
        return 1, most
    each = work / workers
    of_thread = 16 if each > 16 * _WORTH_A_CHUNK else max(1, int(each / _WORTH_A_CHUNK))
    first = -(-items // (workers * max(of_thread, 1 if workers == 1 else 2)))
    if work > SHORT:
        first = max(1, min(first, int(items * SHORT / work)))
    return first, max(first, most)


def _share(job: _Job, workers: int) -> None:
    """Compute a job by the calling thread and some of the pool's."""
    pool = _pool
    if pool.size < workers - 1:
        pool.grow(workers - 1)
    gates = pool.gates(workers - 1)
    # All of it happens in C, and Python looks for signals before and after it. It begins right
    # after what raised an exception: nothing may be called before.
    closing = map(_acquire, [gate.lock for gate in gates], itertools.repeat(_WAIT))
    try:
        for gate in gates:
            pool.jobs.put((job, gate))
        job.work()
    finally:
        job.items = 0
        all(closing)
        for gate in job.entered:
            pool.free(gate)


def parallel(
    run: Callable[[int, int], None], items: int, arrays: object = None, work: float | None = None
) -> None:
    """Call ``run(first, last)`` over all of ``range(items)``, in chunks, on several threads.

    The caller works, too, so that callers that share the pool never wait for each other's turn. If
    a chunk raises an exception, or a signal's handler does, it is raised here once all threads have
    stopped; chunks that have not begun are left out. Chunks are short, so that Ctrl-C soon takes
    effect. After that, no thread writes to any array.

    Parameters
    ----------
    run : callable
        Computes the items from `first` up to, but not including, `last`. Threads call it in the
        usual floating-point modes; the caller calls it in its own (see `float_modes`).
    items : int
        How many there are.
    arrays : object
        Any object that holds the arrays whose addresses `run` uses. They stay alive as long as any
        thread computes.
    work : float, optional
        About how many seconds one thread takes for all items. By default, nothing is known.
    """
    if not items:
        return
    workers = workers_for(items, work)
    first, most = chunks(items, workers, work)
    if workers == 1 and first == items:
        run(0, items)
        return
    is_others = workers > 1 and openmp.is_worth(workers)
    may_team = workers > 1 and work is not None and work <= AT_ONCE and not is_others
    if may_team and isinstance(run, Bound | Chain) and team.compute(run, items, workers, first):
        return
    job = _Job(run, items, first, most, arrays)
    if workers == 1:
        job.work()
        return
    try:
        (openmp.share if is_others else _share)(job, workers)
    finally:
        error = job.error
        job.run = job.arrays = job.error = None  # a late helper may hold the job for a while
    if error is not None:
        try:
            raise error
        finally:
            error = None  # it holds this frame
