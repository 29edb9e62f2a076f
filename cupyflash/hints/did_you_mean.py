"""Misspelt names: which known name was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a clause for an error, such as ``"; did you mean causal?"``; empty if none is near.

    Parameters
    ----------
    name : str
        The name that was given.
    known : iterable of str
        The names that exist.
    """
    near = nearest(name, known)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def nearest(name: str, known: Iterable[str], most: int = 2) -> list[str]:
    """Return the known names that begin with `name`, or else those that are similar to it."""
    by_lower, wanted = {each.lower(): each for each in known}, name.lower()
    begun = [each for each in by_lower if wanted and each.startswith(wanted)]
    found = begun[:most] or difflib.get_close_matches(wanted, by_lower, most)
    return [by_lower[each] for each in found]
