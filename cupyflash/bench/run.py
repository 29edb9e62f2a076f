"""Run a case: compare every contender's result with the first one's, then time all in turn."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays.dtypes import DTYPES
from .cases import Case
from .contenders import Contender, Job, RefusalError, draw
from .measure import Gpu, Meter
from .results import MEASURED, REFUSED, WRONG, Result, Row, TaskRow
from .tasks import NOTHING, Task, TaskSuite

# How far a result may be from the first contender's, as a share of its norm: some roundings of the
# stored type, and half of the accumulator's digits. This finds wrong attention, not bad rounding;
# for that, there is `cupyflash verify`.
_ACCUMULATED = {"float32": 1e-3, "float64": 1e-8}
TOLERANCE = {
    name: min(3e-2, 16 * dtype.unit_roundoff + _ACCUMULATED[dtype.accumulator])
    for name, dtype in DTYPES.items()
}
ROUNDED_PENALTIES = 5e-2  # some peers take ALiBi's slopes in 16 bits
WARM_UP = {"cpu": 1, "gpu": 3}  # rounds of a case; a task has many calls before it is timed
Progress = Callable[[Case | Task, str], None]


def run_case(
    meter: Meter,
    case: Case,
    contenders: Sequence[Contender],
    *,
    runs: int,
    seconds: float,
    graphs: bool = False,
    progress: Progress = lambda case, doing: None,
) -> Row:
    """Check and time one case.

    Parameters
    ----------
    meter : Meter
        The meter of the device.
    case : Case
        The problem.
    contenders : sequence of Contender
        The results of the others are compared with those of the first one that can do the case.
    runs : int
        The most runs for a median.
    seconds : float
        No round of runs begins after this time; at least one runs.
    graphs : bool, optional
        Time replays of CUDA graphs.
    progress : callable, optional
        Called with the case and what is being done: a contender's name, or "timing".

    Returns
    -------
    Row
        A result for every contender.
    """
    found = _computed(meter, case, contenders, runs, seconds, graphs, progress)
    _release(meter, contenders)
    return Row(case, found)


def _computed(
    meter: Meter,
    case: Case,
    contenders: Sequence[Contender],
    runs: int,
    seconds: float,
    graphs: bool,
    progress: Progress,
) -> tuple[Result, ...]:
    try:
        inputs = draw(meter, case)
    except MemoryError as error:  # CuPy's error is one, too
        reason = f"there is no memory for its arrays ({str(error).partition(chr(10))[0]})"
        return tuple(Result(x.name, REFUSED, reason) for x in contenders)
    tolerance = TOLERANCE[case.dtype]
    if case.variant == "alibi" and DTYPES[case.dtype].itemsize == 2:
        tolerance = ROUNDED_PENALTIES
    return _run(
        meter, contenders, lambda x: x.prepare(meter, case, inputs), tolerance, runs, seconds,
        lambda doing: progress(case, doing), graphs,
        WARM_UP["gpu" if isinstance(meter, Gpu) else "cpu"],
    )  # fmt: skip


def run_task(
    meter: Meter,
    suite: TaskSuite,
    task: Task,
    contenders: Sequence[Contender],
    *,
    runs: int,
    seconds: float,
    progress: Progress = lambda task, doing: None,
) -> TaskRow:
    """Check and time one task.

    Parameters
    ----------
    meter : Meter
        The meter of the device.
    suite : TaskSuite
        The suite of the task.
    task : Task
        What is done.
    contenders, runs, seconds, progress
        As in `run_case`.

    Returns
    -------
    TaskRow
        A result for every contender that has something for the task, with seconds for each call,
        token or step.
    """
    found = _run(
        meter, contenders, lambda x: suite.job(meter, task, x.name), TOLERANCE[task.dtype], runs,
        seconds, lambda doing: progress(task, doing),
    )  # fmt: skip
    _release(meter, contenders)
    return TaskRow(task, tuple(x for x in found if x.reason != NOTHING))


def _release(meter: Meter, contenders: Sequence[Contender]) -> None:
    meter.release()
    for contender in contenders:
        contender.release(meter)


def _run(
    meter: Meter,
    contenders: Sequence[Contender],
    prepare: Callable[[Contender], Job],
    tolerance: float,
    runs: int,
    seconds: float,
    progress: Callable[[str], None],
    graphs: bool = False,
    warm_up: int = 0,
) -> tuple[Result, ...]:
    """Let all compute once, and compare; then time all that are right."""
    results: dict[str, Result] = {}
    jobs: dict[str, Job] = {}
    wanted: list[Any] | None = None
    for contender in contenders:
        name = contender.name
        progress(name)
        try:
            job = prepare(contender)
            result, job, found = _ready(name, job, wanted, tolerance, graphs)
        except Exception as error:  # noqa: BLE001 (libraries refuse in many ways; all are told)
            results[name] = Result(name, REFUSED, why(error))
            continue
        results[name] = result
        if result.status == MEASURED:
            jobs[name] = job
            wanted = wanted or found  # nothing of a contender that expects something else
        del job, found
    del wanted
    progress("timing")
    for name, outcome in _timed(meter, jobs, runs, seconds, warm_up).items():
        if isinstance(outcome, Exception):
            results[name] = Result(name, REFUSED, why(outcome))
        else:
            low, median, high = quartiles([x / jobs[name].count for x in outcome])
            results[name] = replace(
                results[name], seconds=median, low=low, high=high, runs=len(outcome)
            )
    return tuple(results.values())


def _ready(
    name: str, job: Job, wanted: list[Any] | None, tolerance: float, graphs: bool
) -> tuple[Result, Job, list[Any]]:
    """Let a contender compute once, and compare; its result has no times yet."""
    if graphs and job.capture is None:
        raise RefusalError("it is not replayed as a CUDA graph; without --graphs it is timed")
    found = list(job.arrays(job.work()))
    distance = difference(found, wanted if job.expected is None else job.expected())
    if graphs and job.capture is not None:
        work, places = job.capture()
        work()
        distance = worse(distance, difference(list(job.arrays(places)), found))
        job = replace(job, work=work)
    tolerance = max(tolerance, job.tolerance or 0.0)
    if not distance <= tolerance:
        told = f"its result differs by {distance:.2g} of its norm from that of the first contender"
        if job.expected is not None:
            told = f"its result differs by {distance:.2g} of its norm from that of its codes"
        elif wanted is None:
            told = "its result is not finite, or changes from run to run"
        number = distance if math.isfinite(distance) else None  # which JSON would not know
        return Result(name, WRONG, told, difference=number), job, found
    peak = None if job.peak_memory is None else job.peak_memory(job.whole)
    result = Result(name, MEASURED, peak_bytes=peak, difference=distance, key_bytes=job.key_bytes)
    return result, job, [] if job.expected is not None else found


def difference(found: Sequence[Any], wanted: Sequence[Any] | None) -> float:
    """Return the largest norm of a difference, divided by the norm of the expected result.

    Without an expected result, return 0 if all results are finite, and NaN otherwise.
    """
    if wanted is None:
        return worse(*(norm(x) * 0 for x in found))
    if [x.shape for x in found] != [x.shape for x in wanted]:
        return float("inf")
    tiny = float(np.finfo(np.float32).tiny)
    return worse(*(distance(a, b) / max(norm(b), tiny) for a, b in zip(found, wanted, strict=True)))


def worse(*numbers: float) -> float:
    """The largest number; NaN if one is."""
    return float(np.max(numbers))


def norm(x: Any) -> float:
    """The Euclidean norm."""
    wide = x.astype(np.promote_types(x.dtype, np.float32), copy=False)
    return math.sqrt(float((wide * wide).sum(dtype=np.float64)))


def distance(a: Any, b: Any) -> float:
    """The norm of a difference."""
    wide = np.promote_types(np.promote_types(a.dtype, b.dtype), np.float32)
    return norm(a.astype(wide) - b.astype(wide))


def _timed(
    meter: Meter, jobs: dict[str, Job], runs: int, seconds: float, warm_up: int
) -> dict[str, list[float] | Exception]:
    """Run everybody once a round, each round begun by another one; return seconds, or errors."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    errors: dict[str, Exception] = {}
    begin = time.perf_counter()
    for number in range(-warm_up, runs):
        if number == 0:
            begin = time.perf_counter()
        if number > 0 and time.perf_counter() - begin > seconds:
            break
        names = [name for name in jobs if name not in errors]
        first = number % len(names) if names else 0
        for name in names[first:] + names[:first]:
            try:
                meter.settle()
                job = jobs[name]
                taken = (meter.host_seconds if job.host else meter.seconds)(job.work)
            except Exception as error:  # noqa: BLE001 (as above)
                errors[name] = error
                continue
            if number >= 0:
                times[name].append(taken)
    return {**times, **errors}


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, median, high


def why(error: Exception) -> str:
    """Say in one line why a contender did not do a case."""
    words = str(error).strip().partition("\n")[0]
    if isinstance(error, RefusalError):
        return words
    if is_out_of_memory(error):
        return f"it ran out of memory ({words})"
    return f"{type(error).__name__}: {words}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of any library says that memory is short."""
    return isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__
