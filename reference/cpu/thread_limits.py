"""How many threads a call uses: ``CUPYFLASH_NUM_THREADS``, or the least of what others allow."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VARIABLE = "CUPYFLASH_NUM_THREADS"
# What people and schedulers set for all libraries of a process: joblib for its workers, torchrun
# for its ranks. A number for BLAS alone does not concern these threads.
OTHERS = "OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "NUMBA_NUM_THREADS"


class Limit(NamedTuple):
    """A number of threads, and in words what says so."""

    number: int
    why: str


def num_threads() -> int:
    """Return how many threads a call uses.

    Raises
    ------
    ValueError
        ``CUPYFLASH_NUM_THREADS`` is not a number of threads.
    """
    chosen = os.environ.get(VARIABLE, "").strip()
    if chosen:
        return _chosen(chosen)
    number = _affinity()
    kept = _kept_limit()
    if kept is not None and kept.number < number:
        number = kept.number
    masked = _numba_mask()
    return number if masked is None else min(number, masked)


def deciding() -> Limit:
    """Return the number of threads with what decides; raises as `num_threads` does."""
    chosen = os.environ.get(VARIABLE, "").strip()
    if chosen:
        return Limit(_chosen(chosen), f"{VARIABLE}={chosen}")
    found = [Limit(_affinity(), "the CPUs that this process may use")]
    kept, masked = _kept_limit(), _numba_mask()
    if kept is not None:
        found.append(kept)
    if masked is not None:
        found.append(Limit(masked, "numba.set_num_threads"))
    return min(found, key=lambda limit: limit.number)


def _chosen(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"{VARIABLE} is {text!r}; expected a whole number, 1 or more. Correct this "
            "environment variable, or unset it for as many threads as this process may use."
        )
    return int(text)


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _numba_mask() -> int | None:
    """Return what `numba.set_num_threads` set for this thread; None if nobody called it."""
    parallel = sys.modules.get("numba.np.ufunc.parallel")
    if not getattr(parallel, "_is_initialized", False):  # to ask would start Numba's own threads
        return None
    assert parallel is not None
    return int(parallel.get_num_threads())


@functools.cache
def _kept_limit() -> Limit | None:
    """Return the least limit of those that are read once, at the first call, as others read them.

    A value of another library's variable that is no number is not for this one to refuse.
    """
    found = []
    for name in OTHERS:
        text = os.environ.get(name, "")
        first = text.partition(",")[0].strip()  # OpenMP's list has a number for every level
        if first.isdecimal() and int(first) >= 1:
            found.append(Limit(int(first), f"{name}={text}"))
    quota = cpu_quota()
    if quota is not None:
        found.append(Limit(max(1, math.ceil(quota)), f"a quota of {quota:g} CPUs (cgroup)"))
    return min(found, key=lambda limit: limit.number, default=None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_kept_limit.cache_clear)  # it may have another environment


def cpu_quota(
    groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> float | None:
    """Return how many CPUs' time Linux gives this process, in all; None without a limit.

    Parameters
    ----------
    groups : Path
        Where control groups are mounted.
    own : Path
        The file that says which ones the process belongs to.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    shares = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            for folder in _up(groups, path):
                shares += _share(_read(folder / "cpu.max").split())
        elif "cpu" in controllers.split(","):
            for name in dict.fromkeys((controllers, "cpu")):
                for folder in _up(groups / name, path):
                    quota, period = "cpu.cfs_quota_us", "cpu.cfs_period_us"
                    shares += _share([_read(folder / quota), _read(folder / period)])
    return min(shares, default=None)


def _up(mounted: Path, path: str) -> Iterator[Path]:
    """Yield a group's folder and those above it; in a container, a group may be mounted as root."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for count in range(len(parts), -1, -1):
        yield mounted.joinpath(*parts[:count])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _share(words: list[str]) -> list[float]:
    """Return quota / period if both are numbers: without a limit, a quota is "max" or -1."""
    if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
        return [int(words[0]) / int(words[1])]
    return []
