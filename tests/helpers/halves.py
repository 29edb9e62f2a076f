"""Matrices of similar cases: some of them are quick tests, all others are thorough ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def mostly_thorough(
    names: str | tuple[str, ...],
    cases: Iterable[Any],
    *,
    quick: Collection[Any] | Callable[[Any], bool],
    why: str,
    ids: Any = None,
) -> pytest.MarkDecorator:
    """Return `parametrize` of the names and cases, most of which have the marker `thorough`.

    Parameters
    ----------
    quick : collection or function
        The cases without the marker, or what says whether a case is one of them.
    why : str
        What the quick cases show, so that the others may wait.
    """
    every = list(cases)
    is_quick = quick if callable(quick) else quick.__contains__
    kept = [case for case in every if is_quick(case)]
    assert kept, "no case is quick: mark the whole test"
    assert callable(quick) or len(kept) >= len(quick), "a quick case is none of the cases"
    one = isinstance(names, str) and "," not in names
    thorough = pytest.mark.thorough(why)
    made = [
        case if is_quick(case) else pytest.param(*([case] if one else case), marks=thorough)
        for case in every
    ]
    return pytest.mark.parametrize(names, made, ids=ids)
