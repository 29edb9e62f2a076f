"""Exact attention for people who write NumPy-style array code.

`attention` computes softmax(scale q kᵀ) v without storing the scores, and `attention_backward`
computes its gradients; `masks` and `scores` say which pairs attend and how scores change.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from . import analysis, expr, masks, reductions, scores
from .api import (
    attention,
    attention_backward,
    combine,
)
from .cache_update import append, rope
from .cached import attention_cached, workspace_size_cached
from .closures import attention_vjp
from .conversion import convert
from .errors import ArgumentError, ArgumentTypeError, TraceError
from .expr.arguments import lookup
from .forward_mode import attention_jvp, attention_varlen_jvp
from .hints import other_libraries
from .planning import plan, plan_cached, workspace_size
from .problem.call import Gradients, Plan
from .problem.rotary import Rotary
from .problem.tangents import Second
from .quantization import hadamard, quantize
from .second_order import attention_backward_jvp, attention_varlen_backward_jvp
from .statistics import ReductionGradients, reduce, reduce_vjp
from .varlen import attention_varlen, attention_varlen_backward, attention_varlen_vjp

if TYPE_CHECKING:
    from . import distributed, figures, foreign, streamed
    from .explanation import Explanation, explain, explain_cached

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "Explanation",
    "Gradients",
    "Plan",
    "ReductionGradients",
    "Rotary",
    "Second",
    "TraceError",
    "analysis",
    "append",
    "attention",
    "attention_backward",
    "attention_backward_jvp",
    "attention_cached",
    "attention_jvp",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_varlen_backward_jvp",
    "attention_varlen_jvp",
    "attention_varlen_vjp",
    "attention_vjp",
    "combine",
    "convert",
    "distributed",
    "explain",
    "explain_cached",
    "expr",
    "figures",
    "foreign",
    "hadamard",
    "lookup",
    "masks",
    "plan",
    "plan_cached",
    "quantize",
    "reduce",
    "reduce_vjp",
    "reductions",
    "rope",
    "scores",
    "streamed",
    "workspace_size",
    "workspace_size_cached",
]

_WHEN_NEEDED = {
    "Explanation": "explanation",
    "distributed": "distributed",
    "explain": "explanation",
    "explain_cached": "explanation",
    "figures": "figures",
    "foreign": "foreign",
    "streamed": "streamed",
}


if not TYPE_CHECKING:  # for which a misspelt name is an error

    def __getattr__(name: str) -> object:
        """Import what only few programs need when it is asked for."""
        if name not in _WHEN_NEEDED:
            raise other_libraries.no_attribute(__name__, name, __all__, other_libraries.PACKAGE)
        module = importlib.import_module(f".{_WHEN_NEEDED[name]}", __name__)
        value = module if name == _WHEN_NEEDED[name] else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
