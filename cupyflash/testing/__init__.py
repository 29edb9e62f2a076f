"""The verification kit: judge an attention kernel, this package's or your own.

`verify` tests a kernel for every property of attention that applies to it, and returns a report.
From the shell, ``cupyflash verify`` does that for this package's kernels. The parts are public:

- `forward_bound`, `backward_bound`, `jvp_bound`, `second_bound`, `lookup_bound` and
  `reduction_bound` give the exact values of a problem and, elementwise, how far a computed value
  may lie from them in a given arithmetic (`Precision`); `rho` is the worst ratio of error to bound,
  and at most 1 for a correct kernel whatever its order of summation, tiles or schedule.
- `typical_errors` compares the errors of many elements with those that the stated arithmetic
  typically makes, which are far below the bound.
- `problem` makes the inputs of one call from one line; `problems` and `plain` are hypothesis
  strategies that draw them, and `expressions` draws expression trees.
- `PROPERTIES` are the properties, by name; `check` tries one on one problem.
- `Placed` puts an array into poisoned memory, with any strides.

The parts that draw need hypothesis (``pip install hypothesis``, or the extra ``verify``); the
others do not.

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

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
from .cases import Problem, problem
from .families import FAMILIES
from .features import FEATURES
from .judge import PropertyError
from .lookup_bound import LookupBound, lookup_bound
from .options import mask_array
from .placement import Layout, Placed, random_layout, same_bits
from .properties import PROPERTIES, Property
from .reduction_bound import (
    ReductionGradientsBound,
    reduction_bound,
    reduction_gradients_bound,
)
from .report import Failure, Report, Result
from .second_bound import SecondBound, second_bound
from .simulated import Inputs
from .subject import Subject
from .tangent_bound import Directions, JvpBound, jvp_bound, jvp_bound_varlen
from .typical import Typical, typical_errors
from .verification import check, verify

if TYPE_CHECKING:
    from .strategies import mask_names, plain, problems
    from .trees import expressions

# Modules that need hypothesis are imported on first use.
_DRAWN = {
    "expressions": "trees",
    "mask_names": "strategies",
    "plain": "strategies",
    "problems": "strategies",
}

__all__ = [
    "FAMILIES",
    "FEATURES",
    "PROPERTIES",
    "BackwardBound",
    "Bounded",
    "Directions",
    "Failure",
    "ForwardBound",
    "Inputs",
    "JvpBound",
    "Layout",
    "LookupBound",
    "Placed",
    "Precision",
    "Problem",
    "Property",
    "PropertyError",
    "ReductionGradientsBound",
    "Report",
    "Result",
    "Rho",
    "Rounding",
    "SecondBound",
    "Subject",
    "Typical",
    "backward_bound",
    "backward_bound_varlen",
    "check",
    "expressions",
    "forward_bound",
    "forward_bound_varlen",
    "jvp_bound",
    "jvp_bound_varlen",
    "lookup_bound",
    "mask_array",
    "mask_names",
    "plain",
    "problem",
    "problems",
    "random_layout",
    "reduction_bound",
    "reduction_gradients_bound",
    "rho",
    "same_bits",
    "second_bound",
    "typical_errors",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _DRAWN:
        return getattr(importlib.import_module(f"{__name__}.{_DRAWN[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
