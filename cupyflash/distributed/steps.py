"""The steps of a call over ranks: check, agree with the others, allocate what is missing, run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np

from .. import dispatch
from ..arrays.device_arrays import is_device_array
from ..arrays.interop import DLPackArray
from ..arrays.tape import Tape
from ..changes import Snapshot, looks_at, refused
from ..errors import ArgumentError, ArgumentTypeError, DistributedError
from ..execute import Vjp, check_flag
from ..expr.bind import bind
from ..lazy import cached_property
from ..pieces import steps as pieces_steps
from ..pieces.device import Device
from ..pieces.place import Host, Place
from ..problem import validate
from ..problem.arguments import Dense, Packed, Part
from ..problem.call import Call, Gradients, Problem
from ..problem.options import Options
from ..request import Request
from . import compute
from .again import Again, Written
from .agreement import Facts, agree, bias_facts, bias_is_shared, facts_of
from .communication import Communicator, is_communicator
from .faults import gave_up
from .heads import Heads
from .layouts import Layout
from .plans import BY_HEADS, Plan, check_scheme, plan
from .sharded import Extremes, Lookups, placed, reads_parts

T = TypeVar("T")


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


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


class Distributed:
    """A call over ranks. It is validated once, when that is first needed.

    Parameters
    ----------
    request : Request
        The call, on this rank's arrays.
    ranks : Ranks
        As users pass them.
    """

    is_summed = False

    def __init__(self, request: Request, ranks: Ranks) -> None:
        self._request, self._ranks = request, ranks
        self.comm = ranks.communicator()
        self._bias_is_shared = False
        self._reads_parts = reads_parts(request.options)
        self._bounded: Call | None = None  # for proofs, if look-ups are divided
        self._is_backward = False
        self._plans: dict[bool, Plan] = {}
        self.facts: Facts = {}

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
            known = self._plans[self._is_backward] = plan(call, *self.layouts, scheme, nodes, *how)
        return known

    @property
    def _copies(self) -> bool:
        """Whether messages take no SMs."""
        return getattr(self.comm, "copies", False)

    def again(
        self,
        name: str,
        read: Mapping[str, Any],
        written: Mapping[str, Any],
        names: Sequence[str],
        more: tuple[Any, ...],
    ) -> Again | None:
        """Return what recognises the call if it was made before; the rest is as in `Again`."""
        request = self._request
        if not is_device_array(request.q):
            return None
        of_rows = request.rows.signature(*request.operands)
        if of_rows is None or any(of_rows):
            return None  # rows are told apart by more than their arrays
        ranks = self._ranks
        layouts = ranks.layout, ranks.layout if ranks.layout_k is None else ranks.layout_k
        return Again(
            name,
            {**request.operands._asdict(), **read},
            written,
            names,
            request.options,
            self.comm,
            layouts,
            (*more, ranks.scheme),
            ranks.check,
            ranks.timeout,
        )

    def rank(self, tape: Tape | None = None) -> compute.Rank:
        """Return what this rank computes, for one run that may be written to a tape."""
        rows, keys = (each.own for each in self.layouts)
        device = self.call.device
        place: Place = Host(dispatch.CPU) if device is None else Device(dispatch.GPU, device)
        timeout = self._ranks.seconds()
        comm = self.comm if tape is None else Written(self.comm, tape)
        call = place.ready(self.call)
        lookups = Lookups(call) if self._reads_parts else None
        made, relays = self.plan.steps, self.plan.scheme == "nodes"
        return compute.Rank(
            call, rows, keys, made, comm, place, timeout, lookups, relays, self._copies
        )

    def heads(self, tape: Tape | None = None) -> Heads:
        """Return what this rank computes if rows travel by heads, for one run."""
        return Heads(self.rank(tape), self.layouts, self.plan.group, self._bias_is_shared)

    @property
    def _how_looked_up(self) -> str:
        return "in parts" if self._reads_parts else "whole"

    @property
    def bias_is_shared(self) -> bool:
        """Whether the rows of the bias are one for all ranks, after `begin`."""
        return self._bias_is_shared

    def begin(self, name: str, prepare: Callable[[], T], more: dict[str, Any], backward: bool) -> T:
        """Return what `prepare` returns, if every rank is ready for the same call.

        `more` are options that have to be the same on every rank.
        """
        self._is_backward = backward
        self.comm.check()
        facts: dict[str, str] = {}
        error: Exception | None = None
        tells = True
        try:
            made = prepare()
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
                more = {"function": name, "look-ups": self._how_looked_up, "scheme": scheme, **more}
                facts = facts_of(self.call, layout, layout_k, more)
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


def _forward(
    request: Distributed, flags: Mapping[str, Any], out: Any, lse_out: Any
) -> tuple[Any, Any]:
    def prepare() -> pieces_steps.Outputs:
        for name, flag in flags.items():
            check_flag(flag, name)
        return pieces_steps.outputs(request.call, out, lse_out)

    written = {"out": out, "lse": lse_out}
    more = tuple(flags.values())
    again = request.again(request.name, {}, written, tuple(written), more)
    with request.running():
        if again is not None and (results := again.results()) is not None:
            return results[0], results[1]
        made = request.begin(request.name, prepare, {}, backward=False)
        with _recording(again, made.shown) as tape:
            if request.plan.scheme in BY_HEADS:
                request.heads(tape).forward(made.out, made.lse)
            else:
                compute.forward(request.rank(tape), made.out, made.lse)
        if again is not None:
            again.keep(request.facts, made.shown)
    return made.shown


@contextmanager
def _recording(again: Again | None, shown: Sequence[Any]) -> Iterator[Tape | None]:
    """Write down what is asked of the device, if the call is one that is recognised."""
    tape = None if again is None else again.tape(shown)
    if tape is None:
        yield None
        return
    with tape.recording():
        yield tape


def forward(request: Distributed, return_lse: Any, out: Any, lse_out: Any) -> Any:
    """Compute a call, into the arrays given or into new ones."""
    shown = _forward(request, {"return_lse": return_lse}, out, lse_out)
    return shown if return_lse else shown[0]


def backward(
    request: Distributed,
    do: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    deterministic: Any,
    grads_out: Any,
    bias_gradient: Any = True,
    before: Snapshot | None = None,
) -> Gradients:
    """Compute the gradients of a call, into the arrays given or into new ones.

    `before` is what a function of gradients remembers of its arrays.
    """

    def prepare() -> pieces_steps.Targets:
        check_flag(deterministic, "deterministic")
        if before is not None and (changed := before.check()):
            raise refused(changed)  # computing results again takes all ranks
        return pieces_steps.targets(request.call, do, out, lse, dlse, grads_out, bias_gradient)

    name = f"{request.name}_backward"
    read = {"d_out": do, "out": out, "lse": lse, "dlse": dlse}
    written: dict[str, Any] = {}
    again = None
    if type(grads_out) is Gradients:
        written = grads_out._asdict()
    if grads_out is None or written:
        how = deterministic, bias_gradient
        again = request.again(name, read, written, Gradients._fields, how)
    with request.running():
        if again is not None and (results := again.results()) is not None:
            return Gradients(*results)
        more: dict[str, Any] = {
            "deterministic": bool(deterministic),
            "bias_gradient": bool(bias_gradient),
        }
        more["dlse"] = "None" if dlse is None else "given"
        made = request.begin(name, prepare, more, backward=True)
        with _recording(again, made.shown) as tape:
            if request.plan.scheme in BY_HEADS:
                request.heads(tape).backward(made, bool(deterministic))
            else:
                rank = request.rank(tape)
                compute.backward(rank, made, bool(deterministic), request.bias_is_shared)
        if again is not None:
            again.keep(request.facts, made.shown)
    return made.shown


class DistributedVjp(Vjp):
    """The function that computes the gradients of a call over ranks."""

    __slots__ = ()

    def __call__(self, do: DLPackArray, dlse: DLPackArray | None = None) -> Gradients:
        """Return the gradients, given those of the output and of the LSE."""
        request: Any = self._request
        rest = self._deterministic, None, self._bias_gradient, self._before
        return backward(request, do, self._out, self._lse, dlse, *rest)


def vjp_of(request: Distributed, return_lse: Any, deterministic: Any, bias_gradient: Any) -> Any:
    """Compute a call, and return it with the function that computes its gradients."""
    flags = {"return_lse": return_lse, "deterministic": deterministic}
    flags["bias_gradient"] = bias_gradient
    out, lse = _forward(request, flags, None, None)
    made: Any = request
    how = deterministic, bias_gradient, request.is_checked
    vjp = DistributedVjp(made, out, lse, *how)
    return (out, lse, vjp) if return_lse else (out, vjp)
