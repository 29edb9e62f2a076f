"""Steps of a cache, drawn at random, and what plain loops make of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from placement import PLAIN, Placed, random_layout, same_bits

from cupyflash import Rotary
from cupyflash.arrays.dtypes import accumulator
from cupyflash.testing import rho
from cupyflash.testing.precision import Rounding

Array = np.ndarray[Any, Any]
DTYPES = [np.dtype(x) for x in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]


@dataclass
class Step:
    """A call of `append`.

    The cache is in poisoned memory: what is not written is NaN.
    """

    k_new: Array
    v_new: Array
    k: Array
    v: Array
    lengths: Array
    table: Array | None
    offsets: Array | None
    q: Array | None
    rotary: Rotary | None
    positions: Array | None
    placed: list[Placed]

    @property
    def batch(self) -> int:
        """Entries."""
        return len(self.lengths)

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return int(self.k.shape[2])

    @property
    def capacity(self) -> int:
        """Positions of an entry."""
        return self.page_size * (1 if self.table is None else self.table.shape[1])

    def keywords(self) -> dict[str, Any]:
        """Return what the call takes by name."""
        names = "table", "offsets", "q", "rotary", "positions"
        return {name: getattr(self, name) for name in names}


def draw_rotary(
    rng: np.random.Generator, rows: int, pairs: int, interleaved: bool, of: Any = np.float32
) -> Rotary:
    """Return angles of positions, with gaps between their elements or without.

    They are float32, and for rows `of` float64 sometimes float64.
    """
    number = np.dtype(of if of == np.float64 and rng.random() < 0.7 else np.float32)
    angles = np.outer(np.arange(rows), 3.0 ** -np.arange(pairs)).astype(number)
    arrays = []
    for values in (np.cos(angles), np.sin(angles)):
        layout = random_layout(rng, 2, number.itemsize) if rng.random() < 0.5 else PLAIN
        layout = layout._replace(shift=layout.shift // number.itemsize * number.itemsize)
        arrays.append(Placed(values.shape, number, layout, values).view)
    return Rotary(*arrays, interleaved)


def draw_step(
    rng: np.random.Generator,
    dtype: Any,
    paged: bool,
    packed: bool,
    *,
    page_size: int | None = None,
    positions: bool | None = None,
    columns: tuple[int, int] | None = None,
    aligned: bool | None = None,
) -> Step:
    """Draw a step; without a table `page_size` is the capacity.

    `aligned` arrays have rows of whole vectors, and others any strides.
    """
    dtype = np.dtype(dtype)
    batch, heads_kv, group = (int(rng.integers(low, 4)) for low in (1, 1, 1))
    rows = int(rng.integers(1, 6))
    d, d_v = columns or tuple(int(x) for x in rng.choice([4, 6, 10, 16, 34], 2))
    size = page_size or int(rng.choice([1, 3, 16] if paged else [20]))
    number = -(-20 // size) if paged else 1
    counts = rng.integers(0, 6, batch) if packed else np.full(batch, rows)
    lengths = np.array([int(rng.integers(n, size * number + 1)) for n in counts], np.int64)
    offsets = np.concatenate([[0], np.cumsum(counts)]) if packed else None
    table = None
    pages = batch
    if paged:
        pages = batch * number + 2
        table = rng.permutation(pages)[: batch * number].reshape(batch, number).astype(np.int32)
        # Only pages of new rows need to be there.
        for b, (length, n) in enumerate(zip(lengths, counts, strict=True)):
            used = np.arange(number) >= (length - n) // size
            used &= (np.arange(number) < -(-length // size)) & (n > 0)
            table[b, ~used] = -1
    placed: list[Placed] = []
    aligned = bool(rng.random() < 0.4) if aligned is None else aligned

    def place(shape: tuple[int, ...], filled: bool) -> Array:
        layout = PLAIN if aligned else random_layout(rng, len(shape), dtype.itemsize, filled)
        layout = layout._replace(shift=layout.shift // dtype.itemsize * dtype.itemsize)
        values = rng.standard_normal(shape) if filled else None
        placed.append(Placed(shape, dtype, layout, values))
        return placed[-1].view

    lead, total = ((), int(counts.sum())) if packed else ((batch,), rows)
    new = [place((*lead, heads_kv, total, width), True) for width in (d, d_v)]
    cache = [place((pages, heads_kv, size, width), False) for width in (d, d_v)]
    q = rotary = at = None
    if positions or rng.random() < 0.7:
        pairs = int(rng.choice([d // 2, max(1, d // 4)]))
        rotary = draw_rotary(rng, 64, pairs, bool(rng.random() < 0.5), dtype)
        if positions or rng.random() < 0.7:
            q = place((*lead, heads_kv * group, total, d), True)
        if positions or (positions is None and rng.random() < 0.4):
            at = rng.integers(0, 64, (*lead, total))
    return Step(*new, *cache, lengths, table, offsets, q, rotary, at, placed)


class Wanted(NamedTuple):
    """What an array is to hold.

    Attributes
    ----------
    bits : array
        In its own type, of elements that are copied or stay as they are.
    value, bound : array of float64
        Of computed elements: their value, and how far they may be off. Elsewhere NaN.
    """

    bits: Array
    value: Array
    bound: Array

    @classmethod
    def of(cls, array: Array) -> Wanted:
        """Return that an array stays as it is."""
        return cls(array.copy(), *np.full((2, *array.shape), np.nan))

    def check(self, found: Array) -> None:
        """Raise AssertionError if an array holds anything else."""
        computed = ~np.isnan(self.bound)
        assert found.dtype == self.bits.dtype
        assert same_bits(found[~computed], self.bits[~computed])
        assert rho(found[computed], self.value[computed], self.bound[computed]).value <= 1


def rotate_row(
    wanted: Wanted, into: Any, x: Array, position: int, rotary: Rotary, inverse: bool = False
) -> None:
    """Note what rows (H, D) of one position become, pair by pair."""
    wanted.bits[into] = x
    value, bound = np.full((2, *x.shape), np.nan)
    unit, output = (Rounding.to(kind) for kind in (accumulator(x.dtype), x.dtype))
    wide = x.astype(np.longdouble)
    pairs = rotary.cos.shape[1]
    for n in range(pairs):
        first, second = (2 * n, 2 * n + 1) if rotary.interleaved else (n, n + pairs)
        cos, sin = (np.longdouble(table[position, n]) for table in (rotary.cos, rotary.sin))
        sin = -sin if inverse else sin
        a, b = wide[:, first], wide[:, second]
        for column, one, other in ((first, a * cos, -b * sin), (second, b * cos, a * sin)):
            exact, magnitude = one + other, np.abs(one) + np.abs(other)
            computed = 3 * unit.unit * magnitude + 3 * unit.underflow
            value[:, column] = exact
            bound[:, column] = computed + output.unit * (np.abs(exact) + computed)
            bound[:, column] += output.underflow
    wanted.value[into], wanted.bound[into] = value, bound


def appended(step: Step) -> dict[str, Wanted]:
    """Return what a step makes of k, v and, if there are queries, their result."""
    wanted = {"k": Wanted.of(step.k), "v": Wanted.of(step.v)}
    if step.q is not None:
        wanted["q"] = Wanted.of(step.q)
    total = step.k_new.shape[-2]
    for b in range(step.batch):
        low, high = (0, total) if step.offsets is None else step.offsets[b : b + 2]
        for row in range(low, high):
            position = int(step.lengths[b]) - (high - row)
            here: Any = (slice(None), row) if step.offsets is not None else (b, slice(None), row)
            angles = position
            if step.positions is not None:
                angles = int(step.positions[(row,) if step.offsets is not None else (b, row)])
            if step.q is not None and step.rotary is not None:
                angles = min(max(angles, 0), len(step.rotary.cos) - 1)
                rotate_row(wanted["q"], here, step.q[here], angles, step.rotary)
            if not 0 <= position < step.capacity:
                continue
            page, held = (b, position) if step.table is None else divmod(position, step.page_size)
            page = page if step.table is None else int(step.table[b, page])
            if not 0 <= page < len(step.k):
                continue
            into = page, slice(None), held
            wanted["v"].bits[into] = step.v_new[here]
            if step.rotary is None:
                wanted["k"].bits[into] = step.k_new[here]
            else:
                angles = min(max(angles, 0), len(step.rotary.cos) - 1)
                rotate_row(wanted["k"], into, step.k_new[here], angles, step.rotary)
    return wanted


def rotated(x: Array, positions: Array, rotary: Rotary, inverse: bool) -> Wanted:
    """Return what rows (B, H, L, D), or (H, total, D), become."""
    wanted = Wanted.of(x)
    for at in np.ndindex(positions.shape):
        here = (*at[:-1], slice(None), at[-1])
        rotate_row(wanted, here, x[here], int(positions[at]), rotary, inverse)
    return wanted
