"""Recognises calls on a GPU that look like an earlier one, and launches it without arrays of CuPy.

`launch_cache` recognises calls on arrays. To make the arrays of a call takes longer than all of
that, so calls on tensors are recognised a second time, by the tensors' own attributes. Results and
scratch memory of such a call are new, and hence overlap nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch

from ..arrays.device_arrays import is_device_array
from ..gpu import launch_cache
from ..gpu.launch import CompiledRecipe
from ..problem.options import Options
from . import tensors

MOST = 512  # signatures that are remembered


class Signature(launch_cache.Signature):
    """The signature of a call on tensors."""

    __slots__ = ()

    def _take_arrays(self, named: Mapping[str, Any]) -> None:
        parts, addresses = self._parts, self.addresses
        for name, x in named.items():
            if x is None:
                parts.append(None)
            elif isinstance(x, torch.Tensor):
                addresses[name] = place = x.data_ptr()
                parts += (x.dtype, x.shape, x.stride(), x.get_device(), place & 15)
            elif is_device_array(x):  # in a mask or a score change
                data = x.data
                addresses[name] = place = data.ptr
                parts += (x.dtype, x.shape, x.strides, data.device_id, place & 15)
            else:
                raise launch_cache.UnlikeError


class Form(NamedTuple):
    """The form of a result, as ``torch.Tensor.new_empty_strided`` takes it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: torch.Tensor) -> Form:
        """Return the form of a tensor."""
        return cls(tuple(x.shape), x.stride(), x.dtype)


class Known(NamedTuple):
    """What is kept about a call.

    Attributes
    ----------
    compiled : CompiledRecipe
        Its launches.
    tables : tuple of (str, str)
        Names of the arrays that its kernels look up: in the kernels, and in the signature.
    results : tuple of (str, Form)
        What it writes, by the kernels' names.
    workspace_size : int
        The bytes of scratch memory.
    """

    compiled: CompiledRecipe
    tables: tuple[tuple[str, str], ...]
    results: tuple[tuple[str, Form], ...]
    workspace_size: int

    def launch(self, seen: Signature, q: torch.Tensor) -> list[torch.Tensor] | None:
        """Compute a call into new tensors; None if it must go through CuPy."""
        compiled = self.compiled
        if not compiled.queue.is_open():
            return None
        addresses = seen.addresses
        made = []
        for name, (shape, strides, dtype) in self.results:
            x = q.new_empty_strided(shape, strides, dtype=dtype)
            addresses[name] = place = x.data_ptr()
            if place & 15:
                return None
            made.append(x)
        for name, place_name in self.tables:
            addresses[name] = addresses[place_name]
        if compiled.adds_to_dq:
            made[0].zero_()
        workspace = 0
        if self.workspace_size:
            scratch = q.new_empty((self.workspace_size,), dtype=torch.uint8)
            workspace = scratch.data_ptr()
        compiled.start(addresses, workspace, tensors.raw_stream(compiled.queue.device))
        return made


_lock = threading.Lock()  # for writing; look-ups need no lock
_known: dict[Hashable, Known] = {}


def signature(kind: str, read: Mapping[str, Any], options: Options) -> Signature | None:
    """Return the signature of a call on tensors on a GPU, or None if it must be checked every time.

    Parameters
    ----------
    kind : str
        Which function.
    read : mapping of str to (torch.Tensor or None)
        Tensors by the kernels' names.
    options : Options
        The options of the call, with tensors in place of arrays.
    """
    try:
        return Signature(kind, read, options, {})
    except launch_cache.UnlikeError:
        return None


def launch(seen: Signature | None, q: torch.Tensor) -> list[torch.Tensor] | None:
    """Compute a call like an earlier one, and return its results; None if there was none."""
    if seen is None or (known := _known.get(seen.key)) is None:
        return None
    return known.launch(seen, q)


def keep(
    seen: Signature | None,
    of_arrays: launch_cache.Signature | None,
    results: Mapping[str, torch.Tensor],
) -> None:
    """Keep a call that was computed, whose signature with arrays was `of_arrays`."""
    if seen is None or of_arrays is None or (entry := launch_cache.find(of_arrays)) is None:
        return
    compiled = entry.compiled
    if compiled.needs_arrays or any(x.data_ptr() & 15 for x in results.values()):
        return
    places = [f"read {n}" for n in range(len(seen.read))]
    tables = []
    for name, place in entry.tables:
        found = [x for x in places if seen.addresses[x] == of_arrays.addresses[place]]
        if len(found) != 1:
            return  # which array is read is not sure
        tables.append((name, found[0]))
    forms = tuple((name, Form.of(x)) for name, x in results.items())
    with _lock:
        _known[seen.key] = Known(compiled, tuple(tables), forms, compiled.workspace_size)
        while len(_known) > MOST:
            del _known[next(iter(_known))]
