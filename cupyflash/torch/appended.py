"""Writes a new row of each entry to rooms on a GPU, by one launch that is known from a row before.

Two copies and the views that they need take several times as long on the host.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import cache_update, execute
from ..errors import ArgumentError, ArgumentTypeError
from ..gpu import launch_cache
from . import tensors
from .tensors import PLAIN, array_of

_MOST_FORMS = 4  # of new rows, one after the other, of which each takes long to learn


class Appended:
    """Appends rows to rooms of keys and of values, (B, H, S, D).

    Parameters
    ----------
    k, v : torch.Tensor
        The rooms.
    """

    __slots__ = ("_addresses", "_compiled", "_form", "_forms", "_k", "_v")

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self._k, self._v = k, v
        self._form: Any = None  # of the rows that were written last
        self._forms = 0
        self._compiled: Any = None
        self._addresses: dict[str, int] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what copies and pickles are made of: the rooms. Launches are of this process."""
        return Appended, (self._k, self._v)

    def write(self, k: torch.Tensor, v: torch.Tensor, length: int) -> bool:
        """Write rows (B, H, 1, D), the last ones of so many; False if that is not done.

        They are of the dtype of the rooms and on their device, and need no gradient.
        """
        if type(k) not in PLAIN or type(v) not in PLAIN:
            return False  # it may have no elements of its own
        at_k, at_v = k.data_ptr(), v.data_ptr()
        form = k.shape, k.stride(), v.shape, v.stride(), (at_k | at_v) & 15
        if form != self._form:
            return self._learn(form, k, v, length)
        if self._compiled is None:
            return False
        queue = self._compiled.queue
        if not queue.is_open():
            return False
        addresses = {**self._addresses, "k_new": at_k, "v_new": at_v, "length": length}
        self._compiled.launches.start(addresses, tensors.raw_stream(queue.device))
        for room in (self._k, self._v):
            if not room.is_inference():
                torch.autograd.graph.increment_version(room)
        return True

    def _learn(self, form: Any, k: torch.Tensor, v: torch.Tensor, length: int) -> bool:
        """Write rows by a call that is checked, and keep its launch for those like them.

        Rows that `append` refuses, as of integers, are not written.
        """
        if self._forms == _MOST_FORMS:
            return False
        self._forms += 1
        self._form, self._compiled = form, None
        try:
            with tensors.stream_of(k.device):
                request = cache_update.append_request(
                    array_of(k), array_of(v), array_of(self._k), array_of(self._v), length
                )
                execute.rows(request)
        except (ArgumentError, ArgumentTypeError):
            return False
        for room in (self._k, self._v):
            if not room.is_inference():
                torch.autograd.graph.increment_version(room)
        if request.seen is None:
            return True
        entry = launch_cache.find(request.seen.signature)
        if entry is not None and not entry.compiled[0].needs_arrays:
            self._compiled = entry.compiled[0]
            self._addresses = dict(request.seen.signature.addresses)
        return True
