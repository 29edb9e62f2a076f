"""Names that were misspelt: which of those there are was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a clause for an error, such as ``"; did you mean causal?"``; empty if none is near.

    Parameters
    ----------
    name : str
        What came.
    known : iterable of str
        What there is.
    """
    near = nearest(name, known)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def nearest(name: str, known: Iterable[str], most: int = 2) -> list[str]:
    """Return the names like one that is not among them, the most similar first."""
    by_lower = {each.lower(): each for each in known}
    return [by_lower[each] for each in difflib.get_close_matches(name.lower(), by_lower, most)]
