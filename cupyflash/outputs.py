"""What a call reads and writes besides its operands: checked, and made where it is not given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from . import dispatch
from .arrays import interop
from .arrays.device_arrays import device_of
from .errors import ArgumentTypeError
from .problem import lookups, validate
from .problem import tangents as problem_tangents
from .problem.call import Array, Call, Gradients, Results
from .problem.tangents import Second, SecondTangents, TangentResults, Tangents

Target = tuple[Any, tuple[int, ...], np.dtype[Any]]


class Outputs(NamedTuple):
    """Where a forward writes.

    Attributes
    ----------
    out, lse : array
        Arrays with an axis of heads; `lse` is None if it is neither wanted nor needed.
    shown : tuple of 2 array
        The same as users see them.
    scratch : array or None
        The user's workspace.
    """

    out: Array
    lse: Array | None
    shown: tuple[Any, Any]
    scratch: Array | None

    @property
    def options(self) -> dict[str, Any]:
        """Options of the computation, which have to be the same on all ranks."""
        return {}


class Targets(NamedTuple):
    """What a backward reads and where it writes.

    Attributes
    ----------
    rows : mapping of str to array
        do, out, lse and, if it is given, dlse, with an axis of heads.
    gradients : Gradients
        Arrays with an axis of heads.
    shown : Gradients
        The same as users see them.
    scratch : array or None
        The user's workspace.
    deterministic, bias_gradient : bool
        As users pass them.
    """

    rows: Mapping[str, Array]
    gradients: Gradients
    shown: Gradients
    scratch: Array | None = None
    deterministic: bool = False
    bias_gradient: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """Options of the computation, which have to be the same on all ranks."""
        return {
            "deterministic": self.deterministic,
            "bias_gradient": self.bias_gradient,
            "dlse": "given" if "dlse" in self.rows else "None",
        }


class TangentOutputs(NamedTuple):
    """What a forward with tangents reads besides its operands, and where it writes.

    Attributes
    ----------
    tangents : Tangents
        Those of the operands with an axis of heads.
    results : tuple of 4 array
        Arrays for out, its tangent, lse and its tangent, with an axis of heads; the latter two are
        None if they are neither wanted nor needed.
    shown : tuple of 4 array
        The same as users see them.
    """

    tangents: Tangents
    results: TangentResults
    shown: TangentResults


class SecondTargets(NamedTuple):
    """What a backward with tangents reads besides its operands, and where it writes.

    Attributes
    ----------
    targets : Targets
        Those of the gradients, whose tangents are written.
    tangents : SecondTangents
        The direction, with an axis of heads.
    results : tuple of 2 array
        Arrays for the tangents of out and lse, with an axis of heads.
    shown : Second
        What users get.
    scratch : array or None
        The user's workspace.
    """

    targets: Targets
    tangents: SecondTangents
    results: Results
    shown: Second
    scratch: Array | None = None


def result_shapes(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes that users see of out and lse."""
    problem = call.problem
    rows = call.q.shape[-2]
    lse = (rows,) if call.matrices else (*problem.array_lead, problem.heads, rows)
    return (*lse, problem.d_v), lse


def outputs(
    call: Call, out: Any, lse_out: Any, want_lse: bool, workspace: Any, in_one_place: bool
) -> Outputs:
    """Check the arrays given, and make those that are not given.

    Only a call over a cache may have a workspace.
    """
    out_shape, lse_shape = result_shapes(call)
    wanted = {
        "out": (out, out_shape, call.problem.dtype),
        "lse_out": (lse_out, lse_shape, call.problem.accumulator),
    }
    written = {name: target for name, target in wanted.items() if target[0] is not None}
    inputs = validate.read_arrays(call)
    _check_written(written, dict.fromkeys(written, call.q), inputs, in_one_place)
    backend, scratch = dispatch.backend_of(call.q), None
    if workspace is not None:
        used = inputs | {name: target[0] for name, target in written.items()}
        size = backend.workspace_size_cached(call)
        scratch = validate.workspace(workspace, size, used, "workspace_size_cached")

    made, lse = backend.empty_output(call, _full(call, out), _full(call, lse_out), want_lse)
    return Outputs(made, lse, (_shown(call, out, made), _shown(call, lse_out, lse)), scratch)


def _full(call: Call, array: Any) -> Any:
    """Return a result that is given with an axis of heads."""
    return array[None] if array is not None and call.matrices else array


def _shown(call: Call, given: Any, made: Any) -> Any:
    """Return a result as users see it: the array given, or the one that was made."""
    if given is not None:
        return given
    return made[0] if made is not None and call.matrices else made


def tangent_outputs(
    call: Call, tangents: Tangents, given: tuple[Any, Any, Any, Any], want_lse: bool
) -> TangentOutputs:
    """Check tangents and the arrays given for results, and make those that are not given."""
    checked = problem_tangents.checked(tangents, call)
    inputs = validate.read_arrays(call) | checked.named
    interop.one_home(inputs)
    out_shape, lse_shape = result_shapes(call)
    wanted: dict[str, Target] = {}
    for name, array in zip(("out", "tout_out", "lse_out", "tlse_out"), given, strict=True):
        if array is not None:
            is_lse = "lse" in name
            dtype = call.problem.accumulator if is_lse else call.problem.dtype
            wanted[name] = array, lse_shape if is_lse else out_shape, dtype
    _check_written(wanted, dict.fromkeys(wanted, call.q), inputs, in_one_place=True)
    backend = dispatch.backend_of(call.q)
    out, tout, lse, tlse = (_full(call, x) for x in given)
    out, lse = backend.empty_output(call, out, lse, want_lse)
    tout, tlse = backend.empty_output(call, tout, tlse, want_lse)
    made = out, tout, lse, tlse
    shown: Any = tuple(_shown(call, *pair) for pair in zip(given, made, strict=True))
    return TangentOutputs(problem_tangents.with_heads(checked, call), made, shown)


def second_targets(
    call: Call,
    tangents: SecondTangents,
    read: Mapping[str, Any],
    grads_out: Any,
    deterministic: Any,
    bias_gradient: Any,
    workspace: Any = None,
    given: tuple[Any, Any] = (None, None),
) -> SecondTargets:
    """Check a direction and what is given, and make what is not; `read` is as in `targets`.

    `given` are arrays for the tangents of out and lse, or None.
    """
    out_shape, lse_shape = result_shapes(call)
    tdo, tdlse = tangents.tdo, tangents.tdlse
    if tdo is not None:
        tdo = validate.given(tdo, "tdo", out_shape, call.problem.dtype)
    if tdlse is not None:
        tdlse = validate.given(tdlse, "tdlse", lse_shape, call.problem.accumulator)
    arrays = problem_tangents.checked(tangents.arrays, call)
    lookups.refuse(call, "with the tangents of gradients")
    named = {"tdo": tdo, "tdlse": tdlse, **arrays.named}
    more = {name: x for name, x in named.items() if x is not None}
    made = targets(call, read, grads_out, deterministic, bias_gradient, None, True, more)
    backend = dispatch.backend_of(call.q)
    wanted: dict[str, Target] = {}
    for name, array, shape, dtype in (
        ("tout", given[0], out_shape, call.problem.dtype),
        ("tlse", given[1], lse_shape, call.problem.accumulator),
    ):
        if array is not None:
            wanted[name] = array, shape, dtype
    inputs = validate.read_arrays(call) | dict(made.rows) | more
    inputs |= {
        f"grads_out.{name}": x for name, x in made.gradients._asdict().items() if x is not None
    }
    _check_written(wanted, dict.fromkeys(wanted, call.q), inputs, in_one_place=True)
    scratch = None
    if workspace is not None:
        used = inputs | {name: target[0] for name, target in wanted.items()}
        size = backend.workspace_size(call, second=True)
        scratch = validate.workspace(workspace, size, used, "workspace_size(..., second=True)")
    results = backend.empty_output(call, *(_full(call, x) for x in given))
    assert results[1] is not None
    moved = SecondTangents(
        problem_tangents.with_heads(arrays, call), _full(call, tdo), _full(call, tdlse)
    )
    shown = Second(made.shown, *(_shown(call, *x) for x in zip(given, results, strict=True)))
    return SecondTargets(made, moved, (results[0], results[1]), shown, scratch)


_NO_MORE: Mapping[str, Array] = {}


def targets(
    call: Call,
    read: Mapping[str, Any],
    grads_out: Any,
    deterministic: Any,
    bias_gradient: Any,
    workspace: Any,
    in_one_place: bool,
    more: Mapping[str, Array] = _NO_MORE,
) -> Targets:
    """Check the arrays given, and make those that are not given.

    `read` has do, out, lse and dlse as users pass them; `more` are other arrays that are read.
    """
    rows = _given_rows(call, **read)
    inputs = validate.read_arrays(call) | rows | dict(more)
    if in_one_place or call.device is None:
        interop.one_home(inputs)
    else:
        check_homes(rows, call.device)
    owners = {"q": call.q, "k": call.k, "v": call.v, "bias": call.bias, "sink": call.sink}
    named = {f"grads_out.d{name}": x for name, x in owners.items() if x is not None}

    learned = lookups.targets(grads_out, call)
    more_written = lookups.checks(learned)
    named |= dict.fromkeys(more_written, call.q)

    def check(written: dict[str, Target], inputs: dict[str, Array]) -> None:
        _check_written(written | more_written, named, inputs, in_one_place)

    given = validate.gradients(grads_out, call, inputs, bias_gradient, check)
    scratch = None
    if workspace is not None:
        size = dispatch.backend_of(call.q).workspace_size(call)
        written = {f"grads_out.{n}": x for n, x in given._asdict().items() if x is not None}
        written |= {name: target[0] for name, target in more_written.items()}
        scratch = validate.workspace(workspace, size, inputs | written)
    if call.matrices:
        rows = {name: array[None] for name, array in rows.items()}
    arrays = _gradient_arrays(call, given, bias_gradient)
    if learned:
        dlookups = {
            table: dispatch.backend_of(table.array).empty_like(table.array) if x is None else x
            for table, x in learned.items()
        }
        for each in arrays:
            each.dlookups = dlookups
    return Targets(rows, *arrays, scratch, bool(deterministic), bool(bias_gradient))


def _given_rows(call: Call, do: Any, out: Any, lse: Any, dlse: Any) -> dict[str, Array]:
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


def _gradient_arrays(
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


# -- where arrays are -----------------------------------------------------------------------------


def _where(home: int | None) -> str:
    return "host memory" if home is None else f"the memory of GPU {home}"


def check_homes(named: Mapping[str, Array], device: int) -> None:
    """Refuse arrays that are neither in host memory nor in that of a device, which computes."""
    for name, array in named.items():
        home = device_of(array)
        if home not in (None, device):
            raise ArgumentTypeError(
                f"{name}: got an array in {_where(home)}; expected it in host memory or in "
                f"{_where(device)}, which computes."
            )


def _check_written(
    written: dict[str, Target],
    owners: Mapping[str, Array],
    inputs: dict[str, Array],
    in_one_place: bool,
) -> None:
    """Check the arrays that are written: each lives where its owner does."""
    if in_one_place:
        interop.outputs(written, inputs)
        return
    by_home: dict[int | None, dict[str, Target]] = {}
    for name, target in written.items():
        home, own = device_of(target[0]), device_of(owners[name])
        is_array = isinstance(target[0], np.ndarray) or home is not None
        if is_array and home != own:
            raise ArgumentTypeError(
                f"{name}: got an array in {_where(home)}; expected one in {_where(own)}."
            )
        by_home.setdefault(home, {})[name] = target
    for home, here in by_home.items():
        interop.outputs(here, {name: x for name, x in inputs.items() if device_of(x) == home})
