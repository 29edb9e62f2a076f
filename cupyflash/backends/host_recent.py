"""Calls of arrays and a mask alone, recognised before anything else: here those on NumPy arrays.

Those on a GPU are found by `gpu.recent`, and most of those on NumPy arrays by `host_quick`. Here
are those over a cache, and of few queries over many keys.
A model in NumPy makes the same call for all its layers and, but for the length, for all its tokens.
The calls that were made again last are kept by shapes, and what is kept looks at everything else.
Other calls, and those that differ, are those of `host_replay`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

import numpy as np

from ..arrays.device_arrays import is_device_array
from ..gpu.recent import again
from ..masks import Mask
from . import host_quick

P = ParamSpec("P")
R = TypeVar("R")

MOST = 64  # keys of calls that are kept
ALIKE = 2  # calls of a key: under a window, schedules of some lengths differ
_DONE, _LOG_LEAF = 1, 6  # of `reference.cpu.repeat`, which takes long to import
_ndarray, _ONE = np.ndarray, (1,)
_empty: Any = np.empty  # what it makes is what the function returns that is called again
_INTEGERS = np.dtype(np.int64), np.dtype(np.int32)
_known: dict[Hashable, tuple[Any, ...]] = {}
if hasattr(os, "register_at_fork"):  # another thread may be making one of them
    os.register_at_fork(after_in_child=_known.clear)


def only(lengths: Any) -> int | None:
    """Return the length of all entries, if that is a number, or an array of one number."""
    if type(lengths) is int:
        return lengths
    if type(lengths) is _ndarray and lengths.shape == _ONE and lengths.dtype in _INTEGERS:
        number: int = lengths.item()
        return number
    return None


def of_cache(q: Any, k: Any, v: Any, lengths: Any, mask: Any) -> Any:
    """Compute a call over a cache that says nothing else, or return None."""
    length = lengths if type(lengths) is int else only(lengths)
    if length is None:
        return None
    of_length = (length - 1) >> _LOG_LEAF, type(lengths)
    key = q.shape, k.shape, q.itemsize, mask, of_length
    for run, block, shape, dtype, _ in _known.get(key, ()):
        out = _empty(shape, dtype)
        if run(block, q, k, v, length, out) == _DONE:
            return out
    return None


def of_one_query(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Compute a call of one query that says nothing else, or return None."""
    if k.ndim < 2:
        return None
    length = k.shape[-2]
    key = q.shape, q.itemsize, (length - 1) >> _LOG_LEAF, mask
    for run, block, shape, dtype, _ in _known.get(key, ()):
        out = _empty(shape, dtype)
        if run(block, q, k, v, length, out) == _DONE:
            return out
    return None


def recognised_cached(function: Callable[P, R]) -> Callable[P, R]:
    """Let `attention_cached` make a call again if it looks like a recent one."""

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        if len(args) == 4 and len(keywords) < 2:
            q, k, v, lengths = args
            mask = keywords.get("mask")
            made: R | None
            if type(k) is _ndarray is type(q) and (not keywords or type(mask) is Mask):
                made = of_cache(q, k, v, lengths, mask)
                if made is not None:
                    return made
            elif is_device_array(q) and (not keywords or type(mask) is Mask):
                made = again("attention_cached", q, k, v, mask, lengths)
                if made is not None:
                    return made
        return function(*args, **keywords)

    return call


def recognised_packed(function: Callable[P, R]) -> Callable[P, R]:
    """Let `attention_varlen` make a call again likewise."""

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        if len(args) == 5:
            q, k, v, *offsets = args
            on_host = type(q) is _ndarray
            if on_host or is_device_array(q):
                mask, check = keywords.get("mask"), keywords.get("check")
                if (
                    len(keywords) == ("mask" in keywords) + ("check" in keywords)
                    and (check is None or check is False)
                    and (mask is None or type(mask) is Mask)
                ):
                    made: R | None
                    if on_host:
                        made = host_quick.again(q, k, v, mask, offsets)
                    else:
                        made = again(("attention_varlen", check), q, k, v, mask, *offsets)
                    if made is not None:
                        return made
        return function(*args, **keywords)

    return call


def recognised(function: Callable[P, R]) -> Callable[P, R]:
    """Let `attention` make a call again likewise; one of one query, with any number of keys."""

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        if len(args) == 3 and len(keywords) < 2:
            q, k, v = args
            made: R | None
            if type(k) is _ndarray is type(q):
                mask = keywords.get("mask")
                if not keywords or type(mask) is Mask:
                    made = None
                    if q.shape[-2:-1] == _ONE:
                        made = of_one_query(q, k, v, mask)
                    if made is None:
                        made = host_quick.again(q, k, v, mask)
                    if made is not None:
                        return made
            elif is_device_array(q):
                mask = keywords.get("mask")
                if not keywords or type(mask) is Mask:
                    made = again("attention", q, k, v, mask)
                    if made is not None:
                        return made
        return function(*args, **keywords)

    return call


def keep_cached(q: Any, k: Any, lengths: Any, mask: Mask | None, made: Any) -> None:
    """Keep a call over a cache that can be made again, a `Repeat` of `reference.cpu`."""
    length = only(lengths)
    assert length is not None, "there is one"
    of_length = (length - 1) >> _LOG_LEAF, type(lengths)
    _keep((q.shape, k.shape, q.itemsize, mask, of_length), made)


def keep(q: Any, length: int, mask: Mask | None, made: Any) -> None:
    """Keep a call of one query likewise."""
    _keep((q.shape, q.itemsize, (length - 1) >> _LOG_LEAF, mask), made)


def least(length: int) -> int:
    """Return the least number of keys with as many leaves: they have the same key here."""
    return ((length - 1) >> _LOG_LEAF << _LOG_LEAF) + 1


def _keep(key: Hashable, made: Any) -> None:
    """Keep a call, and forget the oldest one."""
    if len(_known) >= MOST and key not in _known:
        for oldest in list(_known)[: -MOST + 1]:  # a copy: other threads keep calls, too
            _known.pop(oldest, None)
    _known[key] = made, *_known.get(key, ())[: ALIKE - 1]
