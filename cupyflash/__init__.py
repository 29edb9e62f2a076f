"""Exact attention for people who write NumPy-style array code.

`attention` computes softmax(scale q kᵀ) v without storing the scores, `attention_backward` its
gradients; `masks` and `scores` say which pairs attend and how scores change.
"""

from . import analysis, expr, figures, masks, scores
from .api import (
    attention,
    attention_backward,
    attention_vjp,
    combine,
    lookup,
    plan,
    workspace_size,
)
from .errors import ArgumentError, ArgumentTypeError, TraceError
from .explanation import Explanation, explain
from .problem import Gradients, Plan
from .varlen import attention_varlen, attention_varlen_backward, attention_varlen_vjp

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "Explanation",
    "Gradients",
    "Plan",
    "TraceError",
    "analysis",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_varlen_vjp",
    "attention_vjp",
    "combine",
    "explain",
    "expr",
    "figures",
    "lookup",
    "masks",
    "plan",
    "scores",
    "workspace_size",
]
