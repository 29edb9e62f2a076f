"""Launches calls on a GPU again that look like an earlier one (see `problem.replay`).

For most calls, this is all the work of the host. It reads every attribute of an array once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from ..arrays import cuda_device
from ..arrays.device_arrays import OutputSpec
from ..problem import replay
from ..problem.call import Gradients
from ..problem.lookups import gradient_name
from ..problem.options import Options
from ..problem.replay import Entry, Signature, UnlikeError, find, keep_as, kept, reach
from ..problem.route import CallResult
from ..problem.tangents import RESULTS as TANGENT_RESULTS
from ..problem.tangents import Second
from .launch import Addresses

__all__ = [
    "Entry", "Signature", "UnlikeError", "backward", "find", "forward", "keep_as", "kept",
    "reach", "signature",
]  # fmt: skip


class DeviceSignature(Signature):
    """The signature of a call on arrays in device memory."""

    __slots__ = ()

    def _take_arrays(self, named: Mapping[str, Any]) -> None:
        """Take arrays, or None, by the names that kernels have for them."""
        kind, parts, addresses = self._kind, self._parts, self.addresses
        self._taken.append(named)
        for name, array in named.items():
            if array is None:
                parts.append(None)
                continue
            if not isinstance(array, kind):
                raise UnlikeError
            data = array.data
            addresses[name] = place = data.ptr
            parts += (array.dtype, array.shape, array.strides, data.device_id, place & 15)

    def forward(self, out: Any, lse: Any, workspace: Any = None) -> Any:
        """Launch a forward again."""
        entry = find(self)
        return None if entry is None else forward(entry, self.addresses, out, lse, workspace)

    def forward_tangent(self, results: Sequence[Any]) -> Any:
        """Launch a forward with tangents again."""
        entry = find(self)
        return None if entry is None else forward_tangent(entry, self.addresses, results)

    def backward(self, grads_out: Gradients | None, workspace: Any) -> Any:
        """Launch a backward again."""
        entry = find(self)
        return None if entry is None else backward(entry, self, grads_out, workspace)

    def backward_tangent(
        self, grads_out: Gradients | None, results: tuple[Any, Any], workspace: Any
    ) -> Any:
        """Launch a backward with tangents again."""
        entry, written = find(self), (grads_out, results, workspace)
        return None if entry is None else backward_tangent(entry, self.addresses, *written)

    def keep(self, served: CallResult, results: Any) -> None:
        """Keep a call that was checked and launched."""
        if self.learned and set(self.learned) != set(results.dlookups):
            return  # the scores do not depend on some after all
        replay.keep(self, served.compiled, served.tables, self.every(results))

    def spec(self, array: Any) -> Any:
        """Return how an array like a result is made."""
        return OutputSpec(array)


def signature(
    kind: Hashable,
    read: Mapping[str, Any],
    options: Options,
    written: Mapping[str, Any],
) -> Signature | None:
    """Return the signature of a call on a GPU, or None if it must be checked every time.

    Parameters
    ----------
    kind : hashable
        Which function, and what else tells calls of it apart.
    read, written : mapping of str to (array or None)
        Arrays by the kernels' names.
    options : Options
        The options of the call.
    """
    try:
        return DeviceSignature(kind, read, options, written)
    except UnlikeError:
        return None


def forward(
    entry: Entry, addresses: Addresses, out: Any, lse: Any, workspace: Any = None
) -> tuple[Any, Any] | None:
    """Compute a call with a kept entry, into the given arrays or into new ones.

    Returns None if the call must be checked again.
    """
    compiled = entry.compiled
    if not compiled.queue.is_here():
        with cuda_device.current(compiled.queue.device):
            return forward(entry, addresses, out, lse, workspace)
    own_memory = compiled.uploads or (compiled.scratch and workspace is None)
    if own_memory and compiled.queue.current_stream().is_capturing():
        return None  # its memory must live as long as the graph
    out_spec, lse_spec = entry.specs
    if out is None and out_spec is not None:
        out = out_spec.empty()
        addresses["out"] = out.data.ptr
    if lse is None and lse_spec is not None:
        lse = lse_spec.empty()
        addresses["lse"] = lse.data.ptr
    compiled.forward(addresses, workspace)
    return out, lse


def forward_tangent(entry: Entry, addresses: Addresses, results: Sequence[Any]) -> list[Any] | None:
    """Compute a call with tangents with a kept entry; None if it must be checked again."""
    compiled = entry.compiled
    if not compiled.queue.is_here():
        with cuda_device.current(compiled.queue.device):
            return forward_tangent(entry, addresses, results)
    if (compiled.uploads or compiled.scratch) and compiled.queue.current_stream().is_capturing():
        return None  # its memory must live as long as the graph
    made = list(results)
    for n, spec in enumerate(entry.specs):
        if spec is not None and made[n] is None:
            made[n] = array = spec.empty()
            addresses[TANGENT_RESULTS[n]] = array.data.ptr
    compiled.forward(addresses)
    return made


def backward(
    entry: Entry, seen: Signature, grads_out: Gradients | None, workspace: Any
) -> Gradients | None:
    """Compute the gradients of a call with a kept entry; None if it must be checked again."""
    compiled, addresses = entry.compiled, seen.addresses
    if not compiled.queue.is_here():
        with cuda_device.current(compiled.queue.device):
            return backward(entry, seen, grads_out, workspace)
    own_memory = compiled.uploads or workspace is None
    if own_memory and compiled.queue.current_stream().is_capturing():
        return None  # this is an error, which the full check reports
    made = seen.given(grads_out)
    for n, spec in enumerate(entry.specs):
        if spec is not None and made[n] is None:
            made[n] = array = spec.empty()
            at = n - len(_GRADIENTS)
            addresses[_GRADIENTS[n] if at < 0 else gradient_name(at)] = array.data.ptr
    gradients = seen.gradients(made)
    compiled.backward(addresses, gradients, workspace)
    return gradients


def backward_tangent(
    entry: Entry,
    addresses: Addresses,
    grads_out: Gradients | None,
    results: tuple[Any, Any],
    workspace: Any,
) -> Second | None:
    """Compute the tangents of a call's gradients with a kept entry; None if it must be checked."""
    compiled = entry.compiled
    if not compiled.queue.is_here():
        with cuda_device.current(compiled.queue.device):
            return backward_tangent(entry, addresses, grads_out, results, workspace)
    own_memory = compiled.uploads or workspace is None
    if own_memory and compiled.queue.current_stream().is_capturing():
        return None  # this is an error, which the full check reports
    made = [*([None] * len(_GRADIENTS) if grads_out is None else grads_out), *results]
    for n, spec in enumerate(entry.specs):
        if spec is not None and made[n] is None:
            made[n] = array = spec.empty()
            addresses[_SECOND[n]] = array.data.ptr
    gradients = Gradients(*made[: len(_GRADIENTS)])
    compiled.backward(addresses, gradients, workspace)
    return Second(gradients, *made[len(_GRADIENTS) :])


_GRADIENTS = Gradients._fields
_SECOND = *_GRADIENTS, "tout", "tlse"
