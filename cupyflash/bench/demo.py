"""What `cupyflash demo` measures: real attention against standard attention, and its error.

The data are q, k and v of one transformer layer for a text (``data/README.md``). All functions work
with an array module ``xp``, ``numpy`` or ``cupy``. Only the command prints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from ..api import attention
from ..arrays import cuda_device, device_arrays
from ..arrays.dtypes import DTYPES
from ..closures import attention_vjp
from ..gpu.kernels import registry
from ..masks import causal as causal_mask
from ..testing import Precision, backward_bound, forward_bound, rho
from ..testing.options import float_type
from .measure import Meter
from .standard import standard_backward, standard_forward

Array = Any  # of `xp`
HEADS, TOKENS = 12, 512  # of the layer, of the text
NAMES = ("O", "LSE", "dQ", "dK", "dV")  # what is checked
CPU_REPEAT, GPU_REPEATS = 3, (16, 8, 4, 2, 1)  # of the text
MATRICES = 3  # of all scores: more than standard attention's peak, which is p and ds and vectors
SMALLEST_BLOCK_KV = 8  # of a forward kernel's tiles; a bound grows with the number of tiles


class Inputs(NamedTuple):
    """Queries, keys, values and the gradient that comes in: shape (12, L, 32), one dtype."""

    q: Array
    k: Array
    v: Array
    do: Array


def score_bytes(dtype: str, repeat: int) -> int:
    """Bytes of all scores over the text, `repeat` times over."""
    return HEADS * (TOKENS * repeat) ** 2 * DTYPES[DTYPES[dtype].accumulator].itemsize


def gpu_repeat(dtype: str, free: int) -> int:
    """Return how often a GPU with `free` bytes repeats the text, so that launches do not dominate.

    It is the largest of `GPU_REPEATS` for which standard attention fits, too.
    """
    fits = (n for n in GPU_REPEATS if MATRICES * score_bytes(dtype, n) <= free)
    return next(fits, GPU_REPEATS[-1])


def load(dtype: str = "float32", repeat: int = 1, xp: Any = np) -> Inputs:
    """Read the data, widen them from float16, and tile the text.

    Parameters
    ----------
    dtype : str, optional
        float16, bfloat16 (of ml_dtypes), float32 or float64.
    repeat : int, optional
        How often the text's 512 tokens are repeated.
    xp : module, optional
        The array module for the arrays.

    Returns
    -------
    Inputs
        The gradient ``do`` is standard normal, from a fixed seed.
    """
    kind = float_type(dtype)
    with (files("cupyflash") / "data" / "demo.npz").open("rb") as file, np.load(file) as data:
        q, k, v = (np.tile(data[name].astype(kind), (1, repeat, 1)) for name in "qkv")
    do = np.random.default_rng(0).standard_normal(v.shape).astype(kind)
    return Inputs(*(xp.asarray(array) for array in (q, k, v, do)))


def candidates(
    xp: Any, inputs: Inputs, causal: bool, backward: bool
) -> tuple[Callable[[], Any], ...]:
    """Return the same work twice as functions to call: by standard attention, by cupyflash."""
    q, k, v, do = inputs
    mask = causal_mask() if causal else None

    def standard() -> Any:
        o, p = standard_forward(xp, q, k, v, causal)
        return (o, standard_backward(xp, inputs, o, p)) if backward else o

    def ours() -> Any:
        if not backward:
            return attention(q, k, v, mask=mask)
        o, vjp = attention_vjp(q, k, v, mask=mask)
        return o, vjp(do)

    return standard, ours


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


def compare(meter: Meter, inputs: Inputs, most_runs: int, seconds: float = 0.6) -> list[Comparison]:
    """Measure time and memory, full and causal, of the forward and of forward and backward.

    Parameters
    ----------
    meter : Meter
        The meter of the device that holds the inputs.
    inputs : Inputs
        As `load` returns them.
    most_runs : int
        The most runs for a median.
    seconds : float, optional
        Time for the runs of one line; if it is too short, there are fewer runs.

    Returns
    -------
    list of Comparison
        Four lines.
    """
    lines = []
    for causal in (False, True):
        for backward in (False, True):
            work = candidates(meter.xp, inputs, causal, backward)
            standard_bytes, ours_bytes = (meter.peak_memory(function) for function in work)
            (standard_seconds, ours_seconds), runs = meter.medians(work, most_runs, seconds)
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
    """The worst errors with one mask, by name (O, LSE, dQ, dK, dV).

    Attributes
    ----------
    mask : str
        full or causal.
    share : dict of str to float
        Largest error as a share of its element's rounding-error bound: at most 1 is right.
    largest : float
        Largest absolute error of O.
    """

    mask: str
    share: dict[str, float]
    largest: float


def check(inputs: Inputs, every: int = 1) -> list[Checked]:
    """Compare output, LSE and gradients with exact values and their rounding-error bound.

    Parameters
    ----------
    inputs : Inputs
        As `load` returns them. The exact values and the bound take about twenty (L, L) matrices of
        float64 per head (long double for float64 inputs).
    every : int, optional
        Check every n-th head, beginning with the first.

    Returns
    -------
    list of Checked
        Full and causal.
    """
    q, k, v, do = (array[::every] for array in inputs)
    host = [_on_host(array) for array in (q, k, v)]
    device = device_arrays.device_of(q)
    cores = device is not None and registry.multiplies(
        q.dtype, None, cuda_device.of(device).capability
    )
    options: dict[str, Any] = {"precision": Precision.of(q.dtype, tensor_cores=cores)}
    if device is not None:
        options["block_kv"] = SMALLEST_BLOCK_KV
    results = []
    for causal in (False, True):
        mask = options["mask"] = causal_mask() if causal else None
        o, lse, vjp = attention_vjp(q, k, v, mask=mask, return_lse=True)
        computed = [_on_host(array) for array in (o, lse, *vjp(do)[:3])]
        forward = forward_bound(*host, **options)
        backward = backward_bound(_on_host(do), *host, **options)
        bounds = (forward.out, forward.lse, backward.dq, backward.dk, backward.dv)
        share = {
            name: rho(array, *bounded).value
            for name, array, bounded in zip(NAMES, computed, bounds, strict=True)
        }
        largest = float(np.abs(computed[0] - forward.out.exact).max())
        results.append(Checked("causal" if causal else "full", share, largest))
    return results


def _on_host(array: Array) -> Any:
    """Return an array that NumPy can read."""
    return device_arrays.read_back(array) if device_arrays.is_device_array(array) else array
