"""The steps of a call: check what it writes, allocate what is missing, run, return the results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, NoReturn

import numpy as np
from numpy.typing import NDArray

from . import changes, dispatch
from .arrays import interop
from .arrays.device_arrays import is_device_array
from .arrays.interop import DLPackArray
from .arrays.typed import F, FloatArray
from .errors import ArgumentTypeError
from .gpu import checksum_launches
from .problem import replay, validate
from .problem.call import Array, Call, Gradients
from .problem.replay import Signature
from .request import Request

_NOTHING: Mapping[str, Any] = {}


def check_flag(value: Any, name: str) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError(f"{name}: got {value!r}; expected True or False.")


def result_shapes(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes that users see of out and lse."""
    problem = call.problem
    rows = call.q.shape[-2]
    lse = (rows,) if call.matrices else (*problem.array_lead, problem.heads, rows)
    return (*lse, problem.d_v), lse


def _check_outputs(call: Call, out: Any, lse_out: Any) -> dict[str, Array]:
    """Check where results go, and return all arrays of a call by name."""
    out_shape, lse_shape = result_shapes(call)
    wanted = {
        "out": (out, out_shape, call.problem.dtype),
        "lse_out": (lse_out, lse_shape, call.problem.accumulator),
    }
    targets = {name: target for name, target in wanted.items() if target[0] is not None}
    inputs = validate.read_arrays(call)
    interop.outputs(targets, inputs)
    return inputs | {name: array for name, (array, _, _) in targets.items()}


def forward_signature(request: Request, want_lse: bool, out: Any, lse_out: Any) -> Signature | None:
    """Return what tells a call of `forward` from others, if it is one that is recognised."""
    kind = "forward" if want_lse else "forward without lse"
    written = _NOTHING if out is None and lse_out is None else {"out": out, "lse": lse_out}
    return request.signature(kind, _NOTHING, written)


def forward(request: Request, return_lse: bool, out: Any, lse_out: Any) -> Any:
    """Compute a call, into the arrays given or into new ones."""
    if return_lse is not False:
        check_flag(return_lse, "return_lse")
    want_lse = return_lse or lse_out is not None
    request.seen = signature = forward_signature(request, want_lse, out, lse_out)
    if signature is not None and (entry := replay.find(signature)) is not None:
        results = signature.forward(entry, out, lse_out)
        if results is not None:
            request.was_replayed = True
            return results if return_lse else results[0]
    call = request.call
    _check_outputs(call, out, lse_out)
    backend = dispatch.backend_of(call.q)
    out_full, lse_full = backend.empty_output(
        call,
        out[None] if out is not None and call.matrices else out,
        lse_out[None] if lse_out is not None and call.matrices else lse_out,
        want_lse,
    )
    served = backend.forward(call, out_full, lse_full)
    if call.matrices:
        out_full, lse_full = out_full[0], None if lse_full is None else lse_full[0]
    if signature is not None:
        signature.keep(served, (out_full, lse_full))
    result = out_full if out is None else out
    lse = lse_full if lse_out is None else lse_out
    return (result, lse) if return_lse else result


def cached_signature(
    request: Request, want_lse: bool, out: Any, lse_out: Any, workspace: Any
) -> Signature | None:
    """Return what tells a call of `cached` from others, if it is one that is recognised."""
    kind = "cached" if want_lse else "cached without lse"
    written = _NOTHING
    if out is not None or lse_out is not None or workspace is not None:
        written = {"out": out, "lse": lse_out, "workspace": workspace}
    return request.signature(kind, _NOTHING, written)


def cached(request: Request, return_lse: bool, out: Any, lse_out: Any, workspace: Any) -> Any:
    """Compute a call over a cache, into the arrays given or into new ones."""
    if return_lse is not False:
        check_flag(return_lse, "return_lse")
    want_lse = return_lse or lse_out is not None
    signature = cached_signature(request, want_lse, out, lse_out, workspace)
    if signature is not None and (entry := replay.find(signature)) is not None:
        results = signature.forward(entry, out, lse_out, workspace)
        if results is not None:
            return results if return_lse else results[0]
    call = request.call
    used = _check_outputs(call, out, lse_out)
    backend = dispatch.backend_of(call.q)
    needed = backend.workspace_size_cached(call) if workspace is not None else 0
    scratch = validate.workspace(workspace, needed, used, "workspace_size_cached")
    out, lse = backend.empty_output(call, out, lse_out, want_lse)
    served = backend.cached(call, out, lse, scratch)
    if signature is not None:
        signature.keep(served, (out, lse))
    return (out, lse) if return_lse else out


def backward_signature(
    request: Request,
    do: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    deterministic: bool,
    grads_out: Gradients | None,
    workspace: Any,
    bias_gradient: bool = True,
) -> Signature | None:
    """Return what tells a call of `backward` from others, if it is one that is recognised."""
    read = {"d_out": do, "out": out, "lse": lse, "dlse": dlse}
    written: dict[str, Any] = {}
    if grads_out is not None or workspace is not None:
        written = {} if grads_out is None else grads_out._asdict()
        written["workspace"] = workspace
    kind = "deterministic backward" if deterministic else "backward"
    if not bias_gradient:
        kind += " without dbias"
    return request.signature(kind, read, written)


def backward(
    request: Request,
    do: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    deterministic: bool,
    grads_out: Any,
    workspace: Any,
    bias_gradient: bool = True,
) -> Gradients:
    """Compute the gradients of a call, into the arrays given or into new ones."""
    check_flag(deterministic, "deterministic")
    check_flag(bias_gradient, "bias_gradient")
    if not is_device_array(do):
        do, out, lse, dlse = interop.of_device(do=do, out=out, lse=lse, dlse=dlse)
    signature = None
    if type(grads_out) in (tuple, list) and 3 <= len(grads_out) <= len(Gradients._fields):
        grads_out = Gradients(*grads_out)
    if grads_out is None or type(grads_out) is Gradients:
        signature = backward_signature(
            request, do, out, lse, dlse, deterministic, grads_out, workspace, bias_gradient
        )
    if signature is not None and (entry := replay.find(signature)) is not None:
        gradients: Gradients | None = signature.backward(entry, grads_out, workspace)
        if gradients is not None:
            return gradients
    call = request.call
    rows = given_rows(call, do, out, lse, dlse)
    inputs = validate.read_arrays(call) | rows
    targets = validate.gradients(grads_out, call, inputs, bias_gradient)
    named = {f"grads_out.{name}": x for name, x in targets._asdict().items() if x is not None}
    backend = dispatch.backend_of(call.q)
    needed = backend.workspace_size(call) if workspace is not None else 0
    scratch = validate.workspace(workspace, needed, inputs | named)
    interop.one_home(inputs)
    if call.matrices:
        rows = {name: array[None] for name, array in rows.items()}
    with_heads, results = gradient_arrays(call, targets, bias_gradient)
    served = backend.backward(
        call,
        rows["do"],
        rows["out"],
        rows["lse"],
        rows.get("dlse"),
        with_heads,
        scratch,
        deterministic=bool(deterministic),
    )
    if signature is not None:
        signature.keep(served, results)
    return results


def given_rows(call: Call, do: Any, out: Any, lse: Any, dlse: Any) -> dict[str, Array]:
    """Return what a backward reads of each query, by name and as users see it."""
    out_shape, lse_shape = result_shapes(call)
    number, accumulator = call.problem.dtype, call.problem.accumulator
    rows = {
        "do": validate.given(do, "do", out_shape, number),
        "out": validate.given(out, "out", out_shape, number),
        "lse": validate.given(lse, "lse", lse_shape, accumulator),
    }
    if dlse is not None:
        rows["dlse"] = validate.given(dlse, "dlse", lse_shape, accumulator)
    return rows


def gradient_arrays(
    call: Call, given: Gradients, bias_gradient: bool
) -> tuple[Gradients, Gradients]:
    """Return where gradients are written: with an axis of heads, and as users see them.

    What is not given is allocated where the array is whose gradient it is.
    """
    with_heads: list[Array | None] = []
    results: list[Array | None] = []
    owners = (call.q, call.k, call.v, call.bias if bias_gradient else None, call.sink)
    matrices = (*call.were_matrices, False, False)
    for owner, target, matrix in zip(owners, given, matrices, strict=True):
        if owner is None:
            full = shown = None
        elif target is None:
            full = dispatch.backend_of(owner).empty_like(owner)
            shown = full[0] if matrix else full
        else:
            full, shown = target[None] if matrix else target, target
        with_heads.append(full)
        results.append(shown)
    return Gradients(*with_heads), Gradients(*results)


def vjp_of(
    request: Request,
    return_lse: bool,
    deterministic: bool,
    bias_gradient: bool = True,
    check: Any = None,
) -> Any:
    """Compute a call, and return it with the function that computes its gradients.

    `check` says whether that function notices what was changed in between; None: where that is
    cheap.
    """
    check_flag(return_lse, "return_lse")
    check_flag(deterministic, "deterministic")
    check_flag(bias_gradient, "bias_gradient")
    if check is not None:
        check_flag(check, "check")
        check = bool(check)
    out, lse = forward(request, True, None, None)
    sums = None
    if check is not False and request.is_summed:
        sums = changes.sums(request, out, lse, bool(check))
        check = False  # this is enough
    vjp = Vjp(request, out, lse, deterministic, bias_gradient, check, sums)
    return (out, lse, vjp) if return_lse else (out, vjp)


class Vjp(Generic[F]):
    """The function that computes the gradients of a call.

    Parameters
    ----------
    request : Request
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
        request: Request,
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
        out, lse = self._results()
        how = self._deterministic, None, None, self._bias_gradient
        if self._sums is None:
            return backward(self._request, do, out, lse, dlse, *how)
        changes.refuse_reported(out)
        gradients = backward(self._request, do, out, lse, dlse, *how)
        self._sums.compare(gradients)
        return gradients

    def _forward(self) -> tuple[Array, Array]:
        out, lse = forward(self._request, True, None, None)
        return out, lse

    def _results(self) -> tuple[Array, Array]:
        """Return out and lse; if the user has changed them, as they are computed again."""
        if self._before is not None and self._before.check():
            self._out, self._lse = self._forward()
            self._before.replace({"out": self._out, "lse": self._lse})
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
