"""Calls over ranks: what a rank has of one, what ranks agree on, and how it is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np

from .. import dispatch
from ..arrays.device_arrays import is_device_array
from ..arrays.tape import Tape
from ..changes import looks_at
from ..errors import ArgumentError, ArgumentTypeError, DistributedError
from ..execute import check_flag
from ..executor import Executor, Prepared
from ..expr.bind import bind
from ..lazy import cached_property
from ..outputs import Outputs, Targets
from ..pieces.device import Device
from ..pieces.place import Host, Place
from ..problem import lookups, validate
from ..problem.arguments import Dense, Packed, Part
from ..problem.call import Call, Gradients, Problem
from ..problem.options import Options
from ..request import Request
from . import compute
from .agreement import Facts, agree, bias_facts, bias_is_shared, facts_of
from .heads import Heads
from .partition.layouts import Layout
from .partition.schemes import BY_HEADS, Decisions, Plan, check_scheme, plan
from .recorded_call import RecordedCall, RecordingCommunicator
from .sharded import Extremes, Lookups, placed, reads_parts
from .transport.communication import Communicator, expect, is_communicator
from .transport.faults import gave_up


@dataclass(frozen=True)
class Ranks:
    """Who computes a call, as users pass it.

    Attributes
    ----------
    comm, layout, layout_k, scheme, check, timeout : Any
        As in `attention`.
    """

    comm: Any
    layout: Any
    layout_k: Any
    scheme: Any
    check: Any
    timeout: Any

    def communicator(self) -> Communicator:
        """Return the communicator, if it is one; all other faults can be told to other ranks."""
        if not is_communicator(self.comm):
            raise ArgumentTypeError(
                f"comm: got {type(self.comm).__name__}; expected what distributed.communicator "
                "returns, as in communicator(MPI.COMM_WORLD)."
            )
        made: Communicator = self.comm
        return made

    def seconds(self) -> float:
        """Return the timeout. A wrong one is refused when the rest is checked."""
        return self.timeout if _is_number(self.timeout) and self.timeout > 0 else 300.0

    def checked(self) -> tuple[Layout, Layout]:
        """Check all but the communicator, and return the layouts of queries and of keys."""
        check_scheme(self.scheme)
        check_flag(self.check, "check")
        if not _is_number(self.timeout) or not 0 < self.timeout < math.inf:
            raise ArgumentError(f"timeout: got {self.timeout!r}; expected seconds, more than 0.")
        layout_k = self.layout if self.layout_k is None else self.layout_k
        for name, layout in (("layout", self.layout), ("layout_k", layout_k)):
            if not isinstance(layout, Layout):
                raise ArgumentTypeError(
                    f"{name}: got {type(layout).__name__}; expected what distributed.layout "
                    "returns, as in layout(comm, length, mask=mask)."
                )
            if (layout.size, layout.rank) != (self.comm.size, self.comm.rank):
                raise ArgumentError(
                    f"{name}: got the layout of rank {layout.rank} of {layout.size}; expected that "
                    f"of rank {self.comm.rank} of {self.comm.size}, made with the same comm."
                )
        return self.layout, layout_k


_decisions: WeakKeyDictionary[Any, Decisions] = WeakKeyDictionary()


def decisions(comm: Communicator) -> Decisions:
    """Return what the ranks of a communicator, and of no other one, agreed on that "auto" is."""
    found = _decisions.get(comm)
    if found is None:
        found = _decisions[comm] = Decisions()
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


class Distributed(Executor):
    """A call over ranks. It is validated once, when that is first needed.

    Parameters
    ----------
    request : Request
        The call, on this rank's arrays.
    ranks : Ranks
        As users pass them.
    """

    is_shared = True
    in_one_place = False
    needs_lse = True

    def __init__(self, request: Request, ranks: Ranks) -> None:
        self._request, self._ranks = request, ranks
        self.comm = ranks.communicator()
        self._bias_is_shared = False  # its rows are one for all ranks, as these agreed
        self._reads_parts = reads_parts(request.options)
        self._bounded: Call | None = None  # for proofs, if look-ups are divided
        self._is_backward = False
        self._tape: Tape | None = None  # of what is computed now
        self._plans: dict[bool, Plan] = {}
        self.facts: Facts = {}

    def gradient_signature(
        self,
        kind: str,
        read: Mapping[str, Any],
        written: Mapping[str, Any],
        grads_out: Gradients | None,  # noqa: ARG002, learned look-ups are refused
    ) -> Any:
        """Return the same of a call for gradients."""
        if lookups.learns(self._request.options.score_mod):
            return None
        return self.signature(kind, read, written)

    @property
    def backward_name(self) -> str:
        """Name of the public function that computes the call's gradients."""
        return f"cupyflash.distributed.{self._request.backward_name}"

    @property
    def name(self) -> str:
        """Name of the public function."""
        return self._rows.name

    @property
    def _rows(self) -> Dense | Packed:
        """Where the rows of all ranks lie: no cache is divided among ranks."""
        return cast("Dense | Packed", self._request.rows)

    @cached_property
    def layouts(self) -> tuple[Layout, Layout]:
        """The layouts of queries and of keys."""
        return self._ranks.checked()

    @cached_property
    def call(self) -> Call:
        """The validated call. Its arrays are those of this rank, its lengths those of all."""
        call = self._validated()
        if call.device is not None and not self.comm.takes_device_arrays:
            raise ArgumentTypeError(
                "q: got a CuPy array, and comm has no GPUs; expected a NumPy array, or a comm made "
                "with communicator(ranks, device=...)."
            )
        return call

    def _validated(self) -> Call:
        layout, layout_k = self.layouts

        def placed_here(options: Options, problem: Problem) -> Options:
            return placed(options, problem, layout, layout_k)

        look_ups = placed_here if self._reads_parts else None
        part = Part(layout.length, layout_k.length, self._check_counts, look_ups)
        request = self._request
        return self._rows.checked_part(request.operands, request.options, part)

    def _check_counts(self, given: Call) -> None:
        """Check that the arrays have the rows that the layouts give to this rank."""
        for name, array, each in zip("qk", (given.q, given.k), self.layouts, strict=True):
            if array.shape[-2] != each.count:
                raise ArgumentError(
                    f"{name}: got {array.shape[-2]} positions; expected {each.count}, those that "
                    f"the layout gives to rank {each.rank}. layout.take(whole array) returns them."
                )

    @property
    def is_checked(self) -> bool:
        """Whether `check` is True."""
        return self._ranks.check is not False

    def read_arrays(self) -> dict[str, Any]:
        """Return the arrays that the call reads, by name."""
        return validate.read_arrays(self.call)

    @property
    def is_watched(self) -> bool:
        """Whether changes of the call's arrays can be noticed."""
        return looks_at(self._request.q)

    @property
    def plan(self) -> Plan:
        """The scheme, and what this rank sends, receives and computes: of what began last."""
        known = self._plans.get(self._is_backward)
        if known is None:
            call = self.call if self._bounded is None else self._bounded
            scheme, nodes = self._ranks.scheme, self.comm.nodes
            how = not self._reads_parts, self._copies, self._is_backward
            decided = decisions(self.comm)
            known = plan(call, *self.layouts, scheme, nodes, *how, decided)
            self._plans[self._is_backward] = known
        return known

    @property
    def _copies(self) -> bool:
        """Whether messages take SMs only where what arrives is copied to its place."""
        return getattr(self.comm, "copies", False)

    def signature(
        self, kind: str, read: Mapping[str, Any], written: Mapping[str, Any]
    ) -> RecordedCall | None:
        """Return what recognises the call, or None if it is checked every time."""
        request = self._request
        if not is_device_array(request.q):
            return None
        of_rows = request.rows.signature(*request.operands)
        if of_rows is None or any(of_rows):
            return None  # rows are told apart by more than their arrays
        ranks = self._ranks
        layouts = ranks.layout, ranks.layout if ranks.layout_k is None else ranks.layout_k
        return RecordedCall(
            f"{self.name}: {kind}",
            {**request.operands._asdict(), **read},
            written,
            Gradients._fields if "d_out" in read else ("out", "lse"),
            request.options,
            self.comm,
            layouts,
            ranks.scheme,
            ranks.check,
            ranks.timeout,
            self.running,
        )

    def rank(self) -> compute.Rank:
        """Return what this rank computes, for one run."""
        rows, keys = (each.own for each in self.layouts)
        device = self.call.device
        place: Place = Host(dispatch.CPU) if device is None else Device(dispatch.GPU, device)
        timeout = self._ranks.seconds()
        expect(self.comm, timeout)
        comm = self.comm if self._tape is None else RecordingCommunicator(self.comm, self._tape)
        call = place.ready(self.call)
        lookups = Lookups(call) if self._reads_parts else None
        made, relays = self.plan.steps, self.plan.scheme == "nodes"
        return compute.Rank(
            call, rows, keys, made, comm, place, timeout, lookups, relays, self._copies
        )

    def heads(self) -> Heads:
        """Return what this rank computes if rows travel by heads, for one run."""
        return Heads(self.rank(), self.layouts, self.plan.group, self._bias_is_shared)

    @property
    def _how_looked_up(self) -> str:
        return "in parts" if self._reads_parts else "whole"

    def forward(self, made: Outputs) -> None:
        """Compute out and lse."""
        assert made.lse is not None
        if self.plan.scheme in BY_HEADS:
            self.heads().forward(made.out, made.lse)
        else:
            compute.forward(self.rank(), made.out, made.lse)

    def backward(self, made: Targets) -> None:
        """Compute gradients."""
        if self.plan.scheme in BY_HEADS:
            self.heads().backward(made, made.deterministic)
        else:
            compute.backward(self.rank(), made, made.deterministic, self._bias_is_shared)

    def carry_out(
        self,
        prepare: Callable[[], Prepared],
        compute: Callable[[Prepared], Any],
        recalled: Any,
    ) -> Any:
        """Check a call, agree on it with the other ranks and compute it; return its results."""
        again: RecordedCall | None = recalled
        with self.running():
            made = self._agreed(prepare)
            decisions(self.comm).keep(self.plan, *self.layouts)
            try:
                with _recording(again, made.shown) as self._tape:
                    compute(made)
            finally:
                self._tape = None
            if again is not None:
                again.follows(self.plan.scheme)
                again.keep(self.facts, made.shown)
        return made.shown

    def _agreed(self, prepare: Callable[[], Prepared]) -> Prepared:
        """Return what `prepare` returns, if every rank is ready for the same call."""
        self.comm.check()
        facts: dict[str, str] = {}
        error: Exception | None = None
        tells = True
        try:
            made = prepare()
            self._is_backward = isinstance(made, Targets)
            layout, layout_k = self.layouts
            bias, rows = self.call.bias, layout.count
            # A rank with one row cannot know whether others have the same row of the bias.
            unsure = bias is not None and any(runs.count == 1 for runs in layout.runs)
            tells = bool(self._ranks.check) or (unsure and not self._rows.has_whole_bias)
            tells |= self._reads_parts
            self._bias_is_shared = bias is not None and (
                self._rows.has_whole_bias or bias.ndim < 2 or bias.shape[-2] == 1
            )
            if tells:
                scheme = self._ranks.scheme if self._reads_parts else self.plan.scheme
                name = f"{self.name}_backward" if self._is_backward else self.name
                more = {"function": name, "look-ups": self._how_looked_up, "scheme": scheme}
                facts = facts_of(self.call, layout, layout_k, {**more, **made.options})
                facts |= bias_facts(bias, None if self._rows.has_whole_bias else rows)
            if self._reads_parts:
                facts |= Extremes(self.call, layout, layout_k).facts()
            else:
                self.plan  # noqa: B018, its faults are told like others
        except Exception as raised:  # noqa: BLE001, every rank raises it
            error = raised
            tells = self._ranks.check is not False or self._reads_parts
        if not tells:
            if error is not None:
                raise error
            return made
        self.facts = facts
        of_ranks = agree(self.comm, facts, error, self._ranks.seconds())
        if self.call.bias is not None:
            self._bias_is_shared = bias_is_shared(of_ranks)
        if self._reads_parts:
            self._plan_by(of_ranks)
        return made

    def _plan_by(self, of_ranks: list[Facts]) -> None:
        """Find the plan, given what all ranks tell of their parts of look-ups."""
        error: Exception | None = None
        try:
            self._bounded = Extremes(self.call, *self.layouts).bounded(of_ranks)
            if self._bounded.score_mod is not None:  # that of the mask is bound for the plan
                bind(self._bounded.score_mod.expr, self.call.problem)
            self.plan  # noqa: B018, its faults are told like others
        except Exception as raised:  # noqa: BLE001, every rank raises it
            error = raised
        agree(self.comm, {}, error, self._ranks.seconds())

    @contextmanager
    def running(self) -> Iterator[None]:
        """End the communicator if this rank raises; others would wait for it."""
        try:
            yield
        except DistributedError:
            raise
        except BaseException as error:
            reason = gave_up(self.comm.rank, error)
            self.comm.abort(reason)
            if isinstance(error, Exception):
                raise DistributedError(reason) from error
            raise


@contextmanager
def _recording(again: RecordedCall | None, shown: Sequence[Any]) -> Iterator[Tape | None]:
    """Write down what is asked of the device, if the call is one that is recognised."""
    tape = None if again is None else again.tape(shown)
    if tape is None:
        yield None
        return
    with tape.recording():
        yield tape
