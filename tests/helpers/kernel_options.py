"""Options of calls for which kernels are compiled without a GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cupyflash import lookup, masks, scores
from cupyflash.expr import tanh

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
IDS = np.zeros(24, np.int32)
SLOPES = np.ones(4, np.float32)
BIAS = np.zeros((4, 24, 24), np.float16)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "segments": {"mask": masks.segments(IDS) & masks.window(4, 0)},
    "softcap": {"score_mod": scores.softcap(30.0)},
    "alibi": {"mask": masks.causal(), "score_mod": scores.alibi(SLOPES)},
    "bias": {"bias": BIAS, "dropout": 0.1, "seed": 1},
    "everything": {
        "mask": masks.causal(),
        "bias": BIAS,
        "dropout": 0.1,
        "seed": 1,
        "score_mod": scores.score(
            lambda s, b, h, i, j: 2.0 * tanh(s) - lookup(SLOPES)[h] * abs(i - j)
        ),
    },
}
MORE_OPTIONS: dict[str, dict[str, Any]] = {
    "pair bias": {"bias": BIAS},
    "image": {
        "mask": masks.mask(
            lambda b, h, i, j: (abs(i // 64 - j // 64) <= 3) & (abs(i % 64 - j % 64) <= 3)
        )
    },
}
