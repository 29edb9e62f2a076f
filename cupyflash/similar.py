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
    """Return the names like one that is not among them: those that begin so, or similar ones."""
    by_lower, wanted = {each.lower(): each for each in known}, name.lower()
    begun = [each for each in by_lower if wanted and each.startswith(wanted)]
    found = begun[:most] or difflib.get_close_matches(wanted, by_lower, most)
    return [by_lower[each] for each in found]
