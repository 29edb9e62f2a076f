"""The steps of a streamed call: check, find its pieces, allocate what is missing, run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeAlias

import numpy as np

from .. import dispatch
from ..arrays import interop
from ..arrays.device_arrays import device_of, is_device_array
from ..arrays.integers import integer
from ..arrays.interop import DLPackArray
from ..errors import ArgumentError, ArgumentTypeError
from ..execute import Vjp, check_flag, given_rows, gradient_arrays, result_shapes
from ..lazy import cached_property
from ..problem import validate
from ..problem.call import Array, Call, Gradients
from ..request import Request
from . import compute, heads
from .place import Host, Place
from .schedule import Schedule, chunks, growing, of_chunks, schedule

Chunk: TypeAlias = Literal["auto"] | SupportsIndex | tuple[SupportsIndex, SupportsIndex]

# Queries and keys of a chunk. They do not depend on the batch, so no bit of a result does.
AUTO = {"cpu": (16384, 8192), "gpu": (32768, 16384)}
# On a GPU, a chunk of keys arrives while the one before is computed. So the first one is short, and
# each one longer than the one before it: by this factor if each key-value head has so many queries,
# and more if it has more, because these take longer.
FIRST, FACTOR, QUERIES = 4096, 1.2, 16384


class Streamed:
    """A call that is computed by chunks. It is validated once, when that is first needed.

    Parameters
    ----------
    request : Request
        The call, on dense arrays that may be in several places.
    chunk, device : Any
        As users pass them.
    """

    backward_name = "cupyflash.streamed.attention_backward"
    is_watched = True  # as far as its arrays are in host memory
    is_summed = False

    def __init__(self, request: Request, chunk: Any, device: Any) -> None:
        self._request, self._chunk, self._device = request, chunk, device

    def read_arrays(self) -> dict[str, Array]:
        """Return the arrays that the call reads, by name."""
        return validate.read_arrays(self.call)

    @cached_property
    def call(self) -> Call:
        """The validated call. Its arrays are where the user has them."""
        call = self._request.call
        read = validate.read_arrays(call)
        if self._device is None and not is_device_array(call.q):
            interop.one_home(read)
            return call
        device = _device(self._device, call.q)
        _check_homes(read, device)
        return replace(call, device=device)

    def place(self) -> Place:
        """Return a place where pieces are computed, for one run."""
        if self.call.device is None:
            return Host(dispatch.CPU)
        from .device import Device

        return Device(dispatch.GPU, self.call.device)

    @cached_property
    def schedule(self) -> Schedule:
        """The pieces."""
        call = self.call
        problem = call.problem
        rows, keys = _chunk(self._chunk, "cpu" if call.device is None else "gpu")
        if call.device is not None:
            keys = -(-keys // 128) * 128  # kernels load whole tiles
            if is_device_array(call.q):
                rows = max(problem.rows.known_q, 1)
        if call.device is None or not isinstance(self._chunk, str):
            return schedule(call, rows, keys)
        queries = min(rows, problem.rows.known_q) * problem.heads // max(problem.heads_kv, 1)
        factor = FACTOR * max(queries / QUERIES, 1)
        of_keys = growing(problem.rows.known_k, FIRST, keys, factor)
        return of_chunks(call, chunks(problem.rows.known_q, rows), of_keys)

    def groups_at(self, place: Place, *rows: Array | None) -> list[heads.Group]:
        """Return groups of heads that are calls of their own, if there are any.

        `rows` are what is read of queries.
        """
        call = self.call
        if call.device is None or not isinstance(self._chunk, str):
            return []
        of_queries, of_keys = AUTO["gpu"]
        of_rows = _elsewhere(place, call.q, *rows)
        travel = _elsewhere(place, call.k, call.v)
        travel += [x for x in of_rows if x.ndim == call.q.ndim]  # others are numbers of queries
        return heads.groups(call, self.schedule, of_queries if of_rows else 0, of_keys, travel)

    @cached_property
    def _narrowed(self) -> Schedule:
        return self.schedule.narrowed(self.call)

    def schedule_at(self, place: Place, *rows: Array | None) -> Schedule:
        """Return the pieces; `rows` are what is read of queries.

        Where some of them are elsewhere, all queries of a chunk travel there once.
        """
        return self.schedule if _elsewhere(place, self.call.q, *rows) else self._narrowed


def _elsewhere(place: Place, *arrays: Array | None) -> list[Array]:
    """Return the arrays that travel to a place."""
    return [x for x in arrays if x is not None and not place.has(x)]


def _device(device: Any, q: Array) -> int:
    """Return the number of the GPU that computes."""
    own = device_of(q)
    if device is None:
        assert own is not None
        return own
    number = integer(device)
    if number is None:
        raise ArgumentTypeError(
            f"device: got {device!r}; expected the number of a GPU, or None for the one that has "
            "q, or for the CPU if q is in host memory."
        )
    if number < 0:
        raise ArgumentError(f"device: got {device}; expected the number of a GPU, 0 or more.")
    return number


def _where(home: int | None) -> str:
    return "host memory" if home is None else f"the memory of GPU {home}"


def _check_homes(named: Mapping[str, Array], device: int) -> None:
    for name, array in named.items():
        home = device_of(array)
        if home not in (None, device):
            raise ArgumentTypeError(
                f"{name}: got an array in {_where(home)}; expected it in host memory or in "
                f"{_where(device)}, which computes."
            )


def _chunk(chunk: Any, kind: str) -> tuple[int, int]:
    """Return the queries and keys of a chunk."""
    if isinstance(chunk, str) and chunk == "auto":
        return AUTO[kind]
    sizes: list[int] = []
    for value in chunk if isinstance(chunk, tuple) else (chunk, chunk):
        size = integer(value)
        if size is None:
            raise ArgumentTypeError(
                f'chunk: got {chunk!r}; expected "auto", a number of queries and keys, or a pair '
                "of them, (queries, keys)."
            )
        sizes.append(size)
    if len(sizes) != 2 or min(sizes) < 1:
        raise ArgumentError(
            f'chunk: got {chunk!r}; expected one or two numbers, 1 or more, or "auto".'
        )
    return sizes[0], sizes[1]


Target = tuple[Any, tuple[int, ...], np.dtype[Any]]


def _check_targets(
    targets: Mapping[str, Target], owners: Mapping[str, Array], inputs: dict[str, Array]
) -> None:
    """Check the arrays that are written: each lives where its owner does."""
    by_home: dict[int | None, dict[str, Target]] = {}
    for name, target in targets.items():
        home, own = device_of(target[0]), device_of(owners[name])
        is_array = isinstance(target[0], np.ndarray) or home is not None
        if is_array and home != own:
            raise ArgumentTypeError(
                f"{name}: got an array in {_where(home)}; expected one in {_where(own)}."
            )
        by_home.setdefault(home, {})[name] = target
    for home, here in by_home.items():
        interop.outputs(here, {name: x for name, x in inputs.items() if device_of(x) == home})


class Outputs(NamedTuple):
    """Where a forward writes.

    Attributes
    ----------
    out, lse : array
        Arrays with an axis of heads.
    shown : tuple of 2 array
        The same as users see them.
    """

    out: Array
    lse: Array
    shown: tuple[Any, Any]


def outputs(call: Call, out: Any, lse_out: Any) -> Outputs:
    """Check the arrays given, and make those that are not given."""
    out_shape, lse_shape = result_shapes(call)
    wanted = {
        "out": (out, out_shape, call.problem.dtype),
        "lse_out": (lse_out, lse_shape, call.problem.accumulator),
    }
    targets = {name: target for name, target in wanted.items() if target[0] is not None}
    _check_targets(targets, dict.fromkeys(targets, call.q), validate.read_arrays(call))

    def full(array: Any) -> Any:
        return array[None] if array is not None and call.matrices else array

    made, lse = dispatch.backend_of(call.q).empty_output(call, full(out), full(lse_out))
    assert lse is not None
    result = out if out is not None else made[0] if call.matrices else made
    result_lse = lse_out if lse_out is not None else lse[0] if call.matrices else lse
    return Outputs(made, lse, (result, result_lse))


def forward(request: Streamed, return_lse: Any, out: Any, lse_out: Any) -> Any:
    """Compute a call, into the arrays given or into new ones."""
    check_flag(return_lse, "return_lse")
    call = request.call
    made = outputs(call, out, lse_out)
    place = request.place()
    if groups := request.groups_at(place):
        heads.forward(place.ready(call), groups, place, made.out, made.lse)
    else:
        pieces = request.schedule_at(place)
        compute.forward(place.ready(call), pieces, place, made.out, made.lse)
    return made.shown if return_lse else made.shown[0]


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
    """

    rows: Mapping[str, Array]
    gradients: Gradients
    shown: Gradients


def targets(
    call: Call, do: Any, out: Any, lse: Any, dlse: Any, grads_out: Any, bias_gradient: Any
) -> Targets:
    """Check the arrays given, and make those that are not given."""
    check_flag(bias_gradient, "bias_gradient")
    rows = given_rows(call, do, out, lse, dlse)
    inputs = validate.read_arrays(call) | rows
    if call.device is None:
        interop.one_home(inputs)
    else:
        _check_homes(rows, call.device)
    owners = (call.q, call.k, call.v, call.bias, call.sink)
    given = validate.gradients(grads_out, call, inputs, bias_gradient, _check_each(owners))
    if call.matrices:
        rows = {name: array[None] for name, array in rows.items()}
    return Targets(rows, *gradient_arrays(call, given, bias_gradient))


def backward(
    request: Streamed,
    do: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    deterministic: Any,
    grads_out: Any,
    bias_gradient: Any = True,
) -> Gradients:
    """Compute the gradients of a call, into the arrays given or into new ones."""
    check_flag(deterministic, "deterministic")
    call = request.call
    made = targets(call, do, out, lse, dlse, grads_out, bias_gradient)
    place, exact = request.place(), bool(deterministic)
    if groups := request.groups_at(place, *made.rows.values()):
        heads.backward(place.ready(call), groups, place, made.rows, made.gradients, exact)
        return made.shown
    compute.backward(
        place.ready(call),
        request.schedule_at(place, *made.rows.values()),
        place,
        made.rows["do"],
        made.rows["out"],
        made.rows["lse"],
        made.rows.get("dlse"),
        made.gradients,
        exact,
    )
    return made.shown


def _check_each(owners: tuple[Array | None, ...]) -> Any:
    """Return a check of gradients' arrays, each of which lives where its owner does."""
    named = {f"grads_out.d{name}": x for name, x in zip(_OWNERS, owners, strict=True)}

    def check(targets: dict[str, Target], inputs: dict[str, Array]) -> None:
        _check_targets(targets, {n: x for n, x in named.items() if x is not None}, inputs)

    return check


_OWNERS = ("q", "k", "v", "bias", "sink")


class StreamedVjp(Vjp):
    """The function that computes the gradients of a streamed call."""

    __slots__ = ()

    def __call__(self, do: DLPackArray, dlse: DLPackArray | None = None) -> Gradients:
        """Return the gradients, given those of the output and of the LSE."""
        request: Any = self._request
        how = self._deterministic, None, self._bias_gradient
        return backward(request, do, *self._results(), dlse, *how)

    def _forward(self) -> tuple[Array, Array]:
        request: Any = self._request
        out, lse = forward(request, True, None, None)
        return out, lse


def vjp_of(
    request: Streamed, return_lse: Any, deterministic: Any, bias_gradient: Any, check: Any
) -> Any:
    """Compute a call, and return it with the function that computes its gradients."""
    check_flag(return_lse, "return_lse")
    check_flag(deterministic, "deterministic")
    check_flag(bias_gradient, "bias_gradient")
    if check is not None:
        check_flag(check, "check")
        check = bool(check)
    out, lse = forward(request, True, None, None)
    made: Any = request
    vjp = StreamedVjp(made, out, lse, deterministic, bias_gradient, check)
    return (out, lse, vjp) if return_lse else (out, vjp)
