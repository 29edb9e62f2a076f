"""The random problems of fuzz.py: arrays, how they lie in memory, and descriptions of the rest."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from independent_model import Options, Shapes
from independent_words import allowed

Array = np.ndarray[Any, Any]
DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
LAYOUTS = ("C", "F", "swapped", "sliced", "negative", "odd", "zero")
KINDS = (
    "forward",
    "vjp",
    "backward",
    "varlen",
    "varlen_vjp",
    "varlen_backward",
    "split",
    "combine",
)
LENGTHS = (1, 1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 48, 63, 64, 65, 127, 128, 129, 140, 0)
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 31, 32, 33, 40, 64, 65, 80, 130)
MOST = 3_000_000  # multiplications of a product, at most


@dataclass
class Case:
    """One problem: logical arrays, how they lie in memory, and what is asked for."""

    kind: str
    dtype: str
    lead: tuple[int, ...]
    arrays: dict[str, Array]  # q, k, v, do, dlse; parts of `combine`
    options: Options
    layouts: dict[str, str]
    offsets: tuple[list[int], list[int]] | None = None
    flags: dict[str, bool] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)  # where `split` cuts the keys
    notes: list[str] = field(default_factory=list)

    @property
    def packed(self) -> bool:
        return self.offsets is not None

    def describe(self) -> str:
        shapes = {name: x.shape for name, x in self.arrays.items()}
        o = self.options
        lines = [
            f"{self.kind} {self.dtype} {shapes} {self.layouts} {self.notes}",
            f"mask {described(o.mask)}, scores {described(o.scores)}, scale {o.scale}",
            f"dropout {o.dropout} seed {o.seed}",
            f"bias {described(o.bias)}, sink {described(o.sink)}",
            f"offsets {self.offsets}, flags {self.flags}",
        ]
        return "\n    ".join(lines)


def described(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return f"<{x.dtype} {x.shape}>"
    return tuple(map(described, x)) if isinstance(x, tuple) else x


# Drawing


def draw(seed: int, index: int, gpu: bool = False, variants: int = 1) -> Case:
    """Return problem `index` of a seed.

    So many `variants` in a row differ in lengths and numbers alone: they run the same kernels.
    """
    rng = np.random.default_rng([seed, index // variants])
    numbers = rng if variants == 1 else np.random.default_rng([seed, index, variants])
    kind = str(rng.choice(KINDS, p=[0.2, 0.25, 0.15, 0.08, 0.12, 0.08, 0.07, 0.05]))
    dtype = str(rng.choice(list(DTYPES), p=[0.35, 0.2, 0.2, 0.25]))
    if kind == "combine":
        return _combine_case(numbers, dtype)
    packed = kind.startswith("varlen")
    lead = (
        ()
        if packed
        else [(), (1,), (2,), (3,), (2, 2), (0,)][
            rng.choice(6, p=[0.3, 0.2, 0.24, 0.14, 0.1, 0.02])
        ]
    )
    heads_kv, group = int(rng.choice([1, 1, 2, 3])), int(rng.choice([1, 1, 2, 4]))
    offsets = None
    len_q, len_k = (int(numbers.choice(LENGTHS)) for _ in "qk")
    if numbers.random() < 0.3:
        len_k = len_q
    if packed:
        n = int(numbers.integers(0, 5))
        lengths = [
            [int(numbers.choice((0, 0, 1, 2, 5, 16, 17, 33, 40))) for _ in range(n)] for _ in "qk"
        ]
        if numbers.random() < 0.4:
            lengths[1] = lengths[0]
        offsets = tuple([0, *itertools.accumulate(x)] for x in lengths)
        len_q, len_k = offsets[0][-1], offsets[1][-1]
    depth, width = (int(rng.choice(WIDTHS)) for _ in "dv")
    if rng.random() < 0.4:
        width = depth
    size = max(1, int(np.prod(lead)) * heads_kv * group * len_q * len_k)
    depth, width = (max(1, min(x, MOST // size)) for x in (depth, width))
    heads = heads_kv * group

    def shape(h: int, l: int, d: int) -> tuple[int, ...]:
        axes = tuple(1 if rng.random() < 0.15 else x for x in lead)
        return (*(axes[1:] if axes and rng.random() < 0.1 else axes), h, l, d)

    shapes = {
        "q": shape(heads, len_q, depth),
        "k": shape(heads_kv, len_k, depth),
        "v": shape(heads_kv, len_k, width),
    }
    lead = np.broadcast_shapes(*(x[:-3] for x in shapes.values()))
    if not lead and not packed and rng.random() < 0.2:  # matrices are one head
        shapes = {name: x[1:] if x[0] == 1 else x for name, x in shapes.items()}
    flat = all(len(x) == 2 for x in shapes.values())
    o = Options()
    n = len(offsets[0]) - 1 if offsets else 0
    spans = (max((b - a for a, b in itertools.pairwise(x)), default=0) for x in offsets or ())
    longest = tuple(spans) if packed else (len_q, len_k)
    at_lead = (n,) if packed else lead
    arrays = _values(numbers, shapes, dtype, o)
    out_shape = (*(() if flat else (*lead, heads)), len_q, width)
    arrays["do"] = cast(numbers.standard_normal(out_shape), dtype)
    accumulator = "float64" if dtype == "float64" else "float32"
    if rng.random() < 0.4:
        arrays["dlse"] = cast(numbers.standard_normal(out_shape[:-1]), accumulator)
    words = _Draw(rng, numbers, at_lead, heads, *longest, packed, (len_q, len_k))
    simple = kind == "split"
    if rng.random() < 0.75:
        o.mask = ("dense", words.boolean(heads, *longest)) if simple else words.mask(2)
    if rng.random() < 0.5:
        number = 1 if rng.random() < 0.7 else 2
        o.scores = tuple(("softcap", 4.0) if simple else words.score() for _ in range(number))
    if not simple:
        _put_functions(np.random.default_rng([seed, index // variants, 1]), o, len_k)
    if rng.random() < 0.25:
        o.bias = words.bias()
    if rng.random() < 0.25 and not simple:
        o.sink = cast(3 * numbers.standard_normal(heads), str(rng.choice(list(DTYPES))))
        o.sink[numbers.random(heads) < 0.1] = -np.inf
    if rng.random() < 0.2 and not simple:
        o.dropout = float(numbers.choice([0.1, 0.5, 0.9, 2.0**-32]))
        o.seed = int(numbers.integers(0, 2**64, dtype=np.uint64))
    case = Case(kind, dtype, lead, arrays, o, {}, offsets)
    for name, x in arrays.items():
        case.layouts[name] = layout = str(rng.choice(LAYOUTS)) if rng.random() < 0.5 else "C"
        if layout == "zero" and x.size:
            x[...] = x[(*(slice(None),) * longest_axis(x), slice(1))]
    for name in ("out", "lse", "dq", "dk", "dv"):
        case.layouts[name] = str(rng.choice([x for x in LAYOUTS if x != "zero"]))
    case.flags = {x: bool(rng.random() < 0.5) for x in ("return_lse", "deterministic", "outputs")}
    if simple:
        case.cuts = sorted({0, len_k, *(int(numbers.integers(0, len_k + 1)) for _ in range(2))})
        case.cuts = case.cuts if len(case.cuts) > 1 else [0, 0]
    elif "zero" not in case.layouts.values():
        _poison(numbers, case, gpu)
    return case


def _put_functions(rng: Any, o: Options, len_k: int) -> None:
    """Put functions into the mask and the scores, drawn apart: other problems stay as they are."""
    if o.mask is not None and rng.random() < 0.15:
        number = int(rng.integers(0, 7)) if rng.random() < 0.8 else 70
        word = str(rng.choice(FUNCTION_MASKS))
        mask = word, number if word != "root" else 0.5 * int(rng.integers(1, 9)) * len_k**0.5 // 1
        o.mask = (str(rng.choice(["and", "or", "xor"])), o.mask, mask)
    if o.scores and rng.random() < 0.3:
        word = str(rng.choice(FUNCTION_SCORES))
        o.scores = (*o.scores[:-1], (word, float(rng.choice([0.25, 0.5]))))


def longest_axis(x: Array) -> int:
    return max(range(x.ndim), key=lambda n: x.shape[n], default=0)


def cast(x: Any, dtype: str) -> Array:
    with np.errstate(over="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.asarray(x).astype(DTYPES[dtype])


def _values(rng: Any, shapes: Any, dtype: str, o: Options) -> dict[str, Array]:
    x = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    o.scale = [None, None, None, -0.4, 0.0, 1.0, 0.01][rng.integers(7)]
    how = rng.random()
    if how < 0.12:  # small integers, exact, with ties
        x = {name: np.round(value) for name, value in x.items()}
    elif how < 0.2:  # logits that leave one key
        x["q"], x["k"] = 12 * x["q"], 8 * x["k"]
    elif how < 0.35:  # magnitudes over the whole range, whose product the scale makes usual
        most = {"float16": 11, "bfloat16": 62, "float32": 62, "float64": 510}[dtype]
        a, b, c = (int(rng.integers(-most, most + 1)) for _ in "qkv")
        scale = 2.0 ** -(a + b)
        o.scale = scale if 1e-37 < scale < 1e37 or dtype == "float64" else o.scale
        c = 2 * c if rng.random() < 0.5 and dtype != "float16" else c
        x = {"q": x["q"] * 2.0**a, "k": x["k"] * 2.0**b, "v": x["v"] * 2.0**c}
    return {name: np.nan_to_num(cast(value, dtype)) for name, value in x.items()}


def _combine_case(rng: Any, dtype: str) -> Case:
    shape = tuple(
        int(rng.integers(0 if rng.random() < 0.1 else 1, 7)) for _ in range(rng.integers(1, 5))
    )
    accumulator = "float64" if dtype == "float64" else "float32"
    arrays: dict[str, Array] = {}
    for n in range(int(rng.integers(1, 5))):
        size = 2.0 ** int(rng.integers(-10, 10) if dtype == "float16" else rng.integers(-100, 127))
        arrays[f"out{n}"] = np.nan_to_num(cast(size * rng.standard_normal(shape), dtype))
        lse = np.where(
            rng.random(shape[:-1]) < 0.15,
            -np.inf,
            rng.choice([1, 1, 100, 1e4]) * rng.standard_normal(shape[:-1]),
        )
        arrays[f"lse{n}"] = cast(lse, accumulator)
        arrays[f"out{n}"][np.isneginf(lse)] = 0
    layouts = {name: str(rng.choice(LAYOUTS[:-1])) for name in arrays}
    return Case("combine", dtype, (), arrays, Options(), layouts)


@dataclass
class _Draw:
    """Draws masks, scores and a bias for sizes."""

    rng: Any  # of what kernels are compiled for
    numbers: Any
    lead: tuple[int, ...]
    heads: int
    len_q: int
    len_k: int
    packed: bool
    totals: tuple[int, int]

    def number(self, low: int, high: int) -> int:
        return int(self.numbers.integers(low, max(low, high) + 1))

    def broadcast(self, *axes: int) -> tuple[int, ...]:
        """Return a shape that broadcasts to (*lead, *axes)."""
        full = tuple(1 if self.rng.random() < 0.25 else x for x in (*self.lead, *axes))
        return full[self.number(0, len(self.lead)) if self.rng.random() < 0.3 else 0 :]

    def boolean(self, *axes: int) -> Array:
        return self.numbers.random(self.broadcast(*axes)) < self.numbers.choice([0.1, 0.5, 0.9])

    def per_batch(self, low: int, high: int) -> Any:
        if self.rng.random() < 0.5:
            return self.number(low, high)
        shape = self.broadcast()
        return self.numbers.integers(low, max(low, high) + 1, shape, dtype=np.int32)

    def mask(self, depth: int) -> tuple[Any, ...]:
        rng, len_k = self.rng, self.len_k
        if depth and rng.random() < 0.4:
            word = str(rng.choice(["and", "or", "xor", "not"]))
            return (word, *(self.mask(depth - 1) for _ in range(1 if word == "not" else 2)))
        word = str(rng.choice(MASKS))
        if word == "causal":
            return word, None if rng.random() < 0.6 else self.per_batch(-5, len_k)
        if word == "window":
            sides = (None if rng.random() < 0.25 else self.number(0, len_k) for _ in "lr")
            return word, *sides, None if rng.random() < 0.6 else self.per_batch(-3, 9)
        if word == "lengths":
            return (
                word,
                self.per_batch(0, len_k + 2),
                None if rng.random() < 0.6 else self.per_batch(0, self.len_q),
            )
        if word == "prefix":
            return word, self.per_batch(0, len_k)
        if word == "dilated":
            return word, self.number(1, 5)
        if word == "segments":
            sizes = self.totals if self.packed else (self.len_q, len_k)
            lead = () if self.packed or rng.random() < 0.5 else self.lead
            return word, *(np.sort(self.numbers.integers(0, 4, (*lead, x)), axis=-1) for x in sizes)
        if word == "blocks":
            sizes = self.number(1, 20), self.number(1, 20)
            counts = (-(-self.len_q // sizes[0]), -(-len_k // sizes[1]))
            return word, self.boolean(self.heads, *counts), *sizes
        if word == "dense":
            return word, self.boolean(self.heads, self.len_q, len_k)
        if word == "table":
            return word, self.numbers.integers(
                0, len_k + 1, (self.heads, max(1, self.len_q)), dtype=np.int32
            )
        if word == "slanted":
            return word, float(self.numbers.choice([0.5, 1.5, -1.0]))
        return (
            "strided",
            self.number(-3, 3),
            self.number(-3, 3),
            self.number(2, 7),
            self.number(1, 4),
        )

    def score(self) -> tuple[Any, ...]:
        rng = self.rng
        word = str(rng.choice(SCORES))
        if word == "softcap":
            return word, float(self.numbers.choice([0.5, 5.0, 30.0]))
        if word == "alibi":
            return word, cast(
                self.numbers.random(self.broadcast(self.heads)), str(rng.choice(list(DTYPES)))
            )
        if word == "relative":
            return word, self.numbers.standard_normal(
                (self.heads, 2 * self.number(0, 9) + 1)
            ).astype(np.float32)
        if word == "linear":
            return word, float(self.numbers.choice([0.5, -1.25])), 0.125
        if word == "some":
            return word, self.number(2, 4), 0.75
        if word == "hidden":
            return word, self.number(2, 5)
        if word == "table":
            return word, self.numbers.standard_normal((self.heads, max(1, self.len_q))).astype(
                np.float32
            )
        return (
            (word, 0.25)
            if word in ("square", "least")
            else (word, 3.0)
            if word == "exponential"
            else (word,)
        )

    def bias(self) -> Array:
        rng = self.rng
        x = 2 * self.numbers.standard_normal(self.broadcast(self.heads, self.len_q, self.len_k))
        x[self.numbers.random(x.shape) < self.numbers.choice([0, 0.2])] = self.numbers.choice(
            [-np.inf, -1e4]
        )
        return cast(x, str(rng.choice(list(DTYPES))))


MASKS = (
    "causal",
    "window",
    "lengths",
    "prefix",
    "dilated",
    "segments",
    "blocks",
    "dense",
    "strided",
    "table",
    "slanted",
)
SCORES = (
    "softcap",
    "alibi",
    "relative",
    "linear",
    "some",
    "hidden",
    "square",
    "table",
    "absolute",
    "least",
    "exponential",
)


# Masks and scores with functions. Their parameter is a number.
FUNCTION_MASKS = ("shifted", "doubled", "root")
FUNCTION_SCORES = ("gate", "wave", "erf", "power", "distance", "decay")


def _poison(rng: Any, case: Case, gpu: bool) -> None:
    """Put NaN and infinities where nobody looks, or NaN where somebody does."""
    how = rng.random()
    if how > 0.45:
        return
    q, k, v = (case.arrays[name] for name in "qkv")
    if how < 0.1 and all(x.size for x in (q, k, v)):
        name = "q" if gpu else str(rng.choice(["q", "k", "v"]))
        x = case.arrays[name]
        x[tuple(rng.integers(0, size) for size in x.shape)] = np.nan
        case.notes.append(f"NaN in {name}")
        return
    worst = rng.choice([np.nan, np.inf, -np.inf])
    case.notes.append(f"{worst} where nobody looks")
    mask = case.options.mask
    for rows, columns, at in Shapes.of(q, k, v, case.offsets).blocks():
        size = (len(at.b), at.heads, at.len_q, at.len_k)
        seen = np.broadcast_to(True if mask is None else allowed(mask, at), size)
        if case.packed:
            none = ~seen[0].any(1)  # (Hq, Lk)
            none = none.reshape(k.shape[0], at.heads // k.shape[0], at.len_k).all(1)
            for x in (k, v):
                x[:, columns][none] = worst
            q[:, rows][~seen[0].any(2)] = worst
        else:
            none = ~seen.any(2).reshape(*at.lead, at.heads, at.len_k)
            for x in (k, v):
                heads = x.shape[-3] if x.ndim > 2 else 1
                groups = none.reshape(*at.lead, heads, at.heads // heads, at.len_k)
                x[_all(groups.all(-2), x.shape[:-1])] = worst
            q[_all(~seen.any(3).reshape(*at.lead, at.heads, at.len_q), q.shape[:-1])] = worst


def _all(x: Array, shape: tuple[int, ...]) -> Array:
    """Reduce conditions over what an array of this shape was broadcast along."""
    full = (1,) * (x.ndim - len(shape)) + shape
    axes = tuple(n for n, size in enumerate(full) if size == 1)
    return x.all(axis=axes, keepdims=True).reshape(shape)
