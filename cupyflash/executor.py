"""What the driver of calls (`execute`) asks of a request: to recognise its call, and to compute it.

There are three kinds: `Request` computes at once, `pieces.executor.Streamed` by chunks, and
`distributed.executor.Distributed` over ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from .outputs import Outputs, Targets
from .problem.call import Array, Call, Gradients

Prepared = TypeVar("Prepared", Outputs, Targets)
Made = TypeVar("Made", bound="Shown")


class Shown(Protocol):
    """A call that is checked, with memory for its results."""

    @property
    def shown(self) -> Any:
        """The results as users see them."""


class Keeper(Protocol):
    """What recognises calls."""

    def keep(self, served: Any, results: Any) -> None:
        """Keep a call that was checked: what its computation returned, and results as shown."""
        ...


def carry_out(
    prepare: Callable[[], Made], compute: Callable[[Made], Any], recalled: Keeper | None
) -> Any:
    """Check a call and allocate its results, compute it, and keep it; return the results."""
    made = prepare()
    served = compute(made)
    if recalled is not None:
        recalled.keep(served, made.shown)
    return made.shown


class Recalled(Keeper, Protocol):
    """A call that may look like an earlier one."""

    def forward(self, out: Any, lse: Any, workspace: Any = None) -> Any:
        """Compute it as that one, into these arrays or into new ones, and return out and lse.

        Returns None if there is none, or if the call must be checked again.
        """
        ...

    def backward(self, grads_out: Gradients | None, workspace: Any) -> Any:
        """Compute its gradients likewise."""
        ...


class Executor(ABC):
    """A call as the user made it, and how it is computed.

    Attributes
    ----------
    is_shared : bool
        Whether other ranks take part: they are told of faults, and compute nothing again alone.
    in_one_place : bool
        Whether all arrays have to be in one device's memory.
    needs_lse : bool
        Whether the LSE is computed even if nobody wants it.
    refuses_learned : str
        How gradients of learned look-ups would be computed, which they are not; empty if they are.
    is_watched : bool
        Whether changes of the call's arrays can be noticed.
    is_summed : bool
        Whether kernels notice them, without waiting for the device.
    seen : Recalled or None
        The replay signature of the forward, when it was computed.
    was_replayed : bool
        Whether it was computed as an earlier one.
    """

    is_shared: bool = False
    in_one_place: bool = True
    needs_lse: bool = False
    refuses_learned: str = "by chunks or over ranks"
    seen: Any = None
    was_replayed: bool = False

    @property
    @abstractmethod
    def call(self) -> Call:
        """The validated call."""

    @property
    @abstractmethod
    def is_watched(self) -> bool:
        """See above."""

    @property
    def is_summed(self) -> bool:
        """See above."""
        return False

    @property
    @abstractmethod
    def backward_name(self) -> str:
        """Name of the public function that computes the call's gradients."""

    @abstractmethod
    def read_arrays(self) -> dict[str, Array]:
        """Return the arrays that the call reads, by name."""

    def signature(
        self,
        kind: str,  # noqa: ARG002, of those that are recognised
        read: Mapping[str, Any],  # noqa: ARG002, likewise
        written: Mapping[str, Any],  # noqa: ARG002, likewise
    ) -> Recalled | None:
        """Return what recognises the call, or None if it is checked every time.

        Parameters
        ----------
        kind : str
            Which function, and what else tells calls of it apart.
        read, written : mapping of str to (array or None)
            The arrays besides the operands, by the kernels' names.
        """
        return None

    def gradient_signature(
        self,
        kind: str,
        read: Mapping[str, Any],
        written: Mapping[str, Any],
        grads_out: Gradients | None,  # noqa: ARG002, of those with learned look-ups
    ) -> Recalled | None:
        """Return the same of a call for gradients, which may be written to `grads_out`."""
        return self.signature(kind, read, written)

    @abstractmethod
    def forward(self, made: Outputs) -> Any:
        """Compute out and lse; return what `Recalled.keep` takes."""

    @abstractmethod
    def backward(self, made: Targets) -> Any:
        """Compute gradients; return what `Recalled.keep` takes."""

    def remember(self) -> None:  # noqa: B027, most have nothing to do
        """Let calls like this one, which was kept, be recognised before they are a request."""

    def carry_out(
        self,
        prepare: Callable[[], Prepared],
        compute: Callable[[Prepared], Any],
        recalled: Recalled | None,
    ) -> Any:
        """Check a call and compute it by one of the above; return its results as users see them."""
        return carry_out(prepare, compute, recalled)
