"""Properties of rotary position embeddings: the rotation, its inverse, and relative positions.

The error bound of a computed row follows from the formula x cos - y sin in the accumulator's type,
rounded once. Cosines and sines are given as float32. If a property is about the true angles, it
also allows for the rounding of these numbers, which is half a unit of that type.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cases import Problem
from ..judge import wide
from ..subject import Angles, Subject
from .base import a_property

Array = np.ndarray[Any, Any]
POSITIONS = 300
ANGLE_ERROR = 2.0**-25 + 2.0**-40  # of a float32 cosine or sine, and of the angle


def _frequencies(pairs: int) -> Array:
    return 1000.0 ** -(np.arange(pairs) / pairs)


def drawn_angles(p: Problem, width: int, positions: int = POSITIONS) -> Angles:
    """Draw how many of `width` columns are rotated, and how they are paired."""
    pairs = int(p.rng.integers(1, width // 2 + 1))
    angles = np.outer(np.arange(positions), _frequencies(pairs))
    cos, sin = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
    return Angles(cos, sin, bool(p.rng.integers(2)))


def _columns(angles: Angles) -> tuple[slice, slice]:
    pairs = angles.cos.shape[1]
    if angles.interleaved:
        return slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    return slice(0, pairs), slice(pairs, 2 * pairs)


def _turned(x: Array, cos: Array, sin: Array, angles: Angles) -> Array:
    """Rotate rows by the formula; `cos` and `sin` are (..., L, R / 2)."""
    x = wide(x)
    turned, (first, second) = x.copy(), _columns(angles)
    turned[..., first] = x[..., first] * cos - x[..., second] * sin
    turned[..., second] = x[..., second] * cos + x[..., first] * sin
    return turned


def _exact(x: Array, at: Array, angles: Angles, inverse: bool = False) -> Array:
    """Rotate by the given cosines and sines."""
    cos, sin = (wide(each)[at][..., None, :, :] for each in angles[:2])
    return _turned(x, cos, -sin if inverse else sin, angles)


def _true(x: Array, at: Array, angles: Angles) -> Array:
    """Rotate by the true angles."""
    by = wide(at)[..., None] * _frequencies(angles.cos.shape[1])
    return _turned(x, np.cos(by)[..., None, :, :], np.sin(by)[..., None, :, :], angles)


def _sums(x: Array, angles: Angles) -> Array:
    """Return |x| + |y| of each pair in both of its columns, and 0 in columns that stay."""
    sums, (first, second) = np.zeros(x.shape, np.longdouble), _columns(angles)
    both = abs(wide(x[..., first])) + abs(wide(x[..., second]))
    sums[..., first] = sums[..., second] = both
    return sums


def _limit(s: Subject, x: Array, exact: Array, angles: Angles) -> Array:
    """Return the error bound of a rotated row, which is 0 in columns that stay."""
    precision = s.precision(x.dtype)
    sums = _sums(x, angles)
    inner = precision.gamma(3) * sums + 4 * precision.underflow * (sums > 0)
    out = precision.output
    total = (1 + out.unit) * inner + out.unit * abs(exact) + out.underflow
    return np.where(sums > 0, total, 0)


def _drawn(p: Problem) -> tuple[Array, Array, Angles]:
    """Draw rows of shape (B, H, L, D), D of 2 or more, their positions and angles."""
    batch, heads, length, width = p.q.shape
    x = p.rng.standard_normal((batch, heads, length, max(width, 2))).astype(p.dtype)
    at = p.rng.integers(0, POSITIONS, (batch, length))
    return x, at.astype(p.rng.choice(["i4", "i8"])), drawn_angles(p, x.shape[-1])


@a_property("rope")
def rotated_within_bound(s: Subject, p: Problem) -> None:
    """|R' x - R x| <= B: pairs are rotated by the given cosines and sines; other columns stay."""
    x, at, angles = _drawn(p)
    for inverse in (False, True):
        exact = _exact(x, at, angles, inverse)
        ours = s.rope(x, at, angles, inverse=inverse)
        s.judge("out", ours, exact, _limit(s, x, exact, angles))


@a_property("rope")
def rotations_keep_norms(s: Subject, p: Problem) -> None:
    """|R x| = |x|, up to the rounding of cosines and sines and of the result."""
    x, at, angles = _drawn(p)
    ours, limit = s.rope(x, at, angles), _limit(s, x, _exact(x, at, angles), angles)
    limit = limit + np.longdouble(ANGLE_ERROR) * _sums(x, angles)
    norms = [np.sqrt((wide(each) ** 2).sum(axis=-1)) for each in (ours, x)]
    s.near("norm", *norms, np.sqrt((limit**2).sum(axis=-1)))


@a_property("rope")
def rotated_products_are_relative(s: Subject, p: Problem) -> None:
    """<R_i q, R_j k> = <R_(i+t) q, R_(j+t) k>: only the distance of positions counts."""
    q, at, angles = _drawn(p)
    k = p.rng.standard_normal((*q.shape,)).astype(p.dtype)
    other = p.rng.integers(0, POSITIONS, at.shape).astype(at.dtype)
    room = POSITIONS - 1 - np.maximum(at, other)
    further = np.minimum(np.full(at.shape, p.rng.integers(0, 100)), room)
    products, limits = [], []
    for t in (0 * further, further):
        true, off, made = [], [], []
        for x, near in ((q, at), (k, other)):
            where = np.asarray(near + t, at.dtype)
            made.append(wide(s.rope(x, where, angles)))
            true.append(_true(x, where, angles))
            limit = _limit(s, x, _exact(x, where, angles), angles)
            off.append(limit + np.longdouble(ANGLE_ERROR) * _sums(x, angles))
        products.append((made[0] * made[1]).sum(axis=-1))
        limit = abs(true[0]) * off[1] + off[0] * abs(true[1]) + off[0] * off[1]
        limits.append(limit.sum(axis=-1))
    s.near("product", *products, *limits)


@a_property("rope")
def rotated_back(s: Subject, p: Problem) -> None:
    """inverse=True undoes a rotation, up to the rounding of both."""
    x, at, angles = _drawn(p)
    turned = s.rope(x, at, angles)
    limit = _limit(s, x, _exact(x, at, angles), angles)
    back = _exact(turned, at, angles, inverse=True)
    limit = _sums(limit, angles) * (1 + ANGLE_ERROR) + _limit(s, turned, back, angles)
    cos, sin = (wide(each)[at][..., None, :, :] for each in angles[:2])
    stretch = np.zeros(x.shape, np.longdouble)
    for columns in _columns(angles):
        stretch[..., columns] = abs(cos**2 + sin**2 - 1)
    s.near("out", s.rope(turned, at, angles, inverse=True), x, limit + stretch * abs(wide(x)))
