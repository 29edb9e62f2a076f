"""The keywords of this package's functions as types, for overloads that say what one returns."""

from __future__ import annotations

from typing import Required, TypedDict

from ..problem.signatures import BackwardOptions, CallOptions, Outputs, VjpOptions
from .partition.exchange_schedule import Scheme
from .partition.layouts import Layout
from .transport.communication import Communicator


class RanksOptions(TypedDict, total=False):
    """The ranks of a call."""

    comm: Required[Communicator]
    layout: Required[Layout]
    layout_k: Layout | None
    scheme: Scheme
    check: bool
    timeout: float


class ForwardOptions(RanksOptions, CallOptions, Outputs, total=False):
    """Of `attention` and `attention_varlen`."""


class RanksBackwardOptions(RanksOptions, BackwardOptions, total=False):
    """Of functions that compute gradients from results."""


class RanksVjpOptions(RanksOptions, VjpOptions, total=False):
    """Of functions that return a function of gradients."""
