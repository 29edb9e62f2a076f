"""Every property of attention that the kit knows, as a named function with its formula.

``PROPERTIES`` holds them in the order in which `verify` runs them; those that find the most faults
come first. The following properties are not run, for the reasons given; every report lists them,
too.

============================  ====================================================================
other tiles, splits, threads  no option chooses them; the package's own tests do
other streams                 no option chooses one
third derivatives             they do not exist
============================  ====================================================================

In addition, every call of every property checks three things: results have the right shapes and
types, inputs do not change, and the guards of NaN around every array are intact.
"""

from __future__ import annotations

from . import (
    appending,
    cached,
    calls,
    codes,
    dropout,
    forward,
    gradients,
    keys,
    nonfinite,
    packed,
    rotary,
    symmetry,
    tangents,
    typical,
)
from .base import Property

NOT_APPLICABLE = {
    "other tiles, splits, threads": "no option chooses them; the package's own tests do",
    "other streams": "no option chooses one",
    "third derivatives": "they do not exist",
}

_FIRST = (
    forward.forward_within_bound,
    gradients.gradients_within_bound,
    packed.packed_within_bound,
    packed.packed_gradients_within_bound,
    cached.cached_within_bound,
    nonfinite.unseen_keys_reach_no_row,
    calls.twice_is_the_same,
    calls.strides_do_not_matter,
)


def _all() -> dict[str, Property]:
    modules = (
        *(forward, typical, keys, symmetry, gradients, dropout, nonfinite, packed, calls),
        tangents,
        *(cached, appending, rotary, codes),
    )
    found = {each.name: each for each in _FIRST}
    for module in modules:
        for each in vars(module).values():
            if isinstance(each, Property):
                found.setdefault(each.name, each)
    return found


PROPERTIES: dict[str, Property] = _all()

__all__ = ["NOT_APPLICABLE", "PROPERTIES", "Property"]
