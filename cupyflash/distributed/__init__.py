"""Attention of a sequence that many ranks hold together, each some of its positions.

A layout says which rank holds which positions. Keys and values travel between the ranks that need
them, as the mask's own proofs say: what is proven EMPTY is neither sent nor computed. Results are
those of the functions of the same name in ``cupyflash``, within rounding.
"""

from ..errors import DistributedError
from .calls import attention, attention_backward, attention_vjp
from .partition.divisions import layout, prices
from .partition.layouts import Layout, Price
from .partition.simulation import Simulation
from .sharded import sharded
from .transport.communication import Communicator
from .transport.connect import communicator
from .transport.threads import Threads
from .varlen import attention_varlen, attention_varlen_backward, attention_varlen_vjp

__all__ = [
    "Communicator",
    "DistributedError",
    "Layout",
    "Price",
    "Simulation",
    "Threads",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_varlen_vjp",
    "attention_vjp",
    "communicator",
    "layout",
    "prices",
    "sharded",
]
