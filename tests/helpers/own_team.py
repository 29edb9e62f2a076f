"""What tests see of the team that shares short calls, and how one has it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cupyflash.reference.cpu import team

PATIENCE = 60.0


def word(place: int) -> ctypes.c_int64:
    """One of the words of `team.AT`."""
    made = team.of_process()
    assert made is not None, "this system has a team"
    return ctypes.c_int64.from_address(made.block + 8 * place)


@contextmanager
def another_call_has_the_team() -> Iterator[None]:
    """Take the team, once other calls have given it back."""
    deadline = time.monotonic() + PATIENCE
    while word(team.AT.taken).value:
        assert time.monotonic() < deadline
    word(team.AT.taken).value = 1
    try:
        yield
    finally:
        word(team.AT.taken).value = 0


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the regions that calls begin; the list has their number at the end."""
    before = word(team.AT.turn).value
    seen: list[int] = []
    yield seen
    seen.append(word(team.AT.turn).value - before)
