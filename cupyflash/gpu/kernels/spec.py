"""What the package knows about CUDA kernels: one `KernelSpec` for each.

`plan`, `explain`, `info` and launches read only specs. A spec is data and pure functions of a
`Request`, that is, of shapes, strides, and addresses modulo 16.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from ...arrays.cuda_device import OLDEST_CAPABILITY, Target
from ...lazy import cached_property
from ...problem.call import Array, Call, Problem
from .. import strides
from ..params import Operand
from ..strides import Lead
from ..tma import TensorMap
from .cost import Cost

Entry = TypeVar("Entry")

REGISTERS = 65536  # of an SM
RESERVED = 1024  # bytes of an SM's shared memory that every block takes in addition to its own
WARP_ROWS = 16  # of results, that a warp of a tensor-core kernel stores together


@dataclass(frozen=True)
class Tiles:
    """A kernel's configuration: the tiles of a block, and their memory.

    Attributes
    ----------
    block_q, block_kv : int
        Queries and keys of a tile.
    threads : int
        Threads of a block.
    shared_memory : int
        Bytes of shared memory of a block.
    resident_blocks : int
        Blocks that share the registers of an SM: the compiler gives a thread at most its share.
    stages : int or None
        Pipeline stages in shared memory for the streamed operand; None if nothing is streamed.
    beside : bool
        Whether blocks of other grids are to share the SM, which needs all of its shared memory.
    whole : bool
        Whether a block has all keys of its rows, so that no other kernel joins its results.
    whole_tasks : int
        The tasks of such a block, if a warp has a node of 512 of their keys at a time; else 0.
    one_tile : bool
        Whether the keys of every row are one tile.
    row_sharers : int
        Warps that have the same rows of wide heads, and each some of the columns.
    v_parts : int
        Parts of the columns of values, which have work tiles or blocks of their own.
    bias_stages : int
        Stages of tiles of the bias in shared memory; 0 if the bias is part of the score change.
    bias_bytes : int
        Bytes of such a stage, with its barriers.
    """

    block_q: int
    block_kv: int
    threads: int
    shared_memory: int
    resident_blocks: int = 1
    stages: int | None = None
    beside: bool = False
    whole: bool = False
    whole_tasks: int = 0
    one_tile: bool = False
    row_sharers: int = 1
    v_parts: int = 1
    bias_stages: int = 0
    bias_bytes: int = 0

    def share_memory(self, limit: int) -> bool:
        """Whether an SM has memory for `resident_blocks`, if a block may have `limit` bytes."""
        return (self.shared_memory + RESERVED) * self.resident_blocks <= limit + RESERVED


@dataclass(frozen=True, eq=False)
class Request:
    """A part of a call that needs a kernel.

    Attributes
    ----------
    problem : Problem
        Types and sizes.
    device : Target
        The device.
    call : Call, optional
        The call. Without it, nothing is known about its arrays, and a kernel that depends on them
        does not serve.
    arrays : mapping of str to array
        The arrays of the launch other than q, k and v, by the kernels' names.
    lead : Lead, optional
        The leading axes of the launch; by default those of q, k and v.
    slope : bool
        Whether scores are changed, so that a backward kernel keeps their derivatives.
    params_bytes : int
        Bytes of a kernel's parameters.
    blocks : tuple of int, optional
        Queries and keys of a tile, if a user's plan gives them.
    whole_heads : bool
        Whether a block of the kernel of dk and dv has all of a head, of which no other entry has a
        part.
    wants_dbias : bool
        Whether the gradient of a bias is wanted of a backward, and nothing else reads delta.
    """

    problem: Problem
    device: Target
    call: Call | None = None
    arrays: Mapping[str, Any] = field(default_factory=dict)
    lead: Lead | None = None
    slope: bool = False
    params_bytes: int = 0
    blocks: tuple[int, int] | None = None
    whole_heads: bool = False
    wants_dbias: bool = False

    @classmethod
    def of(cls, call: Call, device: Target) -> Request:
        """Return the request of a call before anything is known of what it writes."""
        return cls(call.problem, device, call)

    def array(self, name: str) -> Array:
        """Return an array by the name that kernels have for it."""
        found: Array = getattr(self.call, name) if name in "qkv" else self.arrays[name]
        return found

    @property
    def has_cache(self) -> bool:
        """Whether the call is one over a cache."""
        return self.call is not None and self.call.rows.cache is not None

    @property
    def has_codes(self) -> bool:
        """Whether keys and values are codes: those of a cache, or with queries that are, too."""
        return self.call is not None and bool(self.call.encoding.scales)

    @property
    def changes_scores(self) -> bool:
        """Whether a score change or a bias changes scores."""
        call = self.call
        return call is not None and (call.score_mod is not None or call.bias is not None)

    @property
    def operands_are_codes(self) -> bool:
        """Whether queries, keys and values are all codes."""
        return self.call is not None and bool(self.call.encoding.operands)

    def is_paged(self, name: str) -> bool:
        """Whether an array is the pages of a cache."""
        return self.call is not None and name in self.call.rows.apart

    @cached_property
    def _lead(self) -> Lead:
        if self.lead is not None:
            return self.lead
        arrays = {name: (self.array(name), 3) for name in "qkv"}
        return strides.lead_of(self.problem.lead, arrays)

    def operand(self, name: str) -> Operand:
        """Return the strides of an array (..., H, L, D); pages are a leading axis."""
        array, lead = self.array(name), self._lead.strides[name]
        if self.is_paged(name):
            lead = (*lead[:-1], array.strides[0] // array.itemsize)
        return strides.operand(array, lead)

    def sizes(self, name: str) -> tuple[int, ...]:
        """Return an array's lengths: the launch's leading axes, heads, rows and columns."""
        shape = self.array(name).shape
        if self.is_paged(name):
            return (*self._lead.sizes[:-1], *shape)
        return (*self._lead.sizes, *shape[-3:])


class Extent(NamedTuple):
    """The extent of a launch.

    Attributes
    ----------
    queries, keys : int
        Number of queries and keys of the longest entry, or of all packed sequences together.
    heads : int
        Number of heads of the rows that blocks own: key heads if they own keys.
    entries : int
        Number of entries of the result's leading axes; 1 if sequences are packed.
    sequences : int
        Number of packed sequences, or 0.
    multiprocessors : int
        SMs of the device.
    group : int
        Query heads that share a key head.
    differ : bool
        Whether blocks take different times in a way that only the device knows: entries have keys
        of different number, or other kernels hold some SMs for a while.
    longest : tuple of int
        At least the queries and the keys of each packed sequence; 0 if nothing is known.
    """

    queries: int
    keys: int
    heads: int
    entries: int = 1
    sequences: int = 0
    multiprocessors: int = 0
    group: int = 1
    differ: bool = False
    longest: tuple[int, int] = (0, 0)


class Grid(NamedTuple):
    """A launch's blocks.

    Attributes
    ----------
    work_tiles : int
        Pieces of work.
    blocks : int
        The kernels' parameter ``blocks``: pieces of one head.
    size : int
        Number of launched blocks: one for each piece, unless blocks share the pieces.
    """

    work_tiles: int
    blocks: int
    size: int


class TmaUse(NamedTuple):
    """What a launch of a kernel with TMA operands needs.

    Attributes
    ----------
    maps : tuple of TensorMap
        One for each operand, in the kernel's order.
    stores : bool
        Whether results are stored by TMA, too.
    """

    maps: tuple[TensorMap, ...] = ()
    stores: bool = False


def _always(_: Request, __: Tiles) -> bool:
    """Say that a kernel has room for its results."""
    return True


@dataclass(frozen=True)
class TmaOperands:
    """The arrays that a kernel copies by TMA; it has a tensor map of each, in this order.

    Attributes
    ----------
    loads : tuple of str
        The arrays that it loads. If TMA cannot load one, the kernel does not serve, or with
        `optional` it loads them by itself.
    stores : tuple of str
        The arrays that it stores, if TMA can.
    rows : function
        Returns the rows of a TMA tile of each array.
    has_room : function
        Returns whether results have room in shared memory, from which they are stored.
    bias : bool
        Whether it loads a bias, too, where its tiles have stages for it; that map is the last one.
    """

    loads: tuple[str, ...]
    stores: tuple[str, ...]
    rows: Callable[[Tiles], Mapping[str, int]]
    has_room: Callable[[Request, Tiles], bool] = _always
    optional: bool = False
    bias: bool = False


def _unknown(_: Request, __: Tiles) -> None:
    """Say that nothing is known of a kernel's cost."""


def never(_: Request) -> None:
    """Say that nothing of a call speaks against a kernel."""


@dataclass(frozen=True, eq=False, repr=False)
class KernelSpec:
    """One kernel.

    Attributes
    ----------
    source : str
        Its file in `kernels_cu`. The stem is its name, and its symbols begin with it.
    part : str
        Which part of a call it computes: a key of `registry.KERNELS`.
    computes : str
        The same in words.
    method : str
        How it computes, in words that follow a device's name; {dtype}, {accumulator} and {products}
        stand for words that depend on the type.
    heads : mapping of str to int
        Storage types that it serves -> the largest head.
    only : tuple of int, optional
        The head sizes D and Dv of the calls that it is for, if it is for no others.
    longest : int, optional
        The most queries and keys of a row of the calls that it is for, if there is a limit: of
        packed sequences others may be longer.
    capability : tuple of int
        The oldest compute capability; with an `architecture` the only one.
    configure : function
        Returns its configuration, or None if no tiles fit the device.
    grid : function
        Returns its grid.
    architecture : str or None
        What it is compiled for, if that is not the current device.
    tensor_cores : bool
        Whether it multiplies on tensor cores.
    precisions : mapping of str to str
        Storage types that it serves only with this ``precision=``.
    condition : str
        The condition that `obstacle` checks, in words for a table.
    obstacle : function
        Returns None, or in words why it does not serve a request although it is for its type, heads
        and device.
    chooses_tiles : bool
        Whether it accepts tiles from a plan instead of its own.
    tma : TmaOperands, optional
        The arrays that it copies by TMA.
    caches : bool
        Whether it reads a cache: lengths and pages that the device knows.
    page_rows : int
        Neighbouring positions that it copies together where pages are a multiple of them.
    codes : bool
        Whether keys and values may be codes of 8 or 4 bits.
    aligned : bool
        Whether it is compiled anew for q, k and v that 16-byte copies can read.
    scores : bool
        Whether it evaluates masks and scores.
    slope : bool
        Whether it evaluates the derivatives of scores.
    sizes : tuple of str
        The head sizes for which it is compiled.
    operands : tuple of str, optional
        The arrays (..., H, L, D) and (..., H, L) of which it is told the addresses; by default all.
    atomic_dq : tuple of str
        Storage types for which it can also add its share of dq to memory.
    whole_dq : bool
        Whether it can store dq where one of its blocks has all keys.
    packed_dq : bool
        Whether it is to do so for packed sequences, too.
    own_delta : bool
        Whether it computes delta itself.
    own_dbias : bool
        Whether it computes the gradient of a bias, too, as parts of it.
    parts : bool
        Whether several blocks may share the queries of a block of keys.
    adjacent_dq : tuple of int
        The oldest compute capability on which the numbers that a thread adds to `dq_accum` are
        adjacent there; on older ones, those of a warp's threads are.
    ends_with_queries : bool
        Whether its tiles of queries end with the last query where queries see ranges of keys, so
        that the first tile may be shorter.
    overlaps : bool
        Whether it waits for earlier launches itself, and so may begin while the last one ends.
    stores_single : bool
        Whether it can store the dq of tiles of queries that one block of keys alone sees.
    lists : {"", "queries", "keys"}
        Whether it can read lists of tiles, and of what blocks its rows of tiles are.
    deals : bool
        Whether lists let it take work tiles by their cost, the longest first.
    most_listed : int
        The tiles of a row that it tells apart; of more, neighbours count as one. 0: all of them.
    cost : function
        Returns what a head takes by the model of cost; None where the model says nothing.
    beside : str
        The kernel that computes the other keys of a call, with results of equal bits, if it
        computes only those that entries share.
    """

    source: str
    part: str
    computes: str
    method: str
    heads: Mapping[str, int]
    configure: Callable[[Request], Tiles | None]
    grid: Callable[[Extent, Tiles], Grid]
    capability: tuple[int, int] = OLDEST_CAPABILITY
    architecture: str | None = None
    tensor_cores: bool = False
    only: tuple[int, int] | None = None
    longest: int | None = None
    precisions: Mapping[str, str] = field(default_factory=dict)
    condition: str = ""
    obstacle: Callable[[Request], str | None] = never
    chooses_tiles: bool = False
    tma: TmaOperands | None = None
    caches: bool = False
    page_rows: int = 1
    codes: bool = False
    aligned: bool = False
    scores: bool = True
    slope: bool = False
    sizes: tuple[str, ...] = ("d", "d_v")
    operands: tuple[str, ...] | None = None
    atomic_dq: tuple[str, ...] = ()
    whole_dq: bool = False
    packed_dq: bool = False
    own_delta: bool = False
    own_dbias: bool = False
    parts: bool = False
    adjacent_dq: tuple[int, int] = OLDEST_CAPABILITY
    ends_with_queries: bool = False
    overlaps: bool = False
    lists: str = ""
    stores_single: bool = False
    deals: bool = False
    most_listed: int = 0
    cost: Callable[[Request, Tiles], Cost | None] = _unknown
    beside: str = ""

    def __repr__(self) -> str:
        return f"<KernelSpec {self.name}>"

    @property
    def name(self) -> str:
        """The stem of its file."""
        return posixpath.splitext(posixpath.basename(self.source))[0]

    def is_for(self, problem: Problem, device: Target) -> bool:
        """Return whether it is for the problem's types and heads and for the device at all.

        If it is not, nobody asks why it does not serve.
        """
        dtype = problem.dtype.name
        if self.architecture is not None and device.capability != self.capability:
            return False
        if self.only not in (None, (problem.d, problem.d_v)):
            return False
        rows = problem.rows
        if self.longest is not None and max(rows.known_q, rows.known_k) > self.longest:
            return False
        wanted = self.precisions.get(dtype)
        return dtype in self.heads and wanted in (None, problem.precision)

    def serves(self, request: Request) -> str | None:
        """Return None, or in words why it does not serve a request that it is one for."""
        problem, device = request.problem, request.device
        if request.has_cache and not self.caches:
            return "it reads no cache"
        if self.part == "forward_codes" and not request.operands_are_codes:
            return "it is for queries, keys and values that are codes"
        if request.has_codes and not self.codes:
            return "it reads no codes of 8 or 4 bits"
        if self.scores and request.blocks is not None and not self.chooses_tiles:
            return "its tiles are not to be chosen"
        if device.capability < self.capability:
            return f"it needs compute capability {self.capability[0]}.{self.capability[1]}"
        if self.architecture is not None and device.lacks:
            return device.lacks
        largest = self.heads[problem.dtype.name]
        if max(problem.d, problem.d_v) > largest:
            return (
                f"head sizes {problem.d} and {problem.d_v} are beyond its {largest} in "
                f"{problem.dtype}"
            )
        return self.obstacle(request)

    def how(self, problem: Problem) -> str:
        """Return in words how it computes, to follow a device's name."""
        split = problem.dtype.name in self.precisions
        return self.method.format(
            dtype=problem.dtype,
            accumulator=problem.accumulator,
            products=", as three products each" if split else "",
        )


def at_head(table: Mapping[int, Entry], d: int, d_v: int) -> Entry:
    """Return the entry of a table for these heads: that of the least head that is as large."""
    return next(entry for largest, entry in table.items() if max(d, d_v) <= largest)


def row_bytes(width: int, itemsize: int = 2) -> int:
    """Bytes of a row in shared memory: whole lines of 128."""
    return -(-width * itemsize // 128) * 128
