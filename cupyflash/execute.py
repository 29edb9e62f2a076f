"""The driver of calls: recognise, check, allocate what is missing, compute, return the results.

The steps are the same for calls that are computed at once, by chunks or over ranks: see `executor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, NoReturn

import numpy as np
from numpy.typing import NDArray

from . import changes, dispatch, outputs
from .arrays import interop
from .arrays.device_arrays import is_device_array
from .arrays.interop import DLPackArray
from .arrays.typed import F, FloatArray
from .errors import ArgumentTypeError
from .executor import Executor, Recalled, carry_out
from .gpu import checksum_launches
from .problem import lookups
from .problem.call import Array, Gradients
from .problem.tangents import RESULTS, Second, SecondTangents, Tangents
from .request import Request
from .row_request import RowRequest

_NOTHING: Mapping[str, Any] = {}


def check_flag(value: Any, name: str) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError(f"{name}: got {value!r}; expected True or False.")


def _check_flags(flags: Mapping[str, Any]) -> None:
    for name, value in flags.items():
        check_flag(value, name)


def _unsure(request: Executor, flags: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check flags, and return none; if ranks take part, return those to check with them."""
    if request.is_shared:
        return {name: value for name, value in flags.items() if type(value) is not bool}
    _check_flags(flags)
    return _NOTHING


def forward_signature(
    request: Executor, want_lse: bool, out: Any, lse_out: Any, workspace: Any = None
) -> Any:
    """Return the replay signature of a forward, or None if it cannot be replayed."""
    kind = "forward" if want_lse else "forward without lse"
    written = _NOTHING
    if out is not None or lse_out is not None or workspace is not None:
        written = {"out": out, "lse": lse_out, "workspace": workspace}
    return request.signature(kind, _NOTHING, written)


def forward(
    request: Executor,
    return_lse: Any,
    out: Any,
    lse_out: Any,
    workspace: Any = None,
    flags: Mapping[str, Any] = _NOTHING,
) -> Any:
    """Compute a call, into the arrays given or into new ones.

    `flags` are others that are to be checked with other ranks.
    """
    if type(return_lse) is not bool:
        flags = _unsure(request, {"return_lse": return_lse}) or flags
    want_lse = return_lse or lse_out is not None
    recalled: Recalled | None = None
    if not flags:
        recalled = forward_signature(request, want_lse, out, lse_out, workspace)
        request.seen = recalled
    if recalled is not None:
        results = recalled.forward(out, lse_out, workspace)
        if results is not None:
            request.was_replayed = True
            return results if return_lse else results[0]
    shown = _checked_forward(request, recalled, flags, out, lse_out, want_lse, workspace)
    return shown if return_lse else shown[0]


def _checked_forward(
    request: Executor,
    recalled: Recalled | None,
    flags: Mapping[str, Any],
    out: Any,
    lse_out: Any,
    want_lse: bool,
    workspace: Any,
) -> Any:
    # Apart from `forward`: in a function that has another one, each variable takes longer.
    def prepare() -> outputs.Outputs:
        _check_flags(flags)
        needs_lse = want_lse or request.needs_lse
        given = out, lse_out, needs_lse, workspace
        return outputs.outputs(request.call, *given, request.in_one_place)

    shown = request.carry_out(prepare, request.forward, recalled)
    if recalled is not None and not want_lse:
        request.remember()
    return shown


def forward_tangent(
    request: Request,
    tangents: Tangents,
    return_lse: Any,
    results: tuple[Any, Any, Any, Any],
) -> Any:
    """Compute a call with its tangents along a direction.

    `results` are arrays for out, its tangent, lse and its tangent, or None for new ones.
    """
    check_flag(return_lse, "return_lse")
    if not is_device_array(request.q):
        tangents = Tangents(*interop.of_device(**tangents._asdict()))
    want_lse = bool(return_lse) or results[2] is not None or results[3] is not None
    kind = "forward with tangents" if want_lse else "forward with tangents, without lse"
    read = {"tq": tangents.tq, "tk": tangents.tk, "tv": tangents.tv, "tsink": tangents.tsink}
    read["read tbias"] = tangents.tbias  # kernels look it up, as arrays of masks and scores
    written = _NOTHING
    if any(x is not None for x in results):
        written = dict(zip(RESULTS, results, strict=True))
    recalled = request.signature(kind, read, written)
    made = None if recalled is None else recalled.forward_tangent(results)
    if made is None:

        def prepare() -> outputs.TangentOutputs:
            return outputs.tangent_outputs(request.call, tangents, results, want_lse)

        made = carry_out(prepare, request.forward_tangent, recalled)
    return tuple(made) if return_lse else tuple(made[:2])


def backward_signature(
    request: Executor,
    do: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    deterministic: bool,
    grads_out: Gradients | None,
    workspace: Any,
    bias_gradient: bool = True,
) -> Any:
    """Return the replay signature of a backward, or None if it cannot be replayed."""
    read = {"d_out": do, "out": out, "lse": lse, "dlse": dlse}
    written: dict[str, Any] = {}
    if grads_out is not None or workspace is not None:
        written = {} if grads_out is None else grads_out._asdict()
        written["workspace"] = workspace
    kind = "deterministic backward" if deterministic else "backward"
    if not bias_gradient:
        kind += " without dbias"
    return request.gradient_signature(kind, read, written, grads_out)


def backward(
    request: Executor,
    do: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    deterministic: Any,
    grads_out: Any,
    workspace: Any = None,
    bias_gradient: Any = True,
    before: changes.Snapshot | None = None,
) -> Gradients:
    """Compute the gradients of a call, into the arrays given or into new ones.

    `before` is what a function of gradients over ranks remembers of its arrays.
    """
    flags: Mapping[str, Any] = _NOTHING
    if type(deterministic) is not bool or type(bias_gradient) is not bool:
        named = {"deterministic": deterministic, "bias_gradient": bias_gradient}
        flags = _unsure(request, named)
    if not request.is_shared and not is_device_array(do):
        do, out, lse, dlse = interop.of_device(do=do, out=out, lse=lse, dlse=dlse)
    recalled: Recalled | None = None
    if type(grads_out) in (tuple, list) and 3 <= len(grads_out) <= len(Gradients._fields):
        grads_out = Gradients(*grads_out)
    if not flags and (grads_out is None or type(grads_out) is Gradients):
        recalled = backward_signature(
            request, do, out, lse, dlse, deterministic, grads_out, workspace, bias_gradient
        )
    if recalled is not None:
        gradients: Gradients | None = recalled.backward(grads_out, workspace)
        if gradients is not None:
            return gradients
    read = {"do": do, "out": out, "lse": lse, "dlse": dlse}
    how = deterministic, bias_gradient, workspace
    return _checked_backward(request, recalled, flags, before, read, grads_out, how)


def _checked_backward(
    request: Executor,
    recalled: Recalled | None,
    flags: Mapping[str, Any],
    before: changes.Snapshot | None,
    read: Mapping[str, Any],
    grads_out: Any,
    how: tuple[Any, Any, Any],
) -> Gradients:
    def prepare() -> outputs.Targets:
        _check_flags(flags)
        if before is not None and (changed := before.check()):
            raise changes.refused(changed)  # computing results again takes all ranks
        if request.refuses_learned:
            lookups.refuse(request.call, request.refuses_learned)
        elif lookups.of_call(request.call):
            dispatch.backend_of(request.call.q).check_lookups(request.call)
        return outputs.targets(request.call, read, grads_out, *how, request.in_one_place)

    computed: Gradients = request.carry_out(prepare, request.backward, recalled)
    return computed


def backward_tangent(
    request: Request,
    read: Mapping[str, Any],
    tangents: SecondTangents,
    grads_out: Any,
    deterministic: Any,
    bias_gradient: Any,
    workspace: Any = None,
    results: tuple[Any, Any] = (None, None),
) -> Second:
    """Compute the tangents of the gradients of a call, into the arrays given or into new ones.

    `read` has do, out, lse and dlse; `results` are arrays for the tangents of out and lse, or None.
    """
    _check_flags({"deterministic": deterministic, "bias_gradient": bias_gradient})
    on_host = not is_device_array(read["do"])
    if on_host:
        named = dict(read) | tangents.arrays._asdict()
        named |= {"tdo": tangents.tdo, "tdlse": tangents.tdlse}
        named = dict(zip(named, interop.of_device(**named), strict=True))
        read = {name: named[name] for name in read}
        arrays = Tangents(*(named[name] for name in Tangents._fields))
        tangents = SecondTangents(arrays, named["tdo"], named["tdlse"])

    recalled = None
    if type(grads_out) in (tuple, list) and 3 <= len(grads_out) <= len(Gradients._fields):
        grads_out = Gradients(*grads_out)
    if not on_host and (grads_out is None or type(grads_out) is Gradients):
        written: dict[str, Any] = {} if grads_out is None else grads_out._asdict()
        written |= {"tout": results[0], "tlse": results[1], "workspace": workspace}
        if all(x is None for x in written.values()):
            written = {}
        flags = bool(deterministic), bool(bias_gradient)
        recalled = _second_signature(request, read, tangents, written, *flags)
    if recalled is not None:
        again: Second | None = recalled.backward_tangent(grads_out, results, workspace)
        if again is not None:
            return again
    given = read, grads_out, deterministic, bias_gradient, workspace, results
    made = outputs.second_targets(request.call, tangents, *given)
    served, shown = request.backward_tangent(made), made.shown
    if recalled is not None:
        recalled.keep(served, (*shown.gradients, shown.tout, shown.tlse))
    return shown


def _second_signature(
    request: Request,
    read: Mapping[str, Any],
    tangents: SecondTangents,
    written: Mapping[str, Any],
    deterministic: bool,
    bias_gradient: bool,
) -> Any:
    """Return the replay signature of a backward with tangents, or None: see `Signature`."""
    along = tangents.arrays
    named = {"d_out": read["do"], **{name: read[name] for name in ("out", "lse", "dlse")}}
    named |= {"tq": along.tq, "tk": along.tk, "tv": along.tv, "tsink": along.tsink}
    named |= {"tdo": tangents.tdo, "tdlse": tangents.tdlse, "read tbias": along.tbias}
    kind = "deterministic backward" if deterministic else "backward"
    kind += " with tangents" if bias_gradient else " with tangents, without dbias"
    return request.signature(kind, named, written)


def rows(request: RowRequest[Any]) -> dict[str, Array]:
    """Compute a call of a rowwise operation, and return its results by name."""
    recalled = request.seen
    if recalled is not None and (again := recalled.again()) is not None:
        return again
    results: dict[str, Array] = carry_out(request.prepare, request.compute, recalled)
    return results


def vjp_of(
    request: Executor,
    return_lse: bool,
    deterministic: bool,
    bias_gradient: bool = True,
    check: Any = None,
) -> Any:
    """Compute a call, and return it with the function that computes its gradients.

    `check` says whether that function notices what was changed in between; None: where that is
    cheap.
    """
    named = {"return_lse": return_lse, "deterministic": deterministic}
    flags = _unsure(request, {**named, "bias_gradient": bias_gradient})
    if check is not None:
        check_flag(check, "check")
        check = bool(check)
    out, lse = forward(request, True, None, None, flags=flags)
    sums = None
    if check is None and changes.passes_over(request):
        check = False
    elif check is not False and request.is_summed:
        sums = changes.sums(request, out, lse)
        check = False  # this is enough
    vjp = Vjp(request, out, lse, deterministic, bias_gradient, check, sums)
    return (out, lse, vjp) if return_lse else (out, vjp)


class Vjp(Generic[F]):
    """The function that computes the gradients of a call.

    Parameters
    ----------
    request : Executor
        The call.
    out, lse : array
        Its results.
    deterministic : bool
        Whether gradients are the same in every run.
    bias_gradient : bool
        Whether the gradient of the bias is computed.
    check : bool or None
        Whether arrays that were changed since are noticed, as far as `changes` looks at them; None:
        of short calls on a GPU, in some.
    sums : Sums, optional
        What notices changes of arrays in device memory.
    """

    __slots__ = (
        "__weakref__",
        "_before",
        "_bias_gradient",
        "_deterministic",
        "_lse",
        "_out",
        "_request",
        "_sums",
    )

    def __init__(
        self,
        request: Executor,
        out: Array,
        lse: Array,
        deterministic: bool,
        bias_gradient: bool,
        check: Any,
        sums: checksum_launches.Sums | None = None,
    ) -> None:
        self._request, self._out, self._lse = request, out, lse
        self._deterministic, self._bias_gradient = deterministic, bias_gradient
        self._before: changes.Snapshot | None = None
        self._sums = sums
        if check is not False and request.is_watched:
            named = request.read_arrays() | {"out": out, "lse": lse}
            self._before = changes.Snapshot(named, request)

    def __call__(
        self, do: DLPackArray, dlse: DLPackArray | None = None
    ) -> Gradients[NDArray[F], FloatArray | None]:
        """Return the gradients, given those of the output and of the LSE."""
        if self._before is not None and not self._request.is_shared:
            gradients: Gradients[NDArray[F], FloatArray | None] | None
            gradients = self._of_unchanged(do, dlse, self._before)
            if gradients is not None:
                return gradients
        out, lse = self._results()
        before = self._before if self._request.is_shared else None
        how = self._deterministic, None, None, self._bias_gradient, before
        if self._sums is None:
            return backward(self._request, do, out, lse, dlse, *how)
        changes.refuse_reported(out)
        gradients = backward(self._request, do, out, lse, dlse, *how)
        self._sums.compare(gradients)
        return gradients

    def jvp(
        self,
        do: DLPackArray,
        tq: DLPackArray | None = None,
        tk: DLPackArray | None = None,
        tv: DLPackArray | None = None,
        *,
        tbias: DLPackArray | None = None,
        tsink: DLPackArray | None = None,
        dlse: DLPackArray | None = None,
        tdo: DLPackArray | None = None,
        tdlse: DLPackArray | None = None,
    ) -> Second:
        """Return the derivatives of the gradients along a direction: see `attention_backward_jvp`.

        Raises
        ------
        ArgumentTypeError
            If the call is streamed, or one over ranks; and as `attention_backward_jvp`.
        """
        if not isinstance(self._request, Request):
            raise ArgumentTypeError(
                "vjp.jvp: got a call that is computed by chunks or over ranks, whose gradients "
                "have no derivatives; expected one of attention_vjp or attention_varlen_vjp."
            )
        out, lse = self._results()
        read = {"do": do, "out": out, "lse": lse, "dlse": dlse}
        moved = SecondTangents(Tangents(tq, tk, tv, tbias, tsink), tdo, tdlse)
        how = None, self._deterministic, self._bias_gradient
        return backward_tangent(self._request, read, moved, *how)

    def _of_unchanged(self, do: Any, dlse: Any, before: changes.Snapshot) -> Any:
        """Return the gradients, if what computes them also finds out that no array has changed."""
        if is_device_array(do) or type(self._deterministic) is not bool:
            return None
        do, out, lse, dlse = interop.of_device(do=do, out=self._out, lse=self._lse, dlse=dlse)
        how = self._deterministic, None, None, self._bias_gradient
        recalled = backward_signature(self._request, do, out, lse, dlse, *how)
        return None if recalled is None else recalled.backward_of_unchanged(before)

    def _results(self) -> tuple[Array, Array]:
        """Return out and lse; if the user has changed them, as they are computed again."""
        before = None if self._request.is_shared else self._before
        if before is not None and before.check():
            self._out, self._lse = forward(self._request, True, None, None)
            before.replace({"out": self._out, "lse": self._lse})
        return self._out, self._lse

    def __copy__(self) -> Vjp:
        return self

    def __deepcopy__(self, memo: Any) -> Vjp:
        return self

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError(
            "vjp: a function of gradients cannot be pickled, because it holds the arrays of its "
            "call in place; save q, k, v, out and lse (return_lse=True), and call "
            f"{self._request.backward_name} with them and the same options."
        )
