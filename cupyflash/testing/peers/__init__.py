"""Attention functions of other libraries, judged by the same properties as this package's.

``PEERS`` lists them; each says in one place what its library takes and documents, and imports it
when it is used. ``run.verify_peer`` judges one in a process of its own.
"""

from __future__ import annotations

from . import with_cuda, with_jax, with_layers, with_numpy, with_torch
from .base import Documented, Functions, Peer

PEERS: dict[str, Peer] = {
    each.name: each
    for module in (with_torch, with_jax, with_numpy, with_layers, with_cuda)
    for each in module.PEERS
}

__all__ = ["PEERS", "Documented", "Functions", "Peer"]
