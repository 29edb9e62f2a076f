"""What a property may expect of results: a bound, equal bits, or a condition."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .bound import rho
from .placement import same_bits

Array = np.ndarray[Any, Any]


def wide(x: Any) -> Array:
    """Return numbers in long double."""
    return np.asarray(x).astype(np.longdouble)


class PropertyError(AssertionError):
    """A property does not hold."""


class NotClaimedError(Exception):
    """The kernel claims nothing about this problem."""


def expect(condition: Any, message: str) -> None:
    """Raise `PropertyError` with a message, and the first place, unless a condition is all true."""
    right = np.asarray(condition)
    if right.all():
        return
    if right.ndim:
        first = [int(n) for n in np.argwhere(~right)[0]]
        message += f": first at {first}, {int((~right).sum())} of {right.size} elements"
    raise PropertyError(message)


@dataclass(frozen=True)
class Worst:
    """The worst ratio of error to bound that was met.

    Attributes
    ----------
    ratio : float
        At most 1 is right.
    output : str
        The output: out, lse, dq, dk, dv, dbias or dsink.
    dtype : str
        Of q, k and v.
    index : tuple of int
        Where in the output.
    family : str
        The family of the problem's elements.
    bounded : float
        The share of all elements of this output about which the stated precision claims something.
    """

    ratio: float
    output: str
    dtype: str
    index: tuple[int, ...]
    family: str = ""
    bounded: float = 1.0


class Judge:
    """Ratios of error to bound since `start`, and how they are judged.

    Parameters
    ----------
    features : frozenset of str
        What the kernel supports: "bitwise" and "finite" change what is expected.
    """

    def __init__(self, features: frozenset[str]) -> None:
        self.features = features
        self.worst: dict[tuple[str, str], Worst] = {}
        self.families: dict[str, float] = {}  # the worst ratio of each
        self.highest = 0.0  # largest ratio since this was last set to 0
        self.family = ""  # of the problem that is tried
        self.dtype = ""  # of q, k and v
        self._judged: dict[tuple[str, str], tuple[int, int]] = {}  # elements, and bounded ones

    def start(self) -> None:
        """Forget the ratios of earlier properties."""
        self.worst.clear()
        self.families.clear()
        self._judged.clear()

    def worst_ratios(self) -> tuple[Worst, ...]:
        """Return the worst ratio by output and dtype since `start`, the largest first."""
        found = []
        for key, each in self.worst.items():
            judged, of_them = self._judged[key]
            share = of_them / judged if judged else 1.0
            found.append(dataclasses.replace(each, bounded=share))
        return tuple(sorted(found, key=lambda x: -x.ratio))

    def judge(self, name: str, actual: Any, exact: Any, bound: Any) -> None:
        """Expect a ratio of at most 1, and remember the worst."""
        bound = np.broadcast_to(bound, np.shape(exact))
        bounded = np.isfinite(bound)
        if "finite" not in self.features:  # nothing is claimed where the bound is infinite
            actual = np.where(~bounded & np.isnan(actual), exact, actual)
        worst = rho(actual, exact, bound)
        key = (name, self.dtype)
        judged, of_them = self._judged.get(key, (0, 0))
        self._judged[key] = judged + bounded.size, of_them + int(bounded.sum())
        self.highest = max(self.highest, worst.value)
        self.families[self.family] = max(self.families.get(self.family, 0.0), worst.value)
        met = self.worst.get(key)
        if met is None or worst.value > met.ratio:
            self.worst[key] = Worst(worst.value, *key, worst.index, self.family)
        if worst.value > 1:
            at = worst.index
            got, right = (float(np.asarray(x)[at]) for x in (actual, exact))
            limit = float(bound[at])
            if math.isnan(got) or math.isnan(right) or math.isinf(worst.value):
                how = f"where {right:.9g} was expected, with a bound of {limit:.3g}"
            else:
                off = abs(wide(actual)[at] - wide(exact)[at])
                how = (
                    f"where {right:.9g} was expected: off by {float(off):.3g}, "
                    f"{worst.value:.3g} times the bound of {limit:.3g}"
                )
            raise PropertyError(f"{name}{list(at)} is {got:.9g} {how}")

    def near(self, name: str, a: Any, b: Any, *bounds: Any) -> None:
        """Expect two computed arrays to differ by no more than the sum of their bounds."""
        a, b = (wide(x) for x in (a, b))
        limit = sum(np.asarray(x, np.float64) for x in bounds)
        self.judge(name, a, b, np.broadcast_to(limit, a.shape))

    def same(self, name: str, a: Any, b: Any, bound: Callable[[], Any]) -> None:
        """Expect equal bits, or without the feature "bitwise" agreement within two bounds."""
        if "bitwise" not in self.features:
            self.near(name, a, b, 2 * np.asarray(bound()))
        elif not same_bits(a, b):
            differ = _differ(a, b) & ~((a == 0) & (b == 0))  # zeros may have either sign
            if not differ.any():
                return
            where = tuple(int(n) for n in np.argwhere(differ)[0])
            raise PropertyError(
                f"{name}{list(where)} is {float(a[where])!r} one way and {float(b[where])!r} the "
                "other; equal bits were expected"
            )


def _differ(a: Array, b: Array) -> Any:
    raw = f"u{a.dtype.itemsize}"
    return np.array(a, order="C").view(raw) != np.array(b, order="C").view(raw)
