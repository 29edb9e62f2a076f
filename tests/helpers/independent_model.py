"""Attention, its gradients and bounds of their rounding errors, written from the papers alone.

It shares no line with the package and imports NumPy only, so that a mistake of the specification is
no mistake here. Everything is materialised, as (B, Hq, Lq, Lk).

Milakov & Gimelshein 2018 (softmax), Dao et al. 2022 (FlashAttention, appendix B: the gradients),
Higham 2002 (section 3.1: gamma_n).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from independent_words import Array, Sequence, allowed, changed, kept

BLOCK = 32  # keys of a tile at least: more tiles, more rescalings


@dataclass(frozen=True)
class Arithmetic:
    """What a kernel computes with: unit roundoffs, errors of functions, limits."""

    unit: float  # of sums
    exp: float  # relative error of the exponential, absolute error of the logarithm
    tiny: float  # smallest normal number of sums
    largest: float  # largest number of sums
    operand: float = 0.0  # unit to which weights are rounded before the second product
    operand_tiny: float = 0.0
    lag: float = 0.0  # logarithm of the largest weight before the division
    cut: int = 1  # 2 where sums are cut off instead of rounded
    scaled: bool = (
        False  # keys and values are codes, whose scale is one more factor of each product
    )

    def gamma(self, n: Any) -> Any:
        x = np.asarray(n, np.float64) * self.unit * self.cut
        return np.where(x < 1, x / np.maximum(1 - x, 1e-300), np.inf)


STORED = {  # unit roundoff, absolute error below the normal range, largest number
    "float64": (2.0**-53, 2.0**-1022, float(np.finfo(np.float64).max)),
    "float32": (2.0**-24, 2.0**-126, float(np.finfo(np.float32).max)),
    "float16": (2.0**-11, 2.0**-25, 65504.0),
    "bfloat16": (2.0**-8, 2.0**-126, 3.3895313892515355e38),
}


def arithmetic(dtype: str, tensor_cores: bool = False) -> Arithmetic:
    """Return what arrays of a type are computed with."""
    sums = "float64" if dtype == "float64" else "float32"
    unit, tiny, largest = STORED[sums]
    exp = 2.0**-50 if sums == "float64" else 2.0**-22
    if tensor_cores and dtype in ("float16", "bfloat16"):
        operand, operand_tiny, _ = STORED[dtype]
        return Arithmetic(unit, exp, tiny, largest, operand, operand_tiny, 8 * np.log(2), 2)
    if dtype in ("float16", "bfloat16"):  # a CPU with AMX rounds weights to 16 bits
        return Arithmetic(unit, exp, tiny, largest, 2.0**-16, tiny)
    return Arithmetic(unit, exp, tiny, largest)


@dataclass
class Options:
    """What is asked for beside q, k and v."""

    mask: tuple[Any, ...] | None = None
    scores: tuple[tuple[Any, ...], ...] = ()
    bias: Array | None = None
    sink: Array | None = None
    scale: float | None = None
    dropout: float = 0.0
    seed: int = 0


class Bounded(NamedTuple):
    """Exact values and bounds of the errors of computed ones, infinite where nothing is known."""

    exact: Array
    bound: Array


class Block(NamedTuple):
    """Exact values and bounds of one block of pairs, per query head."""

    out: Bounded
    lse: Bounded
    low: Array  # least and largest value that a row sees; infinite where out may be anything
    high: Array
    sums: dict[str, tuple[Array, Array, Array]]  # of gradients: exact, errors, magnitudes


def _product(a: Array, seen: Array, x: Array) -> Array:
    """Return a @ x, where what is not seen does not count even if it is no number."""
    clean = np.isfinite(x)
    result = a @ np.where(clean, x, 0)
    return result if clean.all() else np.where(seen.astype(float) @ ~clean > 0, np.nan, result)


def _known(x: Array) -> Array:
    return np.where(np.isnan(x), np.inf, x)


def _size(x: Any) -> Array:
    x = np.abs(np.asarray(x).astype(np.float64))
    return np.where(np.isfinite(x), x, 0)


def _growth(p: Array, log_p: Array, a: Array) -> Array:
    """Return p (exp(a) - 1), where p may have underflowed."""
    return np.where(p > 0, np.where(a < 1, p * np.expm1(np.minimum(a, 1)), np.exp(log_p + a)), 0)


@np.errstate(all="ignore")
def solve(
    q: Array, k: Array, v: Array, at: Sequence, o: Options, ar: Arithmetic, out_type: str,
    do: Array | None = None, dlse: Array | None = None,
) -> Block:  # fmt: skip
    """Compute one block; q, k, v are (B, Hq, L, D) in the type of the exact values."""
    work, u = q.dtype.type, ar.unit
    depth, width = q.shape[-1], v.shape[-1]
    shape = (*q.shape[:3], k.shape[2])
    seen = np.broadcast_to(True if o.mask is None else allowed(o.mask, at), shape)
    scale = 1 / np.sqrt(work(depth)) if o.scale is None else work(o.scale)
    size = float(abs(scale))
    products = _size(q) @ _size(k).swapaxes(-1, -2)
    s = scale * (q @ k.swapaxes(-1, -2))
    lost = ar.tiny * (size * depth + 1 + (products if size < ar.tiny else 0))
    e = ar.gamma(depth + 3 + ar.scaled) * size * products + lost
    e = np.where(np.maximum(products, size * products) < ar.largest / 2, e, np.inf)
    t, slope, slope_error = s, np.ones(shape, q.dtype), np.zeros(shape)
    for score in o.scores:
        c = changed(score, t, e, at, u)
        e = np.where(_size(c.value) + _known(c.error) < ar.largest, c.error, np.inf)
        e = np.where(np.isneginf(c.value), 0, e) + 2 * ar.tiny
        slope_error = _size(slope) * c.slope_error + slope_error * (_size(c.slope) + c.slope_error)
        t, slope = c.value, slope * c.slope
        slope_error = slope_error + u * _size(slope) + ar.tiny
    if o.bias is not None:
        bias = at.pairs(o.bias).astype(np.float64).astype(q.dtype)
        e = e + u * _size(bias) + u * (_size(t + bias) + e)
        t = np.where(np.isneginf(bias), -np.inf, t + bias)  # hides even what is no number
    seen = seen & ~np.isneginf(t)
    t, e = np.where(seen, t, -np.inf), np.where(seen, _known(e), 0)
    slope, slope_error = np.where(seen, slope, 0), np.where(seen, _known(slope_error), 0)

    # The softmax, and what becomes of the errors of logits.
    count = seen.sum(-1)
    m = t.max(-1, initial=-np.inf)
    sink = None
    if o.sink is not None:
        sink = o.sink.astype(np.float64).astype(q.dtype)[None, :, None]
        m = np.maximum(m, sink)
    m = np.where(np.isneginf(m), 0, m)
    p = np.where(seen, np.exp(t - m[..., None]), 0)
    l = p.sum(-1) + (0 if sink is None else np.exp(sink - m))
    lse = np.where(l == 0, -np.inf, m + np.log(l))
    divisor = np.where(l == 0, 1, l)
    p = p / divisor[..., None]
    tiles = shape[-1] // BLOCK + 2
    reach = (_size(t) * seen + e).max(-1, initial=0)
    if sink is not None:
        reach = np.maximum(reach, _size(sink))
    a = e + 3 * u * (_size(t) * seen + e + reach[..., None]) + (tiles + 1) * ar.exp
    g = ar.gamma(count + 2 * tiles + 4)
    log_p = np.where(seen, (t - lse[..., None]).astype(np.float64), -np.inf)
    weight = np.exp(ar.lag)
    flushed = weight * ar.tiny / divisor.astype(np.float64)
    theta = _growth(p, log_p, a + g[..., None]).sum(-1) + count * flushed
    p_sink = None
    if sink is not None:
        p_sink = np.where(l == 0, 0, np.exp(sink - lse))
        theta = theta + _growth(
            p_sink, (sink - lse).astype(float), g + reach * 7 * u + tiles * ar.exp
        )
    theta = np.where(_known(theta) < 0.5, theta, np.inf)
    z = np.ones(shape)
    if o.dropout:
        rest = 1 - round(o.dropout * 2**15) / 2**15
        z = np.where(kept(o.seed, o.dropout, at), 1 / work(rest), work(0))
    out = _product(p * z, seen, v)
    visible = _size(v)
    through = _size(z) * seen @ visible
    rounding = ar.operand + 2 * u * ar.scaled
    numerator = (_growth(p, log_p, a + g[..., None] + rounding) * _size(z)) @ visible
    numerator = numerator + (flushed + ar.operand_tiny / divisor)[..., None] * (
        through + count[..., None]
    )
    left = 1 - np.minimum(theta, 0.5)
    error = (numerator + theta[..., None] * _size(out)) / left[..., None]
    empty = count == 0
    fits = (weight * through < ar.largest / 2) & ~np.isinf(_known(e)).any(-1)[..., None]
    error = np.where(fits, _known(error), np.inf)
    b_out = np.where(empty[..., None], 0, stored(out, error, out_type))
    b_lse = -np.log1p(-np.minimum(theta, 0.5)) + np.where(np.isinf(theta), np.inf, 0) + ar.exp
    b_lse = b_lse + 4 * u * (reach + _size(np.log(divisor)) + 1 + 2 * ar.lag) + u * _size(lse)
    b_lse = np.where(l == 0, 0, np.where(empty & (sink is None), 0, _known(b_lse)))
    finite = np.isfinite(v)[..., None, :, :] & seen[..., None]
    limits = [
        f(np.where(finite, v[..., None, :, :], worst), axis=-2, initial=worst)
        for f, worst in ((np.min, np.inf), (np.max, -np.inf))
    ]
    hull = fits & ~empty[..., None] & ~np.isnan(out) & (not o.dropout)
    low, high = (np.where(hull, x, w) for x, w in zip(limits, (-np.inf, np.inf), strict=True))
    if sink is not None:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    result = Block(Bounded(out, b_out), Bounded(lse, b_lse), low, high, {})
    if do is None:
        return result

    # Gradients: dv = Pᵀ do, dP = do vᵀ, delta = rowsum(do out), dS = P (dP - delta + dlse).
    dlse = np.zeros(lse.shape, q.dtype) if dlse is None else dlse
    dp = np.where(seen, z * (do @ v.swapaxes(-1, -2)), 0)
    delta = (do * np.where(empty[..., None], 0, out)).sum(-1)
    dt = np.where(seen, p * (dp - (delta - dlse)[..., None]), 0)
    ds = np.where(seen, dt * slope, 0)
    b_p = e + b_lse[..., None] + 4 * u * (_size(t) * seen + e + _size(lse)[..., None]) + 2 * ar.exp
    e_p = np.where(seen, _growth(p, log_p, b_p) + ar.tiny, 0)
    exact_pz, p = np.where(seen, p * z, 0), p.astype(np.float64)
    sums = _size(do) @ visible.swapaxes(-1, -2)
    along = (_size(do) * _size(out)).sum(-1)
    e_delta = (_size(do) * b_out).sum(-1) + ar.gamma(width + 1) * (
        along + (_size(do) * b_out).sum(-1)
    ) + ar.tiny * width  # fmt: skip
    inner = _size(dp) + (_size(delta) + _size(dlse))[..., None]
    h = ar.gamma(width + 4) * _size(z) * sums + e_delta[..., None] + ar.tiny * width
    w = h + 3 * u * (inner + h)
    fits_row = (along < ar.largest / 2)[..., None] & (_size(z) * sums < ar.largest / 2)
    gap = _size(np.where(seen, dp - (delta - dlse)[..., None], 0))
    e_t = e_p * (gap + w) + p * w + 2 * u * (p + e_p) * (gap + w) + ar.tiny
    e_t = np.where(seen, np.where(fits_row, _known(e_t), np.inf), 0)
    e_s = e_t * (_size(slope) + slope_error) + _size(dt) * slope_error
    e_s = np.where(seen, _known(e_s + u * (_size(ds) + e_s) + ar.tiny), 0)
    if ar.operand:
        e_s = np.where(
            seen,
            e_s + ar.operand * (_size(ds) + e_s) + ar.operand_tiny * _size(ds).max(initial=1),
            0,
        )
    size_s = _size(ds) + e_s
    seen_t = seen.swapaxes(-1, -2)
    pz = p * _size(z)
    e_v = np.where(
        seen,
        e_p * _size(z)
        + (ar.operand + 2 * u) * (pz + e_p * _size(z))
        + (ar.tiny + ar.operand_tiny) * (1 + _size(z)),  # z may be a factor of the whole sum
        0,
    )

    def flip(x: Array) -> Array:
        return x.swapaxes(-1, -2)

    def product(
        a: Array, pairs: Array, x: Array, errors: Array, sizes: Array, factor: Any = 1
    ) -> tuple[Array, Array, Array]:
        # Each step of a sum may lose what is below the smallest normal number, before the factor.
        lost = ar.tiny * (1 + float(abs(factor))) * pairs.sum(-1)[..., None]
        errors = float(abs(factor)) * _times(errors, _size(x)) + lost
        return factor * _product(a, pairs, x), errors, _times(sizes, _size(x))

    sums_of = {
        "dq": product(ds, seen, k, e_s, size_s, scale),
        "dk": product(flip(ds), seen_t, q, flip(e_s), flip(size_s), scale),
        "dv": product(flip(exact_pz), seen_t, do, flip(e_v), flip(pz * seen + e_v)),
        "dbias": (dt, e_t, _size(dt) + e_t),
    }  # fmt: skip
    nobody = ~seen.any(-2)[..., None]
    for name, none in (("dq", empty[..., None]), ("dk", nobody), ("dv", nobody)):
        exact, errors, sizes = sums_of[name]
        sums_of[name] = exact, np.where(none, 0, errors), np.where(none, 0, sizes)
    if p_sink is not None:
        ps, sizes = p_sink.astype(np.float64), _size(dlse) + along
        b = b_lse + 4 * u * (_size(sink) + _size(lse)) + 2 * ar.exp
        errors = _growth(ps, (sink - lse).astype(float), b) * (sizes + e_delta) + ps * (
            e_delta + 2 * u * sizes
        )
        dsink = np.where((ps == 0) | np.isneginf(sink), 0, p_sink * (dlse - delta))
        parts = (dsink, _known(errors + ar.tiny), _size(dsink))
        sums_of["dsink"] = tuple(x.sum(-1) for x in parts)  # type: ignore[assignment]
    return result._replace(sums=sums_of)


def _times(a: Array, b: Array) -> Array:
    """Multiply matrices of bounds; infinite where an operand is that b does not make 0."""
    finite = np.isfinite(a)
    result = np.where(finite, a, 0) @ b
    return (
        result if finite.all() else np.where((~finite).astype(float) @ (b >= 0) > 0, np.inf, result)
    )


def stored(exact: Any, error: Array, dtype: str) -> Array:
    """Add the rounding to the type of a result; infinite where that may overflow."""
    unit, tiny, largest = STORED[dtype]
    size = np.abs(np.asarray(exact).astype(np.float64))  # infinite beyond float64
    bound = (1 + unit) * error + unit * size + tiny
    return np.where(size + bound < largest, bound, np.inf)


class Shapes(NamedTuple):
    """The shapes of a call: leading axes, heads, lengths, and offsets where it is packed."""

    lead: tuple[int, ...]
    heads: int
    len_q: int
    len_k: int
    flat: bool  # two-dimensional arrays are one head
    offsets: tuple[list[int], list[int]] | None = None

    @classmethod
    def of(cls, q: Array, k: Array, v: Array, offsets: Any = None) -> Shapes:
        lead = np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
        flat = q.ndim == k.ndim == v.ndim == 2
        heads = q.shape[-3] if q.ndim > 2 else 1
        return cls(lead, heads, q.shape[-2], k.shape[-2], flat, offsets)

    @property
    def longest(self) -> tuple[int, int]:
        if self.offsets is None:
            return self.len_q, self.len_k
        q, k = (max(np.diff(x), default=0) for x in self.offsets)
        return int(q), int(k)

    def blocks(self) -> Iterator[tuple[slice, slice, Sequence]]:
        """Return the rows of q, the rows of k and the positions of what is computed alone."""
        if self.offsets is None:
            sizes = (int(np.prod(self.lead)), self.heads, self.len_q, self.len_k)
            positions = np.ogrid[tuple(map(slice, sizes))]
            at = Sequence(self.lead, *positions, self.len_q, self.len_k, self.heads)
            yield slice(None), slice(None), at
            return
        pairs = [list(itertools.pairwise(x)) for x in self.offsets]
        for s, ((q0, q1), (k0, k1)) in enumerate(zip(*pairs, strict=True)):
            _, h, i, j = np.ogrid[:1, : self.heads, : q1 - q0, : k1 - k0]
            b, lead = np.full((1, 1, 1, 1), s), (len(pairs[0]),)
            at = Sequence(
                lead, b, h, i, j, q1 - q0, k1 - k0, self.heads, q0, k0, True, self.longest
            )
            yield slice(q0, q1), slice(k0, k1), at


@np.errstate(all="ignore")
def attention(
    q: Array, k: Array, v: Array, o: Options, dtype: str, ar: Arithmetic, offsets: Any = None,
    do: Array | None = None, dlse: Array | None = None,
) -> tuple[dict[str, Bounded], Array, Array]:  # fmt: skip
    """Return exact results by name with their bounds, and between what the output lies."""
    shapes = Shapes.of(q, k, v, offsets)
    packed, heads = offsets is not None, shapes.heads
    lead = () if packed else shapes.lead
    work = np.longdouble if dtype == "float64" else np.float64
    batch, width = int(np.prod(lead)), v.shape[-1]

    def wide(x: Array, rows: slice) -> Array:
        x = x.astype(np.float64).astype(work)[(None,) if x.ndim == 2 else ()]
        x = np.broadcast_to(x, (*lead, *x.shape[-3:])).reshape(batch, *x.shape[-3:])[:, :, rows]
        return np.repeat(x, heads // x.shape[1], axis=1)

    def like(x: Array, *tail: int) -> Array:
        return x.astype(np.float64).astype(work).reshape(batch, heads, shapes.len_q, *tail)

    def empty(*tail: int, count: int = 3) -> list[Array]:
        return [np.zeros((batch, heads, *tail), work if n == 0 else float) for n in range(count)]

    n = len(offsets[0]) - 1 if packed else batch
    rows_of = {"dq": (shapes.len_q, q), "dk": (shapes.len_k, k), "dv": (shapes.len_k, v)}
    sums = {name: empty(rows, x.shape[-1]) for name, (rows, x) in rows_of.items()}
    sums["dbias"] = [np.zeros((n, heads, *shapes.longest), x.dtype) for x in sums["dq"]]
    sums["dsink"] = [np.zeros((n, heads), x.dtype) for x in sums["dq"]]
    out, lse = empty(shapes.len_q, width, count=4), empty(shapes.len_q, count=2)
    lse[0][...] = -np.inf
    for rows, columns, at in shapes.blocks():
        dos = None if do is None else like(do, width)[:, :, rows]
        dlses = None if dlse is None else like(dlse)[:, :, rows]
        x = solve(wide(q, rows), wide(k, columns), wide(v, columns), at, o, ar, dtype, dos, dlses)
        for target, part in zip((*out, *lse), (*x.out, x.low, x.high, *x.lse), strict=True):
            target[:, :, rows] = part
        for name, parts in x.sums.items():
            for target, part in zip(sums[name], parts, strict=True):
                if name in ("dbias", "dsink"):
                    here = at.b.ravel()
                    target[(here, slice(None), *map(slice, part.shape[2:]))] = part
                else:
                    target[:, :, rows if name == "dq" else columns] = part

    def shaped(x: Array) -> Array:
        return x.reshape(x.shape[2:] if shapes.flat else (*lead, *x.shape[1:]))

    results = {"out": Bounded(*map(shaped, out[:2])), "lse": Bounded(*map(shaped, lse))}
    if do is not None:
        scale = float(1 / np.sqrt(q.shape[-1]) if o.scale is None else abs(o.scale))
        inner = {"dq": shapes.len_k, "dk": shapes.len_q, "dv": shapes.len_q, "dsink": shapes.len_q}
        likes = {"dq": q, "dk": k, "dv": v, "dbias": o.bias, "dsink": o.sink}
        for name, array in likes.items():
            if array is None:
                continue
            axes = (n,) if packed and name == "dbias" else lead
            exact, errors, sizes = (_summed(x, axes, array.shape, name) for x in sums[name])
            terms = inner.get(name, 1) * max(1, sums[name][0].size // max(1, exact.size))
            factor = scale if name in ("dq", "dk") else 1
            with np.errstate(all="ignore"):
                errors = errors + ar.gamma(terms + 4) * factor * sizes
                fits = max(1, factor) * sizes < ar.largest / 2
                errors = np.where(fits, _known(errors), np.inf)
            bound = np.where(sizes + errors == 0, 0, stored(exact, errors, array.dtype.name))
            results[name] = Bounded(exact, bound)
    return results, shaped(out[2]), shaped(out[3])


def _summed(x: Array, lead: tuple[int, ...], shape: tuple[int, ...], name: str) -> Array:
    """Sum over all that was broadcast or shared: query heads of a group, leading axes."""
    if name == "dsink":
        return x.sum(0)
    full = shape if len(shape) > 2 else (1,) * (3 - len(shape)) + shape
    heads = x.shape[1]
    x = x.reshape(*lead, full[-3], heads // max(1, full[-3]), *x.shape[2:]).sum(-3)
    full = (1,) * (x.ndim - len(full)) + full
    axes = tuple(n for n, size in enumerate(full) if size == 1)
    return x.sum(axis=axes, keepdims=True).reshape(shape)


@np.errstate(all="ignore")
def combine(parts: list[tuple[Bounded, Bounded]], dtype: str, ar: Arithmetic) -> dict[str, Bounded]:
    """Join parts by their LSE (FlashAttention, section 3.1), given what they may be wrong by."""
    lses = np.stack([lse.exact for _, lse in parts])
    wrong = np.stack([lse.bound for _, lse in parts])
    m = lses.max(0)
    m = np.where(np.isneginf(m), 0, m)
    total = np.exp(lses - m).sum(0)
    lse = np.where(total == 0, -np.inf, m + np.log(total))
    weights = np.where(np.isneginf(lses), 0, np.exp(lses - lse))
    size = _size(lses).max(0)
    terms = len(parts) + 4
    e_lse = wrong.max(0) + ar.gamma(terms) + 6 * ar.unit * (size + np.log(terms)) + 3 * ar.exp
    out, error = np.zeros(parts[0][0].exact.shape, lses.dtype), np.zeros(parts[0][0].exact.shape)
    for weight, (part, _) in zip(weights, parts, strict=True):
        x = weight[..., None] * part.exact
        out = out + x
        off = (wrong.max(0) + e_lse + 8 * ar.unit * size + 2 * ar.exp)[..., None]
        off = np.expm1(off + ar.gamma(terms))
        e = off * _size(x) + np.where(
            weight[..., None] > 0, (1 + off) * weight[..., None] * part.bound, 0
        )
        error = error + e + ar.tiny * (1 + _size(part.exact))
    nothing = np.isneginf(lse)
    bound = np.where(nothing[..., None], 0, stored(out, _known(error), dtype))
    return {"out": Bounded(out, bound), "lse": Bounded(lse, np.where(nothing, 0, e_lse))}
