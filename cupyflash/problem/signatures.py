"""The keywords of public functions as types, for overloads that say what a function returns.

The functions themselves have the same keywords with defaults; a test compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, SupportsFloat, SupportsIndex, TypedDict

from ..arrays.interop import DLPackArray
from ..arrays.typed import Array, CacheDType, DType, Number
from ..masks import Mask
from ..scores import Score
from .call import Gradients


class ScoreOptions(TypedDict, total=False):
    """What changes the scores of a call."""

    mask: Mask | DLPackArray | None
    score_mod: Score | Sequence[Score] | None
    bias: DLPackArray | None
    sink: DLPackArray | None
    scale: Number | None


class CallOptions(ScoreOptions, total=False):
    """The options of a call: those of `Options`."""

    dropout: Number
    seed: SupportsIndex | DLPackArray | None
    precision: Literal["tf32x3"] | None


class Outputs(TypedDict, total=False):
    """Where results are written."""

    out: Array | None
    lse_out: Array | None


class StreamedOptions(CallOptions, Outputs, total=False):
    """Of `streamed.attention`."""


class ForwardOptions(CallOptions, Outputs, total=False):
    """Of `attention` and `attention_varlen`."""

    q_scale: DLPackArray | SupportsFloat | None
    k_scale: DLPackArray | SupportsFloat | None
    v_scale: DLPackArray | SupportsFloat | None
    qkv_dtype: DType
    out_dtype: DType


class VjpOptions(CallOptions, total=False):
    """Of functions that return a function of gradients."""

    deterministic: bool
    bias_gradient: bool


class CheckedVjpOptions(VjpOptions, total=False):
    """The same, of those whose option `check` concerns changed arrays alone."""

    check: bool | None


class JvpOptions(CallOptions, Outputs, total=False):
    """Of functions that compute results and their tangents."""

    tbias: DLPackArray | None
    tsink: DLPackArray | None
    tout_out: Array | None
    tlse_out: Array | None


class BackwardOptions(CallOptions, total=False):
    """Of functions that compute gradients from results."""

    dlse: DLPackArray | None
    deterministic: bool
    bias_gradient: bool
    grads_out: Gradients | Sequence[Array | None] | None


class WorkspaceBackwardOptions(BackwardOptions, total=False):
    """The same, of `attention_backward` and `attention_varlen_backward`."""

    workspace: Array | None


class CachedOptions(ScoreOptions, Outputs, total=False):
    """Of `attention_cached`."""

    table: DLPackArray | None
    offsets_q: DLPackArray | Sequence[int] | None
    k_scale: DLPackArray | SupportsFloat | None
    v_scale: DLPackArray | SupportsFloat | None
    kv_dtype: CacheDType
    shared: SupportsIndex
    workspace: Array | None
