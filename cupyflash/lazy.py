"""What is computed once, without a lock: properties, and what later calls need again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class cached_property(Generic[T]):  # noqa: N801, as in functools
    """A property that is computed when it is first read, and kept in the object's `__dict__`.

    It is `functools.cached_property` of Python 3.12 and later. That of 3.11 has one lock for all
    objects of a class: threads wait for each other, and a process that was forked while another
    thread computed the property waits for ever. Here, two threads may compute it both.

    Parameters
    ----------
    function : callable
        What computes it from the object.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> cached_property[T] | T:
        if instance is None:
            return self
        value = self.function(instance)
        # Of two threads that compute it, both return the same object.
        kept: T = instance.__dict__.setdefault(self._name, value)
        return kept


class Kept(Generic[T]):
    """Results for later calls, by what they depend on. With too many, all are forgotten.

    Parameters
    ----------
    most : int
        How many are kept.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.results: dict[Hashable, T] = {}

    def find(self, key: Hashable) -> T | None:
        """Return the result that is kept for a key, or None."""
        return self.results.get(key)  # in one step: another thread may forget it

    def keep(self, key: Hashable, result: T) -> None:
        """Keep a result, which is not None."""
        if len(self.results) >= self.most:
            self.results.clear()
        self.results[key] = result
