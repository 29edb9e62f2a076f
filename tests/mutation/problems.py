"""A few small problems that together reach every line of the kernels, with their exact bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from emulator.blocks import Blocks
from emulator.machine import FORWARD, REVERSE, Schedule, randomly
from emulator.problems import combine_bounds
from harness import attend, attend_backward
from placement import Layout, Placed, random_layout
from strategies import Problem

from cupyflash import lookup, masks, scores
from cupyflash.expr import tanh, where
from cupyflash.reference.cpu import philox
from cupyflash.testing import FAMILIES

Array = np.ndarray[Any, Any]

F16, F32, F64 = (np.dtype(x) for x in (np.float16, np.float32, np.float64))
BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass
class Case:
    """A problem, and how it is run.

    Attributes
    ----------
    name : str
        What it is there for.
    problem : Problem
        Clean arrays, from which bounds are computed.
    blocks, schedule
        As of `Emulator`.
    arrays : dict
        What kernels get instead of the problem's: NaN where nobody looks.
    counted : int or None
        Tiles that a pass of queries over keys visits, where they are counted.
    wrong_offsets : tuple of 2 lists, or None
        Offsets that kernels get.
    judged : tuple of str
        Results that are looked at; all of them where it is empty.
    nan : dict or None
        Where results are NaN, if that is all that is known of them, or what they nearly are
        where they are numbers; without gradients in it there
        is no backward.
    untouched : bool
        Whether results that are NaN have not been written.
    foreign_lse : bool
        Whether the backward gets an lse that is rounded down where it is not 0, as another
        program's may be.
    deterministic : bool
        Whether dq has a kernel of its own, where one that adds to it would be faster.
    """

    name: str
    problem: Problem
    blocks: Blocks
    schedule: Schedule = FORWARD
    arrays: dict[str, Array] = field(default_factory=dict)
    counted: int | None = None
    wrong_offsets: tuple[list[int], list[int]] | None = None
    judged: tuple[str, ...] = ()
    nan: dict[str, Array] | None = None
    untouched: bool = False
    foreign_lse: bool = False
    deterministic: bool = False


def _place(rng: np.random.Generator, values: Array, layout: str) -> Array:
    if layout == "plain":
        return Placed(values.shape, values.dtype, Layout(), values).view
    if layout == "shifted":  # from the second element on where a vector may lie
        return Placed(values.shape, values.dtype, Layout(shift=values.itemsize), values).view
    if layout == "rows":  # (..., L, H, D): contiguous rows that lie apart
        axes = list(range(values.ndim))
        order = (*axes[:-3], axes[-2], axes[-3], axes[-1]) if values.ndim > 2 else tuple(axes)
        return Placed(values.shape, values.dtype, Layout(order), values).view
    if layout == "padded":  # rows begin on 16 bytes, and NaN lies between them
        vector = 16 // values.itemsize
        whole = np.full((*values.shape[:-1], -(-values.shape[-1] // vector) * vector), np.nan)
        padded = whole.astype(values.dtype)[..., : values.shape[-1]]
        padded[...] = values
        return padded
    if layout.startswith("apart "):  # so many NaN between rows
        shape = (*values.shape[:-1], values.shape[-1] + int(layout.partition(" ")[2]))
        apart = np.full(shape, np.nan).astype(values.dtype)[..., : values.shape[-1]]
        apart[...] = values
        return apart
    if layout == "windows":  # a row begins at the second element of the one before
        row = np.concatenate([values[..., 0].ravel(), values[..., -1, 1:].ravel()])
        steps = (*[0] * (values.ndim - 2), *[row.itemsize] * 2)
        return np.lib.stride_tricks.as_strided(row, values.shape, steps[-values.ndim :])
    return Placed(
        values.shape, values.dtype, random_layout(rng, values.ndim, values.itemsize), values
    ).view


def case_of(
    name: str,
    dtype: np.dtype[Any],
    heads: tuple[int, int],
    lengths: tuple[int, int],
    d: tuple[int, int],
    options: Callable[[np.random.Generator], dict[str, Any]] = lambda rng: {},
    lead: tuple[tuple[int, ...], ...] = ((), (), ()),
    offsets: tuple[list[int], list[int]] | None = None,
    family: str = "normal",
    layout: str = "plain",
    dlse: bool = True,
    hard: bool = False,
    blocks: tuple[int, int, int] = (16, 16, 32),
    tensor: bool = False,
    hopper: bool = False,
    seed: int = 0,
    **more: Any,
) -> Case:
    rng = np.random.default_rng(seed)
    rows = [lengths[0], lengths[1], lengths[1]]
    if offsets is not None:
        rows = [offsets[0][-1], offsets[1][-1], offsets[1][-1]]
    shapes = {
        name: (*part, h, n, width)
        for name, part, h, n, width in zip(
            "qkv", lead, (heads[0], heads[1], heads[1]), rows, (d[0], *d), strict=True
        )
    }
    whole = np.broadcast_shapes(*lead)
    shapes["do"] = (*whole, heads[0], rows[0], d[1])
    made = FAMILIES[family](rng, shapes)
    arrays = {name: _place(rng, x.astype(dtype), layout) for name, x in made.items()}
    accumulator = F64 if dtype == F64 else F32
    drawn = None
    if dlse:
        drawn = _place(rng, rng.standard_normal(shapes["do"][:-1]).astype(accumulator), layout)
    problem = Problem(
        dtype, family, **arrays, dlse=drawn, options=options(rng), offsets=offsets,
        tiles=blocks[:2], layouts="random" if layout == "random" else "plain", workspace=True,
        hard=hard, seed=seed,
    )  # fmt: skip
    return Case(name, problem, Blocks(*blocks, tensor=tensor or hopper, hopper=hopper), **more)


def normal(rng: np.random.Generator, *shape: int, dtype: Any = F32) -> Array:
    return rng.standard_normal(shape).astype(dtype)


def everything(rng: np.random.Generator, len_q: int, len_k: int, sink: Any) -> dict[str, Any]:
    """Options that put every piece of code into a kernel."""
    return {
        "mask": masks.causal(), "score_mod": scores.softcap(2.0), "dropout": 0.3,
        "bias": normal(rng, 4, len_q, len_k), "sink": sink, "seed": 2**63 + 12345,
    }  # fmt: skip


def unseen(case: Case, keys: int) -> Case:
    """Make the last `keys` keys, which no query sees, and their values NaN or infinite."""
    for name, value in (("k", np.nan), ("v", np.inf)):
        held = getattr(case.problem, name)
        dirty = np.copy(held, order="K")
        dirty[..., -keys:, :] = value
        case.arrays[name] = dirty
    return case


def _empty_rows(case: Case, rows: int) -> Case:
    """Make the gradients of the first queries, which see nothing, NaN."""
    dirty = np.array(case.problem.do)
    dirty[..., :rows, :] = np.nan
    case.arrays["do"] = dirty
    return case


def _uneven(case: Case) -> Case:
    """Let do's rows begin where vectors are read in some batch entries, and not in others."""
    do = case.problem.do
    rows = do.shape[-2] * do.shape[-1]
    whole = np.zeros((do.size // rows, rows + 1), do.dtype)
    whole[:, :-1] = do.reshape(-1, rows)
    uneven = whole[:, :-1].reshape(do.shape, copy=False)
    return replace(case, problem=replace(case.problem, do=uneven))


def _columns(case: Case) -> Case:
    """Let rows begin where vectors are read, with columns that lie apart, and with only one."""
    problem = case.problem
    apart = np.full((*problem.k.shape[:-1], 2 * problem.k.shape[-1]), np.nan, problem.k.dtype)
    apart[..., ::2] = problem.k
    one = np.full((*problem.do.shape[:-1], 8), np.nan, problem.do.dtype)
    one[..., :1] = problem.do[..., :1]
    do = np.broadcast_to(one[..., :1], problem.do.shape)
    return replace(case, problem=replace(problem, k=apart[..., ::2], do=do))


def visited(case: Case) -> Case:
    """Count the tiles in which some pair is allowed: each of these masks lets no other through."""
    problem, blocks = case.problem, case.blocks
    mask = problem.options.get("mask")
    if problem.offsets is None:
        lead = np.broadcast_shapes(*(x.shape[:-3] for x in (problem.q, problem.k, problem.v)))
        len_q, len_k = problem.q.shape[-2], problem.k.shape[-2]
        whole = np.ones((len_q, len_k), bool)
        if mask is not None:
            whole = mask.to_array(lead, problem.q.shape[-3], len_q, len_k)
        whole = np.broadcast_to(whole, (*lead, problem.q.shape[-3], len_q, len_k))
        pieces = list(whole.reshape(-1, len_q, len_k))
    else:
        sizes = zip(*(np.diff(x) for x in problem.offsets), strict=True)
        pieces = [np.tril(np.ones((m, n), bool), n - m) for m, n in sizes for _ in problem.q]
    found = 0
    for piece in pieces:
        for i in range(0, piece.shape[0], blocks.block_q):
            for j in range(0, piece.shape[1], blocks.block_kv):
                found += piece[i : i + blocks.block_q, j : j + blocks.block_kv].any()
    return replace(case, counted=int(found))


def _sparse(rng: np.random.Generator) -> dict[str, Any]:
    pairs = rng.random((1, 2, 21, 37)) < 0.4
    pairs[..., :16, 16:32] = False
    pairs[..., 16:, :16] = True
    pairs[..., -3:] = False
    return {
        "mask": np.asarray(pairs), "bias": normal(rng, 1, 21, 1, dtype=F16), "dropout": 0.5,
        "seed": 7,
    }  # fmt: skip


def _by_keys(rng: np.random.Generator) -> dict[str, Any]:
    bias = normal(rng, 4, 1, 19, dtype=BF16)
    bias[:, :, 7:11] = -np.inf
    return {"bias": bias, "sink": normal(rng, 4, dtype=F64), "scale": -0.2}


def looked_up(rng: np.random.Generator) -> dict[str, Any]:
    """A mask whose look-ups leave their arrays where a query or key is none of its sequence's."""
    i_rows, j_rows = (lookup(np.ones((10, 256), np.int64)[:, :1]) for _ in range(2))
    allowed = masks.mask(lambda b, h, i, j: i_rows[i, 0] + j_rows[j, 0] > i - 5)
    return {"mask": allowed, "dropout": 0.25, "seed": 99}


def _dropped(rng: np.random.Generator) -> dict[str, Any]:
    """At a probability that is one number's own: of a pair of `PACKED`'s last sequence."""
    counter = np.arange(8), 18 >> 4 << 3 | 18 & 7, 6, 0
    words = np.ravel(philox.philox4x32(counter, philox.split_seed(99), philox.DROPOUT_ROUNDS))
    numbers = [int(x) >> bits & (philox.DRAWS - 1) for x in words for bits in (0, 16)]
    number = min(numbers, key=lambda x: abs(x - philox.DRAWS // 4))
    return {"mask": masks.causal(), "dropout": number / philox.DRAWS, "seed": 99}


def _one_key(case: Case) -> Case:
    """Let the one score of the first query that sees a key be 0: so is its lse."""
    q = np.array(case.problem.q)
    q[:, LONG[1] - SHORT[1]] = 0
    return replace(case, problem=replace(case.problem, q=q))


def _no_sink(case: Case) -> Case:
    """Make do NaN where the sink takes no part; the gradient of that is 0 all the same."""
    case = _empty_rows(case, 0)
    case.arrays["do"][..., 2, 20, :] = np.nan
    return replace(case, judged=("dsink",))


def weights_of_0(rng: np.random.Generator) -> dict[str, Any]:
    changed = scores.score(
        lambda s, b, h, i, j: where(j == 0, -1.0, where(j == 5, -200.0, tanh(s)))
    )
    return {"mask": masks.lengths(15), "score_mod": changed}


def infinite_keys(case: Case) -> Case:
    """Keys that weights and gradients of merely 0 make NaN, and NaN that nobody sees."""
    dirty = np.array(case.problem.k)
    dirty[0, 0] = dirty[1, 5] = np.inf
    dirty[2, -3:] = np.nan
    case.arrays["k"] = dirty
    arrays = case.problem.q, dirty, case.problem.v
    wanted = attend_backward(case.problem.do, *arrays, **case.problem.options)
    nan = {name: np.isnan(getattr(wanted, name)) for name in ("dq", "dk", "dv")}
    assert nan["dq"][:2].all()
    assert not nan["dq"][2].any()
    return replace(case, nan=nan)


def not_finite(case: Case, spots: dict[str, list[tuple[int, int, float]]]) -> Case:
    """Put values at rows and columns of arrays, where they reach the rows alone that see them."""
    problem = case.problem
    dirty = {name: np.array(getattr(problem, name)) for name in ("do", "q", "k", "v")}
    for name, values in spots.items():
        for row, column, value in values:
            dirty[name][..., row, column] = value
    case.arrays.update(dirty)
    _, *rows = dirty.values()
    made = attend(*rows, **problem.options)
    wanted = attend_backward(*dirty.values(), **problem.options)
    known = {name: getattr(made, name) for name in ("out", "lse")}
    known |= {name: getattr(wanted, name) for name in ("dq", "dk", "dv")}
    assert all(0 < np.isnan(each).mean() < 1 for each in known.values())
    return replace(case, nan=known)


def only_rows(first: int, last: int, names: tuple[str, ...], case: Case) -> Case:
    """Let these rows of packed results hold numbers, and the others stay as they were: NaN."""
    do = case.problem.do
    likes = {"out": do, "lse": do[..., 0], "dq": case.problem.q, "dk": case.problem.k,
             "dv": case.problem.v}  # fmt: skip
    nan = {name: np.ones(likes[name].shape, bool) for name in names}
    for each in nan.values():
        each[:, first:last] = False
    if "dq" in nan and case.problem.dtype == case.problem.accumulator:
        nan["dq"][...] = False  # blocks add to it, so that it is 0 before
    return replace(case, nan=nan, untouched=True)


SPLIT = {"precision": "tf32x3"}
PACKED = [0, 3, 3, 21, 40], [0, 17, 20, 20, 53]
LONG, SHORT, TENS = [0, 90, 120, 173], [0, 9, 13, 20], ([0, 10, 20, 30, 40, 50],) * 2


def cases() -> list[Case]:
    """Return the problems, cheap ones that find much first."""
    sink = np.array([0.0, -1.0, -np.inf, 2.0], np.float32)
    return [
        case_of("everything", F32, (4, 2), (37, 29), (24, 40),
                lambda r: everything(r, 37, 29, sink), lead=((2,), (2,), (1,)), foreign_lse=True),
        case_of("everything, strided", F32, (4, 1), (16, 32), (24, 40),
              lambda r: everything(r, 16, 32, sink[::-1].astype(F64)),
              lead=((2, 1), (1, 3), (2, 3)), layout="random", schedule=randomly(1), seed=1),
        _no_sink(case_of("a sink that takes no part", F32, (4, 2), (37, 29), (24, 40),
                       lambda r: everything(r, 37, 29, sink), lead=((2,), (2,), (1,)))),
        case_of("whole tiles", F32, (2, 2), (64, 48), (8, 8), lead=((2,),) * 3,
                blocks=(16, 32, 64)),
        _columns(case_of("tiles that end early", F32, (2, 2), (29, 53), (4, 8),
                       blocks=(16, 32, 64), seed=2)),
        case_of("odd", F32, (3, 1), (141, 31), (8, 8), lambda r: {"scale": -0.7}, layout="random",
              blocks=(16, 32, 64), schedule=REVERSE, seed=3),
        case_of("four leading axes", F32, (2, 1), (3, 18), (8, 8),
              lead=((2, 1, 2, 1), (1, 2, 1, 3), (2, 1, 1, 3)), layout="rows",
              blocks=(16, 32, 64), dlse=False, seed=4),
        case_of("very negative scores", F32, (1, 1), (5, 40), (8, 8), family="negative scores",
              blocks=(16, 32, 64), seed=5, hard=True),
        case_of("growing scores", F32, (1, 1), (5, 64), (8, 8), lambda r: {"scale": 2.0},
              family="offset", blocks=(16, 32, 64), seed=6),
        case_of("huge logits", F32, (1, 1), (18, 40), (8, 8), family="huge logits", hard=True,
              blocks=(16, 32, 64), seed=7),
        visited(unseen(_empty_rows(
            case_of("window and lengths", BF16, (2, 1), (53, 45), (40, 16),
                  lambda r: {"mask": masks.window(9, 3, -12) & masks.lengths(np.array([40, 20])),
                             "sink": np.array([0.25, -3.0], np.float16)},
                  lead=((2,), (2,), (1,)), blocks=(32, 16, 64), seed=8), 2), 5)),
        case_of("packed segments", F16, (2, 1), (0, 0), (33, 7),
              lambda r: {"mask": masks.causal() & masks.segments(
                            np.sort(r.integers(0, 3, 40)), np.sort(r.integers(0, 3, 53))),
                         "score_mod": scores.alibi(np.array([0.5, 0.25], np.float16)),
                         "sink": normal(r, 2, dtype=BF16), "bias": normal(r, 4, 2, 19, 33)},
              offsets=PACKED, layout="padded", blocks=(16, 32, 64), schedule=randomly(2), seed=9),
        unseen(case_of("pairs one by one", F64, (2, 2), (21, 37), (5, 33), _sparse,
                      lead=((2,), (1,), (2,)), layout="random", blocks=(16, 16, 32), seed=10), 3),
        case_of("bias of keys", F16, (4, 2), (33, 19), (64, 48), _by_keys, lead=((2,), (2,), (2,)),
              layout="rows", blocks=(32, 16, 128), seed=11),
        visited(case_of("packed and causal", F32, (2, 2), (0, 0), (16, 20),
                       _dropped, offsets=PACKED, blocks=(16, 16, 32), dlse=False, seed=12)),
        only_rows(0, 40, ("out", "lse"), case_of("wrong offsets", F32, (2, 2), (0, 0), (16, 20),
              _dropped, offsets=PACKED, blocks=(16, 16, 32), dlse=False, seed=13, layout="rows",
              wrong_offsets=(PACKED[0], [-5, 17, 12, 10**12, 60]))),
        only_rows(16, 26, ("out", "lse", "dq", "dk", "dv"), case_of(
              "wrong offsets of both", F32, (2, 2), (0, 0), (16, 20), looked_up, offsets=TENS,
              blocks=(16, 16, 32), dlse=False, seed=19, layout="rows",
              wrong_offsets=([16, *[31] * 5],) * 2)),
        replace(_one_key(visited(
            case_of("more queries", F32, (1, 1), (0, 0), (16, 20), _dropped, offsets=(LONG, SHORT),
                  blocks=(16, 16, 32), dlse=False, seed=20))), foreign_lse=True),
        visited(case_of("more keys", F32, (1, 1), (0, 0), (16, 20), _dropped,
                       offsets=(SHORT, LONG), blocks=(16, 16, 32), dlse=False, seed=21)),
        visited(case_of("offsets beyond the ends", F32, (2, 2), (0, 0), (16, 20), _dropped,
                       offsets=([0, 3, 40, 40], [0, 17, 53, 53]), blocks=(16, 16, 32), dlse=False,
                       seed=24, wrong_offsets=([-5, 3, 10**12, 60], [-(2**40), 17, 60, 10**12]))),
        visited(case_of("no queries", F32, (2, 2), (0, 0), (16, 20),
                       lambda r: _dropped(r) | {"sink": normal(r, 2)},
                       offsets=([0, 0, 0], [0, 5, 9]), blocks=(16, 16, 32), dlse=False, seed=22)),
        case_of("large heads", F32, (1, 1), (33, 35), (300, 20), blocks=(32, 32, 128), seed=14),
        case_of("many chunks", F32, (1, 1), (5, 20), (484, 8), blocks=(16, 32, 128), seed=23),
        case_of("more columns than threads copy", F64, (1, 1), (5, 20), (8, 300),
              blocks=(4, 32, 128), seed=24),
        case_of("rows where no vector begins", F16, (1, 1), (5, 40), (8, 16), layout="shifted",
              blocks=(16, 32, 32), seed=25),
        case_of("rows an element apart", F16, (1, 1), (5, 40), (8, 16), layout="apart 1",
              blocks=(16, 32, 32), seed=26),
        case_of("rows that overlap", F16, (1, 1), (5, 40), (8, 16), layout="windows", dlse=False,
              blocks=(16, 32, 32), seed=27),
        infinite_keys(case_of("weights of 0", F32, (3, 3), (17, 18), (8, 8), weights_of_0,
                             blocks=(16, 16, 32), dlse=False, seed=23)),
        _uneven(case_of("shared queries", F32, (1, 1), (3, 18), (8, 8),
              lambda r: {"mask": masks.lengths(np.array([0, 9, *r.integers(0, 19, 14)]))},
              lead=((2, 1, 2, 1), (1, 2, 1, 2), (1, 2, 1, 2)), layout="random", seed=18)),
        case_of("one column", BF16, (1, 1), (3, 18), (1, 3),
              lambda r: {"score_mod": scores.score(lambda s, b, h, i, j: s - 0.1 * abs(i - j)),
                         "mask": masks.mask(lambda b, h, i, j: lookup(np.arange(18))[j] % 5 > i)},
              layout="random", seed=15),
        visited(case_of("window in float64", F64, (1, 1), (40, 64), (16, 18),
                       lambda r: {"mask": masks.window(7, 0)}, blocks=(16, 32, 32),
                       schedule=REVERSE, seed=16)),
        case_of("near overflow", F16, (1, 1), (20, 20), (64, 48), family="near overflow",
              blocks=(16, 16, 128), seed=17, hard=True),
    ]  # fmt: skip


@dataclass
class Parts:
    """Results over disjoint sets of keys, and what they make together.

    Attributes
    ----------
    parts : list of (out, lse)
        What is joined.
    out, lse : array
        How the results are to lie.
    wanted : dict
        "out" and "lse" to (exact, bound).
    """

    name: str
    parts: list[tuple[Array, Array]]
    out: Array
    lse: Array
    wanted: dict[str, tuple[Array, Array]]


def parts() -> list[Parts]:
    """Return the problems of combine."""
    return [
        _parts("two", F32, 2, (2,), 3, 40, [F32], "plain"),
        _parts("sixteen, strided", F16, 16, (2, 3), 5, 130, [F16, F32, BF16, F32], "random"),
        _parts("float64", F64, 3, (), 9, 33, [F64], "random"),
        _parts("bfloat16", BF16, 5, (2, 3, 2, 2), 3, 7, [BF16, F32], "random"),
        _largest_parts(),
    ]


def _largest_parts() -> Parts:
    """Return three parts of the largest number, of either sign: rounded weights exceed 1 in sum."""
    lse, out = np.zeros((2, 3), np.float32), np.full((2, 3, 40), np.finfo(np.float32).max)
    out[1] *= -1
    bounds = combine_bounds([out] * 3, [lse] * 3, F32)
    return Parts("largest", [(out, lse)] * 3, np.zeros_like(out), np.zeros_like(lse), bounds)


def _parts(
    name: str, dtype: np.dtype[Any], number: int, lead: tuple[int, ...], rows: int, columns: int,
    kinds: list[np.dtype[Any]], layout: str,
) -> Parts:  # fmt: skip
    rng = np.random.default_rng(number)
    accumulator = F64 if dtype == F64 else F32
    shape = (*lead, 2, rows)
    lses = [rng.standard_normal(shape) * 20 for _ in range(number)]
    lses = [np.where(rng.random(shape) < 0.3, -np.inf, x).astype(accumulator) for x in lses]
    for x in lses:
        x[..., 0] = -np.inf  # a row that no part saw
    lses[0][..., 1], lses[1][..., 1] = -120, -121
    lses[0][..., 2], lses[1][..., 2] = 0, -1
    outs = [
        np.where(np.isinf(x)[..., None], np.nan, rng.standard_normal((*shape, columns))).astype(
            kinds[n % len(kinds)]
        )
        for n, x in enumerate(lses)
    ]
    bounds = combine_bounds(outs, lses, dtype)
    return Parts(
        name,
        [(_place(rng, a, layout), _place(rng, b, layout)) for a, b in zip(outs, lses, strict=True)],
        _place(rng, np.zeros(outs[0].shape, dtype), layout),
        _place(rng, np.zeros(lses[0].shape, accumulator), layout),
        bounds,
    )
