"""The steps of a call of a rowwise operation, the same for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import dispatch
from .arrays import cuda_device
from .arrays.device_arrays import address, is_device_array
from .gpu import launch_cache
from .problem import cached as cached_calls
from .problem.call import Array
from .problem.options import Options
from .problem.rotary import Rotary
from .rowwise import Checked, NewArray, Operation


def run(
    operation: Operation[Checked],
    check: Callable[[], Checked],
    read: Mapping[str, Any],
    written: Mapping[str, Any] | None = None,
    *,
    numbers: Sequence[Any] = (),
    rotary: Any = None,
    seed: Any = None,
    told: Mapping[str, int] | None = None,
) -> dict[str, Array]:
    """Compute a call of a rowwise operation, and return its results by name.

    Parameters
    ----------
    operation : Operation
        Its row in the table.
    check : function
        Validates the call, if it is not recognised.
    read, written : mapping of str to object
        The arguments that are arrays or None, by the kernels' names; the first one is an array.
        What is written includes results.
    numbers : sequence
        The other arguments. The call is recognised if these are of the types bool, int and str, or
        None.
    rotary, seed : object
        Arguments of some operations.
    told : mapping of str to int, optional
        Numbers that kernels are told at each launch, so that calls are recognised without them.
    """
    written = {} if written is None else written
    signature = _signature(operation.name, read, written, numbers, rotary, seed)
    if signature is not None and told:
        signature.addresses.update(told)
    if signature is not None and (entry := launch_cache.find(signature)) is not None:
        results = _run_again(entry, signature.addresses, written)
        if results is not None:
            return results
    checked = check()
    arrays = operation.arrays_of(checked)
    backend = dispatch.backend_of(next(iter(arrays.values())))
    wanted = operation.results(checked)
    results = {
        name: backend.empty_like(*x) if isinstance(x, NewArray) else x for name, x in wanted.items()
    }
    served = backend.rowwise(operation, checked, arrays | results)
    if (
        served.compiled is not None
        and signature is not None
        and _has_addresses(arrays, signature.addresses)
    ):
        kept = served.compiled, tuple(results)
        launch_cache.keep_as(signature, kept, (), list(results.values()))
    return results


def _run_again(
    entry: launch_cache.Entry, addresses: dict[str, int], written: Mapping[str, Any]
) -> dict[str, Array] | None:
    """Launch what is kept of a call; None if it must be checked again."""
    compiled, names = entry.compiled
    if not compiled.queue.is_here():
        with cuda_device.current(compiled.queue.device):
            return _run_again(entry, addresses, written)
    if compiled.scratch and compiled.queue.current_stream().is_capturing():
        return None  # this is an error, which the launches report
    results = {}
    for name, spec in zip(names, entry.specs, strict=True):
        result = written.get(name)
        if result is None:
            assert spec is not None
            result = spec.empty()
            addresses[name] = result.data.ptr
        results[name] = result
    compiled.forward(addresses)
    return results


_NUMBERS = bool, int, str, type(None)


def _signature(
    name: str,
    read: Mapping[str, Any],
    written: Mapping[str, Any],
    numbers: Sequence[Any],
    rotary: Any,
    seed: Any,
) -> launch_cache.Signature | None:
    """Return the signature of a call on a GPU, or None if it must be checked every time."""
    if cached_calls.CHECKS_ALL or not is_device_array(next(iter(read.values()), None)):
        return None
    if any(type(x) not in _NUMBERS for x in numbers):
        return None
    kind: tuple[Any, ...] = name, *((type(x), x) for x in numbers)  # for 1 equals True
    if isinstance(rotary, Rotary):
        read = {**read, **rotary.arrays}
        kind += (rotary.interleaved,)
    elif rotary is not None:
        return None
    return launch_cache.signature(kind, read, Options(seed=seed), written)


def _has_addresses(arrays: Mapping[str, Any], addresses: Mapping[str, int]) -> bool:
    """Whether arrays lie where a signature says: the check did not replace one by a copy."""
    return all(
        isinstance(x, int) or address(x) == addresses.get(name) for name, x in arrays.items()
    )
