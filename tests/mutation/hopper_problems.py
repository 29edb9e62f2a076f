"""Problems for the kernels of compute capability 9.0, whose tiles are those that a GPU gets."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from emulator.machine import randomly

from cupyflash import lookup, masks, scores
from cupyflash.expr import where
from cupyflash.masks import Mask

from .problems import BF16, F16, F32, SPLIT, Case, case_of, everything, not_finite, unseen
from .tensor_problems import large_rows

PACKED = [0, 3, 3, 75, 120, 300], [0, 40, 120, 120, 150, 330]

# Of the first tile two warps see some; of the second one sees the first number.
SPOTS = {
    "v": [(100, 3, math.nan), (57, 21, math.inf), (128, 0, math.nan)],
    "do": [(120, 42, math.inf), (128, 3, math.nan)],
    "q": [(70, 33, math.nan)],
    "k": [(139, 55, math.inf), (3, 9, math.nan)],
}


def _not_finite(case: Case) -> Case:
    return not_finite(case, SPOTS)


def _own_units(case: Case) -> Case:
    """Let gradients grow from tile to tile and warp to warp; half of its keys weigh little.

    In the last tile only those of the last head's first queries grow, and in the first one there
    are none.
    """
    arrays = {name: np.array(getattr(case.problem, name)) for name in ("q", "k", "v", "do")}
    queries, keys = (np.arange(arrays[name].shape[-2])[:, None] for name in ("q", "k"))
    tiles = np.where(queries % 64 < 8, queries // 64, np.minimum(queries // 64, 3))
    arrays["do"] *= np.where(tiles > 0, 2.0 ** (9 * tiles - 24), 0).astype(F16)
    arrays["do"][..., :-1, 256:, :] *= F16.type(2.0**-9)  # of the last head alone
    arrays["v"] *= (2.0 ** (5 * (keys // 16 % 3))).astype(F16)
    arrays["q"][..., :1] = 6
    arrays["k"][..., :1] = np.where((keys // 16 + keys // 8) % 2, 0, -8)
    return replace(case, problem=replace(case.problem, **arrays))


def _apart(keys: int) -> Mask:
    """Two documents: some warps see all of the last tile, then nothing; others begin with FULL."""
    return masks.segments(np.repeat([0, 1], [60, 140]), np.repeat([1, 0], [256, keys - 256]))


def _between(case: Case) -> Case:
    """Make keys and values NaN that follow a sequence's, and that no query sees."""
    for name in ("k", "v"):
        dirty = np.array(getattr(case.problem, name))
        dirty[..., 40:120, :] = np.nan
        case.arrays[name] = dirty
    return case


def cases() -> list[Case]:
    """Return the problems, cheap ones that find much first."""
    sink = np.array([0.0, -1.0, -np.inf, 2.0], np.float32)
    return [
        case_of("by warpgroups", BF16, (2, 1), (70, 200), (64, 64),
                lead=((2, 2), (1, 2), (2, 1)), hopper=True, seed=30),
        # Five tiles of each of two heads: dq is deferred.
        case_of("deferred by warpgroups", BF16, (2, 1), (300, 140), (104, 128), hopper=True,
                schedule=randomly(6), seed=47),
        _own_units(case_of("units of warps by warpgroups", F16, (2, 1), (300, 140), (72, 128),
                           dlse=False, hopper=True, schedule=randomly(8), seed=52)),
        _between(case_of("packed and deferred by warpgroups", BF16, (2, 1), (0, 0), (104, 128),
                         offsets=PACKED, hopper=True, schedule=randomly(7), seed=48)),
        # Of odd widths, and with gradients that are summed up in a wider type.
        case_of("everything by warpgroups", F16, (4, 2), (80, 150), (63, 71),
                lambda r: everything(r, 80, 150, sink), lead=((3,), (3,), (1,)), layout="apart 1",
                hopper=True, seed=31),
        unseen(case_of("window by warpgroups", BF16, (2, 1), (200, 300), (192, 256),
                      lambda r: {"mask": masks.window(9, 3, -12)
                                 & masks.lengths(np.array([290, 20])), "scale": -0.1},
                      lead=((2,), (2,), (1,)), layout="rows", hopper=True, seed=32), 5),
        case_of("documents by warpgroups", BF16, (2, 1), (200, 384), (128, 128),
                lambda r: {"mask": _apart(384)}, dlse=False, hopper=True, seed=49),
        _not_finite(case_of("documents, and numbers that are not finite, by warpgroups", BF16,
                            (2, 1), (200, 300), (64, 64),
                            lambda r: {"mask": _apart(300), "score_mod": scores.softcap(30.0)},
                            dlse=False, hopper=True, seed=50)),
        case_of("packed by warpgroups", F16, (2, 1), (0, 0), (128, 40),
              lambda r: {"mask": masks.causal()}, offsets=PACKED, hopper=True,
              schedule=randomly(4), seed=33),
        case_of("wide by warpgroups", BF16, (2, 1), (70, 150), (256, 136),
                lambda r: {"mask": masks.causal()}, dlse=False, hopper=True, schedule=randomly(3),
                seed=46),
        # Two masked tiles, two that are not, and two masked ones again.
        case_of("a run behind masked tiles by warpgroups", BF16, (1, 1), (100, 900), (200, 16),
                lambda r: {"mask": masks.window(280, 0, 720)}, dlse=False, hopper=True, seed=57),
        case_of("in three products by warpgroups", F32, (2, 1), (140, 193), (60, 64),
                lambda r: {**SPLIT}, layout="apart 4", hopper=True, seed=55),
        case_of("everything in three products by warpgroups", F32, (4, 2), (80, 150), (128, 100),
                lambda r: everything(r, 80, 150, sink) | SPLIT, layout="random", hopper=True,
                schedule=randomly(5), seed=41),
        unseen(case_of("window in three products by warpgroups", F32, (2, 1), (140, 200), (104, 40),
                       lambda r: {"mask": masks.window(9, 3, -12), "scale": -0.1} | SPLIT,
                       layout="apart 3", hopper=True, seed=42), 5),
        _not_finite(case_of("numbers that are not finite, in three products by warpgroups", F32,
                            (2, 1), (160, 150), (64, 60),
                            lambda r: {"mask": masks.window(20, 0)} | SPLIT, dlse=False,
                            hopper=True, seed=56)),
        *(_not_finite(case_of(f"numbers that are not finite, {d} columns, by warpgroups", dtype,
                              (2, 1), (160, 150), (d, d),
                              lambda r: {"mask": masks.window(20, 0)}, dlse=False, hopper=True,
                              seed=35))
          for d, dtype in ((64, BF16), (104, BF16), (128, F16), (192, BF16))),
        # With a sink a row that sees nothing has a finite lse whatever its query holds.
        _not_finite(case_of("numbers that are not finite, and sinks, by warpgroups", BF16, (2, 1),
                            (160, 150), (64, 64),
                            lambda r: {"mask": masks.window(20, 0) & masks.mask(
                                lambda b, h, i, j: i != 70), "sink": sink[:2]},
                            dlse=False, hopper=True, seed=51)),
        # A pair that is dropped has a weight of 0, which an infinite value makes NaN.
        _not_finite(case_of("numbers that are not finite, and dropout, by warpgroups", F16, (2, 1),
                            (160, 150), (64, 64),
                            lambda r: {"mask": masks.window(20, 0), "dropout": 0.3, "seed": 3},
                            dlse=False, hopper=True, seed=45)),
        case_of("a mask without edges by warpgroups", BF16, (2, 1), (70, 300), (64, 64),
                lambda r: {"mask": masks.mask(lambda b, h, i, j: (i + j) % 3 > 0)}, dlse=False,
                hopper=True, seed=54),
        # Of c, and of what scores read of keys beyond the last.
        case_of("scores that are moved by warpgroups", F16, (1, 1), (70, 140), (64, 64),
                lambda r: {"score_mod": scores.score(
                    lambda s, b, h, i, j: s + 30 + lookup(r.standard_normal(140))[j])},
                dlse=False, hopper=True, seed=53),
        case_of("a scale of 0 by warpgroups", BF16, (1, 1), (70, 140), (63, 55),
                lambda r: {"mask": masks.causal(), "scale": 0.0}, layout="apart 1", dlse=False,
                hopper=True, seed=44),
        *(case_of(f"{keys} keys that are all seen, by warpgroups", BF16, (3, 3), (70, keys),
                  (64, 64), lambda r: {"mask": masks.causal(offset=300)}, dlse=False, hopper=True,
                  seed=38) for keys in (128, 256)),
        case_of("far keys by warpgroups", BF16, (2, 2), (30, 4700), (64, 64),
                lambda r: {"mask": masks.mask(lambda b, h, i, j: (j < 100) | (j > 4300 + i))},
                dlse=False, hopper=True, seed=36),
        case_of("far queries by warpgroups", F16, (2, 1), (4300, 90), (64, 64),
                lambda r: {"mask": masks.mask(lambda b, h, i, j: (i < 70) | (i > 4100 + j))},
                dlse=False, hopper=True, seed=37),
        # FULL tiles in a row that end in another word of their bits, or at its last bit.
        *(case_of(f"{keys} keys in rows of whole tiles, by warpgroups", BF16, (1, 1), (10, keys),
                  (64, 64), lambda r, own=own: {"mask": masks.mask(own)}, dlse=False, hopper=True,
                  seed=39)
          for keys, own in ((9000, lambda b, h, i, j: (j < 10) | (j >= 600) & (abs(j - 8725) > 5)),
                            (4224, lambda b, h, i, j: j >= 5))),
        case_of("queries in rows of whole tiles, by warpgroups", BF16, (1, 1), (4300, 30),
                (64, 64), lambda r: {"mask": masks.mask(lambda b, h, i, j: abs(i - 4050) > 50)},
                dlse=False, hopper=True, seed=44),
        unseen(case_of("keys that scores hide, by warpgroups", BF16, (2, 1), (200, 128), (64, 64),
                       lambda r: {"mask": masks.causal(offset=300), "score_mod": scores.score(
                           lambda s, b, h, i, j: where(j >= 123, -math.inf, s))},
                       dlse=False, hopper=True, seed=45), 5),
        case_of("huge logits by warpgroups", F16, (3, 3), (130, 140), (64, 64),
              lambda r: {"mask": masks.causal()}, family="huge logits", hard=True, hopper=True,
              seed=34),
        large_rows(case_of("logits that are huge in some rows, by warpgroups", BF16, (1, 1),
                           (130, 140), (64, 64), lambda r: {"mask": masks.causal()},
                           family="huge logits", hard=True, hopper=True, seed=47)),
    ]  # fmt: skip
