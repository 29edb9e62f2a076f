"""Attention in a stated arithmetic, simulated step by step: what errors an honest kernel makes.

A kernel's errors come from two sources, which `simulate` takes apart:

- ``roundings``: P and dS are rounded to an operand of the second product, and results to their
  type. Every kernel of the stated precision makes these errors, and no others of their size.
- ``sums``: scores, sums, exponentials and everything between are in the accumulator's type. Kernels
  differ here by the order of their sums. The simulation adds one term after another, which is the
  least accurate order of all; each exponential and each split product errs by a random number
  between the stated limits.

Everything else is exact (float64, or long double where float64 is what is simulated).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from .precision import Precision, Rounding

Array = np.ndarray[Any, Any]
Errors = Literal["none", "roundings", "sums"]
FRACTION = 52  # bits of float64's fraction


class Inputs(NamedTuple):
    """One call without leading axes, without masks and without shared heads.

    Parameters
    ----------
    q : ndarray, shape (H, Lq, D)
        Queries.
    k, v : ndarray, shape (H, Lk, D)
        Keys and values.
    do : ndarray, shape (H, Lq, D)
        Gradient of the output.
    bias : ndarray, shape (1, Lq, Lk) or (H, Lq, Lk), or None
        Added to the scores.
    sink : ndarray, shape (H,), or None
        Logits of a key whose value is 0.
    scale : float
        Factor of the scores.
    """

    q: Array
    k: Array
    v: Array
    do: Array
    bias: Array | None
    sink: Array | None
    scale: float


class Outputs(NamedTuple):
    """Results, each by head.

    Parameters
    ----------
    out, lse : ndarray
        O and the log-sum-exp.
    dq, dk, dv : ndarray
        Gradients of the inputs.
    dbias, dsink : ndarray or None
        None without such an input.
    """

    out: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dsink: Array | None


def rounded(x: Array, unit: float, truncates: bool = False) -> Array:
    """Round float64 numbers to a type of a unit roundoff; its range is not looked at."""
    dropped = FRACTION + 1 + round(np.log2(unit)) if unit else 0
    if dropped <= 0:
        return x
    bits = np.array(x, np.float64).view(np.int64)
    if not truncates:
        bits += 1 << (dropped - 1)
    bits &= -(1 << dropped)
    return bits.view(np.float64)


def stored(x: Array, rounding: Rounding) -> Array:
    """Round to a stored type, whose spacing stops shrinking below the normal range."""
    if not rounding.unit:
        return x
    with np.errstate(all="ignore"):
        exponents = np.frexp(x)[1]
        step = np.ldexp(np.array(2 * rounding.unit, x.dtype), exponents - 1)
    step = np.maximum(step, 2 * rounding.underflow)
    made: Array = np.where(step > 0, np.rint(x / np.where(step > 0, step, 1)) * step, x)
    return made


class _Steps:
    """The operations of a kernel, exact or with the errors of one source."""

    def __init__(self, precision: Precision, errors: Errors, rng: np.random.Generator) -> None:
        self.precision, self.errors, self._rng = precision, errors, rng
        self.wide = precision.unit < 2.0**-40
        self.dtype: Any = np.longdouble if self.wide and errors != "sums" else np.float64

    def held(self, x: Array) -> Array:
        """Keep a number in the accumulator's type."""
        if self.errors != "sums" or self.wide:
            return x
        return rounded(x, self.precision.unit)

    def dot(self, a: Array, b: Array) -> Array:
        """Contract the last axes: (H, M, C) and (H, N, C) become (H, M, N)."""
        if self.errors != "sums":
            return np.einsum("hmc,hnc->hmn", a, b) if self.wide else a @ b.swapaxes(-1, -2)
        unit, truncates = self.precision.unit, self.precision.truncates
        total = np.zeros((*a.shape[:2], b.shape[1]))
        for c in range(a.shape[-1]):
            term = a[:, :, c, None] * b[:, None, :, c]
            if self.precision.split:
                term *= 1 + self.precision.split * self._noise(term.shape)
            total = total + term if self.wide else rounded(total + term, unit, truncates)
        return total

    def total(self, x: Array) -> Array:
        """Sum the last axis."""
        return self.dot(x, np.ones((x.shape[0], 1, x.shape[-1]), x.dtype))[..., 0]

    def exp(self, x: Array) -> Array:
        """Return exponentials, which never overflow here."""
        made = np.exp(x)
        if self.errors == "sums":
            made = self.held(made * (1 + self.precision.exp2_error * self._noise(x.shape)))
        return made

    def score(self, x: Array) -> Array:
        """Round scores, where they are kept in a narrower type."""
        return stored(x, self.precision.scores) if self.errors == "roundings" else x

    def scale(self, x: float) -> float:
        """Round the scale."""
        if self.errors != "roundings":
            return x
        return float(stored(np.array(x), self.precision.scale))

    def operand(self, x: Array) -> Array:
        """Round P or dS to an operand of the second product."""
        return stored(x, self.precision.product) if self.errors == "roundings" else x

    def output(self, x: Array) -> Array:
        """Round a result to its type."""
        return stored(x, self.precision.output) if self.errors == "roundings" else x

    def _noise(self, shape: tuple[int, ...]) -> Array:
        return self._rng.uniform(-1, 1, shape)


def simulate(given: Inputs, precision: Precision, errors: Errors, seed: int = 0) -> Outputs:
    """Compute attention and its gradients with the errors of one source.

    Parameters
    ----------
    given : Inputs
        The call.
    precision : Precision
        The stated arithmetic.
    errors : {"none", "roundings", "sums"}
        Whose errors are made.
    seed : int
        Of the errors of exponentials and of split products.

    Returns
    -------
    Outputs
        In float64 or long double.
    """
    do = _Steps(precision, errors, np.random.default_rng(seed))
    q, k, v, dout = (x.astype(do.dtype) for x in (given.q, given.k, given.v, given.do))
    scale = do.scale(given.scale)
    s = do.score(do.held(do.score(do.dot(q, k)) * scale))
    if given.bias is not None:
        s = do.score(do.held(s + given.bias.astype(do.dtype)))
    sink = None if given.sink is None else given.sink.astype(do.dtype)[:, None]
    m = s.max(axis=-1)
    m = m if sink is None else np.maximum(m, sink)
    p = do.exp(do.held(s - m[..., None]))
    row = do.total(p)
    if sink is not None:
        row = do.held(row + do.exp(do.held(sink - m)))
    acc = do.dot(do.operand(p), v.swapaxes(-1, -2))
    out = do.output(do.held(acc / row[..., None]))
    log_sum = do.held(m + do.held(np.log(row)))
    lse = stored(log_sum, precision.lse) if errors == "roundings" else log_sum

    p = do.exp(do.held(s - lse[..., None]))
    dp = do.dot(dout, v)
    delta = do.total(dout * out)
    ds = do.held(p * do.held(dp - delta[..., None]))
    operand = do.operand(ds)
    dq = do.output(do.held(do.dot(operand, k.swapaxes(-1, -2)) * scale))
    dk = do.output(do.held(do.dot(operand.swapaxes(-1, -2), q.swapaxes(-1, -2)) * scale))
    dv = do.output(do.dot(do.operand(p).swapaxes(-1, -2), dout.swapaxes(-1, -2)))
    dsink = None
    if sink is not None:
        dsink = do.total(-do.held(do.exp(do.held(sink - lse)) * delta)[:, None, :])[:, 0]
    return Outputs(out, lse, dq, dk, dv, None if given.bias is None else ds, dsink)
