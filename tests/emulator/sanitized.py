"""Every kernel with AddressSanitizer and UndefinedBehaviorSanitizer: a program of its own.

It is started with their libraries (`command`), because Python is built without them. Arrays are
allocated to the byte, so that AddressSanitizer knows where each one ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from cupyflash import masks, scores
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options
from cupyflash.rowwise import COMBINE

from . import build
from .calls import Blocks, Emulator
from .probe import Probe

FAULTS: dict[str, tuple[str, str]] = {
    # Body -> what the report says.
    "a read behind an array": (
        "static_cast<int*>(p.out)[t] = static_cast<int*>(p.in)[t + 1];", "heap-buffer-overflow"
    ),
    "a write behind an array": ("static_cast<int*>(p.out)[t + 1] = 0;", "heap-buffer-overflow"),
    "a write behind shared memory": ("smem[t + 1] = 0;", "heap-buffer-overflow"),
    "registers that are not there": (
        "int own[4];\nfor (int n = 0; n < 4; ++n) own[n] = t;\n"
        "static_cast<int*>(p.out)[t] = own[t];",
        "index 4 out of bounds",
    ),
    "a sum that overflows": (
        "static_cast<int*>(p.out)[t] = static_cast<int*>(p.in)[t] + 2147483647;",
        "signed integer overflow",
    ),
    "a shift too far": ("static_cast<int*>(p.out)[t] = 1 << t;", "shift exponent 32 is too large"),
    "a vector where none begins": (
        "smem[t] = 0;\n__syncthreads();\n"
        "static_cast<int*>(p.out)[t] = *reinterpret_cast<long long*>(smem + (t | 1) % 63) != 0;",
        "misaligned address",
    ),
}  # fmt: skip


def library(name: str) -> str:
    """Return where a library of the compiler's lies."""
    done = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this module's `main` in a process that has the sanitizers."""
    environment = os.environ | {
        "LD_PRELOAD": f"{library('libasan.so')} {library('libubsan.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "UBSAN_OPTIONS": "print_stacktrace=0",
        "PYTHONPATH": str(build.HERE.parent),
        "PYTHONMALLOC": "malloc",
        "CUPYFLASH_EMULATOR_CACHE": str(build.cache()),
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "emulator.sanitized", *arguments]
    return subprocess.run(
        command, env=environment, cwd=build.HERE.parent, capture_output=True, text=True, check=False
    )


def everything(read: Callable[[str], str] = build.read) -> None:
    """Run every kernel in every type, with every option at least once; packed in two types."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape)

    options: list[dict[str, Any]] = [
        {},
        {"mask": masks.causal() & masks.lengths(np.array([9, 20])), "dropout": 0.5, "seed": 1},
        {"mask": np.asarray(rng.random((2, 17, 20)) < 0.5), "score_mod": scores.softcap(2.0)},
        {"score_mod": scores.alibi(draw(2).astype(np.float32))},
    ]
    dtypes = [np.float16, np.float32, np.float64, "bfloat16"]
    for n, (dtype, chosen) in enumerate(zip(dtypes, options, strict=True)):
        kind = np.dtype(dtype)
        d = 8 if n % 2 else 7
        q, do, k = (draw(2, 2, rows, d).astype(kind) for rows in (17, 17, 20))
        k = np.ascontiguousarray(k[:, :1])
        bias, sink = draw(2, 1, 20).astype(kind), draw(2).astype(kind)
        call = validate.call(q, k, k, Options(bias=bias, sink=sink, **chosen))
        accumulator = call.problem.accumulator
        out, lse = np.empty_like(do), np.empty(do.shape[:-1], accumulator)
        emulator = Emulator(Blocks(threads=32), flavour="sanitized", read=read)
        emulator.forward(call, out, lse)
        made = Gradients(*(np.empty_like(x) for x in (q, k, k, bias, sink)))
        emulator.backward(call, do, out, lse, draw(*lse.shape).astype(accumulator), made)
        wide = draw(*lse.shape, 130).astype(kind)  # more than a warp sums at a time
        results = {"out": np.empty_like(wide), "lse": np.empty_like(lse)}
        emulator.rowwise(COMBINE, [(wide, lse)] * 3, **results)
        if n > 1:
            continue
        offsets = np.array([0, 0, 5, 17])
        rows = [np.ascontiguousarray(x[0]) for x in (q, k, k, out, lse)]
        rows[1:3] = [np.ascontiguousarray(x[:, :17]) for x in rows[1:3]]
        call = validate.varlen_call(*rows[:3], offsets, offsets, True, Options(mask=masks.causal()))
        emulator.forward(call, *rows[3:])
        made = Gradients(*(np.empty_like(x) for x in rows[:3]))
        emulator.backward(call, do[0].copy(), *rows[3:], None, made)


def main() -> None:
    """Run everything, or one body that is wrong."""
    import ml_dtypes  # so that NumPy knows bfloat16 by its name

    assert np.dtype("bfloat16") == ml_dtypes.bfloat16
    if len(sys.argv) == 1:
        everything()
    elif sys.argv[1] == "beyond the last row":
        # One row more than there is.
        def read(path: str) -> str:
            return build.read(path).replace(
                "smaller(length - first,", "smaller(length - first + 1,"
            )

        everything(read)
    else:
        body, _ = FAULTS[sys.argv[1]]
        probe = Probe(body, flavour="sanitized")
        probe.run(np.ones(64, np.int32), np.ones(64, np.int32))
    print("no fault")


if __name__ == "__main__":
    main()
