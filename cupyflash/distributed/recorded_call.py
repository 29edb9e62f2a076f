"""Calls over ranks on GPUs that look like an earlier one: what they ask of the device is on a tape.

A call is made again from its tape if everything is alike that checks and plans depend on: shapes,
strides, dtypes and alignments of its arrays, the structure and the numbers of its mask and scores,
all other options, the layouts and the communicator. Ranks agree as ever, unless `check` is False:
then a mask that reads arrays is among them, too. What these hold decides what ranks send, unless
rows travel by heads; so they are compared with what they held.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..arrays import cuda_device, device_arrays
from ..arrays.contents import Contents
from ..arrays.device_arrays import is_device_array
from ..arrays.tape import Tape, paused
from ..gpu import driver, launch_cache
from ..gpu.launch_cache import Signature
from ..masks import Mask
from ..problem.call import Gradients
from ..problem.options import Options
from .agreement import Facts, agree_on, digest
from .partition.layouts import Layout
from .transport.communication import Communicator, Exchanger, Message, Transfer, expect
from .transport.peers import spans


class _Kept:
    """A tape, and what it belongs to.

    Attributes
    ----------
    read : list of str
        The names of arrays that have to hold what they held.
    contents : Contents or None
        What that is, if there are any.
    """

    def __init__(
        self,
        tape: Tape,
        owners: tuple[Any, ...],
        facts: Facts,
        names: Sequence[str],
        read: Mapping[str, Any],
    ) -> None:
        self.tape, self.names = tape, names
        self.read = [name for name, array in read.items() if array.size]
        self.contents = Contents([read[name] for name in self.read]) if self.read else None
        self._told = digest(facts), facts
        self._owners = tuple(map(weakref.ref, owners))

    def told(self, seed: int) -> tuple[bytes, Facts]:
        """Return what ranks tell each other of a call with a seed: a digest, and the facts."""
        _, facts = self._told
        if facts["seed"] != repr(seed):
            facts = facts | {"seed": repr(seed)}
            self._told = digest(facts), facts
        return self._told

    def is_of(self, owners: tuple[Any, ...]) -> bool:
        """Whether these are the layouts and the communicator for which it was made."""
        return all(ref() is owner for ref, owner in zip(self._owners, owners, strict=True))


class RecordedCall:
    """A call that may have been made before.

    Parameters
    ----------
    kind : str
        Which function.
    read, written : mapping of str to (array or None)
        The arrays of the call by the names that kernels have for them, as they came.
    names : sequence of str
        The names of its results, in their order.
    options : Options
        As users pass them.
    comm, layout, layout_k : Any
        As users pass them.
    scheme, check, timeout : Any
        As users pass them.
    running : callable
        Returns a context, which tells other ranks if this one raises.
    """

    def __init__(
        self,
        kind: str,
        read: Mapping[str, Any],
        written: Mapping[str, Any],
        names: Sequence[str],
        options: Options,
        comm: Communicator,
        layouts: tuple[Any, Any],
        scheme: Any,
        check: Any,
        timeout: Any,
        running: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._comm, self._names, self._written = comm, names, written
        self._owners = *layouts, comm
        self._check, self._timeout, self._running = check, timeout, running
        self._signature: Signature | None = None
        self._decisive: dict[str, Any] = {}
        self._tape: Tape | None = None
        self._mask, self._mask_reads_arrays = options.mask, _reads_arrays(options.mask)
        plain = type(check) is bool and (scheme is None or type(scheme) is str)
        plain &= type(timeout) in (int, float) and 0 < timeout < math.inf
        if not plain or not all(isinstance(x, Layout) for x in layouts):
            return
        if options.bias is not None or (check and self._mask_reads_arrays):
            return  # what it holds is looked at in every call
        if check and (options.sink is not None or is_device_array(options.seed)):
            return
        identities = tuple(map(id, self._owners))
        signature = launch_cache.signature(
            ("over ranks", kind, scheme, check, identities), read, options, written
        )
        if signature is not None and not (check and signature.read):
            self._signature = signature

    def forward(self, out: Any, lse: Any, workspace: Any = None) -> Any:  # noqa: ARG002, it has them
        """Make the call from its tape, and return its results; None if there is no tape."""
        with self._running():
            return self._results()

    def backward(self, grads_out: Gradients | None, workspace: Any) -> Any:  # noqa: ARG002, likewise
        """Compute the gradients of a call likewise."""
        with self._running():
            made = self._results()
        return None if made is None else Gradients(*made)

    def _results(self) -> tuple[Any, ...] | None:
        signature = self._signature
        if signature is None or (entry := launch_cache.find(signature)) is None:
            return None
        kept = entry.compiled
        queue = driver.queue(next(iter(signature.arrays.values())).data.device_id)
        if not kept.is_of(self._owners) or queue.current_stream().is_capturing():
            return None
        self._comm.check()
        if self._check:
            of_facts, facts = kept.told(self._numbers()["seed"])
            agree_on(self._comm, of_facts, facts, None, self._timeout)
        expect(self._comm, self._timeout)
        with cuda_device.current(queue.device):
            contents: Contents | None = kept.contents
            if contents is not None:
                contents.compare([signature.arrays[name] for name in kept.read])
                # Ranks have to know before they send; what sends nothing can be computed meanwhile.
                if kept.tape.travels and not contents.are_same():
                    return None
            given = [self._written.get(name) for name in self._names]
            made = tuple(
                spec.empty() if array is None and spec is not None else array
                for array, spec in zip(given, entry.specs, strict=True)
            )
            arrays = signature.arrays | dict(zip(self._names, made, strict=True))
            exchange = getattr(self._comm, "exchange_spans", self._comm.exchange)
            kept.tape.play(device_arrays, arrays, self._numbers(), exchange, self._timeout)
            if contents is not None and not kept.tape.travels and not contents.are_same():
                return None
        return made

    def _numbers(self) -> dict[str, int]:
        assert self._signature is not None
        return {"seed": self._signature.addresses["seed"]}

    def tape(self, made: Sequence[Any]) -> Tape | None:
        """Return a tape for a call that is about to be made, with the memory of its results."""
        if self._signature is None:
            return None
        named = self._signature.arrays
        results = zip(self._names, made, strict=True)
        named |= {name: array for name, array in results if array is not None}
        self._tape = Tape(named, self._numbers(), launch_cache.reach)
        return self._tape

    def follows(self, scheme: str) -> None:
        """Note by which arrays it was decided what to ask the device for.

        What a rank sends follows from the arrays that a mask reads, unless rows travel by heads.
        """
        if scheme == "heads" or not self._mask_reads_arrays or self._signature is None:
            return
        mask = self._mask
        of_mask = set(map(id, mask.structure[1])) if isinstance(mask, Mask) else None
        self._decisive = {
            f"read {n}": array
            for n, array in enumerate(self._signature.read)
            if of_mask is None or id(array) in of_mask
        }

    def keep(self, facts: Facts, shown: Sequence[Any]) -> None:
        """Keep the tape of a call that was made, with what ranks agreed on and its results."""
        tape, signature = self._tape, self._signature
        if tape is None or signature is None or tape.why is not None:
            return
        if self._check and not facts:
            return
        tape.finish()
        queue = driver.queue(next(iter(signature.arrays.values())).data.device_id)
        with cuda_device.current(queue.device):
            kept = _Kept(tape, self._owners, facts, self._names, self._decisive)
        launch_cache.keep_as(signature, kept, (), shown)


def _reads_arrays(mask: Any) -> bool:
    """Return whether a mask reads arrays, or is one."""
    return mask is not None and not (isinstance(mask, Mask) and not mask.structure[1])


class RecordingCommunicator:
    """Ranks whose messages are written to a tape.

    Parameters
    ----------
    comm : Exchanger
        The ranks.
    tape : Tape
        The tape.
    """

    def __init__(self, comm: Exchanger, tape: Tape) -> None:
        self._comm, self._tape = comm, tape
        self.rank, self.size = comm.rank, comm.size

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        """Start to send and to receive."""
        if hasattr(self._comm, "exchange_spans"):
            number = self._tape.exchange_spans(spans(sends), spans(receives))
        else:
            number = self._tape.exchange(sends, receives)
        with paused():
            transfer = self._comm.exchange(sends, receives)
        return _WrittenTransfer(transfer, self._tape, number)


class _WrittenTransfer:
    """Messages under way, for which a tape waits, too."""

    def __init__(self, transfer: Transfer, tape: Tape, number: int) -> None:
        self._transfer, self._tape, self._number = transfer, tape, number

    def wait(self, timeout: float, what: str) -> None:
        """Wait for them."""
        self._tape.wait(self._number, what)
        with paused():
            self._transfer.wait(timeout, what)
