"""Properties of many errors together: the second tier, beside the bound of each element.

They draw 32 heads of standard normal numbers, with few keys or with many, and with weights that are
alike or that few keys have. They hold with every option; bias and sink are used where there are
such.
"""

from __future__ import annotations

from typing import Any

from ..cases import Problem
from ..judge import PropertyError
from ..simulated import Inputs
from ..subject import GRADIENTS, Subject
from ..typical import draw, typical_errors
from .base import a_property

# Few keys with unequal weights: what is added to a row's sum shows.
SIZES: tuple[dict[str, Any], ...] = ({}, {"keys": 32, "factor": 4.0})
WIDE_SIZES = {"rows": 16, "keys": 128, "width": 16}  # long double has no BLAS


def _drawn(s: Subject, p: Problem) -> Inputs:
    size = SIZES[int(p.rng.integers(len(SIZES)))]
    if p.dtype.itemsize == 8:
        size = WIDE_SIZES | size
    if "lengths" not in s.features:
        size = {**size, "rows": size.get("keys", 128), "keys": size.get("keys", 128)}
    return draw(p.dtype, p.rng, bias="bias" in s.features, sink="sink" in s.features, **size)


def _options(given: Inputs) -> dict[str, Any]:
    options = {"bias": None if given.bias is None else given.bias[None], "sink": given.sink}
    return {name: x for name, x in options.items() if x is not None}


def _judge(s: Subject, p: Problem, given: Inputs, got: dict[str, Any]) -> None:
    for each in typical_errors(given, got, s.precision(p.dtype)):
        if each.problem:
            raise PropertyError(each.problem)


@a_property(weight=0.1)
def errors_are_typical(s: Subject, p: Problem) -> None:
    """O and L: the errors' root mean square and shift are those of the stated arithmetic."""
    given = _drawn(s, p)
    rows = s.attend(*(x[None] for x in given[:3]), **_options(given))
    lse = None if rows.lse is None else rows.lse[0]
    _judge(s, p, given, {"out": rows.out[0], "lse": lse})


@a_property("backward", weight=0.1)
def gradient_errors_are_typical(s: Subject, p: Problem) -> None:
    """dQ, dK, dV, dbias and dsink: the same, with the O and L that the forward returned."""
    given = _drawn(s, p)
    arrays = (given.do, *given[:3])
    made = s.gradients(*(x[None] for x in arrays), **_options(given))
    got = {
        name: x if x is None or name == "dsink" else x[0]
        for name, x in zip(GRADIENTS, made, strict=True)
    }
    _judge(s, p, given, got)
