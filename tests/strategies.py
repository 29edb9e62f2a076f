"""Problems for the property tests: sizes, options and memory are drawn, elements come of a seed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from placement import Layout, Placed, random_layout

from cupyflash import lookup, masks, scores
from cupyflash.expr import clip, tanh, where

Array = np.ndarray[Any, Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = tuple(np.dtype(x) for x in (np.float16, BFLOAT16, np.float32, np.float64))
MOST_PRODUCTS = {np.dtype(np.float64): 300_000}  # long double, without BLAS


@dataclass
class Problem:
    """Inputs and options of one call, and the tiles to run it with."""

    dtype: np.dtype[Any]
    family: str
    q: Array
    k: Array
    v: Array
    do: Array
    dlse: Array | None
    options: dict[str, Any]
    offsets: tuple[list[int], list[int]] | None
    tiles: tuple[int, int] | None  # None: those of the table, by the public functions
    layouts: str
    workspace: bool
    hard: bool  # logits so large that single rows may be ill-conditioned
    seed: int
    placed: list[Placed] = field(default_factory=list)

    @property
    def accumulator(self) -> np.dtype[Any]:
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    def __repr__(self) -> str:
        names = ("dtype", "family", "offsets", "tiles", "layouts", "workspace", "hard", "seed")
        parts = [f"{name}={getattr(self, name)}" for name in names]
        parts += [f"{name}{getattr(self, name).shape}" for name in ("q", "k", "v")]
        for name, value in (self.options | {"dlse": self.dlse}).items():
            shown = f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray) else value
            parts.append(f"{name}={shown}")
        return f"Problem({', '.join(parts)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would print every element


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
        return math.prod(self.lead)

    def per_batch(self, low: int, high: int) -> Any:
        """A number, one per flat batch entry, or one per place of the leading axes."""
        kind = self.rng.integers(3)
        shape = () if kind == 0 else (self.batch,) if kind == 1 else self.lead
        drawn = self.rng.integers(low, high + 1, shape)
        return int(drawn) if kind == 0 else drawn

    def broadcast(self, *axes: int) -> tuple[int, ...]:
        """A shape that broadcasts to (*lead, *axes)."""
        full = (*self.lead, *axes)
        shape = [size if self.rng.random() < 0.65 else 1 for size in full]
        missing = int(self.rng.integers(len(full) + 1)) if self.rng.random() < 0.4 else 0
        return tuple(shape[missing:])


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
    left, right = (None if z.rng.random() < 0.2 else int(z.rng.integers(-2, 20)) for _ in "lr")
    offset = None if z.rng.random() < 0.6 else z.per_batch(-5, 20)
    return masks.window(left, right, offset)


def _blocks(z: Sizes) -> masks.Mask:
    block_q, block_k = int(z.rng.integers(1, 20)), int(z.rng.integers(1, 20))
    shape = z.broadcast(z.heads, -(-z.len_q // block_q), -(-z.len_k // block_k))
    return masks.blocks(np.asarray(z.rng.random(shape) < 0.6), block_q, block_k)


def _dense(z: Sizes) -> Array:
    shape = z.broadcast(z.heads, z.len_q, z.len_k)
    density = z.rng.choice([0.05, 0.5, 0.95])
    layout = random_layout(z.rng, len(shape), 1, repeats=True)
    return Placed(shape, np.bool_, layout, z.rng.random(shape) < density).view


def _user(z: Sizes) -> masks.Mask:
    table = lookup(z.rng.integers(0, max(z.len_q, 1), max(z.len_k, 1)))
    functions = [
        lambda b, h, i, j: (i * j + h + 2 * b) % 3 != 0,
        lambda b, h, i, j: table[j] <= i,
        lambda b, h, i, j: (0.5 * i + 3 > j) | (h == 1),
        lambda b, h, i, j: abs(i // 7 - j // 7) <= 1,
        lambda b, h, i, j: (i >= 0) & (j != 2),
    ]
    return masks.mask(functions[z.rng.integers(len(functions))])


MASKS = {
    "causal": lambda z: masks.causal(),
    "causal with offset": lambda z: masks.causal(z.per_batch(-z.len_q - 2, z.len_k + 2)),
    "window": _window,
    "lengths": lambda z: masks.lengths(z.per_batch(0, z.len_k)),
    "lengths of both": lambda z: masks.lengths(z.per_batch(0, z.len_k), z.per_batch(0, z.len_q)),
    "segments": _segments,
    "prefix": lambda z: masks.prefix(z.per_batch(0, z.len_k)),
    "dilated": lambda z: masks.dilated(int(z.rng.integers(1, 6))),
    "blocks": _blocks,
    "dense": lambda z: masks.dense(_dense(z)),
    "user": _user,
}


@st.composite
def _mask(draw: Any, z: Sizes) -> Any:
    kind = draw(st.sampled_from([None, "array", *MASKS]))
    if kind is None:
        return None
    if kind == "array":
        return _dense(z)
    mask = MASKS[kind](z)
    how = draw(st.sampled_from(["alone", "alone", "alone", "and", "or", "not"]))
    if how == "alone":
        return mask
    if how == "not":
        return ~mask
    other = MASKS[draw(st.sampled_from(list(MASKS)))](z)
    return mask & other if how == "and" else mask | other


# Scores


def _alibi(z: Sizes) -> scores.Score:
    slopes = z.rng.uniform(0, 0.5, z.heads).astype(DTYPES[z.rng.integers(4)])
    return scores.alibi(slopes)


def _relative_bias(z: Sizes) -> scores.Score:
    reach = int(z.rng.integers(0, 12))
    shape = (z.heads, 2 * reach + 1) if z.rng.random() < 0.6 else (2 * reach + 1,)
    return scores.relative_bias(z.rng.standard_normal(shape).astype(DTYPES[z.rng.integers(4)]))


def _user_score(z: Sizes) -> scores.Score:
    table = lookup(z.rng.standard_normal(max(z.len_k, 1)))
    functions = [
        lambda s, b, h, i, j: s - 0.1 * abs(i - j),
        lambda s, b, h, i, j: where((i + 2 * j) % 5 == 0, -math.inf, s),
        lambda s, b, h, i, j: s * (1 + 0.25 * h) + 0.5 * b,
        lambda s, b, h, i, j: 2 * tanh(s) + 0.25 * s,
        lambda s, b, h, i, j: s + table[clip(j - h, 0, max(z.len_k - 1, 0))],
    ]
    return scores.score(functions[z.rng.integers(len(functions))])


SCORES = {
    "alibi": _alibi,
    "softcap": lambda z: scores.softcap(float(z.rng.choice([0.5, 2.0, 30.0]))),
    "relative_bias": _relative_bias,
    "user": _user_score,
}


@st.composite
def _score_mod(draw: Any, z: Sizes) -> Any:
    kinds = draw(st.lists(st.sampled_from(list(SCORES)), max_size=3))
    chain = [SCORES[kind](z) for kind in kinds]
    if not chain:
        return None
    if len(chain) == 1:
        return chain[0]
    return chain if draw(st.booleans()) else chain[0].then(chain[1])


# The other options


@st.composite
def _options(draw: Any, z: Sizes, depth: int, place: Any) -> dict[str, Any]:
    options: dict[str, Any] = {}
    options["mask"] = draw(_mask(z))
    options["score_mod"] = draw(st.none() | _score_mod(z))
    if draw(st.booleans()):
        dtype = draw(st.sampled_from(DTYPES))
        bias = z.rng.standard_normal(z.broadcast(z.heads, z.len_q, z.len_k))
        if draw(st.booleans()):
            bias = np.where(z.rng.random(bias.shape) < 0.2, -np.inf, bias)
        options["bias"] = place(bias.astype(dtype))
    if draw(st.booleans()):
        sink = z.rng.standard_normal(z.heads) * 2
        sink = np.where(z.rng.random(z.heads) < 0.2, -np.inf, sink)
        options["sink"] = place(sink.astype(draw(st.sampled_from(DTYPES))))
    factor = draw(st.sampled_from([None, None, None, 0.0, -1.0, 2.0, 0.1, 50.0]))
    if factor is not None:
        options["scale"] = factor / math.sqrt(depth)
    if draw(st.sampled_from([False, False, True])):
        options["dropout"] = draw(st.sampled_from([0.1, 0.5, 0.9]))
        options["seed"] = draw(st.integers(0, 2**64 - 1))
    return {name: value for name, value in options.items() if value is not None}


# Arrays


def _normal(rng: np.random.Generator, shapes: dict[str, Any], dtype: Any) -> dict[str, Array]:
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def _tiny(rng: np.random.Generator, shapes: dict[str, Any], dtype: Any) -> dict[str, Array]:
    return {name: x * 1e-5 for name, x in _normal(rng, shapes, dtype).items()}


def _constant_rows(
    rng: np.random.Generator, shapes: dict[str, Any], dtype: Any
) -> dict[str, Array]:
    drawn = {name: rng.standard_normal((*shape[:-1], 1)) for name, shape in shapes.items()}
    return {name: np.broadcast_to(x, shapes[name]) for name, x in drawn.items()}


def _one_hot(rng: np.random.Generator, shapes: dict[str, Any], dtype: Any) -> dict[str, Array]:
    arrays = _normal(rng, shapes, dtype)
    hot = rng.integers(0, shapes["k"][-1], shapes["k"][:-1])
    return arrays | {"k": 4.0 * np.eye(shapes["k"][-1])[hot]}


def _offset(rng: np.random.Generator, shapes: dict[str, Any], dtype: Any) -> dict[str, Array]:
    arrays = _normal(rng, shapes, dtype)
    return arrays | {"v": arrays["v"] + 10, "k": arrays["k"] + 1}


def _negative(rng: np.random.Generator, shapes: dict[str, Any], dtype: Any) -> dict[str, Array]:
    arrays = _normal(rng, shapes, dtype)
    return arrays | {"q": np.abs(arrays["q"]) + 0.5, "k": -50 * np.abs(arrays["k"]) - 50}


def _near_overflow(
    rng: np.random.Generator, shapes: dict[str, Any], dtype: Any
) -> dict[str, Array]:
    arrays = _normal(rng, shapes, dtype)
    large = 65504.0 * np.sign(arrays["v"]) * rng.uniform(0.9, 1, shapes["v"])
    return arrays | {"v": large, "do": arrays["do"] * 1e-3}


def _huge(rng: np.random.Generator, shapes: dict[str, Any], dtype: Any) -> dict[str, Array]:
    arrays = _normal(rng, shapes, dtype)
    return arrays | {"q": arrays["q"] * 1e3, "k": arrays["k"] * 1e3}


FAMILIES = {
    "normal": _normal,
    "tiny": _tiny,
    "constant rows": _constant_rows,
    "one-hot keys": _one_hot,
    "offset": _offset,
    "negative scores": _negative,
    "near overflow": _near_overflow,
    "huge logits": _huge,
}


def _edges(block: int) -> list[int]:
    several = [1, block - 1, block, block + 1, 2 * block, 2 * block + 1, 3 * block - 1]
    return [*(n for n in several for _ in range(3)), 0]


HEAD_SIZES = [*(n for n in (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33) for _ in range(3)),
              64, 65, 100, 128, 129, 512]  # fmt: skip
LEADS = [(), (), (1,), (2,), (3,), (2, 2), (1, 3), (0,)]


def _part_of_lead(rng: np.random.Generator, lead: tuple[int, ...]) -> tuple[int, ...]:
    """Leading axes that broadcast to `lead`."""
    shape = tuple(size if rng.random() < 0.75 else 1 for size in lead)
    return shape[int(rng.integers(len(lead) + 1)) :] if rng.random() < 0.3 else shape


def _shrunk(
    dtype: np.dtype[Any], lead: tuple[int, ...], group: int, lengths: list[int], d: int
) -> tuple[tuple[int, ...], int, list[int]]:
    """Hold the work of the specification within reason, leading axes first."""
    most = MOST_PRODUCTS.get(dtype, 2_000_000)

    def products() -> int:
        return math.prod(lead) * group * lengths[0] * lengths[1] * d

    while products() > most and lead:
        lead = lead[1:]
    if products() > most:
        group = 1
    while products() > most:
        lengths = [max(1, n // 2) for n in lengths]
    return lead, group, lengths


@st.composite
def problems(
    draw: Any,
    dtype: Any,
    families: tuple[str, ...] = tuple(FAMILIES),
    packed: bool = False,
) -> Problem:
    """Draw a problem; see `Problem`."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    family = draw(st.sampled_from(families))
    small = st.tuples(*[st.sampled_from([5, 8, 16, 32])] * 2)
    tiles = draw(st.one_of(small, small, small, st.none()))
    edges = [_edges(block if tiles else 64) for block in tiles or (64, 64)]
    d, d_v = (draw(st.sampled_from(HEAD_SIZES)) for _ in "kv")
    heads_kv, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 1, 2, 3]))
    offsets = totals = None
    if packed:
        n = draw(st.sampled_from([0, 1, 2, 3, 4]))
        lead: tuple[int, ...] = (n,)
        most = MOST_PRODUCTS.get(dtype, 2_000_000) // (8 * group * max(d, d_v))
        cap = max(1, math.isqrt(most))
        lengths_q, lengths_k = (
            [min(draw(st.sampled_from(edge)), cap) for _ in range(n)] for edge in edges
        )
        offsets = tuple([0, *np.cumsum(x).tolist()] for x in (lengths_q, lengths_k))
        totals = (offsets[0][-1], offsets[1][-1])
        lengths = [max(lengths_q, default=0), max(lengths_k, default=0)]
        shapes = [
            (heads_kv * group, totals[0], d),
            (heads_kv, totals[1], d),
            (heads_kv, totals[1], d_v),
        ]
        out_shape = (heads_kv * group, totals[0], d_v)
    else:
        lead = draw(st.sampled_from(LEADS))
        lengths = [draw(st.sampled_from(edge)) for edge in edges]
        lead, group, lengths = _shrunk(dtype, lead, group * heads_kv, lengths, max(d, d_v))
        if group % heads_kv:
            heads_kv = 1
        group //= heads_kv
        own = [_part_of_lead(rng, lead) for _ in "qkv"]
        lead = np.broadcast_shapes(*own)
        heads = heads_kv * group
        tails = [(heads, lengths[0], d), (heads_kv, lengths[1], d), (heads_kv, lengths[1], d_v)]
        shapes = [(*a, *b) for a, b in zip(own, tails, strict=True)]
        shapes = [  # one head may come as a matrix
            x[1:] if len(x) == 3 and x[0] == 1 and draw(st.booleans()) else x for x in shapes
        ]
        matrices = all(len(x) == 2 for x in shapes)
        out_shape = (lengths[0], d_v) if matrices else (*lead, heads, lengths[0], d_v)
    names = dict(zip("qkv", shapes, strict=True)) | {"do": out_shape}
    layouts = draw(st.sampled_from(["plain", "rows", "random"]))
    placed: list[Placed] = []

    def place(values: Array) -> Array:
        layout = Layout()
        if layouts == "rows" and values.ndim >= 3:  # (..., L, H, D)
            axes = list(range(values.ndim))
            layout = Layout((*axes[:-3], axes[-2], axes[-3], axes[-1]))
        elif layouts == "random":
            layout = random_layout(rng, values.ndim, values.dtype.itemsize, repeats=True)
        placed.append(Placed(values.shape, values.dtype, layout, values))
        return placed[-1].view

    made = FAMILIES[family](rng, names, dtype)
    with np.errstate(over="ignore"):
        arrays = {name: place(x.astype(dtype)) for name, x in made.items()}
    z = Sizes(lead, heads_kv * group, *lengths, totals, rng)
    options = draw(_options(z, d, place))
    accumulator = np.float64 if dtype == np.float64 else np.float32
    dlse = None
    if draw(st.booleans()):
        dlse = place(rng.standard_normal(out_shape[:-1]).astype(accumulator))
    large = abs(options.get("scale", 0)) * math.sqrt(d) > 2.5
    return Problem(
        np.dtype(dtype), family, **arrays, dlse=dlse, options=options, offsets=offsets, tiles=tiles,
        layouts=layouts, workspace=draw(st.booleans()), seed=seed, placed=placed,
        hard=large or family == "huge logits",
    )  # fmt: skip


@dataclass
class Plain:
    """Arrays without options, for properties that set options of their own."""

    dtype: np.dtype[Any]
    q: Array
    k: Array
    v: Array
    do: Array
    tiles: tuple[int, int]
    rng: np.random.Generator

    @property
    def accumulator(self) -> np.dtype[Any]:
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}{getattr(self, name).shape}" for name in ("q", "k", "v"))
        return f"Plain({self.dtype}, {shapes}, tiles={self.tiles})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@st.composite
def plain(
    draw: Any,
    dtypes: tuple[Any, ...] = DTYPES,
    integers: bool = False,
    square: bool = False,
    group: int | None = None,
) -> Plain:
    """Draw arrays of shape (2, H, L, D) with 1 to 40 rows; `integers` are eighths."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    tiles = draw(st.tuples(*[st.sampled_from([5, 8, 16])] * 2))
    lengths = [draw(st.sampled_from([n for n in _edges(block) if 0 < n <= 40])) for block in tiles]
    if square:
        lengths[1] = lengths[0]
    d, d_v = (draw(st.sampled_from([1, 3, 8, 17, 33])) for _ in "kv")
    heads_kv = draw(st.sampled_from([1, 2]))
    heads = heads_kv * (group or draw(st.sampled_from([1, 2])))

    def array(*shape: int) -> Array:
        if integers:
            return (rng.integers(-12, 13, shape) / 8).astype(dtype)
        return rng.standard_normal(shape).astype(dtype)

    return Plain(
        dtype, array(2, heads, lengths[0], d), array(2, heads_kv, lengths[1], d),
        array(2, heads_kv, lengths[1], d_v), array(2, heads, lengths[0], d_v), tiles, rng,
    )  # fmt: skip
