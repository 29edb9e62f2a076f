"""OpenMP's threads of another library, which compute calls between that library's own.

GNU's OpenMP lets its threads spin for up to 20 ms after a parallel region. Threads of our own would
share the cores with them, and take twice as long. So within `ThreadsOf`, a call begins a parallel
region of that library, in which the caller works as usual. The library still has the two functions
by which compilers began and ended a region before OpenMP 4: they call nothing on the caller's
thread.

The region must be ended by the thread that began it, whatever signals come: `_Team.ending` is one
call of C.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from .float_modes import own_arithmetic

_SERVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Job(Protocol):
    """What threads compute together, see `threads`."""

    items: int

    def work(self) -> None:
        """Compute chunks until none is left."""

    def fail(self, error: BaseException) -> None:
        """Keep an exception, and let the other threads stop."""


class _Team:
    """The functions of a library of OpenMP that is loaded.

    Attributes
    ----------
    size : callable
        How many threads a region of the calling thread gets.
    level : callable
        In how many regions the calling thread is.
    addresses : list of int
        Those of both, and of what computes a whole region, a function that each thread calls.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.size, self.level = library.omp_get_max_threads, library.omp_get_level
        self.size.restype = self.level.restype = ctypes.c_int
        self._start, self._end = library.GOMP_parallel_start, library.GOMP_parallel_end
        self._start.argtypes, self._start.restype = (_SERVE, ctypes.c_void_p, ctypes.c_uint), None
        self._end.argtypes, self._end.restype = (ctypes.c_int,), None  # which it ignores

        named = library.omp_get_max_threads, library.omp_get_level, library.GOMP_parallel
        self.addresses = [ctypes.cast(x, ctypes.c_void_p).value or 0 for x in named]

    def start(self, caller: int) -> None:
        """Begin a region, whose other threads work on the job of a thread."""
        self._start(_serve, caller, self.size())

    def ending(self) -> Iterator[Any]:
        """Return an iterator that ends the region that begins from now on, if one begins."""
        return map(self._end, iter(self.level, self.level()))


_team: _Team | None = None
_callers: set[int] = set()  # threads that compute by regions of `_team`
# By the thread whose region computes it: the job, and the threads that may still help.
_jobs: dict[int, tuple[Job, Iterator[int]]] = {}

_process = os.getpid()  # a forked one would wait for ever for the library's threads
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_callers.clear)


@_SERVE
def _serve(caller: int) -> None:
    """Work on a thread's job as one of its helpers; called by the library's threads."""
    job, helpers = _jobs[caller]
    if next(helpers, None) is not None:
        try:
            own_arithmetic(job.work)()
        except BaseException as error:  # noqa: BLE001 (the caller raises it)
            job.fail(error)


def loaded(folder: Path) -> ctypes.CDLL | None:
    """Return the library of GNU's OpenMP in a folder, if this process has loaded it (Linux).

    There is none for a process that `multiprocessing` forked, whose parent may have had regions.
    """
    if multiprocessing.parent_process() and multiprocessing.get_start_method(True) == "fork":
        return None
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return None
    here = str(folder.resolve()) + os.sep
    paths = {line.partition("/")[2] for line in lines if "libgomp" in line}
    found = sorted("/" + path for path in paths if ("/" + path).startswith(here))
    if len(found) != 1:
        return None
    try:
        library = ctypes.CDLL(found[0], mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        _Team(library)
    except (OSError, AttributeError):
        return None
    return library


class ThreadsOf:
    """Context: calls of this thread are computed by threads of a library that `loaded` returned."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __enter__(self) -> None:
        global _team
        if os.getpid() == _process:
            _team = _team or _Team(self._library)
            _callers.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        _callers.discard(threading.get_ident())


def functions() -> list[int] | None:
    """Return the process of the library, and addresses: of what tells the process, and a team's.

    None if there is no library whose threads have been asked for.
    """
    if _team is None or os.getpid() != _process:
        return None
    getpid = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value or 0
    return [_process, getpid, *_team.addresses]


def is_worth(workers: int) -> bool:
    """Whether a call of the calling thread on so many threads is computed here.

    It is not inside of a region, and not if most of the library's threads would have nothing to do:
    a smaller region than usual would end those that are left over.
    """
    if threading.get_ident() not in _callers:
        return False
    team = _team
    return team is not None and 1 < team.size() <= 2 * workers and not team.level()


def share(job: Job, workers: int) -> None:
    """Compute a job by the calling thread and some of the library's; `is_worth` was true."""
    team = _team
    assert team is not None
    caller = threading.get_ident()
    _jobs[caller] = job, iter(range(workers - 1))
    ending = team.ending()
    try:
        team.start(caller)
        job.work()
    finally:
        job.items = 0
        any(ending)
        _jobs.pop(caller, None)
