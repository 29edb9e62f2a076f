"""What `explain` returns: frozen data, every number with its unit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...distributed.partition.simulation import Simulation
from ..analysis.roofline import Roofline
from ..analysis.tiles import TileCount
from ..figures import Figure


@dataclass(frozen=True)
class Bytes:
    """Traffic between a device's memory and its chip.

    Attributes
    ----------
    reads, writes : mapping of str to int
        Bytes by array, under the papers' names.
    """

    reads: Mapping[str, int]
    writes: Mapping[str, int]

    @property
    def read(self) -> int:
        """Bytes read."""
        return sum(self.reads.values())

    @property
    def written(self) -> int:
        """Bytes written."""
        return sum(self.writes.values())

    @property
    def total(self) -> int:
        """Bytes read and written."""
        return self.read + self.written


@dataclass(frozen=True)
class Registers:
    """The registers that the compiler gives a thread.

    Attributes
    ----------
    count : int
        Number of 32-bit registers when the kernel begins.
    spill_stores, spill_loads : int
        Bytes that a thread writes to and reads from memory because it has too few registers. Each
        instruction counts once, however often it runs.
    compiler : str
        The compiler that these numbers come from.
    """

    count: int
    spill_stores: int
    spill_loads: int
    compiler: str


@dataclass(frozen=True)
class Occupancy:
    """How many blocks of a kernel a multiprocessor holds at a time.

    Attributes
    ----------
    blocks, warps : int
        Blocks, and warps of 32 threads, on a multiprocessor.
    most_warps : int
        Warps that a multiprocessor can hold.
    limited_by : str
        What leaves no room for another block: "shared memory", "registers", "warps" or "blocks".
    waves : float
        Blocks of the launch divided by those that the whole device holds at a time.
    """

    blocks: int
    warps: int
    most_warps: int
    limited_by: str
    waves: float


@dataclass(frozen=True)
class KernelUse:
    """One kernel that a call launches.

    Attributes
    ----------
    name : str
        The kernel's file, without its ending.
    computes : str
        Which results it computes.
    blocks : int
        Thread blocks of the launch; on the CPU, the parts that threads take one after the other.
    block_q, block_kv : int
        Queries and keys of a tile; 0 if the kernel has no tiles.
    warps : int or None
        Warps of 32 threads in a block; None on the CPU, like the following attributes.
    stages : int or None
        Pipeline stages: buffers in shared memory into which tiles are copied in advance. None also
        if the kernel has no pipeline.
    shared_memory : int or None
        Shared memory of a block, in bytes.
    registers : Registers or None
        None also if they could not be found out; see `Explanation.unknown`.
    occupancy : Occupancy or None
        None also if it could not be found out.
    tiles : TileCount or None
        Tiles over all batch entries and heads; EMPTY ones are skipped. None if the kernel works on
        rows of results.
    visited_pairs : int
        Pairs of a query and a key in the tiles that are not skipped.
    flops : int
        Floating-point operations of the products of these tiles, including masked pairs and, on a
        GPU, rows and columns of a tile that lie outside the matrix.
    once, most : Bytes
        Traffic between memory and chip if every array that the kernel touches moves once, and if
        every load of a block goes to memory.
    in_cache : bool or None
        Whether the data that blocks running at the same time read again fit into the cache. If so,
        expect `once` rather than `most`. None if the cache is not known.
    """

    name: str
    computes: str
    blocks: int
    block_q: int
    block_kv: int
    warps: int | None
    stages: int | None
    shared_memory: int | None
    registers: Registers | None
    occupancy: Occupancy | None
    tiles: TileCount | None
    visited_pairs: int
    flops: int
    once: Bytes
    most: Bytes
    in_cache: bool | None

    @property
    def expected(self) -> Bytes:
        """`once` or `most`, by `in_cache`."""
        return self.once if self.in_cache else self.most


@dataclass(frozen=True)
class Standard:
    """What standard attention would need, which stores all scores.

    Attributes
    ----------
    matrices : int
        Score matrices that it stores: S and P in the forward, P, dP and dS in the backward; with
        tangents, theirs, too, and that of S.
    memory : int
        Bytes of its results and of these matrices.
    traffic : Bytes
        What it reads and writes, if its products read every matrix once.
    roofline : Roofline or None
        The least time for this if all pairs are computed; None if the device's limits are not
        known.
    """

    matrices: int
    memory: int
    traffic: Bytes
    roofline: Roofline | None


@dataclass(frozen=True)
class Explanation:
    """What a call of attention would run, and what that costs according to arithmetic alone.

    A notebook shows the tiles of its main kernel.

    Attributes
    ----------
    q_shape, k_shape, v_shape : tuple of int
        Of the arrays.
    axes : str
        Which axis of q, k and v is which.
    dtype : str
        Of the arrays.
    mask, score : str
        The mask and the score change, in words.
    backward : bool
        Whether this is about the gradients.
    device : str
        The device, and where its facts come from.
    reason : str
        Why the first of the main kernels and its tiles serve the call.
    kernels : tuple of KernelUse
        In the order of their launches.
    pairs : int or None
        Pairs of a query and a key that attend, over all batch entries and heads; None if there are
        too many to examine one by one.
    flops : int
        Floating-point operations of the products for pairs that attend, or, if `pairs` is None, for
        all pairs of visited tiles.
    least, most, expected : Bytes
        Traffic between memory and chip: if every array of the call moves once (of k and v, only
        tiles that are not skipped); if every load of a kernel's block goes to memory; and the sum
        of each kernel's `expected`.
    roofline : Roofline or None
        The least time in seconds for `flops` and `least` on the device's fastest units for the
        dtype; None if its limits are not known.
    kernels_roofline : Roofline or None
        The same for what the kernels compute, one after the other, on the units and multiprocessors
        that they use, if every array that each kernel touches moves once. Every tile counts as a
        whole one, although kernels may leave out parts that see nothing. Only a measurement tells
        how fast kernels are.
    memory : int
        Bytes that the call allocates for results and scratch memory, except the little that each
        thread of a CPU has.
    standard : Standard
        What standard attention would need.
    unknown : tuple of str
        What could not be found out, with the reason and the remedy.
    figure : Figure
        The tiles of the main kernel for the first batch entry and head.
    over_ranks : Simulation or None
        With `ranks`: what the call would do over so many, simulated and not measured.
    cache : str
        What the cache holds, and how, in words; empty for a call of `attention`.
    tangents : bool
        Whether tangents of all arrays are part of the call.
    """

    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    axes: str
    dtype: str
    mask: str
    score: str
    backward: bool
    device: str
    reason: str
    kernels: tuple[KernelUse, ...]
    pairs: int | None
    flops: int
    least: Bytes
    most: Bytes
    expected: Bytes
    roofline: Roofline | None
    kernels_roofline: Roofline | None
    memory: int
    standard: Standard
    unknown: tuple[str, ...]
    figure: Figure = field(repr=False)
    over_ranks: Simulation | None = None
    cache: str = ""
    tangents: bool = False

    @property
    def main(self) -> KernelUse:
        """The first kernel that works on tiles."""
        return next(kernel for kernel in self.kernels if kernel.tiles is not None)

    @property
    def intensity(self) -> float:
        """FLOP per byte: `flops` over `expected`."""
        return self.flops / self.expected.total

    @property
    def share(self) -> float | None:
        """`roofline` over `kernels_roofline`, in seconds; None where one is not known."""
        if self.roofline is None or self.kernels_roofline is None:
            return None
        return self.roofline.seconds / self.kernels_roofline.seconds

    def _repr_svg_(self) -> str:
        return self.figure.svg

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the figure as dictionaries, lists, strings and numbers.

        Returns
        -------
        dict
            The attributes, and `intensity`, `share` and the totals of every `Bytes`.
        """
        made: dict[str, Any] = _plain(dataclasses.replace(self, figure=Figure("", "")))
        del made["figure"]
        return made | {"intensity": self.intensity, "share": self.share}

    def to_json(self) -> str:
        """Return `to_dict` as JSON.

        Returns
        -------
        str
            JSON, in indented lines.
        """
        return json.dumps(self.to_dict(), indent=2)


def _plain(value: Any) -> Any:
    if isinstance(value, Bytes):
        words = {"reads": dict(value.reads), "writes": dict(value.writes)}
        return words | {"read": value.read, "written": value.written, "total": value.total}
    if isinstance(value, Simulation):
        return dataclasses.asdict(value) | {
            "seconds": value.seconds, "efficiency": value.efficiency, "simulated": True
        }  # fmt: skip
    if isinstance(value, TileCount):
        return value._asdict() | {"visited": value.visited, "total": value.total}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {x.name: _plain(getattr(value, x.name)) for x in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return value
