"""Errors of reductions that hold code: what fails, the code, and what a user does with it."""

from __future__ import annotations

from typing import Any

import numpy as np
from remedies import Case, keywords, run

from cupyflash import masks, reduce, reduce_vjp, reductions
from cupyflash.reductions import mass, reduction

X = np.random.default_rng(0).standard_normal((2, 2, 4, 8)).astype(np.float32)
BIAS = X[0, 0, :, :4]


def weight(p: Any, t: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return p


def of_shared_bias(bias: Any, **options: Any) -> Any:
    """Compute gradients of the mass, the bias's too."""
    found, vjp = reduce_vjp(X, X, {"m": mass()}, bias=bias, mask=masks.causal())
    return vjp({"m": np.ones_like(found["m"])}, **options)


CASES = (
    Case("reductions.py", "slice(-32, None)", lambda: mass(queries=3), r"slice\(.*?\)",  # type: ignore[arg-type]  # wrong
         lambda code: mass(queries=run(code))),
    Case("reductions.py", "by='top'", lambda: reduction(weight, n=3), r"by='top'",
         lambda code: reduction(weight, n=3, **keywords(code))),
    Case("reductions.py", "along='blocks'", lambda: reduction(weight, block=8),
         r"along='blocks'", lambda code: reduction(weight, block=8, **keywords(code))),
    Case("statistics.py", "reductions.mass()", lambda: reduce(X, X, mass()),  # type: ignore[arg-type]  # wrong
         r"{.*mass\(\)}", lambda code: reduce(X, X, run(code, reductions=reductions))),
    Case("backends/cpu_reductions.py", "np.broadcast_to(bias, {})", lambda: of_shared_bias(BIAS),
         r"np\.broadcast_to\(.*?\)\)", lambda code: of_shared_bias(run(code, bias=BIAS))),
    Case("backends/cpu_reductions.py", "bias_gradient=False", lambda: of_shared_bias(BIAS),
         r"bias_gradient=False", lambda code: of_shared_bias(BIAS, **keywords(code))),
)  # fmt: skip
