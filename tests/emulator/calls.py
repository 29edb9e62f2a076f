"""The launches of a call, on the emulator: the one module that knows how the package launches.

`cupyflash.gpu.launch` runs as it is, on NumPy arrays: only what it asks of CuPy is answered here,
and the tiles are the emulator's, small ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from cupyflash.arrays import cuda_device, device_arrays, elementwise
from cupyflash.expr.nodes import LookupTable
from cupyflash.gpu import (
    driver,
    launch,
    launch_cache,
    lookups,
    piece_launches,
    reduction_launches,
    row_launches,
    second_launches,
    tile_lists,
)  # fmt: skip
from cupyflash.gpu.kernels import (
    registry,
    sm90,
    sm90_fp8,
)  # fmt: skip
from cupyflash.gpu.specialisation import Specialisation
from cupyflash.gpu.writer import Launch
from cupyflash.problem.call import Array, Call, Gradients, Results
from cupyflash.problem.tangents import SecondTangents, TangentResults, Tangents
from cupyflash.rowwise import Operation

from . import build
from .blocks import Blocks
from .machine import FORWARD, Schedule, machine
from .memory import Memory, encode, poisoned, poisoned_like

Read = Callable[[str], str]
_OF_LOOKUPS = "offsets", "delta", "lookup", "sums"  # parts of calls


@dataclass(frozen=True)
class Emulator:
    """How calls are run.

    Attributes
    ----------
    blocks : Blocks
        Tiles and threads of the kernels on tiles of scores.
    schedule : Schedule
        The order of threads and blocks.
    flavour : str
        What is built: see `build.FLAVOURS`.
    read : function
        Returns the files of `kernels_cu`, perhaps changed.
    deterministic : bool
        Whether gradients have to be.
    late : tuple of pairs of arrays
        Arrays that the grid ahead of the first launch writes, and what it writes there, at its end.
    runs : function
        Whether a kernel is run; what another one would write stays as it was.
    """

    blocks: Blocks = field(default_factory=Blocks)
    schedule: Schedule = FORWARD
    flavour: str = "races"
    read: Read = build.read
    deterministic: bool = False
    late: tuple[tuple[Array, Array], ...] = ()
    runs: Callable[[Specialisation], bool] = lambda special: True

    def forward(
        self,
        call: Call,
        out: Array,
        lse: Array,
        visited: Array | None = None,
        workspace: Array | None = None,
    ) -> None:
        """Write out and lse, as `cupyflash.launch.forward`."""
        self._run(
            lambda: launch.forward(_on_device(call), out, lse, visited=visited, workspace=workspace)
        )

    def forward_tangent(
        self,
        call: Call,
        tangents: Tangents,
        results: TangentResults,
        visited: Array | None = None,
    ) -> None:
        """Write out, lse and their tangents, as `cupyflash.launch.forward_tangent`."""
        self._run(
            lambda: launch.forward_tangent(_on_device(call), tangents, results, visited=visited)
        )

    def backward_tangent(
        self,
        call: Call,
        rows: Mapping[str, Array],
        tangents: SecondTangents,
        gradients: Gradients,
        results: Results,
        visited: Array | None = None,
        deterministic: bool = False,
    ) -> None:
        """Write the tangents of gradients, of out and of lse, as `Gpu.backward_tangent`."""
        arrays, how = (rows, tangents, gradients, results), (None, None, visited, deterministic)
        self._run(lambda: second_launches.backward(_on_device(call), *arrays, *how))

    def forward_piece(
        self, call: Call, partial: Results, first: bool, results: Results | None = None
    ) -> None:
        """Write out and lse of a piece, as `cupyflash.piece_launches.forward`."""
        before = [x.copy() for x in partial]

        def work() -> None:
            for array, held in zip(partial, before, strict=True):
                array[...] = held  # the launches are collected before any of them is run
            piece_launches.forward(_on_device(call), partial, first, results)

        self._run(work)

    def backward_piece(
        self,
        call: Call,
        do: Array,
        out: Array,
        lse: Array,
        dlse: Array | None,
        gradients: Gradients,
        deterministic: bool,
    ) -> None:
        """Write the gradients of a piece, as `cupyflash.launch.backward`."""
        self.backward(call, do, out, lse, dlse, gradients, deterministic=deterministic)

    def backward(
        self,
        call: Call,
        do: Array,
        out: Array,
        lse: Array,
        dlse: Array | None,
        gradients: Gradients,
        workspace: Array | None = None,
        visited: Array | None = None,
        deterministic: bool | None = None,
    ) -> None:
        """Write every gradient, as `cupyflash.launch.backward`."""
        arrays = do, out, lse, dlse, gradients, workspace
        self._run(
            lambda: launch.backward(
                _on_device(call),
                *arrays,
                visited=visited,
                deterministic=self.deterministic if deterministic is None else deterministic,
            )
        )

    def backward_lookups(
        self, call: Call, rows: Mapping[str, Array], gradients: Mapping[LookupTable, Array]
    ) -> None:
        """Write gradients of learned look-ups, as `Gpu.backward`, and no others."""
        read = rows["do"], rows["out"], rows["lse"], rows.get("dlse")
        only = dataclasses.replace(self, runs=lambda x: x.spec.part in _OF_LOOKUPS)
        none: Gradients = Gradients(*(np.empty_like(x) for x in (call.q, call.k, call.v)))
        served = lookups.served(call, gradients)
        only._run(
            lambda: launch.backward(
                _on_device(call), *read, none, None, deterministic=True, served=served
            )
        )

    def reduce(self, call: Call, *form: Any) -> Any:
        """Return what is taken of pairs, as `cupyflash.reduction_launches.reduce`."""
        found: list[Any] = []
        self._run(lambda: found.append(reduction_launches.reduce(_on_device(call), *form)))
        return found[-1]

    def reduction_gradients(self, call: Call, *arrays: Any) -> None:
        """Write gradients of reductions, as `cupyflash.reduction_launches.backward`."""
        self._run(lambda: reduction_launches.backward(_on_device(call), *arrays))

    def workspace_size(self, call: Call) -> int:
        """Return the bytes of workspace of `backward`, as `cupyflash.launch.workspace_size`."""
        with self._answering(self._ready):
            return launch.workspace_size(_on_device(call))

    def rowwise(self, operation: Operation[Any], checked: Any, **results: Array | None) -> None:
        """Write the results of a rowwise operation, as `Gpu.rowwise`."""
        arrays = operation.arrays_of(checked)
        arrays |= {name: x for name, x in results.items() if x is not None}
        more = operation.recipe, checked, arrays, operation.contiguous
        self._run(lambda: row_launches.run(*more))

    def _run(self, work: Callable[[], Any]) -> None:
        specials: list[Specialisation] = []

        def collected(launches: Sequence[Launch], _: int) -> Any:
            specials.extend(x.special for x in launches if self.runs(x.special))
            return SimpleNamespace(start=lambda addresses, stream: None)

        # What sums between the launches find in the arrays means nothing yet.
        with self._answering(collected), np.errstate(all="ignore"):
            work()
        build.libraries(specials, self.flavour, self.read)
        with self._answering(self._ready):
            work()

    def _ready(self, launches: Sequence[Launch], _: int) -> Any:
        def start(addresses: Mapping[str, int], _: Any) -> None:
            for each in launches:
                if self.runs(each.special):
                    self._launch(each, addresses)

        return SimpleNamespace(start=start)

    def _launch(self, made: Launch, addresses: Mapping[str, int]) -> None:
        kernel = machine(made.special, self.flavour, self.read)
        maps = [encode(x, addresses[x.name]) for x in made.maps]
        packed = made.packed(addresses) + b"".join(maps)
        for array, values in self.late:
            if not np.array_equal(array, values):
                kernel.write_late(array, values)
        kernel.launch(made.grid, packed, self.schedule)

    @contextlib.contextmanager
    def _answering(self, ready: Callable[[Sequence[Launch], int], Any]) -> Iterator[None]:
        """Answer what launches ask of CuPy, and take the launches."""

        with (
            mock.patch.object(launch, "CompiledLaunches", ready),
            mock.patch.object(launch_cache, "signature", return_value=None),  # nothing is kept
            mock.patch.object(driver, "queue", return_value=SimpleNamespace(pointer=lambda: 0)),
            mock.patch.object(registry, "find", self.blocks.find),
            mock.patch.object(tile_lists, "configured", self.blocks.tiles_of),
            # The emulator's arrays are small.
            mock.patch.object(sm90, "_slower", return_value=None),
            mock.patch.object(sm90_fp8, "SHORTEST", 1),
            mock.patch.multiple(
                cuda_device,
                of=lambda _: self.blocks.device,
                current=lambda _: contextlib.nullcontext(),
                is_capturing=lambda: False,
            ),
            mock.patch.multiple(
                device_arrays,
                device_of=lambda _: 0,
                empty=poisoned,
                empty_like=poisoned_like,
                memory=lambda size: Memory(poisoned((size,), np.uint8)),
                memory_of=lambda array, begin: Memory(array[begin:]),
                view=lambda shape, dtype, memory: memory.view(shape, dtype),
                is_device_array=lambda array: isinstance(array, np.ndarray),
                address=lambda array: array.ctypes.data,
                to_device=np.ascontiguousarray,
            ),
            mock.patch.multiple(
                elementwise,
                convert=lambda array, to: np.copyto(to, array, "unsafe"),
                fill=lambda array, value: array.fill(value),
            ),
        ):
            yield


def _on_device(call: Call) -> Call:
    return dataclasses.replace(call, device=0)
