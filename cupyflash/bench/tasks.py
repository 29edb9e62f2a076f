"""Tasks to time: small calls and whole programs, which a contender does or refuses by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .contenders import Job, RefusalError
from .measure import Gpu, Meter, Work
from .torch_peers import find

Maker = Callable[[Meter, str], "Works"]  # of a meter and the dtype
OURS, STANDARD, SDPA = "cupyflash", "standard", "torch-sdpa"
NAMES = (OURS, STANDARD, SDPA)
CALLS = 20  # in a run, at most
RUN = 5e8  # operations of a run on the CPU, where it has several calls
NOTHING = "it has nothing that does this task"


@dataclass(frozen=True)
class Task:
    """A task of a suite.

    Attributes
    ----------
    suite, name : str
        Which suite it belongs to, and what it is.
    dtype : str
        Of its arrays.
    each : str
        What a time is of, in a word: call, token, step and others.
    moved : int
        Bytes between memory and chip, by count; 0 where nothing is counted.
    """

    suite: str
    name: str
    dtype: str
    each: str = "call"
    moved: int = 0

    @property
    def words(self) -> list[str]:
        """What it is, line by line."""
        return [self.name]


class Memory(NamedTuple):
    """How the memory of a task is measured.

    Attributes
    ----------
    whole : callable
        Does the task, and before it all that has to be there for it.
    peak : callable
        Returns the bytes that a function holds at its peak.
    """

    whole: Work
    peak: Callable[[Work], int]


@dataclass(frozen=True)
class Works:
    """How contenders do a task.

    Attributes
    ----------
    works : mapping of str to callable
        By the contender's name, what returns a function that does the task.
    arrays : callable
        Turns what such a function returns into arrays of the meter's array module.
    count : int
        How many calls, tokens or steps one run of such a function does.
    host : bool
        Whether the host's time is measured, and not the device's.
    tolerance : float or None
        How far results may be from the first contender's, as a share of their norm; None for that
        of the dtype.
    memory : mapping of str to callable
        By the contender's name, what returns its `Memory`; none where memory is not measured.
    """

    works: Mapping[str, Callable[[], Work]]
    arrays: Callable[[Any], list[Any]]
    count: int = 1
    host: bool = False
    tolerance: float | None = None
    memory: Mapping[str, Callable[[], Memory]] = field(default_factory=dict)


def calls(meter: Meter, flops: float) -> int:
    """Return how many calls of so many operations are a run."""
    return 1 if isinstance(meter, Gpu) else int(np.clip(RUN // flops, 1, CALLS))


def repeated(work: Work, count: int) -> Work:
    """Return a function that calls another one `count` times, and returns its last result."""

    def run() -> Any:
        for _ in range(count - 1):
            work()
        return work()

    return run


@dataclass(frozen=True)
class TaskSuite:
    """Tasks, and who is timed on them.

    Attributes
    ----------
    what : str
        What it is, in words.
    name : str
        Its name.
    makers : mapping of str to callable
        By a task's name, what returns its `Works`.
    dtype : str
        Of arrays.
    each : mapping of str to str
        By a task's name, what its time is of, where that is not a call.
    contenders : tuple of str
        Who is timed, in order.
    dtypes : mapping of str to str
        By a task's name, that of its arrays, where it is another one.
    moved : mapping of str to int
        By a task's name, the bytes that are counted.
    """

    what: str
    name: str
    makers: Mapping[str, Maker]
    dtype: str
    each: Mapping[str, str]
    contenders: tuple[str, ...] = NAMES
    dtypes: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, int] = field(default_factory=dict)

    def tasks(self) -> Iterator[Task]:
        """Yield the tasks."""
        for name in self.makers:
            dtype = self.dtypes.get(name, self.dtype)
            each, moved = self.each.get(name, "call"), self.moved.get(name, 0)
            yield Task(self.name, name, dtype, each, moved)

    def job(self, meter: Meter, task: Task, contender: str) -> Job:
        """Make a task ready, or raise `RefusalError`."""
        made = self.makers[task.name](meter, task.dtype)
        if contender not in made.works:
            raise RefusalError(NOTHING)
        work = made.works[contender]()
        measured = made.memory.get(contender)
        whole, peak = (work, None) if measured is None else measured()
        return Job(
            work, whole, made.arrays, peak,
            tolerance=made.tolerance, count=made.count, host=made.host,
        )  # fmt: skip


def torch_of() -> Any:
    """Return PyTorch, or raise `RefusalError` with the remedy."""
    torch, why = find()
    if torch is None:
        raise RefusalError(why)
    return torch
