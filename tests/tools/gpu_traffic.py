"""Bytes between memory and chip, as Nsight Compute counts them, beside what is predicted.

    python tests/tools/gpu_traffic.py            a table by kernel; needs a GPU, and ncu on PATH
    python tests/tools/gpu_traffic.py --json F   the numbers too

Predictions are those of `cupyflash.explain` where every array moves once, because what a kernel
loads again is still in the second-level cache; and FlashAttention's Algorithm 0 for standard
attention, whose matrices are read and written by more steps than its own. Caches are empty before
each kernel.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SHAPES = ((2, 16, 4096, 128), (2, 8, 8192, 64), (2, 8, 4096, 256))
STANDARD = ((2, 8, 2048, 64), (2, 16, 4096, 128))
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
NCU = ("ncu", "--profile-from-start", "off", "--csv", "--page", "raw", "--print-units", "base")


@dataclass(frozen=True)
class Row:
    """A kernel's bytes, or those of all kernels of standard attention."""

    problem: str
    kernel: str
    predicted_read: int
    predicted_written: int
    read: int
    written: int

    def __str__(self) -> str:
        def megabytes(n: int) -> str:
            return f"{n / 1e6:,.1f}"

        predicted = self.predicted_read + self.predicted_written
        cells = [
            self.problem,
            self.kernel,
            *map(megabytes, (self.predicted_read, self.read)),
            *map(megabytes, (self.predicted_written, self.written)),
            f"{(self.read + self.written) / predicted:.2f}",
        ]
        return "| " + " | ".join(cells) + " |"


HEADER = (
    "| problem | kernel | read: predicted, MB | measured | written: predicted | measured "
    "| measured / predicted |\n|---|---|---|---|---|---|---|"
)


def calls() -> list[tuple[str, tuple[int, ...], bool, bool]]:
    """Return what is counted: a name, the shape, whether causal, whether the backward."""
    made = []
    for shape in SHAPES:
        for causal in (False, True):
            for backward in (False, True):
                words = ("causal" if causal else "full", "backward" if backward else "forward")
                made.append((f"{shape}, {', '.join(words)}", shape, causal, backward))
    return made


def watched() -> None:
    """Make the calls, one after the other, where the profiler looks; it runs this."""
    import cupy
    import ml_dtypes

    import cupyflash
    from cupyflash import masks
    from cupyflash.bench.standard import standard_forward

    def drawn(shape: tuple[int, ...], n: int, dtype: Any) -> list[Any]:
        draw = cupy.random.default_rng(1).standard_normal
        return [draw(shape, dtype=cupy.float32).astype(dtype) for _ in range(n)]

    def look(call: Any) -> None:
        call()  # which compiles
        cupy.cuda.Device().synchronize()
        cupy.cuda.profiler.start()
        call()
        cupy.cuda.Device().synchronize()
        cupy.cuda.profiler.stop()

    for _, shape, causal, backward in calls():
        q, k, v, do = drawn(shape, 4, ml_dtypes.bfloat16)
        mask = masks.causal() if causal else None
        if backward:
            _, vjp = cupyflash.attention_vjp(q, k, v, mask=mask)
            look(lambda vjp=vjp, do=do: vjp(do))
        else:
            look(lambda q=q, k=k, v=v, mask=mask: cupyflash.attention(q, k, v, mask=mask))
    for shape in STANDARD:
        q, k, v = drawn(shape, 3, cupy.float32)
        look(lambda q=q, k=k, v=v: standard_forward(cupy, q, k, v))


def counted() -> list[tuple[str, int, int]]:
    """Return every kernel that ran where the profiler looked, with its bytes read and written."""
    if shutil.which("ncu") is None:
        raise SystemExit("ncu is not on PATH: it comes with the CUDA toolkit, as Nsight Compute")
    command = [*NCU, "--metrics", ",".join(METRICS), sys.executable, __file__, "--watched"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    start = done.stdout.find('"ID"')
    if done.returncode != 0 or start < 0:
        raise SystemExit(f"ncu failed: {(done.stdout + done.stderr)[-2000:]}")
    lines = list(csv.DictReader(io.StringIO(done.stdout[start:])))
    rows = [line for line in lines if line["ID"]]  # the first line holds units
    return [
        (x["Kernel Name"], *(round(float(x[m].replace(",", ""))) for m in METRICS)) for x in rows
    ]


def compared(kernels: Sequence[tuple[str, int, int]], device: str = "gpu") -> list[Row]:
    """Pair every kernel with its prediction, in the order of the calls."""
    import cupyflash
    from cupyflash import analysis, masks

    rows, left = [], list(kernels)
    for problem, shape, causal, backward in calls():
        found = cupyflash.explain(
            shape,
            mask=masks.causal() if causal else None,
            dtype="bfloat16",
            device=device,
            backward=backward,
            compile=False,
        )
        for use in found.kernels:
            while left and not left[0][0].startswith(use.name):
                left.pop(0)  # of CuPy's own, such as one that makes zeros
            if not left:
                raise SystemExit(f"{use.name} did not run, which explain names for {problem}")
            _, read, written = left.pop(0)
            wanted = sum(use.once.reads.values()), sum(use.once.writes.values())
            rows.append(Row(problem, use.name, *wanted, read, written))
    # CuPy's kernels of standard attention: as many for each shape.
    each = len(left) // len(STANDARD)
    for n, shape in enumerate(STANDARD):
        own = left[n * each : (n + 1) * each]
        heads, length, d = shape[0] * shape[1], shape[2], shape[3]
        count = analysis.standard_attention(length, length, d)
        reads, writes = sum(count.reads.values()), sum(count.writes.values())
        wanted = 4 * heads * reads, 4 * heads * writes
        measured = sum(x[1] for x in own), sum(x[2] for x in own)
        name = f"standard attention, {each} kernels"
        rows.append(Row(f"{shape}, float32", name, *wanted, *measured))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE")
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.watched:
        watched()
        return 0
    rows = compared(counted())
    print(HEADER)
    print("\n".join(map(str, rows)))
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
