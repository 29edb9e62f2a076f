"""Runs recipes on a GPU: compiles their kernels, gives them addresses, launches them in order.

Everything happens on the current stream of the arrays' device, and nothing waits for it. In
addition to the results, it needs the memory that `workspace_size` states.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import cuda_device, device_arrays, elementwise, reports, tape
from ..errors import ArgumentError
from ..expr.nodes import Expr
from ..lazy import cached_property
from ..problem.call import Array, Call, Gradients, Plan, Results
from ..problem.lookups import gradient_name
from ..problem.route import CallResult
from ..problem.tangents import RESULTS, TangentResults, Tangents
from . import decode_route, driver, lookups, offsets, route, short_sequences, tile_lists
from .compiled import CompiledLaunches
from .lookups import Served
from .uploads import Uploads
from .workspace import ArraySpec, parts_of
from .writer import Recipe

ALIGNMENT = 256  # bytes, of the parts of a workspace

Addresses = dict[str, int]


@dataclass(frozen=True)
class CompiledRecipe:
    """A recipe that any thread can launch again and again; it keeps no array alive.

    Attributes
    ----------
    queue : Queue
        Where.
    launches : CompiledLaunches
        In order.
    scratch : tuple of (str, int, ArraySpec)
        As in the recipe, with the size of each in bytes.
    all_zero, atomic_dq : bool
        As in the recipe.
    reports : mapping of str to int, or None
        Where launches report wrong offsets, by the names of these addresses.
    uploads : Uploads or None
        What launches read of host memory.
    """

    queue: driver.Queue
    launches: CompiledLaunches
    scratch: tuple[tuple[str, int, ArraySpec], ...]
    all_zero: bool = False
    atomic_dq: bool = False
    reports: Mapping[str, int] | None = None
    uploads: Uploads | None = None

    def forward(self, addresses: Addresses, workspace: Array | None = None) -> object:
        """Launch a forward; the device must be the current one. `addresses` may grow.

        Returns the owner of its scratch memory, which a captured graph needs as long as it exists.
        """
        held = self._prepare(addresses)
        if (written := tape.current()) is not None and workspace is None:
            return written.launch(self, self.forward, addresses)
        taken = None
        if self.scratch and workspace is None:
            taken = self._take_scratch(addresses, None)
        elif self.scratch:
            self._divide(addresses, device_arrays.address(workspace))
        stream = self.queue.pointer()
        self.launches.start(addresses, stream)
        del held  # its memory may be freed now
        return taken

    def _prepare(self, addresses: Addresses) -> object:
        """Note the addresses that are the recipe's own; return what must be kept until launches.

        Raises
        ------
        ArgumentError
            If launches of this or another call have reported wrong offsets.
        """
        if self.reports:
            self.refuse_reported(addresses)
        if self.uploads is None:
            return None
        upload = self.uploads.of(self.queue.current_stream().ptr)
        addresses.update(upload.addresses)
        return upload

    def refuse_reported(self, addresses: Addresses) -> None:
        """Raise the error of an earlier call, and note the addresses to report to."""
        reports.refuse_offsets(self.queue.device)
        addresses.update(self.reports or {})

    @property
    def needs_arrays(self) -> bool:
        """Whether a launch takes more than addresses: it fills or copies, or waits for CuPy."""
        return self.all_zero or self.uploads is not None or self.launches.waits

    @property
    def own_names(self) -> frozenset[str]:
        """The names of the addresses that it notes itself whenever it launches."""
        uploads = () if self.uploads is None else self.uploads.places
        return frozenset([*(self.reports or ()), *uploads, *(name for name, _, _ in self.scratch)])

    @cached_property
    def adds_to_dq(self) -> bool:
        """Whether a backward adds to dq itself, which must hold zeros before."""
        return self.atomic_dq and all(name != "dq_accum" for name, _, _ in self.scratch)

    @property
    def workspace_size(self) -> int:
        """The bytes of workspace that hold all scratch memory."""
        return self.scratch_size + ALIGNMENT * bool(self.scratch)

    @property
    def scratch_size(self) -> int:
        """The bytes of aligned memory that hold all of it."""
        return sum(_rounded(size) for _, size, _ in self.scratch)

    @cached_property
    def places(self) -> tuple[tuple[str, int], ...]:
        """Where scratch lies in a workspace that begins at a multiple of `ALIGNMENT`."""
        ends = itertools.accumulate(_rounded(size) for _, size, _ in self.scratch)
        names = [name for name, _, _ in self.scratch]
        return tuple(zip(names, (0, *ends), strict=False))

    def _divide(self, addresses: Addresses, workspace: int) -> None:
        """Note where scratch lies in a workspace."""
        begin = -(-workspace // ALIGNMENT) * ALIGNMENT
        for name, place in self.places:
            addresses[name] = begin + place

    def _take_scratch(
        self, addresses: Addresses, workspace: Array | None
    ) -> list[tuple[str, ArraySpec, Any]]:
        """Note where scratch lies, in the workspace or in new memory; return it with its names."""
        begin = 0 if workspace is None else -device_arrays.address(workspace) % ALIGNMENT
        made = []
        for name, size, part in self.scratch:
            if workspace is None:
                memory = device_arrays.memory(size)
            else:
                memory = device_arrays.memory_of(workspace, begin)
                begin += _rounded(size)
            made.append((name, part, memory))
            addresses[name] = memory.ptr
        return made

    def backward(self, addresses: Addresses, gradients: Gradients, workspace: Array | None) -> None:
        """Launch a backward; the device must be the current one. `addresses` may grow."""
        held = self._prepare(addresses)
        if (written := tape.current()) is not None and workspace is None:
            written.launch(self, self.backward, addresses, gradients)
            return
        if self.all_zero:
            for gradient in gradients:
                if gradient is not None:
                    elementwise.fill(gradient, 0)
            return
        taken = self._take_scratch(addresses, workspace)
        if self.adds_to_dq:
            elementwise.fill(gradients.dq, 0)
        stream = self.queue.pointer()
        self.launches.start(addresses, stream)
        del held, taken


def compiled_recipe(
    made: Recipe, device: int, from_host: Mapping[str, Array] | None = None
) -> CompiledRecipe:
    """Return a recipe's launches with kernels that are loaded.

    `from_host` are the arrays of int64 in host memory that they read.
    """
    launches = CompiledLaunches(made.launches, device)
    scratch = tuple((name, part.nbytes, part) for name, part in made.scratch.items())
    names = {name for launch in made.launches for _, name in launch.slots}
    places = {name: reports.address(device, word) for name, word in offsets.words_of(names).items()}
    uploads = Uploads(from_host) if from_host else None
    rest = made.all_zero, made.atomic_dq, places or None, uploads
    return CompiledRecipe(driver.queue(device), launches, scratch, *rest)


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def read_in_place(call: Call, made: Recipe) -> tuple[Addresses, list[Array]]:
    """Return the addresses of what a call reads, and the copies that had to be made for it."""
    problem, copies = call.problem, []
    addresses = {name: device_arrays.address(getattr(call, name)) for name in ("q", "k", "v")}
    if device_arrays.is_device_array(problem.seed):
        addresses["seed_gmem"] = device_arrays.address(problem.seed)
    else:
        addresses["seed"] = problem.seed
    for n, table in enumerate(made.tables):
        addresses[f"table {n}"] = device_arrays.address(table)
    for name, x in call.rows.offsets.items():
        if device_arrays.is_device_array(x):
            addresses[name] = device_arrays.address(x)
    addresses |= addresses_of({**call.rows.arrays, **call.encoding.scales})
    addresses.update(call.rows.numbers)
    if call.sink is not None:
        held = whole(call.sink, "sink", call.sink.dtype)
        if held is not call.sink:
            copies.append(held)
        addresses["sink"] = device_arrays.address(held)
    return addresses, copies


def host_offsets(call: Call) -> dict[str, Array]:
    """Return the offsets of a call that are in host memory, as kernels read them.

    Raises
    ------
    ArgumentError
        If a graph is being captured, which would read a copy as long as it exists.
    """
    held = {x: y for x, y in call.rows.offsets.items() if not device_arrays.is_device_array(y)}
    if held and cuda_device.is_capturing():
        raise _captured(*next(iter(held.items())), np.dtype(np.int64))
    return {name: np.ascontiguousarray(x, np.int64) for name, x in held.items()}


def _contiguous(array: Array) -> bool:
    return bool(array.flags.c_contiguous)


def whole(array: Array, name: str, dtype: Any) -> Array:
    """Return an array of this type without gaps in device memory: itself, or a copy."""
    on_device = device_arrays.is_device_array(array)
    if on_device and array.dtype == dtype and _contiguous(array):
        return array
    return _copy(array, name, dtype)


def _copy(array: Array, name: str, dtype: Any) -> Array:
    """Return a contiguous copy in the current device's memory."""
    if cuda_device.is_capturing():
        raise _captured(name, array, dtype)
    copy: Array = device_arrays.to_device(array, dtype)
    return copy


def _captured(name: str, array: Array, dtype: Any) -> ArgumentError:
    """Return the error for an array of which a graph would need a copy."""
    place = "device" if device_arrays.is_device_array(array) else "host"
    return ArgumentError(
        f"{name}: got {array.dtype} with strides {array.strides} in {place} memory while a "
        f"CUDA graph is being captured; expected contiguous {dtype} in device memory, which "
        "is read in place at every replay."
    )


def forward(
    call: Call,
    out: Array,
    lse: Array | None,
    plan: Plan | None = None,
    visited: Array | None = None,
    workspace: Array | None = None,
    before: Results | None = None,
) -> CallResult:
    """Write out and, unless it is None, lse.

    A `plan` gives tiles instead of the table. `visited`, one uint64 in device memory, grows by the
    number of tiles that were not EMPTY. `before` is as in `route.forward`.
    """
    device = _device(call)
    with cuda_device.current(device):
        counts, target = visited is not None, cuda_device.of(device)
        made = route.forward(call, target, out, lse, plan, counts, before).recipe
        needs_workspace = call.rows.takes_workspace and size_of(made.scratch) > 0
        if needs_workspace and workspace is None and cuda_device.is_capturing():
            raise no_workspace(ALIGNMENT + size_of(made.scratch))
        compiled = compiled_recipe(made, device, host_offsets(call))
        addresses, copies = read_in_place(call, made)
        addresses["out"] = device_arrays.address(out)
        if lse is not None:
            addresses["lse"] = device_arrays.address(lse)
        if before is not None:
            addresses["out_before"], addresses["lse_before"] = map(device_arrays.address, before)
        if visited is not None:
            addresses["tiles_visited"] = device_arrays.address(visited)
        scratch = compiled.forward(addresses, workspace)
        if compiled.scratch and workspace is None and cuda_device.is_capturing():
            device_arrays.keep_with(out, scratch)
    return CallResult(compiled=None if copies else compiled, tables=made.tables)


def forward_tangent(
    call: Call,
    tangents: Tangents,
    results: TangentResults,
    plan: Plan | None = None,
    visited: Array | None = None,
) -> CallResult:
    """Write out, lse, unless it is None, and their tangents; the rest is as in `forward`."""
    device = _device(call)
    with cuda_device.current(device):
        counts, target = visited is not None, cuda_device.of(device)
        made = route.forward_tangent(call, target, tangents, results, plan, counts).recipe
        compiled = compiled_recipe(made, device, host_offsets(call))
        addresses, copies = read_in_place(call, made)
        addresses |= addresses_of(dict(zip(RESULTS, results, strict=True)))
        addresses |= addresses_of({"tq": tangents.tq, "tk": tangents.tk, "tv": tangents.tv})
        if tangents.tsink is not None:
            held = whole(tangents.tsink, "tsink", tangents.tsink.dtype)
            if held is not tangents.tsink:
                copies.append(held)
            addresses["tsink"] = device_arrays.address(held)
        if visited is not None:
            addresses["tiles_visited"] = device_arrays.address(visited)
        compiled.forward(addresses)
    return CallResult(compiled=None if copies else compiled, tables=made.tables)


def backward(
    call: Call,
    do: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    gradients: Gradients,
    workspace: Array | None,
    plan: Plan | None = None,
    visited: Array | None = None,
    deterministic: bool = False,
    slope: Expr | None = None,
    served: Sequence[Served] = (),
) -> CallResult:
    """Write every gradient; `plan` and `visited` are as in `forward`.

    Unless `deterministic`, blocks may add to dq in any order. `slope` and `served` are as in
    `route.backward`.
    """
    device = _device(call)
    with cuda_device.current(device):
        if workspace is None and cuda_device.is_capturing():
            raise no_workspace(workspace_size(call))
        arrays = (do, out, lse, dlse, gradients)
        counts, target = visited is not None, cuda_device.of(device)
        how = plan, counts, deterministic, slope, served
        made = route.backward(call, target, *arrays, *how).recipe
        compiled = compiled_recipe(made, device, host_offsets(call))
        addresses, copies = read_in_place(call, made)
        addresses |= backward_addresses(do, out, lse, dlse, gradients)
        if visited is not None:
            addresses["tiles_visited"] = device_arrays.address(visited)
        for n, each in enumerate(served):
            addresses[gradient_name(n)] = device_arrays.address(each.gradient)
            if made.all_zero:
                elementwise.fill(each.gradient, 0)
                copies.append(each.gradient)  # the launches alone do not do this
        compiled.backward(addresses, gradients, workspace)
    return CallResult(compiled=None if copies else compiled, tables=made.tables)


def no_workspace(size: int) -> ArgumentError:
    """Return the error for a call without a workspace while a graph is being captured."""
    return ArgumentError(
        f"workspace: got None while a CUDA graph is being captured; expected cupy.empty({size}, "
        "cupy.uint8). Memory of CuPy's pool would be reused before the graph is replayed."
    )


def backward_addresses(
    do: Array, out: Array, lse: Array, dlse: Array | None, gradients: Gradients
) -> Addresses:
    """Return the addresses of what only a backward reads and writes, as its kernels name them."""
    arrays = {"d_out": do, "out": out, "lse": lse, "dlse": dlse, **gradients._asdict()}
    return {
        name: device_arrays.address(array) for name, array in arrays.items() if array is not None
    }


def workspace_size(call: Call) -> int:
    """Return the bytes of workspace that `backward` needs, deterministic or not."""
    # What a deterministic one needs is part of what others do.
    target = cuda_device.of(_device(call))
    parts = route.scratch_of_gradients(call, target).arrays
    lists = tile_lists.most_scratch(call, target)
    if call.sink is not None:  # whose gradient may have to be computed there
        parts[parts_of("dsink")] = ArraySpec(call.sink.shape, call.problem.accumulator)
    for n, shape in enumerate(lookups.shapes(call)):
        of_parts = route.scratch_of_lookup(call, shape)
        if of_parts is not None:
            parts[parts_of(gradient_name(n))] = of_parts
    listed = short_sequences.most_scratch(call, target)
    return ALIGNMENT + size_of({**parts, **lists, **listed, **offsets.scratch(call)})


def workspace_size_cached(call: Call) -> int:
    """Return the bytes of workspace that a call over a cache needs."""
    parts = decode_route.scratch_of(call, cuda_device.of(_device(call)))
    size = size_of({**parts, **offsets.scratch(call)})
    return ALIGNMENT + size if size else 0


def size_of(scratch: Mapping[str, ArraySpec]) -> int:
    """Return the bytes of aligned memory that hold scratch memory."""
    return sum(_rounded(part.nbytes) for part in scratch.values())


def _device(call: Call) -> int:
    assert call.device is not None
    return call.device


def addresses_of(arrays: Mapping[str, Any]) -> Addresses:
    """Return the addresses of arrays, without those that are None or numbers."""
    return {
        name: device_arrays.address(array)
        for name, array in arrays.items()
        if array is not None and not isinstance(array, int)
    }
