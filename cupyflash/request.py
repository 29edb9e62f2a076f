"""One call as the user made it: what every function of attention begins with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import dispatch
from .arrays import interop
from .arrays.device_arrays import is_device_array
from .backends import host_quick, host_replay
from .executor import Executor
from .gpu import launch_cache, recent
from .lazy import cached_property
from .outputs import Outputs, SecondTargets, TangentOutputs, Targets
from .problem import cached, lookups, validate
from .problem.arguments import DENSE, Cached, Dense, Operands, Packed
from .problem.call import Call, Gradients
from .problem.coded import Fp8
from .problem.codes import NONE, CacheCodes, NoCodes
from .problem.options import DEFAULTS, Options
from .problem.replay import Signature


class Request(Executor):
    """A call as the user made it. It is validated once, when that is first needed.

    Parameters
    ----------
    q, k, v : Any
        As users pass them.
    rows : Dense, Packed or Cached
        Where their rows lie.
    codes : Fp8, CacheCodes or NoCodes
        What they mean if they are codes: all three, or the keys and values of a cache.
    options : Options
        As users pass them.
    """

    refuses_learned = ""

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        rows: Dense | Packed | Cached = DENSE,
        codes: Fp8 | CacheCodes | NoCodes = NONE,
        options: Options = DEFAULTS,
    ) -> None:
        self.q, self.k, self.v = q, k, v
        self.rows, self.codes, self.options = rows, codes, options

    @cached_property
    def operands(self) -> Operands:
        """Queries, keys and values; those of other libraries in device memory as CuPy's arrays."""
        q, k, v = self.q, self.k, self.v
        if not is_device_array(q):
            q, k, v = interop.of_device(q=q, k=k, v=v)
        return Operands(q, k, v)

    @property
    def on_device(self) -> bool:
        """Whether queries are in device memory."""
        return is_device_array(self.operands.q)

    @cached_property
    def call(self) -> Call:
        """The validated call."""
        codes: Any = self.codes  # of the kind that belongs to these rows
        if self.on_device:  # calls are recognised by arrays of scales
            codes = codes.with_arrays(self.operands.q)
        return self.rows.checked(self.operands, codes, self.options)

    def read_arrays(self) -> dict[str, Any]:
        """Return the arrays that the call reads by name; a replayed call is not checked for it."""
        if self.seen is None or not self.was_replayed:
            return validate.read_arrays(self.call)
        arrays: dict[str, Any] = self.seen.arrays
        return arrays

    @property
    def is_watched(self) -> bool:
        """Whether changes of the call's arrays can be noticed."""
        return not self.on_device or cached.CHECKS_ALL

    @property
    def is_summed(self) -> bool:
        """Whether kernels notice changes of the call's arrays, without waiting for the device."""
        return self.on_device and not cached.CHECKS_ALL

    @property
    def backward_name(self) -> str:
        """Name of the public function that computes the call's gradients."""
        return f"{self.rows.name}_backward"

    def signature(
        self, kind: str, read: Mapping[str, Any], written: Mapping[str, Any]
    ) -> Signature | None:
        """Return the replay signature, or None if the call cannot be replayed."""
        q, k, v = self.q, self.k, self.v
        if not is_device_array(q):
            q, k, v = self.operands
            if not is_device_array(q):
                return self._host_signature(kind, read, written)
        of_rows = self.rows.signature(q, k, v)
        if of_rows is None:
            return None
        words, arrays = of_rows
        codes = self.codes.with_arrays(q)
        named = {"q": q, "k": k, "v": v, **read, **arrays, **codes.scales}
        kind += codes.kind + words
        seen = launch_cache.signature(kind, named, self.options, written)
        if seen is not None and (numbers := self.rows.numbers):
            seen.addresses.update(numbers)
        return seen

    def gradient_signature(
        self,
        kind: str,
        read: Mapping[str, Any],
        written: Mapping[str, Any],
        grads_out: Gradients | None,
    ) -> Signature | None:
        """Return the same of a call for gradients, which may be written to `grads_out`."""
        learned = lookups.Learned.of(self.options.score_mod)
        if learned is None:
            return self.signature(kind, read, written)
        given = learned.given(grads_out)
        if given is None:
            return None
        if written or any(x is not None for x in given.values()):
            written = {**written, **given}
        seen = self.signature(f"{kind} {learned.pattern}", read, written)
        if seen is not None:
            seen.learned = learned.tables
        return seen

    def forward(self, made: Outputs) -> Any:
        """Compute out and lse."""
        backend = dispatch.backend_of(self.call.q)
        return self.rows.compute(backend, self.call, made.out, made.lse, made.scratch)

    def forward_tangent(self, made: TangentOutputs) -> Any:
        """Compute out, lse and their tangents."""
        backend = dispatch.backend_of(self.call.q)
        return backend.forward_tangent(self.call, made.tangents, made.results)

    def backward_tangent(self, made: SecondTargets) -> Any:
        """Compute the tangents of gradients, of out and of lse."""
        backend, of = dispatch.backend_of(self.call.q), made.targets
        written = of.gradients, made.results, made.scratch, of.deterministic
        return backend.backward_tangent(self.call, of.rows, made.tangents, *written)

    def remember(self) -> None:
        """Let calls like this one be recognised by arrays and a mask, if it says nothing else."""
        seen, options = self.seen, self.options
        if self.codes is not NONE or not options.has_mask_alone:
            return
        rows = self.rows.alone
        if rows is None:
            return
        arrays, (kind, *others) = (self.q, self.k, self.v, options.mask), rows
        if not is_device_array(self.q):
            offsets = None if kind == DENSE.name else others  # no call over a cache has two
            host_quick.keep(seen, *arrays, offsets)
        elif seen.entry is not None and not seen.written:
            recent.keep(seen.entry, kind, *arrays, *others)

    def backward(self, made: Targets) -> Any:
        """Compute gradients."""
        rows, how, gradients = made.rows, made.deterministic, made.gradients
        learned = lookups.Learned.of(self.options.score_mod)
        if learned is not None:  # in the order in which calls are recognised
            found = gradients.dlookups
            gradients.dlookups = {x: found[x] for x in learned.tables if x in found}
        arrays = rows["do"], rows["out"], rows["lse"], rows.get("dlse"), gradients
        backend = dispatch.backend_of(self.call.q)
        return backend.backward(self.call, *arrays, made.scratch, deterministic=how)

    def _host_signature(
        self, kind: str, read: Mapping[str, Any], written: Mapping[str, Any]
    ) -> host_replay.HostSignature | None:
        """Return the replay signature of a call on NumPy arrays."""
        operands, codes = self.operands, self.codes
        of_rows = self.rows.host_signature()
        if of_rows is None:
            return None
        words, contents = of_rows
        named = {"q": operands.q, "k": operands.k, "v": operands.v, **read}
        for name, scale in codes.scales.items():
            if type(scale) is float:
                words += f" {name} {scale!r}"
            else:
                named[name] = scale
        kind += codes.kind + words
        return host_replay.signature(kind, named, self.options, written, contents, self.rows)
