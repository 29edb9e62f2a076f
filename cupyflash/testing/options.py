"""Masks and score changes by name: those of a problem's line, made for its sizes from its seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash import masks, scores
from cupyflash.arrays.dtypes import FLOATS
from cupyflash.expr import (
    absolute,
    clip,
    cos,
    erf,
    exp2,
    maximum,
    minimum,
    sigmoid,
    sqrt,
    tanh,
    where,
)
from cupyflash.expr.nodes import LookupTable
from cupyflash.hints.install import ML_DTYPES, extra

from .placement import Placed, random_layout

Array = np.ndarray[Any, Any]


def float_type(name: Any) -> np.dtype[Any]:
    """Return one of the four types, by name or as it is."""
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError as error:
            raise ImportError(
                "dtype is bfloat16, a type of the package ml_dtypes, which is not installed: "
                f"{ML_DTYPES} (or {extra('bf16')})"
            ) from error
        name = ml_dtypes.bfloat16
    held: np.dtype[Any] = np.dtype(name)
    return held


def known_floats() -> tuple[np.dtype[Any], ...]:
    """Return the types there are; without ml_dtypes there is no bfloat16."""
    try:
        return tuple(float_type(name) for name in FLOATS)
    except ImportError:
        return tuple(np.dtype(name) for name in FLOATS if name != "bfloat16")


@dataclass
class Sizes:
    """What options are made for; lengths are the longest of a packed problem."""

    lead: tuple[int, ...]
    heads: int
    len_q: int
    len_k: int
    totals: tuple[int, int] | None
    rng: np.random.Generator

    @property
    def batch(self) -> int:
        """Number of batch entries."""
        return math.prod(self.lead)

    def per_batch(self, low: int, high: int) -> Any:
        """Draw a number, one per flat batch entry, or one per place of the leading axes."""
        kind = self.rng.integers(3)
        shape = () if kind == 0 else (self.batch,) if kind == 1 else self.lead
        drawn = self.rng.integers(low, high + 1, shape)
        return int(drawn) if kind == 0 else drawn

    def broadcast(self, *axes: int) -> tuple[int, ...]:
        """Draw a shape that broadcasts to (*lead, *axes)."""
        full = (*self.lead, *axes)
        shape = [size if self.rng.random() < 0.65 else 1 for size in full]
        missing = int(self.rng.integers(len(full) + 1)) if self.rng.random() < 0.4 else 0
        return tuple(shape[missing:])

    def dtype(self) -> np.dtype[Any]:
        """Draw a floating type."""
        known = known_floats()
        return known[int(self.rng.integers(len(known)))]


# Random expression trees, of moderate numbers, so that problems stay well-conditioned


def _whole(z: Sizes, at: tuple[Any, ...], depth: int) -> Any:
    b, h, i, j = at
    if depth <= 0:
        p, q, c = (int(z.rng.integers(-low, low + 1)) for low in (3, 3, 9))
        return p * i + q * j + c + (b if z.rng.random() < 0.2 else 0) + h * int(z.rng.integers(2))
    x, y = (_whole(z, at, depth - 1) for _ in "xy")
    kind = int(z.rng.integers(6))
    if kind == 0:
        return minimum(x, y)
    if kind == 1:
        return maximum(x, y)
    if kind == 2:
        return x // int(z.rng.integers(1, 9))
    if kind == 3:
        return x % int(z.rng.integers(1, 9))
    if kind == 4:
        table = LookupTable(z.rng.integers(-5, 20, 7))
        return table[clip(x, 0, 6)]
    return where(_condition(z, at, depth - 1), x, absolute(y))


def _condition(z: Sizes, at: tuple[Any, ...], depth: int) -> Any:
    if depth <= 0 or z.rng.random() < 0.3:
        x, y = _whole(z, at, depth - 1), _whole(z, at, 0)
        return x <= y if z.rng.random() < 0.7 else x % int(z.rng.integers(2, 5)) != 0
    x, y = (_condition(z, at, depth - 1) for _ in "xy")
    kind = int(z.rng.integers(5))
    if kind == 4:
        return where(_condition(z, at, depth - 1), x, y)
    return (x & y, x | y, x ^ y, ~x)[kind]


def _number(z: Sizes, s: Any, at: tuple[Any, ...], depth: int) -> Any:
    if depth <= 0:
        return s
    x, y = (_number(z, s, at, depth - 1) for _ in "xy")
    factor = float(z.rng.choice([0.5, 0.75, 1.25]))  # not negative: -inf has to stay -inf
    kind = int(z.rng.integers(6))
    if kind == 0:
        return x * factor + 0.25 * tanh(_whole(z, at, 0) * 0.125)
    if kind == 1:
        return float(z.rng.choice([-3, 2])) * tanh(x * factor) + 0.25 * y
    if kind == 2:
        return minimum(x, y + factor)
    if kind == 3:
        return maximum(x, factor * y)
    if kind == 4:
        return where(_condition(z, at, depth - 1), x, factor * y)
    table = LookupTable(z.rng.standard_normal(9).astype(z.dtype()))
    return x + table[clip(_whole(z, at, depth - 1), 0, 8)]


# Masks


def _ids(z: Sizes, length: int, total: int | None) -> Array:
    shape = (length,) if z.rng.random() < 0.5 else (*z.lead, length)
    shape = shape if total is None else (total,)
    return np.sort(z.rng.integers(0, 3, shape), axis=-1)


def _segments(z: Sizes) -> masks.Mask:
    totals = z.totals or (None, None)
    if z.len_q == z.len_k and totals[0] == totals[1] and z.rng.random() < 0.5:
        return masks.segments(_ids(z, z.len_q, totals[0]))
    return masks.segments(_ids(z, z.len_q, totals[0]), _ids(z, z.len_k, totals[1]))


def _window(z: Sizes) -> masks.Mask:
    left, right = (None if z.rng.random() < 0.2 else int(z.rng.integers(20)) for _ in "lr")
    offset = None if z.rng.random() < 0.6 else z.per_batch(-5, 20)
    return masks.window(left, right, offset)


def _blocks(z: Sizes) -> masks.Mask:
    block_q, block_k = int(z.rng.integers(1, 20)), int(z.rng.integers(1, 20))
    shape = z.broadcast(z.heads, -(-z.len_q // block_q), -(-z.len_k // block_k))
    return masks.blocks(np.asarray(z.rng.random(shape) < 0.6), block_q, block_k)


def _chosen(z: Sizes) -> masks.Mask:
    block_q, block_k = int(z.rng.integers(1, 20)), int(z.rng.integers(1, 20))
    blocks, count = -(-z.len_k // block_k), int(z.rng.integers(6))
    shape = (*z.broadcast(z.heads, -(-z.len_q // block_q), 1)[:-1], count)
    indices = z.rng.integers(-2, blocks + 2, shape).astype(z.rng.choice(["i1", "i4", "i8"]))
    return masks.chosen(np.asarray(indices), (block_q, block_k))


def _tree(z: Sizes) -> masks.Mask:
    lead = z.lead if len(z.lead) == 1 and z.rng.random() < 0.5 else ()
    return masks.tree(np.asarray(z.rng.random((*lead, z.len_q, z.len_q)) < 0.5))


def _array(z: Sizes) -> Array:
    shape = z.broadcast(z.heads, z.len_q, z.len_k)
    density = z.rng.choice([0.05, 0.5, 0.95])
    layout = random_layout(z.rng, len(shape), 1, repeats=True)
    return Placed(shape, np.bool_, layout, z.rng.random(shape) < density).view


def _user_mask(z: Sizes) -> masks.Mask:
    table = LookupTable(z.rng.integers(0, max(z.len_q, 1), max(z.len_k, 1)))
    functions: list[Any] = [
        lambda b, h, i, j: (i * j + h + 2 * b) % 3 != 0,
        lambda b, h, i, j: table[j] <= i,
        lambda b, h, i, j: (0.5 * i + 3 > j) | (h == 1),
        lambda b, h, i, j: abs(i // 7 - j // 7) <= 1,
        lambda b, h, i, j: (i >= 0) & (j != 2),
        lambda b, h, i, j: (i >> 3) >= (j >> 3) - h,
        lambda b, h, i, j: (1 << (i % 5)) * sqrt(i + 1) > j,
    ]
    return masks.mask(functions[z.rng.integers(len(functions))])


MASKS: dict[str, Callable[[Sizes], masks.Mask]] = {
    "causal": lambda z: masks.causal(),
    "causal with offset": lambda z: masks.causal(z.per_batch(-z.len_q - 2, z.len_k + 2)),
    "window": _window,
    "lengths": lambda z: masks.lengths(z.per_batch(0, z.len_k)),
    "lengths of both": lambda z: masks.lengths(z.per_batch(0, z.len_k), z.per_batch(0, z.len_q)),
    "segments": _segments,
    "prefix": lambda z: masks.prefix(z.per_batch(0, z.len_k)),
    "dilated": lambda z: masks.dilated(int(z.rng.integers(1, 6))),
    "blocks": _blocks,
    "chosen": _chosen,
    "tree": _tree,
    "dense": lambda z: masks.dense(_array(z)),
    "user": _user_mask,
    "expression": lambda z: masks.mask(lambda *at: _condition(z, at, int(z.rng.integers(1, 4)))),
}


def mask_array(mask: Any, q: Array, k: Array) -> Array | None:
    """Turn the mask that a kernel is given into an array.

    Parameters
    ----------
    mask : Mask, array_like of bool, or None
        As in `cupyflash.attention`. ``mask == masks.causal()`` tells whether it is that mask, for
        kernels that have an option of their own for it.
    q, k : ndarray
        The arrays of the call.

    Returns
    -------
    ndarray of bool or None
        True means attend; it broadcasts to (..., Hq, Lq, Lk).
    """
    if not isinstance(mask, masks.Mask):
        return None if mask is None else np.asarray(mask)
    lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3])
    heads = q.shape[-3] if q.ndim > 2 else 1
    made = mask.to_array(lead, heads, q.shape[-2], k.shape[-2])
    return made if max(q.ndim, k.ndim) > 2 else made[0]


def mask_of(text: str | None, z: Sizes) -> Any:
    """Make a mask from its name, "~name", "name & name", "name | name", or "array"."""
    if text is None:
        return None
    if text == "array":
        return _array(z)
    for sign in (" & ", " | "):
        if sign in text:
            first, second = (mask_of(part, z) for part in text.split(sign, 1))
            return first & second if sign == " & " else first | second
    name = text.removeprefix("~")
    if name not in MASKS:
        known = ", ".join(MASKS)
        raise ValueError(
            f"mask: got {text!r}; expected array, or these joined by ~, & and |: {known}"
        )
    return ~MASKS[name](z) if text.startswith("~") else MASKS[name](z)


# Scores


def _alibi(z: Sizes) -> scores.Score:
    return scores.alibi(z.rng.uniform(0, 0.5, z.heads).astype(z.dtype()))


def _alibi_of_entries(z: Sizes) -> scores.Score:
    return scores.alibi(z.rng.uniform(0, 0.5, (*z.lead, z.heads)).astype(z.dtype()))


def _relative_bias(z: Sizes) -> scores.Score:
    reach = int(z.rng.integers(0, 12))
    shape = (z.heads, 2 * reach + 1) if z.rng.random() < 0.6 else (2 * reach + 1,)
    return scores.relative_bias(z.rng.standard_normal(shape).astype(z.dtype()))


def _user_score(z: Sizes) -> scores.Score:
    table = LookupTable(z.rng.standard_normal(max(z.len_k, 1)))
    functions: list[Any] = [
        lambda s, b, h, i, j: s - 0.1 * abs(i - j),
        lambda s, b, h, i, j: where((i + 2 * j) % 5 == 0, -math.inf, s),
        lambda s, b, h, i, j: s * (1 + 0.25 * h) + 0.5 * b,
        lambda s, b, h, i, j: 2 * tanh(s) + 0.25 * s,
        lambda s, b, h, i, j: s + 0.5 * sigmoid(s) - 0.25 * sqrt(absolute(i - j)),
        lambda s, b, h, i, j: s * (1 + 0.25 * cos(0.5 * (i - j))) + erf(0.5 * s),
        lambda s, b, h, i, j: s * exp2(-0.125 * absolute(i - j)) + (i + 1) ** -0.5,
        lambda s, b, h, i, j: s + table[clip(j - h, 0, max(z.len_k - 1, 0))],
    ]
    return scores.score(functions[z.rng.integers(len(functions))])


SCORES: dict[str, Callable[[Sizes], scores.Score]] = {
    "alibi": _alibi,
    "softcap": lambda z: scores.softcap(float(z.rng.choice([0.5, 2.0, 30.0]))),
    "alibi_of_entries": _alibi_of_entries,
    "relative_bias": _relative_bias,
    "user": _user_score,
    "expression": lambda z: scores.score(lambda s, *at: _number(z, s, at, 2)),
}


def scores_of(names: Sequence[str], z: Sizes) -> Any:
    """Make None, one score change, or several in order: as a list, or joined by `then`."""
    for name in names:
        if name not in SCORES:
            raise ValueError(f"scores: got {name!r}; expected some of {', '.join(SCORES)}")
    chain = [SCORES[name](z) for name in names]
    if not chain:
        return None
    if len(chain) == 1:
        return chain[0]
    return chain if len(chain) > 2 or z.rng.random() < 0.5 else chain[0].then(chain[1])
