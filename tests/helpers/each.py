"""A rule about many things as one test, which tells all that break it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def holds_for_each(things: Iterable[T], rule: Callable[[T], None]) -> None:
    """Assert that a rule, which raises AssertionError, holds for each of at least one thing."""
    broken, count = [], 0
    for thing in things:
        count += 1
        try:
            rule(thing)
        except AssertionError as error:
            broken.append(f"{thing}: {error}")
    assert count, "there is nothing to check"
    assert not broken, "\n".join(broken)
