"""Which kernels a call needs: they are compiled before it, and call one another by address."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from .accumulate import accumulate_columns, accumulate_product
from .amx import NONE, tile_unit
from .amx_backward import DKDV, DQ
from .amx_forward import FORWARDS
from .amx_gradient import GRADIENTS
from .amx_pack import PACKINGS
from .arguments import FunctionPointers
from .array_mask import mask_by_array
from .backward import backward_dkdv, backward_dq
from .backward_delta import backward_delta
from .backward_lookup import backward_lookup
from .backward_tangent import backward_tangent_dkdv, backward_tangent_dq
from .bias import add_bias
from .bias_gradient import sum_bias_parts
from .checksum import checksum, head_checksums
from .combine import combine
from .decode import decode
from .forward import forward
from .forward_tangent import forward_tangent
from .gradient_tile import fill_gradient_tile
from .hadamard import hadamard
from .jit import Kernel, Report, Wanted, pointer_of, prepare
from .layout import Problem, Programs
from .memory import load_ahead
from .merge import merge
from .microkernel import product
from .narrow import halve_rows, narrow_rows
from .packing import load_columns, store_columns
from .program import Program, run
from .quantize import quantize
from .reduce import reduce_keys, reduce_queries
from .rows_product import PRODUCTS
from .tile import (
    classify_by_both,
    classify_by_program,
    classify_by_ranges,
    draw_dropout,
    mask_by_program,
    mask_by_ranges,
    score_by_program,
)
from .widen import BFLOAT16, FLOAT16, NATIVE, widen_rows

_FLOAT32 = np.dtype(np.float32)
# The same for every accumulator.
_CLASSES = classify_by_program, classify_by_ranges, classify_by_both
_OF_INTEGERS = (*_CLASSES, checksum)


class ByTiles(NamedTuple):
    """The kernels that multiply by tiles of a unit, in place of others.

    Attributes
    ----------
    forward, gradient, dkdv, dq : Kernel
        As `forward.forward`, `gradient_tile.fill_gradient_tile`, `backward.backward_dkdv` and
        `backward.backward_dq`.
    parts : int
        Numbers of bfloat16 whose sum a number of the arrays is.
    """

    forward: Kernel
    gradient: Kernel
    dkdv: Kernel
    dq: Kernel
    parts: int


UNITS = {
    each: ByTiles(FORWARDS[each], GRADIENTS[each], DKDV[each], DQ[each], PACKINGS[each[1]].parts)
    for each in FORWARDS
}
_BY_TILES = tuple(each for unit in UNITS.values() for each in unit[:-1])
_BY_ROWS = tuple(each for products in PRODUCTS.values() for each in products)
_NARROW = {BFLOAT16: narrow_rows, FLOAT16: halve_rows}
KERNELS = (
    forward, backward_delta, backward_dkdv, backward_dq, sum_bias_parts, combine, product,
    accumulate_product, accumulate_columns, load_columns, store_columns, load_ahead, run,
    score_by_program, add_bias, mask_by_array, mask_by_program, mask_by_ranges, draw_dropout,
    fill_gradient_tile, forward_tangent, backward_tangent_dkdv, backward_tangent_dq,
    backward_lookup, decode, merge, widen_rows, quantize, hadamard, narrow_rows, halve_rows,
    fill_gradient_tile, forward_tangent, backward_tangent_dkdv, backward_tangent_dq,
    backward_lookup, decode, merge, widen_rows, quantize, hadamard, narrow_rows, halve_rows,
    reduce_keys, reduce_queries, head_checksums, *_BY_ROWS, *_OF_INTEGERS, *_BY_TILES,
)  # fmt: skip


def called_kernels(
    problem: Problem,
    programs: Programs,
    backward: bool,
    kind: int = NATIVE,
    by_vectors: bool = False,
    changes: tuple[Program, ...] = (),
) -> dict[str, Wanted]:
    """Return the kernels that tiles of scores need, by their fields in `FunctionPointers`.

    `kind` says how the elements of operands are stored. With `by_vectors`, no unit multiplies tiles
    even if there is one. `changes` are more programs that work on tiles.
    """
    number = problem.accumulator
    called: dict[str, Wanted] = {}
    tiles = None if by_vectors else by_tiles(number, kind)
    every = programs.score, programs.slope, *changes
    if kind != NATIVE and (backward or tiles is None):
        called["widen"] = widen_rows, number
    if len(programs.mask.code):
        has_ranges = programs.ranges is not None
        classify = classify_by_both if has_ranges else classify_by_program
        mask = mask_by_array if len(programs.mask.strided) else mask_by_program
        called["run_float32"] = run, _FLOAT32
        called |= {"classify": (classify, _FLOAT32), "mask": (mask, number)}
    elif programs.ranges is not None:
        called |= {"classify": (classify_by_ranges, _FLOAT32), "mask": (mask_by_ranges, number)}
    if any(len(each.code) for each in every):
        called |= {"run_number": (run, number), "score": (score_by_program, number)}
    if any(len(each.strided) for each in every):
        called["bias"] = add_bias, number
    if problem.dropout:
        called["dropout"] = draw_dropout, number
    if backward:
        called["gradient"] = tiles.gradient if tiles else fill_gradient_tile, number
        if tiles is None:
            called["accumulate"] = accumulate_product, number
    return called


def by_tiles(number: np.dtype[Any], kind: int) -> ByTiles | None:
    """Return the kernels for operands whose elements are stored in some way, if tiles multiply."""
    unit = tile_unit() if kind != NATIVE and number == _FLOAT32 else NONE
    return UNITS.get((unit, kind))


def _products(number: np.dtype[Any], kind: int, by_vectors: bool = False) -> dict[str, Wanted]:
    """Return the kernels that work on operands whose elements are stored in some way."""
    found: dict[str, Kernel] = {"prefetch": load_ahead}
    if by_vectors or by_tiles(number, kind) is None:
        found |= {
            "product": product, "columns": accumulate_columns, "load": load_columns,
            "store": store_columns,
        }  # fmt: skip
    if kind != NATIVE and number == _FLOAT32:
        found["narrow"] = _NARROW[kind]
    return {name: (kernel, number) for name, kernel in found.items()}


def conversions(number: np.dtype[Any], kind: int) -> dict[str, Wanted]:
    """Return the kernels that widen and round rows whose elements are stored in some way."""
    if kind == NATIVE:
        return {}
    return {"widen": (widen_rows, number), "narrow": (_NARROW[kind], number)}


def made_ready(
    problem: Problem,
    programs: Programs,
    called: dict[str, Wanted],
    kind: int,
    *kernels: Kernel,
    by_vectors: bool = False,
) -> FunctionPointers:
    """Compile what is missing; return the addresses of the kernels that others call."""
    number = problem.accumulator
    called = {**called, **_products(number, kind, by_vectors)}
    prepare([*called.values(), *((kernel, number) for kernel in kernels)])
    return pointers_to(called)


def pointers_to(called: dict[str, Wanted]) -> FunctionPointers:
    """Return the addresses of kernels that `prepare` has made ready."""
    return FunctionPointers(
        **{
            name: pointer_of(*called[name]) if name in called else 0
            for name in FunctionPointers._fields
        }
    )


def prepare_all(numbers: Iterable[np.dtype[Any]], report: Report | None = None) -> None:
    """Compile every kernel for these accumulators; `report` is as in `jit.prepare`."""
    wanted: list[Wanted] = [(kernel, _FLOAT32) for kernel in (*_OF_INTEGERS, run)]
    others = [kernel for kernel in KERNELS if kernel not in (*_OF_INTEGERS, *_BY_TILES)]
    for number in numbers:
        wanted += [(kernel, number) for kernel in others]
        for kind in NATIVE, BFLOAT16, FLOAT16:
            wanted += _products(number, kind).values()
            tiles = by_tiles(number, kind)
            wanted += [(each, number) for each in tiles[:-1]] if tiles else []
    prepare(wanted, report)
