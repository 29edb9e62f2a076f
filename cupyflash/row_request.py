"""One call of a rowwise operation as the user made it: what the driver recognises and computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple

from . import dispatch
from .arrays import cuda_device
from .arrays.device_arrays import address, is_device_array
from .backends.backend import Backend
from .gpu import launch_cache
from .problem import cached as cached_calls
from .problem.call import Array
from .problem.options import Options
from .problem.rotary import Rotary
from .problem.route import CallResult
from .rowwise import Checked, NewArray, Operation


class Rows(NamedTuple):
    """A checked call, with memory for its results.

    Attributes
    ----------
    checked : object
        What the check returned.
    arrays : dict
        What the call reads, and what it writes in place, by the kernels' names.
    shown : dict
        The results by name.
    backend : Backend
        What computes them.
    """

    checked: Any
    arrays: Mapping[str, Any]
    shown: dict[str, Array]
    backend: Backend


class RowRequest(Generic[Checked]):
    """A call of a rowwise operation.

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

    def __init__(
        self,
        operation: Operation[Checked],
        check: Callable[[], Checked],
        read: Mapping[str, Any],
        written: Mapping[str, Any] | None = None,
        *,
        numbers: Sequence[Any] = (),
        rotary: Any = None,
        seed: Any = None,
        told: Mapping[str, int] | None = None,
    ) -> None:
        self._operation, self._check = operation, check
        written = {} if written is None else written
        signature = _signature(operation.name, read, written, numbers, rotary, seed)
        if signature is not None and told:
            signature.addresses.update(told)
        self.seen = None if signature is None else RecalledRows(signature, written)

    def prepare(self) -> Rows:
        """Check the call, and allocate the results for which the caller gave no array."""
        checked = self._check()
        arrays = self._operation.arrays_of(checked)
        backend = dispatch.backend_of(next(iter(arrays.values())))
        results = {
            name: backend.empty_like(*x) if isinstance(x, NewArray) else x
            for name, x in self._operation.results(checked).items()
        }
        return Rows(checked, arrays, results, backend)

    def compute(self, made: Rows) -> CallResult:
        """Write the results; return what `RecalledRows.keep` takes."""
        arrays = {**made.arrays, **made.shown}
        served = made.backend.rowwise(self._operation, made.checked, arrays)
        if self.seen is None or not _has_addresses(made.arrays, self.seen.signature.addresses):
            return CallResult()
        return served


class RecalledRows:
    """A call that may look like an earlier one.

    Parameters
    ----------
    signature : Signature
        Its signature.
    written : mapping of str to (array or None)
        The caller's arrays for results.
    """

    def __init__(self, signature: launch_cache.Signature, written: Mapping[str, Any]) -> None:
        self.signature, self._written = signature, written

    def again(self) -> dict[str, Array] | None:
        """Compute it as that one. Returns None if there is none, or if it must be checked again."""
        entry = launch_cache.find(self.signature)
        return None if entry is None else self._launch(entry)

    def _launch(self, entry: launch_cache.Entry) -> dict[str, Array] | None:
        compiled, names = entry.compiled
        if not compiled.queue.is_here():
            with cuda_device.current(compiled.queue.device):
                return self._launch(entry)
        if compiled.scratch and compiled.queue.current_stream().is_capturing():
            return None  # this is an error, which the launches report
        results, addresses = {}, self.signature.addresses
        for name, spec in zip(names, entry.specs, strict=True):
            result = self._written.get(name)
            if result is None:
                assert spec is not None
                result = spec.empty()
                addresses[name] = result.data.ptr
            results[name] = result
        compiled.forward(addresses)
        return results

    def keep(self, served: CallResult, results: dict[str, Array]) -> None:
        """Keep a call that was checked and launched, with its results."""
        if served.compiled is not None:
            kept = served.compiled, tuple(results)
            launch_cache.keep_as(self.signature, kept, (), list(results.values()))


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
