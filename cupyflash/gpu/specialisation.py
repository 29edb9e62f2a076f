"""What a kernel is compiled for: one row for each compile-time value of the CUDA sources.

A row gives the value its name in CUDA, says what it is, and how the kernel's symbol shows it. The
rows stand at the fields of `Specialisation` from which the values come. The prelude of a source,
symbols, the documentation of the fields and the table in kernels_cu/README.md are made of them, so
that a new value is a new field here, besides the code that sets it and the kernels that read it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, NamedTuple

from ..arrays.dtypes import DTYPES
from ..expr.cuda_functions import Functions
from ..problem.formats import FORMATS, Format
from .kernels.spec import WARP_ROWS, KernelSpec, Tiles
from .params import KINDS

# Racecheck of CUDA's compute-sanitizer does not see the order between lanes that synchronise and
# the one of them that arrives at a barrier in shared memory for all. For such tools, each lane
# arrives.
EACH_LANE_ARRIVES = os.environ.get("CUPYFLASH_EACH_LANE_ARRIVES") == "1"
NONE = Functions()  # for a call without mask and score changes
SIZES, OPTIONS, TILES = range(3)  # the parts of a symbol after the kernel's name


def _nothing(_: Any) -> str:
    return ""


class Flag(NamedTuple):
    """A compile-time value.

    Attributes
    ----------
    name : str
        Its name in CUDA.
    about : str
        What it is.
    value : function
        Returns it, a bool or an int, of a specialisation.
    symbol : function
        Returns how it is shown in the symbol of a kernel; an empty string if it is not.
    shown : str
        The same in words, for a table.
    part : int
        Where it is shown.
    """

    name: str
    about: str
    value: Callable[[Specialisation], bool | int]
    symbol: Callable[[Specialisation], str] = _nothing
    shown: str = ""
    part: int = OPTIONS


def _is(name: str, about: str, path: str, shown: str = "") -> Flag:
    """Return the row of a bool, the attribute at a path from a specialisation.

    Where it is true, symbols have the word `shown`.
    """
    value = attrgetter(path)
    return Flag(name, about, value, lambda special: shown if value(special) else "", shown)


def _number(
    name: str, about: str, path: str, shown: str = "", part: int = OPTIONS, least: int = 0
) -> Flag:
    """Return the row of an int. Where it is above `least`, symbols have `shown` and the number."""
    value = attrgetter(path)

    def symbol(special: Specialisation) -> str:
        number = value(special)
        return f"{shown}{number}" if number > least else ""

    return Flag(name, about, value, symbol, f"{shown}N" if shown else "", part)


def _count(name: str, about: str, path: str) -> Flag:
    """Return the row of the length of an array in CUDA, which is not 0."""
    value = attrgetter(path)
    return Flag(name, f"{about}, at least 1.", lambda special: max(value(special), 1))


def _about(about: str, *flags: Flag) -> dict[str, Any]:
    """Return the metadata of a field: what it is, and the rows of the values that come from it."""
    return {"about": about, "flags": flags}


def _option(path: str, name: str, about: str, shown: str = "") -> Any:
    """Return a field that is False by default, and a compile-time value itself.

    `path` is the field's name, and the rest is as in `_is`.
    """
    return field(default=False, metadata=_about(about, _is(name, about, path, shown)))


def _format(side: str) -> Callable[[Specialisation], int]:
    """Return a function that returns the number of the format of keys or of values."""

    def value(special: Specialisation) -> int:
        form: Format | None = getattr(special, side)
        return -1 if form is None else form.code

    return value


def _formats(special: Specialisation) -> str:
    """Return the format of keys and values, or both if they differ."""
    k, v = special.k_codes, special.v_codes
    if k == v:
        return "" if k is None else k.name
    sides = {"keys": k, "values": v}
    return "_".join(f"{side}_{form.name}" for side, form in sides.items() if form is not None)


_CODES = ", ".join(f"{form.code} {form.name}" for form in FORMATS.values())


@dataclass(frozen=True)
class Specialisation:
    """What a kernel is compiled for; everything else is a parameter at run time."""

    spec: KernelSpec = field(metadata=_about("The kernel."))
    dtype: str = field(
        metadata=_about(
            "The name of the storage type.",
            Flag(
                "STORAGE",
                f"The element type: {', '.join(f'{x.code} {x.name}' for x in DTYPES.values())}.",
                lambda special: DTYPES[special.dtype].code,
                lambda special: DTYPES[special.dtype].suffix,
                ", ".join(x.suffix for x in DTYPES.values()),
                SIZES,
            ),
        )
    )
    d: int = field(
        metadata=_about(
            "The head size of queries and keys; 0 if the kernel does not use it.",
            _number("D", "Columns of queries and keys, or 0.", "d", "d", SIZES),
        )
    )
    d_v: int = field(
        metadata=_about(
            "The head size of values; 0 if the kernel does not use it.",
            _number("D_V", "Columns of values, or 0.", "d_v", "dv", SIZES),
        )
    )
    tiles: Tiles = field(
        metadata=_about(
            "Tile, threads and shared memory of a block.",
            _number("BLOCK_Q", "Queries of a tile.", "tiles.block_q", "q", TILES),
            _number("BLOCK_KV", "Keys of a tile.", "tiles.block_kv", "kv", TILES),
            _number("THREADS", "Threads of a block.", "tiles.threads"),
            _number("SHARED_BYTES", "Bytes of shared memory of a block.", "tiles.shared_memory"),
            _number(
                "RESIDENT_BLOCKS",
                "Blocks that share the registers of an SM.",
                "tiles.resident_blocks",
            ),
            _is(
                "WHOLE",
                "Whether a block has all keys of its rows, where several could share them.",
                "tiles.whole",
                "whole",
            ),
            _number(
                "WHOLE_TASKS",
                "Tasks of such a block whose nodes a warp each has, or 0.",
                "tiles.whole_tasks",
                "tasks",
                TILES,
            ),
            _is("ONE_TILE", "Whether the keys of every row are one tile.", "tiles.one_tile", "one"),
            _number(
                "ROW_SHARERS",
                "Warps that have the same rows of wide heads, and each some columns.",
                "tiles.row_sharers",
            ),
            _number(
                "V_PARTS",
                "Parts of the columns of values, which have work tiles or blocks of their own.",
                "tiles.v_parts",
                "parts",
                TILES,
                least=1,
            ),
            _number(
                "BIAS_STAGES",
                "Stages of tiles of the bias, or 0.",
                "tiles.bias_stages",
                part=TILES,
            ),
        )
    )
    packed: bool = _option("packed", "PACKED", "Whether sequences are packed.", "packed")
    cached: bool = field(
        default=False,
        metadata=_about(
            "Whether keys and values are those of a cache.",
            Flag(
                "CACHED",
                "Whether keys and values are those of a cache.",
                attrgetter("cached"),
                lambda x: "cached" if x.cached and not x.paged else "",
                "cached, without pages",
            ),
        ),
    )
    paged: bool = _option("paged", "PAGED", "Whether this cache has pages.", "paged")
    page_rows: int = field(
        default=1,
        metadata=_about(
            "How many neighbouring positions, from a multiple of it on, are known to lie in the "
            "same page; 1 without pages.",
            _number(
                "PAGE_ROWS",
                "How many neighbouring positions, from a multiple of it on, lie in the same page.",
                "page_rows",
                "page",
                TILES,
                least=1,
            ),
        ),
    )
    functions: Functions = field(
        default=NONE,
        metadata=_about(
            "The functions of the call's expressions.",
            _is("HAS_MASK", "Whether there is a mask.", "functions.has_mask", "mask"),
            _is(
                "HAS_RANGE",
                "Whether the mask lets each query see one range of keys.",
                "functions.has_range",
            ),
            _is(
                "HAS_EDGES",
                "Whether the mask changes rarely from key to key, so that large regions are alike.",
                "functions.has_edges",
            ),
            _is(
                "HAS_SCORE",
                "Whether scores are changed, also by a bias.",
                "functions.has_score",
                "score",
            ),
            _is(
                "HAS_DSCORE",
                "Whether the derivative of changed scores is evaluated.",
                "functions.has_dscore",
            ),
            _is(
                "HAS_TBIAS",
                "Whether the bias has a tangent.",
                "functions.has_tangent",
                "tbias",
            ),
            _is(
                "HAS_CURVE",
                "Whether the second derivative of changed scores is evaluated.",
                "functions.has_curve",
            ),
            _is(
                "SCORE_READS",
                "Whether changed scores read arrays at the position of a query or a key.",
                "functions.score_reads",
            ),
            _count("NUM_INTS", "Integers of expressions", "functions.num_ints"),
            _count("NUM_FLOATS", "Floats of expressions", "functions.num_floats"),
            _count("NUM_TABLES", "Arrays that expressions read", "functions.num_tables"),
            _count(
                "NUM_HEAD_CONSTANTS",
                "Numbers in scores that are the same for all pairs of a head",
                "functions.num_given",
            ),
            _number(
                "MASK_STEPS",
                "The cost of the mask, in multiplications.",
                "functions.mask_steps",
            ),
            _number(
                "MASK_BLOCK",
                "Of blocks of so many keys a query sees one range; 0 if it may see others.",
                "functions.mask_block",
            ),
            _number(
                "SCORE_STEPS",
                "The cost of the changed score and its derivative, in multiplications.",
                "functions.score_steps",
            ),
        ),
    )
    bias: str = field(
        default="",
        metadata=_about(
            "The type of a bias that comes in tiles; empty if there is none.",
            Flag(
                "BIAS_KIND",
                "The kind of a bias that comes in tiles, as KIND_ in common/params.cuh, or -1.",
                lambda special: KINDS[special.bias] if special.bias else -1,
                lambda special: special.bias and f"bias_{DTYPES[special.bias].suffix}",
                "bias, and its type",
            ),
        ),
    )
    dropout: bool = _option("dropout", "HAS_DROPOUT", "Whether pairs are dropped.", "dropout")
    count_tiles: bool = _option(
        "count_tiles", "COUNT_TILES", "Whether tiles that are not EMPTY are counted.", "count"
    )
    atomic_dq: bool = _option(
        "atomic_dq",
        "ATOMIC_DQ",
        "Whether the kernel of dk and dv also adds its share of dq to memory.",
        "dq",
    )
    whole_dq: bool = _option(
        "whole_dq",
        "WHOLE_DQ",
        "Whether a block of the kernel of dk and dv has all keys, and stores dq.",
        "whole",
    )
    only_short: bool = _option(
        "only_short",
        "ONLY_SHORT",
        "Whether packed sequences that are not short are left to another kernel.",
        "short",
    )
    only_long: bool = _option(
        "only_long",
        "ONLY_LONG",
        "Whether short packed sequences are left to another kernel, and others are listed.",
        "long",
    )
    adjacent_dq: bool = _option(
        "adjacent_dq",
        "ADJACENT_DQ",
        "Whether the numbers that a thread adds to the sums of dq are adjacent.",
    )
    parts: bool = _option(
        "parts",
        "HAS_PARTS",
        "Whether several blocks share the queries of a block of keys, and have parts of dk and dv.",
        "parts",
    )
    tma_store: bool = _option("tma_store", "TMA_STORE", "Whether results are stored by TMA.", "tma")
    origins: bool = _option(
        "origins",
        "HAS_ORIGINS",
        "Whether dropout counts positions from other numbers than 0, for pieces of a problem.",
        "origins",
    )
    wide_result: bool = _option(
        "wide_result", "WIDE_RESULT", "Whether the result has the accumulator's type.", "wide"
    )
    resumes: bool = _option(
        "resumes", "RESUMES", "Whether the result joins one over other keys.", "resumes"
    )
    k_rows: bool = _option(
        "k_rows",
        "K_SCALE_ROWS",
        "Whether each row of keys has a scale, where queries are codes, too.",
        "krows",
    )
    v_rows: bool = _option(
        "v_rows",
        "V_SCALE_ROWS",
        "Whether each row of values has a scale, where queries are codes, too.",
        "vrows",
    )
    lists: bool = _option(
        "lists",
        "HAS_LISTS",
        "Whether another kernel found the classes of all tiles, which the last table lists.",
        "lists",
    )
    singles: bool = _option(
        "singles",
        "HAS_SINGLES",
        "Whether lists mark tiles of queries that one block of keys alone sees: dq is stored.",
        "singles",
    )
    aligned: bool = _option(
        "aligned",
        "ALIGNED",
        "Whether 16-byte copies are known to be able to read all rows of q, k and v.",
        "aligned",
    )
    shared: bool = _option(
        "shared",
        "SHARED",
        "Whether another kernel computes the first keys of entries that share them.",
        "shared",
    )
    team: int = field(
        default=0,
        metadata=_about(
            "Warps that share their keys in that kernel; elsewhere 0.",
            _number("TEAM", "Warps that share their keys, or 0.", "team", "team"),
        ),
    )
    tq: bool = _option("tq", "HAS_TQ", "Whether queries have tangents.", "tq")
    tk: bool = _option("tk", "HAS_TK", "Whether keys have tangents.", "tk")
    tv: bool = _option("tv", "HAS_TV", "Whether values have tangents.", "tv")
    tdo: bool = _option("tdo", "HAS_TDO", "Whether gradients of the output have tangents.", "tdo")
    k_codes: Format | None = field(
        default=None,
        metadata=_about(
            "The format of keys that are codes. Where queries are codes, too, all have one format.",
            Flag(
                "KEY_CODES",
                f"The format of keys: -1 numbers, {_CODES}.",
                _format("k_codes"),
                _formats,
                "the format, of keys_ and values_ if they differ",
            ),
        ),
    )
    v_codes: Format | None = field(
        default=None,
        metadata=_about(
            "The format of values that are codes.",
            Flag(
                "VALUE_CODES",
                "The format of values, as of keys.",
                _format("v_codes"),
                shown="as above",
            ),
        ),
    )

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
        parts = ("_".join(filter(None, (symbol(self) for symbol in part))) for part in _SHOWN)
        return "__".join(filter(None, (self.kernel, *parts)))


FLAGS: tuple[Flag, ...] = (
    *(flag for each in fields(Specialisation) for flag in each.metadata["flags"]),
    Flag(
        "EACH_LANE_ARRIVES",
        "Whether each lane arrives at barriers, for tools that look for races.",
        lambda _: EACH_LANE_ARRIVES,
    ),
)
# What symbols show, by parts.
_SHOWN = tuple(
    tuple(flag.symbol for flag in FLAGS if flag.shown and flag.part == part)
    for part in (SIZES, OPTIONS, TILES)
)


def _described() -> str:
    """Return the documentation of the fields."""
    lines = ["", "", "Attributes", "----------"]
    for each in fields(Specialisation):
        lines += [f"{each.name} : {each.type}", f"    {each.metadata['about']}"]
    return "\n    ".join(lines) + "\n    "


Specialisation.__doc__ = (Specialisation.__doc__ or "") + _described()
