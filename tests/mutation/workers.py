"""Every mutant in a process of its own: it may crash, or never end."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from forks import fork

LIMIT = 300  # seconds of the wall, for whatever is stuck and takes no time of its own

Item = TypeVar("Item")
Trial = Callable[[Item, Path], tuple[str, str]]


class Outcome(NamedTuple):
    """What became of a mutant.

    Attributes
    ----------
    status : str
        "killed", "timeout", "survived", "equivalent" or "invalid".
    why : str
        What noticed it.
    seconds : float
        How long it took.
    """

    status: str
    why: str
    seconds: float


class _Child(NamedTuple):
    pid: int
    pipe: int
    folder: str
    began: float


def _start(trial: Trial[Item], item: Item) -> _Child:
    folder = tempfile.mkdtemp(prefix="cupyflash-mutant-")
    reader, writer = os.pipe()
    pid = fork()
    if pid == 0:
        faulthandler.disable()  # a crash is what is looked for
        os.close(reader)
        os.setpgid(0, 0)  # so that a compiler that it started ends with it
        try:
            status, why = trial(item, Path(folder))
            os.write(writer, json.dumps((status, why[:300])).encode())
        except BaseException as error:  # noqa: BLE001 - whatever it is, it was noticed
            os.write(
                writer, json.dumps(("killed", f"{type(error).__name__}: {error}"[:300])).encode()
            )
        finally:
            os._exit(0)
    os.close(writer)
    return _Child(pid, reader, folder, time.monotonic())


def _end(child: _Child, timed_out: bool) -> Outcome:
    if timed_out:
        os.killpg(child.pid, signal.SIGKILL)
    _, ended = os.waitpid(child.pid, 0)
    data = b"" if timed_out else os.read(child.pipe, 8192)
    os.close(child.pipe)
    shutil.rmtree(child.folder, ignore_errors=True)
    seconds = time.monotonic() - child.began
    if timed_out:
        return Outcome("timeout", f"after {LIMIT} s", seconds)
    if os.WIFSIGNALED(ended):
        number = os.WTERMSIG(ended)
        if number == signal.SIGVTALRM:
            return Outcome("timeout", "a launch does not end", seconds)
        return Outcome("killed", signal.Signals(number).name, seconds)
    status, why = json.loads(data)
    return Outcome(status, why, seconds)


def outcomes(
    trial: Trial[Item], items: Iterable[Item], jobs: int = 1, until: float = float("inf")
) -> Iterator[tuple[Item, Outcome]]:
    """Try every item, `jobs` at a time; none is begun after `until`, a time of `time.monotonic`."""
    waiting = iter(items)
    running: dict[int, tuple[Item, _Child]] = {}
    more = True
    while more or running:
        while more and len(running) < jobs:
            item = next(waiting, None) if time.monotonic() < until else None
            if item is None:
                more = False
                break
            child = _start(trial, item)
            running[child.pipe] = item, child
        ready, _, _ = select.select(list(running), [], [], 1.0)
        for pipe in list(running):
            item, child = running[pipe]
            late = time.monotonic() - child.began > LIMIT
            if pipe in ready or late:
                del running[pipe]
                yield item, _end(child, late and pipe not in ready)
