"""What `cupyflash demo` measures: real attention against standard attention, and its error.

The data are q, k and v of one transformer layer over a text (``data/README.md``). Nothing here
prints: `cli` does.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .api import attention, attention_vjp
from .masks import causal as causal_mask
from .testing import Precision, backward_bound, forward_bound, rho

Array = NDArray[Any]
TOKENS = 512  # of the text
NAMES = ("O", "LSE", "dQ", "dK", "dV")  # what is checked


class Inputs(NamedTuple):
    """Queries, keys, values and the gradient that comes in: shape (12, L, 32), one dtype."""

    q: Array
    k: Array
    v: Array
    do: Array


def load(dtype: str = "float32", repeat: int = 1) -> Inputs:
    """Read the data, widen them from float16, and tile the text.

    Parameters
    ----------
    dtype : str, optional
        float16, float32 or float64.
    repeat : int, optional
        How often the text's 512 tokens stand one after the other.

    Returns
    -------
    Inputs
        The gradient ``do`` is standard normal, from a fixed seed.
    """
    with (files("cupyflash") / "data" / "demo.npz").open("rb") as file, np.load(file) as data:
        q, k, v = (np.tile(data[name].astype(dtype), (1, repeat, 1)) for name in "qkv")
    do = np.random.default_rng(0).standard_normal(v.shape).astype(dtype)
    return Inputs(q, k, v, do)


def standard_forward(q: Array, k: Array, v: Array, causal: bool) -> tuple[Array, Array]:
    """Standard attention (FlashAttention, Algorithm 0) by NumPy: all scores in one array.

    Parameters
    ----------
    q, k, v : array, shape (H, L, D)
        float16 is widened to float32, since NumPy's float16 products are no match for anybody.
    causal : bool
        Whether query i sees keys up to i only.

    Returns
    -------
    o : array, shape (H, L, D)
        The output, in the dtype of q.
    p : array, shape (H, L, L)
        The probabilities, which the backward needs; in float32 or float64.
    """
    work = np.promote_types(q.dtype, np.float32)
    p = (q.astype(work) * q.shape[-1] ** -0.5) @ k.astype(work).swapaxes(-1, -2)
    if causal:
        np.copyto(p, -np.inf, where=~np.tri(*p.shape[-2:], dtype=np.bool_))
    p -= p.max(axis=-1, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    return (p @ v.astype(work)).astype(q.dtype), p


def standard_backward(inputs: Inputs, o: Array, p: Array) -> tuple[Array, Array, Array]:
    """Gradients of standard attention, from the probabilities that the forward kept.

    Parameters
    ----------
    inputs : Inputs
        What went into the forward, and the gradient of its output.
    o, p : array
        What `standard_forward` returned.

    Returns
    -------
    dq, dk, dv : array, shape (H, L, D)
        In the dtype of q.
    """
    q, k, v, do = (array.astype(p.dtype) for array in inputs)
    scale = q.shape[-1] ** -0.5
    dv = p.swapaxes(-1, -2) @ do
    ds = do @ v.swapaxes(-1, -2)
    ds -= (do * o).sum(axis=-1, keepdims=True)
    ds *= p
    dq = scale * (ds @ k)
    dk = scale * (ds.swapaxes(-1, -2) @ q)
    dtype = inputs.q.dtype
    return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype)


def candidates(inputs: Inputs, causal: bool, backward: bool) -> tuple[Callable[[], Any], ...]:
    """Return the same work twice as functions to call: by standard attention, by cupyflash."""
    q, k, v, do = inputs
    mask = causal_mask() if causal else None

    def standard() -> Any:
        o, p = standard_forward(q, k, v, causal)
        return (o, standard_backward(inputs, o, p)) if backward else o

    def ours() -> Any:
        if not backward:
            return attention(q, k, v, mask=mask)
        o, vjp = attention_vjp(q, k, v, mask=mask)
        return o, vjp(do)

    return standard, ours


def _resident(field: str) -> int | None:
    """Bytes of ``VmRSS`` (resident now) or ``VmHWM`` (its peak); None where Linux is not."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    return None


def peak_memory(work: Callable[[], Any]) -> int:
    """Bytes that a call holds at its peak beyond what was held before, its results included.

    The larger of two measurements, each of which may miss something: `tracemalloc` sees the arrays
    that NumPy makes but not memory that compiled code takes by itself; the peak of the process's
    resident memory (Linux) sees that too, but not pages that an earlier call left behind.

    Parameters
    ----------
    work : callable
        Called once, without arguments.

    Returns
    -------
    int
        Bytes.
    """
    gc.collect()
    before = None
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM starts anew
        before = _resident("VmRSS")
    except OSError:
        pass
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    tracemalloc.reset_peak()
    start = tracemalloc.get_traced_memory()[0]
    result = work()
    peak = tracemalloc.get_traced_memory()[1] - start
    if not tracing:
        tracemalloc.stop()
    if before is not None:
        peak = max(peak, (_resident("VmHWM") or 0) - before)
    del result
    return peak


def medians(
    work: Sequence[Callable[[], Any]], most_runs: int, seconds: float
) -> tuple[list[float], int]:
    """Time functions in turn, so that a change of the machine's speed meets all of them.

    Parameters
    ----------
    work : sequence of callable
        What to time; each should have run once before.
    most_runs : int
        Rounds at most.
    seconds : float
        No round is begun after that time; one round is always run.

    Returns
    -------
    medians : list of float
        Seconds, one per function.
    runs : int
        Rounds that were run.
    """
    times: list[list[float]] = [[] for _ in work]
    begin = time.perf_counter()
    runs = 0
    while runs == 0 or (runs < most_runs and time.perf_counter() - begin < seconds):
        for function, list_of_times in zip(work, times, strict=True):
            start = time.perf_counter()
            function()
            list_of_times.append(time.perf_counter() - start)
        runs += 1
    return [statistics.median(list_of_times) for list_of_times in times], runs


@dataclass(frozen=True)
class Comparison:
    """One line of the table: standard attention (``standard``) beside cupyflash (``ours``)."""

    mask: str
    work: str
    standard_seconds: float
    ours_seconds: float
    standard_bytes: int
    ours_bytes: int
    runs: int


def compare(inputs: Inputs, most_runs: int = 5, seconds: float = 0.6) -> list[Comparison]:
    """Measure time and memory, full and causal, of the forward and of forward and backward.

    Parameters
    ----------
    inputs : Inputs
        As `load` returns them.
    most_runs : int, optional
        Runs that a median is of, at most.
    seconds : float, optional
        Time for the runs of one line; fewer runs where they do not fit.

    Returns
    -------
    list of Comparison
        Four lines.
    """
    lines = []
    for causal in (False, True):
        for backward in (False, True):
            work = candidates(inputs, causal, backward)
            standard_bytes, ours_bytes = (peak_memory(function) for function in work)
            (standard_seconds, ours_seconds), runs = medians(work, most_runs, seconds)
            lines.append(
                Comparison(
                    "causal" if causal else "full",
                    "forward + backward" if backward else "forward",
                    standard_seconds,
                    ours_seconds,
                    standard_bytes,
                    ours_bytes,
                    runs,
                )
            )
    return lines


@dataclass(frozen=True)
class Checked:
    """Worst errors of one mask, by name (O, LSE, dQ, dK, dV).

    Attributes
    ----------
    mask : str
        full or causal.
    share : dict of str to float
        Largest error as a share of the rounding-error bound of its element: at most 1 is right.
    largest : float
        Largest absolute error of O.
    """

    mask: str
    share: dict[str, float]
    largest: float


def check(inputs: Inputs, every: int = 1) -> list[Checked]:
    """Hold output, LSE and gradients against exact values and their rounding-error bound.

    Parameters
    ----------
    inputs : Inputs
        As `load` returns them. The exact values and the bound take some twenty (L, L) matrices of
        float64 per head (of long double for float64).
    every : int, optional
        Check every n-th head, beginning with the first.

    Returns
    -------
    list of Checked
        Full and causal.
    """
    q, k, v, do = (array[::every] for array in inputs)
    precision = Precision.of(q.dtype)
    results = []
    for causal in (False, True):
        mask = causal_mask() if causal else None
        o, lse, vjp = attention_vjp(q, k, v, mask=mask, return_lse=True)
        computed = (o, lse, *vjp(do)[:3])
        forward = forward_bound(q, k, v, precision=precision, mask=mask)
        backward = backward_bound(do, q, k, v, precision=precision, mask=mask)
        bounds = (forward.out, forward.lse, backward.dq, backward.dk, backward.dv)
        share = {
            name: rho(array, *bounded).value
            for name, array, bounded in zip(NAMES, computed, bounds, strict=True)
        }
        largest = float(np.abs(o - forward.out.exact).max())
        results.append(Checked("causal" if causal else "full", share, largest))
    return results
