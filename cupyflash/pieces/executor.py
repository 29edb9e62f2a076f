"""Calls that are computed by chunks: where, which pieces there are, and how they are computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, SupportsIndex, TypeAlias

from .. import dispatch
from ..arrays import interop
from ..arrays.device_arrays import device_of, is_device_array
from ..arrays.integers import integer
from ..errors import ArgumentError, ArgumentTypeError
from ..executor import Executor
from ..lazy import cached_property
from ..outputs import Outputs, Targets, check_homes
from ..problem import validate
from ..problem.call import Array, Call
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


class Streamed(Executor):
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
    in_one_place = False
    needs_lse = True

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
        check_homes(read, device)
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

    def forward(self, made: Outputs) -> None:
        """Compute out and lse."""
        assert made.lse is not None
        place, results = self.place(), (made.out, made.lse)
        call = place.ready(self.call)
        if groups := self.groups_at(place):
            heads.forward(call, groups, place, *results)
        else:
            compute.forward(call, self.schedule_at(place), place, *results)

    def backward(self, made: Targets) -> None:
        """Compute gradients."""
        place, rows, how = self.place(), made.rows, made.deterministic
        call = place.ready(self.call)
        if groups := self.groups_at(place, *rows.values()):
            heads.backward(call, groups, place, rows, made.gradients, how)
            return
        pieces = self.schedule_at(place, *rows.values())
        arrays = rows["do"], rows["out"], rows["lse"], rows.get("dlse"), made.gradients
        compute.backward(call, pieces, place, *arrays, how)

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
