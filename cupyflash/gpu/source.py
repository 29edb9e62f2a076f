"""One string of CUDA C++ per kernel: a prelude, the kernel's file with its includes, expressions.

Each quoted include is replaced once by its file: so the compiler needs no include path, and the
disk cache, whose key is the text, sees every change.
"""

from __future__ import annotations

import functools
import os
import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ..arrays.dtypes import DTYPES
from ..expr.cuda_functions import Functions
from ..problem.formats import Format
from .kernels.spec import WARP_ROWS, KernelSpec, Tiles

# Racecheck of CUDA's compute-sanitizer does not see the order between lanes that synchronise and
# the one of them that arrives at a barrier in shared memory for all. For such tools, each lane
# arrives.
EACH_LANE_ARRIVES = os.environ.get("CUPYFLASH_EACH_LANE_ARRIVES") == "1"
_VOCABULARY = ("common/expression.cuh",)  # what generated code calls
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*\n', re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*\n", re.MULTILINE)


NONE = Functions()  # for a call without mask and score changes


@dataclass(frozen=True)
class Specialisation:
    """What a kernel is compiled for; everything else is a parameter at run time.

    Attributes
    ----------
    spec : KernelSpec
        The kernel.
    dtype : str
        Name of the storage type.
    d, d_v : int
        Head sizes; 0 if the kernel does not use them.
    tiles : Tiles
        Tile, threads and shared memory of a block.
    packed, cached, paged : bool
        Whether sequences are packed, whether keys and values are those of a cache, and whether it
        has pages.
    page_rows : int
        Of a cache in pages, neighbouring positions that are known to lie in the same page: those
        from a multiple of it on.
    dropout, count_tiles, atomic_dq, tma_store : bool
        Whether pairs are dropped, whether tiles are counted, whether the kernel that computes dk
        and dv also adds its share of dq to memory, and whether results are stored by TMA.
    origins, wide_result, resumes : bool
        For pieces of a larger problem: whether dropout counts positions from other numbers than 0,
        whether the result has the accumulator's type, and whether it joins one over other keys.
    k_codes, v_codes : Format or None
        The formats of keys and of values, if they are codes. Where queries are codes, too, all
        three have one format.
    shared : bool
        Whether another kernel computes the first keys of entries that share them.
    team : int
        Warps that share their keys in that kernel; elsewhere 0.
    k_rows, v_rows : bool
        Whether rows of keys or of values have scales of their own, where all are codes.
    aligned : bool
        Whether 16-byte copies are known to be able to read all rows of q, k and v.
    functions : Functions
        The functions of the call's expressions.
    """

    spec: KernelSpec
    dtype: str
    d: int
    d_v: int
    tiles: Tiles
    packed: bool = False
    cached: bool = False
    paged: bool = False
    page_rows: int = 1
    dropout: bool = False
    count_tiles: bool = False
    functions: Functions = NONE
    atomic_dq: bool = False
    tma_store: bool = False
    origins: bool = False
    wide_result: bool = False
    resumes: bool = False
    k_codes: Format | None = None
    v_codes: Format | None = None
    k_rows: bool = False
    v_rows: bool = False
    aligned: bool = False
    shared: bool = False
    team: int = 0

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self.spec.name

    @property
    def architecture(self) -> str | None:
        """What the kernel is compiled for, if that is not the current device."""
        return self.spec.architecture

    def missing_queries(self, len_q: int) -> int:
        """Return how many of its `block_q` queries an entry's first tile lacks.

        This is the twin of `rows_of_first_block` in tile_scheduler.cuh.
        """
        if not self.spec.ends_with_queries or not self.functions.has_range or self.packed:
            return 0
        block = self.tiles.block_q
        rows = -(-(len_q % block) // WARP_ROWS) * WARP_ROWS
        return block - rows if rows else 0

    @property
    def name(self) -> str:
        """The kernel's symbol, as a profiler shows it."""
        has = self.functions
        flags = {
            "packed": self.packed,
            "cached": self.cached and not self.paged,
            "paged": self.paged,
            "mask": has.has_mask,
            "score": has.has_score,
            "dropout": self.dropout,
            "count": self.count_tiles,
            "dq": self.atomic_dq,
            "tma": self.tma_store,
            "origins": self.origins,
            "wide": self.wide_result,
            "resumes": self.resumes,
            "krows": self.k_rows,
            "vrows": self.v_rows,
            "aligned": self.aligned,
            "shared": self.shared,
            f"team{self.team}": self.team > 0,
        }
        if self.k_codes == self.v_codes and self.k_codes is not None:
            flags[self.k_codes.name] = True
        else:
            sides = {"keys": self.k_codes, "values": self.v_codes}
            flags |= {f"{side}_{form.name}": True for side, form in sides.items() if form}
        sizes = {"d": self.d, "dv": self.d_v}
        blocks = {"q": self.tiles.block_q, "kv": self.tiles.block_kv}
        if self.page_rows > 1:
            blocks["page"] = self.page_rows
        parts = [
            self.kernel,
            "_".join(
                [DTYPES[self.dtype].suffix, *(f"{name}{n}" for name, n in sizes.items() if n)]
            ),
            "_".join(name for name, on in flags.items() if on),
            "_".join(f"{name}{n}" for name, n in blocks.items() if n),
        ]
        return "__".join(part for part in parts if part)


def prelude(special: Specialisation) -> str:
    """Return the compile-time values that a kernel's source begins with."""
    has = special.functions
    values: dict[str, dict[str, Any]] = {
        "int": {
            "STORAGE": DTYPES[special.dtype].code,
            "D": special.d,
            "D_V": special.d_v,
            "BLOCK_Q": special.tiles.block_q,
            "BLOCK_KV": special.tiles.block_kv,
            "THREADS": special.tiles.threads,
            "SHARED_BYTES": special.tiles.shared_memory,
            "RESIDENT_BLOCKS": special.tiles.resident_blocks,
            # An array has at least one element.
            "NUM_INTS": max(has.num_ints, 1),
            "NUM_FLOATS": max(has.num_floats, 1),
            "NUM_TABLES": max(has.num_tables, 1),
            "NUM_HEAD_CONSTANTS": max(has.num_given, 1),
            "MASK_STEPS": has.mask_steps,
            "SCORE_STEPS": has.score_steps,
            "PAGE_ROWS": special.page_rows,
            "KEY_CODES": -1 if special.k_codes is None else special.k_codes.code,
            "VALUE_CODES": -1 if special.v_codes is None else special.v_codes.code,
            "TEAM": special.team,
        },
        "bool": {
            "HAS_SCORE": has.has_score,
            "HAS_DSCORE": has.has_dscore,
            "SCORE_READS": has.score_reads,
            "HAS_MASK": has.has_mask,
            "HAS_RANGE": has.has_range,
            "HAS_EDGES": has.has_edges,
            "HAS_DROPOUT": special.dropout,
            "PACKED": special.packed,
            "CACHED": special.cached,
            "PAGED": special.paged,
            "COUNT_TILES": special.count_tiles,
            "ATOMIC_DQ": special.atomic_dq,
            "TMA_STORE": special.tma_store,
            "HAS_ORIGINS": special.origins,
            "WIDE_RESULT": special.wide_result,
            "RESUMES": special.resumes,
            "K_SCALE_ROWS": special.k_rows,
            "V_SCALE_ROWS": special.v_rows,
            "ALIGNED": special.aligned,
            "SHARED": special.shared,
            "EACH_LANE_ARRIVES": EACH_LANE_ARRIVES,
        },
    }
    lines = [
        f"constexpr {kind} {name} = {str(value).lower()};"
        for kind, group in values.items()
        for name, value in group.items()
    ]
    lines.append(f"#define KERNEL_NAME {special.name}")
    return "\n".join(lines) + "\n"


def source(special: Specialisation) -> str:
    """Return the whole text of a kernel, which includes nothing."""
    paths = (special.spec.source, *(_VOCABULARY if special.functions.source else ()))
    return prelude(special) + flatten(paths) + special.functions.source


def read(path: str) -> str:
    """Return a file of `kernels_cu`."""
    return files("cupyflash.kernels_cu").joinpath(path).read_text(encoding="utf-8")


@functools.cache
def flatten(paths: tuple[str, ...]) -> str:
    """Return files of `kernels_cu`, with every include replaced by that file, once each."""
    return flatten_with(paths, read)


def flatten_with(paths: tuple[str, ...], read: Callable[[str], str]) -> str:
    """Return what `flatten` does, of files that `read` returns."""
    seen: set[str] = set()

    def flat(path: str) -> str:
        if path in seen:
            return ""
        seen.add(path)
        folder = posixpath.dirname(path)

        def included(match: re.Match[str]) -> str:
            return flat(posixpath.normpath(posixpath.join(folder, match[1])))

        return f"// {path}\n" + _INCLUDE.sub(included, _ONCE.sub("", read(path))) + "\n"

    return "".join(flat(path) for path in paths)
