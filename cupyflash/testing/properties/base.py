"""What a property is: a function of a kernel and a problem, and what it needs from both."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupyflash import masks
from cupyflash.arrays.dtypes import DTYPES

from ..cases import Problem
from ..judge import wide
from ..subject import Rows, Subject

__all__ = [
    "ROUNDED",
    "WIDE",
    "Property",
    "a_property",
    "allowed_by",
    "cut_rows",
    "default_scale",
    "per_head",
    "some_mask",
    "wide",
]

Array = np.ndarray[Any, Any]
WIDE = ("bfloat16", "float32", "float64")  # types with a wide exponent
ROUNDED = tuple(
    x.name for x in DTYPES.values() if x.accumulator != x.name
)  # types that are computed in a wider type


@dataclass(frozen=True)
class Property:
    """A statement about every kernel.

    Attributes
    ----------
    name : str
        Its name.
    formula : str
        What it claims: the first line of the function's docstring.
    check : callable
        ``check(subject, problem)`` raises `PropertyError` if the property does not hold.
    needs : frozenset of str
        What a kernel must have for it: features, and functions among backward, varlen,
        varlen_backward and combine.
    dtypes : tuple of str or None
        Types of q, k and v that it applies to; None for all.
    draws : str
        "plain": arrays (2, H, L, D) without options; "any": all options that the kernel supports;
        "packed": the same with packed sequences.
    more : dict
        Other arguments of the strategy.
    weight : float
        How many examples it gets for each one that was asked for.
    """

    name: str
    formula: str
    check: Callable[[Subject, Problem], None]
    needs: frozenset[str]
    dtypes: tuple[str, ...] | None = None
    draws: str = "plain"
    more: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0


def a_property(
    needs: str = "",
    dtypes: tuple[str, ...] | None = None,
    draws: str = "plain",
    weight: float = 1.0,
    **more: Any,
) -> Callable[[Callable[[Subject, Problem], None]], Property]:
    """Make a property of a function: its name and formula are the function's."""

    def make(function: Callable[[Subject, Problem], None]) -> Property:
        formula = inspect.getdoc(function) or ""
        return Property(
            name=function.__name__,
            formula=formula.partition("\n")[0],
            check=function,
            needs=frozenset(needs.split()),
            dtypes=dtypes,
            draws=draws,
            more=more,
            weight=weight,
        )

    return make


def some_mask(s: Subject, p: Problem) -> dict[str, Any]:
    """Draw no mask, a causal one or a window, as far as the kernel knows them."""
    known: list[Any] = [None]
    if "causal" in s.features:
        known.append(masks.causal())
    if "masks" in s.features:
        known.append(masks.window(6, 2))
    mask = known[int(p.rng.integers(len(known)))]
    return {} if mask is None else {"mask": mask}


def allowed_by(options: dict[str, Any], p: Problem) -> Array:
    """Return which pairs a mask among the options allows, (1 or B, 1 or H, Lq, Lk)."""
    shape = (p.q.shape[2], p.k.shape[2])
    if "mask" not in options:
        return np.ones((1, 1, *shape), bool)
    made: Array = options["mask"].to_array(1, 1, *shape)
    return made


def per_head(p: Problem, x: Array) -> Array:
    """Repeat shared heads: one for each query head."""
    return np.repeat(x, p.q.shape[1] // x.shape[1], axis=1)


def cut_rows(rows: Rows, *where: Any) -> Rows:
    """Return a part of O and of L."""
    return Rows(rows.out[where], None if rows.lse is None else rows.lse[where])


def default_scale(p: Problem) -> Any:
    """Return 1/sqrt(D) to long double's precision."""
    return 1 / np.sqrt(np.longdouble(p.q.shape[-1]))
