"""Lists of tiles: the classes of all tiles of a mask, found once for all heads that share it.

Without lists, a block asks the mask about each tile of its row, in each head. With them, a kernel
of its own does so once and writes two bits for each tile, and the kernels of the call read these.
Their memory is at most `MOST_BYTES`; a call whose lists would take more is computed without. No bit
of a result depends on it.
"""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import numpy as np

from ..arrays.cuda_device import Target
from ..expr.edges import has_edges
from ..expr.key_range import key_range
from ..expr.nodes import READS, Expr, walk
from ..problem.bound_exprs import Trees, trees
from ..problem.call import Call
from .kernels import registry
from .kernels.rowwise import RESULTS
from .kernels.spec import KernelSpec, Request, Tiles
from .params import MAX_AXES, Table
from .workspace import ArraySpec

TILES = 32  # of a word
RANK = 4  # bytes: the number of a row
WORD = 2 * 4  # bytes: a bit for each tile that is not EMPTY, and one for each that is FULL
MARKS = 4  # bytes: a bit for each tile of queries that one block of keys alone sees
# Bytes of sums of dq from which it pays to store dq that needs none: several times Hopper's L2
# cache, 50 MB. Sums that fit into it cost less than another kernel.
LARGE_SUMS = 200 << 20
MOST_BYTES = 64 << 20
FEWEST_TILES = 16  # of a row, for which they pay
MANY_TILES = 256  # of a row: they pay even if nobody shares them
# "0": no mask has lists. "ordered": kernels of gradients take blocks of keys by their cost, too.
SWITCH = os.environ.get("CUPYFLASH_TILE_LISTS", "1")


class Lists(NamedTuple):
    """The lists that a kernel reads, see kernels_cu/common/tile_lists.cuh.

    Attributes
    ----------
    entries, heads : int
        Of different lists: 1 where all share them.
    each : int
        Neighbouring heads that share a list, where there are several.
    rows, words : int
        Rows of tiles, and words of a row.
    of_keys : bool
        Whether a row is a block of keys.
    shift : int
        2**shift neighbouring tiles count as one.
    ordered : bool
        Whether the order of rows, the longest first, lies behind them.
    single_queries : int
        Queries of a tile, if it is marked which of these one block of keys alone sees; 0 if not.
    """

    entries: int
    heads: int
    each: int
    rows: int
    words: int
    of_keys: bool
    shift: int
    ordered: bool = False
    single_queries: int = 0

    @property
    def word_count(self) -> int:
        """The words of all rows."""
        return self.entries * self.heads * self.rows * self.words

    @property
    def array(self) -> ArraySpec:
        """Their memory."""
        orders = self.entries * self.heads * self.rows * self.ordered
        return ArraySpec((2 * self.word_count + orders + self.single_words,), np.dtype(np.uint32))

    @property
    def single_words(self) -> int:
        """The words of the marks, which lie behind all else."""
        return self.entries * self.heads * self.words if self.single_queries else 0

    @property
    def table(self) -> Table:
        """What kernels are told of them."""
        shape = (
            self.entries, self.heads, self.rows, self.words, int(self.of_keys), self.shift,
            self.word_count * WORD * self.ordered, self.each,
        )  # fmt: skip
        row = self.words * WORD
        strides = (
            self.heads * self.rows * row * (self.entries > 1),
            self.rows * row * (self.heads > 1),
            row,
            WORD,
            self.heads * self.rows * RANK * (self.entries > 1),
            self.rows * RANK * (self.heads > 1),
            self.array.nbytes - self.single_words * MARKS if self.single_queries else 0,
            self.single_queries,
        )
        return Table(
            0, shape + (0,) * (MAX_AXES - len(shape)), strides + (0,) * (MAX_AXES - len(strides))
        )


def classes_of(made: Trees, has_range: bool) -> Expr | None:
    """Return the class over a tile of a mask that may have lists, or None.

    A mask that is a range of keys is found faster without, and of one that may change at every key,
    such as an array of Booleans, hardly anything is proven.
    """
    if made.allowed is None or made.classes is None or has_range:
        return None
    return made.classes if has_edges(made.allowed) or _searches(made.classes) else None


def of(call: Call, classes: Expr | None, spec: KernelSpec, tiles: Tiles) -> Lists | None:
    """Return the lists with which a kernel with these tiles serves a call; None if with none.

    `classes` is what `classes_of` returned.
    """
    problem, rows = call.problem, call.rows
    if classes is None or not spec.lists or SWITCH == "0":
        return None
    if any(rows.flags.values()):
        return None  # packed, or over a cache
    names = {node.value for node in walk(classes) if node.op == "symbol"}
    entries = problem.batch if "b" in names else 1
    each = _heads_of_list(classes, problem.heads) if "h" in names else problem.heads
    heads = problem.heads // max(each, 1)
    of_keys = spec.lists == "keys"
    of_queries = _ceil(int(np.max(problem.len_q, initial=0)), tiles.block_q)
    across, along = of_queries, _ceil(int(np.max(problem.len_k, initial=0)), tiles.block_kv)
    if of_keys:
        across, along = along, across
    # Searches and long rows take long enough to have warps of their own, even if nobody shares.
    pays = problem.batch * problem.heads >= 2 * entries * heads
    pays |= along >= MANY_TILES or _searches(classes)
    if along < FEWEST_TILES or not pays:
        return None
    shift = 0
    while spec.most_listed and _ceil(along, 1 << shift) > spec.most_listed:
        shift += 1
    words = _ceil(_ceil(along, 1 << shift), TILES)
    ordered = spec.deals and (not of_keys or SWITCH == "ordered")
    found = Lists(entries, heads, each, across, words, of_keys, shift, ordered)
    return found if found.array.nbytes <= MOST_BYTES else None


def with_singles(
    lists: Lists | None, classes: Expr | None, spec: KernelSpec, tiles: Tiles, sums: ArraySpec
) -> Lists | None:
    """Return lists that mark tiles of queries that one block of keys alone sees, if these pay.

    Their dq is stored where others are added to `sums`, which are set to 0 before, and read after.
    """
    if lists is None or classes is None or lists.shift or not spec.stores_single:
        return None
    # Masks without arrays rarely leave such tiles.
    if sums.nbytes < LARGE_SUMS or not any(node.op in READS for node in walk(classes)):
        return None
    assert RESULTS.block_q % tiles.block_q == 0  # of the kernels before and after
    return lists._replace(single_queries=tiles.block_q)


def most_scratch(call: Call, target: Target) -> dict[str, ArraySpec]:
    """Return the lists of a backward, at least as large as those of the kernels that serve it."""
    made = trees(call)
    if made.allowed is None:
        return {}
    problem = call.problem
    classes = classes_of(made, key_range(made.allowed, problem) is not None)
    if classes is None:
        return {}
    found: dict[str, ArraySpec] = {}
    for part in ("dkdv", "dq"):
        for spec in registry.KERNELS[part]:
            largest = spec.heads.get(problem.dtype.name, 0)
            if not spec.is_for(problem, target) or max(problem.d, problem.d_v) > largest:
                continue
            for slope in (False, True):
                tiles = configured(spec, Request(problem, target, call, slope=slope))
                lists = None if tiles is None else of(call, classes, spec, tiles)
                if lists is not None and tiles is not None and spec.stores_single:
                    lists = lists._replace(single_queries=tiles.block_q)
                if lists is not None and lists.array.nbytes > found.get(part, _NONE).nbytes:
                    found[part] = lists.array
    return found


def configured(spec: KernelSpec, request: Request) -> Tiles | None:
    """Return the tiles of a kernel; the emulator has smaller ones."""
    return spec.configure(request)


_NONE = ArraySpec((0,), np.dtype(np.uint32))


def _ceil(x: int, y: int) -> int:
    return -(-x // y)


def _searches(classes: Expr) -> bool:
    return any(node.op.startswith("contains") for node in walk(classes))


def _heads_of_list(classes: Expr, heads: int) -> int:
    """Return how many neighbouring heads a mask cannot tell apart."""
    found = heads
    for node in walk(classes):
        is_group = node.op == "floor_divide" and node.args[1].op == "constant"
        for arg in node.args:
            if arg.op == "symbol" and arg.value == "h":
                found = math.gcd(found, node.args[1].value if is_group else 1)
    return found
