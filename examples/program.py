"""Functions that the programs of this folder share: devices, optional packages, and errors."""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

INSTALL = 'pip install ".[examples]" in the clone'
CUPY = 'pip install ".[cuda13]" "cuda-toolkit[cublas]==13.*" in the clone, or the same with 12'


class UnusableError(Exception):
    """Something that was asked for is not available. The message says what, and the remedy."""


def require(module: str, install: str = INSTALL) -> Any:
    """Import an optional module, or say which command installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnusableError(
            f"the module {module!r} cannot be imported ({error}); install it by: {install}"
        ) from error


def usable_cupy() -> Any:
    """Return CuPy if it can use a GPU and multiply matrices there."""
    cupy = require("cupy", CUPY)
    if not cupy.is_available():
        raise UnusableError("CuPy finds no usable NVIDIA GPU; `cupyflash info` says more")
    try:
        cupy.ones((2, 2)) @ cupy.ones((2, 2))
    except Exception as error:
        raise UnusableError(f"CuPy cannot multiply matrices ({error}); install: {CUPY}") from error
    return cupy


def array_module(device: str) -> tuple[Any, str]:
    """Return the array module for cpu, gpu or auto, and words that say which it is."""
    if device == "cpu":
        return np, "CPU"
    try:
        cupy = usable_cupy()
    except UnusableError as error:
        if device == "gpu":
            raise UnusableError(f"--device gpu: {error}. --device cpu does not need it") from error
        return np, f"CPU ({error})"
    return cupy, "GPU"


def whole(text: str) -> int:
    """Read a positive whole number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a whole number of 1 or more")
    return int(text)


def seconds_of(work: Callable[[], Any], runs: int) -> tuple[Any, float]:
    """Return what a function returns, and the median of its seconds after a first run."""
    result, times = work(), []  # the first run compiles
    for _ in range(runs):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return result, statistics.median(times)


def readable(text: bytes) -> str:
    """Return text to print, in which a dot replaces each byte that is not printable ASCII."""
    letters = text.decode(errors="replace")
    return "".join(x if x.isascii() and (x.isprintable() or x == "\n") else "." for x in letters)
