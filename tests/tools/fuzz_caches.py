"""Random problems of `append` and `attention_cached`: pages, packed queries, codes of two types.

The model sees a cache as packed sequences of exact numbers, ``scale * code``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import independent_model as model
import ml_dtypes
import numpy as np
from fuzz_problems import DTYPES, Array, cast, described
from independent_model import Arithmetic, Bounded, Options

import cupyflash

FORMS = ("numbers", "int8", "float8_e4m3fn", "float8_e5m2", "int4")


@dataclass
class Cached:
    """A step of a cache: everything of the call, in host memory."""

    dtype: str
    forms: tuple[str, str]  # of keys and of values
    q: Array  # (B, Hq, Lq, D), or packed (Hq, total, D)
    offsets: list[int]  # of the queries of each entry
    packed: bool
    new: tuple[Array, Array]  # rows that `append` writes, as numbers, in the layout of q
    held: list[tuple[Array, Array | None]]  # arrays of keys and of values, and their scales
    lengths: Array
    table: Array | None
    options: Options
    kind: str = "cached"

    def describe(self) -> str:
        """Return the problem in words."""
        o = self.options
        return "\n    ".join([
            f"cached {self.dtype} {self.forms} q {self.q.shape}, offsets {self.offsets}",
            f"caches {[x.shape for x, _ in self.held]}, lengths {self.lengths.tolist()}",
            f"table {None if self.table is None else self.table.tolist()}, packed {self.packed}",
            f"mask {described(o.mask)}, scores {described(o.scores)}, scale {o.scale}, "
            f"sink {described(o.sink)}",
        ])  # fmt: skip


def draw(rng: Any, numbers: Any) -> Cached:
    """Draw a step. `numbers` draws what kernels are not compiled for."""
    forms = tuple(str(rng.choice(FORMS, p=[0.4, 0.2, 0.1, 0.1, 0.2])) for _ in "kv")
    coded = forms != ("numbers", "numbers")
    dtype = str(rng.choice(["float32", "float16", "bfloat16", *(() if coded else ("float64",))]))
    heads_kv, group = int(rng.choice([1, 2])), int(rng.choice([1, 2, 4, 8]))
    sizes = [16, 32, 64, 96, 128] if coded else [5, 16, 40, 64, 128]
    widths = [int(rng.choice(sizes)) for _ in "kv"]
    packed, paged = bool(rng.random() < 0.4), bool(rng.random() < 0.5)
    batch = int(numbers.integers(1, 4))
    counts = numbers.integers(0, 5, batch)
    if not packed:
        counts[:] = numbers.choice([1, 1, 1, 2, 5])
    most = [int(numbers.choice([9, 40, 150, 700])) for _ in counts]
    lengths = np.array([numbers.integers(n, x) for n, x in zip(counts, most, strict=True)])
    page = int(rng.choice([1, 4, 16]))
    if not paged:
        page = int(lengths.max() + numbers.integers(1, 9))
    table, pages = None, batch
    if paged:
        each = int(-(-max(lengths) // page)) + 1
        pages = batch * each + 1
        table = numbers.permutation(pages)[: batch * each].reshape(batch, each).astype(np.int32)
        table[np.arange(each) >= -(-lengths[:, None] // page)] = -1
    rows = pages, heads_kv, page
    held = [_empty(form, dtype, rows, d) for form, d in zip(forms, widths, strict=True)]
    total = int(counts.sum())
    lead = () if packed else (batch,)
    count = total if packed else int(counts[0])
    q = cast(numbers.standard_normal((*lead, heads_kv * group, count, widths[0])), dtype)
    o = Options(scale=[None, None, -0.3, 0.5][numbers.integers(4)])
    if rng.random() < 0.6:
        word = str(rng.choice(["causal", "window", "prefix", "strided"]))
        o.mask = {
            "causal": (word, None),
            "window": (word, int(numbers.integers(0, 60)), 0, None),
            "prefix": (word, int(numbers.integers(0, 30))),
            "strided": (word, 1, -1, int(numbers.integers(2, 5)), 1),
        }[word]
    if rng.random() < 0.3:
        o.scores = ((("softcap", 5.0), ("linear", 0.5, 0.125), ("absolute",))[rng.integers(3)],)
    if rng.random() < 0.25:
        o.sink = cast(numbers.standard_normal(heads_kv * group), "float32")
    offsets = [0, *np.cumsum(counts).tolist()]
    made = Cached(dtype, forms, q, offsets, packed, (q, q), held, lengths, table, o)
    made.new = tuple(
        cast(numbers.standard_normal((*lead, heads_kv, count, d)), dtype) for d in widths
    )
    _fill(made, numbers, counts)
    return made


def _empty(form: str, dtype: str, rows: tuple[int, ...], d: int) -> tuple[Array, Array | None]:
    """Return a cache in which nothing is a number, so far as its type can say that."""
    if form == "numbers":
        return np.full((*rows, d), np.nan, DTYPES[dtype]), None
    columns, groups = (d // 2, d // 32 if d % 32 == 0 else 1) if form == "int4" else (d, 1)
    return np.full((*rows, columns), 0x7F, np.uint8), np.full((*rows, groups), np.nan, np.float32)


def _group(form: str, d: int) -> int:
    """Return how many columns have a scale."""
    return 32 if form == "int4" and d % 32 == 0 else d


def _places(case: Cached, entry: int, positions: Any) -> tuple[Any, Any]:
    """Return pages and rows of positions of an entry."""
    page = case.held[0][0].shape[2]
    if case.table is None:
        return entry, positions
    return case.table[entry, positions // page], positions % page


def _fill(case: Cached, numbers: Any, counts: Array) -> None:
    """Write the positions that are there before the step."""
    for b, (length, n) in enumerate(zip(case.lengths, counts, strict=True)):
        positions = np.arange(length - n)
        if not positions.size:
            continue
        at = _places(case, b, positions)
        for (array, scale), form in zip(case.held, case.forms, strict=True):
            d = array.shape[-1] * (2 if form == "int4" else 1)
            x = numbers.standard_normal((array.shape[1], positions.size, d)).astype(np.float32)
            if form == "numbers":
                array[at[0], :, at[1]] = cast(x, case.dtype).swapaxes(0, 1)
                continue
            codes, scales = cupyflash.quantize(x, form, group=_group(form, d))
            array[at[0], :, at[1]] = codes.view(np.uint8).swapaxes(0, 1)
            scale[at[0], :, at[1]] = scales.swapaxes(0, 1)


def computed(case: Cached, move: Any, host: Any) -> tuple[dict[str, Array], list[Any]]:
    """Run a step; return its results as packed rows, and the caches afterwards."""
    o, many = case.options, np.diff(case.offsets)
    arrays = [(move(x), None if s is None else move(s)) for x, s in case.held]
    (k, k_scale), (v, v_scale) = arrays
    told: dict[str, Any] = {}
    if case.forms != ("numbers", "numbers"):
        told = {"k_scale": k_scale, "v_scale": v_scale}
        told["kv_dtype"] = tuple(None if x == "numbers" else x for x in case.forms)
    lengths = move(case.lengths)
    paged = {} if case.table is None else {"table": move(case.table)}
    of_rows = {"offsets": np.asarray(case.offsets)} if case.packed else {}
    cupyflash.append(*map(move, case.new), k, v, lengths, **paged, **of_rows, **told)
    options: dict[str, Any] = {"scale": o.scale}
    import fuzz

    if o.mask is not None:
        options["mask"] = fuzz.make_mask(o.mask, np)
    if o.scores:
        options["score_mod"] = [fuzz.make_score(x, np) for x in o.scores]
    if o.sink is not None:
        options["sink"] = move(o.sink)
    of_queries = {"offsets_q": np.asarray(case.offsets)} if case.packed else {}
    out, lse = cupyflash.attention_cached(
        move(case.q), k, v, lengths, return_lse=True, **paged, **of_queries, **told, **options
    )
    held = [(host(x), None if s is None else host(s)) for x, s in arrays]
    found = {"out": host(out), "lse": host(lse)}
    if not case.packed:  # (B, H, L, ...) to (H, B L, ...)
        found = {
            name: np.concatenate(list(x), axis=1) if many.size else x[:0]
            for name, x in found.items()
        }
    return found, held


def numbers_of(array: Array, scale: Array | None, form: str) -> Array:
    """Return the exact numbers of a cache."""
    if scale is None:
        return array.astype(np.float64)
    if form == "int4":
        codes = np.stack([array & 15, array >> 4], axis=-1).astype(np.int8)
        codes = np.where(codes > 7, codes - 16, codes)
        codes = codes.reshape(*array.shape[:-1], 2 * array.shape[-1])
        values = codes.astype(np.float64)
    elif form == "int8":
        values = array.view(np.int8).astype(np.float64)
    else:
        values = array.view(getattr(ml_dtypes, form)).astype(np.float64)
    width = values.shape[-1] // scale.shape[-1]
    return values * np.repeat(scale.astype(np.float64), width, axis=-1)


def exact(case: Cached, held: list[Any], ar: Arithmetic) -> dict[str, Bounded]:
    """Return exact results with their bounds, given the caches after the step."""
    rows: list[list[Array]] = [[], []]
    for b, length in enumerate(case.lengths):
        at = _places(case, b, np.arange(length))
        for part, (array, scale), form in zip(rows, held, case.forms, strict=True):
            picked = array[at[0], :, at[1]]
            scales = None if scale is None else scale[at[0], :, at[1]]
            part.append(numbers_of(picked, scales, form).swapaxes(0, 1))
    k, v = (np.concatenate(part, axis=1) for part in rows)
    q = case.q if case.packed else np.concatenate(list(case.q), axis=1)
    if case.forms != ("numbers", "numbers"):
        ar = replace(ar, scaled=True)
    offsets = (case.offsets, [0, *np.cumsum(case.lengths).tolist()])
    wanted, _, _ = model.attention(q, k, v, case.options, case.dtype, ar, offsets)
    return wanted


def written_wrong(case: Cached, held: list[Any]) -> str:
    """Return in words which row of a cache is not what `append` has to write or to leave alone."""
    for name, (before, old), (array, scale), form, new in zip(
        "kv", case.held, held, case.forms, case.new, strict=True
    ):
        wanted, wanted_scale = before.copy(), None if old is None else old.copy()
        rows = new if case.packed else np.concatenate(list(new), axis=1)
        for b in range(len(case.lengths)):
            first, last = case.offsets[b : b + 2]
            if first == last:
                continue
            length = case.lengths[b]
            at = _places(case, b, np.arange(length - (last - first), length))
            x = rows[:, first:last]
            if wanted_scale is None:
                wanted[at[0], :, at[1]] = x.swapaxes(0, 1)
                continue
            codes, scales = cupyflash.quantize(x, form, group=_group(form, x.shape[-1]))
            wanted[at[0], :, at[1]] = codes.view(np.uint8).swapaxes(0, 1)
            wanted_scale[at[0], :, at[1]] = scales.swapaxes(0, 1)
        if array.tobytes() != wanted.tobytes():
            return f"{name} holds other rows after append"
        if wanted_scale is not None and scale.tobytes() != wanted_scale.tobytes():
            return f"{name}_scale holds other scales after append"
    return ""
