"""The second tier: errors are as small as those that the stated arithmetic typically makes.

A bound holds for the worst case, which rounding errors hardly ever meet: a float32 kernel that
multiplies in TF32, or whose results are a ten-thousandth too large, stays within it. Over many
elements, honest errors are far smaller, and they cancel. `typical_errors` compares two numbers of
each output with those of `simulated.simulate` on the same inputs:

- the root mean square of the errors, which may be 1.25 times that of the stated roundings and 4
  times that of sums in the least accurate order, together;
- their shift, the mean of ``error * sign(exact)`` by the mean of ``|exact|``: 0 but for what sums
  lose in one direction, of which twice as much as in the simulation is allowed.

Heads are drawn independently, so both numbers have a standard error by Student's t, of which
``DEVIATIONS`` are allowed beside: with 32 heads, normal numbers exceed that once in 10^8
comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .precision import Precision
from .simulated import Inputs, Outputs, simulate

Array = np.ndarray[Any, Any]
HEADS = 32  # fewer make Student's t too wide
SIMULATED = 8  # heads on which sums are simulated, which takes most of the time
DEVIATIONS = 8.0
ROUNDINGS, SUMS, SHIFTS = 1.25, 4.0, 2.0


@dataclass(frozen=True)
class Typical:
    """How large the errors of one output are, on average.

    Attributes
    ----------
    output : str
        The output: out, lse, dq, dk, dv, dbias or dsink.
    size : float
        Root mean square of the errors by what is allowed; at most 1 is right.
    shift : float
        Mean of ``error * sign(exact)`` by the mean of ``|exact|``.
    most_shift : float
        The largest right ``|shift|``.
    """

    output: str
    size: float
    shift: float
    most_shift: float

    @property
    def problem(self) -> str:
        """Say what is wrong, or nothing."""
        if not self.size <= 1:
            return (
                f"{self.output}: the root mean square of the errors is {self.size:.3g} times what "
                "the stated arithmetic makes"
            )
        if not abs(self.shift) <= self.most_shift:
            return (
                f"{self.output}: results are {abs(self.shift):.3g} too "
                f"{'large' if self.shift > 0 else 'small'} on average; the stated arithmetic "
                f"shifts them by {self.most_shift:.3g} at most"
            )
        return ""


def draw(
    dtype: Any,
    rng: np.random.Generator,
    *,
    rows: int = 32,
    keys: int = 256,
    width: int = 64,
    heads: int = HEADS,
    factor: float = 1.0,
    bias: bool = False,
    sink: bool = False,
) -> Inputs:
    """Draw a call of standard normal numbers.

    Parameters
    ----------
    dtype : dtype_like
        Of q, k, v and do. Bias and sink have the accumulator's type.
    rng : Generator
        Draws them.
    rows, keys, width, heads : int
        Lq, Lk, D and H.
    factor : float
        Standard deviation of the queries: from 4 on, few keys have nearly all the weight.
    bias, sink : bool
        Whether there is one.

    Returns
    -------
    Inputs
        The call.
    """
    held = np.float64 if np.dtype(dtype) == np.float64 else np.float32

    def normal(*shape: int, size: float = 1.0) -> Array:
        return (size * rng.standard_normal(shape)).astype(held).astype(dtype)

    return Inputs(
        q=normal(heads, rows, width, size=factor),
        k=normal(heads, keys, width),
        v=normal(heads, keys, width),
        do=normal(heads, rows, width),
        bias=rng.standard_normal((heads, rows, keys)).astype(held) if bias else None,
        sink=rng.standard_normal(heads).astype(held) if sink else None,
        scale=1 / math.sqrt(width),
    )


def typical_errors(
    given: Inputs, got: Mapping[str, Any], precision: Precision, seed: int = 0
) -> list[Typical]:
    """Compare errors with those that the stated arithmetic makes on the same inputs.

    Parameters
    ----------
    given : Inputs
        The call, of 8 heads or more (better 32), as by `draw`.
    got : mapping of str to array_like, each of shape (H, ...)
        What a kernel returned, by the names of `Outputs`; outputs may be left out.
    precision : Precision
        The kernel's stated arithmetic.
    seed : int
        Of the simulation.

    Returns
    -------
    list of Typical
        One for each output that was given.
    """
    exact = simulate(given, precision, "none")
    roundings = simulate(given, precision, "roundings")
    sums = simulate(_first_heads(given), precision, "sums", seed)
    made = []
    for name in Outputs._fields:
        if got.get(name) is None:
            continue
        right, of_roundings, of_sums = (getattr(x, name) for x in (exact, roundings, sums))
        made.append(_typical(name, got[name], right, of_roundings, of_sums, precision))
    return made


def _first_heads(given: Inputs) -> Inputs:
    n = SIMULATED
    bias = None if given.bias is None else given.bias[:n]
    sink = None if given.sink is None else given.sink[:n]
    return Inputs(given.q[:n], given.k[:n], given.v[:n], given.do[:n], bias, sink, given.scale)


def _typical(
    name: str, got: Any, exact: Array, roundings: Array, sums: Array, precision: Precision
) -> Typical:
    squares, shifts = _by_head(got, exact)
    rounded, _ = _by_head(roundings, exact)
    summed, lost = _by_head(sums, exact[:SIMULATED])
    allowed = ROUNDINGS**2 * _highest(rounded) + SUMS**2 * _highest(summed)
    size = math.sqrt(float(squares.mean()) / (allowed + 1e-300))
    own = precision.exp2_error if name == "lse" else 0.0  # the weights' cancels
    own = precision.unit / 2 + own / (float(np.abs(exact).mean()) + 1e-300)
    noise = DEVIATIONS * float(shifts.std(ddof=1)) / math.sqrt(len(shifts))
    most = SHIFTS * abs(float(lost.mean())) + own + noise
    return Typical(name, size, float(shifts.mean()), most)


def _highest(squares: Array) -> float:
    """Return the mean square of the errors and `DEVIATIONS` of its standard errors."""
    noise = float(squares.std(ddof=1)) / math.sqrt(len(squares))
    return float(squares.mean()) + DEVIATIONS * noise


def _by_head(got: Any, exact: Array) -> tuple[Array, Array]:
    """Return the mean square of the errors, and their shift, of each head."""
    heads = len(exact)
    right = exact.reshape(heads, -1)
    error = np.asarray(got).astype(np.longdouble).reshape(heads, -1) - right
    error, right = error.astype(np.float64), right.astype(np.float64)
    mean = np.abs(right).mean()  # of all heads: one that is nearly 0 says little
    return (error**2).mean(axis=1), (error * np.sign(right)).mean(axis=1) / (mean + 1e-300)
