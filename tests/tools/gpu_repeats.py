"""The same calls on a GPU again and again: every bit must be that of the first time.

    python tests/tools/gpu_repeats.py [--count 1000] [--minutes 5] [plain] [masked]

It exits with 0 where all were equal, also where time ran out first: it says how many there were.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import cupyflash
from cupyflash import masks, scores


def plain(cupy: Any) -> tuple[list[Any], dict[str, Any]]:
    """The largest: (4, 16, 4096, 128) in float32."""
    draw = cupy.random.default_rng(1).standard_normal
    return [draw((4, 16, 4096, 128), np.float32) for _ in range(4)], {}


def masked(cupy: Any) -> tuple[list[Any], dict[str, Any]]:
    """Everything else: grouped heads, broadcast bias, mask, score change, dropout, sink."""
    rng = np.random.default_rng(2)

    def draw(*shape: int) -> Any:
        return cupy.asarray(rng.standard_normal(shape).astype(ml_dtypes.bfloat16))

    q, do = (draw(2, 8, 1000, 72) for _ in range(2))
    k, v = (draw(2, 2, 1100, 72) for _ in range(2))
    ids_q, ids_k = (cupy.asarray(np.sort(rng.integers(0, 5, n))) for n in (1000, 1100))
    return [q, k, v, do], {
        "mask": masks.causal() & masks.segments(ids_q, ids_k),
        "score_mod": scores.softcap(20.0),
        "bias": draw(8, 1, 1100),
        "sink": draw(8),
        "dropout": 0.2,
        "seed": 3,
    }


CASES: dict[str, Callable[[Any], tuple[list[Any], dict[str, Any]]]] = {
    "plain": plain,
    "masked": masked,
}


def call(arrays: list[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Forward and backward; all results by name."""
    q, k, v, do = arrays
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    gradients = cupyflash.attention_backward(do, q, k, v, out, lse, deterministic=True, **options)
    made = {"out": out, "lse": lse} | gradients._asdict()
    return {name: array for name, array in made.items() if array is not None}


def repeat(name: str, count: int, seconds: float) -> bool:
    """Run one case until `count` or the time is reached; whether all were equal."""
    import cupy

    def bits(array: Any) -> Any:
        return cupy.ascontiguousarray(array).view(np.uint16)  # no element is narrower

    arrays, options = CASES[name](cupy)
    first = {part: bits(array) for part, array in call(arrays, options).items()}
    different = {part: cupy.zeros((), np.int64) for part in first}
    began, done = time.monotonic(), 1
    while done < count and time.monotonic() - began < seconds:
        for part, array in call(arrays, options).items():
            different[part] += (bits(array) != first[part]).any()
        done += 1
        if done % 10 == 0:
            cupy.cuda.Device().synchronize()  # so that the time is that of work done
    found = {part: int(number) for part, number in different.items() if int(number)}
    took = time.monotonic() - began
    said = f"{found} of them differ" if found else f"equal in every bit of {', '.join(first)}"
    print(f"{name}: {done} of {count} runs in {took:.0f} s, {said}", flush=True)
    return not found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--count", type=int, default=1000, help="runs of each case")
    parser.add_argument("--minutes", type=float, default=5.0, help="at most, for each case")
    given = parser.parse_args()
    wrong = [name for name in given.cases if name not in CASES]
    if wrong:
        parser.error(f"no case {wrong}; there are {list(CASES)}")
    equal = [repeat(name, given.count, 60 * given.minutes) for name in given.cases]
    return int(not all(equal))


if __name__ == "__main__":
    sys.exit(main())
