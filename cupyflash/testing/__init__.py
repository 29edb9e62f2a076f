"""The verification kit: judge an attention kernel, this package's or your own.

`forward_bound` and `backward_bound` give the exact values of a problem and, elementwise, how far a
computed value may lie from them in a given arithmetic (`Precision`); `rho` is the worst ratio of
error to bound, and at most 1 for a correct kernel whatever its order of summation, tiles or
schedule.

Examples
--------
>>> import numpy as np
>>> import cupyflash
>>> from cupyflash import testing
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 100, 16), np.float32)
>>> expected = testing.forward_bound(q, k, v, precision=testing.Precision.of(np.float32))
>>> testing.rho(cupyflash.attention(q, k, v), *expected.out).value <= 1
True
"""

from .bound import (
    BackwardBound,
    Bounded,
    ForwardBound,
    Precision,
    Rho,
    Rounding,
    backward_bound,
    backward_bound_varlen,
    forward_bound,
    forward_bound_varlen,
    rho,
)

__all__ = [
    "BackwardBound",
    "Bounded",
    "ForwardBound",
    "Precision",
    "Rho",
    "Rounding",
    "backward_bound",
    "backward_bound_varlen",
    "forward_bound",
    "forward_bound_varlen",
    "rho",
]
