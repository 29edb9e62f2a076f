"""Problems drawn by hypothesis: sizes, options and memory are drawn; elements come from a seed.

So a failure shrinks quickly to few rows, keys and options, and one line of Python describes it.
Lengths are drawn around the edges of tiles: 0, 1, b - 1, b, b + 1 and the same for several tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from .cases import Problem, Shape, problem
from .families import FAMILIES
from .features import ALL
from .hypothesis_needed import composite, st
from .options import MASKS, SCORES, known_floats

MOST_PRODUCTS = {np.dtype(np.float64): 300_000}  # long double, without BLAS
SMALL_TILES = (5, 8, 16, 32)


def edges(block: int) -> list[int]:
    """Return lengths around the edges of tiles of `block`, 0 being the rarest."""
    several = [1, block - 1, block, block + 1, 2 * block, 2 * block + 1, 3 * block - 1]
    return [*(n for n in several for _ in range(3)), 0]


HEAD_SIZES = [*(n for n in (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33) for _ in range(3)),
              64, 65, 100, 128, 129, 512]  # fmt: skip
LEADS = [(), (), (1,), (2,), (3,), (2, 2), (1, 3), (0,)]


@composite
def mask_names(draw: Any, features: Iterable[str] = ALL) -> str | None:
    """Draw the name of a mask, or of two masks that are combined.

    Parameters
    ----------
    features : iterable of str
        What the kernel supports: masks, or only causal.

    Returns
    -------
    str or None
        As `problem` takes it.
    """
    if "masks" not in features:
        return draw(st.sampled_from([None, "causal"])) if "causal" in features else None
    kind: str | None = draw(st.sampled_from([None, "array", *MASKS]))
    if kind in (None, "array"):
        return kind
    how = draw(st.sampled_from(["{}", "{}", "{}", "{} & {}", "{} | {}", "~{}"]))
    return str(how).format(kind, draw(st.sampled_from(list(MASKS))) if how.count("{") > 1 else "")


def _part_of_lead(rng: np.random.Generator, lead: Shape) -> Shape:
    """Leading axes that broadcast to `lead`."""
    shape = tuple(size if rng.random() < 0.75 else 1 for size in lead)
    return shape[int(rng.integers(len(lead) + 1)) :] if rng.random() < 0.3 else shape


def _shrunk(
    most: int, lead: Shape, group: int, lengths: list[int], d: int
) -> tuple[Shape, int, list[int]]:
    """Hold the work of the specification within reason, leading axes first."""

    def products() -> int:
        return math.prod(lead) * group * lengths[0] * lengths[1] * d

    while products() > most and lead:
        lead = lead[1:]
    if products() > most:
        group = 1
    while products() > most:
        lengths = [max(1, n // 2) for n in lengths]
    return lead, group, lengths


def _picker(draw: Any, shapes: int | None, seed: int) -> tuple[Any, np.random.Generator]:
    """Return what picks one of a list, and a generator for the rest of a shape.

    Hypothesis picks, or one of a number of seeds.
    """
    if shapes is None:
        return lambda several: draw(st.sampled_from(several)), np.random.default_rng(seed)
    rng = np.random.default_rng(draw(st.integers(0, shapes - 1)))
    return lambda several: several[int(rng.integers(len(several)))], rng


@composite
def problems(
    draw: Any,
    dtype: Any,
    families: Iterable[str] = tuple(FAMILIES),
    packed: bool = False,
    features: Iterable[str] = ALL,
    tiles: tuple[int, int] | None = None,
    shapes: int | None = None,
) -> Problem:
    """Draw a problem with any options.

    Parameters
    ----------
    dtype : dtype_like
        The type of q, k and v.
    families : iterable of str
        The families in `cupyflash.testing.FAMILIES` from which arrays are drawn.
    packed : bool
        Whether the arrays hold packed sequences.
    features : iterable of str
        What the kernel supports; no other option is drawn.
    tiles : tuple of 2 int, optional
        Rows and keys of the kernel's tiles. By default, the problem's `tiles` is drawn; it may be
        None, which means those of the public functions.
    shapes : int, optional
        How many shapes there are at most; by default any.

    Returns
    -------
    Problem
        See `problem`.
    """
    features = frozenset(features)
    dtype = np.dtype(dtype)
    most = MOST_PRODUCTS.get(dtype, 2_000_000)
    seed = draw(st.integers(0, 2**32 - 1))
    pick, rng = _picker(draw, shapes, seed)
    family = draw(st.sampled_from(list(families)))
    if tiles is None:
        small = st.tuples(*[st.sampled_from(SMALL_TILES)] * 2)
        tiles = draw(st.one_of(small, small, small, st.none()))
        lengths_of = [edges(block) for block in tiles or (64, 64)]
    else:  # kernels have edges at multiples of smaller powers of 2, too
        lengths_of = [edges(pick([8, 16, 32, 64, block])) for block in tiles]
    lengths_of = [
        [n for n in each if n or part in features]
        for each, part in zip(lengths_of, ("empty_queries", "empty_keys"), strict=True)
    ]
    d = pick(HEAD_SIZES)
    d_v = pick(HEAD_SIZES) if "widths" in features else d
    heads_kv = pick([1, 2])
    group = pick([1, 1, 2, 3]) if "gqa" in features else 1
    more: dict[str, Any] = {}
    if packed:
        n = pick([0, 1, 2, 3, 4] if "empty_batch" in features else [1, 2, 3, 4])
        cap = max(1, math.isqrt(most // (8 * group * max(d, d_v))))
        pairs = [[min(pick(x), cap) for _ in range(n)] for x in lengths_of]
        if "lengths" not in features:
            pairs[1] = pairs[0]
        offsets = tuple([0, *np.cumsum(x).tolist()] for x in pairs)
        totals = [x[-1] for x in offsets]
        drawn: list[Shape] = [(heads_kv * group, totals[0], d), (heads_kv, totals[1], d),
                               (heads_kv, totals[1], d_v)]  # fmt: skip
        more["offsets"] = offsets
    else:
        lead: Shape = (pick([1, 2]),)
        if "broadcast" in features:
            leads = LEADS if "empty_batch" in features else LEADS[:-1]
            lead = pick(leads)
        lengths = [pick(each) for each in lengths_of]
        if "lengths" not in features:
            lengths[1] = lengths[0]
        kept, group, lengths = _shrunk(most, lead, group * heads_kv, lengths, max(d, d_v))
        if "broadcast" not in features:
            kept = kept or (1,)
        if group % heads_kv:
            heads_kv = 1
        group = group // heads_kv if "gqa" in features else 1
        tails = [(heads_kv * group, lengths[0], d), (heads_kv, lengths[1], d),
                 (heads_kv, lengths[1], d_v)]  # fmt: skip
        own = [_part_of_lead(rng, kept) if "broadcast" in features else kept for _ in "qkv"]
        drawn = [(*a, *b) for a, b in zip(own, tails, strict=True)]
        if "broadcast" in features:  # one head may be a matrix
            drawn = [
                x[1:] if len(x) == 3 and x[0] == 1 and pick([False, True]) else x for x in drawn
            ]
    more |= draw(_options(features, d))
    layouts = ["plain", "rows", "random"] if "strides" in features else ["plain"]
    return problem(
        dtype, *drawn, family=family, layouts=draw(st.sampled_from(layouts)), tiles=tiles,
        workspace=draw(st.booleans()), seed=seed, **more,
    )  # fmt: skip


@composite
def _options(draw: Any, features: frozenset[str], d: int) -> dict[str, Any]:
    options: dict[str, Any] = {"mask": draw(mask_names(features))}
    floats = [x.name for x in known_floats()]
    if "scores" in features:
        options["scores"] = tuple(draw(st.lists(st.sampled_from(list(SCORES)), max_size=3)))
    for name in ("bias", "sink"):
        if name in features and draw(st.booleans()):
            options[name] = draw(st.sampled_from(floats))
    factors = [None, None, None, 0.0, -1.0, 2.0, 0.1, 50.0]
    factor = draw(st.sampled_from(factors)) if "scale" in features else None
    if factor is not None:
        options["scale"] = factor / math.sqrt(d)
    if "dropout" in features:
        options["dropout"] = draw(st.sampled_from([0.0, 0.0, 0.1, 0.5, 0.9]))
    if "dlse" in features:
        options["dlse"] = draw(st.booleans())
    return options


@composite
def plain(
    draw: Any,
    dtypes: Iterable[Any] | None = None,
    integers: bool = False,
    square: bool = False,
    group: int | None = None,
    features: Iterable[str] = ALL,
    tiles: tuple[int, int] | None = None,
    shapes: int | None = None,
) -> Problem:
    """Draw arrays of shape (2, H, L, D) without options, for properties that set their own.

    Parameters
    ----------
    dtypes : iterable of dtype_like, optional
        Types to draw from; all by default.
    integers : bool
        Whether elements are eighths of small whole numbers.
    square : bool
        Whether there are as many keys as queries.
    group : int, optional
        Query heads per key head; by default 1 or 2.
    features : iterable of str
        What the kernel supports.
    tiles : tuple of 2 int, optional
        Rows and keys of the kernel's tiles; by default small ones are drawn.
    shapes : int, optional
        How many shapes there are at most; by default any.

    Returns
    -------
    Problem
        A problem with fresh, writable arrays of 1 to 40 rows (1 to 130 for larger `tiles`).
    """
    features = frozenset(features)
    seed = draw(st.integers(0, 2**32 - 1))
    dtype = np.dtype(draw(st.sampled_from([np.dtype(x) for x in dtypes or known_floats()])))
    pick, _ = _picker(draw, shapes, seed)
    blocks = tiles or (pick([5, 8, 16]), pick([5, 8, 16]))
    most, more = (40, edges(8)) if max(blocks) <= 16 else (130, edges(8) + edges(64))
    lengths = [pick([n for n in edges(block) + more if 0 < n <= most]) for block in blocks]
    if square or "lengths" not in features:
        lengths[1] = lengths[0]
    d = pick([1, 3, 8, 17, 33])
    d_v = pick([1, 3, 8, 17, 33]) if "widths" in features else d
    heads_kv = pick([1, 2])
    if "gqa" in features:
        heads = heads_kv * (group or pick([1, 2]))
    else:
        heads = heads_kv
    return problem(
        dtype, (2, heads, lengths[0], d), (2, heads_kv, lengths[1], d),
        (2, heads_kv, lengths[1], d_v), family="eighths" if integers else "normal",
        tiles=blocks, seed=seed,
    )  # fmt: skip
