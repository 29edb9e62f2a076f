"""The command `cupyflash warmup`: compile kernels in advance, for images and read-only homes."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..arrays.dtypes import DTYPES, FLOATS
from . import info
from .text import complain, whole_number

Report = Callable[[str, int, int], None]  # a step's name, its number, and how many there are
QUERIES = 1024  # sizes of a call on a GPU: enough for the kernels of long sequences


def add_command(subparsers: Any) -> None:
    """Add `warmup` to the command line."""
    command = subparsers.add_parser(
        "warmup",
        help="compile kernels ahead of need",
        description="Compile kernels and keep them in the cache folder, so that a first call does "
        "not wait. Nothing is compiled twice.",
    )
    command.add_argument(
        "--device", choices=("cpu", "gpu"), default="cpu", help="where calls will run (default cpu)"
    )
    command.add_argument(
        "--dtype",
        action="append",
        choices=FLOATS,
        help="element type, once for each (default float32); on the CPU, 16-bit types use the "
        "kernels of float32",
    )
    command.add_argument(
        "--dim",
        action="append",
        type=whole_number(1),
        help="head size, once for each (default 64); only GPU kernels depend on it",
    )
    command.set_defaults(function=run)


def run(options: argparse.Namespace) -> int:
    """Compile what is asked for, and say what was done."""
    begin = time.perf_counter()
    dtypes = options.dtype or ["float32"]
    with _progress() as report:
        if options.device == "cpu":
            obstacle = _warm_cpu(dtypes, report)
        else:
            obstacle = _warm_gpu(dtypes, options.dim or [64], report)
    if obstacle:
        complain(obstacle, before="")
        return 1
    seconds = time.perf_counter() - begin
    where = options.device.upper()
    print(f"The kernels for {', '.join(dtypes)} on the {where} are ready after {seconds:.0f} s.")
    return 0


def _warm_cpu(dtypes: list[str], report: Report | None) -> str:
    from cupyflash.reference.cpu import jit, kernels

    obstacle = jit.cache_obstacle()
    if obstacle:
        return (
            f"cupyflash warmup: kernels cannot be kept in {jit.cache_folder()} ({obstacle}). Set "
            "CUPYFLASH_CACHE_DIR to a folder of yours that is writable."
        )
    numbers = dict.fromkeys(np.dtype(DTYPES[name].accumulator) for name in dtypes)
    kernels.prepare_all(numbers, report)
    return ""


def _warm_gpu(dtypes: list[str], dims: list[int], report: Report | None) -> str:
    from .. import masks
    from ..bench.measure import Gpu
    from ..closures import attention_vjp

    obstacle = info.gpu_obstacle()
    if obstacle:
        return f"cupyflash warmup: {obstacle}. --device cpu needs no GPU."
    cupy = Gpu().xp
    steps = [
        (dtype, dim, name, mask)
        for dtype in dtypes
        for dim in dims
        for name, mask in (("full", None), ("causal", masks.causal()))
    ]
    for number, (dtype, dim, name, mask) in enumerate(steps, 1):
        if report is not None:
            report(f"{dtype}, head size {dim}, {name}", number, len(steps))
        q = cupy.zeros((1, 2, QUERIES, dim), _numpy_dtype(dtype))
        out, vjp = attention_vjp(q, q, q, mask=mask)
        vjp(out)
    cupy.cuda.Device().synchronize()
    return ""


def _numpy_dtype(name: Any) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        name = ml_dtypes.bfloat16
    made: np.dtype[Any] = np.dtype(name)
    return made


@contextlib.contextmanager
def _progress() -> Iterator[Report | None]:
    """Yield what shows a bar on a terminal, or None where lines must do."""
    try:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns) as bar:
        task = bar.add_task("looking at the cache", total=None)

        def report(name: str, number: int, count: int) -> None:
            bar.update(
                task, total=count, completed=number - 1, description=f"{number} of {count}: {name}"
            )

        yield report
        bar.update(task, total=1, completed=1, description="done")
