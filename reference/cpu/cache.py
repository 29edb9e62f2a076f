"""Where the keys and values of a cache are, and a leaf of them as rows that products can read.

Position j of batch entry b is row j of its k and v, or a row of page table[b, j // page]. The first
positions, which all entries share, are those of entry 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import intrinsic

from .addresses import address
from .codes import FIRST, INT4, load_codes
from .decode_tasks import LEAF
from .jit import INT, INTS, Kernel, helper
from .layout import places_of
from .memory import LINE, first_address, load, store
from .rows_product import PRODUCTS
from .structs import WORD, Packed, Struct
from .widen import BFLOAT16, FLOAT16, NATIVE, WIDENED, kind_of, widen, widen_several

_NONE = np.empty(0, np.int64)
FAR = 16  # bytes between elements; if there are more, rows are not loaded ahead


class Source(NamedTuple):
    """Keys or values: bytes between their elements along each axis."""

    address: int
    kind: int
    page: int
    head: int
    row: int
    column: int
    columns: int
    in_place: int  # whether products read rows in place
    # Of codes: their scales, bytes between these, and how many columns share one.
    scale: int
    scale_page: int
    scale_head: int
    scale_row: int
    scale_group: int
    group: int


class Cache(NamedTuple):
    """Keys and values, and the table of their pages, or where those of each entry begin."""

    k: Source
    v: Source
    k_places: np.ndarray[Any, Any]  # bytes from the address, (B,) int64; empty with a table
    v_places: np.ndarray[Any, Any]
    page_size: int
    pages: int
    table: int  # address, 0 without a table
    table_itemsize: int
    table_batch: int  # bytes
    table_step: int
    shared: int  # positions


_SOURCE = Struct(Source, (INT,) * len(Source._fields))
CACHE = Struct(Cache, (_SOURCE, _SOURCE, INTS, INTS, *(INT,) * 7))  # the type for kernels


class Scales(NamedTuple):
    """What the codes of an array mean."""

    form: int  # see `quantize`
    array: np.ndarray[Any, Any]  # of float32
    steps: tuple[int, int, int, int]  # bytes between scales of pages, heads, rows and groups


def source_of(array: np.ndarray[Any, Any], lanes: int, scales: Scales | None) -> Source:
    """Describe keys or values, (..., H, rows, D), for vectors of so many numbers."""
    if scales is not None:
        return _source_of_codes(array, lanes, scales)
    kind = kind_of(array.dtype)
    head, row, column = array.strides[-3:]
    columns = array.shape[-1]
    in_place = column == array.itemsize and columns % lanes == 0
    return Source(
        address(array), kind, array.strides[0] if array.ndim > 3 else 0, head, row, column,
        columns, int(in_place), 0, 0, 0, 0, 0, 0,
    )  # fmt: skip


def _source_of_codes(array: np.ndarray[Any, Any], lanes: int, scales: Scales) -> Source:
    kind = FIRST + scales.form
    columns = array.shape[-1] * (2 if kind == INT4 else 1)
    groups = scales.array.shape[-1] if scales.array.ndim else 1
    page, head, row, column = array.strides
    of_page, of_head, of_row, of_group = scales.steps
    group = columns // max(groups, 1)
    in_place = column == 1 and group % lanes == 0 and columns > 0
    return Source(
        address(array), kind, page, head, row, column, columns, int(in_place),
        address(scales.array), of_page, of_head, of_row, of_group, group,
    )  # fmt: skip


def cache_of(
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    table: np.ndarray[Any, Any] | None,
    page_size: int,
    lead: tuple[int, ...],
    lanes: int,
    scales: tuple[Scales | None, Scales | None] | None = None,
    shared: int = 0,
) -> Cache:
    """Describe a cache. Without a table, the leading axes of k and of v broadcast to `lead`."""
    of_k, of_v = scales or (None, None)
    keys, values = source_of(k, lanes, of_k), source_of(v, lanes, of_v)
    if table is None:
        k_places, v_places = (places_of(lead, x.shape[:-3], x.strides[:-3]) for x in (k, v))
        return Cache(keys, values, k_places, v_places, page_size, 0, 0, 0, 0, 0, shared)
    batch, step = table.strides
    place, size = address(table), table.itemsize
    return Cache(
        keys, values, _NONE, _NONE, page_size, k.shape[0], place, size, batch, step, shared
    )  # fmt: skip


class PackedCache:
    """A cache as kernels take it, for any arrays like those that `cache` describes."""

    def __init__(self, cache: Cache) -> None:
        self.packed = Packed(CACHE, cache)

    def reach(
        self, lead: tuple[int, ...], k: np.ndarray[Any, Any], v: np.ndarray[Any, Any]
    ) -> None:
        """Set the strides of keys and values that have another length than the first ones."""
        for place, name, x in ((K_PLACE, "k_places", k), (V_PLACE, "v_places", v)):
            head, row, column = x.strides[-3:]
            strides = [x.strides[0] if x.ndim > 3 else 0, head, row, column]
            self.packed.words[place + _STRIDES : place + _STRIDES + 4] = strides
            if math.prod(lead) > 1:
                places = np.array(places_of(lead, x.shape[:-3], x.strides[:-3]))
                self.packed.change(name, places)

    def move_to(
        self, k: np.ndarray[Any, Any], v: np.ndarray[Any, Any],
        table: np.ndarray[Any, Any] | None, scales: Sequence[np.ndarray[Any, Any] | None] | None,
    ) -> None:  # fmt: skip
        """Set where the arrays are, those of scales too. Who calls this holds them."""
        words = self.packed.words
        words[K_PLACE], words[V_PLACE] = address(k), address(v)
        if table is not None:
            words[_TABLE_PLACE] = address(table)
        for place, of in zip((K_PLACE, V_PLACE), scales or (), strict=False):
            if of is not None:
                words[place + _SCALE_PLACE] = address(of)


# Words of a packed cache that are addresses.
K_PLACE, V_PLACE, _TABLE_PLACE = (CACHE.offsets[name] // WORD for name in ("k", "v", "table"))
_SCALE_PLACE, _STRIDES = (_SOURCE.offsets[name] // WORD for name in ("scale", "page"))


def products_of(cache: Cache) -> tuple[Kernel, Kernel]:
    """Return the kernels that multiply by the cache's keys and by its values."""
    k, v = (each.kind if each.in_place else NATIVE for each in (cache.k, cache.v))
    return PRODUCTS[k].keys, PRODUCTS[v].values


@helper
def lines_of(source):
    """Return how many cache lines a row takes, 0 where its elements lie far apart."""
    elements = source.columns // 2 if source.kind == INT4 else source.columns
    size = elements * source.column if 0 < source.column <= FAR else 0
    return (size + LINE - 1) // LINE


@helper
def groups_of(source):
    """Return how many groups of columns a row has, each of which has a scale if it has codes."""
    return source.columns // source.group if source.in_place and source.group else 1


@helper
def page_of(cache, b, number):
    """Return the page of an entry's positions, held in the range of pages."""
    place = cache.table + b * cache.table_batch + number * cache.table_step
    page = load(place, 0) if cache.table_itemsize == 8 else np.int64(load(place, np.int32(0)))
    return max(min(page, cache.pages - 1), 0)


@helper
def find_rows(cache, b, h, first, keys, at, k_rows, v_rows, k_scales, v_scales):
    """Write the addresses of the rows of positions from `first` on, and of their scales.

    They go to the elements from `at` on, and those of the last row to what is left of a leaf.
    """
    k, v = cache.k, cache.v
    j = 0
    while j < keys:
        row, count, owner = first + j, keys - j, b
        if row < cache.shared:
            owner, count = 0, min(count, cache.shared - row)
        if cache.table == 0:
            page = owner
            k_place, v_place = cache.k_places[owner], cache.v_places[owner]
        else:
            number = row // cache.page_size
            row -= number * cache.page_size
            count = min(count, cache.page_size - row)
            page = page_of(cache, owner, number)
            k_place, v_place = page * k.page, page * v.page
        k_row = k.address + k_place + h * k.head + row * k.row
        v_row = v.address + v_place + h * v.head + row * v.row
        place, j = at + j, j + count
        for n in range(count):
            k_rows[place + n] = k_row + n * k.row
            v_rows[place + n] = v_row + n * v.row
        if k.kind >= FIRST:
            k_scale = k.scale + page * k.scale_page + h * k.scale_head + row * k.scale_row
            for n in range(count):
                k_scales[place + n] = k_scale + n * k.scale_row
        if v.kind >= FIRST:
            v_scale = v.scale + page * v.scale_page + h * v.scale_head + row * v.scale_row
            for n in range(count):
                v_scales[place + n] = v_scale + n * v.scale_row
    if 0 < keys < LEAF:
        last = at + keys - 1
        for n in range(last + 1, at + LEAF):
            k_rows[n], v_rows[n] = k_rows[last], v_rows[last]
            k_scales[n], v_scales[n] = k_scales[last], v_scales[last]


@intrinsic
def move(typingctx, source, target, like):
    """Copy an element of the type of `like`, aligned or not."""

    def codegen(context, builder, sig, args):
        kind = context.get_value_type(sig.args[2]).as_pointer()
        value = builder.load(builder.inttoptr(args[0], kind))
        value.align = 1
        builder.store(value, builder.inttoptr(args[1], kind)).align = 1
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, like), codegen


@helper
def load_rows(source, rows, scales, keys, width, itemsize, tile):
    """Copy rows to `tile`, 0 from their last column to `width`."""
    zero = tile.dtype.type(0)
    bfloat = source.kind == BFLOAT16
    packed = source.kind in (FLOAT16, BFLOAT16) and source.column == 2
    for j in range(keys):
        place, target = rows[j], first_address(tile) + j * width * itemsize
        columns = source.columns
        if source.kind >= FIRST:
            load_codes(source, place, scales[j], itemsize, target, zero)
            columns = 0
        whole = columns // WIDENED * WIDENED if packed else 0
        for d in range(0, whole, WIDENED):
            widen_several(place + 2 * d, bfloat, target + d * itemsize, zero)
        for d in range(whole, columns):
            if source.kind == NATIVE:
                move(place + d * source.column, target + d * itemsize, zero)
            else:
                widen(place + d * source.column, bfloat, target + d * itemsize, zero)
        for d in range(source.columns, width):
            store(target + d * itemsize, zero)
