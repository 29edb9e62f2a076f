"""`explain_cached`: shows from shapes what a call over a cache would run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from ...arrays.integers import integer
from ...arrays.interop import DLPackArray
from ...arrays.typed import CacheDType, DType
from ...arrays.unallocated import unallocated
from ...backends import routes
from ...errors import ArgumentError, ArgumentTypeError
from ...expr.functions import POSITIONS
from ...expr.nodes import Expr, as_expr, rebuild
from ...gpu.kernels import decode
from ...gpu.writer import KernelRoute
from ...masks import Mask
from ...problem import cached as cached_calls
from ...problem.bound_exprs import trees
from ...problem.call import Call, changed
from ...problem.codes import CacheCodes, Forms, types_said
from ...problem.formats import INT4_GROUP, format_of, name_of
from ...problem.keywords import explained
from ...problem.options import Options
from ...scores import Score
from ..analysis import Device
from . import traffic
from .arguments import CACHED, dtype_of, in_host_memory, shape_of
from .assemble import Subject, assembled
from .results import Explanation
from .target import place

_, _H, _I, _ = POSITIONS


@explained
def explain_cached(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...] | None = None,
    lengths: SupportsIndex | DLPackArray | Sequence[int] | None = None,
    *,
    page: SupportsIndex | None = None,
    dtype: DType = None,
    kv_dtype: CacheDType = None,
    shared: SupportsIndex = 0,
    mask: Mask | DLPackArray | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    device: Device | str | None = None,
    compile: bool = True,
) -> Explanation:
    """Say what a call of `attention_cached` would run, and what that costs, without running it.

    Parameters
    ----------
    q : tuple of int
        Shape of the queries: (B, Hq, Lq, D).
    k, v : tuple of int
        Shape of the keys and values in numbers, also if they are codes or in pages: (B, Hkv, S, D)
        and (B, Hkv, S, Dv), with room for S positions of each entry. By default, v is like k. If
        keys have 576 columns and values 512, the values are taken for the first columns of the
        keys, ``k[..., :512]``.
    lengths : int or sequence of int, optional
        How many positions are in use, of each entry or of all. Default: all S.
    page : int, optional
        Positions of a page, if the cache is in pages. S is rounded up to whole pages.
    dtype : dtype or str, optional
        Of the queries, and of keys and values that are not codes. Default: float16.
    kv_dtype : str or dtype_like, optional
        The type of the codes, as in `attention_cached`, if the cache has codes: with a scale for
        each row, or for int4 for each 32 columns. Two types are those of keys and of values, as in
        ("int8", "int4"); None is the type of the queries.
    shared : int
        Positions that all entries share, as in `attention_cached`.
    mask, score_mod : Mask, Score or list of Score, optional
        As in `attention_cached`.
    device, compile
        As in `explain`.

    Returns
    -------
    Explanation
        As by `explain`, for the positions in use. A tile of the kernel for few queries has the
        queries of all heads that share a key head. The traffic has the entries of the table that
        are in use, too. Shared positions are in memory once.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If a shape, a length, the mask or the device is wrong.

    Examples
    --------
    >>> import cupyflash
    >>> made = cupyflash.explain_cached((8, 32, 1, 128), (8, 8, 8192, 128), lengths=5000, page=16,
    ...                                 device="H200", compile=False)
    >>> made.main.block_q, made.main.tiles.visited, made.least.reads["k"]
    (16, 5056, 81920000)
    """
    where = place(device)
    shapes = _shapes(q, k, v)
    options = Options(mask=in_host_memory(mask), score_mod=in_host_memory(score_mod))
    lengths = shapes[1][2] if lengths is None else in_host_memory(lengths)
    stored = dtype_of(dtype, {})
    forms = _forms(kv_dtype, stored)
    call = _call(shapes, stored, lengths, _page(page), forms, options, shared)
    used = [int(n) for n in np.broadcast_to(call.cache.lengths, (call.problem.batch,))]
    if not any(used):
        raise ArgumentError("lengths: got 0 for every entry; expected 1 or more for one of them.")
    route = routes.route(call, where.target)
    shared_keys = route.shared if isinstance(route, KernelRoute) else decode.NOT_SHARED
    longest, main = call.problem.sized(len_k=max(used)), route.main
    allowed, rows = trees(call).allowed, 0
    counted = changed(call, problem=longest)
    if main.part == "decode" or where.target is None:  # a tile has rows of several heads
        counted, allowed = _as_rows(counted, allowed)
        group = longest.heads // longest.heads_kv
        heads, queries = decode.rows_of_task(group, main.block_q)
        rows = min(heads * queries, main.block_q)
    subject = Subject(
        call=counted,
        shapes=shapes,
        axes=call.axes,
        where=where,
        backward=False,
        route=route,
        sizes=traffic.Sizes(counted, used, shared=shared_keys),
        unknown=[],
        entries=_entries(used),
        allowed=allowed,
        rows=rows,
        cache=_words(call, used),
    )
    return assembled(subject, compile)


class _Shapes(NamedTuple):
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]


def _shapes(q: Any, k: Any, v: Any) -> _Shapes:
    v = k if v is None else v
    return _Shapes(*(shape_of(x, name, CACHED) for name, x in (("q", q), ("k", k), ("v", v))))


def _forms(kv_dtype: Any, stored: np.dtype[Any]) -> Forms:
    """Return the formats of keys and of values, None of those of the queries' type."""
    k_form, v_form = (
        None if said is None or name_of(said) == stored.name else format_of(said, "kv_dtype")
        for said in types_said(kv_dtype)
    )
    return k_form, v_form


def _page(value: Any) -> int | None:
    if value is None:
        return None
    page = integer(value)
    if page is None:
        raise ArgumentTypeError(f"page: got {value!r}; expected a number of positions, or None.")
    if page < 1:
        raise ArgumentError(f"page: got {value}; expected 1 or more positions.")
    return page


def _call(
    shapes: _Shapes,
    dtype: np.dtype[Any],
    lengths: Any,
    page: int | None,
    forms: Forms,
    options: Options,
    shared: Any,
) -> Call:
    """Return a call over a cache of such shapes, whose arrays have no elements."""
    batch, _, room, _ = shapes.k
    table, rows = None, (batch, shapes.k[1], room)
    if page is not None:
        pages = -(-room // page)
        # Elements of tables in host memory are checked.
        table = np.broadcast_to(np.int32(0), (shapes.q[0], pages))
        rows = batch * pages, shapes.k[1], page
    made: list[Any] = []
    scales: list[Any] = []
    for name, shape, form in zip("kv", shapes[1:], forms, strict=True):
        n, kind, scale = shape[3], dtype, None
        if form is not None:
            if n % form.packed:
                raise ArgumentError(
                    f"{name}: got {n} columns of {form.name}, two codes in a byte; expected an "
                    "even number."
                )
            groups = n // INT4_GROUP if form.packed > 1 and n % INT4_GROUP == 0 else 1
            scale = np.broadcast_to(np.float32(1), (*rows, groups))
            n, kind = n // form.packed, np.dtype(np.uint8)
        made.append(unallocated((*rows[:1], shape[1], *rows[2:], n), kind))
        scales.append(scale)
    k, v = made
    k_scale, v_scale = scales
    given = CacheCodes(k_scale, v_scale, tuple(form and form.name for form in forms))
    if shapes.v[:3:2] != shapes.k[:3:2]:
        raise ArgumentError(
            f"v: got {shapes.v} with k of {shapes.k}; expected as many entries and positions."
        )
    columns = shapes.k[3], shapes.v[3]
    if forms == (None, None) and columns == decode.COMPRESSED and shapes.v[1] == shapes.k[1]:
        v = k[..., : columns[1]]
    q = unallocated(shapes.q, dtype)
    return cached_calls.call(q, k, v, lengths, table, None, options, given, shared)


def _as_rows(call: Call, allowed: Expr | None) -> tuple[Call, Expr | None]:
    """Return a call whose heads of a group are rows of one head, heads of a query side by side."""
    problem = call.problem
    group = problem.heads // problem.heads_kv
    rows = changed(problem.sized(len_q=group * problem.len_q), heads=problem.heads_kv)
    if allowed is not None and group > 1:
        symbols = {
            "h": _H * group + _I % group,
            "i": _I // group,
            "len_q": as_expr(int(problem.len_q)),
        }
        allowed = rebuild(
            allowed, lambda node: symbols.get(node.value) if node.op == "symbol" else None
        )
    return changed(call, problem=rows), allowed


def _entries(lengths: Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
    """Return the entries of each length but 0, the longest ones first."""
    found: dict[int, list[int]] = {}
    for entry, length in enumerate(lengths):
        found.setdefault(length, []).append(entry)
    return [(tuple(found[length]), length) for length in sorted(found, reverse=True) if length]


def _words(call: Call, lengths: Sequence[int]) -> str:
    cache, least, most = call.cache, min(lengths), max(lengths)
    words = [f"lengths {least:,}" + (f" to {most:,}" if most > least else "")]
    words.append(f"room for {cache.capacity:,}")
    words.append("contiguous" if cache.table is None else f"pages of {cache.page_size:,}")
    if cache.shared:
        words.append(f"the first {cache.shared:,} shared")
    return ", ".join(words + call.encoding.words_of_rows)
