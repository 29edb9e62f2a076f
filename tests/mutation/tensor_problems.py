"""Problems for the tensor cores of compute capability 8.0, of every type that they multiply."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from emulator.machine import randomly

from cupyflash import masks, scores
from cupyflash.expr import len_q, log, where

from .problems import (
    BF16,
    F16,
    F32,
    F64,
    PACKED,
    SPLIT,
    TENS,
    Case,
    case_of,
    everything,
    infinite_keys,
    looked_up,
    normal,
    not_finite,
    only_rows,
    unseen,
    visited,
    weights_of_0,
)

# The first key of all is seen by few queries; of a tile some warps see some. Rows and columns of
# all kinds have such numbers: of both halves of a piece of 16 rows, and of more than one warp.
SPOTS = {
    "v": [(33, 3, math.nan), (39, 3, math.nan), (48, 11, math.inf), (50, 37, math.inf)],
    "do": [(41, 2, math.inf), (52, 36, math.nan), (64, 21, math.nan)],
    "k": [(0, 1, math.nan), (55, 7, math.nan), (55, 23, math.nan)],
}
# The same where the first of three sequences has such a key, and the second all else.
FULL_SPOTS = SPOTS | {"do": SPOTS["do"][:2], "k": SPOTS["k"][:1]}


def _zero_queries(case: Case) -> Case:
    """Let all logits be 0, however large the scale is."""
    return replace(case, problem=replace(case.problem, q=np.zeros_like(case.problem.q)))


def large_rows(case: Case) -> Case:
    """Let the logits of every third query be huge, and those of its neighbours not."""
    q = np.array(case.problem.q)
    for first in (0, 1):
        q[..., first::3, :] *= q.dtype.type(2.0**-20)
    return replace(case, problem=replace(case.problem, q=q))


def _growing(case: Case) -> Case:
    """Let gradients grow from query to query and from key to key, and be large in some lanes."""
    grown = {}
    for name, first, last, large in (("do", -14, 2, 11), ("v", -2, 8, 0)):
        values = np.array(getattr(case.problem, name))
        rows = np.arange(values.shape[-2])
        powers = np.exp2(np.linspace(first, last, len(rows)) + large * (rows % 8 == 3))
        grown[name] = (values * powers[:, None]).astype(values.dtype)
    return replace(case, problem=replace(case.problem, **grown))


def _ending() -> scores.Score:
    """Make a change that is NaN behind the last query."""
    return scores.score(lambda s, b, h, i, j: s + log(len_q - i) * 0.1)


def _too_large_to_split(case: Case) -> Case:
    """Let some numbers be rounded to infinity where they are split, and products be moderate."""
    q, k, v = (np.array(getattr(case.problem, name)) for name in "qkv")
    q[..., 5], k[..., 5] = 1.5e-38, 0
    k[..., (3, 20), 5] = 3.4028e38, -3.4028e38
    q[..., 3, 6], k[..., 6] = 3.4028e38, 1e-38
    v[..., 9, 2], v[..., 0, 7] = 1.8e38, -3.4028e38
    return replace(case, problem=replace(case.problem, q=q, k=k, v=v))


def cases() -> list[Case]:
    """Return the problems, cheap ones that find much first."""
    sink = np.array([0.0, -1.0, -np.inf, 2.0], np.float32)

    def all_of(rng: np.random.Generator) -> dict[str, Any]:
        return everything(rng, 37, 29, sink)

    def window(rng: np.random.Generator) -> dict[str, Any]:
        return {"mask": masks.window(9, 3, -12) & masks.lengths(np.array([40, 20])), "scale": -0.1}

    def near(rng: np.random.Generator) -> dict[str, Any]:
        return {"mask": masks.window(6, 0)}

    return [
        case_of("by tensor cores", BF16, (4, 2), (37, 29), (24, 40), blocks=(32, 16, 64),
                tensor=True, seed=18),
        case_of("everything by tensor cores", F16, (4, 2), (37, 29), (24, 40), all_of,
                lead=((2,), (2,), (1,)), blocks=(32, 16, 64), tensor=True, seed=19),
        case_of("everything by tensor cores, deterministic", BF16, (4, 2), (63, 61), (40, 24),
                lambda r: everything(r, 63, 61, sink), lead=((3,), (3,), (1,)),
                blocks=(32, 16, 64), tensor=True, seed=40, deterministic=True),
        *(_growing(case_of(f"gradients that grow by tensor cores{apart}", F16, (2, 1),
                           (70, 60), (24, 40), lambda r: {"scale": 0.01}, blocks=(16, 16, 32),
                           dlse=False, tensor=True, seed=41, deterministic=bool(apart)))
          for apart in ("", ", deterministic")),
        *(only_rows(16, 26, ("out", "lse", "dq", "dk", "dv"), case_of(
            f"wrong offsets by tensor cores, {dtype.name}", dtype, (2, 2), (0, 0), (16, 20),
            looked_up, offsets=TENS, blocks=(16, 16, 32), dlse=False, tensor=True, seed=42,
            layout="rows", wrong_offsets=([16, *[31] * 5],) * 2, deterministic=dtype == F16))
          for dtype in (F16, F64)),
        visited(unseen(case_of(
            "window by tensor cores", BF16, (2, 1), (53, 45), (136, 16), window,
            lead=((2,), (2,), (1,)), layout="rows", blocks=(64, 16, 64), tensor=True, seed=20), 5)),
        case_of("scores that end by tensor cores", BF16, (1, 1), (37, 32), (8, 8),
                lambda r: {"score_mod": _ending()}, blocks=(16, 32, 32), tensor=True, seed=28),
        unseen(case_of("keys that scores hide by tensor cores", F16, (2, 1), (37, 32), (24, 16),
                       lambda r: {"score_mod": scores.score(
                           lambda s, b, h, i, j: where(j >= 24, -math.inf, s))},
                       dlse=False, blocks=(16, 32, 32), tensor=True, seed=29), 8),
        unseen(case_of("bias, and keys that scores hide, by tensor cores", F16, (2, 1), (37, 32),
                       (24, 16), lambda r: {"bias": normal(r, 2, 37, 32), "score_mod": scores.score(
                           lambda s, b, h, i, j: where(j >= 24, -math.inf, s))},
                       dlse=False, blocks=(16, 32, 32), tensor=True, seed=51), 8),
        infinite_keys(case_of("weights of 0 by tensor cores", F16, (3, 3), (17, 18), (8, 8),
                              weights_of_0, blocks=(16, 16, 32), dlse=False, tensor=True, seed=23)),
        *(case_of(f"rows of {d} columns that end within a vector, by tensor cores", BF16, (2, 1),
                  (37, 29), (d, 13), layout="padded", blocks=(32, 16, 64), tensor=True, seed=38)
          for d in (20, 23)),
        case_of("packed by tensor cores", F16, (2, 1), (0, 0), (33, 256),
                lambda r: {"mask": masks.causal()}, offsets=PACKED, layout="random",
                blocks=(16, 32, 32), tensor=True, schedule=randomly(3), seed=21,
                deterministic=True),
        *(case_of(f"bias of {what} by tensor cores", F16, (2, 1), (75, 70), (24, 16),
                  lambda r, shape=shape: {"bias": normal(r, *shape)}, blocks=blocks,
                  dlse=False, tensor=True, seed=53)
          for what, shape, blocks in (("keys", (2, 1, 70), (64, 32, 64)),
                                      ("queries", (1, 75, 1), (16, 32, 64)))),
        case_of("bias of packed sequences by tensor cores", BF16, (2, 1), (0, 0), (24, 16),
                lambda r: {"mask": masks.window(12, 3), "bias": normal(r, 2, 19, 33)},
                offsets=PACKED, blocks=(16, 16, 32), dlse=False, tensor=True, seed=48),
        case_of("by four warps of tensor cores", BF16, (1, 1), (130, 40), (128, 104),
                blocks=(128, 16, 128), tensor=True, seed=44),
        *(case_of(f"wide tiles by tensor cores, {dtype.name}", dtype, (1, 1), (37, 100), (24, 16),
                  lambda r, more=more: more, blocks=(32, 64, 64), tensor=True, seed=49)
          for dtype, more in ((F32, SPLIT), (F64, {}))),
        case_of("narrow heads in float64 by tensor cores", F64, (2, 1), (37, 53), (8, 16),
                blocks=(32, 32, 64), tensor=True, seed=50),
        case_of("huge logits by tensor cores", BF16, (1, 1), (18, 40), (8, 8), family="huge logits",
                hard=True, blocks=(16, 32, 32), tensor=True, seed=22),
        large_rows(case_of("logits that are huge in some rows, by tensor cores", BF16, (1, 1),
                           (40, 50), (8, 8), lambda r: {"mask": masks.causal()},
                           family="huge logits", hard=True, blocks=(16, 32, 32), tensor=True,
                           seed=43)),
        _zero_queries(case_of("largest scale by tensor cores", BF16, (1, 1), (5, 20), (16, 16),
                              lambda r: {"scale": 3e38}, hard=True, blocks=(16, 32, 32),
                              judged=("out", "lse"), tensor=True, seed=28)),
        *(not_finite(case_of(f"numbers that are not finite, {dtype.name}, by tensor cores"
                             f"{', deterministic' * deterministic}", dtype, (2, 1), (70, 60),
                             (24, 40), near, dlse=False, blocks=(32, 16, 64), tensor=True,
                             seed=30, deterministic=deterministic), SPOTS)
          for dtype in (F16, F64) for deterministic in (False, True)),
        *(not_finite(case_of(f"numbers that are not finite in FULL tiles, {dtype.name}, by tensor"
                             " cores", dtype, (2, 1), (96, 96), (24, 40),
                             lambda r: {"mask": masks.mask(lambda b, h, i, j: i // 32 == j // 32)},
                             dlse=False, blocks=(32, 16, 64), tensor=True, seed=47,
                             deterministic=True), FULL_SPOTS)
          for dtype in (F16, F64)),
        case_of("far keys by tensor cores", BF16, (1, 1), (20, 700), (8, 8),
                lambda r: {"mask": masks.mask(
                    lambda b, h, i, j: (j < 20) | (abs(j - 488) < 5) | (j > 600 + i))},
                dlse=False, blocks=(16, 16, 32), tensor=True, seed=39),
        case_of("a FULL tile and far keys by tensor cores", F16, (1, 1), (20, 700), (8, 8),
                lambda r: {"mask": masks.mask(lambda b, h, i, j: (j < 16) | (j > 515 + i // 4))},
                dlse=False, blocks=(32, 16, 64), tensor=True, seed=52),
        case_of("near overflow by tensor cores", F16, (1, 1), (40, 40), (64, 48),
                family="near overflow", hard=True, blocks=(16, 16, 64), tensor=True, seed=17),
        case_of("in float64 by tensor cores", F64, (2, 1), (37, 29), (8, 100),
                lambda r: {"scale": -0.3}, layout="rows", blocks=(32, 32, 64), tensor=True,
                seed=31),
        case_of("whole tiles in float64 by tensor cores", F64, (2, 1), (64, 64), (16, 40),
                lambda r: {"dropout": 0.3, "seed": 5}, blocks=(32, 32, 64), tensor=True, seed=45,
                deterministic=True),
        case_of("everything in float64 by tensor cores", F64, (4, 2), (37, 29), (16, 40), all_of,
                lead=((2,), (2,), (1,)), layout="random", blocks=(16, 16, 64), tensor=True,
                schedule=randomly(6), seed=32, deterministic=True),
        visited(unseen(case_of(
            "window in float64 by tensor cores", F64, (2, 1), (53, 45), (72, 5), window,
            lead=((2,), (2,), (1,)), blocks=(64, 16, 64), tensor=True, seed=33,
            deterministic=True), 5)),
        case_of("packed in float64 by tensor cores", F64, (2, 1), (0, 0), (33, 66),
                lambda r: {"mask": masks.causal()}, offsets=PACKED, blocks=(16, 32, 32),
                tensor=True, seed=34),
        case_of("in three products by tensor cores", F32, (2, 1), (37, 29), (72, 40),
                lambda r: {"scale": -0.3} | SPLIT, layout="rows", blocks=(32, 32, 64), tensor=True,
                seed=35),
        case_of("everything in three products by tensor cores", F32, (4, 2), (37, 29), (24, 13),
                lambda r: all_of(r) | SPLIT, lead=((2,), (2,), (1,)), layout="random",
                blocks=(16, 16, 32), tensor=True, schedule=randomly(7), seed=36),
        not_finite(case_of("numbers that are not finite, in three products by tensor cores", F32,
                           (2, 1), (70, 60), (24, 40), lambda r: near(r) | SPLIT, dlse=False,
                           blocks=(32, 16, 64), tensor=True, seed=46), SPOTS),
        _too_large_to_split(case_of(
            "too large for three products", F32, (2, 1), (37, 45), (24, 16),
            lambda r: {"scale": 0.2} | SPLIT, hard=True, blocks=(32, 16, 64),
            judged=("out", "lse"), dlse=False, tensor=True, seed=37)),
    ]  # fmt: skip
